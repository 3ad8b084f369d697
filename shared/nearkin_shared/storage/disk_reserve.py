"""A file that keeps disk blocks for the commands that free space.

    put, gc   ->  restore()   a file of real blocks, once there is room for it
    rm, forget, gc, gc --pause, undelete on a full disk  ->  release()   the file is removed, and the command goes on

Invariant: the file holds allocated blocks only (no holes, nothing that a file system compresses away), and no put ever
releases it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from nearkin_shared.errors import NoRoom
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import sync_folder
from nearkin_shared.utils.private_files import nearest_folder

NAME = "reserve"
SMALLEST_BYTES = MIB
"""A mark takes some 20 KiB of a full disk (its file, folder and pages of the index), a small GC run some 300 KiB."""
STORE_SHARE = 32
"""A reserve of one part in so many of the stored bytes is enough for the pages of the index that a GC run writes."""
FREE_TIMES = 4
"""The reserve is made only where so many times its size is free: it must not be what fills the disk."""
PART_BYTES = MIB
Answer = TypeVar("Answer")
_log = logging.getLogger("nearkin")


class SpaceReserve:
    """The reserve of one local store. Safe between threads and processes: removing and renaming are atomic."""

    def __init__(self, root: Path, most_bytes: Callable[[], int]) -> None:
        """`most_bytes`: the setting `storage.reserve_bytes`, 0 for none."""
        self._path = root / NAME
        self._most_bytes = most_bytes

    def size_bytes(self) -> int:
        """Return the size of the reserve, 0 where there is none."""
        try:
            return self._path.lstat().st_size
        except OSError:
            return 0

    def release(self) -> bool:
        """Remove the reserve, durably; return whether there was one."""
        try:
            os.unlink(self._path)
            sync_folder(self._path.parent)
        except OSError:
            return False
        _log.warning("%s: the disk is full; the reserve was released, and is made again once there is room", self._path)
        return True

    def restore(self, stored_bytes: Callable[[], int], *, grow: bool = False) -> None:
        """Make the reserve if there is none and there is room for it; `grow`: or one of twice the size.

        `stored_bytes` is asked for where it matters: it lists all containers. Raises StoreUnavailable.
        """
        most, there = self._most_bytes(), self.size_bytes()
        if not most:
            if there:
                self._remove()
            return
        if there and not grow:
            return
        wanted = min(most, max(SMALLEST_BYTES, stored_bytes() // STORE_SHARE))
        if there * 2 > wanted:
            return
        try:
            found = os.statvfs(self._path.parent)
            if found.f_bavail * found.f_frsize < FREE_TIMES * wanted:
                return
            _allocate(self._path.with_name("tmp"), self._path, wanted)
        except OSError as err:
            _log.debug("%s: no reserve is made: %s", self._path, err)

    def _remove(self) -> None:
        """Remove a reserve that the settings do not want."""
        with suppress(OSError):
            os.unlink(self._path)

    def run(self, action: Callable[[], Answer], again: Callable[[], Answer] | None = None) -> Answer:
        """Return what `action` does; where the disk is full, release the reserve and do it once more.

        Unless it is another disk that is full: that of an index at `index.path`.
        `again`: what is done the second time, where that is another call. Raises what they raise.
        """
        try:
            return action()
        except NoRoom as err:
            if not self._is_on_device_of(err.folder) or not self.release():
                raise
        return (again or action)()

    def _is_on_device_of(self, folder: Path | None) -> bool:
        """Return whether releasing the reserve makes room in a folder; None: in the store's own."""
        try:
            return folder is None or nearest_folder(folder).stat().st_dev == self._path.parent.stat().st_dev
        except OSError:
            return False


def _allocate(scratch: Path, path: Path, size_bytes: int) -> None:
    """Make a file of allocated blocks under a temporary name, and give it its own. Raises OSError."""
    scratch.mkdir(exist_ok=True)
    temporary = scratch / f"{os.urandom(8).hex()}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size_bytes)
            if os.fstat(descriptor).st_blocks * 512 < size_bytes:  # compressed, or no fallocate: bytes that stay
                _fill(descriptor, size_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _fill(descriptor: int, size_bytes: int) -> None:
    at = 0
    while at < size_bytes:
        at += os.pwrite(descriptor, os.urandom(min(PART_BYTES, size_bytes - at)), at)
