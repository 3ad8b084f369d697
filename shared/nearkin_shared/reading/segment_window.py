"""Read many ascending ranges of a version.

    range -> first of its segment? -> read      further ones of the segment -> its rest is read at once, and held

To open a range costs as much as to read a segment: half a million files that changed between unchanged ones would
keep a gateway busy for an hour otherwise.

Invariant: a segment is read at most twice for ranges that lie within it, and at most one is held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.reading.chunk_ranges import ChunkRanges, FindChunks

if TYPE_CHECKING:
    from nearkin_shared.formats.manifest import Manifest


class SegmentWindow:
    """The ranges of one version, read one after the other. Not to be shared between threads."""

    def __init__(self, manifest: Manifest, read: Callable[[int, int], bytes], find: FindChunks | None = None) -> None:
        """`read`: returns bytes [start, stop) of the version, verified; `find`: its chunks."""
        self.chunks = None if find is None else ChunkRanges(find, manifest.size_bytes)
        lengths = manifest.lengths
        self.ends: list[int] = [0] if lengths is None else [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        """0 and the ends of the segments; 0 alone where these are not known."""
        self._size_bytes = manifest.size_bytes
        self._read = read
        self._stop = 0
        """Of the last range."""
        self._held_start = 0
        self._held = b""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop), which are not before those of the last call.

        Raises what `read` raises.
        """
        first = start - self._held_start
        if first < 0 or stop > self._held_start + len(self._held):
            self._held = self._read(start, max(stop, self._further_stop(start)))
            self._held_start, first = start, 0
        self._stop = stop
        found = memoryview(self._held)[first : first + stop - start]
        if stop >= self._held_start + len(self._held):  # none of it is asked for again
            self._held_start, self._held = stop, b""
        return found

    def _further_stop(self, start: int) -> int:
        """Return where to read up to: the end of the segment, if a range before was of it as well."""
        number = bisect_right(self.ends, start)
        segment_start = self.ends[number - 1]
        segment_stop = self.ends[number] if number < len(self.ends) else self._size_bytes
        return min(segment_stop, start + SEGMENT_BYTES_MAX) if self._stop > segment_start else 0
