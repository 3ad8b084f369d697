"""Deletion in a local store: killed between any two steps, with damage, and after the index is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.errors import Corrupt, NotFound, StoreLocked
from nearkin_shared.storage.manifests import mark_name
from tests.support.data.stores import SMALL, process, settings

CHOSEN = settings(SMALL, {})
VERSIONS = 4

DIES = """
import os, sys
from nearkin import open_store
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.objectstore import local as objectstore_base
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.data.stores import SMALL, settings

step, times = sys.argv[2], int(sys.argv[3])
kind, name = {
    "noted": (LmdbIndex, "mark_many"),
    "marked": (ManifestStore, "put_mark"),
    "linked": (objectstore_base.os, "link"),
}[step]
real, done = getattr(kind, name), []

def dying(*arguments, **more):
    result = real(*arguments, **more)
    done.append(1)
    if len(done) == times:
        os._exit(9)
    return result

setattr(kind, name, dying)
with open_store(sys.argv[1], settings=settings(SMALL, {}), create=True) as store:
    getattr(store, sys.argv[4])("k")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", settings=CHOSEN, create=True) as store:
        for version in range(1, VERSIONS + 1):
            store.put("k", content(version))
        store.put("other", b"stays")
    return tmp_path / "store"


def content(version: int) -> bytes:
    return random.Random(version).randbytes(5000)


def list_versions(store: Store) -> list[int]:
    return [info.version for info in store.versions("k", all_versions=True)]


@pytest.mark.parametrize(
    ("step", "times"), [("noted", 1), ("linked", 1), *(("marked", times) for times in range(1, VERSIONS + 1))]
)
@pytest.mark.parametrize("what", ["delete", "undelete"])
def test_deletion_killed_at_any_step_is_the_same_to_all(root: Path, what: str, step: str, times: int) -> None:
    """Whichever step of a deletion is the last, every reader sees the same versions."""
    if what == "undelete":
        with open_store(root, settings=CHOSEN, create=True) as store:
            store.delete("k")
    died = process(DIES, root, step, str(times), what)
    died.communicate(timeout=30)
    assert died.returncode == 9
    with open_store(root, settings=CHOSEN, create=True) as store:
        found = list_versions(store)
        for version in range(1, VERSIONS + 1):
            if version in found:
                assert store.get("k", version).read() == content(version)
            else:
                with pytest.raises(NotFound):
                    store.get("k", version)
        deleted = [entry.version for entry in store.list_deleted()]
        assert sorted(found + deleted) == list(range(1, VERSIONS + 1))
        # The newest is deleted last and restored first: no older version ever replaces it.
        if found:
            assert VERSIONS in found
            assert store.get("k").read() == content(VERSIONS)
            assert [info.version for info in store.versions("k")] == [VERSIONS]
        again = store.delete if what == "delete" else store.undelete
        while (deleted if what == "undelete" else found) != []:
            assert again("k") > 0
            found, deleted = list_versions(store), [entry.version for entry in store.list_deleted()]
        assert (what == "delete") == (found == [])
        assert store.put("k", b"next").info.version == VERSIONS + 1
        assert store.verify().damage == ()
        stats = store.stats()
        assert stats.deleted_versions == len(deleted)
        assert sum(stats.parts.values()) == stats.ledger.stored_bytes


def test_lost_or_rebuilt_index_keeps_version_deleted(root: Path) -> None:
    """A deleted version stays deleted with a lost index and with a rebuilt one."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.delete("k", 2)
        store.delete("k", 3)
        store.undelete("k", 3)
        before = store._index.writable().entries()
        assert store.rebuild_index().skipped == ()
        assert store._index.writable().entries() == before
        assert len(before["marks"]) == 2
    shutil.rmtree(root / "index")
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert list_versions(store) == [1, 3, 4]
        assert [entry.version for entry in store.list_deleted()] == [2]
        assert store.stats().deleted_versions == 1
        assert store.undelete("k") == 1
        assert store.get("k", 2).read() == content(2)


def test_broken_tombstone_is_named_and_hides_its_version(root: Path) -> None:
    """A broken tombstone is named with its version, which stays hidden."""
    name = mark_name("default", "k", 2, 1)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.delete("k", 2)
    path = root / name
    data = path.read_bytes()
    for at in (0, 30, len(data) - 1):
        path.chmod(0o600)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with open_store(root, settings=CHOSEN, create=True) as store:
            (damage,) = store.verify().damage
            assert (damage.object_name, damage.versions) == (name, (("k", 2),))
            assert list_versions(store) == [1, 3, 4]
            with pytest.raises(Corrupt):
                store.undelete("k", 2)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.rebuild_index().skipped == (name,)
        assert list_versions(store) == [1, 3, 4]
        assert store.delete("k", 3) == 1


def test_stray_file_next_to_manifests_is_named(root: Path) -> None:
    """A stray file next to the manifests is named."""
    stray = (root / mark_name("default", "k", 2, 1)).with_suffix(".bak")
    stray.write_bytes(b"")
    with open_store(root, settings=CHOSEN, create=True) as store:
        with pytest.raises(Corrupt, match=stray.name):
            store.delete("k")
        assert [damage.object_name for damage in store.verify().damage] == [str(stray.relative_to(root))]


def test_deletion_while_another_process_writes_is_refused(root: Path) -> None:
    """A store that another process writes refuses deletions."""
    with (
        open_store(root, settings=CHOSEN, create=True) as writer,
        open_store(root, settings=CHOSEN, create=True) as store,
    ):
        writer.put("w", b"w")
        with pytest.raises(StoreLocked):
            store.delete("k")
        assert list_versions(store) == list(range(1, VERSIONS + 1))
        assert writer.delete("k") == VERSIONS
        assert list_versions(store) == []  # readers see it at once, whatever they have open


def test_deletion_during_a_put_is_done(root: Path) -> None:
    """A deletion during a put of the same Store is done."""

    def items() -> Iterator[tuple[str, bytes]]:
        yield "a", b"first"
        assert store.delete("k") == VERSIONS
        yield "k", b"after"
        with pytest.raises(NotFound):
            store.get("k")

    with open_store(root, settings=CHOSEN, create=True) as store:
        assert [result.info.version for result in store.put_many(items())] == [1, VERSIONS + 1]
        assert list_versions(store) == [VERSIONS + 1]
        assert store.stats().deleted_versions == VERSIONS


def test_deletion_by_tenant_deletes_its_own_versions(root: Path) -> None:
    """A tenant deletes only its own versions."""
    other = with_changes(CHOSEN, {"tenant": "other"})
    with open_store(root, settings=other, create=True) as store:
        with pytest.raises(NotFound):
            store.delete("k")
        store.put("k", b"theirs")
        assert store.delete("k") == 1
        assert [entry.key for entry in store.list_deleted()] == ["k"]
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert list_versions(store) == list(range(1, VERSIONS + 1))
        assert store.list_deleted() == []


def test_deleted_data_serve_as_duplicates_and_bases(root: Path) -> None:
    """Deleted data still serve as duplicates and bases."""
    with open_store(root, settings=CHOSEN, create=True) as store:
        big = random.Random(9).randbytes(400_000)
        store.put("big", big)
        store.delete("big")
        again = store.put("big", big)
        assert again.ledger.duplicate_chunks == again.ledger.chunks
        assert store.get("big").read() == big
