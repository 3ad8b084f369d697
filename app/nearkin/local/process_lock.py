"""Lock a store for one writer. Invariant: one process writes a store at a time.

The kernel holds the lock (file_locks.py), so it ends with its process; a file next to it only names the holder. A
forked process does not hold the locks of its parent.

    lock            held by the writer, from its first write to its close, or for one GC step
    lock.round      held by a GC run, from its beginning to its end
    lock.wanted     held, shared, by writers that wait for a GC step to end: the GC run lets them run first
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from nearkin_shared.errors import StoreLocked, StoreUnavailable
from nearkin_shared.utils.file_locks import lock_file
from nearkin_shared.utils.private_files import LinkRefused, open_private, read_private, write_error, write_private

POLL_SECONDS = 0.005
STEP_SECONDS_MAX = 60.0
"""So long the writer waits for a GC step: it holds the lock for one step at a time (adr/0028)."""
RECHECK_SECONDS = 0.02
"""A holder needs some 0.1 ms from taking the lock to writing its name: a name read twice is the holder."""
HOLDER_BYTES_MAX = 4096
WRITING = "writing"
GC_RUN = "a step of garbage collection"
GC_LOCK_NAME = "garbage collection"
_BEING = {GC_LOCK_NAME: "is being collected by", GC_RUN: "is being written, in a step of garbage collection, by"}
NAMES = frozenset({"lock", "lock.holder", "lock.round", "lock.round.holder", "lock.wanted", "lock.rename"})

_LOCKS: WeakSet[WriterLock] = WeakSet()
"""All of this process."""


class WriterLock:
    """Held from `acquire` to `release`."""

    def __init__(self, root: Path, name: str = "lock") -> None:
        self._path = root / name
        self._holder = root / f"{name}.holder"
        self._wanted = root / "lock.wanted"
        self._descriptor: int | None = None
        _LOCKS.add(self)

    def acquire(self, wait_seconds: float = 0.0, what: str = WRITING) -> None:
        """Take the lock, for `what`; wait up to `wait_seconds` for its holder.

        A GC step is waited for up to STEP_SECONDS_MAX in any case. Raises StoreLocked, naming the holder.
        """
        if self._descriptor is not None:
            return
        try:
            descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as err:
            raise write_error(self._path, err) from err
        try:
            if not lock_file(descriptor):
                self._wait(descriptor, wait_seconds, yields=what == GC_RUN)
        except OSError as err:
            os.close(descriptor)
            raise StoreUnavailable(f"{self._path}: {err.strerror}") from err
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        holder = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "for": what,
        }
        try:
            write_private(self._holder, json.dumps(holder).encode())
        except LinkRefused:
            self.release()
            raise
        except OSError:
            return  # a full disk must not stop a delete or a retry; the lock itself is held

    def release(self) -> None:
        """Give the lock back; in a process forked meanwhile, leave it to its parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_wanted(self) -> bool:
        """Return whether a process waits for the lock and runs before the next GC step."""
        if not self._wanted.exists():
            return False
        with _open_lock_file(self._wanted) as descriptor:
            return descriptor is not None and not lock_file(descriptor)

    def _wait(self, descriptor: int, wait_seconds: float, *, yields: bool) -> None:
        began = time.monotonic()
        with _open_lock_file(None if yields else self._wanted) as wanted:
            while True:
                held_for = self._held_for()
                waited_seconds = time.monotonic() - began
                # One that is named may be the one before: RECHECK_SECONDS.
                bound_seconds = max(wait_seconds, STEP_SECONDS_MAX if held_for == GC_RUN else RECHECK_SECONDS)
                if waited_seconds >= bound_seconds:
                    being = _BEING.get(held_for, "is being written by")
                    raise StoreLocked(
                        f"store {self._path.parent} {being} {self._named()}; try again when it is done, or wait for it "
                        "(`--wait SECONDS`)"
                    )
                if wanted is not None:
                    lock_file(wanted, shared=True)  # False: a GC run that looks holds it for a moment, next time
                time.sleep(POLL_SECONDS)
                if lock_file(descriptor):
                    return

    def _held_for(self) -> str:
        try:
            return str(json.loads(read_private(self._holder, HOLDER_BYTES_MAX))["for"])
        except (LinkRefused, OSError, ValueError, KeyError, TypeError, RecursionError):
            return WRITING

    def _named(self) -> str:
        try:
            holder = json.loads(read_private(self._holder, HOLDER_BYTES_MAX))
            own = holder["pid"] == os.getpid() and holder["host"] == os.uname().nodename
            also = ", which is this one: close its other Store first" if own else ""
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}{also}"
        except (LinkRefused, OSError, ValueError, KeyError, TypeError, RecursionError):
            return "another process"


@contextmanager
def _open_lock_file(path: Path | None) -> Iterator[int | None]:
    """Open a lock file; None if that fails: then no other process sees that this one waits."""
    try:
        descriptor = None if path is None else open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _after_fork() -> None:
    """Leave the locks to the parent: a descriptor open here too would outlive their holder."""
    for lock in list(_LOCKS):
        with suppress(OSError):
            lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
