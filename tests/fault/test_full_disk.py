"""A full disk: a put that does not fit fails whole, what was there stays, after making room it succeeds."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearkin import open_store
from nearkin.api import Store
from nearkin.errors import NoRoom, NotFound, StoreUnavailable
from nearkin.testing.generated import random_bytes, text_like
from nearkin.testing.stores import SMALL, settings, stored_bytes

MIB = 1 << 20
DISK_MIB = 48
CHOSEN = settings(SMALL, {"container": {"target_bytes": 2 * MIB}, "runner": {"batch_bytes": 2 * MIB}})
EARLIER = text_like(3 * MIB, 1)
LARGE = random_bytes(20 * MIB, 2)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
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
    """Leave `but_bytes` of room."""
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
def test_a_put_that_does_not_fit_leaves_no_version_and_succeeds_after_making_room(disk, room_mib):
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
        ballast = fill(disk, room_mib * MIB)
        with pytest.raises(StoreUnavailable, match="make room and run the same again"):
            store.put("large", LARGE)
        assert_nothing_happened(store)
        assert not list((root / "tmp").iterdir())  # nothing half-written takes what room there is
        ballast.unlink()
        assert store.put("large", LARGE).info.version == 1  # through the same handle
        assert store.get("large").read() == LARGE
        assert store.verify().damage == ()
        left = os.statvfs(disk)
        # what the failed put had stored serves the second: 20 MiB, 3 of text, the index; never 20 twice
        assert DISK_MIB * MIB - left.f_bavail * left.f_frsize < 34 * MIB


def test_a_full_disk_lets_a_new_process_read_and_then_go_on(disk):
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


def test_a_store_cannot_be_made_on_a_full_disk_and_can_later(disk):
    ballast = fill(disk, 0)
    with pytest.raises(StoreUnavailable, match="make room"):
        open_store(disk / "store", settings=CHOSEN, create=True)
    ballast.unlink()
    with open_store(disk / "store", settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
        assert store.get("earlier").read() == EARLIER


def test_a_full_index_says_which_setting_to_raise_and_then_goes_on(tmp_path):
    tiny = settings(CHOSEN, {"index": {"map_bytes": 16 * MIB}, "chunker": SMALL_CHUNKS})
    content = random_bytes(6 * MIB, 4)
    with open_store(tmp_path / "s", settings=tiny, create=True) as store:
        store.put("earlier", EARLIER)
        endless = ((f"large {number}", random_bytes(6 * MIB, number + 10)) for number in range(20))
        with pytest.raises(StoreUnavailable, match=r"index\.map_bytes"):
            list(store.put_many(endless))
        assert store.get("earlier").read() == EARLIER
    wide = settings(CHOSEN, {"chunker": SMALL_CHUNKS})
    with open_store(tmp_path / "s", settings=wide, create=True) as store:
        store.put("large", content)
        assert store.get("large").read() == content
        assert store.get("earlier").read() == EARLIER
        assert store.verify().damage == ()


SMALL_CHUNKS = {"min_bytes": 64, "target_bytes": 128, "max_bytes": 256}


def test_after_a_put_that_failed_when_it_was_committed_the_listing_says_what_get_does(tmp_path, monkeypatch):
    """The folder's sync failed after the manifest had its name: the version is there, and was in no listing."""
    from nearkin.store import objects

    with open_store(tmp_path / "s", settings=CHOSEN, create=True) as store:
        store.put("k", b"first")
        real, manifests = objects.sync_folder, []

        def fails(folder):
            if "manifests" in folder.parts:
                manifests.append(folder)
                raise OSError(errno.EIO, "Input/output error")
            real(folder)

        monkeypatch.setattr(objects, "sync_folder", fails)
        with pytest.raises(StoreUnavailable):
            store.put("k", b"second")
        assert manifests
        monkeypatch.undo()
        answered = store.info("k").version
        assert [info.version for info in store.versions()] == [answered]
        assert store.stats().versions == answered


@pytest.mark.parametrize("room_kib", [0, 4, 8, 16, 32, 40, 64, 128])
@pytest.mark.parametrize("command", [["ls"], ["stats"], ["put", "tiny", "/etc/hostname"], ["rebuild-index"]])
def test_an_index_that_does_not_fit_is_an_error_and_ends_no_process(disk, room_kib, command):
    """LMDB maps a file of holes: to write where the device has no room for them is SIGBUS."""
    root = disk / "store"
    with open_store(root, settings=CHOSEN, create=True) as store:
        store.put("earlier", EARLIER)
    shutil.rmtree(root / "index")
    ballast = fill(disk, room_kib * 1024)
    run = [sys.executable, "-m", "nearkin.cli", "--store", str(root), *command]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), (done.returncode, done.stderr)
    if done.returncode:
        assert "make room" in done.stderr, done.stderr
    ballast.unlink()
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with open_store(root, settings=CHOSEN, create=True) as store:
        assert store.get("earlier").read() == EARLIER


def test_a_round_that_has_no_room_to_write_containers_anew_frees_those_that_go_as_a_whole(disk):
    root = disk / "store"
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
