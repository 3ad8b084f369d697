"""Compare two trees, or folders of them, entry by entry.

Both are read as streams in the order of their entries, so that memory is bounded. Inode and ctime, which no restore
keeps, are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

_CONTENT_KINDS = (EntryKind.FILE, EntryKind.HARD_LINK)


class ChangeKind(StrEnum):
    """How an entry differs; the values are those of restic."""

    ADDED = "+"
    REMOVED = "-"
    CONTENT = "M"
    """Content of a file, target of a link, number of a device; attributes may differ too."""
    METADATA = "U"
    """Mode, owner, group, mtime or extended attributes alone."""
    TYPE = "T"


class TreeSide(NamedTuple):
    """A folder or file of a tree to compare."""

    tree: TreeReader
    path: bytes = b""
    """Empty: the whole tree."""


class TreeChange(NamedTuple):
    """A difference between two trees."""

    kind: ChangeKind
    path: bytes
    """Relative to the compared folders; empty: the folder or file itself."""
    before: TreeEntry | None
    after: TreeEntry | None


class _Keyed(NamedTuple):
    key: tuple[bytes, bytes]
    path: bytes
    placed: PlacedEntry


def compare_trees(before: TreeSide, after: TreeSide) -> Iterator[TreeChange]:
    """Yield the differences in the order of entries. Raises NotFound, Corrupt."""
    olds, news = _stream(before), _stream(after)
    old, new = next(olds, None), next(news, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old.key < new.key):
            assert old is not None  # the loop's condition
            yield TreeChange(ChangeKind.REMOVED, old.path, old.placed.entry, None)
            old = next(olds, None)
        elif old is None or new.key < old.key:
            yield TreeChange(ChangeKind.ADDED, new.path, None, new.placed.entry)
            new = next(news, None)
        else:
            kind = _change_kind(before.tree, old.placed, after.tree, new.placed)
            if kind is not None:
                yield TreeChange(kind, new.path, old.placed.entry, new.placed.entry)
            old, new = next(olds, None), next(news, None)


def _stream(side: TreeSide) -> Iterator[_Keyed]:
    if not side.path:
        for placed in side.tree.entries():
            entry = placed.entry
            yield _Keyed((sort_key(entry.folder), entry.name), entry.path, placed)
        return
    root = side.tree.find(side.path)
    yield _Keyed((b"", b""), b"", root)
    start = len(side.path) + 1
    if root.entry.kind == EntryKind.FOLDER:
        for placed in side.tree.below(side.path):
            entry = placed.entry
            yield _Keyed((sort_key(entry.folder[start:]), entry.name), entry.path[start:], placed)


def _change_kind(before: TreeReader, old: PlacedEntry, after: TreeReader, new: PlacedEntry) -> ChangeKind | None:
    first, second = old.entry, new.entry
    if first.kind != second.kind and not (first.kind in _CONTENT_KINDS and second.kind in _CONTENT_KINDS):
        return ChangeKind.TYPE
    if first.kind in _CONTENT_KINDS:
        # of two links to the same path the target's own entry shows a change of content
        is_same_link = first.kind == second.kind == EntryKind.HARD_LINK and first.target == second.target
        if not is_same_link and _content(before.content_of(old).entry) != _content(after.content_of(new).entry):
            return ChangeKind.CONTENT
    elif (first.target, first.size) != (second.target, second.size):
        return ChangeKind.CONTENT
    return None if _attributes(first) == _attributes(second) else ChangeKind.METADATA


def _content(entry: TreeEntry) -> tuple[object, ...]:
    return entry.size, entry.digest, entry.extents


def _attributes(entry: TreeEntry) -> tuple[object, ...]:
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.xattrs, entry.target
