"""Lock a file for one process, by flock or by a lock of the open file description.

The latter (fcntl) is used on filesystems without flock. Both end with the last descriptor of the open file, so that a
dead holder's lock is free at once. All processes of one mount use the same kind: support of flock is a property of the
mount.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from nearkin_shared.errors import StoreUnavailable

NOT_OFFERED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Answers of a filesystem without this kind of locks."""
_HELD = frozenset({errno.EAGAIN, errno.EACCES})
_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of Linux: type, whence, start, length (0: all of the file), process (0: the open file description)."""


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; return False if another holds it. `wait`: return when it is free.

    Raises StoreUnavailable: the filesystem offers no locks. Raises OSError.
    """
    try:
        # The call itself: the filelock package does the same and takes 60 ms to import.
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in NOT_OFFERED:
            raise
        return _lock_description(descriptor, err, shared=shared, wait=wait)
    return True


def _lock_description(descriptor: int, refused: OSError, *, shared: bool, wait: bool) -> bool:
    request = _FLOCK.pack(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except AttributeError as err:  # not Linux
        raise _no_locks(descriptor, refused, refused) from err
    except OSError as err:
        if err.errno in _HELD:
            return False
        if err.errno not in NOT_OFFERED:
            raise
        raise _no_locks(descriptor, refused, err) from err
    return True


def _no_locks(descriptor: int, flock: OSError, other: OSError) -> StoreUnavailable:
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        name = "lock file"
    return StoreUnavailable(
        f"{name}: this filesystem has no file locks (flock: {flock.strerror}; fcntl: {other.strerror}), and two "
        "writers could damage the store: mount it with locks, or move the store to another filesystem "
        "(docs/reference/filesystems.md)"
    )
