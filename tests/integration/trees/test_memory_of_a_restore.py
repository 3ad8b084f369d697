"""Test what a restore holds in memory: no entry of a folder for each folder."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.store import Store
from nearkin.trees import tree_restore
from nearkin.trees.restore_counts import RestoreOptions
from nearkin.trees.tree_restore import TreeRestore
from nearkin_shared.formats.tree_entry_group import TreeEntry
from tests.support.data.archives import archive_of, member

PARENTS, FOLDERS = 20, 400
"""Folders in the root, and folders in each; one file is in each of the first half of those."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the tree `home`: 8,020 folders, each with its own mtime."""
    folder, members = tmp_path_factory.mktemp("memory"), list[tuple[object, bytes]]()
    for parent in range(PARENTS):
        members.append((member(f"{parent:03}", type=tarfile.DIRTYPE, mode=0o750, mtime=parent), b""))
        for number in range(FOLDERS):
            path = f"{parent:03}/{number:06}"
            members.append((member(path, type=tarfile.DIRTYPE, mode=0o710, mtime=1000 * parent + number), b""))
            if number < FOLDERS // 2:
                members.append((member(f"{path}/file"), b""))
    with open_store(folder / "store", create=True) as store:
        store.import_tar("home", io.BytesIO(archive_of(members)))
    return folder / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """Return the open store."""
    with open_store(folder) as opened:
        yield opened


def wrong_folders(target: Path) -> list[str]:
    """Return the folders that do not have their mode and mtime."""
    found = []
    for parent in range(PARENTS):
        statuses = [(f"{parent:03}", parent, 0o40750)]
        statuses += [(f"{parent:03}/{number:06}", 1000 * parent + number, 0o40710) for number in range(FOLDERS)]
        for path, mtime, mode in statuses:
            if os.path.lexists(target / path):
                status = os.lstat(target / path)
                if (status.st_mtime, status.st_mode) != (mtime, mode):
                    found.append(path)
    return found


def held_bytes(monkeypatch: pytest.MonkeyPatch, restore: Callable[[], object]) -> int:
    """Return the bytes that a restore holds before it sets attributes of folders."""
    held = list[int]()
    finish = TreeRestore._finish_folder

    def finish_folder(self: TreeRestore, entry: TreeEntry) -> None:
        if not held:
            held.append(tracemalloc.get_traced_memory()[0] - before)
        finish(self, entry)

    monkeypatch.setattr(TreeRestore, "_finish_folder", finish_folder)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        restore()
    finally:
        tracemalloc.stop()
    return held[0]


def test_folders_are_not_held_in_memory(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attributes are set at the end, of entries that are read again: 8,020 entries are 3 MB."""
    held = held_bytes(monkeypatch, lambda: store.restore("home", tmp_path / "new"))
    assert held < 1_500_000
    assert wrong_folders(tmp_path / "new") == []
    assert len(os.listdir(tmp_path / "new" / "000")) == FOLDERS


def test_folders_above_accepted_entries_are_forgotten(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked up again: all get their attributes, and no other folder is made."""
    monkeypatch.setattr(tree_restore, "KNOWN_FOLDERS_MAX", 5)
    counts = store.restore("home", tmp_path / "new", options=RestoreOptions(accepts=lambda one: one.name == b"file"))
    assert (counts.files, counts.failed) == (PARENTS * FOLDERS // 2, 0)
    assert wrong_folders(tmp_path / "new") == []
    assert len(os.listdir(tmp_path / "new" / "000")) == FOLDERS // 2
