# size: one data structure
"""Serve queues by round robin, so that a long one delays no other.

    a: 1 2 3 4    b: 5    ->    1 5 2 3 4

A queue that had been empty is served first: an item that is alone waits for no more than the one in work. Then it is
served after all others, also if it is empty by then, so queues that are filled again and again hold back no other.

Invariant: the items of one queue are taken in the order in which they were added.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
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

    def has_any(self, may_take: Callable[[Item], bool]) -> bool:
        """Return whether `take` finds an item."""
        return any(queue and may_take(queue[0]) for queue in self._queues.values())

    def take(self, may_take: Callable[[Item], bool] = lambda _: True) -> tuple[Key, Item]:
        """Remove and return the first item of the queue that is next.

        Queues whose first item must not be taken stay next. Raises KeyError if there is none.
        """
        empty: list[Key] = []
        for key, queue in self._queues.items():
            if not queue:
                empty.append(key)
            elif may_take(queue[0]):
                break
        else:
            raise KeyError("no item may be taken")
        for other in empty:
            del self._queues[other]
        self._queues.move_to_end(key)
        self._count -= 1
        return key, queue.popleft()
