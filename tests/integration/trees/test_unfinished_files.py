"""Files that a killed restore left in its target."""

from __future__ import annotations

import os
from pathlib import Path

from nearkin import open_store
from nearkin.trees.unfinished_files import create_locked, remove_unfinished, temporary_name
from tests.support.data.stores import SMALL, settings


def test_restore_removes_files_of_a_killed_restore(tmp_path: Path) -> None:
    """Remove unfinished files in restored folders; keep one that a restore writes, and any other name."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "below").mkdir(parents=True)
    for path in (source / "a", source / "below" / "b"):
        path.write_bytes(b"content")
    (target / "below").mkdir(parents=True)
    names = [os.fsdecode(temporary_name()) for _ in range(3)]
    left = [target / names[0], target / "below" / names[1]]
    others = [target / f"{names[0]}.old", target / ".nearkin-restore-notes"]
    for path in (*left, *others):
        path.write_bytes(b"unfinished")
    folder = os.open(target, os.O_RDONLY)
    in_use = create_locked(os.fsencode(names[2]), folder)
    try:
        with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
            store.backup("k", [source])
            store.restore("k", target)
        assert [path for path in left if path.exists()] == []
        assert all(path.exists() for path in (*others, target / names[2]))
        assert (target / "below" / "b").read_bytes() == b"content"
    finally:
        os.close(in_use)
    assert remove_unfinished(folder) == 1
    assert not (target / names[2]).exists()
    os.close(folder)


def test_removal_keeps_links_and_other_kinds(tmp_path: Path) -> None:
    """Remove no name of a file that has another one, no symbolic link and no folder."""
    (tmp_path / "file").write_bytes(b"content")
    names = [os.fsdecode(temporary_name()) for _ in range(3)]
    (tmp_path / names[0]).hardlink_to(tmp_path / "file")
    (tmp_path / names[1]).symlink_to("file")
    (tmp_path / names[2]).mkdir()
    folder = os.open(tmp_path, os.O_RDONLY)
    assert remove_unfinished(folder) == 0
    os.close(folder)
    assert sorted(os.listdir(tmp_path)) == sorted(["file", *names])


def test_backup_leaves_out_unfinished_files(tmp_path: Path) -> None:
    """Leave out what a killed restore left, unless it is given; other names that begin so are stored."""
    source = tmp_path / "source"
    source.mkdir()
    name = os.fsdecode(temporary_name())
    for path in (source / name, source / ".nearkin-restore-notes"):
        path.write_bytes(b"content")
    with open_store(tmp_path / "s", settings=settings(SMALL), create=True) as store:
        store.backup("k", [source])
        store.restore("k", tmp_path / "target")
        assert os.listdir(tmp_path / "target") == [".nearkin-restore-notes"]
        store.backup("given", [source / name])
        store.restore("given", tmp_path / "other")
        assert os.listdir(tmp_path / "other") == [name]
