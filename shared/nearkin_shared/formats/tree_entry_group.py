"""Encode and decode a group of tree entries as columns.

    | head | folder table | kind mode owner times inode size ... | names | digests | link targets | extras |

A tree lists the children of each folder together: folders in pre-order, names ascending by bytes. A group has some
hundred consecutive entries. Columns are not compressed here: the bytes of a group are deduplicated and delta-encoded
like those of any blob, so that an unchanged group costs nothing (docs/internals/formats/tree.md).

Invariant: `decode_group` returns what `encode_group` was given, and refuses names that could leave a target folder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
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


def encode_group(entries: Sequence[TreeEntry]) -> bytes:
    """Encode at most ROWS_MAX entries that follow one another in a tree."""
    starts, folders = list[int](), list[bytes]()
    for row, entry in enumerate(entries):
        if not folders or folders[-1] != entry.folder:
            starts.append(row)
            folders.append(entry.folder)
    extras = [_extras(entry) for entry in entries]
    digests = [entry.digest for entry in entries if entry.digest]
    targets = [entry.target for entry in entries if entry.kind in _LINKS]
    columns: tuple[Sequence[int], ...] = (
        [entry.kind for entry in entries],
        [entry.flags | (EntryFlag.EXTRAS if more else 0) for entry, more in zip(entries, extras, strict=True)],
        [entry.mode for entry in entries],
        [entry.uid for entry in entries],
        [entry.gid for entry in entries],
        [entry.mtime_ns // _NANOSECONDS for entry in entries],
        [entry.mtime_ns % _NANOSECONDS for entry in entries],
        [entry.ctime_ns for entry in entries],
        [entry.inode for entry in entries],
        [entry.size for entry in entries],
        [len(entry.name) for entry in entries],
    )
    names = b"".join([entry.name for entry in entries])
    paths, links, more = b"".join(folders), b"".join(targets), b"".join(extras)
    head = _HEAD.pack(_MAGIC, len(entries), len(folders), len(paths), len(names), len(digests), len(links), len(more))
    return b"".join(
        (
            head,
            np.array(starts, "<u4").tobytes(),
            np.array([len(folder) for folder in folders], "<u2").tobytes(),
            paths,
            *(np.array(values, dtype).tobytes() for values, dtype in zip(columns, _COLUMNS, strict=True)),
            names,
            *digests,
            np.array([len(target) for target in targets], "<u2").tobytes(),
            links,
            np.array([len(part) for part in extras if part], "<u4").tobytes(),
            more,
        )
    )


def _extras(entry: TreeEntry) -> bytes:
    if not entry.xattrs and entry.extents is None:
        return b""
    return _encode_extras(_Extras(entry.xattrs, entry.extents))


def decode_group(data: bytes, what: str) -> list[TreeEntry]:
    """Decode a group. Raises Corrupt, with the name `what`."""
    try:
        return list(_decode(memoryview(data), what))
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


def _decode(data: memoryview, what: str) -> Iterator[TreeEntry]:
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
    digests = iter(cursor.split([DIGEST_BYTES] * digest_count, DIGEST_BYTES * digest_count))
    link_count = sum(kind in _LINKS for kind in kinds)
    targets = iter(cursor.split(cursor.take(np.dtype("<u2"), link_count).tolist(), links_bytes))
    extras_count = sum(flag & EntryFlag.EXTRAS for flag in flags)
    extras = iter(cursor.split(cursor.take(np.dtype("<u4"), extras_count).tolist(), extras_bytes))
    cursor.check_end(what)
    if starts[0] != 0 or any(after <= before for before, after in zip(starts, [*starts[1:], rows], strict=True)):
        raise Corrupt(f"{what}: folders start at rows {starts[:4]} of {rows}")
    if max(kinds) > EntryKind.BLOCK_DEVICE or max(nanoseconds) >= _NANOSECONDS:
        raise Corrupt(f"{what}: kind {max(kinds)}, {max(nanoseconds)} ns: out of bounds")
    number, number_of_digests, extras_bit = 0, 0, EntryFlag.EXTRAS
    for row in range(rows):
        if number + 1 < folder_count and starts[number + 1] == row:
            number += 1
        kind, flag, size = kinds[row], flags[row], sizes[row]
        xattrs: tuple[tuple[bytes, bytes], ...] = ()
        extents: tuple[tuple[int, int], ...] | None = None
        if flag & extras_bit:
            more = _decode_extras(next(extras))
            xattrs, extents, flag = more.xattrs, more.extents, flag & ~extras_bit
            _check_extents(extents, size, what)
        target = b""
        if kind:
            has_content = False
            if kind in _LINKS:
                target = next(targets)
                if kind == EntryKind.HARD_LINK and not all(map(is_name, target.split(b"/"))):
                    raise Corrupt(f"{what}: a hard link to {target!r}, which is not a path of a tree")
        else:
            has_content = size > 0 if extents is None else bool(extents)
            if has_content and number_of_digests == digest_count:
                raise Corrupt(f"{what}: more files with content than digests")
            number_of_digests += has_content
        yield TreeEntry(
            folders[number],
            names[row],
            kind,
            modes[row],
            uids[row],
            gids[row],
            seconds[row] * _NANOSECONDS + nanoseconds[row],
            ctimes[row],
            inodes[row],
            size,
            flag,
            next(digests) if has_content else b"",
            target,
            xattrs,
            extents,
        )
    if next(digests, None) is not None:
        raise Corrupt(f"{what}: more digests than files with content")


def _check_names(folders: Sequence[bytes], names: Sequence[bytes], first_kind: int, what: str) -> None:
    """Raise Corrupt for a path that could leave the target folder.

    Only the first entry may have no name: the root.
    """
    for folder in folders:
        if folder and not all(map(is_name, folder.split(b"/"))):
            raise Corrupt(f"{what}: folder {folder!r} is not a path of a tree")
    has_root = not names[0] and not folders[0] and first_kind == EntryKind.FOLDER
    for name in names[1:] if has_root else names:
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
        data, start = bytes(self._data[self._position : stop]), 0
        parts = list[bytes]()
        for length in lengths:
            parts.append(data[start : start + length])
            start += length
        self._position = stop
        return parts

    def check_end(self, what: str) -> None:
        """Raise Corrupt unless all bytes were read."""
        if self._position != len(self._data):
            raise Corrupt(f"{what}: {len(self._data) - self._position} bytes left over")
