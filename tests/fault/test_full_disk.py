"""A full disk: a put that does not fit fails whole, stored data stay, and the put succeeds after making room."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes, text_like
from nearkin.store import Store
from nearkin_shared.errors import NoRoom, NotFound, StoreUnavailable
from nearkin_shared.storage.disk_reserve import SpaceReserve
from tests.support.data.stores import SMALL, settings, stored_bytes

MIB = 1 << 20
DISK_MIB = 48
CHOSEN = settings(SMALL, {"container": {"target_bytes": 2 * MIB}, "runner": {"batch_bytes": 2 * MIB}})
EARLIER = text_like(3 * MIB, 1)
LARGE = random_bytes(20 * MIB, 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 48 MiB."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root may mount the small disk that this test fills")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, but_bytes: int) -> Path:
    """Fill the disk up to `but_bytes` of room."""
    ballast = disk / "ballast"
    left = os.statvfs(disk)
    with ballast.open("wb") as file:
        for _ in range((left.f_bavail * left.f_frsize - but_bytes) // 4096):
            file.write(bytes(4096))
    return ballast


def assert_nothing_happened(store: Store) -> None:
    with pytest.raises(NotFound):
        store.get("large")
    assert [(info.key, info.version) for info in store.versions(all_versions=True)] == [("earlier", 1)]
    assert store.get("earlier").read() == EARLIER
    assert store.verify().damage == ()


@pytest.mark.parametrize("room_mib", [0, 1, 3, 7, 12])
def test_put_without_room_leaves_no_version(disk: Path, room_mib: int) -> None:
    """A put that does not fit leaves no version, and succeeds after making room."""
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
        ballast = fill(disk, room_mib * MIB)
        with pytest.raises(StoreUnavailable, match="make room and run the same again"):
            store.put("large", LARGE)
        assert_nothing_happened(store)
        assert not list((root / "tmp").iterdir())  # no partly written file uses the remaining room
        ballast.unlink()
        assert store.put("large", LARGE).info.version == 1  # through the same handle
        assert store.get("large").read() == LARGE
        assert store.verify().damage == ()
        left = os.statvfs(disk)
        # the data of the failed put serve the second: 20 MiB, 3 of text, the index; never 20 twice
        assert DISK_MIB * MIB - left.f_bavail * left.f_frsize < 34 * MIB


def test_full_disk_lets_a_new_process_read(disk: Path) -> None:
    """On a full disk a new process can read, and write once there is room."""
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
    ballast = fill(disk, 0)
    with open_store(root, settings=CHOSEN, create=True) as store:
        with pytest.raises(StoreUnavailable, match="make room"):
            store.put("large", LARGE)
        assert_nothing_happened(store)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert_nothing_happened(store)
    ballast.unlink()
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("large", LARGE)
        assert store.get("large").read() == LARGE


def test_full_disk_refuses_a_new_store_until_there_is_room(disk: Path) -> None:
    """A store cannot be created on a full disk, and can be later."""
    ballast = fill(disk, 0)
    with pytest.raises(StoreUnavailable, match="make room"):
        open_store(disk / "store", settings=CHOSEN, create=True)
    ballast.unlink()
    with open_store(disk / "store", settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
        assert store.get("earlier").read() == EARLIER


def test_full_index_names_the_setting_to_raise(tmp_path: Path) -> None:
    """A full index names the setting to raise, and works once it is raised."""
    tiny = settings(CHOSEN, {"index": {"map_bytes": 16 * MIB}, "chunker": SMALL_CHUNKS})
    content = random_bytes(6 * MIB, 4)
    with open_store(tmp_path / "s", settings=tiny, create=True) as store:
        store.put("earlier", EARLIER)
        endless = ((f"large {number}", random_bytes(6 * MIB, number + 10)) for number in range(20))
        with pytest.raises(StoreUnavailable, match=r"index\.map_bytes"):
            list(store.put_many(endless))
        assert store.get("earlier").read() == EARLIER
    small_chunks = settings(CHOSEN, {"chunker": SMALL_CHUNKS})
    with open_store(tmp_path / "s", settings=small_chunks, create=True) as store:
        store.put("large", content)
        assert store.get("large").read() == content
        assert store.get("earlier").read() == EARLIER
        assert store.verify().damage == ()


SMALL_CHUNKS = {"min_bytes": 64, "target_bytes": 128, "max_bytes": 256}


def test_listing_after_put_failed_at_commit_agrees_with_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a put that failed at its commit the listing agrees with get.

    The folder's sync failed after the manifest had its name: the version existed, and no listing contained it.
    """
    from nearkin_shared.objectstore import local as objectstore_base

    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"first")
        real, manifests = objectstore_base.sync_folder, []

        def fails(folder: Path) -> None:
            if "manifests" in folder.parts:
                manifests.append(folder)
                raise OSError(errno.EIO, "Input/output error")
            real(folder)

        monkeypatch.setattr(objectstore_base, "sync_folder", fails)
        with pytest.raises(StoreUnavailable):
            store.put("k", b"second")
        assert manifests
        monkeypatch.undo()
        answered = store.info("k").version
        assert [info.version for info in store.versions()] == [answered]
        assert store.stats().versions == answered


@pytest.mark.parametrize(
    "room_kib", [0, 16, 64, *(pytest.param(kib, marks=pytest.mark.soak) for kib in (4, 8, 32, 40, 128))]
)
@pytest.mark.parametrize("command", [["ls"], ["stats"], ["put", "tiny", "/etc/hostname"], ["rebuild-index"]])
def test_index_without_room_is_an_error_not_a_crash(disk: Path, room_kib: int, command: list[str]) -> None:
    """An index that does not fit is an error and crashes no process.

    LMDB maps a file of holes: to write where the device has no room for them is SIGBUS.
    """
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
    shutil.rmtree(root / "index")
    ballast = fill(disk, room_kib * 1024)
    run = [sys.executable, "-m", "nearkin.cli", "--store", str(root), *command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1, 6), (done.returncode, done.stderr)
    if done.returncode:
        assert "make room" in done.stderr, done.stderr
    ballast.unlink()
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.get("earlier").read() == EARLIER


def test_gc_without_room_frees_whole_containers(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GC run without room to rewrite containers frees those that are dead as a whole."""
    root = disk / "store"
    # With a reserve a run of this size has room, and raises nothing.
    monkeypatch.setattr(SpaceReserve, "restore", lambda *_, **__: None)
    chosen = settings(CHOSEN, {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0}})
    staying = random_bytes(MIB, 3)
    with open_store(root, settings=chosen, create=True) as store:
        store.put("large", LARGE)
        list(store.put_many([("going", random_bytes(MIB // 2, 4)), ("staying", staying)]))
        store.delete("going")
        store.delete("large")
        store.gc()
        ballast = fill(disk, MIB // 2)
        first = store.gc()
        assert (first.containers_rewritten, first.containers_deleted > 5) == (0, True)
        assert store.stats().ledger.stored_bytes == stored_bytes(root)
        assert store.get("staying").read() == staying
        ballast.unlink()
        ballast = fill(disk, MIB // 2)
        with pytest.raises(NoRoom, match="make room and run the same again"):
            store.gc()
        ballast.unlink()
        assert store.gc().containers_rewritten == 1
        assert store.get("staying").read() == staying
        assert store.verify().damage == ()
        assert store.stats().ledger.stored_bytes == stored_bytes(root) < MIB + 100_000


def fill_to_last_block(disk: Path) -> Path:
    """Fill the disk to the last block."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return ballast


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearkin.cli", "--store", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fill_store(root: Path) -> None:
    with open_store(root, settings=CHOSEN, create=True) as store:
        for number in range(6):
            store.put("many", random_bytes(MIB, number))
        store.put("large", LARGE)


FREEING = (
    ["rm", "many", "--version", "1"],
    ["forget", "--keep-last", "1"],
    ["gc"],
    ["gc", "--pause"],
    ["gc", "--now", "--yes"],
    ["rm", "large", "--now", "--yes"],
)


@pytest.mark.parametrize("words", FREEING, ids=" ".join)
def test_full_disk_freed_by_command_through_the_reserve(disk: Path, words: list[str]) -> None:
    """F.3: On a disk without one free block each command that frees space ends with exit code 0."""
    root = disk / "store"
    fill_store(root)
    reserve = root / "reserve"
    assert reserve.stat().st_blocks * 512 >= reserve.stat().st_size >= MIB
    fill_to_last_block(disk)
    done = run(root, *words)
    assert done.returncode == 0, done.stderr
    assert run(root, "verify").returncode == 0


@pytest.mark.parametrize("words", FREEING, ids=" ".join)
def test_full_disk_without_reserve_names_the_bytes_to_free(disk: Path, words: list[str]) -> None:
    """F.3: Without the reserve these commands have no room; with the bytes that the error names, `gc --now` has."""
    root = disk / "store"
    fill_store(root)
    with open_store(root, settings=CHOSEN) as store:
        store.delete("many", 2)
    (root / "reserve").unlink()
    ballast = fill_to_last_block(disk)
    done = run(root, *words)
    assert done.returncode == 6, done.stderr
    assert "no room" in done.stderr
    found = re.search(
        r"the reserve (\S+) was used before.* other files of ([0-9]+) MiB.*`nearkin gc --now`", done.stderr
    )
    assert found is not None, done.stderr
    assert found[1] == str(root / "reserve")
    os.truncate(ballast, ballast.stat().st_size - int(found[2]) * MIB)
    done = run(root, "gc", "--now", "--yes")
    assert (done.returncode, "freed" in done.stdout) == (0, True), done.stderr
    assert run(root, "verify").returncode == 0


def test_full_disk_has_room_after_rm_and_gc_now(disk: Path) -> None:
    """F.3: Space freed by `rm` and `gc --now` on a full disk is free when they end, and the reserve is made again."""
    root = disk / "store"
    fill_store(root)
    fill_to_last_block(disk)
    assert run(root, "rm", "large").returncode == 0
    done = run(root, "gc", "--now", "--yes")
    assert done.returncode == 0, done.stderr
    left = os.statvfs(disk)
    assert left.f_bavail * left.f_frsize > 18 * MIB
    assert (root / "reserve").stat().st_size >= MIB
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("again", LARGE[: 8 * MIB])
        assert store.verify().damage == ()


def test_full_disk_reserve_is_made_again_once_there_is_room(disk: Path) -> None:
    """F.3: The reserve is released once, and made again by the next put after room was made."""
    root = disk / "store"
    fill_store(root)
    ballast = fill_to_last_block(disk)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.delete("many", 1) == 1
        assert not (root / "reserve").exists()
        assert store.delete("many", 2) == 1
        ballast.unlink()
        store.put("tiny", b"tiny")
    assert (root / "reserve").stat().st_size >= MIB


def test_full_disk_delete_of_many_counts_all_versions(disk: Path) -> None:
    """F.3: Versions whose marks were written before the disk was full are counted once."""
    root = disk / "store"
    fill_store(root)
    fill_to_last_block(disk).write_bytes(b"")  # then leave room for three pages
    fill(disk, 3 * 4096)
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.delete("many") == 6
        assert [info.key for info in store.versions()] == ["large"]


def test_failed_put_on_full_disk_leaves_room_as_before(disk: Path) -> None:
    """F.3: A put that met the full disk removes its containers, and needs no reserve for it."""
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
        ballast = fill(disk, 9 * MIB)
        before = sorted((root / "containers").rglob("*.nkc"))
        with pytest.raises(NoRoom):
            store.put("large", LARGE)
        assert sorted((root / "containers").rglob("*.nkc")) == before
        left = os.statvfs(disk)
        assert left.f_bavail * left.f_frsize > 8 * MIB
        assert_nothing_happened(store)
        ballast.unlink()
        store.put("large", LARGE)
        assert store.get("large").read() == LARGE


def test_reserve_of_a_compressing_file_system_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.3: Blocks that posix_fallocate does not allocate are written with incompressible bytes."""
    monkeypatch.setattr(os, "posix_fallocate", lambda file, at, size: os.ftruncate(file, at + size))
    SpaceReserve(tmp_path).restore(lambda: 64 * MIB)
    found = (tmp_path / "reserve").stat()
    assert found.st_blocks * 512 >= found.st_size == 2 * MIB
    assert len(zlib.compress((tmp_path / "reserve").read_bytes())) > 2 * MIB
