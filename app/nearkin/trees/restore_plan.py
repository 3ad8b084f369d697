"""Predict a restore without writing: compare the entries of a tree with the target folder.

entry missing -> new : other kind, size or mtime, or `always` -> replaced : kept
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nearkin.trees.refused_folders import FolderRefusal
from nearkin.trees.restore_counts import (
    HAS_FILE,
    HAS_FOLDER,
    HAS_STORE,
    FailureCounts,
    Overwrite,
    RestoreOptions,
    kept_folder_reason,
    reason_of,
)
from nearkin.trees.store_folders import is_store, open_path
from nearkin.trees.target_access import TargetAccess, check_creatable
from nearkin.trees.target_deletion import IS_STORE, DeletionCounts, Identity, TargetDeletion, check_target
from nearkin.trees.tree_restore import check_delete, is_same_file
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import TreeReader

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


PlannedAction = Literal["new", "replaced", "kept"]


@dataclass(slots=True)
class PlannedRestore(FailureCounts):
    """The counts that a restore would have; failures are what the target refuses."""

    files: int = 0
    """Files that would be written."""
    folders: int = 0
    others: int = 0
    replaced: int = 0
    """Existing entries that would be replaced; they are among the other counts too."""
    kept_files: int = 0
    """Existing entries that would be kept."""
    deletion: DeletionCounts = field(default_factory=DeletionCounts)
    """Entries of restored folders that `--delete` would delete, or keep."""
    bytes: int = 0
    """Content that would be written."""
    on_entry: Callable[[PlannedAction, TreeEntry], None] | None = None
    """Called for each entry that would be written or kept, except existing folders."""

    @property
    def deleted(self) -> int:
        """Entries that would be deleted; one for a folder with its content."""
        return self.deletion.deleted

    def report(self, action: PlannedAction, entry: TreeEntry) -> None:
        """Report what a restore would do with an entry."""
        if self.on_entry is not None:
            self.on_entry(action, entry)


def plan_restore(
    tree: TreeReader,
    path: bytes,
    target: Path,
    options: RestoreOptions,
    counts: PlannedRestore,
    *,
    protected: Collection[Identity] = (),
) -> PlannedRestore:
    """Count what a restore of a tree, or of the folder or file `path` in it, would do.

    `protected`: folders of the store. Raises NotFound, BadInput.
    """
    single = tree.find_named(path) if path else None
    check_target(target, protected)
    partial = check_delete(tree, single, options)
    base, entries = _selected(tree, path)
    check_creatable(target)
    root = os.fsencode(target)
    with ExitStack() as stack:
        planner = _Planner(root, base, options, counts, protected)
        descriptor = _open_target(root, stack) if options.delete and options.accepts is None else None
        if descriptor is not None:
            planner.deletion = TargetDeletion(
                descriptor,
                counts.deletion,
                protected,
                partial=partial,
                with_excluded=options.delete_excluded,
                is_dry=True,
            )
        for entry in entries:
            if entry.name and (options.accepts is None or options.accepts(entry)):
                planner.add(entry)
        if planner.deletion is not None and descriptor is not None:
            _plan_deletion(tree, path, planner.deletion, descriptor, planner.closed, counts)
    return counts


class _Planner:
    """Counts what the restore of each entry would do."""

    def __init__(
        self,
        root: bytes,
        base: bytes,
        options: RestoreOptions,
        counts: PlannedRestore,
        protected: Collection[Identity],
    ) -> None:
        self.deletion: TargetDeletion | None = None
        self.closed = set[bytes]()
        """Folders of the tree that would not be restored, nor what is below them."""
        self._root = root
        self._base = base
        self._options = options
        self._counts = counts
        self._protected = protected
        self._access = TargetAccess(root)

    def add(self, entry: TreeEntry) -> None:
        """Count one entry; its folder comes before it."""
        is_folder = entry.kind == EntryKind.FOLDER
        if entry.folder in self.closed:
            if is_folder:
                self.closed.add(entry.path)
            return
        if self._is_refused(self._access.opening(self._relative(entry.folder)), entry):
            return
        relative = self._relative(entry.path)
        place, exists = os.path.join(self._root, relative), None
        with suppress(OSError):
            exists = os.lstat(place)
        if is_folder and exists is not None and self._is_closed(entry, place, exists):
            self.closed.add(entry.path)
        elif is_folder:
            self._add_folder(entry, relative, exists)
        else:
            self._add_other(entry, place, exists)

    def _relative(self, path: bytes) -> bytes:
        return path[len(self._base) :].lstrip(b"/") if self._base else path

    def _is_refused(self, refusal: FolderRefusal | None, entry: TreeEntry) -> bool:
        """Count an entry that a folder of the target refuses; return whether one does."""
        if refusal is None:
            return False
        folder = b"/".join(filter(None, (self._base, refusal.folder)))
        self._counts.fail_below(folder, reason_of(refusal), entry.path)
        return True

    def _is_closed(self, entry: TreeEntry, place: bytes, exists: os.stat_result) -> bool:
        """Count a folder whose content would not be restored either; return whether it is one."""
        if (exists.st_dev, exists.st_ino) in self._protected:
            self._counts.deletion.add_kept(entry.path, IS_STORE)
            return True
        if not stat.S_ISDIR(exists.st_mode):
            if self._options.overwrite == Overwrite.NEVER:
                self._counts.kept_files += 1
                self._counts.fail(entry.path, HAS_FILE)
                return True
            return False
        with suppress(OSError):
            if _is_store(place):
                self._counts.fail(entry.path, HAS_STORE)
                return True
        return False

    def _add_folder(self, entry: TreeEntry, relative: bytes, exists: os.stat_result | None) -> None:
        if exists is not None and stat.S_ISDIR(exists.st_mode):
            reason = self._access.enter(relative, exists)
            if reason:
                self._counts.fail_folder(entry.path, reason)
                return
            self._is_refused(self._access.opening(relative), entry)  # then it has no attributes
        elif self._is_refused(self._access.writing(self._relative(entry.folder)), entry):
            return
        elif exists is not None:
            self._counts.replaced += 1
            self._counts.report("replaced", entry)
        else:
            self._counts.report("new", entry)
        self._counts.folders += 1

    def _add_other(self, entry: TreeEntry, place: bytes, exists: os.stat_result | None) -> None:
        counts = self._counts
        if exists is not None:
            if _is_kept(entry, exists, self._options.overwrite):
                counts.kept_files += 1
                counts.report("kept", entry)
                return
            if stat.S_ISDIR(exists.st_mode):
                reason = _refusal(entry, place, self.deletion) if self._options.delete else HAS_FOLDER
                if reason:
                    counts.fail(entry.path, reason)
                    return
        if self._is_refused(self._access.writing(self._relative(entry.folder)), entry):
            return
        counts.replaced += exists is not None
        counts.report("new" if exists is None else "replaced", entry)
        if entry.kind == EntryKind.FILE:
            counts.files += 1
            counts.bytes += entry.content_bytes
        else:
            counts.others += 1


def _open_target(root: bytes, stack: ExitStack) -> int | None:
    """Return the descriptor of the target, which `stack` closes; None if it does not exist."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _plan_deletion(
    tree: TreeReader, path: bytes, deletion: TargetDeletion, root: int, closed: set[bytes], counts: PlannedRestore
) -> None:
    """Count what is deleted in each folder of the tree that exists in the target."""

    def plan_folder(folder: bytes, names: set[bytes]) -> None:
        before = counts.deletion.failed
        _plan_folder(deletion, root, path, folder, names)
        counts.fail_deletions(folder, counts.deletion, before)

    folder, names = path, set[bytes]()
    filled, folders = {path}, list[bytes]()
    for entry in _selected(tree, path)[1]:
        if not entry.name:
            continue
        if entry.folder != folder:
            if folder not in closed:
                plan_folder(folder, names)
            folder, names = entry.folder, set()
            filled.add(folder)
        names.add(entry.name)
        if entry.kind == EntryKind.FOLDER and entry.path not in closed:
            folders.append(entry.path)
    if folder not in closed:
        plan_folder(folder, names)
    for empty in folders:
        if empty not in filled:
            plan_folder(empty, set())


def _plan_folder(deletion: TargetDeletion, root: int, base: bytes, folder: bytes, names: set[bytes]) -> None:
    relative = folder[len(base) :].lstrip(b"/") if base else folder
    descriptor = os.dup(root)
    try:
        for part in relative.split(b"/") if relative else ():
            below = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        deletion.delete_others(descriptor, folder, names)
    except OSError:  # it does not exist yet, or a file is to be replaced by it
        return
    finally:
        os.close(descriptor)


def _is_store(path: bytes) -> bool:
    """Return whether a folder is a store. Raises OSError."""
    descriptor = open_path(path, follow_symlinks=False)
    try:
        return is_store(descriptor)
    finally:
        os.close(descriptor)


def selected_bytes(tree: TreeReader, path: bytes, options: RestoreOptions) -> int:
    """Return the bytes of content that a restore into a new folder would write.

    Raises NotFound.
    """
    if not path and options.accepts is None:
        return tree.content_bytes
    accepts = options.accepts
    return sum(entry.content_bytes for entry in _selected(tree, path)[1] if accepts is None or accepts(entry))


def _selected(tree: TreeReader, path: bytes) -> tuple[bytes, Iterator[TreeEntry]]:
    """Return the folder of the tree that becomes the target, and the entries to restore."""
    single = tree.find(path).entry if path else None
    if single is not None and single.kind != EntryKind.FOLDER:
        return single.folder, iter((single,))
    return path, (placed.entry for placed in tree.below(path))


def _refusal(entry: TreeEntry, path: bytes, deletion: TargetDeletion | None) -> str:
    """Return why a folder that has the name of a file cannot be replaced; empty if it can."""
    if deletion is None:
        return ""
    before = len(deletion.counts.failures)
    with suppress(OSError):
        parent = open_path(os.path.dirname(path))
        try:
            if not deletion.remove(entry.name, parent, entry.path, is_counted=False):
                return kept_folder_reason(deletion.counts.failures[before:])
        finally:
            os.close(parent)
    return ""


def _is_kept(entry: TreeEntry, exists: os.stat_result, overwrite: Overwrite) -> bool:
    if overwrite == Overwrite.NEVER:
        return True
    return is_same_file(entry, exists, overwrite) and (
        exists.st_nlink == 1
        or (stat.S_IMODE(exists.st_mode), exists.st_uid, exists.st_gid) == (entry.mode, entry.uid, entry.gid)
    )
