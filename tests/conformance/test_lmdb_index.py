"""LMDB as an index."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.lmdb.page_check import find_page_damage
from nearkin_shared.index.protocols import CollectedVersion
from tests.support.conformance import IndexContract
from tests.support.conformance.index_contract import FIRST, first_claims, manifest
from tests.support.data import samples


class TestLmdbIndex(IndexContract):
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[LmdbIndex]:
        index = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20)
        yield index
        index.close()


def test_index_complete_after_bulk_write_becomes_durable(tmp_path: Path) -> None:
    """An index opened without durability is synced before it is marked complete."""
    index = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20, durable=False)
    assert not index._env.flags()["sync"]
    synced: list[tuple[bool, bool]] = []

    class Watched:
        """Environment that records whether the index was complete at each sync."""

        def __init__(self, env: Any) -> None:
            self._real = env

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def sync(self, force: bool) -> None:
            synced.append((force, index.complete))
            self._real.sync(force)

    index._env = Watched(index._env)
    index.publish(first_claims())
    assert synced == []
    index.mark_complete()
    assert synced == [(True, True)]
    index.close()
    durable = LmdbIndex(tmp_path / "index", samples.DOMAIN, 64 << 20)
    assert durable._env.flags()["sync"]
    assert durable.complete
    durable.close()


def test_index_with_counts_of_an_earlier_release_is_usable(tmp_path: Path) -> None:
    """Its table `counts` is neither read nor written."""
    folder = tmp_path / "index"
    first = LmdbIndex(folder, samples.DOMAIN, 64 << 20)
    first.publish(first_claims())
    first.commit(manifest("k", 1, [(FIRST, 0)]), 100)
    first.mark_complete()
    first.close()
    with lmdb.open(str(folder), max_dbs=8, map_size=64 << 20) as env:
        counts = env.open_db(b"counts")
        with env.begin(write=True) as txn:
            for ordinal in range(2000):
                txn.put(struct.pack("<QI", FIRST, ordinal), struct.pack("<I", 1), db=counts)
    assert find_page_damage(folder / "data.mdb") is None
    index = LmdbIndex(folder, samples.DOMAIN, 64 << 20)
    assert index.complete
    index.commit(manifest("k", 2, [(FIRST, 0), (FIRST, 1)]), 100)
    index.collect_many([CollectedVersion("default", "k", 1)])
    index.withdraw({FIRST: None}, {}, [FIRST])
    assert index.versions_of("default", "k") == [2]
    assert not index.container_ids().tolist()
    index.close()
    with lmdb.open(str(folder), max_dbs=8, readonly=True) as env, env.begin(db=env.open_db(b"counts")) as txn:
        assert txn.stat()["entries"] == 2000
    assert find_page_damage(folder / "data.mdb") is None
    reader = LmdbIndex(folder, samples.DOMAIN, 64 << 20, read_only=True)
    assert (reader.complete, reader.versions_of("default", "k")) == (True, [2])
    reader.close()
