"""Predict which folders of a target refuse the entries of a restore.

    folder, or the one that it would be made in -> cannot be opened, or written -> FolderRefusal, as of the restore

The restore lets its user enter a folder of his own that the tree has; such a folder is no reason.

The target itself is such a folder too: `open_for_owner` changes its mode, and nothing else here changes anything.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nearkin.trees.refused_folders import FolderRefusal, write_error
from nearkin_shared.errors import BadInput

CAP_FOWNER = 3
"""Number of the capability to change the mode of other users' files (capabilities(7))."""


class _Answer(NamedTuple):
    """The answer for one folder of the target; `path` counts from the target."""

    path: bytes
    opening: FolderRefusal | None
    writing: FolderRefusal | None


class TargetAccess:
    """Examines the folders of one target; the answer for the last one is kept."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._enterable: set[bytes] = set()
        """Folders to which the restore gives its user all permissions."""
        self._last: _Answer | None = None
        self._may_change_modes = _has_capability(CAP_FOWNER)
        with suppress(OSError):
            if is_opened_for_owner(root):
                self._enterable.add(b"")

    def opening(self, path: bytes) -> FolderRefusal | None:
        """Return why the entries of a folder, which may be missing, cannot be examined."""
        return self._examine(path).opening

    def writing(self, path: bytes) -> FolderRefusal | None:
        """Return why no entry can be written into a folder, which may be missing."""
        return self._examine(path).writing

    def enter(self, path: bytes, status: os.stat_result) -> str:
        """Return why the restore cannot enter an existing folder of the tree.

        Empty if it can; the folder is then known as one that it may write.
        """
        if status.st_mode & stat.S_IRWXU == stat.S_IRWXU:
            return ""
        number = write_error(os.path.join(self._root, path))
        if number != errno.EROFS:
            if status.st_uid == os.geteuid() or self._may_change_modes:
                self._enterable.add(path)
                self._last = None
                return ""
            number = errno.EPERM
        return os.strerror(number).lower()

    def _examine(self, path: bytes) -> _Answer:
        if self._last is None or self._last.path != path:
            self._last = self._ask(path)
        return self._last

    def _ask(self, path: bytes) -> _Answer:
        """Examine the folders from the target down to the first that would be made."""
        place, last = self._root, b""
        parts = path.split(b"/") if path else []
        for depth in range(len(parts) + 1):
            below = b"/".join(parts[:depth])
            at = os.path.join(self._root, below) if below else self._root
            try:
                status = os.lstat(at) if below else os.stat(at)
            except OSError:
                break
            if not stat.S_ISDIR(status.st_mode):
                break
            if below not in self._enterable and not _has_access(at, os.R_OK | os.X_OK):
                refusal = _refusal("opened", errno.EACCES, below)
                return _Answer(path, refusal, refusal)
            place, last = at, below
        writing = None
        if last not in self._enterable and not _has_access(place, os.W_OK | os.X_OK) and os.path.lexists(place):
            writing = _refusal("written", write_error(place), last)
        return _Answer(path, None if last == path else writing, writing)


def is_opened_for_owner(target: bytes | Path) -> bool:
    """Return whether a restore must change the mode of its target.

    Raises OSError.
    """
    return (
        os.stat(target).st_uid == os.geteuid()
        and not _has_access(target, os.R_OK | os.W_OK | os.X_OK)
        and write_error(target) != errno.EROFS
    )


def open_for_owner(target: Path) -> int | None:
    """Give the owner of a target all permissions; return its mode before, if it changes.

    Raises OSError.
    """
    if not is_opened_for_owner(target):
        return None
    mode = stat.S_IMODE(target.stat().st_mode)
    target.chmod(mode | stat.S_IRWXU)
    return mode


def check_creatable(target: Path) -> None:
    """Refuse a target that cannot be opened, or made if it does not exist. Raises BadInput."""
    path = Path(os.path.realpath(target))
    above = next(one for one in (path, *path.parents) if one.exists())
    if not _has_access(above, (os.R_OK if above == path else os.W_OK) | os.X_OK):
        number = errno.EACCES if above == path else write_error(above)
        raise BadInput(f'target "{target}": {os.strerror(number)}; name a new or existing folder')


def _refusal(what: str, number: int, path: bytes) -> FolderRefusal:
    return FolderRefusal(number, f"cannot be {what}: {os.strerror(number).lower()}", path)


def _has_access(place: bytes | Path, mode: int) -> bool:
    return os.access(place, mode, effective_ids=True)


def _has_capability(number: int) -> bool:
    """Return whether this process has a capability; False on systems other than Linux."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            text = next(line for line in file if line.startswith("CapEff:"))
        return bool(int(text.split()[1], 16) >> number & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return os.geteuid() == 0
