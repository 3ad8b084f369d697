"""One thread, one bounded queue: order, back-pressure, and failures that reach whoever waits."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from nearkin.errors import StoreUnavailable
from nearkin.runners.workers import Worker

PATIENCE = 10


def test_items_are_done_in_order_and_drain_waits_for_them() -> None:
    done: list[int] = []
    worker = Worker("test", done.append, 2)
    for number in range(100):
        worker.put(number)
    worker.drain()
    assert done == list(range(100))
    worker.stop()


def test_a_full_queue_holds_the_caller_back() -> None:
    gate, started = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        started.set()
        gate.wait(PATIENCE)

    worker = Worker("test", slow, 1)
    worker.put(0)
    assert started.wait(PATIENCE)
    worker.put(1)  # fills the queue
    third = threading.Thread(target=worker.put, args=(2,))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    gate.set()
    third.join(PATIENCE)
    assert not third.is_alive()
    worker.stop()


def failing(at: int, done: list[int]) -> Callable[[int], None]:
    def carry_out(number: int) -> None:
        if number == at:
            raise OSError(f"item {number}")
        done.append(number)

    return carry_out


def test_after_a_failure_nothing_more_is_done_and_everyone_is_told() -> None:
    done: list[int] = []
    worker = Worker("test", failing(2, done), 8)
    for number in range(5):
        with suppress(OSError):  # told at once, or in the loop below
            worker.put(number)
    for told in (worker.drain, worker.check, lambda: worker.put(5)):
        with pytest.raises(OSError, match="item 2"):
            told()
    assert done == [0, 1]
    worker.stop()


def test_a_caller_that_waits_for_room_is_not_left_behind_by_a_failure() -> None:
    gate = threading.Event()

    def carry_out(_: int) -> None:
        gate.wait(PATIENCE)
        raise OSError("late")

    worker = Worker("test", carry_out, 1)

    def put(number: int) -> None:
        with suppress(OSError):  # one that came after the failure is told at once
            worker.put(number)

    waiting = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in waiting:
        thread.daemon = True
        thread.start()
    gate.set()
    for thread in waiting:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in waiting)
    worker.stop()


def test_stop_finishes_what_is_queued_and_cancel_drops_it() -> None:
    done: list[int] = []
    worker = Worker("test", done.append, 50)
    for number in range(50):
        worker.put(number)
    worker.stop()
    assert len(done) == 50

    gate, started = threading.Event(), threading.Event()

    def first_waits(number: int) -> None:
        started.set()
        gate.wait(PATIENCE)
        done.append(1000 + number)

    worker = Worker("test", first_waits, 50)
    for number in range(10):
        worker.put(number)
    assert started.wait(PATIENCE)
    cancelling = threading.Thread(target=worker.cancel)
    cancelling.start()
    while worker._failure is None:
        pass
    gate.set()
    cancelling.join(PATIENCE)
    assert done[50:] == [1000]
    with pytest.raises(StoreUnavailable, match="ended before it was committed"):
        worker.check()


def test_the_thread_ends_with_stop() -> None:
    worker = Worker("a-name-of-its-own", lambda _: None, 1)
    assert "nearkin-a-name-of-its-own" in {thread.name for thread in threading.enumerate()}
    worker.stop()
    assert "nearkin-a-name-of-its-own" not in {thread.name for thread in threading.enumerate()}


class Interrupt(BaseException):
    """What a signal's handler raises in the main thread, as Ctrl-C does."""


def test_two_interrupts_at_any_moment_leave_a_worker_that_can_be_cancelled() -> None:
    """`timeout` sends SIGTERM twice, people press Ctrl-C twice: the second lands while the first is on its way out."""
    shots = 0

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal shots
        if shots:
            shots -= 1
            raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    draw = random.Random(3)
    try:
        for _ in range(300):
            worker: Worker[int] = Worker("test", lambda _: None, 1)
            shots = 2
            with suppress(Interrupt):
                with suppress(Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-4), 1e-5)
                    while True:
                        worker.put(0)
                while shots:
                    time.sleep(1e-5)
            signal.setitimer(signal.ITIMER_REAL, 0)
            ended = threading.Thread(target=worker.cancel, daemon=True)
            ended.start()
            ended.join(PATIENCE)
            assert not ended.is_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
