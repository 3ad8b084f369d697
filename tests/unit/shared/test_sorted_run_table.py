"""Compare the table of sorted runs with a dict in which the first value stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import IndexDamaged
from nearkin_shared.index.lmdb import sorted_run_table
from nearkin_shared.index.lmdb.sorted_run_table import PACKED_LOCATION, FeatureShape, KeyShape, SortedRuns
from nearkin_shared.types import U8, Bools, Locations

SHAPES = {"names": KeyShape(32), "ids": KeyShape(20), "features": FeatureShape(17)}


class Table:
    """A table in its own file, and the expected content."""

    def __init__(self, folder: Path, shape: KeyShape) -> None:
        self.env = lmdb.open(str(folder), max_dbs=1, map_size=1 << 28, sync=False)
        self.db = self.env.open_db(b"t")
        self.shape, self.runs = shape, SortedRuns(self.db, shape)
        self.held: dict[bytes, tuple[int, int]] = {}

    def add(self, keys: U8, container: int) -> None:
        packed_locations = np.empty(len(keys), PACKED_LOCATION)
        packed_locations["container"], packed_locations["ordinal"] = container, np.arange(len(keys))
        with self.env.begin(write=True, buffers=True) as txn:
            self.runs.add(txn, keys, packed_locations)
        for ordinal, key in enumerate(keys):
            self.held.setdefault(key.tobytes(), (container, ordinal))

    def drop(self, containers: set[int], keys: U8 | None = None) -> None:
        def unwanted(locations: Locations) -> Bools:
            return np.isin(locations.containers, np.array([*containers], np.uint64))

        with self.env.begin(write=True, buffers=True) as txn:
            self.runs.drop(txn, unwanted, keys)

    def found(self, keys: U8) -> list[tuple[int, int] | None]:
        with self.env.begin(buffers=True) as txn:
            locations, found = self.runs.locate(txn, keys)
        assert not locations.containers[~found].any()
        rows = zip(locations.containers.tolist(), locations.ordinals.tolist(), found.tolist(), strict=True)
        return [(container, ordinal) if is_found else None for container, ordinal, is_found in rows]

    def walk(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        name = b""
        while True:
            with self.env.begin(buffers=True) as txn:
                step = self.runs.next_run(txn, name)
            if step is None:
                return
            name, keys, packed_locations = step
            rows = zip(keys, packed_locations.containers.tolist(), packed_locations.ordinals.tolist(), strict=True)
            yield from ((key.tobytes(), (container, ordinal)) for key, container, ordinal in rows)

    def names(self) -> list[bytes]:
        with self.env.begin() as txn:
            return [key for key, _ in txn.cursor(self.db) if key < b"\xfe"]

    def values(self) -> list[tuple[bytes, bytes]]:
        with self.env.begin() as txn:
            return [(bytes(key), bytes(value)) for key, value in txn.cursor(self.db)]

    def sizes(self) -> list[int]:
        with self.env.begin() as txn:
            return [(len(v) - 8) // self.shape.entry_bytes for k, v in txn.cursor(self.db) if k < b"\xfe"]


def keys_of(shape: KeyShape, seed: int, count: int) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (count, shape.key_bytes), np.uint8)


@pytest.fixture(params=SHAPES)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path / "t", SHAPES[request.param])
    yield table
    table.env.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_run_table, "ENTRIES_MAX", 8)


@pytest.mark.usefixtures("small")
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data())
def test_table_behaves_as_a_dict_that_keeps_the_first(tmp_path: Path, data: st.DataObject) -> None:
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    table = Table(folder, shape)
    pool = keys_of(shape, 1, 200)
    pool[:40, :] = pool[40] & 0xF0 | pool[:40] & 0x01  # some are nearly equal
    for container in range(data.draw(st.integers(1, 12))):
        rows = data.draw(st.lists(st.integers(0, len(pool) - 1), max_size=60))
        table.add(pool[rows], container)
        if data.draw(st.integers(0, 5)) == 0:
            removed = data.draw(st.sets(st.integers(0, container)))
            by_key = np.array([np.frombuffer(k, np.uint8) for k, v in table.held.items() if v[0] in removed], np.uint8)
            table.drop(removed, by_key.reshape(-1, shape.key_bytes) if data.draw(st.booleans()) else None)
            table.held = {key: location for key, location in table.held.items() if location[0] not in removed}
        assert table.found(pool) == [table.held.get(key.tobytes()) for key in pool]
        walked = list(table.walk())
        assert len(walked) == len(table.held)
        assert dict(walked) == table.held
    table.env.close()


def test_large_table_is_a_tree_of_bounded_runs(table: Table) -> None:
    for container in range(40):
        table.add(keys_of(table.shape, container, 8000), container)
        assert max(table.sizes()) <= sorted_run_table.ENTRIES_MAX + 8000
    keys = keys_of(table.shape, 7, 8000)
    assert table.found(keys) == [(7, ordinal) for ordinal in range(8000)]
    assert table.found(keys_of(table.shape, 99, 8000)) == [None] * 8000
    assert {name[0] for name in table.names()} == {0, 1, 2}
    assert sum(table.sizes()) == 320_000


@pytest.mark.usefixtures("small")
def test_runs_that_fill_at_once_spill_in_sequence(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    spilt: list[int] = []
    real = SortedRuns._spill
    monkeypatch.setattr(SortedRuns, "_spill", lambda self, *given: (spilt.append(1), real(self, *given))[1])
    table.add(keys_of(table.shape, 0, 5000), 1)
    assert len(spilt) == 1
    assert sum(table.sizes()) == 5000
    assert max(table.sizes()) > 100
    additions = 0
    while max(table.sizes()) > 8:
        spilt.clear()
        table.add(keys_of(table.shape, 10_000 + additions, 1), 2)
        assert len(spilt) <= sorted_run_table.SPILLS_MAX
        additions += 1
    assert additions > 50
    keys = keys_of(table.shape, 0, 5000)
    assert table.found(keys) == [(1, ordinal) for ordinal in range(5000)]


@pytest.mark.usefixtures("small")
def test_walk_during_spills_misses_no_entry(table: Table) -> None:
    before = keys_of(table.shape, 0, 500)
    for start in range(0, 500, 50):
        table.add(before[start : start + 50], 1)
    seen = set[bytes]()
    for number, (key, _) in enumerate(table.walk()):
        seen.add(key)
        if number < 200:
            table.add(keys_of(table.shape, 1000 + number, 10), 2)
    assert {key.tobytes() for key in before} <= seen


def test_keys_with_equal_heads_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_run_table, "ENTRIES_MAX", 8)
    table = Table(tmp_path / "t", KeyShape(20))
    keys = keys_of(table.shape, 0, 60)
    keys[:, :8] = 5
    for number in range(40):
        table.add(keys[: number + 20], number)
    assert table.found(keys[:20]) == [(0, ordinal) for ordinal in range(20)]
    assert table.found(keys[58:]) == [(39, 58), None]
    assert max(name[0] for name in table.names()) == 20
    table.env.close()


def test_super_features_spread_over_the_runs(tmp_path: Path) -> None:
    """The keys are of many namespaces and ranks."""
    shape = SHAPES["features"]
    keys = np.repeat(keys_of(shape, 0, 1000), 9, axis=0)
    keys[:, 0], keys[:, 8] = np.tile(np.arange(9) // 3, 1000), np.tile(np.arange(9) % 3, 1000)
    heads, tails = shape.split(keys)
    assert len(np.unique(heads)) == len(keys)
    assert np.array_equal(shape.join(heads, tails), keys)
    share = np.bincount((heads >> np.uint64(61)).astype(np.intp), minlength=8) / len(keys)
    assert share.min() > 0.1


def test_drop_touches_few_runs(table: Table) -> None:
    for container in range(40):
        table.add(keys_of(table.shape, container, 8000), container)
    before = {name: bytes(value) for name, value in table.values()}
    table.drop({7}, keys_of(table.shape, 7, 8000)[:500])
    changed = [name for name, value in table.values() if before.get(name) != bytes(value)]
    assert len(changed) <= 2 + 9 * sorted_run_table.SPILLS_MAX
    assert len(before) > 70
    assert table.found(keys_of(table.shape, 7, 8000)) == [None] * 500 + [(7, ordinal) for ordinal in range(500, 8000)]
    table.add(keys_of(table.shape, 7, 8000)[:100], 99)
    answers = [(99, ordinal) for ordinal in range(100)] + [None] * 400
    assert table.found(keys_of(table.shape, 7, 8000)[:500]) == answers
    assert len(dict(table.walk())) == 40 * 8000 - 400


def test_repeated_entry_is_dropped_with_hidden_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_run_table, "ENTRIES_MAX", 8)
    for by_key in (True, False):
        table = Table(tmp_path / str(by_key), KeyShape(32))
        keys = keys_of(table.shape, 0, 400)
        for start in range(0, 400, 20):
            table.add(keys[start : start + 20], 1)
        for container in (2, 3, 4):
            table.drop({container - 1}, keys if by_key else None)
            assert table.found(keys) == [None] * 400
            table.add(keys, container)
        table.drop({4}, keys[::2] if by_key else None)
        assert set(table.found(keys[::2])) == {None}
        for number in range(300):  # spills move removals down to the entries that they hide
            table.add(keys_of(table.shape, 1000 + number, 20), 5)
        assert set(table.found(keys[::2])) == {None}
        assert all(location[0] != 1 for _, location in table.walk())
        table.env.close()


def test_large_batch_leaves_no_run_above_its_bound(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", KeyShape(20))
    for container in range(12):
        table.add(keys_of(table.shape, container, 150_000), container)
    assert max(table.sizes()) < 3 * sorted_run_table.ENTRIES_MAX
    assert sum(table.sizes()) == 12 * 150_000
    table.env.close()


NOT_SORTED = bytes(8) + bytes([2]) + bytes(7) + bytes([1]) + bytes(7) + bytes(48)
DAMAGE = {
    "size": (bytes(9), bytes(9), "find add walk drop"),
    "order": (bytes(9), NOT_SORTED, "add walk drop"),
    "depth": (b"\x15" + bytes(8), bytes(8), "walk drop"),
    "name": (b"no name", bytes(8), "walk drop"),
    "list": (b"\xff", bytes(10), "add"),
    "listed depth": (b"\xff", b"\x40" + bytes(8), "add"),
}


@pytest.mark.parametrize("where", ["find", "add", "walk", "drop"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_run_is_reported_with_its_remedy(tmp_path: Path, where: str, damage: str) -> None:
    key, value, detected_by = DAMAGE[damage]
    table = Table(tmp_path / "t", KeyShape(20))
    with table.env.begin(write=True) as txn:
        txn.put(key, value, db=table.db)
    keys = keys_of(table.shape, 0, 3)
    act: Callable[[], object] = {
        "find": lambda: table.found(keys),
        "add": lambda: table.add(keys, 1),
        "walk": lambda: list(table.walk()),
        "drop": lambda: table.drop({1}),
    }[where]
    if where in detected_by.split():
        with pytest.raises(IndexDamaged, match="rebuild-index"):
            act()
    else:
        act()
    table.env.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_flipped_bit_of_a_location_is_detected(tmp_path: Path, shape: str) -> None:
    table = Table(tmp_path / "t", SHAPES[shape])
    keys = keys_of(table.shape, 0, 4)
    table.add(keys, 0x1A218747E1E33D89)
    ((name, run),) = table.values()
    row_bytes = table.shape.row_dtype.itemsize
    for bit in range(8 * PACKED_LOCATION.itemsize):
        row = bit % len(keys)
        damaged = bytearray(run)
        damaged[len(run) - row * row_bytes - 1 - bit // 8] ^= 1 << bit % 8
        with table.env.begin(write=True) as txn:
            txn.put(name, bytes(damaged), db=table.db)
        for act in (lambda: table.found(keys), lambda: list(table.walk())):
            with pytest.raises(IndexDamaged, match="rebuild-index"):
                act()
    table.env.close()


def test_location_of_another_key_is_detected(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", KeyShape(20))
    keys = keys_of(table.shape, 0, 64)
    table.add(keys, 7)
    ((name, run),) = table.values()
    rows = np.frombuffer(run[-64 * 24 :], np.uint8).reshape(64, 24).copy()
    rows[:, 12:] = np.roll(rows[:, 12:], 1, axis=0)
    with table.env.begin(write=True) as txn:
        txn.put(name, run[: -64 * 24] + rows.tobytes(), db=table.db)
    detected = 0
    for key in keys:
        try:
            table.found(key[None])
        except IndexDamaged:
            detected += 1
    assert detected >= 62
    table.env.close()
