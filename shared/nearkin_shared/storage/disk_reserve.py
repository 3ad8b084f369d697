"""File that reserves disk blocks for the commands that free space.

    put, gc                                              ->  restore()   create the file once there is room for it
    rm, forget, gc, gc --pause, undelete on a full disk  ->  release()   remove the file, and run the command

Invariant: the file has allocated blocks only (no holes, nothing that a file system compresses), and no put ever
releases it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from nearkin_shared.errors import NoRoom, StoreUnavailable
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.local import sync_folder
from nearkin_shared.utils.private_files import nearest_folder

NAME = "reserve"
SMALLEST_BYTES = MIB
"""A mark takes about 20 KiB of a full disk (file, folder, pages of the index), a small GC run about 300 KiB."""
LARGEST_BYTES = 64 * MIB
"""Enough for the index pages of a run over 2 GiB of new data; a larger file would only take space from puts."""
STORE_SHARE = 32
"""Share of the stored bytes, 1 in 32, that covers the index pages that a GC run writes."""
FREE_TIMES = 4
"""Multiple of its size that must be free to create the reserve, which must not fill the disk itself."""
CONTAINER_BYTES = 4 * MIB
"""A GC run writes a container again before it removes the old one."""
PART_BYTES = MIB
Answer = TypeVar("Answer")
_log = logging.getLogger("nearkin")


class SpaceReserve:
    """Reserve of one local store. Safe between threads and processes.

    Removing and renaming the file are atomic.
    """

    def __init__(self, root: Path, stored_bytes: Callable[[], int] = lambda: 0) -> None:
        """Create the reserve; `stored_bytes` lists all containers, once a command has no room."""
        self._path = root / NAME
        self._stored_bytes = stored_bytes

    def size_bytes(self) -> int:
        """Return the size of the reserve, 0 if there is none."""
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
        _log.warning(
            "%s: the disk is full; the reserve was released, and is created again once there is room", self._path
        )
        return True

    def restore(self, stored_bytes: Callable[[], int], *, grow: bool = False) -> None:
        """Create the reserve if it is missing and fits; with `grow`, double its size.

        `stored_bytes` is called only if needed: it lists all containers.

        Raises: StoreUnavailable.
        """
        existing_bytes = self.size_bytes()
        if existing_bytes and not grow:
            return
        target_bytes = min(LARGEST_BYTES, max(SMALLEST_BYTES, stored_bytes() // STORE_SHARE))
        if existing_bytes * 2 > target_bytes:
            return
        try:
            found = os.statvfs(self._path.parent)
            if found.f_bavail * found.f_frsize < FREE_TIMES * target_bytes:
                return
            _allocate(self._path.with_name("tmp"), self._path, target_bytes)
        except OSError as err:
            _log.debug("%s: reserve not created: %s", self._path, err)

    def run(self, action: Callable[[], Answer], again: Callable[[], Answer] | None = None) -> Answer:
        """Return the result of `action`; if the disk is full, release the reserve and retry.

        A full disk of an index at `index.path` does not count. `again`: the action of the retry, if another.

        Raises: as the actions do.
        """
        try:
            return action()
        except NoRoom as err:
            if not self._is_on_device_of(err.folder):
                raise
            if not self.release():
                raise self._refusal(err, "was used before, or did not fit") from err
        try:
            return (again or action)()
        except NoRoom as err:
            if not self._is_on_device_of(err.folder):
                raise
            raise self._refusal(err, "was released and does not suffice") from err

    def _refusal(self, err: NoRoom, state: str) -> NoRoom:
        """Return the error with the bytes that the commands which free space need."""
        with suppress(StoreUnavailable):
            needed_bytes = max(SMALLEST_BYTES, self._stored_bytes() // STORE_SHARE) + CONTAINER_BYTES
            mib = -(-needed_bytes // MIB)
            return NoRoom(
                f"{err}; the reserve {self._path} {state}: delete or move other files of {mib} MiB on this disk, then "
                "run `nearkin gc --now`, which frees all deleted versions (docs/how-to/free-a-full-disk.md)",
                err.folder,
            )
        return err

    def _is_on_device_of(self, folder: Path | None) -> bool:
        """Return whether the reserve is on the device of a folder; None: the store's own."""
        try:
            return folder is None or nearest_folder(folder).stat().st_dev == self._path.parent.stat().st_dev
        except OSError:
            return False


def _allocate(scratch: Path, path: Path, size_bytes: int) -> None:
    """Create a file of allocated blocks under a temporary name, then rename it.

    Raises: OSError.
    """
    scratch.mkdir(exist_ok=True)
    temporary = scratch / f"{os.urandom(8).hex()}.part"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size_bytes)
            if os.fstat(descriptor).st_blocks * 512 < size_bytes:  # compressed, or no fallocate: write random bytes
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
