"""Sort the members of a tar archive into the order of a tree, on disk.

    member -> (folder, name) -> node        a later member of the same name replaces an earlier one
    hard link -> the node of its target at that point of the archive

Invariant: every entry is in a folder, and memory is bounded whatever the number of members is.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from nearkin.trees.tar_members import TarMember, UnusableMember
from nearkin.trees.tar_spool import has_room
from nearkin_shared.errors import BadInput, NoRoom
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key

ENTRIES_MAX = 100_000_000
ROOM_CHECK_ENTRIES = 16_384
"""Entries between two looks at the free space: 70 MB at most, with paths of 4,096 bytes."""
CACHE_KIB = 64 << 10
KNOWN_FOLDERS_MAX = 10_000
IMPLIED_MODE = 0o755
"""Of a folder without a member of its own."""
_SCHEMA = f"""
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB}; PRAGMA locking_mode = EXCLUSIVE;
CREATE TABLE entry(folder BLOB, name BLOB, kind INTEGER, node INTEGER, PRIMARY KEY(folder, name)) WITHOUT ROWID;
CREATE TABLE node(id INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE shared(id INTEGER PRIMARY KEY);
CREATE TABLE first(id INTEGER PRIMARY KEY, path BLOB);
BEGIN;
"""


class _Node(msgspec.Struct, array_like=True, frozen=True):
    """The properties that all names of one file share."""

    kind: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    target: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]
    extents: tuple[tuple[int, int], ...] | None
    start: int
    content_bytes: int


class IndexedEntry(NamedTuple):
    """An entry of the tree, without its digest, and where its content is in the archive."""

    entry: TreeEntry
    start: int
    content_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Node).decode


class TarIndex:
    """The members of one archive: one thread fills it, another may read it afterwards."""

    def __init__(self, temporary: Path | None = None) -> None:
        """`temporary`: folder of its file, by default that of TMPDIR. Raises BadInput."""
        try:
            descriptor, path = tempfile.mkstemp(prefix="nearkin-import-", dir=temporary)
        except OSError as err:
            raise BadInput(f"temporary folder {str(temporary or tempfile.gettempdir())!r}: {err.strerror}") from err
        os.close(descriptor)
        self._folder = os.path.dirname(path)
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.executescript(_SCHEMA)
        finally:
            os.unlink(path)  # it lives until it is closed
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.entries: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, member: TarMember) -> None:
        """Add a member, which replaces an earlier one of its name.

        Raises UnusableMember, NoRoom, BadInput (too many members).
        """
        try:
            self._add(member)
        except sqlite3.OperationalError as err:
            raise _no_room(str(err)) from err

    def finish(self) -> None:
        """End the adding. Raises NoRoom."""
        try:
            self._database.execute("INSERT INTO shared SELECT node FROM entry GROUP BY node HAVING count(*) > 1")
        except sqlite3.OperationalError as err:
            raise _no_room(str(err)) from err

    def _add(self, member: TarMember) -> None:
        path, kind = member.path, member.kind
        if kind == EntryKind.HARD_LINK:
            found = self._find(member.target)
            if found is None:
                raise UnusableMember("is a hard link to a member that the archive does not have before it")
            kind, node = found
            if kind == EntryKind.FOLDER:
                raise UnusableMember("is a hard link to a folder")
            if member.target == path:
                return
        self._imply_folders(path, member)
        if kind != EntryKind.FOLDER:
            if not path or self._has_children(path):
                raise UnusableMember("would replace a folder that has content")
            self._known.pop(path, None)
        if member.kind != EntryKind.HARD_LINK:
            node = self._add_node(member)
        self._put(path, kind, node)

    def _imply_folders(self, path: bytes, member: TarMember) -> None:
        """Add the folders that contain a path and have no member so far."""
        missing, folder = list[bytes](), path
        while folder:
            folder = folder.rpartition(b"/")[0]
            if folder in self._known:
                break
            found = self._find(folder)
            if found is None:
                missing.append(folder)
            elif found[0] != EntryKind.FOLDER:
                raise UnusableMember("is below a member that is no folder")
            else:
                self._remember(folder)
        for folder in reversed(missing):
            implied = member._replace(
                kind=EntryKind.FOLDER, mode=IMPLIED_MODE, size=0, target=b"", xattrs=(), extents=None, content_bytes=0
            )
            self._put(folder, EntryKind.FOLDER, self._add_node(implied))
            self._remember(folder)

    def _remember(self, folder: bytes) -> None:
        self._known[folder] = None
        if len(self._known) > KNOWN_FOLDERS_MAX:
            self._known.popitem(last=False)

    def _add_node(self, member: TarMember) -> int:
        if self.entries >= ENTRIES_MAX:
            raise BadInput(f"archive: more than {ENTRIES_MAX:,} members; nothing was stored")
        self.entries += 1
        if not self.entries % ROOM_CHECK_ENTRIES and not has_room(self._folder):
            raise _no_room("its device is nearly full")
        values = {name: getattr(member, name) for name in _Node.__struct_fields__}
        self._database.execute("INSERT INTO node VALUES (?, ?)", (self.entries, _encode(_Node(**values))))
        return self.entries

    def _put(self, path: bytes, kind: int, node: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?)", (*_key(path), kind, node))

    def _find(self, path: bytes) -> tuple[int, int] | None:
        """Return kind and node of an entry."""
        row: tuple[int, int] | None = self._database.execute(
            "SELECT kind, node FROM entry WHERE folder = ? AND name = ?", _key(path)
        ).fetchone()
        return row

    def _has_children(self, path: bytes) -> bool:
        row = self._database.execute("SELECT 1 FROM entry WHERE folder = ? LIMIT 1", (sort_key(path),)).fetchone()
        return row is not None

    def entries_in_order(self) -> Iterator[IndexedEntry]:
        """Yield the entries of the tree; of several names of one file the first has the content."""
        rows = self._database.execute(
            "SELECT folder, name, data, node, shared.id FROM entry CROSS JOIN node ON node.id = node "
            "LEFT JOIN shared ON shared.id = node ORDER BY folder, name"
        )
        for folder_key, name, data, number, shared in rows:
            node, folder = _decode(data), folder_key.replace(b"\0", b"/")
            path = folder + b"/" + name if folder else name
            first = None if shared is None else self._first_name(number, path)
            is_link = first is not None
            entry = TreeEntry(
                folder,
                name,
                EntryKind.HARD_LINK if is_link else node.kind,
                node.mode,
                node.uid,
                node.gid,
                node.mtime_ns,
                size=0 if is_link else node.size,
                target=node.target if first is None else first,
                xattrs=() if is_link else node.xattrs,
                extents=None if is_link else node.extents,
            )
            yield IndexedEntry(entry, node.start, 0 if is_link else node.content_bytes)

    def _first_name(self, number: int, path: bytes) -> bytes | None:
        """Return the first name of a file with several; None if this is the first."""
        row = self._database.execute("SELECT path FROM first WHERE id = ?", (number,)).fetchone()
        if row is None:
            self._database.execute("INSERT INTO first VALUES (?, ?)", (number, path))
            return None
        first: bytes = row[0]
        return first


def _key(path: bytes) -> tuple[bytes, bytes]:
    folder, _, name = path.rpartition(b"/")
    return sort_key(folder), name


def _no_room(reason: str) -> NoRoom:
    return NoRoom(f"temporary folder: the list of members does not fit: {reason}; name another one with --temporary")
