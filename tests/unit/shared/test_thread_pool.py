"""Test the thread pool: parts run on free threads, and no caller waits for a busy thread."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.utils import thread_pool
from nearkin_shared.utils.thread_pool import PART_BYTES, SERIAL, THREADS_MAX, ThreadPool, all_cores, cores, parts_of
from tests.support.checks.waiting import until

WAIT_SECONDS = 60


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_results_are_in_the_order_of_the_parts(threads: ThreadPoolExecutor) -> None:
    parts = list(range(200))
    for helpers in (SERIAL, ThreadPool(threads)):
        assert helpers.map(lambda part: part * part, parts) == [part * part for part in parts]
        assert helpers.map(str, []) == []


def test_free_thread_takes_part(threads: ThreadPoolExecutor) -> None:
    """Each of two parts waits for the other: a single thread would never finish the first."""
    both = threading.Barrier(2)
    names = ThreadPool(threads).map(lambda _: both.wait(WAIT_SECONDS), [0, 1])
    assert sorted(names) == [0, 1]


def test_task_runs_on_as_many_threads_as_cores(threads: ThreadPoolExecutor) -> None:
    both, calls = threading.Barrier(2), list[int]()

    def work() -> None:
        calls.append(both.wait(WAIT_SECONDS))

    ThreadPool(threads, 2).run_on_all(work)
    assert sorted(calls) == [0, 1], "the task must run on the caller and on the free thread"
    for alone in (SERIAL, ThreadPool(None, 4), ThreadPool(threads, 1)):
        called = list[int]()
        alone.run_on_all(lambda called=called: called.append(threading.get_ident()))  # type: ignore[misc]
        assert set(called) == {threading.get_ident()}, "each call must run on the caller"


def test_caller_does_not_wait_for_a_busy_thread(threads: ThreadPoolExecutor) -> None:
    done = threading.Event()
    busy = threads.submit(done.wait, WAIT_SECONDS)
    me = threading.get_ident()
    assert ThreadPool(threads, 3).map(lambda _: threading.get_ident(), [1, 2, 3]) == [me] * 3
    done.set()
    assert busy.result()


class Crowded(ThreadPoolExecutor):
    """Executor with one thread that cannot start another."""

    def submit(self, *arguments: Any, **named: Any) -> Any:
        if self._threads:
            raise RuntimeError("can't start new thread")
        return super().submit(*arguments, **named)


def test_existing_threads_do_all_if_none_can_start() -> None:
    with Crowded(4) as threads:
        for _ in range(3):
            assert ThreadPool(threads, 4).map(str, list(range(50))) == [str(part) for part in range(50)]


class Unstartable(ThreadPoolExecutor):
    """Executor that accepts tasks and can start no thread."""

    def _adjust_thread_count(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.fixture
def no_thread_starts(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread start but the existing one of `threads`."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert threads.submit(int).result() == 0
    monkeypatch.setattr(threads, "_max_workers", 2)
    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_thread_starts")
def test_refused_task_that_runs_nevertheless_is_awaited(
    threads: ThreadPoolExecutor,
) -> None:
    """The executor keeps a refused task.

    Its one thread begins it later, while the caller does the other part.
    """
    gate, both = threading.Event(), threading.Barrier(2)
    threads.submit(gate.wait, WAIT_SECONDS)
    ended = list[int]()

    def work(part: int) -> int:
        gate.set()
        mine = both.wait(WAIT_SECONDS)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        ended.append(part)
        return mine

    assert sorted(ThreadPool(threads, 2).map(work, [0, 1])) == [0, 1]
    assert sorted(ended) == [0, 1]


@pytest.mark.usefixtures("no_thread_starts")
def test_task_that_no_thread_begins_is_not_kept() -> None:
    class Task:
        def __call__(self) -> None:
            pass

    none = ThreadPoolExecutor(2)  # none of its own threads will take it
    task = Task()
    reference = weakref.ref(task)
    ThreadPool(none, 2).run_on_all(task)
    del task
    assert reference() is None, "a batch's buffers, 96 MiB, must not be kept"
    assert none._work_queue.qsize() == 1


def test_begun_task_runs_while_the_caller_continues(threads: ThreadPoolExecutor) -> None:
    both, me = threading.Barrier(2), threading.get_ident()

    def work() -> int:
        both.wait(WAIT_SECONDS)
        return threading.get_ident()

    answer = ThreadPool(threads, 2).begin(work)
    both.wait(WAIT_SECONDS)
    assert answer() != me
    assert answer() == answer(), "a result must be returned again"
    assert SERIAL.begin(threading.get_ident)() == me


def test_one_task_a_thread_and_one_waiting_are_held(threads: ThreadPoolExecutor) -> None:
    gate, me = threading.Event(), threading.get_ident()

    def work() -> int:
        gate.wait(WAIT_SECONDS)
        return threading.get_ident()

    helpers = ThreadPool(threads, 2)
    answers = [helpers.begin(work), helpers.begin(work)]
    third = helpers.begin(threading.get_ident)
    assert third() == me, "the third must run on the caller, at once"
    gate.set()
    assert me not in [answer() for answer in answers]
    assert helpers.begin(threading.get_ident)() != me, "a thread must be free again"


def test_error_of_a_begun_task_is_raised_by_its_result(threads: ThreadPoolExecutor) -> None:
    def fails() -> None:
        raise ValueError("damaged")

    helpers = ThreadPool(threads, 2)
    answer = helpers.begin(fails)
    assert helpers.begin(lambda: 7)() == 7, "other tasks must be unaffected"
    with pytest.raises(ValueError, match="damaged"):
        answer()
    with pytest.raises(ValueError, match="damaged"):
        SERIAL.begin(fails)()


def test_task_without_a_thread_runs_on_the_caller() -> None:
    """It is not kept afterwards."""

    class Piece:
        def __call__(self) -> int:
            return threading.get_ident()

    none, piece = Unstartable(2), Piece()
    reference = weakref.ref(piece)
    assert ThreadPool(none, 2).begin(piece)() == threading.get_ident()
    del piece
    assert reference() is None, "a block and its bases, 12 MiB, must not be kept"
    assert none._work_queue.qsize() == 1


@pytest.mark.parametrize("fails_at_helper", [False, True])
def test_error_of_a_part_is_raised_and_no_part_begins_after(
    threads: ThreadPoolExecutor, *, fails_at_helper: bool
) -> None:
    me, both, begun = threading.get_ident(), threading.Barrier(2), []

    def work(part: int) -> int:
        begun.append(part)
        if part < 2:
            both.wait(WAIT_SECONDS)
        if (threading.get_ident() != me) == fails_at_helper:
            raise ValueError(f"part {part}")
        failed.wait(WAIT_SECONDS)
        return part

    failed = threading.Event()
    threading.Timer(0.5, failed.set).start()  # the other part continues long after the failure
    with pytest.raises(ValueError, match=r"part [01]"):
        ThreadPool(threads).map(work, list(range(100)))
    assert sorted(begun) == [0, 1]
    assert ThreadPool(threads).map(str, [1, 2]) == ["1", "2"], "the threads must be usable afterwards"


@given(st.lists(st.integers(0, 300), max_size=50), st.integers(1, 400))
def test_parts_cover_all_rows_once_in_bounded_sizes(lengths: list[int], part_bytes: int) -> None:
    rows = np.array(lengths, np.uint32)
    parts = parts_of(rows, part_bytes)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert len(parts) == 1 or all(part.start < part.stop for part in parts)
    assert len(parts) <= 1 + sum(lengths) // part_bytes
    for part in parts:
        assert rows[part.start : part.stop - 1].sum() < part_bytes + max(lengths, default=0)


def test_rows_are_split_only_for_a_pool(threads: ThreadPoolExecutor) -> None:
    lengths = np.full(40, PART_BYTES // 4, np.uint32)
    assert SERIAL.parts(lengths) == [slice(0, 40)]
    assert SERIAL.parts(lengths[:0]) == [slice(0, 0)]
    assert ThreadPool(threads).parts(lengths) == parts_of(lengths)
    assert len(parts_of(lengths)) == 10


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not given to a process here")
def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("of", "thread_count"), [(1, 1), (2, 2), (64, THREADS_MAX)])
def test_task_keeps_a_thread_a_core_while_it_runs(monkeypatch: pytest.MonkeyPatch, of: int, thread_count: int) -> None:
    monkeypatch.setattr(thread_pool, "cores", lambda: of)
    together, names = threading.Barrier(thread_count), set[str]()

    def work() -> None:
        together.wait(WAIT_SECONDS)  # each call on its own thread
        names.add(threading.current_thread().name)

    with all_cores("nearkin-test") as helpers:
        helpers.run_on_all(work)
    assert len(names) == thread_count
    assert sum(name.startswith("nearkin-test") for name in names) == thread_count - 1, "the caller must be one of them"
    assert not [one for one in threading.enumerate() if one.name.startswith("nearkin-test")]


@pytest.mark.parametrize(("of", "thread_count"), [(1, 0), (2, 1), (3, 2), (64, 2)])
def test_tasks_leave_the_caller_s_core_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, of: int, thread_count: int
) -> None:
    monkeypatch.setattr(thread_pool, "cores", lambda: of)
    gate, begun = threading.Event(), list[str]()

    def work() -> None:
        begun.append(threading.current_thread().name)
        gate.wait(WAIT_SECONDS)

    helpers = ThreadPool()
    with helpers.on_other_cores("nearkin-test", 2):
        assert helpers.is_serial == (not thread_count)
        together, shared = threading.Barrier(thread_count + 1), list[str]()

        def part() -> None:
            together.wait(WAIT_SECONDS)
            shared.append(threading.current_thread().name)

        helpers.run_on_all(part)
        assert len(set(shared)) == thread_count + 1, "the caller must be one of them"
        if not thread_count:
            gate.set()
        for _ in range(thread_count + 1):  # the last one waits, or runs on the caller
            helpers.begin(work)
        until(lambda: len(begun) == max(thread_count, 1))
        if thread_count:
            threading.Timer(0.2, gate.set).start()  # while the block ends: waiting tasks are released then
    assert sorted(begun) == ([f"nearkin-test_{number}" for number in range(thread_count)] or ["MainThread"])
    assert helpers.is_serial
    assert not [one for one in threading.enumerate() if one.name.startswith("nearkin-test")]
