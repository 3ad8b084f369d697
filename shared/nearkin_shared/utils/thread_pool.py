"""Compute parts of a result in several threads.

    parts -> the caller's thread and free threads of an executor take one after another -> results, in order

For kernels that release the GIL. The division among threads depends on which of them are free, the result only on the
parts.

`Executor.map` leaves the caller's core idle, so that it needs one thread more (each has a decoder and memory for
bases), and waits for ever if all threads run tasks that call it. The CPU time is the same: 5.6 ms for 8 MiB of BLAKE3.

Invariant: the result is the one that a single thread would compute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.limits import MIB
from nearkin_shared.types import U32

Part = TypeVar("Part")
Answer = TypeVar("Answer")

PART_BYTES = MIB
"""So much a part has: half a millisecond of work and more, for 30 us that it takes to hand it over."""

THREADS_MAX = 4
"""Threads of one restore, or one scan of a store: each has a decoder, and memory for bases."""


def cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadPool:
    """Threads that take parts in addition to the caller's thread.

    Safe between threads, except `on_other_cores` and `begin`: only the thread that started the others may call these.
    """

    def __init__(self, threads: Executor | None = None, count: int = 1) -> None:
        """Of `threads` `count` are asked, on as many cores; without any the caller does all."""
        self._threads = threads
        self._count = count
        self._begun: list[Future[Any]] = []

    @contextmanager
    def on_other_cores(self, name: str, most: int) -> Iterator[None]:
        """Start threads for the duration of the block: one for each other core, up to `most`.

        Their names are `name` and a number. Work that was begun and not waited for is cancelled at the end of the
        block.
        """
        count = min(cores() - 1, most)
        if count < 1:
            yield
            return
        threads = ThreadPoolExecutor(count, name)
        self._threads, self._count = threads, count + 1
        try:
            yield
        finally:
            self._threads, self._count = None, 1
            threads.shutdown(cancel_futures=True)

    @property
    def is_serial(self) -> bool:
        """Return whether the caller does all."""
        return self._threads is None

    def parts(self, lengths: U32 | NDArray[np.int64]) -> list[slice]:
        """Return slices of rows for `map`: of PART_BYTES each, or one slice without threads.

        A call validates all its arguments: `shared_bytes` with 100 buffers takes 47 us for 2 rows, 57 for 128 and 130
        for
        1,280, a sketch 8, 9 and 14.
        """
        return [slice(0, len(lengths))] if self._threads is None else parts_of(lengths)

    def run_on_all(self, work: Callable[[], None]) -> None:
        """Call `work` here and in free threads, once per core: each takes the tasks that remain.

        Raises an error that one of these calls raised.
        """
        self.map(lambda _hand: work(), range(self._count))

    def begin(self, work: Callable[[], Answer]) -> Callable[[], Answer]:
        """Begin a piece of work; return a function that waits for its result or error.

        The caller executes it at once if as many are begun as there are cores: the others each have one, and one waits.
        """
        self._begun = [one for one in self._begun if not one.done()]
        if self._threads is not None and len(self._begun) < self._count:
            future, task = Future[Answer](), [work]
            self._begun.append(future)
            with suppress(RuntimeError):  # no thread is to be had
                self._threads.submit(_help, task, future)
                return future.result
            if not future.cancel():
                return future.result
            task.clear()
        answer = work()
        return lambda: answer

    def map(self, work: Callable[[Part], Answer], parts: Sequence[Part]) -> list[Answer]:
        """Return work(part) for each part; after an error no further part is begun.

        Raises an error that one of them raised.
        """
        if self._threads is None or len(parts) < 2:
            return [work(part) for part in parts]
        found: dict[int, Answer] = {}
        left = iter(range(len(parts)))  # next() of a range iterator is atomic: no other thread gets the same number

        def take() -> None:
            try:
                while (number := next(left, None)) is not None:
                    found[number] = work(parts[number])
            except BaseException:
                for _ in left:  # the others find none
                    pass
                raise

        helping: list[Future[None]] = []
        task = [take]
        try:
            with suppress(RuntimeError):  # no thread is to be had: those that are there do it all
                for _ in range(min(self._count, len(parts) - 1)):
                    helping.append(Future())
                    self._threads.submit(_help, task, helping[-1])
            take()
        finally:
            failures = [one.exception() for one in helping if not one.cancel()]
            task.clear()
        for failure in failures:
            if failure is not None:
                raise failure
        return [found[number] for number in range(len(parts))]


def _help(task: list[Callable[[], Answer]], future: Future[Answer]) -> None:
    """Execute a task, unless its future was cancelled.

    An executor that cannot start a thread raises, but keeps the task: an existing thread may still begin it at any
    time, or
    none ever does, so that the executor's error does not settle it.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = task[0]()
    except BaseException as err:
        future.set_exception(err)
    else:
        future.set_result(answer)


SERIAL = ThreadPool()
"""Runs everything in the caller's thread."""


@contextmanager
def all_cores(name: str) -> Iterator[ThreadPool]:
    """Start threads for the duration of the block: one a core, up to THREADS_MAX.

    They are named `name`; on one core none is started.
    """
    count = min(cores(), THREADS_MAX)
    if count < 2:
        yield SERIAL
        return
    with ThreadPoolExecutor(count, name) as threads:
        yield ThreadPool(threads, count)


def parts_of(lengths: U32 | NDArray[np.int64], part_bytes: int = PART_BYTES) -> list[slice]:
    """Return slices of rows with about `part_bytes` each; at least one slice."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total_bytes = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(part_bytes, total_bytes, part_bytes)) + 1
    bounds = sorted({0, *cuts.tolist(), len(lengths)})  # np.unique alone imports numpy.ma, 10 ms of a process
    return [slice(first, last) for first, last in pairwise(bounds)] or [slice(0, 0)]
