"""Give restored entries their owner, mode, extended attributes and times.

Every call uses a descriptor of the entry itself, never its name: another user who may write to the folder could replace
it by another file meanwhile. Entries that cannot be opened without an effect have a descriptor of O_PATH.

Invariant: no attribute is set on a file that this restore did not open, and none through a symlink.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nearkin.trees.attributes import read_xattrs
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry

if TYPE_CHECKING:
    from nearkin.trees.restore_counts import RestoreCounts

SET_ID_BITS = stat.S_ISUID | stat.S_ISGID
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPES = {
    EntryKind.SYMLINK: stat.S_IFLNK,
    EntryKind.FIFO: stat.S_IFIFO,
    EntryKind.CHARACTER_DEVICE: stat.S_IFCHR,
    EntryKind.BLOCK_DEVICE: stat.S_IFBLK,
}


class AttributeWriter:
    """Sets the attributes of restored entries, and counts those that cannot be set."""

    def __init__(self, counts: RestoreCounts) -> None:
        self._counts = counts

    def set_open(self, entry: TreeEntry, descriptor: int, *, is_new: bool = False) -> None:
        """Set the attributes of an open file or folder.

        Attributes that the entry does not have are removed; of a new file only ACLs, which its folder's default gave.
        """
        self._set(entry, descriptor, b"", is_new=is_new)

    def set_named(self, entry: TreeEntry, name: bytes, folder: int) -> os.stat_result:
        """Set the attributes of a new entry that cannot be opened; return its status.

        Raises OSError.
        """
        descriptor = os.open(name, _PATH_FLAGS, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            is_device = entry.kind in (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE)
            if (
                stat.S_IFMT(status.st_mode) != _TYPES[EntryKind(entry.kind)]
                or status.st_nlink != 1
                or (is_device and status.st_rdev != entry.size)
            ):
                raise OSError(0, "was replaced while it was restored")
            self._set(entry, descriptor, _through(descriptor), is_new=True)
            return status
        finally:
            os.close(descriptor)

    def _set(self, entry: TreeEntry, descriptor: int, through: bytes, *, is_new: bool) -> None:
        """Set attributes through a descriptor, or the path that stands for one of O_PATH.

        The owner is the first, since it clears others; the times are the last.
        """
        target: int | bytes = through or descriptor
        status, mode = os.fstat(descriptor), entry.mode
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid) and not self._attempt(
            entry, "owner", lambda: os.chown(target, entry.uid, entry.gid)
        ):
            mode = self._without_set_id(entry)
        if entry.kind != EntryKind.SYMLINK:
            self._attempt(entry, "mode", lambda: os.chmod(target, mode))
        self._set_xattrs(entry, target, is_new=is_new)
        self._attempt(entry, "time", lambda: os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns)))

    def _without_set_id(self, entry: TreeEntry) -> int:
        """Return the mode without setuid and setgid, which would act for another owner."""
        if entry.mode & SET_ID_BITS and entry.kind != EntryKind.SYMLINK:
            self._counts.unset["setuid or setgid"] += 1
            self._counts.note(
                entry.path, "setuid or setgid cannot be set: the file has another owner", is_attribute=True
            )
        return entry.mode & ~SET_ID_BITS

    def _set_xattrs(self, entry: TreeEntry, target: int | bytes, *, is_new: bool) -> None:
        wanted = dict(entry.xattrs)
        existing = xattrs_of(target)
        for name in existing:
            if name not in wanted and (not is_new or name in _ACLS):
                self._attempt(entry, name.decode(errors="replace"), partial(os.removexattr, target, name))
        for name, value in entry.xattrs:
            if existing.get(name) != value:
                self._attempt(entry, name.decode(errors="replace"), partial(os.setxattr, target, name, value))

    def _attempt(self, entry: TreeEntry, what: str, call: Callable[[], None]) -> bool:
        """Set an attribute; count it if this user or file system cannot."""
        try:
            call()
        except (OSError, OverflowError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            self._counts.unset[what] += 1
            self._counts.note(entry.path, f"{what} cannot be set: {reason.lower()}", is_attribute=True)
            return False
        return True


def xattrs_of(target: int | bytes) -> dict[bytes, bytes]:
    """Return the extended attributes of an open entry. Raises OSError."""
    return dict(read_xattrs(target, follow=True))


def make_enterable(name: bytes, folder: int) -> None:
    """Let the owner of an existing folder enter it. Raises OSError, also for a symlink."""
    descriptor = os.open(name, _PATH_FLAGS | os.O_DIRECTORY, dir_fd=folder)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.chmod(_through(descriptor), mode | 0o700)
    finally:
        os.close(descriptor)


def _through(descriptor: int) -> bytes:
    """Return a path of the very file of an O_PATH descriptor; no symlink is followed."""
    return b"/proc/self/fd/%d" % descriptor
