"""Recognise further names of files during the walk of a tree.

A file with several names is known by device and inode. It is forgotten once all its names were seen, so that memory is
needed only for files with names that the walk has not reached.

Invariant: a name is a link only to a file of its size and mtime: an inode may be used again while a tree is walked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(slots=True)
class _LinkedFile:
    path: bytes
    """In the tree, of the first name."""
    size: int
    mtime_ns: int
    names_left: int
    """Names that were not seen yet."""

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a status may be of this file."""
        return (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)


class HardLinks:
    """The files with several names that a walk has met."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _LinkedFile] = {}

    def __len__(self) -> int:
        """Return how many files have names that were not seen yet."""
        return len(self._files)

    def add(self, status: os.stat_result, path: bytes) -> None:
        """Note the first name of a file; one without others is not kept."""
        if status.st_nlink > 1:
            found = _LinkedFile(path, status.st_size, status.st_mtime_ns, status.st_nlink - 1)
            self._files[status.st_dev, status.st_ino] = found

    def find(self, status: os.stat_result) -> bytes | None:
        """Return the path of the first name of a file; None if this is the first.

        Each name is looked up once.
        """
        identity = (status.st_dev, status.st_ino)
        found = self._files.get(identity)
        if found is None:
            return None
        if not found.is_of(status):  # another file has the inode now, or the file changed since
            del self._files[identity]
            return None
        found.names_left -= 1
        if found.names_left <= 0:
            del self._files[identity]
        return found.path
