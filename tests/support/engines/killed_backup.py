"""Run a backup in a process that kills itself after so many bytes.

Invariant: the process prints before its death the bytes that it read and the bytes that it took over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from nearkin import open_store

ROOT = Path(__file__).parents[3]
NEVER = 1 << 62
_CHILD = textwrap.dedent(
    """
    import os, signal, sys, threading, time
    from nearkin.store import open_store
    from nearkin.trees.backup import BackupCounts

    counts, kill_bytes = BackupCounts(), int(sys.argv[3])

    def kill() -> None:
        while counts.read_bytes + counts.reused_bytes < kill_bytes:
            time.sleep(0.001)
        print(counts.read_bytes, counts.reused_bytes, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with open_store(sys.argv[1]) as store:
        store.backup("home", [sys.argv[2]], counts=counts)
    print(counts.read_bytes, counts.reused_bytes, flush=True)
    """
)


def back_up(store: Path, folder: Path, kill_bytes: int = NEVER) -> tuple[int, int]:
    """Back up a folder as `home`; return (bytes read, bytes taken over) when the process ended or was killed."""
    line = [sys.executable, "-c", _CHILD, str(store), str(folder), str(kill_bytes)]
    done = subprocess.run(line, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if kill_bytes < NEVER else 0), done.stderr
    read_bytes, reused_bytes = map(int, done.stdout.split())
    return read_bytes, reused_bytes


def read_after_kills(store: Path, folder: Path, kills: Sequence[int]) -> list[tuple[int, int]]:
    """Kill a backup after so many bytes each time, then let it end; a version is visible only at the end.

    Return (bytes that were done, those of them that the next run read again) for each kill.
    """
    done_bytes, repeated = 0, list[tuple[int, int]]()
    for kill_bytes in [*kills, NEVER]:
        read_bytes, reused_bytes = back_up(store, folder, kill_bytes)
        if done_bytes:
            repeated.append((done_bytes, max(0, done_bytes - reused_bytes)))
        done_bytes = read_bytes + reused_bytes
        if kill_bytes < NEVER:
            with open_store(store) as opened:
                assert opened.versions(all_versions=True) == [], "a half version is shown"
    return repeated
