"""Check the cache of manifest references: its rows equal the manifests, or are ignored."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin.store import Store
from nearkin_maintenance import ReferenceCounts
from nearkin_maintenance.gc.manifest_refs_cache import masks_of
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.roots import find_roots
from nearkin_shared.config.storage import HYBRID
from nearkin_shared.errors import Corrupt
from tests.support.data.stores import SMALL, flip, manifests, settings
from tests.support.fakes.clock import DAY

DAY_US = DAY * 1_000_000
FIRST_US = 20_000 * DAY_US
GC = {"mode": HYBRID, "grace_seconds": DAY // 2}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    changes = {"deletion": {"undelete_seconds": 0}, "gc": GC}
    clock = iter(range(1_764_000_000, 2_000_000_000, 60))
    with open_store(
        tmp_path / "s", settings=settings(SMALL, changes), clock=lambda: float(next(clock)), create=True
    ) as opened:
        content = random_bytes(400_000, 1)
        for number in range(4):
            content = mutate(content, number, 3)
            opened.put("a", content)
            opened.put("b", random_bytes(150_000, 100 + number))
        yield opened


class Looking:
    """The reference counts of a store, and marking with the cached references."""

    def __init__(self, store: Store, ledger: ReferenceCounts) -> None:
        self.store, self.ledger = store, ledger

    def names(self) -> list[str]:
        return [version.manifest for version in find_roots(self.store._manifests, 0).kept]

    def reach(self, now_us: int) -> tuple[LiveSet, int]:
        """Mark; return the live set, and how many manifests were decoded."""
        summaries = self.ledger.refs_cache(now_us)
        found = LiveSet(self.store._containers, self.store._manifests, self.names(), (), summaries)
        self.ledger.record_marking(now_us)
        return found, summaries.decoded

    def check(self, found: LiveSet) -> None:
        expected = LiveSet(self.store._containers, self.store._manifests, self.names())
        assert bits(found.segments) == bits(expected.segments)
        assert bits(found.chunks) == bits(expected.chunks)


def bits(masks: dict[int, np.ndarray]) -> dict[int, list[int]]:
    return {container: np.flatnonzero(mask).tolist() for container, mask in masks.items() if mask.any()}


@pytest.fixture
def looking(store: Store, tmp_path: Path) -> Iterator[Looking]:
    ledger = ReferenceCounts(tmp_path / "gc", 1 << 24, HYBRID)
    yield Looking(store, ledger)
    ledger.close()


def test_mark_decodes_new_manifests_only(looking: Looking) -> None:
    """The live set equals that without the cache."""
    found, made = looking.reach(FIRST_US)
    assert made == 8
    looking.check(found)
    looking.store.put("a", random_bytes(150_000, 7))
    found, made = looking.reach(FIRST_US + DAY_US)
    assert made == 1
    looking.check(found)


def test_mark_once_a_week_decodes_all_manifests(looking: Looking) -> None:
    decoded = [looking.reach(FIRST_US + day * DAY_US)[1] for day in range(16)]
    assert decoded == [8, *[0] * 6, 8, *[0] * 6, 8, 0]


def test_mark_after_clock_was_set_back_decodes_all(looking: Looking) -> None:
    assert looking.reach(FIRST_US + 8 * DAY_US)[1] == 8
    assert looking.reach(FIRST_US + DAY_US)[1] == 8


def test_mark_ignores_row_of_a_replaced_manifest(looking: Looking) -> None:
    """A folder restored from an older copy may hold another version with the same number."""
    looking.reach(FIRST_US)
    paths = sorted(manifests(looking.store.root))
    for one in paths:
        flip(one, 40)
        with pytest.raises(Corrupt, match="nothing is freed"):
            looking.reach(FIRST_US + DAY_US)
        flip(one, 40)
    found, made = looking.reach(FIRST_US + DAY_US)
    assert made == 0
    looking.check(found)


def test_mark_rewrites_damaged_or_foreign_row(looking: Looking, tmp_path: Path) -> None:
    looking.reach(FIRST_US)
    draw = random.Random(1)
    env, tables = looking.ledger._env, looking.ledger._tables
    assert isinstance(env, lmdb.Environment)
    with env.begin(write=True) as txn:
        rows = [(bytes(name), bytes(row)) for name, row in txn.cursor(tables["summaries"])]
        for (name, row), (_, other) in pairwise(rows[:7]):
            at = draw.randrange(len(row))
            broken = [row[:at] + bytes([row[at] ^ 4]) + row[at + 1 :], row[:at], other]
            txn.put(name, broken[draw.randrange(3)], db=tables["summaries"])
    found, made = looking.reach(FIRST_US + DAY_US)
    assert made == 6
    looking.check(found)


def test_rows_of_deleted_manifests_are_removed(looking: Looking) -> None:
    looking.reach(FIRST_US)
    looking.store.delete("b")
    looking.store.gc()
    found, made = looking.reach(FIRST_US + DAY_US)
    assert made == 0
    looking.check(found)
    with looking.ledger._env.begin() as txn:
        kept = [bytes(name).decode() for name, _ in txn.cursor(looking.ledger._tables["summaries"])]
    assert sorted(kept) == sorted(looking.names())


def test_damaged_manifest_in_cache_stops_gc(store: Store) -> None:
    store.gc()
    store.delete("b", 2)
    flip(sorted(manifests(store.root))[0], 60)
    with pytest.raises(Corrupt, match="nothing is freed"):
        store.gc()


@runs(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(1, 1 << 63), st.integers(1, 1 << 70), max_size=5))
def test_bits_name_the_referenced_segments(named: dict[int, int]) -> None:
    for container, mask in masks_of(named).items():
        assert sum(1 << int(at) for at in np.flatnonzero(mask)) == named[container]
        assert mask[-1]


def test_cached_references_outlive_the_process(looking: Looking) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = ReferenceCounts(Path(folder), 1 << 24, HYBRID)
        other = Looking(looking.store, ledger)
        assert other.reach(FIRST_US)[1] == 8
        ledger.close()
        ledger = ReferenceCounts(Path(folder), 1 << 24, HYBRID)
        try:
            assert Looking(looking.store, ledger).reach(FIRST_US + DAY_US)[1] == 0
        finally:
            ledger.close()
