"""A backup that is killed inside a large file: the next one takes over what was stored, if the file is unchanged."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearkin.store import Store, open_store
from nearkin.trees import checkpoint_schedule
from nearkin.trees.backup import RECENT_NS, TreeBackup
from nearkin.trees.backup_plan import BackupPlan, PlannedCounts
from nearkin.trees.backup_walk import BackupOptions
from nearkin.trees.checkpoint_schedule import CHECKPOINT_BYTES_FIRST, CHECKPOINT_BYTES_MIN
from nearkin.trees.tree_writer import PIECE_BYTES_MAX
from nearkin_shared.errors import NearkinError
from nearkin_shared.formats.tree_entry_group import EntryFlag
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.validation import checkpoint_key_of
from tests.support.data.stores import SMALL, settings, stored_bytes
from tests.support.engines.killed_backup import read_after_kills

ROOT = Path(__file__).parents[2]
FILE_BYTES = 12 << 20
STOP_BYTES = 9 << 20
"""Where the first run is interrupted, if no test says otherwise."""
DISTANCE_BYTES = 1 << 20
LOST_BYTES = 2 * DISTANCE_BYTES + PIECE_BYTES_MAX
"""Bytes that an interrupted run has read without a durable checkpoint, at most."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one large file between two small ones; checkpoints come after each MiB."""
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", DISTANCE_BYTES)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", DISTANCE_BYTES)
    path = tmp_path / "source"
    path.mkdir()
    for name, size in (("a", 5_000), ("large", FILE_BYTES), ("z", 7_000)):
        (path / name).write_bytes(random.Random(name).randbytes(size))
    _age()
    return path


@pytest.fixture
def small_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True, settings=settings(SMALL))


def _age() -> None:
    """Wait until the ctimes of files prove them unchanged."""
    time.sleep(RECENT_NS / 1e9)


def _interrupt(store: Store, folder: Path, stop_bytes: int = STOP_BYTES) -> None:
    """Back up until so many bytes were read, then stop as a signal does."""
    count = TreeBackup._count_read

    def count_until(self: TreeBackup, size_bytes: int) -> None:
        count(self, size_bytes)
        if self.counts.read_bytes >= stop_bytes:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeBackup, "_count_read", count_until)
        with pytest.raises(KeyboardInterrupt):
            store.backup("home", [folder])
    assert store.versions(all_versions=True) == [], "a half version is shown"


def _check(store: Store, folder: Path) -> None:
    """Verify the store, and compare a restore with the source."""
    assert store.verify().damage == ()
    target = folder.parent / "target"
    assert store.restore("home", target).is_complete
    subprocess.run(["diff", "-r", folder, target], check=True)
    assert [info.key for info in store.versions(all_versions=True)] == ["home"]


def _checkpoint(store: Store) -> TreeReader:
    return store.tree(checkpoint_key_of("home"))


def test_backup_continues_inside_an_unchanged_file(folder: Path, small_store: Store) -> None:
    """The stored start of the file is taken over without being read, and the digest is that of the whole file."""
    with small_store as store:
        _interrupt(store, folder)
        *_, last = _checkpoint(store).entries()
        assert (last.entry.name, last.entry.flags) == (b"large", EntryFlag.INCOMPLETE)
        assert STOP_BYTES - LOST_BYTES <= last.entry.content_bytes < FILE_BYTES == last.entry.size
        counts = store.backup("home", [folder]).counts
        assert counts.read_bytes == FILE_BYTES - last.entry.content_bytes + 7_000
        assert counts.reused_bytes == last.entry.content_bytes + 5_000
        fresh = store.backup("other", [folder])
        assert fresh.counts.read_bytes == FILE_BYTES + 12_000
        digests = [[placed.entry.digest for placed in store.tree(key).entries()] for key in ("home", "other")]
        assert digests[0] == digests[1], "the digest of a continued file differs from that of one read at once"
        store.delete("other")
        _check(store, folder)
        assert store.backup("home", [folder]).counts.read_bytes == 0, "a continued file is read again"


def test_backup_interrupted_again_and_again_ends(folder: Path, small_store: Store) -> None:
    """Each run goes on where the one before was; all of them together read little more than the file.

    The file exceeds what five runs read, so that each is interrupted even if all that it read became durable.
    """
    stop_bytes = LOST_BYTES + DISTANCE_BYTES // 2
    (folder / "large").write_bytes(random.Random("large").randbytes(6 * stop_bytes))
    _age()
    with small_store as store:
        for _ in range(5):
            _interrupt(store, folder, stop_bytes)
        counts = store.backup("home", [folder]).counts
        assert counts.reused_bytes >= 4 * DISTANCE_BYTES, "a later checkpoint does not continue an earlier one"
        _check(store, folder)


def _rewrite_start(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"changed")


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _replace_by_equal_times(path: Path) -> None:
    """Put another file of the same size and mtime at its path."""
    status = path.stat()
    path.unlink()
    path.write_bytes(random.Random("other").randbytes(FILE_BYTES))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_rewrite_start, _append, _replace_by_equal_times])
def test_file_changed_between_runs_is_read_whole(
    change: Callable[[Path], None], folder: Path, small_store: Store
) -> None:
    with small_store as store:
        _interrupt(store, folder)
        change(folder / "large")
        _age()
        counts = store.backup("home", [folder]).counts
        assert counts.read_bytes == (folder / "large").stat().st_size + 7_000
        _check(store, folder)


def test_file_changed_just_before_is_not_continued(folder: Path, small_store: Store) -> None:
    """Its times do not prove that the part that was read is still the same."""
    _rewrite_start(folder / "large")
    with small_store as store:
        _interrupt(store, folder)
        *_, last = _checkpoint(store).entries()
        assert last.entry.flags == EntryFlag.INCOMPLETE | EntryFlag.RECENT
        assert store.backup("home", [folder]).counts.read_bytes == FILE_BYTES + 7_000


def test_file_with_holes_is_continued(folder: Path, small_store: Store) -> None:
    """Only data is stored: the position in the file is behind what was stored and the holes before it."""
    with (folder / "large").open("r+b") as file:
        for offset, size in ((0, 3 << 20), (64 << 20, 5 << 20), (256 << 20, 4 << 20)):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(size))
        file.truncate(300 << 20)
    os.sync()
    _age()
    with small_store as store:
        _interrupt(store, folder)
        *_, last = _checkpoint(store).entries()
        assert last.entry.size == 300 << 20
        counts = store.backup("home", [folder]).counts
        assert counts.reused_bytes == last.entry.content_bytes + 5_000 >= STOP_BYTES - LOST_BYTES
        _check(store, folder)


def test_start_whose_containers_are_lost_is_read_again(folder: Path, small_store: Store) -> None:
    with small_store as store:
        _interrupt(store, folder)
        largest = max((store.root / "containers").rglob("*.*"), key=lambda path: path.stat().st_size)
        largest.unlink()
    with open_store(small_store.root, settings=settings(SMALL)) as store:
        assert store.backup("home", [folder]).counts.read_bytes == FILE_BYTES + 12_000
        assert store.restore("home", folder.parent / "target").is_complete
    subprocess.run(["diff", "-r", folder, folder.parent / "target"], check=True)


def test_dry_run_counts_the_stored_start(folder: Path, small_store: Store) -> None:
    with small_store as store:
        _interrupt(store, folder)
        *_, last = _checkpoint(store).entries()
        plan = BackupPlan([folder], BackupOptions(), (), PlannedCounts())
        counts = plan.run(None, _checkpoint(store))
        assert counts.read_bytes == FILE_BYTES - last.entry.content_bytes + 7_000
        assert (counts.new_files, counts.changed_files) == (2, 0)


def test_gc_keeps_a_started_file_until_the_backup_ends(folder: Path, tmp_path: Path) -> None:
    """Its segments are those of a version; once the backup is complete, those of a changed file are removed."""
    changes = {"gc": {"grace_seconds": 0}, "deletion": {"undelete_seconds": 0}}
    with open_store(tmp_path / "store", create=True, settings=settings(SMALL, changes)) as store:
        _interrupt(store, folder)
        for _ in range(3):
            store.gc()
        stored = stored_bytes(store.root)
        *_, last = _checkpoint(store).entries()
        assert stored > last.entry.content_bytes
        (folder / "large").write_bytes(random.Random("new").randbytes(FILE_BYTES))
        _age()
        assert store.backup("home", [folder]).counts.read_bytes == FILE_BYTES + 7_000
        for _ in range(3):
            store.gc()
        with pytest.raises(NearkinError):
            _checkpoint(store)
        assert stored_bytes(store.root) < FILE_BYTES * 1.1, "segments of the checkpoint alone are still stored"
        _check(store, folder)


FIRST_BYTES = CHECKPOINT_BYTES_FIRST + 2 * CHECKPOINT_BYTES_MIN


def _kill_inside_a_file(tmp_path: Path, file_bytes: int, kills: list[int]) -> list[tuple[int, int]]:
    """Kill a backup of one file at these moments; return (bytes done, read again by the next run) of each."""
    folder, store = tmp_path / "source", tmp_path / "store"
    folder.mkdir()
    with (folder / "disk.img").open("wb") as file:
        for start in range(0, file_bytes, 1 << 24):
            file.write(os.urandom(min(1 << 24, file_bytes - start)))
    _age()
    open_store(store, create=True).close()
    repeated = read_after_kills(store, folder, kills)
    with open_store(store) as opened:
        _check(opened, folder)
    return repeated


def test_kill_inside_a_file_repeats_less_than_a_tenth(tmp_path: Path) -> None:
    """With default settings, from 56 MiB on; a file of 120 MB, killed twice."""
    repeated = _kill_inside_a_file(tmp_path, 120_000_000, [90_000_000, 105_000_000])
    for done_bytes, again_bytes in repeated:
        assert again_bytes <= max(done_bytes // 10, 2 * CHECKPOINT_BYTES_MIN) + 2 * PIECE_BYTES_MAX, repeated


@pytest.mark.soak
def test_kills_inside_a_file_of_1_gb_repeat_a_tenth(tmp_path: Path) -> None:
    """Each run reads less than a tenth of what was done before."""
    total_bytes = 1_000_000_000
    repeated = _kill_inside_a_file(tmp_path, total_bytes, [total_bytes * (n + 1) // 6 for n in range(5)])
    print(f"done before, read again: {repeated}")
    assert len(repeated) == 5
    for done_bytes, again_bytes in repeated:
        assert done_bytes > FIRST_BYTES
        assert again_bytes < done_bytes / 10, repeated
