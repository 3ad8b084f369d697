"""One thread, one bounded queue, or none: order, back-pressure, and failures that reach whoever waits."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.pipeline.worker_thread import QUEUED, InlineWorker, Worker

PATIENCE = 60


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


def test_without_a_queue_an_item_is_handed_over_once_the_one_before_is_done() -> None:
    gate, started = threading.Event(), threading.Event()
    done: list[int] = []

    def slow(number: int) -> None:
        started.set()
        gate.wait(PATIENCE)
        done.append(number)

    worker = Worker("test", slow, 0)
    worker.put(0)
    assert started.wait(PATIENCE)
    second = threading.Thread(target=worker.put, args=(1,))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "nothing waits in between"
    gate.set()
    second.join(PATIENCE)
    assert not second.is_alive()
    worker.drain()
    assert done == [0, 1]
    worker.stop()


@pytest.mark.parametrize("items_max", [0, 1])
def test_what_is_added_is_done_in_order_and_waits_for_no_room(items_max: int) -> None:
    gate, started, done = threading.Event(), threading.Event(), list[str]()

    def carry_out(item: str) -> None:
        started.set()
        gate.wait(PATIENCE)
        done.append(item)

    worker = Worker("test", carry_out, items_max)
    worker.put("first")
    assert started.wait(PATIENCE)
    for part in "abcd":
        worker.add(part)
    waits = threading.Thread(target=lambda: [worker.put(item) for item in ("second", "third")])
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()  # what was added gave no room to anyone
    assert not done
    gate.set()
    waits.join(PATIENCE)
    worker.drain()
    assert done == ["first", "a", "b", "c", "d", "second", "third"]
    worker.stop()


def test_after_a_failure_nothing_is_added() -> None:
    worker: Worker[int] = Worker("test", lambda number: 1 // number, 0)
    worker.add(0)
    with pytest.raises(ZeroDivisionError):
        worker.drain()
    with pytest.raises(ZeroDivisionError):
        worker.add(1)
    worker.stop()


def test_without_a_queue_too_a_failure_lets_nobody_wait() -> None:
    done: list[int] = []
    worker = Worker("test", failing(1, done), 0)
    worker.put(0)
    worker.put(1)
    with pytest.raises(OSError, match="item 1"):
        worker.drain()
    with pytest.raises(OSError, match="item 1"):
        worker.put(2)
    worker.stop()
    assert done == [0]


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
    with pytest.raises(StoreUnavailable, match="cancelled before commit"):
        worker.check()


def test_the_thread_ends_with_stop() -> None:
    worker = Worker("a-name-of-its-own", lambda _: None, 1)
    assert "nearkin-a-name-of-its-own" in {thread.name for thread in threading.enumerate()}
    worker.stop()
    assert "nearkin-a-name-of-its-own" not in {thread.name for thread in threading.enumerate()}


def test_a_stop_that_was_interrupted_is_ended_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def carry_out(self, _: int) -> None:
            pass

    owner = Owner()
    worker = Worker("interrupted-stop", owner.carry_out, 1)
    wait, gone = Worker._wait, weakref.ref(owner)

    def interrupted(this: Worker[int], told: object) -> None:
        wait(this, told)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.stop()
    monkeypatch.undo()
    del owner
    worker.stop()
    assert gone() is None, "its buffers stay until garbage is collected"
    assert worker not in QUEUED._owners["interrupted-stop"]


def test_a_worker_that_has_stopped_is_no_longer_counted() -> None:
    gate = threading.Event()

    def waits(_: int) -> None:
        gate.wait(PATIENCE)

    worker = Worker("counted", waits, 3)
    for number in range(3):
        worker.put(number)
    assert QUEUED.values()[("counted",)] >= 2
    assert weakref.getweakrefcount(worker)
    gate.set()
    worker.stop()
    assert QUEUED.values()[("counted",)] == 0
    assert not weakref.getweakrefcount(worker), "Python code would run where it ends"


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """Let no cycle be collected: what runs then (Hypothesis' callback, threading's WeakSet) swallows an interrupt."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Interrupt(BaseException):
    """What a signal's handler raises in the main thread, as Ctrl-C does."""


@pytest.mark.usefixtures("nothing_is_collected")
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_interrupts_at_any_moment_leave_a_worker_that_can_be_cancelled(in_turn: bool) -> None:
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
            before_it = set(threading.enumerate())
            worker: Worker[int] = Worker("test", lambda _: None, 1, serial=in_turn)
            shots = 2
            with suppress(Interrupt):
                with suppress(Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-4), 1e-5)
                    while shots:
                        worker.put(0)
                while shots:
                    time.sleep(1e-5)
            signal.setitimer(signal.ITIMER_REAL, 0)
            ended = threading.Thread(target=worker.cancel, daemon=True)
            ended.start()
            ended.join(PATIENCE)
            assert not ended.is_alive()
            assert set(threading.enumerate()) <= before_it
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, lambda *_: None)
        time.sleep(0.01)  # one may be on its way still, and is told of where nobody takes it
        signal.signal(signal.SIGALRM, before)


def test_in_turn_an_item_is_done_when_put_returns_and_its_failure_is_raised_there() -> None:
    done: list[int] = []
    worker = Worker("test", failing(2, done), 8, serial=True)
    for number in range(2):
        worker.put(number)
        assert done == list(range(number + 1))
    for number in (2, 3):
        with pytest.raises(OSError, match="item 2"):
            worker.put(number)
    assert done == [0, 1]
    worker.stop()


def test_what_is_carried_out_directly_is_done_when_put_returns() -> None:
    done: list[int] = []
    direct = InlineWorker(done.append)
    direct.put(1)
    assert done == [1]
    direct.put(2)
    direct.drain()
    assert done == [1, 2]


def test_directly_too_nothing_is_done_after_a_failure_and_everyone_is_told() -> None:
    done: list[int] = []
    direct = InlineWorker(failing(1, done))
    direct.put(0)
    for told in (lambda: direct.put(1), lambda: direct.put(2), direct.drain):
        with pytest.raises(OSError, match="item 1"):
            told()
    direct.stop()
    direct.cancel()
    assert done == [0]


def test_an_interrupt_of_what_is_carried_out_directly_is_a_failure_too() -> None:
    done: list[int] = []

    def interrupted(number: int) -> None:
        done.append(number)
        raise KeyboardInterrupt

    direct = InlineWorker(interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            direct.put(1)
    assert done == [1]


def test_what_was_ended_before_it_was_done_says_so() -> None:
    direct = InlineWorker(lambda _: None)
    direct.cancel()
    with pytest.raises(StoreUnavailable, match="put cancelled"):
        direct.put(1)
