"""Read contents of a tree in ascending ranges as one stream.

    next range close behind the last one -> read on, over what is not wanted        else -> open the stream again there

A restore reads the contents of all files so, each of which would cost a look-up of its chunks if it was read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

from nearkin_shared.errors import StoreUnavailable

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

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop). Raises Corrupt, StoreUnavailable."""
        if self._pieces is None or not self._position <= start <= self._position + len(self._piece) + SKIP_BYTES_MAX:
            self.close()
            self._pieces, self._position = iter(self._open_range(start, self.stop)), start
        while start < stop:
            if self._position + len(self._piece) <= start:
                self._position += len(self._piece)
                piece = next(self._pieces, None)
                if piece is None:
                    raise StoreUnavailable(f"contents end at byte {self._position}, {stop} are needed; try again")
                self._piece = piece
                continue
            first = start - self._position
            part = self._piece[first : first + stop - start]
            yield part
            start += len(part)

    def close(self) -> None:
        """End the stream."""
        pieces, self._pieces, self._piece = self._pieces, None, memoryview(b"")
        if isinstance(pieces, ClosableIterator):
            pieces.close()
