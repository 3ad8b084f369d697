"""Find the whole chunks of many ascending ranges of a version.

Their bytes need not be read.

    range -> chunks that begin and end within it, in runs; the bytes before, between and behind them are the caller's

A plan of many chunks takes little longer than one of a few: those of the next WINDOW_BYTES are found together.

Invariant: a chunk that is returned lies within the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.limits import MIB
from nearkin_shared.types import NAME_BYTES, Locations, StoredChunks

WINDOW_BYTES = 16 * MIB


class PlacedChunks(NamedTuple):
    """Stored chunks of a version, without those of zeros; `starts` int64[n], bytes, ascending."""

    starts: NDArray[np.int64]
    chunks: StoredChunks


FindChunks = Callable[[int, int], Iterator[PlacedChunks]]
"""Returns the chunks with bytes [start, stop) of a version. Raises Corrupt, StoreUnavailable."""
_NO_CHUNKS = PlacedChunks(
    np.zeros(0, np.int64),
    StoredChunks(np.zeros((0, NAME_BYTES), np.uint8), np.zeros(0, np.uint32), Locations.empty(0)),
)


class ChunkRanges:
    """The chunks of one version. Not to be shared between threads."""

    def __init__(self, find: FindChunks, size_bytes: int) -> None:
        """`size_bytes`: of the version."""
        self._find = find
        self._size_bytes = size_bytes
        self._start = self._stop = 0
        """Bytes of the version whose chunks are held."""
        self._starts, self._chunks = _NO_CHUNKS
        self._ends = self._starts

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, StoredChunks]]:
        """Yield runs of consecutive chunks within [start, stop), and where each begins and ends.

        Raises as `find` does.
        """
        if start < self._start or stop > self._stop:
            self._hold(start, min(self._size_bytes, max(stop, start + WINDOW_BYTES)))
        first = int(np.searchsorted(self._starts, start))
        last = int(np.searchsorted(self._ends, stop, side="right"))
        if last <= first:
            return
        gaps = np.flatnonzero(self._starts[first + 1 : last] != self._ends[first : last - 1]) + first + 1
        for begin, end in pairwise([first, *gaps.tolist(), last]):
            yield int(self._starts[begin]), int(self._ends[end - 1]), self._chunks.take(slice(begin, end))

    def _hold(self, start: int, stop: int) -> None:
        placed = list(self._find(start, stop)) or [_NO_CHUNKS]
        self._starts = np.concatenate([part.starts for part in placed])
        self._chunks = StoredChunks.join([part.chunks for part in placed])
        self._ends = self._starts + self._chunks.lengths
        self._start, self._stop = start, stop
