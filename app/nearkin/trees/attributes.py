"""Read and set what a file system keeps of an entry besides its content."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from nearkin_shared.formats.tree_entry_group import EntryKind
from nearkin_shared.utils.terminal import printable

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""A file that is replaced by a FIFO, a terminal or a symlink meanwhile has no effect."""
XATTRS_MAX = 1024
EXTENTS_MAX = 1 << 20
KINDS = {
    stat.S_IFREG: EntryKind.FILE,
    stat.S_IFDIR: EntryKind.FOLDER,
    stat.S_IFLNK: EntryKind.SYMLINK,
    stat.S_IFIFO: EntryKind.FIFO,
    stat.S_IFCHR: EntryKind.CHARACTER_DEVICE,
    stat.S_IFBLK: EntryKind.BLOCK_DEVICE,
}
"""Kinds that are stored, by the type bits of a mode; sockets are not."""
_UNSUPPORTED = (errno.ENOTSUP, errno.ENOSYS, errno.ENODATA)


def descriptor_path(folder: int, name: bytes) -> bytes:
    """Return the path of an entry through its open folder, for calls without `dir_fd`."""
    return b"/proc/self/fd/%d/%s" % (folder, name)


def read_xattrs(
    target: int | bytes, lost: Callable[[str], None] = lambda _reason: None, *, follow: bool = False
) -> tuple[tuple[bytes, bytes], ...]:
    """Return (name, value) of the extended attributes, by name; a symlink only with `follow`.

    `lost` is called with the reason for each that is left out. Raises OSError.
    """
    follow = follow or isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as err:
        if err.errno in _UNSUPPORTED:
            return ()
        raise
    if not names:
        return ()
    if len(names) > XATTRS_MAX:
        lost(f"it has {len(names):,} extended attributes, at most {XATTRS_MAX:,} fit: the others are not stored")
    found = []
    for name in sorted(names)[:XATTRS_MAX]:
        try:
            found.append((os.fsencode(name), os.getxattr(target, name, follow_symlinks=follow)))
        except OSError as err:
            if err.errno != errno.ENODATA:  # deleted meanwhile
                lost(f'its extended attribute "{printable(name)}" is not stored: {(err.strerror or "error").lower()}')
    return tuple(found)


def data_bytes(name: bytes, folder: int, status: os.stat_result) -> int:
    """Return the bytes of a file without its holes; its size if it cannot be opened.

    A file that has as many blocks as its size is not opened.
    """
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=folder)
    except OSError:
        return status.st_size
    try:
        extents = data_extents(descriptor, status)
    except OSError:
        return status.st_size
    finally:
        os.close(descriptor)
    return status.st_size if extents is None else sum(length for _, length in extents)


def data_extents(descriptor: int, status: os.stat_result) -> tuple[tuple[int, int], ...] | None:
    """Return (offset, bytes) of the data in a file with holes; None if it has no holes.

    Raises OSError.
    """
    size = status.st_size
    if status.st_blocks * 512 >= size:
        return None
    extents, position = [], 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:  # a hole up to the end
                break
            if err.errno in (errno.EINVAL, *_UNSUPPORTED):
                return None
            raise
        position = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if position <= start:
            break
        extents.append((start, position - start))
        if len(extents) > EXTENTS_MAX:
            return None
    return None if extents == [(0, size)] else tuple(extents)
