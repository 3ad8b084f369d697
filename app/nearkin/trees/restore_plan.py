"""Predict a restore without writing: compare the entries of a tree with the target folder.

entry missing -> new : other kind, size or mtime, or `always` -> replaced : kept
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nearkin.trees.restore_counts import (
    HAS_FILE,
    HAS_FOLDER,
    HAS_STORE,
    PROBLEMS_MAX,
    Overwrite,
    RestoreOptions,
    RestoreProblem,
    kept_folder_reason,
)
from nearkin.trees.store_folders import is_store, open_path
from nearkin.trees.target_deletion import IS_STORE, DeletionCounts, Identity, TargetDeletion, check_target
from nearkin.trees.tree_restore import check_delete, is_same_file
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import TreeReader

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class PlannedRestore:
    """The counts that a restore would have."""

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
    failed: int = 0
    """Entries that the target refuses: in another store, or where something has their name that is not replaced."""
    problems: list[RestoreProblem] = field(default_factory=list)

    @property
    def deleted(self) -> int:
        """Entries that would be deleted; one for a folder with its content."""
        return self.deletion.deleted


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
    single = tree.find(path) if path else None
    check_target(target, protected)
    partial = check_delete(tree, single, options)
    base, entries = _selected(tree, path)
    root, closed = os.fsencode(target), set[bytes]()
    with ExitStack() as stack:
        deletion: TargetDeletion | None = None
        descriptor = _open_target(root, stack) if options.delete and options.accepts is None else None
        if descriptor is not None:
            deletion = TargetDeletion(
                descriptor,
                counts.deletion,
                protected,
                partial=partial,
                with_excluded=options.delete_excluded,
                is_dry=True,
            )
        for entry in entries:
            if not entry.name or (options.accepts is not None and not options.accepts(entry)):
                continue
            place = _join(root, base, entry.path)
            if entry.folder in closed or _is_closed(entry, place, options, protected, counts):
                if entry.kind == EntryKind.FOLDER:
                    closed.add(entry.path)
                continue
            _add(entry, place, options, counts, deletion)
        if deletion is not None and descriptor is not None:
            before = len(deletion.counts.failures)
            _plan_deletion(tree, path, deletion, descriptor, closed)
            for failure in deletion.counts.failures[before:]:
                _fail(counts, failure.path, f"cannot be deleted: {failure.reason}")
    return counts


def _open_target(root: bytes, stack: ExitStack) -> int | None:
    """Return the descriptor of the target, which `stack` closes; None if it does not exist."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _fail(counts: PlannedRestore, path: bytes, reason: str) -> None:
    """Count an entry that would not be restored, or deleted."""
    counts.failed += 1
    if len(counts.problems) < PROBLEMS_MAX:
        counts.problems.append(RestoreProblem(path, reason))


def _plan_deletion(tree: TreeReader, path: bytes, deletion: TargetDeletion, root: int, closed: set[bytes]) -> None:
    """Count what is deleted in each folder of the tree that exists in the target."""
    folder, names = path, set[bytes]()
    filled, folders = {path}, list[bytes]()
    for entry in _selected(tree, path)[1]:
        if not entry.name:
            continue
        if entry.folder != folder:
            if folder not in closed:
                _plan_folder(deletion, root, path, folder, names)
            folder, names = entry.folder, set()
            filled.add(folder)
        names.add(entry.name)
        if entry.kind == EntryKind.FOLDER and entry.path not in closed:
            folders.append(entry.path)
    if folder not in closed:
        _plan_folder(deletion, root, path, folder, names)
    for empty in folders:
        if empty not in filled:
            _plan_folder(deletion, root, path, empty, set())


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


def _is_closed(
    entry: TreeEntry, path: bytes, options: RestoreOptions, protected: Collection[Identity], counts: PlannedRestore
) -> bool:
    """Count a folder that would not be restored; return whether it is one."""
    if entry.kind != EntryKind.FOLDER:
        return False
    with suppress(OSError):
        exists = os.lstat(path)
        if (exists.st_dev, exists.st_ino) in protected:
            counts.deletion.add_kept(entry.path, IS_STORE)
            return True
        if stat.S_ISDIR(exists.st_mode) and _is_store(path):
            _fail(counts, entry.path, HAS_STORE)
            return True
        if not stat.S_ISDIR(exists.st_mode):
            if options.overwrite == Overwrite.NEVER:
                counts.kept_files += 1
                _fail(counts, entry.path, HAS_FILE)
                return True
            counts.replaced += 1
    return False


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


def _join(root: bytes, base: bytes, path: bytes) -> bytes:
    relative = path[len(base) :].lstrip(b"/") if base else path
    return os.path.join(root, relative) if relative else root


def _add(
    entry: TreeEntry, path: bytes, options: RestoreOptions, counts: PlannedRestore, deletion: TargetDeletion | None
) -> None:
    exists = None
    with suppress(OSError):
        exists = os.lstat(path)
    if entry.kind == EntryKind.FOLDER:
        counts.folders += 1
        return
    if exists is not None:
        if _is_kept(entry, exists, options.overwrite):
            counts.kept_files += 1
            return
        if stat.S_ISDIR(exists.st_mode):
            reason = _refusal(entry, path, deletion) if options.delete else HAS_FOLDER
            if reason:
                _fail(counts, entry.path, reason)
                return
        counts.replaced += 1
    if entry.kind == EntryKind.FILE:
        counts.files += 1
        counts.bytes += entry.content_bytes
    else:
        counts.others += 1


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
