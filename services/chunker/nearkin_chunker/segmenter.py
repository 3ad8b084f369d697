"""Segmenter. Invariant: a segment ends where the fingerprints say so, never above its bound in bytes.

A segment ends after a chunk whose fingerprint's first two bytes, read little-endian, have their low bits zero (1 in
`target_chunks`, at most 1024), so that an insertion moves only the boundaries near it; zero chunks never end one, or a
hole would fall into one-chunk segments.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.types import U8, U32, Bools


def segment_bounds(names: U8, lengths: U32, zero: Bools, target_chunks: int, bytes_max: int, final: bool) -> U32:
    """Return uint32[s + 1] chunk bounds, from 0. Without `final`, chunks after the last bound are not yet decided."""
    count = len(lengths)
    low = names[:, 0].astype(np.uint32) | (names[:, 1].astype(np.uint32) << 8)
    ends = np.flatnonzero(((low & np.uint32(target_chunks - 1)) == 0) & ~zero) + 1
    reached = np.cumsum(lengths, dtype=np.int64)
    if count:  # mostly no segment meets its bound, and the ends are just those that the fingerprints say
        last = [count] if not len(ends) or ends[-1] < count else []
        all_ends = np.append(ends, last).astype(np.intp)
        if np.diff(reached[all_ends - 1], prepend=0).max() <= bytes_max:
            return np.append(np.uint32(0), all_ends if final else ends).astype(np.uint32)
    bounds = [0]
    candidate = 0
    while bounds[-1] < count:
        start = bounds[-1]
        base = int(reached[start - 1]) if start else 0
        # The first chunk that would not fit any more: one step a segment, not a chunk.
        full = int(np.searchsorted(reached, base + bytes_max, side="right"))
        candidate = int(np.searchsorted(ends, start, side="right"))
        natural = int(ends[candidate]) if candidate < len(ends) else count + 1
        if natural <= full:
            bounds.append(natural)
        elif full < count:
            bounds.append(full)
        elif final:
            bounds.append(count)
        else:
            break
    return np.array(bounds, np.uint32)
