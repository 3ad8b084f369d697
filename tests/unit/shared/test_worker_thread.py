"""Test the worker thread with and without a queue.

Order, back-pressure, and failures that reach each waiter.
"""

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


def test_items_run_in_order_and_drain_waits() -> None:
    done: list[int] = []
    worker = Worker("test", done.append, 2)
    for number in range(100):
        worker.put(number)
    worker.drain()
    assert done == list(range(100))
    worker.stop()


def test_full_queue_blocks_the_caller() -> None:
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


def test_put_without_a_queue_waits_for_the_last_item() -> None:
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
    assert second.is_alive(), "without a queue the second put must wait"
    gate.set()
    second.join(PATIENCE)
    assert not second.is_alive()
    worker.drain()
    assert done == [0, 1]
    worker.stop()


@pytest.mark.parametrize("items_max", [0, 1])
def test_added_items_run_in_order_without_waiting(items_max: int) -> None:
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
    assert waits.is_alive()  # the added items freed no slot
    assert not done
    gate.set()
    waits.join(PATIENCE)
    worker.drain()
    assert done == ["first", "a", "b", "c", "d", "second", "third"]
    worker.stop()


def test_add_after_a_failure_is_refused() -> None:
    def divide(number: int) -> None:
        1 // number

    worker: Worker[int] = Worker("test", divide, 0)
    worker.add(0)
    with pytest.raises(ZeroDivisionError):
        worker.drain()
    with pytest.raises(ZeroDivisionError):
        worker.add(1)
    worker.stop()


def test_failure_without_a_queue_leaves_no_waiter() -> None:
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


def test_failure_stops_all_items_and_reaches_each_caller() -> None:
    done: list[int] = []
    worker = Worker("test", failing(2, done), 8)
    for number in range(5):
        with suppress(OSError):  # raised at once, or in the loop below
            worker.put(number)
    for call in (worker.drain, worker.check, lambda: worker.put(5)):
        with pytest.raises(OSError, match="item 2"):
            call()
    assert done == [0, 1]
    worker.stop()


def test_caller_waiting_for_room_receives_the_failure() -> None:
    gate = threading.Event()

    def carry_out(_: int) -> None:
        gate.wait(PATIENCE)
        raise OSError("late")

    worker = Worker("test", carry_out, 1)

    def put(number: int) -> None:
        with suppress(OSError):  # a put after the failure raises at once
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


def test_stop_finishes_the_queue_and_cancel_drops_it() -> None:
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


def test_thread_ends_with_stop() -> None:
    worker: Worker[int] = Worker("a-name-of-its-own", lambda _: None, 1)
    assert "nearkin-a-name-of-its-own" in {thread.name for thread in threading.enumerate()}
    worker.stop()
    assert "nearkin-a-name-of-its-own" not in {thread.name for thread in threading.enumerate()}


def test_interrupted_stop_is_completed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def carry_out(self, _: int) -> None:
            pass

    owner = Owner()
    worker = Worker("interrupted-stop", owner.carry_out, 1)
    wait, reference = Worker._wait, weakref.ref(owner)

    def interrupted(this: Worker[int], call: object) -> None:
        wait(this, call)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.stop()
    monkeypatch.undo()
    del owner
    worker.stop()
    assert reference() is None, "its buffers would stay until garbage is collected"
    assert worker not in QUEUED._owners["interrupted-stop"]


def test_stopped_worker_is_no_longer_counted() -> None:
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
    assert not weakref.getweakrefcount(worker), "Python code would run when the thread ends"


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """Disable garbage collection.

    Its callbacks (Hypothesis, threading's WeakSet) would swallow an interrupt.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Interrupt(BaseException):
    """An exception that a signal handler raises in the main thread, as Ctrl-C does."""


@pytest.mark.usefixtures("nothing_is_collected")
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_interrupts_at_any_moment_leave_cancel_usable(in_turn: bool) -> None:
    """`timeout` sends SIGTERM twice, people press Ctrl-C twice.

    The second arrives while the first one unwinds.
    """
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
        time.sleep(0.01)  # an interrupt may still be in flight, and must be raised inside this block
        signal.signal(signal.SIGALRM, before)


def test_inline_put_runs_the_item_and_raises_its_failure() -> None:
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


def test_inline_item_is_done_when_put_returns() -> None:
    done: list[int] = []
    direct = InlineWorker(done.append)
    direct.put(1)
    assert done == [1]
    direct.put(2)
    direct.drain()
    assert done == [1, 2]


def test_inline_failure_stops_all_and_reaches_each_caller() -> None:
    done: list[int] = []
    direct = InlineWorker(failing(1, done))
    direct.put(0)
    for call in (lambda: direct.put(1), lambda: direct.put(2), direct.drain):
        with pytest.raises(OSError, match="item 1"):
            call()
    direct.stop()
    direct.cancel()
    assert done == [0]


def test_interrupt_of_an_inline_item_is_a_failure() -> None:
    done: list[int] = []

    def interrupted(number: int) -> None:
        done.append(number)
        raise KeyboardInterrupt

    direct = InlineWorker(interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            direct.put(1)
    assert done == [1]


def test_cancelled_item_is_reported() -> None:
    direct: InlineWorker[int] = InlineWorker(lambda _: None)
    direct.cancel()
    with pytest.raises(StoreUnavailable, match="put cancelled"):
        direct.put(1)
