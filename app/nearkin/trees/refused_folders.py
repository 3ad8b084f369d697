"""Separate the error of one entry from that of a folder in which no entry can be written.

entry fails -> its folder can be written:  the error is the entry's own
            -> it cannot, or not be opened: FolderRefusal, one problem for all entries below the folder
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderRefusal(OSError):
    """A folder of the target cannot be opened or written.

    `folder` is its path below the target.
    """

    def __init__(self, number: int, reason: str, folder: bytes) -> None:
        super().__init__(number, reason)
        self.folder = folder


def open_below(name: bytes, parent: int, path: bytes, *, create: bool) -> int:
    """Open a folder of the target by its parent's descriptor; `create` makes a missing one.

    `path`: of the parent, below the target. Raises FolderRefusal.
    """
    try:
        try:
            return os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except OSError as err:
            found = refusal_of(err, parent, path)
            if isinstance(found, FolderRefusal):
                raise found from err
            raise
        return os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except FolderRefusal:
        raise
    except OSError as err:
        reason = f"cannot be opened: {(err.strerror or str(err)).lower()}"
        raise FolderRefusal(err.errno or 0, reason, b"/".join(filter(None, (path, name)))) from err


def write_error(place: bytes | int | Path) -> int:
    """Return the error of a folder, by path or descriptor, that cannot be written."""
    try:
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    except OSError:
        is_read_only = 0
    return errno.EROFS if is_read_only else errno.EACCES


def refusal_of(err: OSError, folder: int, path: bytes) -> OSError:
    """Return the error of a folder if it caused that of an entry in it, else the error itself."""
    if err.errno not in _PERMISSION_ERRORS or isinstance(err, FolderRefusal):
        return err
    if os.access(b".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
        return err
    return FolderRefusal(err.errno, f"cannot be written: {os.strerror(err.errno).lower()}", path)
