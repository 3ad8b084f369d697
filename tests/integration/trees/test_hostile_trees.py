"""Trees that change, or cannot be read, during a backup: each case is named and counted, everything else is stored."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin.trees import attributes
from nearkin.trees.store_backup import BackupResult
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import EntryFlag

SIZE = 3_000_000


def back_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, during: Callable[[Path], None]
) -> tuple[BackupResult, dict[bytes, tuple[int, int]], Path]:
    """Back up three files; call `during` with the second one after its first read.

    Return the result, (size, flags) of each entry, and a folder with the restored tree.
    """
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(os.urandom(SIZE))
        os.utime(folder / name, ns=(1, 1))
    target = (folder / "b").stat().st_ino
    calls = 0
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        if os.fstat(descriptor).st_ino == target:
            calls += 1
            if calls == 2:
                during(folder / "b")
            return original(descriptor, [buffers[0][:1_000_000]], offset)
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("home", [folder])
        found = {
            placed.entry.path: (placed.entry.size, placed.entry.flags & ~EntryFlag.RECENT)
            for placed in store.tree("home").entries()
        }
        store.restore("home", tmp_path / "target")
        assert store.verify().damage == ()
    for name in ("a", "c"):
        assert (tmp_path / "target" / name).read_bytes() == (folder / name).read_bytes()
    return result, found, tmp_path / "target"


def test_file_that_shrinks_is_stored_up_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, found, target = back_up(monkeypatch, tmp_path, lambda path: os.truncate(path, 1_500_000))
    assert (result.counts.changed, result.counts.unread, result.is_complete) == (1, 0, False)
    assert found[b"b"] == (1_500_000, EntryFlag.CHANGED)
    assert (target / "b").stat().st_size == 1_500_000
    assert "shrank" in result.counts.problems[0].reason


def test_file_that_grows_is_stored_with_its_first_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def grow(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    result, found, target = back_up(monkeypatch, tmp_path, grow)
    assert (result.counts.changed, result.counts.unread) == (1, 0)
    assert found[b"b"] == (SIZE, EntryFlag.CHANGED)
    assert (target / "b").stat().st_size == SIZE


def test_file_changed_in_place_is_flagged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"other")

    result, found, _ = back_up(monkeypatch, tmp_path, change)
    assert (result.counts.changed, result.counts.unread) == (1, 0)
    assert found[b"b"] == (SIZE, EntryFlag.CHANGED)


def test_file_changed_in_place_and_then_cut_is_flagged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = os.fstat
    whole: list[int] = []

    def fstat(descriptor: int) -> os.stat_result:
        status = original(descriptor)
        if whole and status.st_ino == whole[0]:  # the status after all bytes were read
            os.truncate(f"/proc/self/fd/{descriptor}", SIZE // 2)
            whole.clear()
            status = original(descriptor)
        return status

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(b"other")
        reads = os.preadv

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            count = reads(descriptor, buffers, offset)
            if offset + count == SIZE and original(descriptor).st_ino == path.stat().st_ino:
                whole.append(path.stat().st_ino)
            return count

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "fstat", fstat)

    result, found, _ = back_up(monkeypatch, tmp_path, change)
    assert (result.counts.changed, result.counts.unread, result.is_complete) == (1, 0, False)
    assert found[b"b"] == (SIZE, EntryFlag.CHANGED)


def test_attributes_that_do_not_fit_are_named_at_each_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"content")
    try:
        for path in (folder / "a", folder / "sub"):
            for name in "xyz":
                os.setxattr(path, f"user.{name}", b"value")
    except OSError:
        pytest.skip("the file system has no user attributes")
    monkeypatch.setattr(attributes, "XATTRS_MAX", 2)
    time.sleep(1.1)  # else the files are read again because they are recent
    with open_store(tmp_path / "store", create=True) as store:
        for _ in range(2):
            result = store.backup("home", [folder])
            assert (result.counts.unread, result.is_complete) == (2, False)
            assert {problem.reason for problem in result.counts.problems} == {
                "it has 3 extended attributes, at most 2 fit: the others are not stored"
            }
        assert [len(placed.entry.xattrs) for placed in store.tree("home").entries()] == [0, 2, 2]


def test_attribute_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a").write_bytes(b"content")
    original = os.listxattr

    def listxattr(path: int | str | bytes | None = None, *, follow_symlinks: bool = True) -> list[str]:
        names = original(path, follow_symlinks=follow_symlinks)
        is_file = isinstance(path, int) and os.fstat(path).st_ino == (folder / "a").stat().st_ino
        return [*names, "nearkin"] if is_file else names  # a name without a namespace: EOPNOTSUPP

    monkeypatch.setattr(os, "listxattr", listxattr)
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("home", [folder])
    assert result.counts.unread == 1
    assert result.counts.problems[0].reason.startswith('its extended attribute "nearkin" is not stored: ')


def test_read_error_keeps_the_start_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    result, found, target = back_up(monkeypatch, tmp_path, fail)
    assert (result.counts.changed, result.counts.unread) == (0, 1)
    assert found[b"b"] == (1_000_000, EntryFlag.INCOMPLETE)
    assert (target / "b").stat().st_size == 1_000_000
    assert "input/output error" in result.counts.problems[0].reason


def test_file_replaced_by_a_folder_after_its_status_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(b"content")
    original = os.open

    def opened(path: str | bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == b"b" and (folder / "b").is_file():
            (folder / "b").unlink()
            (folder / "b").mkdir()
        if path == b"c":
            (folder / "c").unlink(missing_ok=True)
        return original(path, flags, mode, dir_fd=dir_fd)

    with open_store(tmp_path / "store", create=True) as store:
        monkeypatch.setattr(os, "open", opened)
        result = store.backup("home", [folder])
        monkeypatch.undo()
        found = [placed.entry.path for placed in store.tree("home").entries()]
    assert found == [b"", b"a"]
    assert sorted(problem.reason for problem in result.counts.problems) == [
        "no such file or directory",
        "was replaced while the tree was read",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_mounts_of_the_kernel_and_loops_are_not_entered(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    for name in ("proc", "loop", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "data" / "file").write_bytes(b"x")
    os.mkfifo(folder / "data" / "fifo")
    mounts = (
        ["mount", "-t", "proc", "proc", str(folder / "proc")],
        ["mount", "--bind", str(folder), str(folder / "loop")],
    )
    mounted: list[Path] = []
    try:
        for command in mounts:
            if subprocess.run(command, check=False, capture_output=True).returncode:
                pytest.skip("this machine allows no mounts")
            mounted.append(Path(command[-1]))
        with open_store(tmp_path / "store", create=True) as store:
            result = store.backup("home", [folder])
            found = [placed.entry.path for placed in store.tree("home").entries()]
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", path], check=True)
    assert found == [b"", b"data", b"loop", b"proc", b"data/fifo", b"data/file"]
    assert sorted(skip.reason for skip in result.counts.skips) == [
        "is a file system of the kernel; its content is left out",
        "is mounted inside itself; its content is left out",
    ]


def test_given_socket_is_refused_or_reported(tmp_path: Path) -> None:
    """Alone it would be an empty version; with other paths the backup is incomplete."""
    folder, place = tmp_path / "folder", tmp_path / "socket"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, open_store(tmp_path / "store", create=True) as store:
        listener.bind(str(place))
        with pytest.raises(BadInput, match="is a socket, which has no content to store"):
            store.backup("k", [place])
        result = store.backup("k", [folder, place])
        assert result.counts.unread == 1


@pytest.mark.parametrize("path", ["/proc", "/proc/cpuinfo", "/proc/self/fd"])
def test_given_path_of_the_kernel_is_refused(path: str, tmp_path: Path) -> None:
    """Its folders would be left out one by one, its files be read: a version without use."""
    with open_store(tmp_path / "store", create=True) as store:
        with pytest.raises(BadInput, match="is in a file system of the kernel"):
            store.backup("home", [path])
        assert store.versions() == []


def test_name_of_a_symlink_that_was_not_stored_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second name of a symlink whose first name cannot be read is stored as the symlink itself."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").symlink_to("target")
    os.link(source / "a", source / "b", follow_symlinks=False)
    original = os.readlink

    def readlink(path: bytes, *, dir_fd: int | None = None) -> bytes:
        if path == b"a":
            raise OSError(5, "Input/output error")
        return original(path, dir_fd=dir_fd)

    with open_store(tmp_path / "store", create=True) as store:
        monkeypatch.setattr(os, "readlink", readlink)
        assert store.backup("home", [source]).counts.unread == 1
        monkeypatch.undo()
        assert store.restore("home", tmp_path / "target").is_complete
    assert os.readlink(tmp_path / "target" / "b") == "target"
