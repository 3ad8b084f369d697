"""Encode and decode a group of tree entries as columns.

    | head | folder table | kind mode owner times inode size ... | names | digests | link targets | extras |

A tree lists the children of each folder together: folders in pre-order, names ascending by bytes. A group has some
hundred consecutive entries. Columns are not compressed here: the bytes of a group are deduplicated and delta-encoded
like those of any blob, so that an unchanged group costs nothing (docs/internals/formats/tree.md).

Invariant: `decode_group` returns what `encode_group` was given, and refuses names that could leave a target folder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt

DIGEST_BYTES = 16
"""BLAKE3 of a file's content, truncated; each chunk has its own fingerprint and check tag besides."""
ROWS_MAX = 4096
"""Entries of a group: a reader decodes whole groups, 0.5 MB of columns at most, names aside."""
PATH_BYTES_MAX = 1 << 16
"""Bytes of a folder's path or of a link's target; Linux refuses paths above 4,096 bytes."""
NAME_BYTES_MAX = 255
EXTRAS_BYTES_MAX = 1 << 20
"""Extended attributes and extents of one entry; Linux refuses more than 64 KiB of a file's attributes."""
ID_MAX = (1 << 32) - 1
_MAGIC = b"NKTG"
_HEAD = Struct("<4s7I")
assert _HEAD.size == 32  # docs/internals/formats/tree.md
_COLUMNS = ("u1", "u1", "<u2", "<u4", "<u4", "<i8", "<u4", "<i8", "<u8", "<u8", "<u2")
"""Kind, flags, mode, owner, group, mtime seconds and nanoseconds, ctime, inode, size or device, length of the name."""
_NANOSECONDS = 1_000_000_000


class EntryKind(IntEnum):
    """The kind of a tree entry."""

    FILE = 0
    FOLDER = 1
    SYMLINK = 2
    HARD_LINK = 3
    FIFO = 4
    CHARACTER_DEVICE = 5
    BLOCK_DEVICE = 6


class EntryFlag:
    """Bits of an entry's flags; an IntFlag would take 20 times as long."""

    EXTRAS = 1
    """Has extended attributes or extents."""
    CHANGED = 2
    """The file changed while it was read: its content may mix two states."""
    INCOMPLETE = 4
    """Reading the file failed: its content ends where it failed."""
    RECENT = 8
    """The file changed at most a second before it was read, so that its times do not prove it unchanged."""


class TreeEntry(NamedTuple):
    """A file, a folder or another object of a tree."""

    folder: bytes
    """Path of the folder that contains it, without a leading slash; empty for the root folder."""
    name: bytes
    """Empty for the root itself."""
    kind: int
    mode: int
    """Permission bits, with set-user-id, set-group-id and sticky."""
    uid: int
    gid: int
    mtime_ns: int
    """Nanoseconds since 1970; negative before."""
    ctime_ns: int = 0
    inode: int = 0
    size: int = 0
    """Bytes of a file, holes included; the device number of a device; 0 otherwise."""
    flags: int = 0
    digest: bytes = b""
    """Of a file's stored content; empty if it has none."""
    target: bytes = b""
    """Target of a symlink, or the path in the tree of the entry whose content a hard link shares."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Extended attributes (name, value); POSIX ACLs and capabilities are among them."""
    extents: tuple[tuple[int, int], ...] | None = None
    """Of a file with holes: (offset, bytes) of each stretch of data, ascending; None: the file has no holes."""

    @property
    def path(self) -> bytes:
        """The path from the root of the tree, without a leading slash."""
        return self.folder + b"/" + self.name if self.folder else self.name

    @property
    def content_bytes(self) -> int:
        """The bytes that the tree stores of the file."""
        if self.kind != EntryKind.FILE:
            return 0
        return self.size if self.extents is None else sum(length for _, length in self.extents)


class _Extras(msgspec.Struct, array_like=True, frozen=True):
    xattrs: tuple[tuple[bytes, bytes], ...]
    extents: tuple[tuple[int, int], ...] | None


_encode_extras = msgspec.msgpack.Encoder().encode
_decode_extras = msgspec.msgpack.Decoder(_Extras).decode
_LINKS = (EntryKind.SYMLINK, EntryKind.HARD_LINK)


def sort_key(path: bytes) -> bytes:
    """Return a key that sorts paths of folders in pre-order, names ascending by bytes."""
    return path.replace(b"/", b"\0")


def entry_keys(entries: Sequence[TreeEntry]) -> list[tuple[bytes, bytes]]:
    """Return `sort_key` of the folder and the name of each entry."""
    keys, folder, key = list[tuple[bytes, bytes]](), b"", b""
    for entry in entries:
        if entry.folder != folder:
            folder, key = entry.folder, sort_key(entry.folder)
        keys.append((key, entry.name))
    return keys


def encode_group(entries: Sequence[TreeEntry]) -> bytes:
    """Encode at most ROWS_MAX entries that follow one another in a tree."""
    starts, folders = list[int](), list[bytes]()
    # a column at a time: 0.5 us an entry less than attributes of each
    parents, names, kinds, modes, uids, gids, mtimes, ctimes, inodes, sizes, flags, digests, links, _, _ = zip(
        *entries, strict=True
    )
    for row, folder in enumerate(parents):
        if not folders or folders[-1] != folder:
            starts.append(row)
            folders.append(folder)
    extras = [_extras(entry) if entry.xattrs or entry.extents is not None else b"" for entry in entries]
    digests = tuple(filter(None, digests))
    targets = [target for target, kind in zip(links, kinds, strict=True) if kind in _LINKS]
    columns: tuple[Sequence[int], ...] = (
        kinds,
        [flag | (EntryFlag.EXTRAS if more else 0) for flag, more in zip(flags, extras, strict=True)],
        modes,
        uids,
        gids,
        [mtime_ns // _NANOSECONDS for mtime_ns in mtimes],
        [mtime_ns % _NANOSECONDS for mtime_ns in mtimes],
        ctimes,
        inodes,
        sizes,
        list(map(len, names)),
    )
    paths, text, joined, more = b"".join(folders), b"".join(names), b"".join(targets), b"".join(extras)
    head = _HEAD.pack(_MAGIC, len(entries), len(folders), len(paths), len(text), len(digests), len(joined), len(more))
    return b"".join(
        (
            head,
            np.array(starts, "<u4").tobytes(),
            np.array([len(folder) for folder in folders], "<u2").tobytes(),
            paths,
            *(np.array(values, dtype).tobytes() for values, dtype in zip(columns, _COLUMNS, strict=True)),
            text,
            *digests,
            np.array([len(target) for target in targets], "<u2").tobytes(),
            joined,
            np.array([len(part) for part in extras if part], "<u4").tobytes(),
            more,
        )
    )


def _extras(entry: TreeEntry) -> bytes:
    return _encode_extras(_Extras(entry.xattrs, entry.extents))


def decode_group(data: bytes, what: str) -> list[TreeEntry]:
    """Decode a group. Raises Corrupt, with the name `what`."""
    try:
        return _decode(memoryview(data), what)
    except (struct.error, ValueError, IndexError, msgspec.MsgspecError) as err:
        raise Corrupt(f"{what}: does not parse: {err}") from err


def hard_link_targets(data: bytes, what: str) -> list[bytes]:
    """Return the target of each hard link of a group. Raises Corrupt, with the name `what`.

    A group without hard links, as most are, is not decoded.
    """
    if len(data) < _HEAD.size:
        raise Corrupt(f"{what}: {len(data)} bytes are too few for a group of a tree")
    _, rows, folder_count, paths_bytes, *_ = _HEAD.unpack_from(data)
    kinds_start = _HEAD.size + folder_count * 6 + paths_bytes
    if EntryKind.HARD_LINK not in data[kinds_start : kinds_start + rows]:
        return []
    return [entry.target for entry in decode_group(data, what) if entry.kind == EntryKind.HARD_LINK]


def _decode(data: memoryview, what: str) -> list[TreeEntry]:
    magic, rows, folder_count, paths_bytes, names_bytes, digest_count, links_bytes, extras_bytes = _HEAD.unpack_from(
        data
    )
    if magic != _MAGIC or not 0 < rows <= ROWS_MAX or not 0 < folder_count <= rows:
        raise Corrupt(f"{what}: {rows} entries in {folder_count} folders, starts with {magic!r}: not a group of a tree")
    cursor = _Cursor(data, _HEAD.size)
    starts = cursor.take(np.dtype("<u4"), folder_count).tolist()
    folders = cursor.split(cursor.take(np.dtype("<u2"), folder_count).tolist(), paths_bytes)
    columns = [cursor.take(np.dtype(dtype), rows) for dtype in _COLUMNS]
    kinds, flags, modes, uids, gids, seconds, nanoseconds, ctimes, inodes, sizes, name_lengths = (
        column.tolist() for column in columns
    )
    names = cursor.split(name_lengths, names_bytes)
    _check_names(folders, names, kinds[0], what)
    digests = cursor.split([DIGEST_BYTES] * digest_count, DIGEST_BYTES * digest_count)
    link_count = sum(kind in _LINKS for kind in kinds) if any(kinds) else 0
    targets = cursor.split(cursor.take(np.dtype("<u2"), link_count).tolist(), links_bytes)
    extras_count = sum(flag & EntryFlag.EXTRAS for flag in flags) if any(flags) else 0
    extras = iter(cursor.split(cursor.take(np.dtype("<u4"), extras_count).tolist(), extras_bytes))
    cursor.check_end(what)
    if starts[0] != 0 or any(after <= before for before, after in zip(starts, [*starts[1:], rows], strict=True)):
        raise Corrupt(f"{what}: folders start at rows {starts[:4]} of {rows}")
    if max(kinds) > EntryKind.BLOCK_DEVICE or max(nanoseconds) >= _NANOSECONDS:
        raise Corrupt(f"{what}: kind {max(kinds)}, {max(nanoseconds)} ns: out of bounds")
    parents = list[bytes]()
    for folder, start, stop in zip(folders, starts, [*starts[1:], rows], strict=True):
        parents += [folder] * (stop - start)
    attributes: list[tuple[tuple[bytes, bytes], ...]] = [()] * rows
    stretches: list[tuple[tuple[int, int], ...] | None] = [None] * rows
    if extras_count:
        for row in [row for row, flag in enumerate(flags) if flag & EntryFlag.EXTRAS]:
            more = _decode_extras(next(extras))
            attributes[row], stretches[row], flags[row] = more.xattrs, more.extents, flags[row] & ~EntryFlag.EXTRAS
            _check_extents(more.extents, sizes[row], what)
    contents = [
        not kind and (size > 0 if extents is None else bool(extents))
        for kind, size, extents in zip(kinds, sizes, stretches, strict=True)
    ]
    if sum(contents) != digest_count:
        more_or_fewer = "more" if sum(contents) > digest_count else "fewer"
        raise Corrupt(f"{what}: {more_or_fewer} files with content than digests")
    if digest_count < rows:
        found = iter(digests)
        digests = [next(found) if has_content else b"" for has_content in contents]
    mtimes = [second * _NANOSECONDS + nanosecond for second, nanosecond in zip(seconds, nanoseconds, strict=True)]
    linked = _decode_targets(kinds, targets, what) if link_count else [b""] * rows
    fields = zip(
        parents, names, kinds, modes, uids, gids, mtimes, ctimes, inodes, sizes, flags, digests, linked, attributes,
        stretches, strict=True,
    )  # fmt: skip
    return list(map(_new_entry, fields))  # without a call of Python for each


_new_entry: Callable[[tuple[object, ...]], TreeEntry] = partial(tuple.__new__, TreeEntry)


def _decode_targets(kinds: Sequence[int], targets: Sequence[bytes], what: str) -> list[bytes]:
    """Return the target of each entry, empty for those that are no links. Raises Corrupt."""
    linked, left = list[bytes](), iter(targets)
    for kind in kinds:
        target = next(left) if kind in _LINKS else b""
        if kind == EntryKind.HARD_LINK and not all(map(is_name, target.split(b"/"))):
            raise Corrupt(f"{what}: a hard link to {target!r}, which is not a path of a tree")
        linked.append(target)
    return linked


def _check_names(folders: Sequence[bytes], names: Sequence[bytes], first_kind: int, what: str) -> None:
    """Raise Corrupt for a path that could leave the target folder.

    Only the first entry may have no name: the root.
    """
    for folder in folders:
        if folder and not all(map(is_name, folder.split(b"/"))):
            raise Corrupt(f"{what}: folder {folder!r} is not a path of a tree")
    has_root = not names[0] and not folders[0] and first_kind == EntryKind.FOLDER
    checked = names[1:] if has_root else names
    text = b"".join(checked)
    if not (b"/" in text or b"\0" in text) and all(2 < len(name) <= NAME_BYTES_MAX for name in checked):
        return  # as almost always
    for name in checked:
        if not is_name(name):
            raise Corrupt(f"{what}: name {name!r} is not one of a file")


def _check_extents(extents: Sequence[tuple[int, int]] | None, size: int, what: str) -> None:
    """Raise Corrupt for extents that overlap or end behind the file."""
    end = 0
    for offset, length in extents or ():
        if offset < end or length <= 0 or offset + length > size:
            raise Corrupt(f"{what}: {length} bytes of data at {offset} of a file of {size}")
        end = offset + length


def is_name(name: bytes) -> bool:
    """Return whether bytes can be the name of a file."""
    return 0 < len(name) <= NAME_BYTES_MAX and name not in (b".", b"..") and b"/" not in name and b"\0" not in name


class _Cursor:
    """Reads consecutive columns; ValueError past the end."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position

    def take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the next `count` values."""
        stop = self._position + count * dtype.itemsize
        values = np.frombuffer(self._data[self._position : stop], dtype)
        if len(values) != count:
            raise ValueError(f"{len(values)} of {count} values")
        self._position = stop
        return values

    def split(self, lengths: Sequence[int], total: int) -> list[bytes]:
        """Return the next strings, of these lengths and `total` bytes together."""
        stop = self._position + total
        if sum(lengths) != total or stop > len(self._data):
            raise ValueError(f"strings of {sum(lengths)} bytes, {total} are stated")
        data = bytes(self._data[self._position : stop])
        parts = [data[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
        self._position = stop
        return parts

    def check_end(self, what: str) -> None:
        """Raise Corrupt unless all bytes were read."""
        if self._position != len(self._data):
            raise Corrupt(f"{what}: {len(self._data) - self._position} bytes left over")
