"""Provide a local store with GC and a clock for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from tests.support.checks.gc_checks import COLLECTED
from tests.support.fakes.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []

    def again() -> Store:
        for store in stores:
            store.close()
        stores.append(open_store(tmp_path / "s", settings=COLLECTED, clock=clock, create=True))
        return stores[-1]

    yield again
    for store in stores:
        store.close()
