"""Back up and restore folders of this machine, and a home folder with extreme entries; rsync compares."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nearkin.store import open_store
from nearkin.trees.backup_walk import BackupCounts
from tests.support.checks.commands import command, environment

IS_ROOT = os.geteuid() == 0
NAME = b"n" * 250
FLAGS = os.O_RDONLY | os.O_DIRECTORY
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def restored_equals(source: Path, tmp_path: Path) -> BackupCounts:
    """Back up a folder, restore it, and compare both with rsync; return the counts of the backup."""
    with open_store(tmp_path / "store", create=True) as store:
        counts = store.backup("home", [source]).counts
        restored = store.restore("home", tmp_path / "target")
        assert store.verify().damage == ()
    assert restored.is_complete, (restored.problems[:10], restored.unset)
    line = ["rsync", "-naHAXS", "--itemize-changes", "--delete", f"{source}/", f"{tmp_path / 'target'}/"]
    assert subprocess.run(line, check=True, capture_output=True).stdout == b""
    return counts


@pytest.mark.skipif(not IS_ROOT, reason="only root restores owners")
@pytest.mark.parametrize(
    "folder",
    ["/usr/share/zoneinfo", "/usr/share/perl", "/usr/lib/git-core", pytest.param("/usr", marks=pytest.mark.soak)],
)
def test_folder_of_this_machine_is_restored_as_it_was(folder: str, tmp_path: Path) -> None:
    if not Path(folder).is_dir():
        pytest.skip(f"{folder} does not exist")
    counts = restored_equals(Path(folder), tmp_path)
    assert (counts.unread, counts.changed) == (0, 0)
    assert counts.files > 50


@pytest.fixture(autouse=True)
def remove_long_paths(tmp_path: Path) -> Iterator[None]:
    """Remove what a test made: pytest cannot, where a path is longer than the kernel takes."""
    yield
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.mark.skipif(not IS_ROOT, reason="only root sets owners")
def test_home_with_extreme_entries_is_restored_as_it_was(tmp_path: Path) -> None:
    """All modes, ids, bytes of names, dates, capabilities, ACLs, hard links, holes, and a path of 4,095 bytes."""
    home = tmp_path / "source of a home"  # longer than the name of the target: the longest path must fit there, too
    root = os.fsencode(home)
    for folder in (b"modes", b"folders", b"ids", b"names", b"times", b"links"):
        os.makedirs(root + b"/" + folder)
    for mode in range(0o10000):
        path = root + b"/modes/%o" % mode
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.chmod(path, mode)
    for mode in range(0o777, -1, -7):
        os.mkdir(root + b"/folders/%o" % mode)
        os.chmod(root + b"/folders/%o" % mode, mode | 0o3000)
    for number in (1, 999, 65_534, 65_536, (1 << 31) + 1, (1 << 32) - 2):
        path = root + b"/ids/%d" % number
        Path(os.fsdecode(path)).write_bytes(b"%d" % number)
        os.chown(path, number, number - 1)
        os.setxattr(path, "security.capability", CAPABILITY)
        os.setxattr(path, "trusted.note", b"\0" * 200)
    subprocess.run(["setfacl", "-m", "u:4294967294:rw,g:33:x,m::rwx", root + b"/ids/1"], check=True)
    subprocess.run(["setfacl", "-d", "-m", "u:1:r,g:2:rx", root + b"/ids"], check=True)
    for byte in {*range(1, 256)} - {ord("/"), ord(".")}:
        Path(os.fsdecode(root + b"/names/%c" % byte)).write_bytes(b"%d" % byte)
    Path(os.fsdecode(root + b"/names/" + b"\xff" * 255)).write_bytes(b"long")
    for seconds in (-2_147_483_648, -1, 0, 2_147_483_648, 4_294_967_296, 15_000_000_000):
        path = root + b"/times/%d" % seconds
        os.symlink(b"%d" % seconds, path)
        os.utime(path, ns=(0, seconds * 1_000_000_000 + 1), follow_symlinks=False)
    for number in range(300):
        os.link(root + b"/ids/1", root + b"/links/%d" % number)
    with (home / "holes").open("wb") as file:
        for offset in range(0, 64 << 20, 8 << 20):
            os.pwrite(file.fileno(), os.urandom(5000), offset + 4096)
        file.truncate(100 << 20)
    path = root + b"/longest"
    while 4095 - len(path) > 252:
        path += b"/" + NAME
        os.mkdir(path) if path != root + b"/longest/" + NAME else os.makedirs(path)
    path += b"/" + b"f" * (4094 - len(path))
    assert len(path) == 4095
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    counts = restored_equals(home, tmp_path)
    assert (counts.unread, counts.changed) == (0, 0)


def make_deep_folder(root: Path, depth: int) -> int:
    """Make `depth` folders inside one another, each with a file, and return the descriptor of the last one."""
    descriptor = os.open(root, FLAGS)
    for level in range(depth):
        os.mkdir(NAME, dir_fd=descriptor)
        below = os.open(NAME, FLAGS, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
        file = os.open(b"file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor)
        os.write(file, b"%d" % level)
        os.close(file)
    return descriptor


def test_tree_deeper_than_a_path_can_be_is_restored(tmp_path: Path) -> None:
    """A tree of 10,000-byte paths, which no call of the kernel takes as a whole."""
    depth = 40
    (tmp_path / "source").mkdir()
    os.close(make_deep_folder(tmp_path / "source", depth))
    with open_store(tmp_path / "store", create=True) as store:
        result = store.backup("home", [tmp_path / "source"])
        assert result.is_complete, result.counts.problems
        assert store.restore("home", tmp_path / "target").is_complete
    descriptor = os.open(tmp_path / "target", FLAGS)
    for level in range(depth):
        below = os.open(NAME, FLAGS, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
        file = os.open(b"file", os.O_RDONLY, dir_fd=descriptor)
        assert os.read(file, 100) == b"%d" % level
        os.close(file)
    os.close(descriptor)


def test_path_beyond_the_format_is_named_and_counted(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    os.close(make_deep_folder(tmp_path / "source", 262))
    with open_store(tmp_path / "store", create=True) as store:
        counts = store.backup("home", [tmp_path / "source"]).counts
        entries = store.tree("home").summary.entries
    assert counts.unread == 1
    assert "65,535 fit" in counts.problems[0].reason
    assert entries == 1 + 2 * 261


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Return a folder that every user may enter and write; those of pytest are for their owner."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.mark.skipif(not IS_ROOT, reason="only root makes entries that another user cannot")
def test_restore_by_another_user_names_what_it_cannot_set(tmp_path: Path, reachable: Path) -> None:
    """Owners, a device and capabilities are counted by kind on stderr; the exit code is 3, and all content is there."""
    source = tmp_path / "source"
    source.mkdir()
    owners = {
        "root": (0, 0),
        "other": (1234, 1234),
        "plain-user": (65_534, 65_534),
        "shared": (0, 4321),
        "own": (65_534, 9),
    }
    for name, (owner, group) in owners.items():
        (source / name).write_bytes(name.encode())
        os.chown(source / name, owner, group)
        (source / name).chmod(0o2644 if name in ("shared", "own") else 0o644)
    os.setxattr(source / "plain-user", "security.capability", CAPABILITY)
    os.mknod(source / "null", 0o20666, os.makedev(1, 3))
    with open_store(reachable / "store", create=True) as store:
        store.backup("home", [source])
    for path in (reachable / "store", *(reachable / "store").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    line = command("--store", reachable / "store", "--json", "restore", "home", "-o", reachable / "target")
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--groups", "4321"]
    done = subprocess.run([*user, *line], env=environment(), capture_output=True, check=False, text=True)
    if "Permission denied" in done.stderr and not done.stdout:
        pytest.skip(f"the interpreter cannot be run by another user: {done.stderr[-200:]}")
    assert done.returncode == 3, done.stderr
    counts = json.loads(done.stdout)
    assert counts["files"] == 5
    assert (counts["failed"], counts["problems"]) == (0, [])
    kinds = {"owner": 4, "group": 4, "device": 1, "security.capability": 1, "setuid or setgid": 1}
    assert counts["unset"] == kinds, "the root is one of an owner and of a group"
    no_owner, no_group = (f"{what} cannot be set: operation not permitted" for what in ("owner", "group"))
    assert sorted((problem["path"], problem["reason"]) for problem in counts["unset_entries"]) == [
        ("", no_group),
        ("", no_owner),
        ("null", "is a device, which only root can make"),
        ("other", no_group),
        ("other", no_owner),
        ("own", no_group),
        ("own", "setuid or setgid cannot be set: the file has another owner or group"),
        ("plain-user", "security.capability cannot be set: operation not permitted"),
        ("root", no_group),
        ("root", no_owner),
        ("shared", no_owner),
    ]
    status = (reachable / "target" / "shared").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (65_534, 4321, 0o2644)
    for name in owners:
        assert (reachable / "target" / name).read_bytes() == name.encode()
        assert (reachable / "target" / name).stat().st_uid == 65_534


def unset_by_user(source: Path, user: int) -> Counter[str]:
    """Return by kind the attributes of a tree that a user without groups and rights cannot set."""
    expected, seen = Counter[str](), set[tuple[int, int]]()
    for parent, folders, files in os.walk(os.fsencode(source)):
        for path in (os.path.join(parent, name) for name in (b".", *files)):
            _add_unset(expected, path, user, seen)
        for name in folders:  # those that are walked are counted as their own `.`
            if os.path.islink(os.path.join(parent, name)):
                _add_unset(expected, os.path.join(parent, name), user, seen)
    return expected


def _add_unset(expected: Counter[str], path: bytes, user: int, seen: set[tuple[int, int]]) -> None:
    status = os.lstat(path)
    if stat.S_ISSOCK(status.st_mode) or (status.st_dev, status.st_ino) in seen:
        return
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        expected["device"] += 1
        return
    if not stat.S_ISDIR(status.st_mode):
        seen.add((status.st_dev, status.st_ino))
    lost = (stat.S_ISUID if status.st_uid != user else 0) | (stat.S_ISGID if status.st_gid != user else 0)
    expected["owner"] += status.st_uid != user
    expected["group"] += status.st_gid != user
    expected["setuid or setgid"] += not stat.S_ISLNK(status.st_mode) and bool(status.st_mode & lost)
    for name in os.listxattr(path, follow_symlinks=False):
        expected[name] += name.startswith(("security.", "trusted."))


@pytest.mark.skipif(not IS_ROOT, reason="only root stores what another user cannot set")
@pytest.mark.parametrize("folder", ["/usr/lib/git-core", "/usr/bin", pytest.param("/usr", marks=pytest.mark.soak)])
def test_user_is_told_exactly_what_is_not_set(folder: str, tmp_path: Path, reachable: Path) -> None:
    """The counts by kind are those of the source, and all but these attributes is restored."""
    if not Path(folder).is_dir():
        pytest.skip(f"{folder} does not exist")
    with open_store(reachable / "store", create=True) as store:
        store.backup("home", [folder])
    for path in (reachable / "store", *(reachable / "store").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    line = command("--store", reachable / "store", "--json", "restore", "home", "-o", reachable / "target")
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run([*user, *line], env=environment(), capture_output=True, check=False, text=True)
    if "Permission denied" in done.stderr and not done.stdout:
        pytest.skip(f"the interpreter cannot be run by another user: {done.stderr[-200:]}")
    assert done.returncode == 3, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["failed"], counts["problems"]) == (0, [])
    assert counts["unset"] == +unset_by_user(Path(folder), 65_534)
    compared = ["rsync", "-nrltHS", "--itemize-changes", "--delete", f"{folder}/", f"{reachable / 'target'}/"]
    assert subprocess.run(compared, check=True, capture_output=True).stdout == b""
