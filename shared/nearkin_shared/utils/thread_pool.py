"""Parts of one question, answered side by side. Invariant: the answers are those that one thread alone would give.

    parts -> the caller's thread and those of an executor that are free take one after another -> answers, in order

For kernels without the GIL: how the parts are shared out follows from who is free, what comes out from the parts alone.
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
"""Of one restore, or one look through a store: each has a decoder, and room for what a block leans on."""


def cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadPool:
    """Threads that take parts beside the caller's, whichever of them are free.

    Safe between threads, but for `on_other_cores` and `begin`: those are for the one thread that has the others.
    """

    def __init__(self, threads: Executor | None = None, count: int = 1) -> None:
        """Of `threads` `count` are asked, on as many cores; without any the caller does all."""
        self._threads = threads
        self._count = count
        self._begun: list[Future[Any]] = []

    @contextmanager
    def on_other_cores(self, name: str, most: int) -> Iterator[None]:
        """Have threads for as long as the block runs, `name` and a number: one for each core but one, up to `most`.

        What was begun, and nobody has waited for, is not done any more when the block ends.
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
        """Return slices of rows for `map`: of PART_BYTES each, or all in one where nobody helps.

        A call checks all that it is given: `shared_bytes` with 100 buffers takes 47 us for 2 rows, 57 for 128 and 130
        for 1,280, a sketch 8, 9 and 14.
        """
        return [slice(0, len(lengths))] if self._threads is None else parts_of(lengths)

    def run_on_all(self, work: Callable[[], None]) -> None:
        """Call `work` here and on threads that are free, a call a core: each takes what others have left of one task.

        Raises what one of these calls raised.
        """
        self.map(lambda _hand: work(), range(self._count))

    def begin(self, work: Callable[[], Answer]) -> Callable[[], Answer]:
        """Begin a piece of work; return what gives its answer once it is there, or raises what it raised.

        The caller does it at once where as many are begun as there are cores: the others each have one, and one waits.
        """
        self._begun = [one for one in self._begun if not one.done()]
        if self._threads is not None and len(self._begun) < self._count:
            told, task = Future[Answer](), [work]
            self._begun.append(told)
            with suppress(RuntimeError):  # no thread is to be had
                self._threads.submit(_help, task, told)
                return told.result
            if not told.cancel():
                return told.result
            task.clear()
        answer = work()
        return lambda: answer

    def map(self, work: Callable[[Part], Answer], parts: Sequence[Part]) -> list[Answer]:
        """Return work(part) for each part. Raises what one of them raised; no further part is begun then."""
        if self._threads is None or len(parts) < 2:
            return [work(part) for part in parts]
        found: dict[int, Answer] = {}
        left = iter(range(len(parts)))  # a step of it is one of C's: nobody else gets the same number

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


def _help(task: list[Callable[[], Answer]], told: Future[Answer]) -> None:
    """Do a task, unless what comes of it was cancelled.

    An executor that can start no thread says so, and keeps what it was given nevertheless: a thread that it has already
    may begin it at any time, so that the executor's own word is not enough; or none ever does, and it stays for good.
    """
    if not told.set_running_or_notify_cancel():
        return
    try:
        answer = task[0]()
    except BaseException as err:
        told.set_exception(err)
    else:
        told.set_result(answer)


SERIAL = ThreadPool()
"""Nobody helps."""


@contextmanager
def all_cores(name: str) -> Iterator[ThreadPool]:
    """Have threads for as long as the block runs, named `name`: one a core, up to THREADS_MAX; on one core none."""
    count = min(cores(), THREADS_MAX)
    if count < 2:
        yield SERIAL
        return
    with ThreadPoolExecutor(count, name) as threads:
        yield ThreadPool(threads, count)


def parts_of(lengths: U32 | NDArray[np.int64], part_bytes: int = PART_BYTES) -> list[slice]:
    """Return slices of rows that have `part_bytes` together, or a row more; one at least, empty where no row is."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total_bytes = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(part_bytes, total_bytes, part_bytes)) + 1
    bounds = sorted({0, *cuts.tolist(), len(lengths)})  # np.unique alone imports numpy.ma, 10 ms of a process
    return [slice(first, last) for first, last in pairwise(bounds)] or [slice(0, 0)]
