"""A backup takes over unchanged files many at a time, and stores what one of all files stores."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearkin.lab.generated_data import text_like
from nearkin.store import Store, open_store
from nearkin.trees import tree_writer
from nearkin.trees.backup import RECENT_NS
from nearkin.trees.backup_walk import BackupOptions, ComparisonOptions
from nearkin_shared.formats.tree_entry_group import TreeEntry
from nearkin_shared.formats.tree_layout import GroupInfo
from nearkin_shared.reading.restore import VersionReader

FILES = 1500


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with files of all sizes and other entries between them, in several groups."""
    root = tmp_path / "source"
    for number in range(FILES):
        path = root / f"{number // 250:02}" / f"{number:05}"
        if number % 50 == 7:
            path = path / "deeper"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * (number % 700))
    (root / "00" / "link").symlink_to("00001")
    os.link(root / "00" / "00009", root / "01" / "other name")
    os.setxattr(root / "02" / "00600", b"user.kept", b"value")
    with (root / "03" / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        os.pwrite(file.fileno(), b"data", 1 << 19)
    _wait()
    return root


def _wait() -> None:
    """Wait until the times of what changed prove it unchanged."""
    time.sleep(1.2 * RECENT_NS / 1e9)


def _change_nothing(root: Path) -> None:
    """Leave the folder as it is."""


def _edit(root: Path) -> None:
    for name in ("00/00000", "02/00601", "05/01499"):
        (root / name).write_bytes(b"edited " + name.encode())


def _add_and_delete(root: Path) -> None:
    (root / "00" / "00001").unlink()
    (root / "02" / "00600a").write_bytes(b"new")
    (root / "a new one").write_bytes(b"new")
    (root / "04" / "01100").unlink()


def _replace_kinds(root: Path) -> None:
    (root / "01" / "00300").unlink()
    (root / "01" / "00300").mkdir()
    (root / "01" / "00301").unlink()
    (root / "01" / "00301").symlink_to("00302")
    os.link(root / "03" / "00800", root / "03" / "00801-again")


def _change_attributes(root: Path) -> None:
    (root / "00" / "00002").chmod(0o600)
    os.setxattr(root / "03" / "00900", b"user.new", b"1")
    os.utime(root / "05" / "01400", ns=(1, 1))


@pytest.mark.parametrize("change", [_change_nothing, _edit, _add_and_delete, _replace_kinds, _change_attributes])
def test_backup_again_stores_what_a_rescan_stores(change: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    """The entries of a backup are those of one that reads every file; its contents are those of the folder."""
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("k", [source])
        change(source)
        _wait()
        again = store.backup("k", [source])
        rescan = store.backup("k", [source], options=BackupOptions(comparison=ComparisonOptions(force_rescan=True)))
        assert (again.is_complete, rescan.is_complete) == (True, True)
        assert _entries(store, 2) == _entries(store, 3)
        assert store.tree("k", 2).digest == store.tree("k", 3).digest
        assert again.counts.files == rescan.counts.files
        assert (again.counts.unchanged_files > FILES - 10, rescan.counts.unchanged_files) == (True, 0)
        store.restore("k", tmp_path / "target", version=2)
    subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "target"], check=True)


def _entries(store: Store, version: int) -> list[TreeEntry]:
    return [placed.entry for placed in store.tree("k", version).entries()]


@pytest.mark.parametrize(("change", "encoded"), [(_change_nothing, 0), (_edit, 3)])
def test_groups_of_unchanged_entries_are_copied(
    change: Callable[[Path], None], encoded: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the groups with a changed entry are encoded: three files that lie far from one another."""
    calls: list[int] = []
    original = tree_writer._encode

    def count_rows(rows: list[TreeEntry]) -> tuple[bytes, GroupInfo]:
        calls.append(len(rows))
        return original(rows)

    with open_store(tmp_path / "store", create=True) as store:
        store.backup("k", [source])
        change(source)
        _wait()
        monkeypatch.setattr(tree_writer, "_encode", count_rows)
        store.backup("k", [source])
        groups = len(store.tree("k").group_bounds()) - 1
    assert (len(calls), groups > encoded + 1) == (encoded, True)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes of contents each read of a version gave, from now on."""
    found: list[int] = []
    original = VersionReader.read

    def counted(reader: VersionReader) -> bytes:
        data = original(reader)
        found.append(len(data))
        return data

    monkeypatch.setattr(VersionReader, "read", counted)
    return found


def test_scattered_changes_read_no_unchanged_files(tmp_path: Path, read_bytes: list[int]) -> None:
    """Of 7 MB between 40 changed files only chunks that tiny files share are read from the version before."""
    root = tmp_path / "source"
    root.mkdir()
    for number in range(1500):
        (root / f"{number:05}").write_bytes(text_like(1_000 + number * 613 % 8_000, number))
    _wait()
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("k", [root])
        for number in range(11, 1500, 37):
            (root / f"{number:05}").write_bytes(text_like(5_000, 10_000 + number))
        _wait()
        read_bytes.clear()
        result = store.backup("k", [root])
        entries_bytes = 200_000
        assert sum(read_bytes) < entries_bytes + 41 * 3_000
        store.backup("k", [root], options=BackupOptions(comparison=ComparisonOptions(force_rescan=True)))
        assert result.counts.unchanged_files == 1500 - 41
        assert _segments(store, 2) < 1.05 * _segments(store, 3)  # some end where a changed file begins
        store.restore("k", tmp_path / "target", version=2)
        assert not store.verify().damage
    subprocess.run(["diff", "-r", root, tmp_path / "target"], check=True)


def _segments(store: Store, version: int) -> int:
    """Return the number of segments of a version."""
    return len(store._manifest("k", version).segments)
