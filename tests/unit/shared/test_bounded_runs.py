"""Test that a bounded table evicts the entries of the oldest containers, and deleted ones stay deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import IndexDamaged
from nearkin_shared.index.lmdb import sorted_run_table
from nearkin_shared.index.lmdb.bounded_runs import BoundedRuns
from nearkin_shared.index.lmdb.sorted_run_table import FeatureShape, pack_locations
from nearkin_shared.types import U8, Bools, Locations

SHAPE = FeatureShape(17)
BYTES_MAX = 1 << 20


class BoundedTable:
    """A bounded table in its own file."""

    def __init__(self, folder: Path, bytes_max: int = BYTES_MAX) -> None:
        self.env = lmdb.open(str(folder), max_dbs=1, map_size=1 << 28, sync=False)
        self.db = self.env.open_db(b"t")
        self.runs = BoundedRuns(self.db, SHAPE, bytes_max)

    def add(self, keys: U8, container: int) -> None:
        with self.env.begin(write=True, buffers=True) as txn:
            self.runs.add(txn, keys, pack_locations(container, np.arange(len(keys), dtype=np.uint32)))

    def drop(self, removed: set[int]) -> None:
        def is_removed(locations: Locations) -> Bools:
            return np.isin(locations.containers, np.array([*removed], np.uint64))

        with self.env.begin(write=True, buffers=True) as txn:
            self.runs.drop(txn, is_removed)

    def locate(self, keys: U8) -> tuple[Locations, Bools]:
        with self.env.begin(buffers=True) as txn:
            return self.runs.locate(txn, keys)

    @property
    def nbytes(self) -> int:
        with self.env.begin() as txn:
            return self.runs.nbytes(txn)


def keys_of(seed: int, count: int) -> U8:
    keys = np.random.default_rng(seed).integers(0, 256, (count, 17), np.uint8)
    keys[:, :8] = 7
    keys[:, 8] %= 3
    return keys


def reopened(table: BoundedTable, folder: Path) -> BoundedTable:
    """Return the table as another process opens it."""
    table.env.close()
    return BoundedTable(folder)


def each_or_none(table: BoundedTable, _folder: Path) -> BoundedTable:
    """Return the same table."""
    return table


@pytest.mark.parametrize("between", [each_or_none, reopened], ids=["one process", "many"])
def test_bounded_runs_when_full_evict_oldest_first(
    tmp_path: Path, between: Callable[[BoundedTable, Path], BoundedTable]
) -> None:
    """The table stays below its bound; it has the newest half at least, also if each addition opens it."""
    table = BoundedTable(tmp_path)
    containers = 150
    for container in range(1, containers + 1):
        table = between(table, tmp_path)
        table.add(keys_of(container, 1000), container)
        assert table.nbytes <= BYTES_MAX
    shares = [table.locate(keys_of(container, 1000))[1].mean() for container in range(1, containers + 1)]
    fitting = BYTES_MAX // (SHAPE.entry_bytes * 1000)
    assert min(shares[-fitting // 2 :]) == 1.0
    assert max(shares[:-fitting]) == 0.0
    table.env.close()


def test_bounded_runs_below_bound_evict_nothing(tmp_path: Path) -> None:
    """No entry is evicted before the table needs its room."""
    table = BoundedTable(tmp_path)
    for container in range(1, 26):
        table.add(keys_of(container, 1000), container)
    for container in range(1, 26):
        assert table.locate(keys_of(container, 1000))[1].all()
    table.env.close()


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_evicting_runs_never_return_deleted_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """A key is at its first location that was neither deleted nor evicted, or nowhere."""
    monkeypatch.setattr(sorted_run_table, "ENTRIES_MAX", 8)
    table = BoundedTable(tmp_path / str(len(list(tmp_path.iterdir()))), 40_000)
    pool = keys_of(1, 400)
    valid: dict[bytes, set[int]] = {}
    for _ in range(data.draw(st.integers(2, 14))):
        container = data.draw(st.integers(1, 30))  # not ascending: a repair publishes older containers again
        rows = data.draw(st.lists(st.integers(0, len(pool) - 1), max_size=150))
        before = table.locate(pool)[1]
        table.add(pool[rows], container)
        for row in set(rows):
            if not before[row]:
                valid.setdefault(pool[row].tobytes(), set()).add(container)
        if data.draw(st.integers(0, 2)) == 0:
            removed = data.draw(st.sets(st.integers(1, 30), min_size=1))
            table.drop(removed)
            valid = {key: found - removed for key, found in valid.items()}
        locations, found = table.locate(pool)
        for key, container, is_found in zip(pool, locations.containers.tolist(), found.tolist(), strict=True):
            assert not is_found or container in valid[key.tobytes()]
    table.env.close()


def test_evicted_entry_above_a_deleted_one_hides_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair published an older container after the deletion of a newer one; the entry of the newer is below."""
    monkeypatch.setattr(sorted_run_table, "ENTRIES_MAX", 8)
    table = BoundedTable(tmp_path)
    key = keys_of(1, 1)
    table.add(key, 20)
    table.add(keys_of(2, 600), 30)
    table.add(keys_of(3, 600), 6)
    table.drop({20})
    table.add(key, 5)
    assert table.locate(key)[0].containers.tolist() == [5]
    table.env.close()
    table = BoundedTable(tmp_path, 1 << 14)
    for seed in range(4, 44):
        table.add(keys_of(seed, 1), 30)
    assert not table.locate(keys_of(3, 600))[1].all()  # it evicts
    assert not table.locate(key)[1].any()
    table.env.close()


def test_damaged_state_of_a_sweep_is_refused(tmp_path: Path) -> None:
    """It is reported as damage, which rebuilds the index."""
    table = BoundedTable(tmp_path)
    with table.env.begin(write=True, db=table.db) as txn:
        txn.put(b"\xfe\x01", b"short")
    with pytest.raises(IndexDamaged, match="state of a sweep has 5 bytes"):
        table.add(keys_of(1, 10), 1)
    table.env.close()
