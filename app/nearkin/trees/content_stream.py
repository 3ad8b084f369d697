"""Read contents of a tree in ascending ranges as one stream.

    next range close behind the last one -> read on, over what is not wanted        else -> open the stream again there
    damage, maybe of another range       -> read the rest of the range alone         damage again -> it is its own

A restore reads the contents of all files so, each of which would cost a look-up of its chunks if it was read alone.

Invariant: a range raises Corrupt only for damage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

from nearkin_shared.errors import Corrupt, StoreUnavailable

SKIP_BYTES_MAX = 4 << 20
"""Contents that are not wanted are read over up to here; beyond, the stream is opened again."""


@runtime_checkable
class ClosableIterator(Protocol):
    """An iterator that a caller who stops early closes."""

    def close(self) -> None:
        """End the reading."""


class ContentStream:
    """Reads ascending ranges of contents as one stream where they are close together."""

    def __init__(self, open_range: Callable[[int, int], Iterable[memoryview]], stop: int) -> None:
        """`stop`: end of all contents."""
        self._open_range = open_range
        self.stop = stop
        self._pieces: Iterator[memoryview] | None = None
        self._piece = memoryview(b"")
        self._position = 0
        self._opened = (0, 0)
        """The range that is open."""

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop). Raises Corrupt, StoreUnavailable."""
        is_near = self._position <= start <= self._position + len(self._piece) + SKIP_BYTES_MAX
        if self._pieces is None or not is_near or stop > self._opened[1]:
            self._open(start, self.stop)
        position = start
        while position < stop:
            if self._position + len(self._piece) <= position:
                self._read_piece(start, position, stop)
                continue
            first = position - self._position
            part = self._piece[first : first + stop - position]
            yield part
            position += len(part)

    def _read_piece(self, start: int, position: int, stop: int) -> None:
        """Read the next piece; after damage elsewhere, open the rest of the range alone.

        The range is [start, stop), of which the bytes before `position` were yielded.
        """
        assert self._pieces is not None  # open in `read`
        self._position, self._piece = self._position + len(self._piece), memoryview(b"")
        try:
            piece = next(self._pieces, None)
        except Corrupt:
            if self._opened[0] >= start and self._opened[1] == stop:
                raise
            self._open(position, stop)
            return
        if piece is None:
            raise StoreUnavailable(f"contents end at byte {self._position}, {stop} are needed; try again")
        self._piece = piece

    def _open(self, start: int, stop: int) -> None:
        self.close()
        self._pieces, self._position, self._opened = iter(self._open_range(start, stop)), start, (start, stop)

    def close(self) -> None:
        """End the stream."""
        pieces, self._pieces, self._piece = self._pieces, None, memoryview(b"")
        if isinstance(pieces, ClosableIterator):
            pieces.close()
