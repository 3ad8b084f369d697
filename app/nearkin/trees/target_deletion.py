"""Delete what a target folder contains besides the entries of a tree.

    name not in the tree -> the store? a mount point? a socket? left out by the backup? -> kept and named : deleted

Folders are deleted without recursion, through descriptors: one is open per folder in progress, and the way up is
compared by device and inode, so that a folder that is moved meanwhile is left alone.

Invariant: no folder of the store is deleted or entered, and nothing below a mount point is deleted.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from nearkin.trees.refused_folders import write_error
from nearkin.trees.store_folders import has_descriptor, is_store, open_path
from nearkin_shared.errors import BadInput
from nearkin_shared.reading.tree_reader import TreeReader

NAMES_MAX = 10_000
"""Deleted and kept entries of which the paths are kept; all are counted."""
IS_STORE = "is a folder of a store"
IS_MOUNT = "is a mount point"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Identity = tuple[int, int]
"""Device and inode."""


class KeptEntry(NamedTuple):
    """An entry of the target that is not deleted."""

    path: bytes
    reason: str


@dataclass(slots=True)
class DeletionCounts:
    """Entries that were deleted, and entries that were kept."""

    deleted: int = 0
    """Entries; one for a folder with its content."""
    deleted_paths: list[bytes] = field(default_factory=list)
    """Relative to the tree's root."""
    kept: int = 0
    """Entries that are protected: the store, mount points, sockets, and what the backup left out."""
    kept_entries: list[KeptEntry] = field(default_factory=list)
    failed: int = 0
    """Entries that could not be deleted."""
    failures: list[KeptEntry] = field(default_factory=list)

    def add_deleted(self, path: bytes) -> None:
        """Count a deleted entry."""
        self.deleted += 1
        if len(self.deleted_paths) < NAMES_MAX:
            self.deleted_paths.append(path)

    def add_kept(self, path: bytes, reason: str) -> None:
        """Count an entry that is protected."""
        self.kept += 1
        if len(self.kept_entries) < NAMES_MAX:
            self.kept_entries.append(KeptEntry(path, reason))


@dataclass(slots=True)
class _Level:
    """A folder in progress."""

    name: bytes
    path: bytes
    identity: Identity
    waiting: list[bytes]
    """Folders in it that are still to delete."""
    is_kept: bool = False
    """Whether something in it is not deleted."""


class TargetDeletion:
    """Deletes entries of one target folder."""

    def __init__(
        self,
        root: int,
        counts: DeletionCounts,
        protected: Collection[Identity],
        *,
        partial: Collection[bytes] = (),
        with_excluded: bool = False,
        is_dry: bool = False,
    ) -> None:
        """Create for the target with the descriptor `root`.

        `protected`: folders of the store. `partial`: folders of the tree of which the backup left something out.
        `is_dry`: count only.
        """
        self.counts = counts
        self._mount = mount_of(root)
        self._protected = frozenset(protected)
        self._partial = frozenset(() if with_excluded else partial)
        self._with_excluded = with_excluded
        self._is_dry = is_dry
        self._root = _identity_of(root)
        self._restored: Identity | None = None
        """The folder of the tree in progress, to which a restore gives its owner all permissions."""

    def delete_others(self, descriptor: int, folder: bytes, names: Collection[bytes]) -> None:
        """Delete what an open folder contains besides `names`; `folder`: its path in the tree."""
        others = [name for name in map(os.fsencode, os.listdir(descriptor)) if name not in names]
        if not others:
            return
        identity = _identity_of(descriptor)
        self._restored = None if identity == self._root else identity
        reason = self._protection(descriptor)
        if not reason and folder in self._partial:
            reason = "the backup left out entries of its folder"
        for name in sorted(others):
            path = folder + b"/" + name if folder else name
            if reason:
                self.counts.add_kept(path, reason)
            else:
                self.remove(name, descriptor, path)

    def _protection(self, descriptor: int) -> str:
        """Return why nothing is deleted in an open folder; empty if it may be."""
        if is_protected(descriptor, self._protected) or has_descriptor(descriptor):
            return IS_STORE
        return "" if mount_of(descriptor) == self._mount else IS_MOUNT

    def remove(self, name: bytes, folder: int, path: bytes, *, is_counted: bool = True) -> bool:
        """Delete an entry with its content; return whether nothing of it is left.

        An entry that another one replaces is not counted.
        """
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                is_gone, has_changed = self._remove_folder(name, folder, path)
            else:
                is_gone = has_changed = self._remove_file(name, folder, path, status)
        except OSError as err:
            self._fail(path, err)
            return False
        if has_changed and is_counted:
            self.counts.add_deleted(path)
        return is_gone

    def _fail(self, path: bytes, err: OSError) -> None:
        self.counts.failed += 1
        if len(self.counts.failures) < NAMES_MAX:
            self.counts.failures.append(KeptEntry(path, (err.strerror or "cannot be deleted").lower()))

    def _remove_file(self, name: bytes, folder: int, path: bytes, status: os.stat_result) -> bool:
        if stat.S_ISSOCK(status.st_mode) and not self._with_excluded:
            self.counts.add_kept(path, "is a socket, which a backup leaves out")
            return False
        self._delete(os.unlink, name, folder)
        return True

    def _delete(self, delete: Callable[..., None], name: bytes, folder: int) -> None:
        """Delete an entry by a call of `os`.

        Raises OSError, which a dry run predicts.
        """
        if not self._is_dry:
            delete(name, dir_fd=folder)
        elif not os.access(b".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
            number = write_error(folder)
            is_own = _identity_of(folder) == self._restored and os.fstat(folder).st_uid == os.geteuid()
            if number == errno.EROFS or not is_own:
                raise OSError(number, os.strerror(number))

    def _remove_folder(self, name: bytes, folder: int, path: bytes) -> tuple[bool, bool]:
        """Delete a folder; return whether it is deleted, and whether anything was.

        Raises OSError.
        """
        has_changed = False
        current = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
        levels: list[_Level] = []
        try:
            level, removed = self._enter(current, name, path)
            levels.append(level)
            has_changed |= removed
            while True:
                level = levels[-1]
                if level.waiting:
                    below = level.waiting.pop()
                    below_path = level.path + b"/" + below
                    try:
                        opened = os.open(below, _FOLDER_FLAGS, dir_fd=current)
                    except OSError as err:
                        level.is_kept = True
                        self._fail(below_path, err)
                        continue
                    os.close(current)
                    current = opened
                    entered, removed = self._enter(current, below, below_path)
                    levels.append(entered)
                    has_changed |= removed
                    continue
                levels.pop()
                if not levels:
                    break
                current = _parent_of(current, levels[-1])
                has_changed |= self._end(level, current, levels[-1])
            if level.is_kept:
                return False, has_changed
            self._delete(os.rmdir, name, folder)
            return True, True
        finally:
            os.close(current)

    def _enter(self, descriptor: int, name: bytes, path: bytes) -> tuple[_Level, bool]:
        """Delete the files of a folder; return its level, and whether there were any."""
        level = _Level(name, path, _identity_of(descriptor), [])
        reason = self._protection(descriptor)
        if reason:
            level.is_kept = True
            self.counts.add_kept(path, reason)
            return level, False
        has_removed = False
        for child in map(os.fsencode, os.listdir(descriptor)):
            child_path = path + b"/" + child
            try:
                found = os.stat(child, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    level.waiting.append(child)
                elif self._remove_file(child, descriptor, child_path, found):
                    has_removed = True
                else:
                    level.is_kept = True
            except OSError as err:
                level.is_kept = True
                self._fail(child_path, err)
        return level, has_removed

    def _end(self, level: _Level, parent_descriptor: int, parent: _Level) -> bool:
        """Delete a folder whose content is deleted; return whether it was."""
        if level.is_kept:
            parent.is_kept = True
            return False
        try:
            self._delete(os.rmdir, level.name, parent_descriptor)
        except OSError as err:
            parent.is_kept = True
            self._fail(level.path, err)
            return False
        return True


def partial_folders(reader: TreeReader, *, with_excluded: bool) -> frozenset[bytes]:
    """Return the folders of which the backup left something out.

    Raises BadInput if the tree does not list them, unless `with_excluded`.
    """
    partial = reader.summary.partial
    if with_excluded:
        return frozenset()
    if isinstance(partial, msgspec.UnsetType):
        raise BadInput(
            f"--delete: this version does not list the folders of which its backup left something out "
            f"({reader.summary.unread:,} entries unread or changed); such entries would be deleted as well: leave out "
            "--delete, or add --delete-excluded"
        )
    return frozenset(partial)


def check_target(target: Path, protected: Collection[Identity]) -> None:
    """Refuse a target that is no folder, below a file, or a folder of any store.

    Raises BadInput.
    """
    path = Path(os.path.realpath(target))
    above = next((one for one in (path, *path.parents) if os.path.exists(one)), path)
    if os.path.exists(above) and not above.is_dir():
        kind = "file" if above.is_file() else "special file"
        which = "" if above == path else f'"{above}" '
        raise BadInput(f'target "{target}": {which}is a {kind}; name a new or existing folder')
    for folder in (path, *path.parents):
        with suppress(OSError):
            descriptor = open_path(folder)
            try:
                if is_protected(descriptor, protected) or is_store(descriptor):
                    raise BadInput(f'target "{target}": is in the store "{folder}"; name a folder outside of it')
            finally:
                os.close(descriptor)


def is_protected(descriptor: int, protected: Collection[Identity]) -> bool:
    """Return whether an open folder is one of the store's."""
    return _identity_of(descriptor) in protected


def _identity_of(descriptor: int) -> Identity:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def identities(folders: Sequence[Path]) -> frozenset[Identity]:
    """Return device and inode of the folders that exist."""
    found = set()
    for folder in folders:
        with suppress(OSError):
            status = folder.stat()
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def mount_of(descriptor: int) -> int:
    """Return a number of the mount that an open file is on; a bind mount has its own."""
    with suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return int(line.partition(":")[2])
    return os.fstat(descriptor).st_dev


def _parent_of(descriptor: int, parent: _Level) -> int:
    """Close a folder and open the one that contains it.

    Raises OSError if it was moved meanwhile.
    """
    above = os.open(b"..", _FOLDER_FLAGS, dir_fd=descriptor)
    status = os.fstat(above)
    if (status.st_dev, status.st_ino) != parent.identity:
        os.close(above)
        raise OSError(0, "was moved while its content was deleted")
    os.close(descriptor)
    return above
