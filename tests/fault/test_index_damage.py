"""A damaged index: reported with the remedy, whatever else is broken; rebuilt it answers as before."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lmdb
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import IndexDamaged, StoreUnavailable
from nearkin_shared.index.lmdb.entry_encoding import MARK_HEAD
from tests.support.data.histories import history
from tests.support.data.stores import SMALL, find_broken, manifests, settings

CHOSEN = settings(SMALL, {"delta": {"max_depth": 3}, "features": {"count": 6, "super_features": 6}})
CONTENTS = history()


def damaged_names(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("kept_pages", [0, 3, 9])
def test_verify_names_unreadable_index_and_other_damage(root: Path, kept_pages: int, read_only: bool) -> None:
    """Verify names an index that cannot be read, and all other damage."""
    data = root / "index" / "data.mdb"
    data.write_bytes(data.read_bytes()[: kept_pages * 4096] or b"x" * 8192)
    manifests(root)[0].write_bytes(b"")
    with open_store(root, settings=CHOSEN, read_only=read_only) as store:
        named_by = {d.object_name: d.problem for d in store.verify().damage}
        assert named_by.keys() == {damaged_names(root, manifests(root)[0]), "index"}
        assert "rebuild-index" in named_by["index"]
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        assert {d.object_name for d in store.verify().damage} == {damaged_names(root, manifests(root)[0])}


def flip_value(root: Path, table: str, at: int, bit: int) -> None:
    """Flip a bit in the first entry of a table of the index."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        database = env.open_db(table.encode())
        with env.begin(write=True, db=database) as txn, txn.cursor() as cursor:
            assert cursor.first()
            value = bytearray(cursor.value())
            value[at % len(value)] ^= 1 << bit
            cursor.put(cursor.key(), bytes(value))


@pytest.mark.parametrize("table", ["versions", "containers"])
def test_flipped_bit_of_catalog_is_index_damage(root: Path, table: str) -> None:
    """Any flipped bit of the catalog is reported as damage of the index."""
    for at in range(0, 260, 13):
        flip_value(root, table, at, at % 8)
        with open_store(root, settings=CHOSEN, create=True) as store:
            calls: list[Callable[[], object]] = [store.stats]
            if table == "versions":
                calls += [
                    lambda: list(store.versions(all_versions=True)),
                    store.list_deleted,
                    lambda: store.forget("", dry_run=True),
                ]
            (damage,) = store.verify().damage
            assert (damage.object_name, damage.versions) == ("index", ())
            assert "rebuild-index" in damage.problem
            for call in calls:
                with pytest.raises(IndexDamaged, match="rebuild-index"):
                    call()
            assert find_broken(store, CONTENTS) == set()
        flip_value(root, table, at, at % 8)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert len(list(store.versions(all_versions=True))) == len(CONTENTS)
        assert store.verify().damage == ()


def test_entry_of_another_table_is_no_version(root: Path) -> None:
    """An entry of another table is not read as a version."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        of, to = env.open_db(b"containers"), env.open_db(b"versions")
        with env.begin(write=True) as txn, txn.cursor(db=of) as cursor:
            assert cursor.first()
            txn.put(cursor.key(), cursor.value(), db=to)
    with open_store(root, settings=CHOSEN, create=True) as store, pytest.raises(IndexDamaged, match="rebuild-index"):
        store.stats()


def test_mark_entry_of_another_length_is_damage(root: Path) -> None:
    """An index entry about marks with another length is damage."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True, db=meta) as txn:
            ((key, value),) = [(key, value) for key, value in txn.cursor() if key.startswith(MARK_HEAD)]
            txn.put(key, value[:-1])
    with open_store(root, settings=CHOSEN, create=True) as store:
        for call in (store.stats, lambda: list(store.versions()), store.list_deleted):
            with pytest.raises(IndexDamaged, match="rebuild-index"):
                call()
        assert [damage.object_name for damage in store.verify().damage] == ["index"]
        with pytest.raises(IndexDamaged, match="rebuild-index"):
            store.undelete("deleted")
        store.rebuild_index()
        assert store.verify().damage == ()
        store.undelete("deleted")
        assert len(list(store.versions(all_versions=True))) == len(CONTENTS) + 1


@pytest.mark.parametrize("instead", ["file", "link"])
def test_rebuilt_index_replaces_a_file_at_its_name(root: Path, tmp_path: Path, instead: str) -> None:
    """A rebuilt index replaces whatever is at its name and is no folder."""
    shutil.rmtree(root / "index")
    if instead == "file":
        (root / "index").write_bytes(b"mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine").write_bytes(b"mine")
        (root / "index").symlink_to(tmp_path / "elsewhere")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        assert len(list(store.versions(all_versions=True))) == len(CONTENTS)
        assert store.verify().damage == ()
    assert instead == "file" or (tmp_path / "elsewhere" / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", [lmdb.BadTxnError, lmdb.CursorFullError, lmdb.IncompatibleError, lmdb.BadDbiError])
def test_index_that_lmdb_reports_damaged_while_open_is_rebuilt(
    root: Path, monkeypatch: pytest.MonkeyPatch, damage: type[lmdb.Error]
) -> None:
    """F.27: The next call of the same process, a server for example, sets the index aside and rebuilds it."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        index = store._index.readable()
        env = index._env
        monkeypatch.setattr(index, "_env", SimpleNamespace(begin=Mock(side_effect=damage("x")), info=env.info))
        with pytest.raises(IndexDamaged, match="rebuild-index"):
            index.container_ids()
        assert store.stats().versions >= len(CONTENTS)
        assert store._index.readable() is not index
        store.put("new", b"content")
        assert store.verify().damage == ()


def test_index_whose_format_is_no_number_is_damaged(root: Path) -> None:
    """An index whose format does not parse as a number is damaged."""
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        database = env.open_db(b"meta")
        with env.begin(write=True, db=database) as txn:
            txn.put(b"version", b"u")
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert [damage.object_name for damage in store.verify().damage] == ["index"]
        with pytest.raises(IndexDamaged, match="rebuild-index"):
            store.put("k", b"content")
        store.rebuild_index()
        assert store.verify().damage == ()


@pytest.mark.parametrize("harm", ["garbage", "empty", "cut", "zeros"])
def test_damaged_index_is_rebuilt_or_refused_clearly(root: Path, harm: str) -> None:
    """A damaged index is rebuilt or refused clearly, and then works."""
    data = root / "index" / "data.mdb"
    size = data.stat().st_size
    match harm:
        case "garbage":
            data.write_bytes(random_bytes(200_000, 3))
        case "empty":
            data.write_bytes(b"")
        case "cut":
            data.write_bytes(data.read_bytes()[: 3 * 4096])
        case "zeros":
            data.write_bytes(bytes(min(size, 1 << 20)))
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert find_broken(store, CONTENTS) == set()  # reading needs no index
    with open_store(root, settings=CHOSEN, create=True) as store:
        message = "rebuild-index"  # nothing, where it could be put
        try:
            store.put("k", b"content")
        except StoreUnavailable as err:
            message = str(err)
    assert "rebuild-index" in message
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        assert store.put("history", CONTENTS["history", 1]).ledger.duplicate_chunks > 0
        assert len(store.versions(all_versions=True)) >= len(CONTENTS)
        assert store.verify().damage == ()


def overwrite_page_heads(root: Path) -> None:
    """Overwrite four bytes in the head of each page behind the two meta pages."""
    chance, path = random.Random(3), root / "index" / "data.mdb"
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096):
        for offset in (12, 14, 16, 18):
            data[page * 4096 + offset] = chance.randrange(256)
    path.write_bytes(data)


def test_verify_with_damaged_page_heads_names_index(root: Path) -> None:
    """F.27: verify names an index whose pages are damaged, though it needs no index itself."""
    overwrite_page_heads(root)
    with open_store(root, settings=CHOSEN, read_only=True) as store:
        assert [damage.object_name for damage in store.verify().damage] == ["index"]
    with open_store(root, settings=CHOSEN) as store:
        assert [damage.object_name for damage in store.verify().damage] == ["index"]
        assert len(store.versions(all_versions=True)) == len(CONTENTS)  # rebuilt
        assert store.verify().damage == ()


@pytest.mark.parametrize("call", ["put", "versions", "stats", "gc"])
def test_index_that_lmdb_reports_damaged_is_rebuilt(root: Path, call: str) -> None:
    """F.27: An index in which LMDB meets damage is set aside and rebuilt, without rebuild-index by hand."""
    overwrite_page_heads(root)
    calls = {
        "put": lambda store: store.put("new", b"content"),
        "versions": lambda store: store.versions(),
        "stats": lambda store: store.stats(),
        "gc": lambda store: store.gc(),
    }
    with open_store(root, settings=CHOSEN) as store:
        if call == "gc":  # a GC run marks the index as damaged, and the next one rebuilds it
            with suppress(IndexDamaged):
                store.gc()
        calls[call](store)
        assert len(store.versions(all_versions=True)) == len(CONTENTS) + (call == "put")
    with open_store(root, settings=CHOSEN) as store:
        assert store.verify().damage == ()
