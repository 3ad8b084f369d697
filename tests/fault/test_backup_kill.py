"""A killed backup leaves checkpoints: the next run reads little of what was stored, and no half version is shown."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nearkin.store import open_store
from nearkin.trees.backup import RECENT_NS

ROOT = Path(__file__).parents[2]
CHECKPOINT_BYTES = 1 << 20
IN_FLIGHT_BYTES = 10 << 20
"""A checkpoint and the batches that are filled, cut, reduced and written when the process is killed."""
FILE_BYTES = 100_000
FILES = 300
CHILD = """
    import os, signal, sys, threading, time
    import nearkin.trees.backup as backup
    from nearkin.store import open_store
    from tests.support.data.stores import settings

    backup.CHECKPOINT_BYTES_MIN = {checkpoint_bytes}
    counts = backup.BackupCounts()
    end_folder = backup.TreeBackup._checkpoint_if_due

    def end_folder_slowly(self: backup.TreeBackup) -> None:
        end_folder(self)
        time.sleep(0.1)  # as a disk does; from the page cache all is read before the first checkpoint is durable

    backup.TreeBackup._checkpoint_if_due = end_folder_slowly

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
