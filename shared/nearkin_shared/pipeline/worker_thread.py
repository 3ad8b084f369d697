"""Worker thread with a bounded queue.

Invariant: after the first failure no further item is executed, and every waiting caller is notified.

    Worker         executes items on a thread of its own
    InlineWorker   executes items on the caller's thread

The queue consists of SimpleQueues, whose every operation is one call into C: an interrupt (Ctrl-C, SIGTERM) arrives
before or after it. queue.Queue, interrupted twice in a put, could lose a wake-up, and the end of the put then hung for
ever. Thread liveness is not used either: an interrupt inside `is_alive` or `join` makes Python up to 3.12 take a
running thread for ended, and the next put would have started concurrently with it.

An executor of one thread and a semaphore take 27 us of CPU time for each item instead of 8, and a wait for a Future
uses the same locks as queue.Queue.
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
"""Interval at which a waiting caller checks whether the worker has ended."""


class InlineWorker(Generic[Item]):
    """Worker that executes each item before `put` returns."""

    def __init__(self, execute: Callable[[Item], None]) -> None:
        self._execute = execute
        self._failure: BaseException | None = None

    def put(self, item: Item) -> None:
        """Execute an item.

        Raises: the item's failure, or that of an earlier item.
        """
        self.drain()
        try:
            self._execute(item)
        except BaseException as err:
            self._failure = err
            raise

    add = put

    def drain(self) -> None:
        """Raise the failure of an earlier item, if any."""
        if self._failure is not None:
            raise self._failure

    check = drain

    def stop(self) -> None:
        """Refuse further items."""
        self._execute = _raise_stopped

    def cancel(self) -> None:
        """Refuse further items and fail the put."""
        if self._failure is None:
            self._failure = _cancelled()
        self.stop()


@dataclass(frozen=True, slots=True)
class _UnboundedItem(Generic[Item]):
    """Queue item that does not count against the bound."""

    item: Item


class _Mark:
    """Marker that a waiting caller puts into the queue behind its items."""

    def __init__(self) -> None:
        self.reached: SimpleQueue[None] = SimpleQueue()


class Worker(Generic[Item]):
    """Worker that executes items in order on its own thread; at most `items_max` items wait.

    With `items_max` 0 an item is accepted once the previous one has been executed.
    """

    def __init__(self, name: str, execute: Callable[[Item], None], items_max: int, *, serial: bool = False) -> None:
        """Start the thread.

        `serial`: `put` returns after the item was executed; on one core a caller that continues only competes for it.
        Items still run on another thread, so that Ctrl-C interrupts the waiting caller and never an item.
        """
        self._name = name
        self._serialize = serial
        self._execute = execute
        self._items: SimpleQueue[Item | _UnboundedItem[Item] | _Mark | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._frees_slot_early = items_max > 0
        for _ in range(max(1, items_max)):
            self._room.put(None)
        self._failure: BaseException | None = None
        self._over = False
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"nearkin-{name}", daemon=True)
        QUEUED.watch(self, name)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item; wait for room, or for its execution if serial.

        Raises: the failure of an earlier item, or of this one.
        """
        self.check()
        self._room.get()
        self._items.put(item)
        if self._serialize:
            self.drain()

    def add(self, item: Item) -> None:
        """Queue an item that takes no room: part of an item that will be put.

        Raises: the failure of an earlier item.
        """
        self.check()
        self._items.put(_UnboundedItem(item))

    @property
    def waiting(self) -> int:
        """Return the approximate number of queued items."""
        return self._items.qsize()

    def check(self) -> None:
        """Raise the failure of an item, if any."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until all queued items are executed. Raises the failure of one."""
        if not self._over:
            mark = _Mark()
            self._items.put(mark)
            self._wait(mark.reached)
        self.check()

    def stop(self) -> None:
        """Execute the queued items (or drop them after a failure) and end the thread.

        May be called again after an interrupt.
        """
        if not self._over:
            self._items.put(None)
            self._wait(self._ended)
        self._thread.join()  # the thread has no work left
        QUEUED.leave(self, self._name)
        # The callable usually owns this worker: breaking the cycle frees its buffers now, not at a later collection.
        self._execute = _raise_stopped

    def cancel(self) -> None:
        """Drop the queued items and end the thread."""
        if self._failure is None:
            self._failure = _cancelled()
        self.stop()

    def _wait(self, signal: SimpleQueue[None]) -> None:
        """Wait for a signal or the end of the thread: a signal may have reached another waiter."""
        while not self._over:
            with suppress(Empty):
                signal.get(timeout=LOOK_SECONDS)
                return

    def _run(self) -> None:
        try:
            self._execute_all()
        finally:
            self._over = True
            self._ended.put(None)

    def _execute_all(self) -> None:
        while True:
            item = self._items.get()
            if item is None:
                return
            if isinstance(item, _Mark):
                item.reached.put(None)
                continue
            needs_slot = not isinstance(item, _UnboundedItem)
            if needs_slot and self._frees_slot_early:
                self._room.put(None)
            try:
                if self._failure is None:
                    self._execute(item.item if isinstance(item, _UnboundedItem) else item)
            except BaseException as err:
                self._failure = err
            finally:
                item = None
                if needs_slot and not self._frees_slot_early:
                    self._room.put(None)


QUEUED: counters.Gauge[Worker[Any]] = counters.level(
    "nearkin_queue_items", "Items queued between two threads.", "queue", lambda worker: worker.waiting
)


def _cancelled() -> StoreUnavailable:
    return StoreUnavailable("put cancelled before commit; retry")


def _raise_stopped(_item: object) -> None:
    raise RuntimeError("this worker has stopped")
