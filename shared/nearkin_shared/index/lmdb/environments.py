"""LMDB environments shared by the stores of one process.

Invariant: a process opens each file once, as LMDB requires; the last user closes it.

An environment that was open when a process forked stays its parent's: the child opens its own. Two Stores of one
process, for two tenants for example, share one environment; otherwise LMDB would refuse the second open.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from nearkin_shared.errors import IndexDamaged, IndexUnfinished, IndexUnsafe, NoRoom, NotWritable, StoreUnavailable
from nearkin_shared.index.lmdb.page_check import find_page_damage
from nearkin_shared.index.lmdb.session_notes import (
    CRASHES_MAX,
    DAMAGE_NOTE,
    dead_notes,
    remove_note,
    write_damage_note,
    write_note,
)
from nearkin_shared.observability import counters
from nearkin_shared.utils.private_files import (
    FILE_MODE,
    REFUSED,
    check_no_link,
    make_private_folders,
    nearest_folder,
    open_private,
    write_error,
)

FULL_BYTES = 1 << 20
"""Free bytes below which a device is regarded as full after LMDB's write to it was cut short."""
SETTLED_SECONDS = 5.0
"""After so long an open index is not what ended earlier processes: their notes are removed, and count no more."""
READERS_MAX = 512
LOCK_BYTES = 64 * READERS_MAX + 4096
"""Size of LMDB's reader table: a header, and a slot of 64 bytes per reader."""

DAMAGE = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
)
"""LMDB errors for a damaged file.

The file lacks a table, has a table of another kind, or a tree without end; or the transaction met such a page before.
"""

_LOCK = threading.Lock()
_OPEN: dict[tuple[int, int], Environment] = {}
"""Open environments by device and inode of the data file, one per open store; each holds two file descriptors."""
_PARENTS: list[Environment] = []
"""Environments in use when this process was forked: kept, since releasing one would close it."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Environment:
    """Open environment and its named databases.

    `writable` is False if the file could be opened for reading only.
    """

    env: Any
    databases: dict[str, Any]
    writable: bool
    file: tuple[int, int]
    note: Path | None
    """Note that this process has the environment open; removed on close."""
    dead: Sequence[Path] = ()
    """Notes of processes that died with it open; removed on close or after SETTLED_SECONDS."""
    settling: threading.Timer | None = None
    """Removes the notes of dead processes."""
    users: int = 0
    is_damaged: bool = False
    """Whether LMDB reported damage: the file is not used for another call."""
    process: int = field(default_factory=os.getpid)
    """The process that opened it. A process forked from it must not use it (LMDB's rule)."""

    def open(self, names: Sequence[str], *, writable: bool) -> None:
        """Open databases; with `writable`, create the missing ones."""
        if writable and not self.writable:
            raise PermissionError(errno.EACCES, "the index file is open for reading only")
        missing = [name for name in names if name not in self.databases]
        if writable and missing:
            # One transaction: a process that dies here leaves all or none of them.
            with self.env.begin(write=True) as txn:
                made = {name: self.env.open_db(name.encode(), txn=txn) for name in missing}
            self.databases.update(made)
        else:
            for name in missing:
                self.databases[name] = self.env.open_db(name.encode(), create=False)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the pages in use; 0 once closed."""
        with _LOCK:
            if not self.users:
                return 0
            return int((self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"])

    def is_at(self, folder: Path) -> bool:
        """Return whether the folder still has this file, undamaged: an index rebuild replaces it."""
        return not self.is_damaged and _file(folder) == self.file


INDEX_BYTES: counters.Gauge[Environment] = counters.level(
    "nearkin_index_bytes", "Bytes of the pages in use of an index in files.", "index", lambda env: env.used_bytes
)


def acquire(folder: Path, map_bytes: int, names: Sequence[str], *, writable: bool, durable: bool = True) -> Environment:
    """Return the environment in a folder with all named databases.

    Without `writable` nothing is created. Without `durable` no transaction waits for the disk, and after a power cut
    the file is undefined.

    Raises: IndexUnfinished, without `writable`, if the process that created it died before the databases existed.
    StoreUnavailable, if missing, not writable or damaged.
    """
    try:
        with _LOCK:
            if writable:
                make_private_folders(folder)
            for path in (folder, folder / "data.mdb", folder / "lock.mdb"):
                check_no_link(path)
            file = _file(folder)
            shared = _OPEN.get(file) if file is not None else None
            if any(left.file == file for left in _PARENTS):  # LMDB has it open here, and cannot open it twice
                raise StoreUnavailable(
                    f"index {folder}: in use when this process was forked; spawn the process, or "
                    "fork it before the store is opened"
                )
            if shared is not None and shared.is_damaged:
                raise unsafe_error(folder, "LMDB reported damage")
            if shared is None:
                dead = _check_after_crash(folder) if file is not None else []
                shared = _open_environment(folder, map_bytes, writable=writable, durable=durable)
                shared.dead = dead
            try:
                shared.open(names, writable=writable)
            except BaseException:
                if not shared.users:
                    shared.env.close()
                    remove_note(shared.note)
                raise
            if shared.dead and shared.settling is None:
                shared.settling = threading.Timer(SETTLED_SECONDS, _forget_crashes, [shared])
                shared.settling.daemon = True
                with suppress(RuntimeError):  # no more threads: the notes stay until the index is closed
                    shared.settling.start()
            _OPEN[shared.file] = shared
            shared.users += 1
            return shared
    except lmdb.NotFoundError as err:
        raise IndexUnfinished(f"index {folder}: creation was interrupted; run rebuild-index") from err
    except (lmdb.Error, OSError) as err:
        raise _open_error(folder, err, map_bytes) from err


def _forget_crashes(shared: Environment) -> None:
    """Remove the notes of dead processes while an index that was checked is open and in use."""
    with _LOCK:
        if shared.users:
            _remove_dead_notes(shared)


def _remove_dead_notes(shared: Environment) -> None:
    for note in shared.dead:
        remove_note(note)
    shared.dead = ()


def is_out_of_room(folder: Path, err: Exception) -> bool:
    """Return whether LMDB failed because its device is full.

    LMDB passes the system's reason on as text only.
    """
    if any(os.strerror(number) in str(err) for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    if os.strerror(errno.EIO) not in str(err):  # LMDB's own error for a write that a full device cut short
        return False
    with suppress(OSError):
        found = os.statvfs(nearest_folder(folder))
        return found.f_bavail * found.f_frsize < FULL_BYTES
    return False


def no_room(folder: Path) -> NoRoom:
    """Return the error for an index on a full device."""
    return NoRoom(
        f"index {folder}: no room left on the device; earlier data is unchanged; make room and run the same again, "
        "or set index.path to a folder on another disk",
        folder,
    )


def _open_error(folder: Path, err: Exception, map_bytes: int) -> StoreUnavailable:
    """Return the error for an index that could not be opened, with its remedy.

    LMDB passes the system's reasons on as text only.
    """
    if is_out_of_room(folder, err):
        return no_room(folder)
    if os.strerror(errno.ENOMEM) in str(err):
        return StoreUnavailable(
            f"index {folder}: cannot map {map_bytes:,} bytes of address space; raise the limit (ulimit -v), or lower "
            "index.map_bytes"
        )
    if any(os.strerror(number) in str(err) for number in REFUSED):
        return NotWritable(f"index {folder}: {err}; a reader needs write access to its lock.mdb, and to nothing else")
    if any(os.strerror(number) in str(err) for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)):
        return StoreUnavailable(
            f"index {folder}: {err}: the filesystem lacks locks or memory maps, which the index needs: move the store "
            "to another filesystem (docs/reference/filesystems.md)"
        )
    if isinstance(err, DAMAGE):
        return corruption_error(folder, err)
    return StoreUnavailable(f"index {folder}: {err}; if it persists run rebuild-index")


def damage_error(reason: object) -> IndexDamaged:
    """Return the error for a damaged index."""
    return IndexDamaged(f"index damaged: {reason}; run rebuild-index, which makes a new one")


def corruption_error(folder: Path, reason: object) -> IndexUnsafe:
    """Write a note that LMDB reported a damaged file, and return the error.

    The note makes the next process rebuild the index.
    """
    write_damage_note(folder)
    return IndexUnsafe(f"index damaged: {reason}; the next command rebuilds it, or run rebuild-index")


def unsafe_error(folder: Path, damage: str) -> IndexUnsafe:
    """Return the error for an index that must not be opened."""
    return IndexUnsafe(f"index {folder}: {damage}; reading it may crash the process; run rebuild-index")


def release(shared: Environment) -> None:
    """Release an environment; the last user closes it."""
    if shared.process != os.getpid():
        return
    with _LOCK:
        shared.users -= 1
        if not shared.users:
            _OPEN.pop(shared.file, None)
            shared.env.close()
            if shared.settling is not None:
                shared.settling.cancel()
            remove_note(shared.note)
            _remove_dead_notes(shared)


def _open_environment(folder: Path, map_bytes: int, *, writable: bool, durable: bool) -> Environment:
    """Open an environment for writing if permitted, even for a reader.

    A writer of this process may need it next.
    """
    options: dict[str, Any] = {
        "map_size": map_bytes,
        "max_dbs": 16,
        "lock": True,
        "readahead": False,
        "meminit": True,  # else pages carry freed memory of the process into the file
        "mode": FILE_MODE,
        "max_readers": READERS_MAX,
        "sync": durable,
    }
    _reserve_lock(folder)
    note = write_note(folder)
    try:
        env, can_write = _open_file(folder, options, writable=writable)
        try:
            _fill_up(env, folder)
            status = (folder / "data.mdb").stat()
        except BaseException:
            env.close()
            raise
    except BaseException:
        remove_note(note)
        raise
    made = Environment(env, {}, can_write, (status.st_dev, status.st_ino), note)
    INDEX_BYTES.watch(made, "lmdb")
    return made


def _open_file(folder: Path, options: Mapping[str, Any], *, writable: bool) -> tuple[Any, bool]:
    """Return (LMDB's environment, whether it is writable)."""
    new = _file(folder) is None
    try:
        return lmdb.open(os.fsencode(folder), create=writable, **options), True
    except lmdb.Error:
        if writable:
            if new:  # a partial header, on a full device, would be taken for a damaged index
                (folder / "data.mdb").unlink(missing_ok=True)
            raise
        return lmdb.open(os.fsencode(folder), readonly=True, **options), False


def _check_after_crash(folder: Path) -> list[Path]:
    """Return the notes of processes that died with the index open.

    Raises: IndexUnsafe, if the index may have caused their death.
    """
    dead = dead_notes(folder)
    if not dead:
        return dead
    damage = find_page_damage(folder / "data.mdb")
    if damage is None and len(dead) > CRASHES_MAX:
        damage = f"{len(dead)} processes died with it open, and none has closed it since"
    if damage is None and any(note.name == DAMAGE_NOTE for note in dead):
        damage = "LMDB reported damage"
    if damage is not None:
        raise unsafe_error(folder, damage)
    return dead


def _reserve_lock(folder: Path) -> None:
    """Reserve disk space for LMDB's reader table.

    LMDB maps a sparse file; on a full device that is SIGBUS. A file that exists was reserved by its creator.

    Raises: OSError, if the device is full. NotWritable, if this process may not write the table: LMDB would then read
    without it, and a writer in another process could overwrite pages that are being read.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    path = folder / "lock.mdb"
    try:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as err:
        if err.errno in REFUSED:
            raise write_error(path, err) from err
        return  # LMDB reports the reason
    try:
        if not os.fstat(descriptor).st_size:  # never larger than the size that another process has mapped
            os.posix_fallocate(descriptor, 0, LOCK_BYTES)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(descriptor, 0)  # a partial table would be taken for a complete one
            raise
    finally:
        os.close(descriptor)


def _fill_up(env: Any, folder: Path) -> None:
    """Extend the file with zeros for pages beyond its end.

    LMDB maps them all, and touching a missing one is SIGBUS. A page that was freed before it was ever written may be
    missing; a page that was lost is then refused as corrupt.
    """
    mapped_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    path = folder / "data.mdb"
    size_bytes = path.stat().st_size
    if size_bytes < mapped_bytes:
        descriptor = open_private(path, os.O_RDWR)
        try:  # fallocate never shrinks a file that a writer extended meanwhile
            os.posix_fallocate(descriptor, size_bytes, mapped_bytes - size_bytes)
        finally:
            os.close(descriptor)


def _file(folder: Path) -> tuple[int, int] | None:
    """Return (device, inode) of the data file, or None if there is none.

    Raises: IndexDamaged, if it is not a regular file: LMDB would wait for ever on a pipe.
    """
    try:
        status = (folder / "data.mdb").stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise damage_error(f"{folder / 'data.mdb'} is not a regular file")
    return status.st_dev, status.st_ino


def drop_after_fork(in_use: Sequence[Any]) -> None:
    """Leave all environments to the parent, in a process just forked from it.

    Environments in `in_use`, in use at the fork, must not even be closed: that would end the parent's transaction. The
    others are closed, without a trace in the files.
    """
    global _LOCK  # noqa: PLW0603 - a thread that this process does not have may hold it
    _LOCK = threading.Lock()
    for shared in _OPEN.values():
        if any(shared.env is env for env in in_use):
            _PARENTS.append(shared)
        else:
            shared.env.close()
    _OPEN.clear()
