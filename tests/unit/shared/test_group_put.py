"""Test that a group of new objects is written as each object would be by itself."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.parity_object import Scheme
from nearkin_shared.objectstore import group_put, local
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.group_put import put_new_many
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.objectstore.parity import ParityObjectStore

ITEMS = [(f"manifests/{number % 5:02x}/{number:04x}/0001.nkm", b"bytes %d" % number) for number in range(40)]


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(group_put.PARTS) as found:
        yield found


@pytest.mark.parametrize("kind", ["folder", "plain", "parity", "memory"])
def test_group_creates_only_what_is_free(tmp_path: Path, threads: ThreadPoolExecutor, kind: str) -> None:
    folder: ObjectStore = LocalObjectStore(tmp_path) if kind != "memory" else memory_objects()
    objects = (
        ParityObjectStore(folder, Scheme(4, 2) if kind == "parity" else None) if kind in ("plain", "parity") else folder
    )
    objects.put_new(ITEMS[7][0], b"of another writer")
    created = put_new_many(objects, ITEMS, threads)
    assert created == [number != 7 for number in range(40)]
    for number, (name, data) in enumerate(ITEMS):
        assert objects.get(name) == (data if number != 7 else b"of another writer")
    assert not any(put_new_many(objects, ITEMS, threads))
    assert not list(tmp_path.glob("tmp/*"))
    assert (len(list(objects.names("parity"))) > 0) == (kind == "parity")


def test_group_syncs_each_file_and_folder(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name must not be reported before its file, its folder and the folder above were synced."""
    synced: list[Path] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    put_new_many(LocalObjectStore(tmp_path), ITEMS, threads)
    assert sum(path.parent == tmp_path / "tmp" for path in synced) == len(ITEMS)
    folders = {(tmp_path / name).parent for name, _ in ITEMS}
    assert folders | {folder.parent for folder in folders} <= set(synced)
    last_file = max(at for at, path in enumerate(synced) if path.parent == tmp_path / "tmp")
    assert folders <= set(synced[last_file:]), "a folder was synced before its name was in it"


def test_group_without_durable_names_leaves_none(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    objects = LocalObjectStore(tmp_path)
    objects.put_new(ITEMS[7][0], b"of another writer")
    monkeypatch.setattr(group_put, "sync_folder", fail)
    with pytest.raises(StoreUnavailable):
        put_new_many(objects, ITEMS, threads)
    assert [name for name, _ in objects.names("manifests")] == [ITEMS[7][0]]


def test_group_whose_files_were_swept_is_written_one_by_one(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may sweep the scratch folder: `put_new` then writes the file again."""
    objects, link_all = LocalObjectStore(tmp_path), group_put._link_all

    def sweep_then_link(
        folder: LocalObjectStore, temporaries: dict[int, str], finals: dict[int, str], count: int
    ) -> list[bool | None]:
        folder.sweep_scratch()
        return link_all(folder, temporaries, finals, count)

    monkeypatch.setattr(group_put, "_link_all", sweep_then_link)
    assert all(put_new_many(objects, ITEMS, threads))
    assert dict(ITEMS) == {name: objects.get(name) for name, _ in ITEMS}


def test_large_group_is_written_in_parts(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """No more than GROUP_OBJECTS_MAX files are open at a time."""
    items = [(f"manifests/00/{number:04x}/0001.nkm", b"%d" % number) for number in range(600)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(os.listdir("/proc/self/fd"))  # of this process, whatever ran before
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + group_put.GROUP_OBJECTS_MAX + 100, limits[1]))
    try:
        assert all(put_new_many(LocalObjectStore(tmp_path), items, threads))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_group_checks_the_scratch_folder_once(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of unfinished files is made and checked for a group, not for each of its objects."""
    made: list[str] = []
    make = os.mkdir

    def record(folder: str | Path, mode: int = 0o777) -> None:
        made.append(str(folder))
        make(folder, mode)

    monkeypatch.setattr(os, "mkdir", record)
    assert all(put_new_many(LocalObjectStore(tmp_path), ITEMS, threads))
    assert made.count(str(tmp_path / "tmp")) == 1


def test_group_without_a_scratch_folder_is_reported(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """A file in place of the folder of unfinished files is an error of the store, and no object is created."""
    (tmp_path / "tmp").write_bytes(b"no folder")
    objects = LocalObjectStore(tmp_path)
    with pytest.raises(StoreUnavailable, match="tmp"):
        put_new_many(objects, ITEMS, threads)
    assert not list(objects.names("manifests"))


def test_folder_above_that_is_not_synced_is_synced(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder above whose sync failed for one object of a group is synced for the next one."""
    objects = LocalObjectStore(tmp_path)
    (tmp_path / "manifests/00").mkdir(parents=True)  # of another writer, so that it cannot be removed again
    (tmp_path / "manifests/00/other").mkdir()
    failures, done = [OSError(5, "input/output error")], list[str]()
    sync, link = local.sync_folder, LocalObjectStore.link

    def fail_once(folder: str | Path) -> None:
        if str(folder) == str(tmp_path / "manifests"):
            if failures:
                raise failures.pop()
            done.append("synced")
        sync(folder)

    def record_link(self: LocalObjectStore, temporary: str, final: str) -> None:
        done.append("linked")
        link(self, temporary, final)

    monkeypatch.setattr(local, "sync_folder", fail_once)
    monkeypatch.setattr(LocalObjectStore, "link", record_link)
    assert put_new_many(objects, [(f"manifests/00/{name}/1.nkm", b"bytes") for name in "abc"], threads) == [True] * 3
    assert done == ["synced", "linked", "linked"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link to another user")
def test_folder_of_another_users_link_is_refused(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """The folder of a key, which is made without a look before, is no exception."""
    (tmp_path / "store/manifests/00").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "store/manifests/00/a"
    link.symlink_to(tmp_path / "elsewhere")
    os.lchown(link, 12345, 12345)
    items = [(f"manifests/00/{name}/1.nkm", b"bytes") for name in "ab"]
    with pytest.raises(StoreUnavailable, match="link"):
        put_new_many(LocalObjectStore(tmp_path / "store"), items, threads)
    assert not list((tmp_path / "elsewhere").iterdir())
