"""Shared state of a fleet, in a file of the first shard.

    FOLDER/shared-state.db   SQLite: entries (name, value, expires), server (uptime, fence)

Times are counted by the server's uptime: the seconds in which a server of this file ran, by a clock that only runs
forwards, saved with every write. A restart goes on at the last saved one, so that nothing expires early whatever the
machine's clock shows; a lease that was held at a crash ends at most the time between two writes later.

Invariant: a lease, and a value of more than a minute, is on the disk before the answer. Locks and removals survive a
crash of the process alone; a power cut may bring back the values that were removed last, until they expire. A new file
begins with the lease taken for `lease_wait_seconds`: a holder may have it from a file that was lost.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nearkin_shared.errors import ConfigError, FormatTooNew, StoreUnavailable
from nearkin_shared.fleet.lease import LEASE_SECONDS
from nearkin_shared.fleet.store_owner import claim_index
from nearkin_shared.index.shards.shard_shared_state import SCOPE
from nearkin_shared.utils.private_files import make_private_folders

FILE_NAME = "shared-state.db"
ENTRIES_MAX = 1_000_000
"""Bound of the file, at most some 500 bytes each: refusals of eight days, and a few more."""
LOCK_WAIT_SECONDS = 5.0
LOCK_SECONDS_MAX = 60
"""Values that expire by then are locks of keys, which need not survive a power cut."""
WRITES_A_COUNT = 1000
"""Entries are counted each time when so many were written, or could have filled the file."""
FORMAT = 1
_LEASE = "lease"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_TABLES = """
    CREATE TABLE IF NOT EXISTS entries (name TEXT PRIMARY KEY, value BLOB NOT NULL, expires REAL) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS expiry ON entries (expires) WHERE expires IS NOT NULL;
    CREATE TABLE IF NOT EXISTS server (uptime REAL NOT NULL, fence INTEGER NOT NULL);
"""
_log = logging.getLogger("nearkin.index")


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class StateFile:
    """Lease and small values of a fleet. One process opens it; shared by threads."""

    def __init__(self, folder: Path, *, lease_wait_seconds: float = LEASE_SECONDS) -> None:
        """Open the file, or make it; a damaged one is put aside.

        Raises: ConfigError, if another process has it; FormatTooNew, StoreUnavailable.
        """
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()
        self._lease_wait_seconds = lease_wait_seconds
        self._uncounted = 0
        """Entries that may be written before they are counted again."""
        make_private_folders(folder)
        try:
            self._connection = self._open()
        except sqlite3.OperationalError as err:
            raise _refusal(self._path, err) from err
        except sqlite3.DatabaseError as err:
            _log.error("%s: %s: it is put aside, and a new state begins", self._path, err)
            self._put_aside()
            self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check the file, or begin it."""
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found > FORMAT:
            raise FormatTooNew(f"{self._path}: format {found}, this release reads {FORMAT}; run a newer one")
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check failed")
        self._fill(connection)
        (self._uptime_before,) = connection.execute("SELECT uptime FROM server").fetchone()
        self._opened_at = _now()

    def _fill(self, connection: sqlite3.Connection) -> None:
        """Begin a new file."""
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("SELECT uptime FROM server").fetchone() is None:
            connection.execute("INSERT INTO server VALUES (0, 0)")
            scope = secrets.token_hex(8).encode()
            connection.execute("INSERT INTO entries VALUES (?, ?, NULL)", (SCOPE, scope))
            if self._lease_wait_seconds:
                taken = (_LEASE, b"0:new", self._lease_wait_seconds)
                connection.execute("INSERT INTO entries VALUES (?, ?, ?)", taken)
        connection.execute("COMMIT")

    def _put_aside(self) -> None:
        for end in ("-wal", "-shm"):
            self._path.with_name(FILE_NAME + end).unlink(missing_ok=True)
        self._path.replace(self._path.with_name(FILE_NAME + ".damaged"))

    @property
    def uptime(self) -> float:
        """Return the seconds in which servers of this file ran."""
        return float(self._uptime_before) + max(0.0, _now() - self._opened_at)

    @contextmanager
    def _writing(self, *, is_durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction, after expired entries were removed."""
        with self._lock:
            connection = self._connection
            try:
                connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
                uptime = self.uptime
                connection.execute("UPDATE server SET uptime = ?", (uptime,))
                connection.execute("DELETE FROM entries WHERE expires <= ?", (uptime,))
                yield connection
                connection.execute("COMMIT")
            except BaseException as err:
                with suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                if isinstance(err, sqlite3.Error):
                    raise StoreUnavailable(f"{self._path}: {err}; is the disk full?") from err
                raise

    # --- lease -------------------------------------------------------------------------------------------------------

    def take_lease(self, token: str, seconds: float) -> bytes | None:
        """Give the lease to a token if it is free, or is the token's own; return the holder."""
        with self._writing() as connection:
            held = _value(connection, _LEASE)
            if held is not None:  # its own: an earlier reply was lost
                return held if held.partition(b":")[2] == token.encode() else None
            connection.execute("UPDATE server SET fence = fence + 1")
            (fence,) = connection.execute("SELECT fence FROM server").fetchone()
            holder = f"{fence}:{token}".encode()
            self._put(connection, _LEASE, holder, seconds)
            return holder

    def renew_lease(self, holder: bytes, seconds: float) -> bool:
        """Let the lease run for `seconds` from now on if `holder` has it."""
        with self._writing() as connection:
            is_held = _value(connection, _LEASE) == holder
            if is_held:
                self._put(connection, _LEASE, holder, seconds)
            return is_held

    def release_lease(self, holder: bytes) -> None:
        """Free the lease if `holder` has it."""
        self.remove(_LEASE, holder)

    # --- values ------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes | None:
        """Return a value that has not expired, or None. Raises StoreUnavailable."""
        with self._lock:
            try:
                return _value(self._connection, name, self.uptime)
            except sqlite3.Error as err:
                raise StoreUnavailable(f"{self._path}: {err}") from err

    def put(self, name: str, value: bytes, seconds: float | None = None) -> None:
        """Write a value."""
        with self._writing(is_durable=_is_durable(seconds)) as connection:
            self._put(connection, name, value, seconds)

    def put_absent(self, name: str, value: bytes, seconds: float | None = None) -> bytes:
        """Write a value unless there is one; return the one that is there."""
        with self._writing(is_durable=_is_durable(seconds)) as connection:
            found = _value(connection, name)
            if found is not None:
                return found
            self._put(connection, name, value, seconds)
            return value

    def remove(self, name: str, value: bytes) -> None:
        """Remove a value if it is this one."""
        with self._writing(is_durable=False) as connection:
            connection.execute("DELETE FROM entries WHERE name = ? AND value = ?", (name, value))

    def _put(self, connection: sqlite3.Connection, name: str, value: bytes, seconds: float | None) -> None:
        if not self._uncounted:
            (count,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            if count >= ENTRIES_MAX:
                raise StoreUnavailable(f"{self._path}: has {count} values, its bound; they expire by themselves")
            self._uncounted = min(WRITES_A_COUNT, ENTRIES_MAX - count)
        self._uncounted -= 1
        expires = None if seconds is None else self.uptime + seconds
        connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (name, value, expires))

    @staticmethod
    def clock() -> float:
        """Return this machine's time in seconds since 1970; no expiry depends on it."""
        return time.time()

    def claim(self, store_id: str) -> None:
        """Record the store of this state. Raises ConfigError, if it is another one's."""
        owner = claim_index(self, store_id)
        if owner != store_id:
            raise ConfigError(
                f"{self._path}: is of store {owner}, the object store is store {store_id}; give another folder, or "
                "correct object_store.url"
            )

    def close(self) -> None:
        """Save the uptime and close the file."""
        with suppress(StoreUnavailable), self._writing():
            pass
        with self._lock:
            self._connection.close()


def _value(connection: sqlite3.Connection, name: str, uptime: float = 0.0) -> bytes | None:
    found = connection.execute(
        "SELECT value FROM entries WHERE name = ? AND (expires IS NULL OR expires > ?)", (name, uptime)
    ).fetchone()
    return None if found is None else bytes(found[0])


def _is_durable(seconds: float | None) -> bool:
    return seconds is None or seconds > LOCK_SECONDS_MAX


def _refusal(path: Path, err: sqlite3.OperationalError) -> ConfigError | StoreUnavailable:
    if err.sqlite_errorcode == sqlite3.SQLITE_BUSY:
        return ConfigError(f"{path}: another process has it open; give each first shard a folder of its own")
    return StoreUnavailable(f"{path}: {err}; is the folder writable, and the disk not full?")
