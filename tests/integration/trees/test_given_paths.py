"""Paths that are given to a backup: each is stored, or named and counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin.trees import backup
from nearkin.trees.backup_walk import BackupOptions
from nearkin.trees.exclusions import ExclusionOptions
from nearkin.trees.store_backup import BackupResult
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a folder with `home`, a symlink to `real`, and `etc`."""
    folder = tmp_path / "m"
    (folder / "real" / "kim").mkdir(parents=True, mode=0o750)
    (folder / "etc").mkdir()
    (folder / "real" / "kim" / "thesis").write_bytes(b"a")
    (folder / "etc" / "p").write_bytes(b"b")
    (folder / "home").symlink_to("real")
    return folder


def back_up(
    tmp_path: Path, *paths: Path | str, options: BackupOptions | None = None
) -> tuple[BackupResult, dict[bytes, TreeEntry]]:
    """Return the result, and the entries by path."""
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("k", paths, options=options)
        return result, {placed.entry.path: placed.entry for placed in store.tree("k").entries()}


def test_path_below_a_symlink_is_stored_below_a_folder(machine: Path, tmp_path: Path) -> None:
    result, found = back_up(tmp_path, machine / "home" / "kim", machine / "etc")
    assert set(found) == {b"", b"etc", b"etc/p", b"home", b"home/kim", b"home/kim/thesis"}
    assert (found[b"home"].kind, found[b"home"].inode) == (EntryKind.FOLDER, (machine / "real").stat().st_ino)
    assert result.is_complete
    with open_store(tmp_path / "store") as store:
        store.restore("k", tmp_path / "target")
    assert (tmp_path / "target" / "home" / "kim" / "thesis").read_bytes() == b"a"


def test_given_symlink_and_a_path_below_it_store_its_folder(machine: Path, tmp_path: Path) -> None:
    link = tmp_path / "mlink"
    link.symlink_to(machine)
    result, found = back_up(tmp_path, link, link / "etc")
    assert {b"mlink/etc/p", b"mlink/real/kim/thesis", b"mlink/home"} < set(found)
    assert (found[b"mlink"].kind, found[b"mlink/home"].kind) == (EntryKind.FOLDER, EntryKind.SYMLINK)
    assert result.is_complete


def test_paths_below_one_symlink_have_its_folder_as_root(machine: Path, tmp_path: Path) -> None:
    link = tmp_path / "mlink"
    link.symlink_to(machine)
    _, found = back_up(tmp_path, link / "etc", link / "real")
    assert set(found) == {b"", b"etc", b"etc/p", b"real", b"real/kim", b"real/kim/thesis"}


def test_path_below_a_symlink_of_a_given_folder_is_stored(machine: Path, tmp_path: Path) -> None:
    _, found = back_up(tmp_path, machine, machine / "home" / "kim", machine / "etc")
    assert {b"home/kim/thesis", b"real/kim/thesis", b"etc/p"} < set(found)


def test_symlink_to_a_folder_above_is_entered_for_the_given_path_alone(machine: Path, tmp_path: Path) -> None:
    (machine / "etc" / "up").symlink_to("..")
    _, found = back_up(tmp_path, machine / "etc" / "up" / "real", machine / "etc" / "p")
    assert set(found) == {b"", b"p", b"up", b"up/real", b"up/real/kim", b"up/real/kim/thesis"}


def test_last_symlink_is_stored_as_one_and_named(machine: Path, tmp_path: Path) -> None:
    result, found = back_up(tmp_path, machine / "home", machine / "etc")
    assert (found[b"home"].kind, found[b"home"].target) == (EntryKind.SYMLINK, b"real")
    assert [os.path.basename(skip.path) for skip in result.counts.skips] == [b"home"]
    assert "end the path with /" in result.counts.skips[0].reason
    result, found = back_up(tmp_path, f"{machine}/home/", machine / "etc")
    assert (found[b"home"].kind, b"home/kim/thesis" in found, result.counts.skips) == (EntryKind.FOLDER, True, [])


def test_dots_behind_a_symlink_are_those_of_the_kernel(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "far").symlink_to(machine / "real" / "kim")
    _, found = back_up(tmp_path, f"{tmp_path}/far/../kim/thesis", machine / "etc")
    assert b"real/kim/thesis" in found


def test_given_path_that_is_absent_is_named_and_the_rest_stored(machine: Path, tmp_path: Path) -> None:
    result, found = back_up(tmp_path, machine / "etc", machine / "gone" / "x")
    assert (b"p" in found, result.counts.unread, result.is_complete) == (True, 1, False)
    assert result.counts.problems == [(os.fsencode(machine / "gone" / "x"), "no such file or directory")]
    with pytest.raises(BadInput, match="gone"):
        back_up(tmp_path, machine / "gone", machine / "gone2")


def test_absent_path_does_not_move_the_root(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path next to a folder that was stored alone: names stay, and its files are taken over."""
    monkeypatch.setattr(backup, "RECENT_NS", 0)
    back_up(tmp_path, machine / "real")
    result, found = back_up(tmp_path, machine / "real", machine / "nope", tmp_path / "no" / "such")
    assert set(found) == {b"", b"kim", b"kim/thesis"}
    assert (result.counts.unread, result.counts.unchanged_files) == (2, 1)
    assert result.counts.root == result.counts.newest_root == os.fsencode(machine / "real")


def test_path_that_is_gone_keeps_the_newest_root(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "RECENT_NS", 0)
    back_up(tmp_path, machine / "real", machine / "etc" / "p")
    (machine / "etc" / "p").unlink()
    result, found = back_up(tmp_path, machine / "real", machine / "etc" / "p")
    assert set(found) == {b"", b"real", b"real/kim", b"real/kim/thesis"}
    assert (result.counts.unread, result.counts.unchanged_files) == (1, 1)
    result, found = back_up(tmp_path, machine / "real")
    assert set(found) == {b"", b"kim", b"kim/thesis"}
    assert (result.counts.root, result.counts.newest_root) == (os.fsencode(machine / "real"), os.fsencode(machine))


def test_given_path_that_vanishes_is_named(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.listdir

    def listdir(descriptor: int) -> list[str]:
        names = original(descriptor)
        if "thesis" in names:
            (machine / "real" / "kim" / "thesis").unlink()
            names.remove("thesis")
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    result, found = back_up(tmp_path, machine / "home" / "kim" / "thesis", machine / "etc")
    assert (b"etc/p" in found, result.counts.unread) == (True, 1)
    assert result.counts.problems[0].path.endswith(b"home/kim/thesis")


def test_excluded_given_path_is_named(machine: Path, tmp_path: Path) -> None:
    options = BackupOptions(exclusions=ExclusionOptions(["etc"]))
    result, _ = back_up(tmp_path, machine / "real", machine / "etc", options=options)
    assert [(os.path.basename(skip.path), "exclude" in skip.reason) for skip in result.counts.skips] == [(b"etc", True)]
    result, found = back_up(tmp_path, machine, machine / "etc", options=options)
    assert (b"etc" in found, result.counts.unread) == (False, 0)
    assert [(os.path.basename(skip.path), "exclude" in skip.reason) for skip in result.counts.skips] == [(b"etc", True)]


def test_backup_of_the_store_itself_is_refused(machine: Path, tmp_path: Path) -> None:
    back_up(tmp_path, machine)
    with pytest.raises(BadInput, match="the store itself"):
        back_up(tmp_path, tmp_path / "store")
    with pytest.raises(BadInput, match="the store itself"):
        back_up(tmp_path, next(path for path in (tmp_path / "store").iterdir() if path.is_dir()))
    result, _ = back_up(tmp_path, tmp_path / "store", machine)
    assert "the store itself" in result.counts.skips[0].reason
