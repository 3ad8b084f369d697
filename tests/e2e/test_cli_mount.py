"""`nearkin mount`: reads by programs through a real mount, and its end."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from ctypes.util import find_library
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.trees import fuse_mount
from nearkin_shared.errors import ConfigError
from tests.support.checks.commands import InProcess, assert_refused, command, environment
from tests.support.checks.fuse_mounts import mounted_by, needs_fuse


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with entries of many kinds."""
    root = tmp_path / "source"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "large.bin").write_bytes(os.urandom(9_000_000))
    (root / "small.txt").write_bytes(b"small")
    (root / "none").touch()
    os.link(root / "small.txt", root / "deep" / "hard link")
    (root / "deep" / "symlink").symlink_to("../small.txt")
    os.mkfifo(root / "fifo", 0o640)
    Path(os.fsdecode(os.fsencode(root / "deep") + b"/bytes \xff\nend")).write_bytes(b"1")
    with (root / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(os.urandom(8192))
        file.truncate(5 << 20)
    os.setxattr(root / "small.txt", "user.note", b"value \x00")
    (root / "small.txt").chmod(0o4750)
    os.utime(root / "none", ns=(-1_000_000_001, -1_000_000_001))
    return root


def mounted(
    store: Path, folder: Path, *, end: int | None = None, cwd: Path | None = None
) -> AbstractContextManager[Path]:
    """Mount a store for a block; `cwd`: the folder in which the command runs."""
    return mounted_by(command("--store", store, "--json", "mount", folder), folder, end=end, cwd=cwd)


@needs_fuse
def test_mount_names_the_command_that_unmounts_it(tmp_path: Path) -> None:
    """The notice has a command that can be run as it is, of a folder with a space too."""
    folder = tmp_path / "a mount"
    folder.mkdir()
    with open_store(tmp_path / "store", create=True):
        pass
    words = command("--store", tmp_path / "store", "mount", folder)
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            remedy = process.stdout.readline().partition("Ctrl-C or `")[2].partition("`")[0]
            assert remedy == f"fusermount -u '{folder}'"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def status_of(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    names = os.listxattr(path, follow_symlinks=False)
    xattrs = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    return found.st_mode, found.st_uid, found.st_gid, size, found.st_mtime_ns, xattrs


@needs_fuse
def test_mounted_tree_equals_its_source(source: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home/kim", [source])
        store.put("home/kim/3", b"a blob")
        store.put("home/kim", b"the second version is a blob")
    with mounted(tmp_path / "store", tmp_path / "mnt") as folder:
        tree = folder / "home" / "kim" / "1"
        (tree / "fifo").lstat()
        compared = subprocess.run(["diff", "-r", "--exclude=fifo", source, tree], capture_output=True, check=False)
        assert (compared.returncode, compared.stdout) == (0, b"")
        for path in [source, *source.rglob("*")]:
            assert status_of(tree / path.relative_to(source)) == status_of(path), path
        assert (tree / "deep" / "symlink").readlink() == Path("../small.txt")
        assert (tree / "small.txt").stat().st_ino == (tree / "deep" / "hard link").stat().st_ino
        assert subprocess.run(["ls", "-lR", folder], capture_output=True, check=False).returncode == 0
        names = sorted(os.listdir(folder / "home" / "kim"))
        assert names[:2] == ["%33", "1"]
        assert (folder / "home" / "kim" / "latest").readlink() == Path("2")
        assert all(name.endswith("Z") for name in names[3:-1])
        assert (folder / "home" / "kim" / "latest").read_bytes() == b"the second version is a blob"
        assert (folder / "home" / "kim" / "%33" / "1").read_bytes() == b"a blob"
        with (tree / "large.bin").open("rb") as file:
            file.seek(5_000_001)
            assert file.read(70_000) == (source / "large.bin").read_bytes()[5_000_001:5_070_001]
        with pytest.raises(FileNotFoundError):
            (tree / "nothing").stat()
        with pytest.raises(OSError, match="Read-only file system"):
            (tree / "small.txt").write_bytes(b"")


@needs_fuse
@pytest.mark.skipif(not find_library("fuse3"), reason="libfuse 2 asks for no holes")
def test_holes_of_a_mounted_file_are_those_of_its_source(source: Path, tmp_path: Path) -> None:
    """SEEK_HOLE and SEEK_DATA answer as at the source, so that a copy by `cp` has the holes again."""
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("k", [source])
        store.put("blob", b"1234")
    with mounted(tmp_path / "store", tmp_path / "mnt") as folder:
        for name in ("sparse", "small.txt", "none", "large.bin"):
            assert holes_of(folder / "k" / "1" / name) == holes_of(source / name), name
        assert holes_of(folder / "blob" / "1") == [(0, 4)]
        copied = tmp_path / "copied"
        subprocess.run(["cp", "--sparse=auto", folder / "k" / "1" / "sparse", copied], check=True)
    assert copied.read_bytes() == (source / "sparse").read_bytes()
    assert copied.stat().st_blocks == (source / "sparse").stat().st_blocks


def holes_of(path: Path) -> list[tuple[int, int]]:
    """Return start and end of each stretch of data of a file."""
    found, position = list[tuple[int, int]](), 0
    with path.open("rb") as file:
        while True:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as err:
                if err.errno != errno.ENXIO:
                    raise
                return found
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, position))


@needs_fuse
def test_rsync_finds_no_difference_from_the_mount(source: Path, tmp_path: Path) -> None:
    """Owners, times, hard links, xattrs, ACLs and holes of the mounted tree are those of the source."""
    for name in ("third name", "fourth name"):
        os.link(source / "small.txt", source / "deep" / "er" / name)
    os.link(source / "fifo", source / "second fifo")
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
    with mounted(tmp_path / "store", tmp_path / "mnt") as folder:
        tree = folder / "home" / "1"
        line = ["rsync", "-naHAXS", "--itemize-changes", "--delete", f"{tree}/", f"{source}/"]
        assert subprocess.run(line, check=True, capture_output=True).stdout == b""
        for name in ("small.txt", "deep/hard link", "deep/er/third name", "fifo", "second fifo", "large.bin"):
            found, expected = (tree / name).lstat(), (source / name).lstat()
            assert (found.st_nlink, name) == (expected.st_nlink, name)
        subprocess.run(["rsync", "-aHAXS", f"{tree}/", tmp_path / "copy"], check=True)
    line[-2:] = [f"{source}/", f"{tmp_path}/copy/"]
    assert subprocess.run(line, check=True, capture_output=True).stdout == b""
    assert (tmp_path / "copy" / "small.txt").stat().st_nlink == 4


@needs_fuse
def test_relative_store_path_is_found_from_a_mount(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.put("blob", b"blob")
    with mounted(Path("store"), tmp_path / "mnt", cwd=tmp_path) as folder:
        assert (folder / "blob" / "1").read_bytes() == b"blob"


COUNTING_MOUNT = """
    import json, sys
    from pathlib import Path
    from nearkin.store import open_store
    from nearkin.trees.fuse_mount import mount_store
    from nearkin.trees.mounted_store import MountedStore

    asked = 0

    class CountingStore(MountedStore):
        def status(self, path):
            global asked
            asked += 1
            return super().status(path)

    with open_store(sys.argv[1]) as store:
        folder = Path(sys.argv[2])
        announce = lambda: print(json.dumps({"folder": str(folder)}), flush=True)
        mount_store(CountingStore(store), folder, announce, allow_other=False)
    Path(sys.argv[3]).write_text(str(asked))
"""


@needs_fuse
@pytest.mark.skipif(not find_library("fuse3"), reason="libfuse 3 is not installed")
def test_listing_with_attributes_asks_for_no_entry(tmp_path: Path) -> None:
    """`ls -lR` takes the attributes from the listings: of folders of more than one page, too."""
    for part in "abc":
        (tmp_path / "source" / part).mkdir(parents=True)
        for number in range(1500):
            (tmp_path / "source" / part / f"file with a long name {number}").touch()
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [tmp_path / "source"])
    words = (tmp_path / "store", tmp_path / "mnt", tmp_path / "asked")
    line = [sys.executable, "-c", textwrap.dedent(COUNTING_MOUNT), *map(str, words)]
    with mounted_by(line, tmp_path / "mnt") as folder:
        done = subprocess.run(["ls", "-lR", folder / "home" / "1"], check=True, capture_output=True)
        assert done.stdout.count(b"file with a long name") == 4500
        subprocess.run(["diff", "-r", tmp_path / "source", folder / "home" / "1"], check=True)
    asked = int((tmp_path / "asked").read_text())
    assert asked < 50, f"{asked} requests for attributes of 4,503 entries"


@needs_fuse
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_signal_unmounts(tmp_path: Path, end: int) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.put("blob", b"blob")
    with mounted(tmp_path / "store", tmp_path / "mnt", end=end) as folder:
        assert (folder / "blob" / "1").read_bytes() == b"blob"


@needs_fuse
def test_damaged_content_is_an_input_output_error(source: Path, tmp_path: Path) -> None:
    """Refuse the damaged file alone."""
    with open_store(tmp_path / "store", create=True) as store:
        store.backup("home", [source])
        store.put("other", b"intact")
    (container,) = sorted((tmp_path / "store" / "containers").rglob("*.nkc"), key=lambda path: -path.stat().st_size)[:1]
    content = bytearray(container.read_bytes())
    content[len(content) // 2] ^= 1
    container.chmod(0o600)
    container.write_bytes(content)
    with mounted(tmp_path / "store", tmp_path / "mnt") as folder:
        with pytest.raises(OSError, match="Input/output error"):
            (folder / "home" / "1" / "large.bin").read_bytes()
        assert (folder / "home" / "1" / "small.txt").read_bytes() == b"small"
        assert (folder / "other" / "1").read_bytes() == b"intact"


@needs_fuse
def test_folder_that_is_not_empty_is_refused(tmp_path: Path, call: InProcess) -> None:
    assert call("init", tmp_path / "store").returncode == 0
    assert_refused(call("--store", tmp_path / "store", "mount", tmp_path), 2, "is not empty; name an empty folder")
    missing = call("--store", tmp_path / "store", "mount", tmp_path / "missing")
    assert_refused(missing, 2, "name an existing, empty folder")


@needs_fuse
def test_missing_device_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuse_mount, "DEVICE", tmp_path / "fuse")
    with pytest.raises(ConfigError, match="modprobe fuse"):
        fuse_mount.load_fuse()


def test_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    with pytest.raises(ConfigError, match=r"mfusepy is not installed; pip install 'nearkin\[mount\]'"):
        fuse_mount.load_fuse()


@needs_fuse
def test_backup_leaves_out_the_mount_of_a_store(source: Path, tmp_path: Path, call: InProcess) -> None:
    """A mount inside the source would store every version again; one that is given is stored."""
    store = tmp_path / "store"
    with open_store(store, create=True) as opened:
        opened.put("k", b"content")
    with mounted(store, source / "mnt") as folder:
        done = call("--store", store, "backup", "home", source)
        assert done.returncode == 0
        expected = f"skipped: {folder}: is a store that `nearkin mount` mounted; its content is left out"
        assert expected in done.stderr.decode()
        answer = call.answer("--store", store, "backup", "home", source)
        assert [one["path"] for one in answer["skips"]] == [str(folder)]
        with open_store(store, read_only=True) as opened:
            paths = [placed.entry.path for placed in opened.tree("home").entries()]
        assert [path for path in paths if path.startswith(b"mnt")] == [b"mnt"]
        assert call.answer("--store", store, "backup", "mounted", folder / "k")["files"] > 0
