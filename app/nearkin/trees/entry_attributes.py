"""Give restored entries their owner, mode, extended attributes and times.

Every call uses a descriptor of the entry itself, never its name: another user who may write to the folder could replace
it by another file meanwhile. Entries that cannot be opened without an effect have a descriptor of O_PATH.

Invariant: no attribute is set on a file that this restore did not open, and none through a symlink.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
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
        lost_bits = self._set_owner(entry, target, os.fstat(descriptor))
        if entry.kind != EntryKind.SYMLINK:
            self._set_mode(entry, target, descriptor, lost_bits)
        self._set_xattrs(entry, target, is_new=is_new)
        self._attempt(entry, "time", lambda: os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns)))

    def _set_owner(self, entry: TreeEntry, target: int | bytes, status: os.stat_result) -> int:
        """Set owner and group; return the set-id bits that would act for another owner or group.

        A user may give a file to a group that he is in, even if he may not give it to another owner.
        """
        is_owned, is_of_group = status.st_uid == entry.uid, status.st_gid == entry.gid
        if is_owned and is_of_group:
            return 0
        if not is_owned:
            with suppress(OSError, OverflowError):
                os.chown(target, entry.uid, entry.gid)
                return 0
            is_owned = self._attempt(entry, "owner", lambda: os.chown(target, entry.uid, -1))
        if not is_of_group:
            is_of_group = self._attempt(entry, "group", lambda: os.chown(target, -1, entry.gid))
        return (0 if is_owned else stat.S_ISUID) | (0 if is_of_group else stat.S_ISGID)

    def _set_mode(self, entry: TreeEntry, target: int | bytes, descriptor: int, lost_bits: int) -> None:
        """Set the mode without `lost_bits`; report the set-id bits that are not set."""
        wanted = entry.mode & ~lost_bits
        is_set = self._attempt(entry, "mode", lambda: os.chmod(target, wanted))
        lost = entry.mode & lost_bits
        if is_set and wanted & SET_ID_BITS:  # the kernel drops setgid without an error
            lost |= wanted & ~os.fstat(descriptor).st_mode & SET_ID_BITS
        if lost:
            self._counts.unset["setuid or setgid"] += 1
            reason = "setuid or setgid cannot be set: the file has another owner or group"
            self._counts.note(entry.path, reason, is_attribute=True)

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
