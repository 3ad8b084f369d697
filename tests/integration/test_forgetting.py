"""Test removals from an LMDB index by looked-up entries.

The result is that of a scan, also after changes in between.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from nearkin import open_store
from nearkin.lab.generated_data import mutate, text_like
from nearkin_shared.index.lmdb.entry_tables import ExactTables
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.lmdb.sorted_run_table import PACKED_LOCATION
from tests.support.data.stores import SMALL, settings

CHOSEN = settings(SMALL, {"features": {"algorithm": "odess"}})
DOMAIN, MAP_BYTES = b"d" * 8, 1 << 26
TABLES = ("chunks", "features", "segments", "containers")


def fill_store(root: Path) -> Path:
    content = text_like(400_000, 1)
    with open_store(root, settings=CHOSEN, create=True) as store:
        for number in range(3):
            store.put("k", content)
            content = mutate(content, number, edits=40)
    return root / "index"


def unwanted(index: LmdbIndex) -> tuple[dict[int, np.ndarray | None], dict[int, np.ndarray], list[int]]:
    """Return half of the chunks and a segment of one container, and all of another."""
    first, second, *_ = (int(container) for container in index.container_ids())
    some = np.arange(0, 40, 2, dtype=np.uint32)
    return {first: some, second: None}, {first: np.zeros(1, np.uint32)}, [second]


def test_looked_up_removal_equals_a_scan(tmp_path: Path) -> None:
    folder = fill_store(tmp_path / "s")
    shutil.copytree(folder, tmp_path / "other")
    index, other = LmdbIndex(folder, DOMAIN, MAP_BYTES), LmdbIndex(tmp_path / "other", DOMAIN, MAP_BYTES)
    chunks, segments, containers = unwanted(index)
    before = index.entries()
    found = index.look_up(chunks, segments)
    assert all(len(found.keys[table]) for table in ("chunks", "features", "segments"))
    index.withdraw(chunks, segments, containers, found)
    other.withdraw(chunks, segments, containers)
    assert index.entries() == other.entries()
    assert all(index.entries()[table] != before[table] for table in TABLES)
    index.close()
    other.close()


def test_only_named_entries_are_removed(tmp_path: Path) -> None:
    """Remove of the looked-up entries only the named ones."""
    index = LmdbIndex(fill_store(tmp_path / "s"), DOMAIN, MAP_BYTES)
    chunks, segments, _ = unwanted(index)
    found, before = index.look_up(chunks, segments), index.entries()
    index.withdraw({}, segments, (), found)
    assert index.entries()["chunks"] == before["chunks"]
    assert len(index.entries()["segments"]) == len(before["segments"]) - 1
    index.close()


def test_container_published_meanwhile_is_scanned(tmp_path: Path) -> None:
    """Scan if a container was published meanwhile, for example that of a crashed writer."""
    folder = fill_store(tmp_path / "s")
    index = LmdbIndex(folder, DOMAIN, MAP_BYTES)
    chunks, segments, containers = unwanted(index)
    entries = index.entries()
    index.withdraw(chunks, segments, containers)
    forgotten = index.entries()
    found = index.look_up(chunks, segments)
    assert not any(len(keys) for keys in found.keys.values())
    with index._writing(buffers=True) as txn:  # as it was before
        for table, runs in ExactTables(index._databases).runs.items():
            keys, places = (b"".join(rows) for rows in zip(*entries[table].items(), strict=True))
            width = len(keys) * PACKED_LOCATION.itemsize // len(places)
            runs.add(txn, np.frombuffer(keys, np.uint8).reshape(-1, width), np.frombuffer(places, PACKED_LOCATION))
        txn.cursor(index._containers).putmulti(list(entries["containers"].items()))
    index.withdraw(chunks, segments, containers, found)
    assert index.entries() == forgotten
    index.close()


def test_replaced_index_is_looked_up_again(tmp_path: Path) -> None:
    folder = fill_store(tmp_path / "s")
    index = LmdbIndex(folder, DOMAIN, MAP_BYTES)
    chunks, segments, containers = unwanted(index)
    index.withdraw(chunks, segments, containers)
    found, forgotten = index.look_up(chunks, segments), index.entries()
    index.close()
    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.rebuild_index()
    made = LmdbIndex(folder, DOMAIN, MAP_BYTES)
    assert len(made.entries()["chunks"]) > len(forgotten["chunks"])
    made.withdraw(chunks, segments, containers, found)
    assert len(made.entries()["chunks"]) == len(forgotten["chunks"])
    made.close()
