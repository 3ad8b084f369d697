"""Test a folder as an object store.

Acknowledged objects survive a power cut, others leave no partial object.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_shared.errors import Corrupt, NotFound, RetryableError, StoreUnavailable
from nearkin_shared.limits import DESCRIPTOR, MANIFEST_BYTES_MAX, OBJECT_BYTES_MAX
from nearkin_shared.objectstore import local as module
from nearkin_shared.objectstore.local import TOGETHER_BYTES_MAX, LocalObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from tests.support.fakes.faulty_objects import FaultyObjectStore


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record (operation, inode) of each fsync and link, which still take effect.

    Whether a sync precedes a link cannot be observed from outside; the order of the calls shows it.
    """
    recorded: list[tuple[str, int]] = []
    fsync, link = os.fsync, os.link

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        recorded.append(("sync folder" if stat.S_ISDIR(found.st_mode) else "sync file", found.st_ino))

    def recording_link(source: Path, target: Path) -> None:
        link(source, target)
        recorded.append(("link", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "link", recording_link)
    return recorded


def test_bytes_are_synced_before_the_link_and_folder_after(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    store = LocalObjectStore(tmp_path)
    store.put_new("a/first", b"1")
    calls.clear()
    store.put_new("a/second", b"2")
    made, folder = (tmp_path / "a/second").stat().st_ino, (tmp_path / "a").stat().st_ino
    assert calls == [("sync file", made), ("link", made), ("sync folder", folder)]


def test_new_folders_are_synced_from_the_root_down(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    LocalObjectStore(tmp_path).put_new("a/b/x", b"1")
    inodes = {folder: (tmp_path / folder).stat().st_ino for folder in (".", "a", "a/b")}
    assert [inode for kind, inode in calls if kind == "sync folder"] == [inodes["."], inodes["a"], inodes["a/b"]]


def test_folders_of_a_dead_writer_are_synced_by_the_next(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    (tmp_path / "a/b").mkdir(parents=True)  # created, but possibly not synced
    LocalObjectStore(tmp_path).put_new("a/b/x", b"1")
    synced = {inode for kind, inode in calls if kind == "sync folder"}
    assert {(tmp_path / folder).stat().st_ino for folder in (".", "a", "a/b")} <= synced


@pytest.fixture
def unmounted(tmp_path: Path) -> LocalObjectStore:
    """Return the open folder of a store whose disk was unmounted: the mount point is empty."""
    (tmp_path / "store").mkdir()
    objects = LocalObjectStore(tmp_path / "store")
    for name in (DESCRIPTOR, "manifests/00/x"):
        objects.put_new(name, b"1")
    objects.get(DESCRIPTOR)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    return objects


def test_listing_of_an_unmounted_store_is_an_error(unmounted: LocalObjectStore) -> None:
    """I10: a GC run must not see a store without manifests."""
    with pytest.raises(StoreUnavailable, match="mount its disk again"):
        list(unmounted.names("manifests"))


def test_missing_folders_of_an_unmounted_store_are_an_error(unmounted: LocalObjectStore) -> None:
    """A key whose folder cannot be seen is not a key without versions."""
    with pytest.raises(StoreUnavailable, match="mount"):
        unmounted.are_missing(["manifests/00/a"])


def test_missing_folders_are_those_without_an_entry(tmp_path: Path) -> None:
    """A file, a dangling link and a folder that cannot be searched are left to `names`, which reports them."""
    store = LocalObjectStore(tmp_path)
    store.put_new("manifests/00/there/1", b"1")
    (tmp_path / "manifests/00/file").write_bytes(b"")
    (tmp_path / "manifests/00/link").symlink_to("nowhere")
    wanted = {"there": False, "file": False, "link": False, "file/below": False, "away": True, "x" * 300: False}
    assert store.are_missing([f"manifests/00/{name}" for name in wanted]) == list(wanted.values())
    assert store.are_missing(["manifests/01/a", "manifests/00/away"]) == [True, True]


def test_put_into_an_unmounted_store_writes_nothing(unmounted: LocalObjectStore, tmp_path: Path) -> None:
    """I1: a put must not be acknowledged that is on the disk of the mount point."""
    with pytest.raises(StoreUnavailable, match="mount its disk again"):
        unmounted.put_new("containers/00/y", b"2")
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not (tmp_path / "store" / "containers").exists()


def test_sweep_continues_behind_a_file_that_stays(tmp_path: Path) -> None:
    """One name that cannot be removed must not keep the store from being opened."""
    objects = LocalObjectStore(tmp_path)
    objects.put_new("a/x", b"1")
    (tmp_path / "tmp" / "0.part").mkdir()
    (tmp_path / "tmp" / "1.part").write_bytes(b"half")
    objects.sweep_scratch()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["0.part"]


DYING = """
import os, sys
from pathlib import Path
from nearkin_shared.objectstore import local as objectstore_base
steps = 0
def dying(real):
    def call(*given, **named):
        global steps
        if steps == int(sys.argv[2]):
            os._exit(9)
        steps += 1
        return real(*given, **named)
    return call
for name in ("open", "writev", "fsync", "link", "close"):
    setattr(objectstore_base.os, name, dying(getattr(os, name)))
objectstore_base.LocalObjectStore(Path(sys.argv[1])).put_new("a/x", b"content")
print("done", steps, flush=True)
os._exit(0)
"""


def test_crash_at_any_step_leaves_whole_object_or_none(tmp_path: Path) -> None:
    visible = []
    for step in range(40):
        root = tmp_path / str(step)
        root.mkdir()
        found = subprocess.run(
            [sys.executable, "-c", DYING, str(root), str(step)], capture_output=True, timeout=60, check=False
        )
        store = LocalObjectStore(root)
        names = list(store.names("a"))
        if found.returncode == 0:
            assert names == [("a/x", 7)]
            break
        assert found.returncode == 9, found.stderr
        visible.append(bool(names))
        assert not names or store.get("a/x") == b"content"
        store.sweep_scratch()
        assert not (root / "tmp").is_dir() or not list((root / "tmp").iterdir())
        if not names:
            store.put_new("a/x", b"again")
            assert store.get("a/x") == b"again"
    else:
        raise AssertionError("put_new takes more than 40 calls")
    assert visible == sorted(visible)  # nothing before the link, the whole object after it
    assert visible[0] is False
    assert visible[-1] is True


def test_failed_write_leaves_nothing_and_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalObjectStore(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        with pytest.raises(StoreUnavailable, match="make room") as raised:
            store.put_new("a/x", b"content")
    assert isinstance(raised.value, RetryableError)
    assert isinstance(raised.value.__cause__, OSError)
    assert list(store.names("")) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    store.put_new("a/x", b"content")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def short(descriptor: int, parts: Sequence[Any]) -> int:
        calls.append(len(parts))
        return os.write(descriptor, b"".join(parts)[:3])

    monkeypatch.setattr(os, "writev", short)
    monkeypatch.setattr(module, "PARTS_WRITTEN_MAX", 2)
    LocalObjectStore(tmp_path).put_new("a/x", b"01", b"", b"2345", memoryview(b"6"), b"789")
    assert (tmp_path / "a/x").read_bytes() == b"0123456789"
    assert calls == [2, 2, 2, 1]


def test_large_ranges_stay_valid_while_others_are_read(tmp_path: Path) -> None:
    store, data = LocalObjectStore(tmp_path), random_bytes(3 << 20, 1)
    store.put_new("a/large", data)
    ends = [1 << 20, 2 << 20, (3 << 20) + 100]  # the last one beyond the end
    found = store.get_ranges("a/large", [0, 1 << 20, 2 << 20], ends)
    again = [store.get_ranges("a/large", [5], [(1 << 20) + 5])[0] for _ in range(3)]
    assert b"".join(found) == data
    assert [bytes(piece) for piece in again] == [data[5 : (1 << 20) + 5]] * 3


def test_adjacent_ranges_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, data = LocalObjectStore(tmp_path), random_bytes(2 * TOGETHER_BYTES_MAX, 1)
    objects.put_new("a/b", data)
    half, reads = TOGETHER_BYTES_MAX // 2, list[tuple[int, int]]()
    plain = LocalObjectStore._read_range

    def read(self: LocalObjectStore, descriptor: int, start: int, end: int) -> object:
        reads.append((start, end))
        return plain(self, descriptor, start, end)

    monkeypatch.setattr(LocalObjectStore, "_read_range", read)
    ends = [10, 500, half, half + 1, 3 * half]
    starts = [0, 10, 500, half, half + 1]
    found = objects.get_ranges("a/b", [*starts, 7], [*ends, 9])
    assert found == [data[start:end] for start, end in zip([*starts, 7], [*ends, 9], strict=True)]
    assert reads == [(0, half + 1), (half + 1, 3 * half), (7, 9)], "a joint read must not exceed the bound of one"


def test_objects_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    LocalObjectStore(tmp_path).put_new("a/x", b"1")
    assert stat.S_IMODE((tmp_path / "a/x").stat().st_mode) == 0o600


def test_error_while_listing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(*_: Any, **__: Any) -> Iterator[list[dict[str, Any]]]:
        yield [{"path": "a/x", "size": 1}]
        raise obstore.exceptions.GenericError("connection reset\nand more")

    monkeypatch.setattr(obstore, "list", pages)
    with pytest.raises(StoreUnavailable, match=r"connection reset$"):
        list(memory_objects().names("a"))


def test_folder_that_fails_while_it_is_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjectStore(tmp_path)
    objects.put_new("a/x", b"1")
    objects.put_new("a/below/y", b"1")
    real = os.scandir

    def scandir(folder: str) -> Any:
        if Path(folder) == tmp_path / "a/below":
            raise OSError(errno.EIO, "Input/output error")
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StoreUnavailable, match=r"a/below: .*Input/output error"):
        list(objects.names("a"))


def test_only_files_are_listed_wherever_links_lead(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    objects = LocalObjectStore(tmp_path / "s")
    objects.put_new("a/x", b"123")
    (tmp_path / "other disk").mkdir()
    (tmp_path / "other disk/y").write_bytes(b"12345")
    (tmp_path / "s/a/linked").symlink_to(tmp_path / "other disk")
    (tmp_path / "s/a/gone.nkc").symlink_to(tmp_path / "nowhere")
    (tmp_path / "s/a/.#lock").symlink_to("kim@db-1:2")
    (tmp_path / "s/a/empty").mkdir()
    os.mkfifo(tmp_path / "s/a/pipe")
    assert sorted(objects.names("a")) == sorted(objects.names("a/")) == [("a/linked/y", 5), ("a/x", 3)]
    assert list(objects.names("none")) == []
    with pytest.raises(NotFound):
        objects.get("a/pipe")


@pytest.mark.parametrize("instead", ["file", "link", "link below"])
def test_unmounted_folder_is_not_an_empty_store(tmp_path: Path, instead: str) -> None:
    objects = LocalObjectStore(tmp_path)
    objects.put_new("a/b/x", b"123")
    if instead == "link below":
        (tmp_path / "a/c").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "a").rename(tmp_path / "elsewhere")
        (tmp_path / "a").write_bytes(b"") if instead == "file" else (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreUnavailable, match="^a: .*Not a directory" if instead == "file" else "^a.*is not there"):
        list(objects.names("a"))


def test_object_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    objects = LocalObjectStore(tmp_path)
    for name, most in (("manifests/x", MANIFEST_BYTES_MAX), ("containers/x", OBJECT_BYTES_MAX)):
        (tmp_path / name).parent.mkdir()
        with (tmp_path / name).open("wb") as file:
            file.truncate(most + 1)
        with pytest.raises(Corrupt, match=f"^{name}: {most + 1} bytes, where none has more than {most}"):
            objects.get(name)


def test_names_of_other_programs_are_listed_and_readable(tmp_path: Path) -> None:
    objects = LocalObjectStore(tmp_path)
    (tmp_path / "in").mkdir()
    for name in ("two words", "für", "100%", "a#b"):
        (tmp_path / "in" / name).write_bytes(name.encode())
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/\xff\xfe")).write_bytes(b"x")
    found = {name for name, _ in objects.names("in")}
    assert found == {"in/two words", "in/für", "in/100%", "in/a#b", "in/\\xff\\xfe"}
    for name in found - {"in/\\xff\\xfe"}:
        assert objects.get(name) == name.removeprefix("in/").encode()


def test_puts_and_gets_do_not_import_obstore(tmp_path: Path) -> None:
    script = (
        "import sys, nearkin; store = nearkin.open_store(sys.argv[1], create=True); store.put('k', b'x' * 100_000);"
        "store.get('k').read(); list(store.versions()); store.close(); print('obstore' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.split() == ["False"]


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        list(LocalObjectStore(tmp_path).names("x" * 300))  # longer than a file name may be: not a missing folder


# --- scripted faults -------------------------------------------------------------------------------------------------


def test_bad_sector_is_damage_of_the_object_and_no_outage(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match=r"mem: the device cannot read it \(Input/output error\)"):
        LocalObjectStore(Path("/proc/self")).get_ranges("mem", [0], [10])  # EIO, as of a bad sector
    store = LocalObjectStore(tmp_path)
    store.put_new("a/good", b"1")
    assert store.get("a/good") == b"1"


def test_folder_at_the_name_of_an_object_is_no_object(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    store.put_new("a/b/x", b"1")
    for ask in (store.get, store.size_bytes, lambda name: store.get_ranges(name, [0], [1])):
        with pytest.raises(NotFound, match="a/b: no such object"):
            ask("a/b")


def outcome(call: Callable[[], None]) -> str:
    try:
        call()
    except StoreUnavailable:
        return "failed"
    return "done"


def test_each_letter_of_a_script_applies_to_one_write() -> None:
    inner = memory_objects()
    faulty = FaultyObjectStore(inner, ".LE.")
    assert not faulty.spent
    assert [outcome(lambda n=n: faulty.put_new(f"a/{n}", b"x")) for n in range(5)] == [  # type: ignore[misc]
        *("done", "failed", "failed", "done", "done")
    ]
    assert sorted(name for name, _ in inner.names("a")) == ["a/0", "a/1", "a/3", "a/4"]
    assert faulty.spent
    assert faulty.calls[2] == ("E", "put_new", "a/2")


def test_deletes_take_a_letter_and_reads_do_not() -> None:
    inner = memory_objects()
    inner.put_new("a/x", b"x")
    faulty = FaultyObjectStore(inner, "EL")
    assert outcome(lambda: faulty.delete("a/x")) == "failed"
    assert faulty.get("a/x") == b"x"
    assert outcome(lambda: faulty.delete("a/x")) == "failed"
    assert list(faulty.names("a")) == []


def test_script_of_other_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="'x' unknown"):
        FaultyObjectStore(memory_objects(), "..x")
