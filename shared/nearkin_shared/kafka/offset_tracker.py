# size: one data structure without Kafka
"""Track which offsets of a partition are processed.

Invariant (I4): the committable offset is before every record that is not processed.
"""

from __future__ import annotations

from collections import deque


class PartitionOffsets:
    """Which records of one partition are done, in whatever order they end."""

    def __init__(self) -> None:
        self._open: deque[int] = deque()
        self._done: set[int] = set()
        self._next: int | None = None

    def start(self, offset: int) -> None:
        """Record the start of work on a record; a repeated offset starts again from there.

        Records start in order.
        """
        while self._open and self._open[-1] >= offset:
            self._done.discard(self._open.pop())
        self._open.append(offset)
        self._next = offset + 1

    def finish(self, offset: int) -> None:
        """Say that a record's effects are durable."""
        self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.discard(self._open.popleft())

    @property
    def committable(self) -> int | None:
        """Return the first offset still needed, or the next one; None before the first record."""
        return self._open[0] if self._open else self._next

    @property
    def following(self) -> int | None:
        """Return the offset behind the last record that was taken; None before the first."""
        return self._next

    @property
    def pending(self) -> int:
        """Return how many records are held up."""
        return len(self._open)
