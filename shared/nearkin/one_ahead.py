"""One item ahead. Invariant: who drops it half-way waits for nothing, so that anybody may; who closes it waits.

reader -- asks --> thread: makes the next item while one is out -- tells --> reader

A generator that waits for its thread as it is closed is closed by whoever collects garbage, where it is part of a
cycle: with whatever locks that thread holds. A restore's thread wanted one of them, and both waited for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from nearkin.interrupts import interrupts_wait

Item = TypeVar("Item")


class _End(NamedTuple):
    """Nothing more comes: all was told, or this is why."""

    failure: BaseException | None


class OneAhead(Generic[Item]):
    """Items that a thread makes, each while the one before is out. For one reader; begun by its first `next`."""

    def __init__(self, name: str, making: Callable[[], AbstractContextManager[Iterator[Item]]]) -> None:
        """`making` gives the items; it is entered and left on a thread called `name`."""
        self._name = name
        self._making = making
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._told: SimpleQueue[Item | _End] = SimpleQueue()
        self._begun = self._over = False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._over:
            raise StopIteration
        try:
            if not self._begun:
                self._begin()
            told = self._told.get()
            if not isinstance(told, _End):
                self._asked.put(True)
                return told
        except BaseException:
            self.close()
            raise
        self._over = True
        failure = told.failure
        del told
        if failure is None:
            raise StopIteration
        try:
            raise failure
        finally:
            del failure  # not kept by its own traceback

    def _begin(self) -> None:
        self._asked.put(True)
        thread = threading.Thread(
            target=_make, args=(self._making, self._asked, self._told), name=self._name, daemon=True
        )
        with interrupts_wait():
            thread.start()
            self._begun = True

    def close(self) -> None:
        """Make no more, and wait for what is being made; again is fine."""
        if self._over:
            return
        self._over = True
        if self._begun:
            self._asked.put(False)
            while not isinstance(self._told.get(), _End):
                pass

    def __del__(self) -> None:
        """Make no more. This may run anywhere: it takes no lock (SimpleQueue is made for that), and waits for none."""
        if self._begun and not self._over:
            self._asked.put(False)


def _make(
    making: Callable[[], AbstractContextManager[Iterator[Item]]],
    asked: SimpleQueue[bool],
    told: SimpleQueue[Item | _End],
) -> None:
    failure: BaseException | None = None
    try:
        with making() as items:
            if asked.get():
                for item in items:
                    told.put(item)
                    del item  # it is the reader's now, and goes with it
                    if not asked.get():
                        break
    except BaseException as err:
        failure = err
    told.put(_End(failure))
    del failure
