"""Predict a restore without writing: compare the entries of a tree with the target folder.

entry missing -> new : other kind, size or mtime, or `always` -> replaced : kept
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nearkin.trees.restore_counts import Overwrite, RestoreOptions
from nearkin.trees.target_deletion import IS_STORE, DeletionCounts, Identity, TargetDeletion, check_target
from nearkin.trees.tree_restore import check_delete, is_same_file
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.storage.descriptor import NAME as STORE_DESCRIPTOR

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
    for entry in entries:
        if not entry.name or (options.accepts is not None and not options.accepts(entry)):
            continue
        if entry.folder in closed or _is_closed(entry, _join(root, base, entry.path), options, protected, counts):
            if entry.kind == EntryKind.FOLDER:
                closed.add(entry.path)
            continue
        _add(entry, _join(root, base, entry.path), options, counts)
    if options.delete and options.accepts is None:
        with suppress(OSError):
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                deletion = TargetDeletion(
                    descriptor,
                    counts.deletion,
                    protected,
                    partial=partial,
                    with_excluded=options.delete_excluded,
                    is_dry=True,
                )
                _plan_deletion(tree, path, deletion, descriptor, closed)
            finally:
                os.close(descriptor)
    return counts


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
            return True
        if stat.S_ISDIR(exists.st_mode) and os.path.lexists(os.path.join(path, os.fsencode(STORE_DESCRIPTOR))):
            counts.deletion.add_kept(entry.path, IS_STORE)
            return True
        if not stat.S_ISDIR(exists.st_mode):
            if options.overwrite == Overwrite.NEVER:
                counts.kept_files += 1
                return True
            counts.replaced += 1
    return False


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


def _add(entry: TreeEntry, path: bytes, options: RestoreOptions, counts: PlannedRestore) -> None:
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
        counts.replaced += 1
    if entry.kind == EntryKind.FILE:
        counts.files += 1
        counts.bytes += entry.content_bytes
    else:
        counts.others += 1


def _is_kept(entry: TreeEntry, exists: os.stat_result, overwrite: Overwrite) -> bool:
    if overwrite == Overwrite.NEVER:
        return True
    return is_same_file(entry, exists, overwrite) and (
        exists.st_nlink == 1
        or (stat.S_IMODE(exists.st_mode), exists.st_uid, exists.st_gid) == (entry.mode, entry.uid, entry.gid)
    )
