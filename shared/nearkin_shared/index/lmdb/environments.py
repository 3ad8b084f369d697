"""LMDB environments. Invariant: a process opens each file once, whoever asks (LMDB's rule); the last user closes it.

One that was open when a process forked stays its parent's: the child opens its own.

Two Stores of one process, of two tenants say, share one: each would else be told that the file is open already.
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
from nearkin_shared.index.lmdb.session_notes import CRASHES_MAX, dead_notes, remove_note, write_note
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
"""A device with less room than this is full where LMDB's write to it was cut short."""
READERS_MAX = 512
LOCK_BYTES = 64 * READERS_MAX + 4096
"""LMDB's table of readers has a line of 64 bytes for each, and a head."""

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
"""What LMDB says of a file that is not as it was written: a table that is not there or of another kind, a tree that has
no end, and of a transaction in which it met such a page before."""

_LOCK = threading.Lock()
_OPEN: dict[tuple[int, int], Environment] = {}
"""By device and inode of the data file; as many as stores are open, each holding two file descriptors."""
_PARENTS: list[Environment] = []
"""What was at work when this process was forked: kept, since whoever frees one closes it."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Environment:
    """An open environment and its named databases; `writable` where the file could be opened so."""

    env: Any
    databases: dict[str, Any]
    writable: bool
    file: tuple[int, int]
    note: Path | None
    """That this process has it open; removed when it is closed."""
    dead: Sequence[Path] = ()
    """Notes of processes that died with it: removed then too."""
    users: int = 0
    process: int = field(default_factory=os.getpid)
    """Who opened it. A process forked from that one must not use it (LMDB's rule)."""

    def open(self, names: Sequence[str], *, writable: bool) -> None:
        """Open databases, and with `writable` make those that are not there."""
        if writable and not self.writable:
            raise PermissionError(errno.EACCES, "this process may not write it")
        missing = [name for name in names if name not in self.databases]
        if writable and missing:
            # One transaction: who dies here leaves all or none of them.
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
        """Return whether this is still the file that lies in the folder: a rebuild puts another one there."""
        return _file(folder) == self.file


INDEX_BYTES: counters.Gauge[Environment] = counters.level(
    "nearkin_index_bytes", "Bytes of the pages in use of an index in files.", "index", lambda env: env.used_bytes
)


def acquire(folder: Path, map_bytes: int, names: Sequence[str], *, writable: bool, durable: bool = True) -> Environment:
    """Return the environment in a folder with all databases named; without `writable` nothing is made.

    Not `durable`: no transaction waits for the disk, and after a power cut the file is whatever the disk has of it.

    Raises IndexUnfinished: without `writable`, its maker died before the databases were there. Raises
    StoreUnavailable: not there, not writable, damaged.
    """
    try:
        with _LOCK:
            if writable:
                make_private_folders(folder)
            for path in (folder, folder / "data.mdb", folder / "lock.mdb"):
                check_no_link(path)
            file = _file(folder)
            shared = _OPEN.get(file) if file is not None else None
            if any(left.file == file for left in _PARENTS):  # LMDB has it open here, and cannot have it twice
                raise StoreUnavailable(
                    f"index {folder}: was being read or written when this process was forked: spawn the process, or "
                    "fork it before the store is opened"
                )
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
            _OPEN[shared.file] = shared
            shared.users += 1
            return shared
    except lmdb.NotFoundError as err:
        raise IndexUnfinished(f"index {folder}: its maker did not finish it; run rebuild-index") from err
    except (lmdb.Error, OSError) as err:
        raise _open_error(folder, err, map_bytes) from err


def is_out_of_room(folder: Path, err: Exception) -> bool:
    """Return whether LMDB failed since its device is full; it gives the reasons of the system as text alone."""
    if any(os.strerror(number) in str(err) for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    if os.strerror(errno.EIO) not in str(err):  # LMDB's own for a write that a full device cut short
        return False
    with suppress(OSError):
        found = os.statvfs(nearest_folder(folder))
        return found.f_bavail * found.f_frsize < FULL_BYTES
    return False


def no_room(folder: Path) -> NoRoom:
    """Return the error for an index on a full device."""
    return NoRoom(
        f"index {folder}: no room left on the device; all before is as it was: make room and run the same again, or "
        "set index.path to a folder on another disk",
        folder,
    )


def _open_error(folder: Path, err: Exception, map_bytes: int) -> StoreUnavailable:
    """Return why an index could not be opened, and what helps. LMDB gives the system's reasons as text alone."""
    if is_out_of_room(folder, err):
        return no_room(folder)
    if os.strerror(errno.ENOMEM) in str(err):
        return StoreUnavailable(
            f"index {folder}: {map_bytes:,} bytes of addresses cannot be had: raise the limit (ulimit -v), or lower "
            "index.map_bytes"
        )
    if any(os.strerror(number) in str(err) for number in REFUSED):
        return NotWritable(f"index {folder}: {err}: who reads it needs to write its lock.mdb, and nothing else")
    if any(os.strerror(number) in str(err) for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)):
        return StoreUnavailable(
            f"index {folder}: {err}: the filesystem lacks locks or memory maps, which the index needs: move the store "
            "to another filesystem (docs/reference/filesystems.md)"
        )
    return (IndexDamaged if isinstance(err, DAMAGE) else StoreUnavailable)(
        f"index {folder}: {err}; if it persists delete that folder and run rebuild-index"
    )


def damage_error(said: object) -> IndexDamaged:
    """Return the error for an index that is not as it was written."""
    return IndexDamaged(f"index: {said}: it is damaged; run rebuild-index, which makes a new one")


def release(shared: Environment) -> None:
    """Let go of an environment."""
    if shared.process != os.getpid():
        return
    with _LOCK:
        shared.users -= 1
        if not shared.users:
            _OPEN.pop(shared.file, None)
            shared.env.close()
            for note in (shared.note, *shared.dead):
                remove_note(note)


def _open_environment(folder: Path, map_bytes: int, *, writable: bool, durable: bool) -> Environment:
    """Open for writing wherever that is allowed, even for a reader: a writer of this process may ask next."""
    options: dict[str, Any] = {
        "map_size": map_bytes,
        "max_dbs": 16,
        "lock": True,
        "readahead": False,
        "meminit": True,  # else pages carry whatever the process had in freed memory into the file
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
    """Return (LMDB's environment, whether it may be written)."""
    new = _file(folder) is None
    try:
        return lmdb.open(os.fsencode(folder), create=writable, **options), True
    except lmdb.Error:
        if writable:
            if new:  # half a head, on a full device, is no index and would be taken for a damaged one
                (folder / "data.mdb").unlink(missing_ok=True)
            raise
        return lmdb.open(os.fsencode(folder), readonly=True, **options), False


def _check_after_crash(folder: Path) -> list[Path]:
    """Return the notes of processes that died with a file open. Raises IndexUnsafe where it may have ended them."""
    dead = dead_notes(folder)
    if not dead:
        return dead
    damage = find_page_damage(folder / "data.mdb")
    if damage is None and len(dead) > CRASHES_MAX:
        damage = f"{len(dead)} processes that had it open have died, and none has closed it since"
    if damage is not None:
        raise IndexUnsafe(f"index {folder}: {damage}: reading it may end the process; run rebuild-index")
    return dead


def _reserve_lock(folder: Path) -> None:
    """Let the device have room for the table of readers: LMDB maps a file of holes, and on a full one that is SIGBUS.

    Raises OSError where there is none; NotWritable where this process may not write the table: LMDB would then read
    without it, and a writer elsewhere could overwrite pages that are being read. A file that exists was reserved by
    its maker.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    path = folder / "lock.mdb"
    try:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as err:
        if err.errno in REFUSED:
            raise write_error(path, err) from err
        return  # LMDB says why
    try:
        if not os.fstat(descriptor).st_size:  # never larger than what another process has mapped
            os.posix_fallocate(descriptor, 0, LOCK_BYTES)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(descriptor, 0)  # a part would be taken for all of it
            raise
    finally:
        os.close(descriptor)


def _fill_up(env: Any, folder: Path) -> None:
    """Let zeros stand for pages beyond the file's end: LMDB maps them all, and touching none of them is SIGBUS.

    A page that was freed before it was ever written may lie there; one that was lost is then refused as corrupt.
    """
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    path = folder / "data.mdb"
    size_bytes = path.stat().st_size
    if size_bytes < needed_bytes:
        descriptor = open_private(path, os.O_RDWR)
        try:  # fallocate never shrinks what a writer may have extended meanwhile
            os.posix_fallocate(descriptor, size_bytes, needed_bytes - size_bytes)
        finally:
            os.close(descriptor)


def _file(folder: Path) -> tuple[int, int] | None:
    """Return what tells the data file from others, None where there is none. Raises IndexDamaged for what is no file.

    LMDB would wait for ever for who writes into a pipe.
    """
    try:
        status = (folder / "data.mdb").stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise damage_error(f"{folder / 'data.mdb'} is no file")
    return status.st_dev, status.st_ino


def drop_after_fork(at_work: Sequence[Any]) -> None:
    """Leave all to the parent, in a process just forked from it; `at_work`: what it was reading or writing then.

    That must not even be closed: it would end the parent's transaction. All else is, without a trace in the files.
    """
    global _LOCK  # noqa: PLW0603 - a thread that this process does not have may hold it
    _LOCK = threading.Lock()
    for shared in _OPEN.values():
        if any(shared.env is env for env in at_work):
            _PARENTS.append(shared)
        else:
            shared.env.close()
    _OPEN.clear()
