"""Restores into folders that hold more than the tree, or that another user changes: nothing else is lost or changed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nearkin.store import Store, open_store
from nearkin.trees import free_names
from nearkin.trees.backup_walk import BackupOptions
from nearkin.trees.exclusions import ExclusionOptions
from nearkin.trees.restore_counts import Overwrite, RestoreCounts, RestoreOptions
from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader
from tests.support.checks.commands import environment

DELETE = RestoreOptions(delete=True)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts, and changes owners")


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", ["pattern", "cache", "marker", "unread", "selected", "socket"])
def test_delete_keeps_what_the_backup_left_out(kind: str, folder: Path, tmp_path: Path) -> None:
    options = BackupOptions(
        exclusions=ExclusionOptions(
            patterns=["kept"] if kind == "pattern" else [], if_present=[".nobackup"], caches=kind == "cache"
        )
    )
    paths, left_out = [folder], folder / "sub" / "kept"
    if kind == "cache":
        (folder / "sub" / "CACHEDIR.TAG").write_bytes(b"Signature: 8a477f597d28d172789f06886806bc55")
    elif kind == "marker":
        (folder / "sub" / ".nobackup").touch()
    elif kind == "selected":
        paths = [folder / "a", folder / "sub" / "b"]
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        if kind == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(left_out))
        else:
            left_out.write_bytes(b"not in the tree")
        if kind == "unread":
            patch.setattr(os, "open", _failing_open(b"kept"))
        store.backup("home", paths, options=options)
        patch.undo()
        (folder / "sub" / "x").mkdir()
        store.restore("home", folder, options=DELETE)
        assert left_out.exists()
        store.restore("home", folder, options=RestoreOptions(delete=True, delete_excluded=True))
    assert not left_out.exists()
    assert (folder / "a").exists()


def _failing_open(wanted: bytes) -> Callable[..., int]:
    original = os.open

    def opened(path: str | bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == wanted:
            raise PermissionError(13, "permission denied")
        return original(path, flags, mode, dir_fd=dir_fd)

    return opened


def test_delete_is_refused_for_a_tree_that_does_not_list_what_was_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "left out").touch()
    with open_store(tmp_path / "store", create=True) as store:
        monkeypatch.setattr("nearkin.trees.walker.PARTIAL_BYTES_MAX", 0)
        store.backup("home", [folder], options=BackupOptions(exclusions=ExclusionOptions(patterns=["left out"])))
        with pytest.raises(BadInput, match="--delete-excluded"):
            store.restore("home", folder, options=DELETE)
    assert (folder / "left out").exists()


def test_delete_is_refused_for_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "local").touch()
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        with pytest.raises(BadInput, match="--delete: the selected entry is a file"):
            store.restore("home", tmp_path / "target", path=b"a", options=DELETE)
    assert names(tmp_path / "target") == ["local"]


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_delete_enters_no_mount_point(kind: str, folder: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    (target / "extra" / "mount").mkdir(parents=True)
    other.mkdir()
    words = ["-t", "tmpfs", "none"] if kind == "tmpfs" else ["--bind", str(other)]
    if subprocess.run(["mount", *words, target / "extra" / "mount"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        (target / "extra" / "mount" / "data").touch()
        with open_store(tmp_path / "store", create=True) as store:
            store.backup("home", [folder])
            counts = store.restore("home", target, options=DELETE)
        assert names(target / "extra" / "mount") == ["data"]
    finally:
        subprocess.run(["umount", target / "extra" / "mount"], check=True)
    assert [entry.reason for entry in counts.deletion.kept_entries] == ["is a mount point"]


def test_delete_stops_at_damage_before_it_deletes(folder: Path, tmp_path: Path) -> None:
    """Names that were not read yet are not taken for superfluous ones."""
    for number in range(3000):
        (folder / f"{number:04}").touch()
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        store.backup("home", [folder])
        decode = TreeReader._decode

        def decode_damaged(reader: TreeReader, number: int, block: bytes) -> list[PlacedEntry]:
            return decode(reader, number, block if number == 0 else block[:-1])

        patch.setattr(TreeReader, "_decode", decode_damaged)
        with pytest.raises(Corrupt):
            store.restore("home", folder, options=DELETE)
    assert len(names(folder)) == 3002


def test_delete_of_a_folder_deeper_than_the_stack(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    descriptor = os.open(target, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() * 2):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target, options=DELETE)
    assert (counts.is_complete, counts.deleted, names(target)) == (True, 1, ["a", "sub"])


# --- interrupted runs -------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from nearkin import open_store
original = os.pwrite
def pwrite(descriptor, data, offset):
    original(descriptor, data[:1000], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = pwrite
with open_store(sys.argv[1], read_only=True) as store:
    store.restore("home", sys.argv[2])
"""


def test_killed_restore_leaves_no_file_that_never_keeps(folder: Path, tmp_path: Path) -> None:
    """A file has its name once it is complete: `never` goes on where a killed run ended."""
    (folder / "a").write_bytes(os.urandom(100_000))
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
    words = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(tmp_path / "target")]
    assert subprocess.run(words, check=False, env=environment()).returncode == -signal.SIGKILL
    assert not (tmp_path / "target" / "a").exists()
    with open_store(tmp_path / "store", read_only=True) as store:
        assert store.restore("home", tmp_path / "target", options=RestoreOptions(Overwrite.NEVER)).is_complete
    assert (tmp_path / "target" / "a").read_bytes() == (folder / "a").read_bytes()


def test_temporary_name_is_of_no_entry(folder: Path, tmp_path: Path) -> None:
    """A file that a killed run of the same process id left, and a backup stored, is restored as any other file."""
    (folder / f".nearkin-restore-{os.getpid()}").write_bytes(b"left over")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        for _ in range(2):
            assert store.restore("home", tmp_path / "target").is_complete
    assert (tmp_path / "target" / f".nearkin-restore-{os.getpid()}").read_bytes() == b"left over"


def test_size_beyond_the_kernel_fails_that_file_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that another program made may have sizes that no call of the kernel takes."""
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        below = TreeReader.below

        def enlarged(reader: TreeReader, path: bytes) -> Iterator[PlacedEntry]:
            for placed in below(reader, path):
                entry = placed.entry
                if entry.name == b"a":
                    entry = entry._replace(size=(1 << 64) - 1, extents=())
                yield placed._replace(entry=entry)

        monkeypatch.setattr(TreeReader, "below", enlarged)
        counts = store.restore("home", tmp_path / "target")
    assert [problem.path for problem in counts.problems] == [b"a"]
    assert (tmp_path / "target" / "sub" / "b").read_bytes() == b"b stored"
    assert names(tmp_path / "target") == ["sub"]


# --- policies ---------------------------------------------------------------------------------------------------------


def test_overwrite_never_keeps_a_file_where_the_tree_has_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "sub").write_bytes(b"local")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", tmp_path / "target", options=RestoreOptions(Overwrite.NEVER))
    assert (tmp_path / "target" / "sub").read_bytes() == b"local"
    assert (counts.kept_files, counts.failed, [problem.path for problem in counts.problems]) == (1, 1, [b"sub"])


def _restore_linked(tmp_path: Path, store: Store, overwrite: Overwrite, path: bytes = b"") -> RestoreCounts:
    return store.restore("home", tmp_path / "target", path=path, options=RestoreOptions(overwrite))


@pytest.mark.parametrize("overwrite", Overwrite)
def test_hard_link_has_the_stored_content(overwrite: Overwrite, folder: Path, tmp_path: Path) -> None:
    """A file that the policy kept is not the content of a name that is restored."""
    os.link(folder / "a", folder / "z")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "a").write_bytes(b"other content")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        _restore_linked(tmp_path, store, overwrite)
    target = tmp_path / "target"
    assert (target / "z").read_bytes() == b"a stored"
    is_linked = (target / "a").stat().st_ino == (target / "z").stat().st_ino
    assert is_linked == (overwrite != Overwrite.NEVER)


def test_second_name_of_a_hard_link_is_restored_alone(folder: Path, tmp_path: Path) -> None:
    os.link(folder / "a", folder / "z")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = _restore_linked(tmp_path, store, Overwrite.ALWAYS, b"z")
        again = _restore_linked(tmp_path, store, Overwrite.ALWAYS)
    assert (counts.is_complete, counts.files, again.is_complete) == (True, 1, True)
    assert (tmp_path / "target" / "z").read_bytes() == b"a stored"
    assert (tmp_path / "target" / "z").stat().st_nlink == 2
    assert names(tmp_path / "target") == ["a", "sub", "z"]


def test_hard_link_of_a_damaged_file_keeps_the_existing_one(folder: Path, tmp_path: Path) -> None:
    """A name is replaced once its new content exists."""
    os.link(folder / "a", folder / "z")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "z").write_bytes(b"local")
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        store.backup("home", [folder])
        original = os.pwrite

        def pwrite(descriptor: int, data: bytes, offset: int) -> int:
            if bytes(data) == b"a stored":
                raise OSError(5, "input/output error")
            return original(descriptor, data, offset)

        patch.setattr(os, "pwrite", pwrite)
        counts = _restore_linked(tmp_path, store, Overwrite.ALWAYS)
    assert (counts.failed, names(tmp_path / "target")) == (2, ["sub", "z"])
    assert (tmp_path / "target" / "z").read_bytes() == b"local"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_if_changed_changes_no_file_that_has_another_name(mode: int, folder: Path, tmp_path: Path) -> None:
    (folder / "a").chmod(0o644)
    os.utime(folder / "a", ns=(9, 9))
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.write_bytes(b"a STORED")
    outside.chmod(mode)
    os.utime(outside, ns=(9, 9))
    os.link(outside, target / "a")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        _restore_linked(tmp_path, store, Overwrite.IF_CHANGED)
    assert stat.S_IMODE(outside.stat().st_mode) == mode
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o644
    assert (outside.stat().st_nlink == 2) == (mode == 0o644)


@pytest.mark.parametrize("offers", ["links", "renameat2", "neither"])
@pytest.mark.parametrize("overwrite", Overwrite)
def test_file_that_appears_meanwhile_is_kept(
    offers: str, overwrite: Overwrite, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No policy was asked about a file that another program makes while its content is restored."""
    target, written = tmp_path / "target", os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if bytes(data) == b"a stored":
            (target / "a").write_bytes(b"of another program")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    _limit_names(monkeypatch, offers)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target, options=RestoreOptions(overwrite))
    assert (target / "a").read_bytes() == b"of another program"
    assert [(problem.path, "it is kept" in problem.reason) for problem in counts.problems] == [(b"a", True)]
    assert (counts.files, names(target)) == (1, ["a", "sub"])
    assert (target / "sub" / "b").read_bytes() == b"b stored"


def _limit_names(monkeypatch: pytest.MonkeyPatch, offers: str) -> None:
    """Let the file system offer one way to give a free name, or neither."""
    if offers != "links":
        monkeypatch.setattr(os, "link", _refuse)
    if offers == "neither":
        monkeypatch.setattr(free_names, "_renameat2", lambda: None)


@pytest.mark.parametrize("offers", ["links", "renameat2"])
def test_link_that_appears_meanwhile_is_kept(
    offers: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(folder / "a", folder / "z")
    target, original = tmp_path / "target", os.link

    def link(source: bytes, name: bytes, **options: Any) -> None:
        if name == b"z" or source == b"a":
            (target / "z").write_bytes(b"of another program")
        if offers == "renameat2" and source != b"a":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        original(source, name, **options)

    monkeypatch.setattr(os, "link", link)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target)
    assert (target / "z").read_bytes() == b"of another program"
    assert [problem.path for problem in counts.problems] == [b"z"]
    assert names(target) == ["a", "sub", "z"]


@pytest.mark.parametrize("offers", ["links", "renameat2", "neither"])
def test_name_is_given_on_any_file_system(
    offers: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit_names(monkeypatch, offers)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        assert store.restore("home", tmp_path / "target").is_complete
    assert ((tmp_path / "target" / "a").stat().st_nlink, names(tmp_path / "target")) == (1, ["a", "sub"])


# --- attributes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fifo", "sub"])
def test_no_mode_is_set_through_a_symlink(name: str, folder: Path, tmp_path: Path) -> None:
    """An entry that another user replaces by a symlink between two calls is not followed."""
    os.mkfifo(folder / "fifo")
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir(mode=0o500)
    (target / "sub").mkdir(mode=0o500)
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        store.backup("home", [folder])
        chmod, stat_of, opened = os.chmod, os.stat, os.open

        def swap() -> None:
            path = target / name
            with suppress(FileNotFoundError):
                if not path.is_symlink() and path.parent == target:
                    path.rmdir() if name == "sub" else path.unlink()
                    path.symlink_to(outside)

        def racing_chmod(path: str | bytes | int, mode: int, *, dir_fd: int | None = None) -> None:
            if path == name.encode():
                swap()
            chmod(path, mode, dir_fd=dir_fd)

        def racing_open(path: str | bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if path == name.encode() and flags & os.O_PATH:
                swap()
            return opened(path, flags, mode, dir_fd=dir_fd)

        patch.setattr(os, "chmod", racing_chmod)
        patch.setattr(os, "open", racing_open)
        counts = store.restore("home", target)
        patch.undo()
    assert stat.S_IMODE(stat_of(outside).st_mode) == 0o500
    assert counts.failed > 0


def test_default_acls_of_the_target_are_not_restored(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "fifo")
    target = tmp_path / "target"
    target.mkdir()
    subprocess.run(["setfacl", "-d", "-m", "u:33:rwx,g:33:rwx", target], check=True)
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [folder])
        counts = store.restore("home", target)
    assert counts.is_complete
    for path in (target, *target.rglob("*")):
        assert os.listxattr(path) == [], path


@needs_root
def test_set_id_bits_are_not_set_for_another_owner(folder: Path, tmp_path: Path) -> None:
    (folder / "a").chmod(0o6755)
    with open_store(tmp_path / "store", create=True) as store, pytest.MonkeyPatch.context() as patch:
        os.chown(folder / "a", 1234, 1234)
        (folder / "a").chmod(0o6755)
        store.backup("home", [folder])
        for call in ("chown", "fchown"):
            patch.setattr(os, call, _refuse)
        counts = store.restore("home", tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target" / "a").stat().st_mode) == 0o755
    assert counts.unset == {"owner": 1, "group": 1, "setuid or setgid": 1}


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")
