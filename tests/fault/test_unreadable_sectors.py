"""Back up a file system that fails: a file with an unreadable sector, by FUSE, next to mounts, sockets and the store.

A device-mapper target `error` would do the same, but few test machines have device-mapper; the kernel passes an EIO of
FUSE to the reader as it does that of a disk.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin_shared.formats.tree_entry_group import EntryFlag
from tests.support.checks.commands import command, environment
from tests.support.checks.fuse_mounts import mounted_by, needs_fuse

SIZE = 3_000_000
BAD_START, BAD_STOP = 1_638_400, 1_642_496
"""The unreadable sector of the file `b`, one page."""
FAILING_DISK = """
    import errno, json, os, stat, sys
    from nearkin.trees.fuse_mount import load_fuse

    fuse = load_fuse()
    content, bad_start, bad_stop = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

    class FailingDisk(fuse.Operations):
        use_ns = True

        def init_with_config(self, *_):
            print(json.dumps({"folder": sys.argv[1]}), flush=True)

        def getattr(self, path, handle=None):
            found = os.lstat(content + path)
            names = ("st_mode", "st_ino", "st_size", "st_nlink", "st_uid", "st_gid")
            times = {"st_mtime": found.st_mtime_ns, "st_ctime": found.st_mtime_ns, "st_atime": found.st_mtime_ns}
            return {**{name: getattr(found, name) for name in names}, **times, "st_blocks": found.st_size // 512 + 1}

        def readdir(self, path, handle):
            return [".", "..", *os.listdir(content + path)]

        def read(self, path, size, offset, handle):
            if path.endswith("/b") and offset < bad_stop and offset + size > bad_start:
                raise OSError(errno.EIO, "bad sector")
            with open(content + path, "rb") as file:
                return os.pread(file.fileno(), size, offset)

    fuse.FUSE(FailingDisk(), sys.argv[1], foreground=True, nothreads=True, ro=True)
"""


@contextmanager
def failing_disk(content: Path, folder: Path) -> Iterator[Path]:
    """Mount the files of `content`; one page of each file `b` cannot be read."""
    words = (folder, content, BAD_START, BAD_STOP)
    with mounted_by([sys.executable, "-c", textwrap.dedent(FAILING_DISK), *map(str, words)], folder):
        yield folder


def back_up(tmp_path: Path, folder: Path, code: int) -> dict[str, object]:
    """Run `nearkin backup` of a folder and return its JSON output; the exit code must be `code`."""
    line = command("--store", tmp_path / "store", "--json", "backup", "home", folder)
    done = subprocess.run(line, env=environment(), capture_output=True, check=False, text=True)
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@needs_fuse
def test_file_with_an_unreadable_sector_is_stored_up_to_it(tmp_path: Path) -> None:
    """The file is named and counted, all others are stored, and the next backup reads the file again."""
    content = tmp_path / "content"
    (content / "folder").mkdir(parents=True)
    for name in ("a", "b", "c", "folder/b", "folder/d"):
        (content / name).write_bytes(os.urandom(SIZE if name != "folder/b" else BAD_START))
    open_store(tmp_path / "store", create=True).close()
    with failing_disk(content, tmp_path / "disk") as folder:
        for _ in range(2):
            counts = back_up(tmp_path, folder, 3)
            assert (counts["unread"], counts["changed"], counts["files"]) == (1, 0, 5)
            assert counts["problems"] == [
                {"path": f"{folder}/b", "reason": "reading it failed: input/output error; its start is stored"}
            ]
    with open_store(tmp_path / "store") as store:
        entry = store.tree("home").find(b"b").entry
        assert entry.flags & EntryFlag.INCOMPLETE
        assert entry.size == BAD_START
        restored = store.restore("home", tmp_path / "target")
        assert restored.failed == 1
        assert store.verify().damage == ()
    assert (tmp_path / "target" / "b").read_bytes() == (content / "b").read_bytes()[:BAD_START]
    for name in ("a", "c", "folder/b", "folder/d"):
        assert (tmp_path / "target" / name).read_bytes() == (content / name).read_bytes()


@needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_hostile_tree_is_stored_but_for_what_is_named(tmp_path: Path) -> None:
    """Bad sector, /proc, a loop of bind mounts, a FIFO, a socket and the store in one tree: exit code 3."""
    content = tmp_path / "content"
    content.mkdir()
    (content / "b").write_bytes(os.urandom(SIZE))
    tree = tmp_path / "tree"
    for name in ("disk", "proc", "loop/inner", "data"):
        (tree / name).mkdir(parents=True)
    (tree / "data" / "file").write_bytes(b"x")
    os.mkfifo(tree / "data" / "fifo")
    open_store(tree / "store", create=True).close()
    (tmp_path / "store").symlink_to(tree / "store")
    mounts = (
        ["mount", "-t", "proc", "proc", str(tree / "proc")],
        ["mount", "--bind", str(tree), str(tree / "loop" / "inner")],
    )
    mounted = []
    with failing_disk(content, tree / "disk"), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "data" / "socket"))
        try:
            for line in mounts:
                if subprocess.run(line, check=False, capture_output=True).returncode:
                    pytest.skip("this machine allows no mounts")
                mounted.append(line[-1])
            counts = back_up(tmp_path, tree, 3)
        finally:
            for path in reversed(mounted):
                subprocess.run(["umount", path], check=True)
    assert counts["unread"] == 1
    assert counts["problems"] == [
        {"path": f"{tree}/disk/b", "reason": "reading it failed: input/output error; its start is stored"}
    ]
    assert counts["skipped"] == 4
    assert counts["skips"] == [
        {"path": f"{tree}/proc", "reason": "is a file system of the kernel; its content is left out"},
        {"path": f"{tree}/store", "reason": "is the store itself; its content is left out"},
        {"path": f"{tree}/data/socket", "reason": "is a socket"},
        {"path": f"{tree}/loop/inner", "reason": "is mounted inside itself; its content is left out"},
    ]
    with open_store(tree / "store") as store:
        found = [placed.entry.path for placed in store.tree("home").entries()]
    assert found == [
        *(b"", b"data", b"disk", b"loop", b"proc", b"store"),
        *(b"data/fifo", b"data/file", b"disk/b", b"loop/inner"),
    ]
