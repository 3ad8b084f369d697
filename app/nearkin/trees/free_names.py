"""Give a complete entry its name where no entry has it.

    link, unlink -> no hard links here: renameat2 without replacing -> not offered: compare, then rename

Another program may make an entry of the name while the content is written. That one is kept.

Invariant: an existing entry is not replaced. On file systems without hard links and `renameat2` one that appears
between two calls is.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from functools import cache
from typing import Any

from nearkin_shared.objectstore.file_publishing import NO_LINKS

_RENAME_NOREPLACE = 1
_NO_RENAME_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


def give_free_name(temporary: bytes, name: bytes, folder: int) -> None:
    """Rename an entry of an open folder to a name that no entry has.

    Raises FileExistsError with a reason for people, OSError; the entry has its temporary name then.
    """
    try:
        _link_or_rename(temporary, name, folder)
    except FileExistsError as err:
        raise FileExistsError(err.errno, "another program made an entry of this name meanwhile; it is kept") from err


def _link_or_rename(temporary: bytes, name: bytes, folder: int) -> None:
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as err:
        if err.errno not in NO_LINKS:
            raise
    else:
        os.unlink(temporary, dir_fd=folder)
        return
    try:
        _rename_exclusively(temporary, name, folder)
    except OSError as err:
        if err.errno not in _NO_RENAME_FLAGS:
            raise
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from err
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _rename_exclusively(temporary: bytes, name: bytes, folder: int) -> None:
    renameat2 = _renameat2()
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(folder, temporary, folder, name, _RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _renameat2() -> Any:
    """Return the call of the C library; None if it has none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
