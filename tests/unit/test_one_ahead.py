"""Items that a thread makes, each while the one before is out."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nearkin import open_store
from nearkin.one_ahead import OneAhead
from nearkin.testing.generated import text_like
from nearkin.testing.waiting import until


class Making:
    """Makes numbers; notes what is done."""

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


def read(items: OneAhead[np.ndarray]) -> list[int]:
    return [int(item[0]) for item in items]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_all_come_in_order_and_what_was_entered_is_left(count: int) -> None:
    making = Making(count)
    items = OneAhead("test", making)
    assert read(items) == list(range(count))
    assert making.left.is_set()
    assert read(items) == []
    items.close()


def test_one_is_made_while_one_is_out_and_no_more() -> None:
    making = Making(50)
    items = OneAhead("test", making)
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


def test_what_fails_is_raised_once_all_before_it_were_given_out() -> None:
    making = Making(5, fails_at=3)
    items = OneAhead("test", making)
    found = [int(next(items)[0]) for _ in range(3)]
    with pytest.raises(ValueError, match="3"):
        next(items)
    assert found == [0, 1, 2]
    assert making.left.is_set()
    assert read(items) == []


def test_what_was_never_begun_starts_no_thread() -> None:
    before = threading.active_count()
    making = Making(5)
    OneAhead("test", making).close()
    del making
    assert threading.active_count() == before


def test_who_drops_it_ends_it_and_an_item_goes_with_its_reader() -> None:
    making = Making(50)
    items = OneAhead("test", making)
    first = weakref.ref(next(items))
    until(lambda: len(making.made) == 2)
    assert first() is None
    del items
    assert making.left.wait(10)
    assert len(making.made) == 2


def dropped_in_a_cycle(begin: Callable[[], object]) -> None:
    """Begin something, and leave it to the collector, as an exception does that is kept where it was caught."""
    kept: list[object] = [begin()]
    kept.append(kept)


def test_who_collects_a_restore_that_was_dropped_waits_for_nothing(tmp_path: Path) -> None:
    """The collector runs wherever memory is asked for: in the midst of what the restore's thread waits for, too."""
    gc.disable()
    try:
        with open_store(tmp_path / "s") as store:
            store.put("k", text_like(20_000_000, 3))
            store._containers.forget_read()

            def begin() -> object:
                pieces = iter(store.get("k"))
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
