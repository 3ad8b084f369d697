"""The writer's lock. Invariant: one process writes a store at a time; a dead holder's lock is free at once.

The kernel holds the lock (flock), so it ends with its process; a file beside it only names the holder for the error.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from nearkin.errors import StoreLocked, StoreUnavailable


class WriterLock:
    """Held from `acquire` to `release`."""

    def __init__(self, root: Path) -> None:
        self._path = root / "lock"
        self._holder = root / "lock.holder"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises StoreLocked, naming the holder."""
        if self._descriptor is not None:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise StoreUnavailable(f"{self._path}: {err.strerror}") from err
        try:
            # The call itself: the filelock package does the same and takes 60 ms to import.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(descriptor)
            raise StoreLocked(
                f"store {self._path.parent} is being written by {self._named()}; try again when it is done"
            ) from err
        except OSError as err:
            os.close(descriptor)
            raise StoreUnavailable(f"{self._path}: {err.strerror}") from err
        self._descriptor = descriptor
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            self._holder.write_text(json.dumps(holder))
        except OSError:
            return  # a full disk must not stop a delete or a retry; the lock itself is held

    def release(self) -> None:
        """Give the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _named(self) -> str:
        try:
            holder = json.loads(self._holder.read_text())
            own = holder["pid"] == os.getpid() and holder["host"] == socket.gethostname()
            also = ", which is this one: close its other Store first" if own else ""
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}{also}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
