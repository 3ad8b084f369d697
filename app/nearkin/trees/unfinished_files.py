"""Name, lock and remove the files that a restore has not finished.

    .nearkin-restore-<16 hex digits>     locked by its restore (flock) -> complete -> renamed to its own name

Invariant: a file that is locked is not removed: its restore is still writing it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress

_PREFIX = b".nearkin-restore-"
_UNFINISHED = re.compile(re.escape(_PREFIX) + rb"[0-9a-f]{16}")
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LEFT_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""For writing: an NFS server grants an exclusive lock to no other descriptor."""
CREATIONS_MAX = 100


def temporary_name() -> bytes:
    """Return a name for entries until they are complete; no entry of a tree has it."""
    return _PREFIX + secrets.token_hex(8).encode()


def is_unfinished(name: bytes, status: os.stat_result) -> bool:
    """Return whether a name and status are those of a file that a restore has not finished."""
    return name.startswith(_PREFIX) and stat.S_ISREG(status.st_mode) and _UNFINISHED.fullmatch(name) is not None


def create_locked(name: bytes, folder: int) -> int:
    """Create a file in an open folder and lock it; return its descriptor. Raises OSError."""
    for _ in range(CREATIONS_MAX):
        descriptor = os.open(name, _NEW_FLAGS, 0o600, dir_fd=folder)
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another restore removed it before it was locked
    raise FileNotFoundError(f"{CREATIONS_MAX} new files were removed at once by another process")


def remove_unfinished(folder: int) -> int:
    """Remove the files that killed restores left in an open folder; return how many.

    A file that cannot be opened, locked or removed stays.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        names = [name for entry in entries if _UNFINISHED.fullmatch(name := os.fsencode(entry.name))]
        return sum(_remove(name, folder) for name in names)
    return 0


def _remove(name: bytes, folder: int) -> bool:
    """Remove an unfinished file unless it is locked; return whether it was removed."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return False
        descriptor = os.open(name, _LEFT_FLAGS, dir_fd=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)
        return True
    return False
