"""Compute the next item of an iterator in a thread.

    reader -- request --> thread: computes the next item while one is in use -- item --> reader

A generator that waits for its thread when it is closed may be closed by the garbage collector, if it is part of a
cycle, in a thread that holds locks. The thread of a restore needed such a lock, and both waited forever.

An executor of one thread takes 40 us of CPU time for each item instead of 16, and its thread, which is no daemon,
delays the end of a process that dropped an iterator.

Invariant: dropping an iterator waits for nothing; `close` waits for the thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from nearkin_shared.utils.signals import interrupts_wait

Item = TypeVar("Item")


class _End(NamedTuple):
    """The end of the items: the iterable ended, or raised this error."""

    failure: BaseException | None


class _PrefetchQueue(Generic[Item]):
    """The queue between a reader and its thread, which must not refer to the reader.

    Otherwise the reader would never be dropped. It contains at most one item, since one is requested at a time, and the
    end.
    """

    def __init__(self) -> None:
        self.asked: SimpleQueue[bool] = SimpleQueue()
        self.results: SimpleQueue[Item | _End] = SimpleQueue()
        self.ended = threading.Event()


class PrefetchIterator(Generic[Item]):
    """Items that a thread computes, each while the previous one is in use.

    The first `next` starts the thread. One thread reads; any thread may close it.
    """

    def __init__(self, name: str, making: Callable[[], AbstractContextManager[Iterator[Item]]]) -> None:
        """`making` gives the items; it is entered and left on a thread called `name`."""
        self._name = name
        self._making = making
        self._line: _PrefetchQueue[Item] = _PrefetchQueue()
        self._begun_by = 0
        """The process that its thread is in."""
        self._closed = False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._closed:
            raise StopIteration
        try:
            received = self._next()
        except BaseException:
            self.close()
            raise
        if not isinstance(received, _End):
            return received
        self._closed = True
        failure = received.failure
        del received
        if failure is None:
            raise StopIteration
        try:
            raise failure
        finally:
            del failure  # not kept by its own traceback

    def _next(self) -> Item | _End:
        """Return the next result, and request the one after it."""
        if not self._begun_by:
            self._begin()
        elif self._begun_by != os.getpid():
            raise RuntimeError("an iteration that began before a fork can be continued only by its own process")
        result = self._line.results.get()
        if self._closed:
            raise RuntimeError("the iterator was closed during the iteration")
        if not isinstance(result, _End):
            self._line.asked.put(True)
        return result

    def _begin(self) -> None:
        self._line.asked.put(True)
        thread = threading.Thread(target=_make, args=(self._making, self._line), name=self._name, daemon=True)
        with interrupts_wait():
            thread.start()
            self._begun_by = os.getpid()

    def close(self) -> None:
        """Make no more, and wait for what is being made; again is fine."""
        self._closed = True
        if self._begun_by == os.getpid():
            self._line.asked.put(False)
            self._line.ended.wait()

    def __del__(self) -> None:
        """Stop the thread without waiting, because this may run in any thread.

        It takes no lock (SimpleQueue is made for that).
        """
        self._line.asked.put(False)


def _make(making: Callable[[], AbstractContextManager[Iterator[Item]]], line: _PrefetchQueue[Item]) -> None:
    failure: BaseException | None = None
    try:
        _run_producer(making, line)
    except BaseException as err:
        failure = err
    line.results.put(_End(failure))
    del failure
    line.ended.set()


def _run_producer(making: Callable[[], AbstractContextManager[Iterator[Item]]], line: _PrefetchQueue[Item]) -> None:
    with making() as items:
        if line.asked.get():
            for item in items:
                line.results.put(item)
                del item  # it is the reader's now, and goes with it
                if not line.asked.get():
                    return
