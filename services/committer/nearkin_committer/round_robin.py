# size: one data structure
"""Serve queues by round robin, so that a long one delays no other.

    a: 1 2 3 4    b: 5    ->    1 5 2 3 4

A queue that had been empty is served first: an item that is alone waits for no more than the one in work. Then it is
served after all others, also if it is empty by then, so queues that are filled again and again hold back no other.

Invariant: the items of one queue are taken in the order in which they were added.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class RoundRobin(Generic[Key, Item]):
    """Queues by key. Not thread-safe."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Key, deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: Key, item: Item) -> None:
        """Append an item to its queue."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            self._queues.move_to_end(key, last=False)
        queue.append(item)
        self._count += 1

    def take(self) -> tuple[Key, Item]:
        """Remove and return the first item of the queue that is next.

        Raises KeyError if there is none.
        """
        while True:
            key, queue = self._queues.popitem(last=False)
            if queue:
                break
        self._queues[key] = queue
        self._count -= 1
        return key, queue.popleft()
