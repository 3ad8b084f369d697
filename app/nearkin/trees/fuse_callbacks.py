"""Answer requests of libfuse.

    listing: with libfuse 3 the attributes of all entries are in its answer (READDIRPLUS), so that none is asked for
    holes:   programs that keep holes, such as `cp` and `tar -S`, ask for the next one (SEEK_HOLE, SEEK_DATA)
    xattrs:  `ls -l` asks for two of each entry; the answer that there is none is the common one, and takes no exception

mfusepy passes names alone to the kernel, and errors as exceptions; `fuse_callbacks` replaces two methods of it, and
adds that of holes.

Invariant: a request that fails ends with an error number, and one that finds damage is logged; the mount stays.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.trees.mounted_store import Child, MountedStore, Status
from nearkin_shared.errors import NearkinError, NotFound

if TYPE_CHECKING:
    from types import ModuleType

_READDIRPLUS_AUTO = 1 << 14
"""Bit of libfuse's capabilities: the kernel asks for attributes with the first page of a listing only."""
_READDIR_PLUS = 1 << 0
_FILL_DIR_PLUS = 1 << 1
DOTS = (b".", b"..")
SELINUX_LABEL = b"security.selinux"
SELINUX_FOLDER = Path("/sys/fs/selinux")
_PLAIN_ERRORS = ((NotFound, errno.ENOENT), (NotADirectoryError, errno.ENOTDIR), (IsADirectoryError, errno.EISDIR))
_log = logging.getLogger("nearkin")


@contextmanager
def error_numbers(action: str, path: str | bytes) -> Iterator[None]:
    """Raise errors of a store as error numbers; log those that are no plain absence."""
    try:
        yield
    except (NearkinError, OSError) as err:
        number = _error_number(action, path, err)
        raise OSError(number, os.strerror(number)) from err


def _error_number(action: str, path: str | bytes, err: NearkinError | OSError) -> int:
    for kind, number in _PLAIN_ERRORS:
        if isinstance(err, kind):
            return number
    _log.error("mount: %s %r failed: %s", action, path, err)
    return errno.EIO


def fuse_operations(fuse: ModuleType, store: MountedStore, on_mount: Callable[[], None]) -> Any:
    """Return the callbacks of a mount; the library's base class is known once it is imported."""

    class StoreOperations(fuse.Operations):  # type: ignore[misc, name-defined]
        use_ns = True

        def opendir(self, path: str) -> int:
            raise NotImplementedError

        def releasedir(self, path: str, _handle: int) -> int:
            raise NotImplementedError

        def init_with_config(self, connection: Any, _config: Any) -> None:
            if connection is not None:
                connection.want &= ~_READDIRPLUS_AUTO
            on_mount()

        def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
            with error_numbers("stat", path):
                return _attributes(store.status(os.fsencode(path)))

        def readdir(self, path: str, _handle: int) -> Iterator[tuple[str, dict[str, int], int]]:
            yield from ((name, {}, 0) for name in (".", ".."))
            with error_numbers("list", path):
                for name, status, _ in store.children(os.fsencode(path)):
                    yield os.fsdecode(name), {"st_mode": status.st_mode, "st_ino": status.st_ino}, 0

        def readlink(self, path: str) -> str:
            with error_numbers("readlink", path):
                return os.fsdecode(store.link_target(os.fsencode(path)))

        def listxattr(self, path: str) -> list[str]:
            with error_numbers("listxattr", path):
                return [os.fsdecode(name) for name in store.xattrs(os.fsencode(path))]

        def getxattr(self, path: str, name: str, _position: int = 0) -> bytes:
            raise NotImplementedError  # `fuse_callbacks` answers; libfuse registers a callback if this method exists

        def open(self, path: str, _flags: int) -> int:
            with error_numbers("open", path):
                return store.open(os.fsencode(path))

        def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
            with error_numbers("read", path):
                return store.read(handle, offset, size)

        def lseek(self, path: str, offset: int, whence: int, handle: int) -> int:
            raise NotImplementedError  # as `getxattr`

        def release(self, _path: str, handle: int) -> int:
            store.close(handle)
            return 0

    return StoreOperations()


def _attributes(status: Status) -> dict[str, int]:
    return {**status._asdict(), "st_atime": status.st_mtime, "st_ctime": status.st_mtime}


class FolderListing:
    """A position in the content of a folder.

    An offset is the number of entries before it; `.` and `..` are the first two.

    Invariant: `child` is the entry at `offset`, None at the end.
    """

    def __init__(self, children: Iterator[Child]) -> None:
        self._children = chain((Child(name, Status(stat.S_IFDIR, 0), is_complete=False) for name in DOTS), children)
        self.offset = -1
        self.child: Child | None = None
        self.advance()

    def advance(self) -> None:
        """Go to the next entry. Raises as `MountedStore.children` does."""
        self.child = next(self._children, None)
        self.offset += 1


class FolderListings:
    """The listings of open folders."""

    def __init__(self, store: MountedStore) -> None:
        self._store = store
        self._open: dict[int, tuple[bytes, FolderListing | None]] = {}
        self._next_handle = 1

    def open(self, path: bytes) -> int:
        """Return a handle for a folder."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._open[handle] = (path, None)
        return handle

    def seek(self, handle: int, offset: int) -> FolderListing:
        """Return the listing of a handle at an offset.

        Where the last call ended it continues; anywhere else it is read from the start on.

        Raises as `MountedStore.children` does.
        """
        path, listing = self._open[handle]
        if listing is None or listing.offset != offset:
            listing = FolderListing(self._store.children(path))
            while listing.child is not None and listing.offset < offset:
                listing.advance()
            self._open[handle] = (path, listing)
        return listing

    def close(self, handle: int) -> None:
        """Close a handle."""
        self._open.pop(handle, None)


def fuse_callbacks(fuse: ModuleType, store: MountedStore) -> Any:
    """Return mfusepy's class with listings that have attributes, holes, a faster `getxattr`."""
    listings = FolderListings(store)
    no_label = fuse.ENOATTR if SELINUX_FOLDER.exists() else fuse.ENOTSUP

    class StoreFuse(fuse.FUSE):  # type: ignore[misc, name-defined]
        def opendir(self, path: bytes, file: Any) -> int:
            file.contents.fh = listings.open(path)
            return 0

        def releasedir(self, _path: bytes, file: Any) -> int:
            listings.close(file.contents.fh)
            return 0

        def readdir_fuse_3(
            self, path: bytes, buffer: Any, add: Callable[..., int], offset: int, file: Any, flags: int
        ) -> int:
            status = fuse.c_stat()
            pointer = ctypes.pointer(status)
            with error_numbers("list", path):
                listing = listings.seek(file.contents.fh, offset)
                while (child := listing.child) is not None:
                    _set_status(status, child.status)
                    is_full = flags & _READDIR_PLUS and child.is_complete
                    if add(buffer, child.name, pointer, listing.offset + 1, _FILL_DIR_PLUS if is_full else 0):
                        break  # the buffer is full: the next call begins here
                    listing.advance()
            return 0

        def lseek(self, _path: bytes, offset: int, whence: int, file: Any) -> int:
            return store.seek(file.contents.fh, offset, whence)

        def getxattr(self, path: bytes, name: bytes, target: Any, size: int, *_position: int) -> int:
            try:
                found = store.xattr(path, name)
            except (NearkinError, OSError) as err:
                return -_error_number("getxattr", path, err)
            if found is None:
                # `ls` asks for no label again if one is not supported here
                return -int(no_label if name == SELINUX_LABEL else fuse.ENOATTR)
            if target:
                if len(found) > size:
                    return -errno.ERANGE
                ctypes.memmove(target, found, len(found))
            return len(found)

    return StoreFuse


def _set_status(target: Any, status: Status) -> None:
    """Set the fields of a C `stat`."""
    target.st_mode = status.st_mode
    target.st_ino = status.st_ino
    target.st_nlink = status.st_nlink
    target.st_uid = status.st_uid
    target.st_gid = status.st_gid
    target.st_rdev = status.st_rdev
    target.st_size = status.st_size
    target.st_blocks = status.st_blocks
    time = target.st_mtimespec
    time.tv_sec, time.tv_nsec = divmod(status.st_mtime, 1_000_000_000)
    target.st_atimespec = target.st_ctimespec = time
