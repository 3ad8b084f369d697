"""Files of a store: their content, their readers, and the links that are followed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import VERSION
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.utils.private_files import open_private
from tests.support.data.stores import ENCRYPTED, SMALL, settings

CHOSEN = settings(SMALL)
ENCRYPTED_STORE = settings(SMALL, ENCRYPTED)

LEAKING = """
import os, sys
os.umask(0)
from nearkin import open_store
from tests.support.data.stores import ENCRYPTED, settings

with open_store(sys.argv[1], settings=settings(ENCRYPTED), create=True) as store:
    for i in range(10):
        rows = [b"HEAPMARKER" * 420 for _ in range(2000)]
        rows = rows[::2]  # holes of a page's size: the allocator hands them to the next one that asks for a page
        store.put("NAMEMARKER/%d" % i, os.urandom(9000) + b"BLOBMARKER" * 100)
    assert len(store.versions("NAMEMARKER/")) == 10
    store.delete("NAMEMARKER/1")
"""


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def shared_entries(folder: Path) -> list[str]:
    """Return the entries of a folder, and the folder itself, that other users than the owner may use."""
    return [str(path) for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & 0o077]


def test_store_encrypted_leaks_nothing_into_files(tmp_path: Path) -> None:
    """F.1: No marker of freed heap, blob content or key name is in any file, and no other user may read one."""
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir(mode=0o700)
    home.mkdir(mode=0o700)
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", LEAKING, str(tmp_path / "s")],
            env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
            cwd=home,
            check=True,
            timeout=120,
        )
    searched = files(tmp_path)
    assert tmp_path / "s" / "index" / "data.mdb" in searched
    found = {
        (path.name, marker)
        for path in searched
        for marker in (b"HEAPMARKER", b"BLOBMARKER", b"NAMEMARKER")
        if marker in path.read_bytes()
    }
    assert found == set()
    assert shared_entries(tmp_path / "s") == []


def test_index_of_other_keys_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F.1: A prefix of an encrypted index's names is answered, and an index under other keys is rebuilt."""
    root = tmp_path / "s"
    with open_store(root, settings=ENCRYPTED_STORE, create=True) as store:
        for key in ("a/1", "a/2", "b/1"):
            store.put(key, key.encode())
    with open_store(root, settings=ENCRYPTED_STORE, read_only=True) as store:
        assert [info.key for info in store.versions("a/")] == ["a/1", "a/2"]
        assert store._index.read(lambda index: index.versions_of("default", "b/1")) == [1]
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True, db=meta) as txn:
            txn.put(b"complete", b"%dsealed 0123456789abcdef" % VERSION)
    with open_store(root, settings=ENCRYPTED_STORE, create=True) as store:
        assert len(store.versions()) == 3
    assert [record.message for record in caplog.records if "under other keys" in record.message]


def test_index_of_older_release_is_rebuilt_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F.1: An index whose pages may carry memory of a process is rebuilt once, and the user is informed."""
    root = tmp_path / "s"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
    with lmdb.open(str(root / "index"), max_dbs=16, map_size=1 << 28) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True, db=meta) as txn:
            txn.put(b"complete", b"5")
            txn.put(b"heap", b"HEAPMARKER")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"more")
    assert [record.message for record in caplog.records if "older version of Nearkin" in record.message]
    assert b"HEAPMARKER" not in (root / "index" / "data.mdb").read_bytes()
    caplog.clear()
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"again")
        assert len(store.versions(all_versions=True)) == 3
    assert not caplog.records


def test_modes_of_an_older_store_are_tightened(tmp_path: Path) -> None:
    """F.1: A writer removes other users' access from files of an older release."""
    root = tmp_path / "s"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", random_bytes(100_000, 1))
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"more")
    top = [*root.iterdir(), *(root / "index").iterdir()]
    assert [str(path) for path in top if stat.S_IMODE(path.lstat().st_mode) & 0o077] == []


@pytest.mark.parametrize("name", ["lock", "lock.holder", "lock.round", "lock.wanted"])
def test_lock_file_as_link_is_refused(tmp_path: Path, name: str) -> None:
    """F.24: A link instead of a lock's file is refused, and its target stays unchanged."""
    root, victim = tmp_path / "s", tmp_path / "victim"
    victim.write_bytes(b"precious\n" * 10)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(victim)
    with open_store(root, settings=CHOSEN, create=True) as store:
        call = (lambda: store.put("k", b"more")) if name in ("lock", "lock.holder") else store.gc
        with pytest.raises(StoreUnavailable, match="symbolic link"):
            call()
    assert victim.read_bytes() == b"precious\n" * 10


def test_holder_with_another_name_is_not_written(tmp_path: Path) -> None:
    """F.24: The holder's file is not overwritten if it is a hard link to another file."""
    root, victim = tmp_path / "s", tmp_path / "victim"
    victim.write_bytes(b"precious\n")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
        (root / "lock.holder").unlink()
        os.link(victim, root / "lock.holder")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"more")
    assert victim.read_bytes() == b"precious\n"


@pytest.mark.parametrize("name", ["tmp", "index"])
def test_own_folder_as_link_is_refused(tmp_path: Path, name: str) -> None:
    """F.24: A link instead of a folder of the store is refused, whichever user made it."""
    root, other = tmp_path / "s", tmp_path / "downloads"
    other.mkdir()
    (other / "movie.part").write_bytes(b"x")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
    shutil.rmtree(root / name)
    (root / name).symlink_to(other)
    with (
        open_store(root, settings=CHOSEN, create=True) as store,
        pytest.raises(StoreUnavailable, match="symbolic link"),
    ):
        store.put("k", b"more")
    assert [path.name for path in other.iterdir()] == ["movie.part"]


def test_new_index_as_link_is_replaced(tmp_path: Path) -> None:
    """F.24: A rebuild removes a link at its folder's name, and nothing behind it."""
    root, other = tmp_path / "s", tmp_path / "home"
    other.mkdir()
    (other / "thesis").write_bytes(b"x")
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("k", b"content")
    (root / "index.new").symlink_to(other)
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.rebuild_index()
        assert len(store.versions()) == 1
    assert [path.name for path in other.iterdir()] == ["thesis"]
    assert not (root / "index").is_symlink()


def test_object_as_link_is_refused_and_replaced(tmp_path: Path) -> None:
    """F.24: An object that is a link is damage, its target is not read, and repair replaces the link."""
    (tmp_path / "s").mkdir()
    objects = LocalObjectStore(tmp_path / "s")
    objects.put_new("manifests/x", b"1")
    (tmp_path / "secret").write_bytes(b"SECRET")
    (tmp_path / "s/manifests/x").unlink()
    (tmp_path / "s/manifests/x").symlink_to(tmp_path / "secret")
    with pytest.raises(Corrupt, match="symbolic link") as raised:
        objects.get("manifests/x")
    assert "SECRET" not in str(raised.value)
    objects.replace("manifests/x", b"1")
    assert objects.get("manifests/x") == b"1"
    assert (tmp_path / "secret").read_bytes() == b"SECRET"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link to another user")
def test_folder_linked_by_another_user_is_refused(tmp_path: Path) -> None:
    """F.24: A link to a folder of objects is accepted only if this user or root made it."""
    (tmp_path / "s").mkdir()
    objects, other = LocalObjectStore(tmp_path / "s"), tmp_path / "other disk"
    objects.put_new("containers/a/x", b"1")
    (tmp_path / "s/containers").rename(other)
    (tmp_path / "s/containers").symlink_to(other)
    assert objects.get("containers/a/x") == b"1"  # the operator's own
    os.lchown(tmp_path / "s/containers", 12345, 12345)
    for call in (
        lambda: objects.put_new("containers/a/y", b"1"),
        lambda: objects.delete("containers/a/x"),
        lambda: list(objects.names("containers")),
    ):
        with pytest.raises(StoreUnavailable, match="symbolic link"):
            call()
    assert (other / "a/x").is_file()


def test_pipe_in_place_of_own_file_is_refused(tmp_path: Path) -> None:
    """F.32: A pipe instead of one of the store's files is refused, and no process waits for its other end."""
    path = tmp_path / "lock"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is not a regular file"):
        open_private(path, os.O_RDWR)
