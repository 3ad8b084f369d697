"""Test the writer lock.

One process at a time, named in the error, free as soon as its holder is dead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nearkin.local.process_lock import WriterLock
from nearkin_shared.errors import RetryableError, StoreLocked, StoreUnavailable

HOLDING = """
import sys, time
from pathlib import Path
from nearkin.local.process_lock import WriterLock
lock = WriterLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_second_writer_error_names_the_holder(tmp_path: Path) -> None:
    first, second = WriterLock(tmp_path), WriterLock(tmp_path)
    first.acquire()
    with pytest.raises(StoreLocked, match=f"process {os.getpid()} on .* since 2") as raised:
        second.acquire()
    assert isinstance(raised.value, RetryableError)
    first.release()
    second.acquire()
    second.release()


def test_lock_of_a_dead_holder_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid} "):
            WriterLock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    lock = WriterLock(tmp_path)
    lock.acquire()
    lock.release()


def test_lock_may_be_released_by_another_thread(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    other = WriterLock(tmp_path)
    other.acquire()
    other.release()


@pytest.mark.parametrize("left", ["", "{", "[]", '"text"', '{"pid": 1}', "null"])
def test_damaged_holder_note_does_not_break_the_lock(tmp_path: Path, left: str) -> None:
    lock = WriterLock(tmp_path)
    lock.acquire()
    (tmp_path / "lock.holder").write_text(left)
    with pytest.raises(StoreLocked, match="by another process"):
        WriterLock(tmp_path).acquire()
    lock.release()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="file/lock"):
        WriterLock(tmp_path / "file").acquire()
