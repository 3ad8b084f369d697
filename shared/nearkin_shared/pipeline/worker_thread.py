"""One thread, one bounded queue. Invariant: after the first failure nothing more is done, and whoever waits is told.

    Worker    on a thread of its own        Direct    on the caller's

The queue is made of SimpleQueues, whose every step is one call into C: an interrupt (Ctrl-C, SIGTERM) lands before or
after it. queue.Queue, interrupted twice in a put, could lose a wake-up, and the end of the put then hung for ever. Nor
is the thread asked whether it lives: an interrupt that falls into `is_alive` or `join` has Python up to 3.12 take a
thread for ended that goes on, and the next put would have begun beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.observability import counters

Item = TypeVar("Item")

LOOK_SECONDS = 1.0
"""So often who waits for a worker looks whether it is over."""


class InlineWorker(Generic[Item]):
    """Carries out each item before `put` returns."""

    def __init__(self, carry_out: Callable[[Item], None]) -> None:
        self._carry_out = carry_out
        self._failure: BaseException | None = None

    def put(self, item: Item) -> None:
        """Carry out an item. Raises what it fails with, or an earlier one failed with."""
        self.drain()
        try:
            self._carry_out(item)
        except BaseException as err:
            self._failure = err
            raise

    add = put

    def drain(self) -> None:
        """Raise what an item failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Take no more items."""
        self._carry_out = _raise_stopped

    def cancel(self) -> None:
        """Take no more items."""
        if self._failure is None:
            self._failure = _raise_ended()
        self.stop()


@dataclass(frozen=True, slots=True)
class _UnboundedItem(Generic[Item]):
    """An item that takes no room."""

    item: Item


class _Mark:
    """Stands in the queue behind the items that somebody waits for."""

    def __init__(self) -> None:
        self.reached: SimpleQueue[None] = SimpleQueue()


class Worker(Generic[Item]):
    """Carries out items in order on a thread of its own; `items_max` wait at most besides the one being done.

    With 0 of them an item is handed over once the one before it is done.
    """

    def __init__(self, name: str, carry_out: Callable[[Item], None], items_max: int, *, in_turn: bool = False) -> None:
        """`in_turn`: `put` returns when the item is done: on one core a caller that goes on only gets in the way.

        It still is another thread. A Ctrl-C lands in the caller's, which waits, and never in the midst of an item.
        """
        self._name = name
        self._serialize = in_turn
        self._carry_out = carry_out
        self._items: SimpleQueue[Item | _UnboundedItem[Item] | _Mark | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._makes_room_first = items_max > 0
        for _ in range(max(1, items_max)):
            self._room.put(None)
        self._failure: BaseException | None = None
        self._over = False
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"nearkin-{name}", daemon=True)
        QUEUED.watch(self, name)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item, waiting for room, or for its end. Raises what an earlier item failed with, or this one."""
        self.check()
        self._room.get()
        self._items.put(item)
        if self._serialize:
            self.drain()

    def add(self, item: Item) -> None:
        """Queue an item that takes no room: a part of one that will be put. Raises what an earlier one failed with."""
        self.check()
        self._items.put(_UnboundedItem(item))

    @property
    def waiting(self) -> int:
        """Return about how many items wait."""
        return self._items.qsize()

    def check(self) -> None:
        """Raise what an item failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until all queued items are done. Raises what one failed with."""
        if not self._over:
            mark = _Mark()
            self._items.put(mark)
            self._wait(mark.reached)
        self.check()

    def stop(self) -> None:
        """Let queued items finish (or be dropped after a failure) and end the thread; again ends what was cut short."""
        if not self._over:
            self._items.put(None)
            self._wait(self._ended)
        self._thread.join()  # it has nothing more to do
        QUEUED.leave(self, self._name)
        # What carries items out owns this worker: without the cycle its buffers go now, not at some later collection.
        self._carry_out = _raise_stopped

    def cancel(self) -> None:
        """Drop what is queued and end the thread."""
        if self._failure is None:
            self._failure = _raise_ended()
        self.stop()

    def _wait(self, told: SimpleQueue[None]) -> None:
        """Wait until something is told, or the thread's work is over: another may have been told of that."""
        while not self._over:
            with suppress(Empty):
                told.get(timeout=LOOK_SECONDS)
                return

    def _run(self) -> None:
        try:
            self._carry_out_all()
        finally:
            self._over = True
            self._ended.put(None)

    def _carry_out_all(self) -> None:
        while True:
            item = self._items.get()
            if item is None:
                return
            if isinstance(item, _Mark):
                item.reached.put(None)
                continue
            takes_room = not isinstance(item, _UnboundedItem)
            if takes_room and self._makes_room_first:
                self._room.put(None)
            try:
                if self._failure is None:
                    self._carry_out(item.item if isinstance(item, _UnboundedItem) else item)
            except BaseException as err:
                self._failure = err
            finally:
                item = None
                if takes_room and not self._makes_room_first:
                    self._room.put(None)


QUEUED: counters.Gauge[Worker[Any]] = counters.level(
    "nearkin_queue_items", "What waits between two threads.", "queue", lambda worker: worker.waiting
)


def _raise_ended() -> StoreUnavailable:
    return StoreUnavailable("the put was ended before it was committed: put it again")


def _raise_stopped(_item: object) -> None:
    raise RuntimeError("this worker has stopped")
