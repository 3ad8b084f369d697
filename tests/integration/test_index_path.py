"""Test `index.path`: the index on another disk, and detection of an older store."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin.cli import main
from nearkin.lab.generated_data import random_bytes
from nearkin.local.index_lifecycle import LocalIndex
from nearkin.local.index_location import TOKEN_FILE, IndexLocation
from nearkin.store import Store, open_store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, NoRoom, NotWritable, StoreLocked, StoreUnavailable
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from tests.support.data.stores import SMALL, settings

STALE = "has an older state of the store"


class Machine:
    """Settings of one machine that uses a store, with an index folder of its own."""

    def __init__(self, folder: Path, root: Path, changes: dict[str, dict[str, object]] | None = None) -> None:
        self.index_path, self.root = folder, root
        self.wait_seconds = 0.0
        self.settings = settings(SMALL, {"index": {**SMALL["index"], "path": str(folder)}}, changes or {})

    def open(self, *, create: bool = False) -> Store:
        """Open the store as this machine does."""
        return open_store(self.root, settings=self.settings, create=create)

    def put(self, key: str, data: bytes) -> int:
        """Put a blob in a session of its own; return how many of its bytes were new."""
        with self.open() as store:
            store.wait_for_lock(self.wait_seconds)
            return store.put(key, data).ledger.unique_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "share" / "store"


@pytest.fixture
def first(tmp_path: Path, root: Path) -> Machine:
    machine = Machine(tmp_path / "first", root)
    with machine.open(create=True):
        pass
    return machine


@pytest.fixture
def second(tmp_path: Path, root: Path) -> Machine:
    return Machine(tmp_path / "second", root)


def contents(machine: Machine) -> dict[str, bytes]:
    with machine.open() as store:
        assert not store.verify().damage
        return {info.key: store.get(info.key).read() for info in store.versions()}


def test_index_path_holds_the_index_of_the_store(first: Machine, root: Path) -> None:
    """The index is in a folder named after the store, private, and none is in the store."""
    first.put("k", b"x" * 100_000)
    with first.open() as store:
        folder = first.index_path / store.store_id
        assert store.index_folder == folder
        assert store.stats().index_bytes > 0
    assert (folder / "data.mdb").is_file()
    assert not (root / "index").exists()
    assert {folder.stat().st_mode & 0o777, first.index_path.stat().st_mode & 0o777} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()} == {0o600}
    assert (root / TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def test_two_machines_alternating_find_all_blobs(
    first: Machine, second: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Notice the other machine's puts, rebuild the index, report once, deduplicate again."""
    data = {f"blob {number}": random_bytes(300_000, number) for number in range(6)}
    for number, (key, each) in enumerate(data.items()):
        machine = (first, second)[number % 2]
        with caplog.at_level(logging.WARNING, "nearkin"):
            caplog.clear()
            assert machine.put(key, each) == len(each)
            warnings = [record for record in caplog.records if STALE in record.getMessage()]
            assert len(warnings) == (number > 1)
    for machine in (first, second):
        assert contents(machine) == data
    for machine in (second, first):
        assert [machine.put(key, each) for key, each in data.items()] == [0] * len(data)
    assert contents(second) == contents(first)


def test_index_of_the_only_writer_is_not_rebuilt(
    first: Machine, second: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Sessions of one machine, and readers elsewhere, leave its index valid."""
    first.put("a", random_bytes(200_000, 1))
    assert set(contents(second)) == {"a"}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nearkin"):
        first.put("b", random_bytes(200_000, 2))
        with first.open() as store:
            store.delete("a")
        assert set(contents(first)) == {"b"}
    assert not [record for record in caplog.records if "rebuilding" in record.getMessage()]


def test_open_reader_notices_another_machines_put(first: Machine, second: Machine) -> None:
    """List another machine's puts in an open store, also while that machine writes."""
    first.put("a", b"1")
    with second.open() as reader:
        assert [info.key for info in reader.versions()] == ["a"]
        with first.open() as writer:
            writer.put("b", b"2")
            assert [info.key for info in reader.versions()] == ["a", "b"]
        assert [info.key for info in reader.versions()] == ["a", "b"]


def test_deletion_during_recovery_is_noticed(
    first: Machine, second: Machine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalidate the other machine's index by a deletion that finds an index in recovery."""
    first.put("a", b"1")
    assert set(contents(second)) == {"a"}
    shutil.rmtree(first.index_path)
    with first.open() as store:
        whole = LocalIndex._lock_complete

        def delete_meanwhile(index: LocalIndex) -> LmdbIndex:
            found = whole(index)
            monkeypatch.undo()
            store.delete("a")
            return found

        monkeypatch.setattr(LocalIndex, "_lock_complete", delete_meanwhile)
        token = (root / TOKEN_FILE).read_bytes()
        store.versions()
        assert (root / TOKEN_FILE).read_bytes() != token
    with second.open() as store:
        assert list(store.versions()) == []


def test_machine_without_index_path_notices_too(first: Machine, root: Path) -> None:
    """Treat `index/` in the store as stale after a machine with `index.path` wrote."""
    plain = settings(SMALL)
    first.put("a", random_bytes(200_000, 1))
    with open_store(root, settings=plain) as store:
        assert store.put("b", random_bytes(200_000, 2)).info.version == 1
        assert store.index_folder == root / "index"
    first.put("c", random_bytes(200_000, 3))
    with open_store(root, settings=plain) as store:
        assert [info.key for info in store.versions()] == ["a", "b", "c"]
        assert store.put("d", random_bytes(200_000, 3)).ledger.unique_bytes == 0
    assert set(contents(first)) == {"a", "b", "c", "d"}


def test_index_in_the_store_is_removed_at_first_use(tmp_path: Path, first: Machine) -> None:
    """Remove it: without a token it looks valid once the store's token is lost."""
    root = tmp_path / "older"
    with open_store(root, settings=settings(SMALL), create=True) as store:
        store.put("k", b"1")
    assert not (root / TOKEN_FILE).exists()
    machine = Machine(first.index_path, root)
    assert contents(machine) == {"k": b"1"}
    assert not (root / "index").exists()


def test_copied_root_never_uses_the_originals_index(tmp_path: Path, first: Machine, root: Path) -> None:
    """Reject the index for a copy with the same id and token.

    Later chunks are not in the copy.
    """
    first.put("a", random_bytes(200_000, 1))
    shutil.copytree(root, tmp_path / "copy")
    copy = Machine(first.index_path, tmp_path / "copy")
    later = random_bytes(200_000, 2)
    first.put("b", later)
    assert copy.put("b", later) == len(later)
    assert contents(copy)["b"] == contents(first)["b"] == later


def test_copy_from_the_middle_of_a_session_is_noticed(tmp_path: Path, first: Machine, root: Path) -> None:
    """A copy made while the writer had the store open lacks what it put afterwards."""
    later = random_bytes(200_000, 2)
    with first.open() as store:
        store.put("a", random_bytes(200_000, 1))
        shutil.copytree(root, tmp_path / "copy")
        store.put("b", later)
        copy = Machine(first.index_path, tmp_path / "copy")
        with pytest.raises(StoreLocked, match="in use for a copy"):
            copy.put("b", later)
    assert copy.put("b", later) == len(later)
    assert contents(copy)["b"] == later
    assert contents(first)["b"] == later


def test_copy_after_a_crashed_session_is_noticed(tmp_path: Path, first: Machine, root: Path) -> None:
    """Notice a copy made after a crash.

    Same token, but without containers that the index names.
    """
    later = random_bytes(200_000, 2)
    child = os.fork()
    if not child:
        try:
            store = first.open()
            store.put("a", random_bytes(200_000, 1))
            shutil.copytree(root, tmp_path / "copy")
            store.put("b", later)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    copy = Machine(first.index_path, tmp_path / "copy")
    assert copy.put("b", later) == len(later)
    assert contents(copy)["b"] == later
    assert contents(first)["b"] == later


def test_writer_crash_while_claiming_is_safe(first: Machine, second: Machine) -> None:
    """Of the three steps of a new token each may be the last one."""
    first.put("a", b"1")
    second.put("b", b"2")
    plain = IndexLocation._write_token
    for written in (False, True):

        def write(location: IndexLocation, token: str, *, written: bool = written) -> None:
            if written:
                plain(location, token)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(IndexLocation, "_write_token", write)
            with pytest.raises(KeyboardInterrupt):
                first.put("never", b"3")
        assert contents(second) == contents(first) == {"a": b"1", "b": b"2"}
    assert first.put("a copy", b"2" * 50_000) > 0
    assert set(contents(second)) == {"a", "b", "a copy"}


def test_damaged_or_lost_token_rebuilds_the_index(first: Machine, root: Path) -> None:
    """A token that is lost, torn or not one matches no index; the next writer makes a new one."""
    first.put("a", b"1")
    for damage in (b"", b"0123", b"\xff" * 33, b"g" * 32 + b"\n"):
        (root / TOKEN_FILE).write_bytes(damage)
        assert contents(first) == {"a": b"1"}
    (root / TOKEN_FILE).unlink()
    assert contents(first) == {"a": b"1"}
    assert len((root / TOKEN_FILE).read_bytes()) == 33


def test_token_behind_a_link_is_refused(tmp_path: Path, first: Machine, root: Path) -> None:
    """The token is never written through a link, or into a file that a copy as links shares."""
    first.put("a", b"1")
    kept = (root / TOKEN_FILE).read_bytes()
    os.link(root / TOKEN_FILE, tmp_path / "shared")
    first.put("b", b"2")
    assert (tmp_path / "shared").read_bytes() == kept
    (root / TOKEN_FILE).unlink()
    (root / TOKEN_FILE).symlink_to(tmp_path / "shared")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        first.put("c", b"3")
    assert (tmp_path / "shared").read_bytes() == kept


def test_index_path_lost_is_made_again(first: Machine) -> None:
    """A removed index folder costs a rebuild, and `rebuild-index` makes it again at any time."""
    data = random_bytes(200_000, 1)
    first.put("a", data)
    shutil.rmtree(first.index_path)
    assert contents(first) == {"a": data}
    with first.open() as store:
        assert store.rebuild_index().versions == 1
        assert store.put("b", data).ledger.unique_bytes == 0
        store.rebuild_index()
        store.put("c", data)
    assert set(contents(first)) == {"a", "b", "c"}


def test_index_path_of_another_user_is_not_believed(first: Machine) -> None:
    """A folder that others may write is refused for writing; readers use a temporary index."""
    first.put("a", b"1")
    with first.open() as store:
        folder = store.index_folder
    folder.chmod(0o770)
    with pytest.raises(NotWritable, match="may be written by others"):
        first.put("b", b"2")
    assert contents(first) == {"a": b"1"}
    folder.chmod(0o700)
    os.chown(folder, 65534, -1) if os.geteuid() == 0 else folder.chmod(0o720)
    with pytest.raises(NotWritable, match=r"index\.path"):
        first.put("b", b"2")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o775, True), (0o755, False), (0o1777, False)])
def test_index_path_in_which_others_may_rename_is_refused(first: Machine, mode: int, is_refused: bool) -> None:
    """The folder above the index too belongs to the user alone, unless it is sticky.

    Readers list by another.
    """
    first.put("a", b"1")
    first.index_path.chmod(mode)
    if is_refused:
        with pytest.raises(NotWritable, match=rf"{first.index_path}.*mode {mode:04o}.*chmod go-w"):
            first.put("b", b"2")
        assert contents(first) == {"a": b"1"}
        first.index_path.chmod(mode & ~0o022)
    first.put("b", b"2")
    assert contents(first) == {"a": b"1", "b": b"2"}


def test_index_path_that_another_user_owns_is_refused(first: Machine) -> None:
    """The owner of the folder above the index could replace it."""
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder away")
    first.put("a", b"1")
    os.chown(first.index_path, 65534, -1)
    with pytest.raises(NotWritable, match=rf"{first.index_path}: belongs to user 65534"):
        first.put("b", b"2")
    assert contents(first) == {"a": b"1"}


def test_index_path_not_a_folder_is_named(tmp_path: Path, root: Path, first: Machine) -> None:
    """An index folder that cannot be made is an error of writers that names it."""
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailable, match=str(place)):
            Machine(place, root).put("a", b"1")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount the small disk that this test fills")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, but_bytes: int) -> Path:
    """Leave `but_bytes` of room."""
    (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - but_bytes))
    return disk / "ballast"


def test_index_path_full_fails_the_put_and_keeps_all(disk: Path, root: Path, first: Machine) -> None:
    """Name the full index disk; read all; put once there is room."""
    first.put("a", b"1" * 100_000)
    ballast, full = fill(disk, 8192), Machine(disk, root)
    with pytest.raises(NoRoom, match=rf"{disk}.*index\.path"):
        full.put("b", b"2")
    assert contents(first) == {"a": b"1" * 100_000}
    ballast.unlink()
    full.put("b", b"2")
    assert set(contents(full)) == set(contents(first)) == {"a", "b"}


def test_index_path_full_keeps_the_reserve_and_lists(disk: Path, root: Path, first: Machine) -> None:
    """Keep the store's reserve if its own disk is not full; readers list all."""
    first.put("a", b"1" * 100_000)
    reserve = root / "reserve"
    assert reserve.is_file()
    fill(disk, 8192)
    with Machine(disk, root).open() as store:
        for command in (store.gc, store.purge, lambda: store.delete("a")):
            with pytest.raises(NoRoom, match=rf"{disk}.*index\.path"):
                command()
            assert reserve.is_file()
        assert [info.key for info in store.versions()] == ["a"]


@pytest.mark.parametrize("room_kib", [300, 501])
def test_index_path_that_fills_in_a_session_is_named(tmp_path: Path, disk: Path, root: Path, room_kib: int) -> None:
    """Name the folder at whichever index commit fails; keep all acknowledged versions."""
    small: dict[str, dict[str, object]] = {"chunker": {"min_bytes": 256, "target_bytes": 512, "max_bytes": 1024}}
    first, full = Machine(tmp_path / "first", root, small), Machine(disk, root, small)
    with first.open(create=True):
        pass
    fill(disk, room_kib << 10)
    done: set[str] = set()
    endless = ((f"k{number}", random_bytes(200_000, number)) for number in range(100))
    with full.open() as store, pytest.raises(NoRoom, match=rf"{disk}.*index\.path"):
        done.update(result.info.key for result in store.put_many(endless))
    with first.open() as store:
        assert done <= {info.key for info in store.versions()}
        assert not store.verify().damage


@pytest.mark.parametrize("path", ["cache", "./x", "", "a\0b", "/" + "x" * 5000])
def test_index_path_not_absolute_is_refused(path: str) -> None:
    """A path that depends on the current folder would give each call an index of its own."""
    with pytest.raises(ConfigError, match=r"index\.path"):
        with_changes(Settings(), {"index": {"path": path}})


@pytest.mark.parametrize("inside", ["", "index", "containers", "tmp/a/b"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_index_path_inside_the_store_is_refused(tmp_path: Path, first: Machine, inside: str, is_linked: bool) -> None:
    """Refuse the store's folder and folders below it by any name; change nothing."""
    first.put("a", b"1")
    path = first.root / inside
    if is_linked:
        (tmp_path / "link").symlink_to(first.root)
        path = tmp_path / "link" / inside
    before = sorted(first.root.rglob("*"))
    with pytest.raises(ConfigError, match=r"index\.path .*inside the store .*unset index\.path"):
        Machine(path, first.root).open()
    with pytest.raises(ConfigError, match=r"index\.path"):
        Machine(tmp_path / "new" / inside, tmp_path / "new").open(create=True)
    assert not (tmp_path / "new").exists()
    assert sorted(first.root.rglob("*")) == before
    assert contents(first) == {"a": b"1"}


def test_index_path_in_a_linked_containers_folder_is_refused(tmp_path: Path, first: Machine) -> None:
    """Where `containers` is a link to another disk, that folder is the store's own too."""
    first.put("a", b"1")
    moved = (first.root / "containers").rename(tmp_path / "disk")
    (first.root / "containers").symlink_to(moved)
    for path in (moved, moved / "index", first.root / "containers" / "index"):
        with pytest.raises(ConfigError, match=r"index\.path .*inside the store"):
            Machine(path, first.root).open()
    assert contents(Machine(tmp_path, first.root)) == {"a": b"1"}  # a folder above is not inside


def test_index_path_below_home_is_expanded(
    tmp_path: Path, root: Path, first: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~ is the user's home folder; one that is not known is an error that names the setting."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Machine(Path("~/cache"), root).open() as store:
        assert store.index_folder == tmp_path / "home" / "cache" / store.store_id
    with pytest.raises(ConfigError, match=r"index\.path"):
        Machine(Path("~no-such-user/cache"), root).open()


def test_index_path_on_a_network_filesystem_warns(
    first: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decide by the filesystem of the index, not by that of the store."""
    monkeypatch.setattr("nearkin.local.index_files._CHECKED_FOLDERS", set())
    monkeypatch.setattr(
        "nearkin.local.index_files.network_type", lambda path: "nfs4" if path == first.index_path else None
    )
    with caplog.at_level(logging.WARNING, "nearkin"):
        first.put("a", b"1")
    assert [record for record in caplog.records if "network filesystem (nfs4)" in record.getMessage()]


def test_gc_during_another_machines_puts_is_safe(first: Machine, second: Machine, root: Path) -> None:
    """A GC run between whose steps another machine puts sees what that one refers to."""
    erase = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    first.settings = settings(first.settings, erase)
    second.settings = settings(second.settings, erase)
    data = {f"k{number}": random_bytes(300_000, number) for number in range(8)}
    for key, each in data.items():
        first.put(key, each)
    with first.open() as store:
        for key in list(data)[:4]:
            store.delete(key)
    puts: list[int] = []
    second.wait_seconds = 60.0

    def put_again() -> None:
        puts.extend(second.put(f"again {key}", data[key]) for key in list(data)[:4])

    for _ in range(3):
        thread = threading.Thread(target=put_again)
        with first.open() as store:
            thread.start()
            store.gc(wait_seconds=60)
            thread.join(60)
    found = contents(first)
    assert found == contents(second)
    assert {key: found[key] for key in list(data)[4:]} == {key: data[key] for key in list(data)[4:]}
    assert {key: found[f"again {key}"] for key in list(data)[:4]} == {key: data[key] for key in list(data)[:4]}


def test_stats_and_config_name_the_index_folder(
    first: Machine, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command shows where the index is, and takes the setting from the environment."""
    monkeypatch.setenv("NEARKIN_INDEX__PATH", str(first.index_path))
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["--store", str(root), "stats"]) == 0
    assert str(first.index_path) in capsys.readouterr().out
    assert main(["--store", str(root), "config"]) == 0
    assert str(first.index_path) in capsys.readouterr().out
    assert main(["--store", str(root), "rebuild-index"]) == 0
    assert main(["--store", str(root), "verify"]) == 0
    assert not (root / "index").exists()
