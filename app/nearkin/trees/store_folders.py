"""Recognise folders that are stores by their descriptors.

    nearkin.json is a regular file -> a descriptor of any version? a damaged one next to objects? -> a store

Entries of a tree are not restored into a store. The name alone proves nothing: a tree may contain a folder of that
name, and any user may make a file of that name in a folder such as /tmp.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nearkin_shared.errors import Corrupt, FormatTooNew, WrongKey
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.objectstore.read_only import ReadOnlyObjectStore
from nearkin_shared.storage import descriptor

_NAME = os.fsencode(descriptor.NAME)
_OBJECT_FOLDERS = (b"containers", b"manifests")
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""O_PATH: a folder that may be entered need not be readable."""


class _ReadDescriptor(ReadOnlyObjectStore):
    """The descriptor of a folder, whose bytes were read through the open folder."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Path(os.devnull))
        self._data = data

    def get(self, name: str) -> bytes:
        """Return the bytes."""
        del name
        return self._data


def is_descriptor(entry: TreeEntry) -> bool:
    """Return whether a file of a tree has the name of a descriptor."""
    return entry.name == _NAME and entry.kind in (EntryKind.FILE, EntryKind.HARD_LINK)


def has_descriptor(folder: int) -> bool:
    """Return whether an open folder has the descriptor of a store, made by any user."""
    return _descriptor_owner(folder) is not None


def is_store(folder: int) -> bool:
    """Return whether an open folder is the root of any store.

    In a folder with the sticky bit, such as /tmp, a descriptor of another user makes no store: that user could refuse
    every restore below it.
    """
    owner = _descriptor_owner(folder)
    if owner is None:
        return False
    status = os.fstat(folder)
    return not status.st_mode & stat.S_ISVTX or owner in (status.st_uid, os.geteuid())


def open_path(path: bytes | Path, *, follow_symlinks: bool = True) -> int:
    """Return a descriptor of a folder that need not be readable. Raises OSError."""
    return os.open(path, _FOLDER_FLAGS | (0 if follow_symlinks else os.O_NOFOLLOW))


def _descriptor_owner(folder: int) -> int | None:
    """Return the user id of the descriptor that makes a folder a store; None if none does."""
    try:
        status = os.stat(_NAME, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or not (_is_parsed(_read(folder)) or _has_objects(folder)):
        return None
    return status.st_uid


def _read(folder: int) -> bytes:
    """Return the bytes of the descriptor; none if it cannot be read."""
    try:
        file = os.open(_NAME, _FILE_FLAGS, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(file, descriptor.BYTES_MAX + 1)
    except OSError:
        return b""
    finally:
        os.close(file)


def _is_parsed(data: bytes) -> bool:
    """Return whether bytes are a descriptor, possibly of a later format or an encrypted store."""
    try:
        descriptor.read(_ReadDescriptor(data), None)
    except (FormatTooNew, WrongKey):
        return True
    except Corrupt:
        return False
    return True


def _has_objects(folder: int) -> bool:
    """Return whether a folder has objects, which a damaged descriptor belongs to."""
    for name in _OBJECT_FOLDERS:
        try:
            os.stat(name, dir_fd=folder)
        except OSError:
            continue
        return True
    return False
