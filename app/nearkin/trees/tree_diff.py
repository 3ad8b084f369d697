"""Compare two trees, or folders of them, entry by entry.

Both are read as streams in the order of their entries, so that memory is bounded. Inode and ctime, which no restore
keeps, are not compared. Contents are compared by digest; those of two files of one size with other holes are read up to
the first difference, since the digests are of their data alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

COMPARED_BYTES = 4 << 20
"""Content that is read at once of each of two files with other holes."""
_CONTENT_KINDS = (EntryKind.FILE, EntryKind.HARD_LINK)


class ChangeKind(StrEnum):
    """How an entry differs; the values are those of restic."""

    ADDED = "+"
    REMOVED = "-"
    CONTENT = "M"
    """Content of a file, target of a link, number of a device; attributes may differ too."""
    HOLES = "H"
    """The same content of a file with other holes; attributes may differ too."""
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
    root = side.tree.find_named(side.path)
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
        if not is_same_link:
            olds, news = before.content_of(old), after.content_of(new)
            if olds.entry.extents != news.entry.extents and olds.entry.size == news.entry.size:
                return ChangeKind.HOLES if _is_same_content(before, olds, after, news) else ChangeKind.CONTENT
            if (olds.entry.size, olds.entry.digest) != (news.entry.size, news.entry.digest):
                return ChangeKind.CONTENT
    elif (first.target, first.size) != (second.target, second.size):
        return ChangeKind.CONTENT
    return None if _attributes(first) == _attributes(second) else ChangeKind.METADATA


def _is_same_content(before: TreeReader, old: PlacedEntry, after: TreeReader, new: PlacedEntry) -> bool:
    """Return whether two files of one size have the same bytes, holes read as zeros."""
    contents = _FileContent(before, old), _FileContent(after, new)
    borders = sorted({0, old.entry.size, *contents[0].borders, *contents[1].borders})
    for start, stop in pairwise(borders):
        for position in range(start, stop, COMPARED_BYTES):
            end = min(stop, position + COMPARED_BYTES)
            first, second = (content.read(position, end) for content in contents)
            if first is None and second is None:
                break  # a hole of both
            if (first or bytes(end - position)) != (second or bytes(end - position)):
                return False
    return True


class _FileContent:
    """Reads ascending ranges of a file, each within a hole or within data."""

    def __init__(self, tree: TreeReader, placed: PlacedEntry) -> None:
        entry = placed.entry
        extents = ((0, entry.size),) if entry.extents is None else entry.extents
        self._tree = tree
        self._extents = iter(extents)
        self._extent = next(self._extents, (entry.size, 0))
        self._placed_at, self._stop = placed.start, placed.stop
        self._ahead_at, self._ahead = placed.start, b""
        self.borders = [border for offset, length in extents for border in (offset, offset + length)]

    def read(self, start: int, stop: int) -> bytes | None:
        """Return the bytes [start, stop); None in a hole."""
        while sum(self._extent) <= start:
            following = next(self._extents, None)
            if following is None:
                return None
            self._placed_at += self._extent[1]
            self._extent = following
        offset = self._extent[0]
        if start < offset:
            return None
        return self._read_data(self._placed_at + start - offset, self._placed_at + stop - offset)

    def _read_data(self, start: int, stop: int) -> bytes:
        """Return bytes of the blob; short extents are read together."""
        if stop > self._ahead_at + len(self._ahead):
            self._ahead_at = start
            self._ahead = self._tree.read_range(start, min(self._stop, start + COMPARED_BYTES))
        return self._ahead[start - self._ahead_at : stop - self._ahead_at]


def _attributes(entry: TreeEntry) -> tuple[object, ...]:
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.xattrs, entry.target
