"""Test the iterator that produces the next item in a thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import text_like
from nearkin_shared.utils import prefetch
from nearkin_shared.utils.prefetch import PrefetchIterator
from tests.support.checks.waiting import until


class Making:
    """Producer of numbers that records its progress."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.made = list[int]()
        self.left = threading.Event()
        self._count, self._fails_at = count, fails_at

    def _numbers(self) -> Iterator[np.ndarray]:
        for number in range(self._count):
            if number == self._fails_at:
                raise ValueError(number)
            self.made.append(number)
            yield np.full(1, number)

    @contextmanager
    def __call__(self) -> Iterator[Iterator[np.ndarray]]:
        try:
            yield self._numbers()
        finally:
            self.left.set()


def read(items: PrefetchIterator[np.ndarray]) -> list[int]:
    return [int(item[0]) for item in items]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_items_arrive_in_order_and_the_context_is_left(count: int) -> None:
    making = Making(count)
    items = PrefetchIterator("test", making)
    assert read(items) == list(range(count))
    assert making.left.is_set()
    assert read(items) == []
    items.close()


def test_one_item_is_made_ahead_and_no_more() -> None:
    making = Making(50)
    items = PrefetchIterator("test", making)
    assert making.made == []
    assert next(items)[0] == 0
    until(lambda: len(making.made) == 2)
    assert next(items)[0] == 1
    until(lambda: len(making.made) == 3)
    items.close()
    assert making.left.is_set()
    assert len(making.made) == 3
    assert read(items) == []
    items.close()


def test_error_is_raised_after_the_items_before_it() -> None:
    making = Making(5, fails_at=3)
    items = PrefetchIterator("test", making)
    found = [int(next(items)[0]) for _ in range(3)]
    with pytest.raises(ValueError, match="3"):
        next(items)
    assert found == [0, 1, 2]
    assert making.left.is_set()
    assert read(items) == []


def test_iterator_that_never_began_starts_no_thread() -> None:
    before = threading.active_count()
    making = Making(5)
    PrefetchIterator("test", making).close()
    del making
    assert threading.active_count() == before


def test_dropped_iterator_ends_and_used_items_are_freed() -> None:
    making = Making(50)
    items = PrefetchIterator("test", making)
    first = weakref.ref(next(items))
    until(lambda: len(making.made) == 2)
    assert first() is None
    del items
    assert making.left.wait(10)
    assert len(making.made) == 2


def test_ctrl_c_at_any_step_of_the_end_leaves_no_waiter() -> None:
    """Interrupt before each step of the last `next` in sequence.

    An item taken once is not waited for again.
    """
    step, interrupted = 0, True
    while interrupted:
        items, interrupted, steps = PrefetchIterator("test", Making(1)), False, 0
        assert next(items)[0] == 0
        until(lambda: items._line.ended.is_set())  # noqa: B023 - called at once

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal steps, interrupted
            if frame.f_code.co_filename != prefetch.__file__ or interrupted:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                steps += 1
                if steps > step:  # noqa: B023
                    interrupted = True
                    raise KeyboardInterrupt
            return trace

        def last(items: PrefetchIterator[np.ndarray] = items) -> None:
            sys.settrace(trace)  # type: ignore[arg-type]
            try:
                with suppress(KeyboardInterrupt):
                    next(items, None)
            finally:
                sys.settrace(None)
            items.close()

        reader = threading.Thread(target=last, daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive(), step
        assert items._line.ended.is_set()
        step += 1
    assert step > 20


def test_close_by_another_thread_ends_the_reader() -> None:
    for attempt in range(60):
        making = Making(10_000)
        items = PrefetchIterator("test", making)
        found, failed = list[int](), list[RuntimeError]()

        def reading(
            items: PrefetchIterator[np.ndarray] = items, found: list[int] = found, failed: list[RuntimeError] = failed
        ) -> None:
            try:
                found += [int(item[0]) for item in items]
            except RuntimeError as err:
                failed.append(err)

        reader, closer = (
            threading.Thread(target=reading, daemon=True),
            threading.Thread(target=items.close, daemon=True),
        )
        reader.start()
        time.sleep(attempt / 20_000)
        closer.start()
        reader.join(10)
        closer.join(10)
        assert not reader.is_alive()
        assert not closer.is_alive()
        assert making.left.is_set()
        assert failed or found == list(range(10_000)) or found == list(range(len(found)))


def test_iterator_begun_before_a_fork_works_in_the_parent() -> None:
    """The child closes it."""
    items = PrefetchIterator("test", Making(5))
    assert next(items)[0] == 0
    child = os.fork()
    if not child:
        signal.alarm(20)
        with suppress(RuntimeError):
            next(items)
            os._exit(1)
        items.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(items) == [1, 2, 3, 4]


def dropped_in_a_cycle(begin: Callable[[], object]) -> None:
    """Begin something and leave it in a reference cycle, as a kept exception does."""
    kept: list[object] = [begin()]
    kept.append(kept)


def test_collection_of_a_dropped_restore_waits_for_nothing(tmp_path: Path) -> None:
    """The garbage collector may run inside a wait of the restore's own thread."""
    gc.disable()
    try:
        with open_store(tmp_path / "s", create=True) as store:
            store.put("k", text_like(20_000_000, 3))
            store._containers.evict()

            def begin() -> object:
                pieces = store.get("k").pieces()
                next(pieces)
                return pieces

            def collect() -> None:
                with store._containers.buffers._lock, store._containers.blocks._lock:
                    dropped_in_a_cycle(begin_once)
                    gc.collect()

            ready = begin()

            def begin_once() -> object:
                nonlocal ready
                found, ready = ready, None
                return found

            thread = threading.Thread(target=collect, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            until(lambda: store._containers.restores.count == 0)
            assert len(store.get("k").read()) == 20_000_000
    finally:
        gc.enable()
