"""Give a finished file its final name on filesystems without hard links.

These are exFAT, SMB, many FUSE filesystems:

    link -> not offered: renameat2 without replacing -> not offered: check, then rename under a lock of the store

Invariant: an existing name is never replaced. The last step relies on `lock.rename`, which every process takes.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from nearkin_shared.utils.file_locks import lock_file
from nearkin_shared.utils.private_files import open_private

NO_LINKS = frozenset({errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of link(2) that mean that hard links are not offered; some FUSE filesystems answer EINVAL."""
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_NO_RENAME_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_renaming = threading.Lock()


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether two names are of one file.

    NFS may answer EEXIST to a link that it has made.
    """
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except OSError:
        return False


def rename_new(temporary: Path, final: Path, lock: Path) -> None:
    """Give a file its final name, which must be free. Raises FileExistsError, OSError."""
    try:
        _rename_exclusively(temporary, final)
    except OSError as err:
        if err.errno not in _NO_RENAME_FLAGS:
            raise
        _check_then_rename(temporary, final, lock)


def _rename_exclusively(temporary: Path, final: Path) -> None:
    import ctypes  # 10 ms, and needed on few filesystems

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(final))


def _check_then_rename(temporary: Path, final: Path, lock: Path) -> None:
    with _renaming:
        descriptor = open_private(lock, os.O_RDWR | os.O_CREAT)
        try:
            lock_file(descriptor, wait=True)
            if os.path.lexists(final):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
            os.rename(temporary, final)
        finally:
            os.close(descriptor)
