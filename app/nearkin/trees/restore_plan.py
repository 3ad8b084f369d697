"""Predict a restore without writing: compare the entries of a tree with the target folder.

entry missing -> new : other kind, size or mtime, or `always` -> replaced : kept
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nearkin.trees.attributes import KINDS
from nearkin.trees.tree_restore import Overwrite, RestoreOptions
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import TreeReader


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
    deleted: int = 0
    """Entries of restored folders that `--delete` would delete; one for a folder with its content."""
    bytes: int = 0
    """Content that would be written."""


def plan_restore(
    tree: TreeReader, path: bytes, target: Path, options: RestoreOptions, counts: PlannedRestore
) -> PlannedRestore:
    """Count what a restore of a tree, or of the folder or file `path` in it, would do.

    Raises NotFound.
    """
    base, entries = _selected(tree, path)
    root, folder, names = os.fsencode(target), base, set[bytes]()
    deletes = options.delete and options.accepts is None
    for entry in entries:
        if not entry.name or (options.accepts is not None and not options.accepts(entry)):
            continue
        if deletes and entry.folder != folder:
            _count_others(root, base, folder, names, counts)
            folder, names = entry.folder, set()
        names.add(entry.name)
        _add(entry, _join(root, base, entry.path), options, counts)
    if deletes:
        _count_others(root, base, folder, names, counts)
        _count_in_empty_folders(tree, path, root, base, counts)
    return counts


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
    if overwrite != Overwrite.IF_CHANGED:
        return overwrite == Overwrite.NEVER
    return entry.kind == EntryKind.FILE == KINDS.get(stat.S_IFMT(exists.st_mode)) and (
        exists.st_size,
        exists.st_mtime_ns,
    ) == (entry.size, entry.mtime_ns)


def _count_others(root: bytes, base: bytes, folder: bytes, names: set[bytes], counts: PlannedRestore) -> None:
    """Count the entries of a target folder that the tree's folder does not have."""
    path = _join(root, base, folder)
    with suppress(OSError):
        if not os.path.islink(path) or path == root:
            counts.deleted += sum(name not in names for name in os.listdir(path))


def _count_in_empty_folders(tree: TreeReader, path: bytes, root: bytes, base: bytes, counts: PlannedRestore) -> None:
    """Count the entries of target folders that are empty in the tree."""
    parents: set[bytes] = set()
    folders: list[bytes] = []
    for entry in _selected(tree, path)[1]:
        parents.add(entry.folder)
        if entry.kind == EntryKind.FOLDER and entry.name:
            folders.append(entry.path)
    for folder in folders:
        if folder not in parents:
            _count_others(root, base, folder, set(), counts)
