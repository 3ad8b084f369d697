"""Test a restored older copy of ROOT/index: chunks deleted since are not used."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin.local.index_location import REMOVALS_FILE
from nearkin.store import Store, open_store
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from tests.support.data.stores import SMALL, settings

STALE = "has an older state of the store"
AT_ONCE = settings(SMALL, {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}})
PURGING = settings(SMALL)
KEPT, REMOVED = random_bytes(300_000, 1), random_bytes(300_000, 2)


def put_index_back(root: Path, older: Path) -> None:
    shutil.rmtree(root / "index")
    shutil.copytree(older, root / "index")


def collect(store: Store) -> None:
    """Delete one of two blobs of one container and free its chunks."""
    store.delete("removed")
    for _ in range(3):
        store.gc()


def purge(store: Store) -> None:
    """Delete one of two blobs of one container and remove its chunks at once."""
    store.delete("removed")
    store.purge("removed")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Make a store of two blobs in one container, and return a copy of its index."""
    root = tmp_path / "store"
    with open_store(root, settings=AT_ONCE, create=True) as store:
        list(store.put_many([("removed", REMOVED), ("kept", KEPT)]))
    return shutil.copytree(root / "index", tmp_path / "older")


@pytest.mark.parametrize("remove", [collect, purge])
def test_older_index_with_removed_chunks_is_rebuilt(
    tmp_path: Path, older: Path, remove: Callable[[Store], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Store removed content again although an older index names it."""
    root = tmp_path / "store"
    with open_store(root, settings=PURGING if remove is purge else AT_ONCE) as store:
        remove(store)
    put_index_back(root, older)
    with caplog.at_level(logging.WARNING), open_store(root, settings=AT_ONCE) as store:
        assert store.put("again", REMOVED).ledger.unique_bytes == len(REMOVED)
        assert (store.get("again").read(), store.get("kept").read()) == (REMOVED, KEPT)
        assert store.verify().damage == ()
    assert STALE in caplog.text


def test_index_copied_as_a_removal_begins_is_rebuilt(
    tmp_path: Path, older: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reject a copy made between the new token and the removal of entries: its token is older."""
    root, copy, real = tmp_path / "store", tmp_path / "copy", LmdbIndex._withdraw

    def forget(index: LmdbIndex, *arguments: Any) -> None:
        shutil.copytree(root / "index", copy, dirs_exist_ok=True)
        real(index, *arguments)

    with monkeypatch.context() as patch, open_store(root, settings=AT_ONCE) as store:
        patch.setattr(LmdbIndex, "_withdraw", forget)
        collect(store)
    put_index_back(root, copy)
    with caplog.at_level(logging.WARNING), open_store(root, settings=AT_ONCE) as store:
        assert store.put("again", REMOVED).ledger.unique_bytes == len(REMOVED)
        assert (store.get("again").read(), store.get("kept").read()) == (REMOVED, KEPT)
    assert STALE in caplog.text


def test_removal_that_fails_leaves_the_index_current(
    tmp_path: Path, older: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keep a valid token if the transaction of a removal fails, also the first time."""
    root = tmp_path / "store"

    def fail(*_: Any) -> None:
        raise StoreUnavailable("no transaction")

    with open_store(root, settings=AT_ONCE) as store:
        with monkeypatch.context() as patch:
            patch.setattr(LmdbIndex, "_withdraw", fail)
            with pytest.raises(StoreUnavailable):
                collect(store)
        assert (root / REMOVALS_FILE).exists()
    with open_store(root, settings=AT_ONCE) as store:
        assert store.put("kept", KEPT).ledger.unique_bytes == 0
    assert STALE not in caplog.text


def test_older_index_of_later_puts_is_completed(tmp_path: Path, older: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older index that only lacks entries is not rebuilt, and puts replace no token."""
    root = tmp_path / "store"
    with open_store(root, settings=AT_ONCE) as store:
        store.put("later", random_bytes(100_000, 3))
    assert not (root / REMOVALS_FILE).exists()
    put_index_back(root, older)
    with open_store(root, settings=AT_ONCE) as store:
        assert store.get("later").read() == random_bytes(100_000, 3)
    assert STALE not in caplog.text


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_damaged_token_of_removals_rebuilds_once(
    tmp_path: Path, older: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that is not one is replaced with the index, and the next start needs no rebuild."""
    root = tmp_path / "store"
    with open_store(root, settings=AT_ONCE) as store:
        collect(store)
    (root / REMOVALS_FILE).write_bytes(damage)
    for rebuilds in (1, 0):
        caplog.clear()
        with open_store(root, settings=AT_ONCE) as store:
            assert store.put("kept", KEPT).ledger.unique_bytes == 0
        assert caplog.text.count(STALE) == rebuilds
