"""Transactions of an LMDB index, and the life of its environment.

Invariant: every write is one transaction, and no environment is closed while a thread uses it.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lmdb

from nearkin_shared.errors import IndexClosed, StoreUnavailable
from nearkin_shared.index.lmdb.environments import (
    DAMAGE,
    Environment,
    acquire,
    corruption_error,
    damage_error,
    drop_after_fork,
    is_out_of_room,
    no_room,
    release,
)
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.memory import release_file_pages

TABLES = ("chunks", "features", "segments", "containers", "versions", "meta")
"""Named databases. An index of an earlier release has `counts` too, which nothing opens."""
_ALL: WeakSet[LmdbTransactions] = WeakSet()
"""All open indexes of this process."""


class LmdbTransactions:
    """Transactions over one index folder: one writing process, many readers."""

    def __init__(self, folder: Path, map_bytes: int, *, read_only: bool, durable: bool) -> None:
        self.read_only = read_only
        self._durable = durable
        self._folder = folder
        self._write_lock = threading.Lock()
        self._users_lock = threading.Lock()
        self._users = 0
        """Number of calls in progress; the last one releases an environment that was closed meanwhile."""
        _ALL.add(self)
        self._shared: Environment | None = None
        self._shared = shared = acquire(folder, map_bytes, TABLES, writable=not read_only, durable=durable)
        self._env = shared.env
        self._databases = databases = shared.databases
        self._containers, self._versions, self._meta = (databases[name] for name in TABLES[3:])

    @contextmanager
    def _in_use(self) -> Iterator[Environment]:
        """Keep the environment open: closing it under a reading thread is SIGSEGV.

        Raises: IndexClosed.
        """
        with self._users_lock:
            shared = self._shared
            if shared is None or shared.process != os.getpid():
                raise IndexClosed("index: closed during the call; run the same again")
            self._users += 1
        try:
            yield shared
        finally:
            with self._users_lock:
                self._users -= 1
                was_last = self._shared is None and not self._users
            if was_last:
                release(shared)

    @contextmanager
    def _reading(self, *, buffers: bool = False) -> Iterator[Any]:
        try:
            with self._in_use(), self._env.begin(buffers=buffers) as txn:
                yield txn
        except struct.error as err:
            raise damage_error(err) from err
        except lmdb.Error as err:
            raise self._error_of(err) from err

    @contextmanager
    def _writing(self, *, buffers: bool = False) -> Iterator[Any]:
        try:
            with self._in_use(), self._write_lock:
                with self._env.begin(write=True, buffers=buffers) as txn:
                    yield txn
                    failpoint("index.writing")
                failpoint("index.written")
        except struct.error as err:  # marks of another length
            raise damage_error(err) from err
        except lmdb.Error as err:
            raise self._error_of(err) from err

    def _sync(self) -> None:
        """Make all transactions durable."""
        try:
            with self._in_use():
                self._env.sync(True)
        except lmdb.Error as err:
            raise self._error_of(err) from err

    def _release_pages(self, file_bytes_max: int) -> None:
        """Release the resident pages of the file if it is larger than `file_bytes_max`.

        LMDB maps the whole file: of a large index most pages would count as memory of this process after a while.
        """
        with self._in_use() as shared:  # not closed meanwhile: the addresses would be reused
            if self._used_bytes > file_bytes_max:
                release_file_pages(shared.file)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the pages in use."""
        with self._in_use():
            return self._used_bytes

    @property
    def _used_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _error_of(self, err: lmdb.Error) -> StoreUnavailable:
        """Return the error for a failed transaction.

        Damage is recorded, so that the file is not used again.
        """
        if isinstance(err, DAMAGE):
            if (shared := self._shared) is not None:
                shared.is_damaged = True
            return corruption_error(self._folder, err)
        if isinstance(err, lmdb.MapFullError):
            return StoreUnavailable(f"index {self._folder}: full; raise index.map_bytes and run the same again")
        if is_out_of_room(self._folder, err):
            return no_room(self._folder)
        return StoreUnavailable(f"index {self._folder}: {err}; earlier data is unchanged; run the same again")

    @property
    def last_written(self) -> tuple[tuple[int, int], int]:
        """Return the file, and the number of the last transaction that wrote it, by any process."""
        with self._in_use() as shared:
            return shared.file, int(self._env.info()["last_txnid"])

    def close(self) -> None:
        """Release the environment once the calls in progress have ended. Idempotent."""
        with self._users_lock:
            shared, self._shared = self._shared, None
            in_use = self._users > 0
        if shared is not None and not in_use:
            release(shared)

    @property
    def current(self) -> bool:
        """Return whether the folder still has this index: an index rebuild replaces it."""
        shared = self._shared
        return shared is not None and shared.is_at(self._folder)

    @property
    def environment_in_use(self) -> Any:
        """Return LMDB's environment if a call is in progress, else None."""
        return self._env if self._users else None


def _after_fork() -> None:
    drop_after_fork([env for index in list(_ALL) if (env := index.environment_in_use) is not None])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
