"""A killed backup leaves checkpoints: the next run reads little of what was stored, and no half version is shown."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin.trees import backup, checkpoint_schedule
from nearkin.trees.backup import RECENT_NS, TreeBackup
from nearkin.trees.checkpoint_schedule import CHECKPOINT_BYTES_FIRST, CHECKPOINT_BYTES_MIN
from nearkin.trees.parent_tree import FoundEntry
from nearkin.trees.walker import ListedFolder
from nearkin_shared.reading.tree_reader import EntryGroup
from tests.support.engines.killed_backup import read_after_kills

ROOT = Path(__file__).parents[2]
CHECKPOINT_BYTES = 1 << 20
IN_FLIGHT_BYTES = 10 << 20
"""A checkpoint and the batches that are filled, cut, reduced and written when the process is killed."""
FILE_BYTES = 100_000
FILES = 300
CHILD = """
    import os, signal, sys, threading, time
    import nearkin.trees.backup as backup
    import nearkin.trees.checkpoint_schedule as schedule
    from nearkin.store import open_store
    from tests.support.data.stores import settings

    schedule.CHECKPOINT_BYTES_FIRST = schedule.CHECKPOINT_BYTES_MIN = {checkpoint_bytes}
    counts = backup.BackupCounts()
    def kill() -> None:
        while counts.read_bytes < {kill_bytes}:
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    chosen = settings({{"runner": {{"batch_bytes": 2 << 20}}}})
    with open_store(sys.argv[1], settings=chosen) as store:
        store.backup("home", [sys.argv[2]], counts=counts)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of 30 MB, old enough that the ctimes of its files prove them unchanged."""
    folder, draw = tmp_path / "source", random.Random(7)
    for number in range(FILES):
        path = folder / f"folder {number // 10:02}" / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(FILE_BYTES))
        os.utime(path, ns=(number, number))
    time.sleep(RECENT_NS / 1e9)
    return folder


@pytest.mark.parametrize("killed_at", [0.7, 0.9])
def test_next_backup_continues_a_killed_one(killed_at: float, source: Path, tmp_path: Path) -> None:
    open_store(tmp_path / "store", create=True).close()
    killed_bytes = int(FILES * FILE_BYTES * killed_at)
    _kill_backup(source, tmp_path / "store", killed_bytes)
    with open_store(tmp_path / "store") as store:
        assert store.versions(all_versions=True) == [], "a half version is shown"
        result = store.backup("home", [source])
        assert result.put is not None
        assert result.counts.read_bytes <= FILES * FILE_BYTES - killed_bytes + IN_FLIGHT_BYTES
        assert result.counts.reused_bytes + result.counts.read_bytes == FILES * FILE_BYTES
        assert store.verify().damage == ()
        counts = store.restore("home", tmp_path / "target")
        assert counts.is_complete
        assert [info.key for info in store.versions(all_versions=True)] == ["home"]
    subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)


def test_backup_killed_many_times_is_completed(source: Path, tmp_path: Path) -> None:
    open_store(tmp_path / "store", create=True).close()
    for _ in range(8):
        _kill_backup(source, tmp_path / "store", 5_000_000)
    with open_store(tmp_path / "store") as store:
        first = store.backup("home", [source])
        assert first.is_complete
        assert first.counts.reused_bytes >= 10_000_000, "a later checkpoint does not continue an earlier one"
        assert store.verify().damage == ()
        assert store.restore("home", tmp_path / "target").is_complete
    subprocess.run(["diff", "-r", source, tmp_path / "target"], check=True)


def _kill_backup(source: Path, store: Path, kill_bytes: int) -> None:
    code = textwrap.dedent(CHILD).format(checkpoint_bytes=CHECKPOINT_BYTES, kill_bytes=kill_bytes)
    done = subprocess.run([sys.executable, "-c", code, store, source], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr.decode()


KILLS = 20
LARGE_FILE_BYTES = 1_500_000
LARGE_FILES = 2_000
FIRST_BYTES = CHECKPOINT_BYTES_FIRST + 2 * CHECKPOINT_BYTES_MIN
"""Before them a tree has no durable checkpoint; all of it may be read again."""


def _check_stored(folder: Path, store: Path, target: Path) -> None:
    with open_store(store) as opened:
        assert opened.verify().damage == ()
        assert opened.restore("home", target).is_complete
    subprocess.run(["diff", "-r", folder, target], check=True)


def _make_files(folder: Path, count: int) -> Path:
    for number in range(count):
        path = folder / f"{number // 20:03}" / f"{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(LARGE_FILE_BYTES))
    time.sleep(RECENT_NS / 1e9)
    return folder


def test_backup_killed_with_default_settings_repeats_a_tenth(tmp_path: Path) -> None:
    source, store = _make_files(tmp_path / "source", 60), tmp_path / "store"
    open_store(store, create=True).close()
    repeated = read_after_kills(store, source, [65_000_000, 80_000_000])
    assert len(repeated) == 2
    for done_bytes, again_bytes in repeated:
        assert again_bytes <= max(done_bytes // 10, 2 * CHECKPOINT_BYTES_MIN) + LARGE_FILE_BYTES, repeated
    _check_stored(source, store, tmp_path / "target")


@pytest.mark.soak
def test_backup_of_3_gb_killed_at_20_moments_repeats_a_tenth(tmp_path: Path) -> None:
    """Each run reads less than a tenth of what was done before, but for a kill in the first 56 MiB."""
    source, store = _make_files(tmp_path / "source", LARGE_FILES), tmp_path / "store"
    open_store(store, create=True).close()
    total_bytes = LARGE_FILES * LARGE_FILE_BYTES
    repeated = read_after_kills(store, source, [total_bytes * (n + 1) // (KILLS + 1) for n in range(KILLS)])
    print(f"done before, read again: {repeated}")
    assert len(repeated) == KILLS
    for done_bytes, again_bytes in repeated:
        assert done_bytes > FIRST_BYTES
        assert again_bytes < done_bytes / 10, repeated
    _check_stored(source, store, tmp_path / "target")


def test_checkpoint_shorter_than_the_one_before_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that reads a changed file early, and dies, leaves what the run before had reached."""
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_FIRST", 1)
    monkeypatch.setattr(checkpoint_schedule, "CHECKPOINT_BYTES_MIN", 1)
    source = _make_files(tmp_path / "source", 6)
    with open_store(tmp_path / "store", create=True) as store:
        for number in (4, 1):  # the first run ends before file 4, the second before file 1
            with monkeypatch.context() as patch:
                patch.setattr(TreeBackup, "_read_open_file", _interrupting_at(f"{number:04}".encode()))
                patch.setattr(backup, "_unchanged_rows", _interrupting_rows_at(f"{number:04}".encode()))
                with pytest.raises(KeyboardInterrupt):
                    store.backup("home", [source])
            (source / "000" / "0000").write_bytes(os.urandom(LARGE_FILE_BYTES))
            time.sleep(RECENT_NS / 1e9)
        counts = store.backup("home", [source]).counts
    assert counts.read_bytes == 3 * LARGE_FILE_BYTES, "the changed file, 4 and 5"
    _check_stored(source, tmp_path / "store", tmp_path / "target")


def _interrupting_at(name: bytes) -> Callable[[TreeBackup, bytes, bytes, bytes, int, FoundEntry | None], None]:
    original = TreeBackup._read_open_file

    def read(
        self: TreeBackup, folder: bytes, found: bytes, path: bytes, descriptor: int, entry: FoundEntry | None
    ) -> None:
        if found == name:
            raise KeyboardInterrupt
        original(self, folder, found, path, descriptor, entry)

    return read


def _interrupting_rows_at(name: bytes) -> Callable[[ListedFolder, bytes, EntryGroup, int], int]:
    original = backup._unchanged_rows

    def unchanged_rows(listed: ListedFolder, key: bytes, group: EntryGroup, first: int) -> int:
        if listed.names[0] == name:
            raise KeyboardInterrupt
        return original(listed, key, group, first)

    return unchanged_rows
