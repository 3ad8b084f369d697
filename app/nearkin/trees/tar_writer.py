"""Write a folder or file of a tree as a tar archive with PAX headers.

Names, owners, times in nanoseconds, links, devices and FIFOs are those of the tree; extended attributes are
`SCHILY.xattr.*` records, as GNU tar and bsdtar write them; files with holes are in GNU's sparse format 1.0.

Invariant: a file whose content does not have its digest ends the archive before its last bytes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from nearkin.trees.stored_content import read_content
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

BUFFER_BYTES = 1 << 20
"""Bytes that are written to the output at once."""
BLOCK_BYTES = 512
_SECOND_NS = 1_000_000_000
_TYPES = {
    EntryKind.FILE: tarfile.REGTYPE,
    EntryKind.FOLDER: tarfile.DIRTYPE,
    EntryKind.SYMLINK: tarfile.SYMTYPE,
    EntryKind.HARD_LINK: tarfile.LNKTYPE,
    EntryKind.FIFO: tarfile.FIFOTYPE,
    EntryKind.CHARACTER_DEVICE: tarfile.CHRTYPE,
    EntryKind.BLOCK_DEVICE: tarfile.BLKTYPE,
}


class TarWriter:
    """Streams entries of a tree into an archive."""

    def __init__(self, tree: TreeReader, contents: io.RawIOBase, progress: Callable[[int], None] | None = None) -> None:
        """`contents`: the version from its start; `progress` is called with the size of each file."""
        self._tree = tree
        self._contents = contents
        self._progress = progress
        self._base = b""
        self._has_folder = True
        self._copies: dict[bytes, bytes] = {}
        """Names in the archive of content whose own entry is not in it, by path in the tree."""
        self.entries: int = 0

    def write(self, path: bytes, output: BinaryIO) -> None:
        """Write the archive of a folder, names relative to it, or of one other entry.

        Raises NotFound, Corrupt, and OSError of the output.
        """
        single = self._tree.find_named(path) if path else None
        if single is not None and single.entry.kind != EntryKind.FOLDER:
            self._base, self._has_folder = single.entry.folder, False
            entries: Iterator[PlacedEntry] = iter((single,))
        else:
            self._base = path
            entries = self._tree.below(path)
        with tarfile.open(
            fileobj=output,
            mode="w|",
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            bufsize=BUFFER_BYTES,
        ) as archive:
            if single is not None and single.entry.kind == EntryKind.FOLDER:
                self._add(archive, single)
            for placed in _folders_before_content(entries):
                self._add(archive, placed)
                vars(archive)["members"].clear()  # the library keeps all of them, for archives that are read again

    def _add(self, archive: tarfile.TarFile, placed: PlacedEntry) -> None:
        entry = placed.entry
        name = self._name(entry.path)
        if entry.kind == EntryKind.HARD_LINK and not self._is_in_archive(entry.target):
            copied = self._copies.get(entry.target)
            if copied is None:
                self._copies[entry.target] = name
                placed = self._tree.content_of(placed)
                entry = placed.entry
            else:
                entry = entry._replace(target=copied)
        elif entry.kind == EntryKind.HARD_LINK:
            entry = entry._replace(target=self._name(entry.target))
        info = self._header(entry, name)
        if entry.kind == EntryKind.FILE:
            self._add_file(archive, info, placed)
        else:
            archive.addfile(info)
        self.entries += 1

    def _name(self, path: bytes) -> bytes:
        return (path[len(self._base) :].lstrip(b"/") if self._base else path) or b"."

    def _is_in_archive(self, path: bytes) -> bool:
        return self._has_folder and (not self._base or path.startswith(self._base + b"/"))

    def _header(self, entry: TreeEntry, name: bytes) -> tarfile.TarInfo:
        summary = self._tree.summary
        info = tarfile.TarInfo(os.fsdecode(name))
        info.type = _TYPES[EntryKind(entry.kind)]
        info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
        info.uname, info.gname = summary.users.get(entry.uid, ""), summary.groups.get(entry.gid, "")
        seconds, rest = divmod(entry.mtime_ns, _SECOND_NS)
        info.mtime = seconds
        headers = dict[str, str]()
        if rest:
            sign, whole, part = ("", seconds, rest) if seconds >= 0 else ("-", -seconds - 1, _SECOND_NS - rest)
            headers["mtime"] = f"{sign}{whole}.{part:09}"
        for key, value in entry.xattrs:
            escaped = os.fsdecode(key).replace("%", "%25").replace("=", "%3D")
            headers[f"SCHILY.xattr.{escaped}"] = value.decode("utf-8", "surrogateescape")
        info.pax_headers = headers
        if entry.kind in (EntryKind.SYMLINK, EntryKind.HARD_LINK):
            info.linkname = os.fsdecode(entry.target)
        elif entry.kind in (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE):
            info.devmajor, info.devminor = os.major(entry.size), os.minor(entry.size)
        return info

    def _add_file(self, archive: tarfile.TarFile, info: tarfile.TarInfo, placed: PlacedEntry) -> None:
        entry, head = placed.entry, b""
        if entry.extents is not None:
            head = _sparse_map(entry)
            folder, _, name = info.name.rpartition("/")
            headers = {"major": "1", "minor": "0", "name": info.name, "realsize": str(entry.size)}
            sparse = {f"GNU.sparse.{key}": value for key, value in headers.items()}
            info.pax_headers = {**info.pax_headers, **sparse}
            info.name = f"{folder or '.'}/GNUSparseFile.0/{name}"
        info.size = len(head) + entry.content_bytes
        source = _PieceFile(head, read_content(self._contents, placed))
        archive.addfile(info, source)  # type: ignore[arg-type]  # it calls `read` alone
        if self._progress is not None:
            self._progress(entry.content_bytes)


def _folders_before_content(entries: Iterator[PlacedEntry]) -> Iterator[PlacedEntry]:
    """Yield entries with each folder directly before its content.

    In a tree the folders of a folder are listed with its files, before the content of any of them. GNU tar sets the
    mtime of a folder once an entry outside of it follows, and does not set it again.
    """
    waiting: list[PlacedEntry] = []
    """Folders whose content may follow, the next one last."""
    siblings: list[PlacedEntry] = []
    current = b""
    for placed in entries:
        entry = placed.entry
        if entry.folder != current:
            current, key = entry.folder, sort_key(entry.folder)
            waiting.extend(reversed(siblings))
            siblings = []
            while waiting and sort_key(waiting[-1].entry.path) <= key:
                yield waiting.pop()
        if entry.kind == EntryKind.FOLDER and entry.name:
            siblings.append(placed)
        else:
            yield placed
    yield from siblings
    yield from reversed(waiting)


def _sparse_map(entry: TreeEntry) -> bytes:
    """Return the map of a file with holes: lines of count, then offset and length of extents."""
    extents = [*(entry.extents or ())]
    if not extents or sum(extents[-1]) < entry.size:
        extents.append((entry.size, 0))  # the file ends with a hole
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    text = "".join(f"{number}\n" for number in numbers).encode()
    return text + bytes(-len(text) % BLOCK_BYTES)


class _PieceFile:
    """Pieces as a file to read from."""

    def __init__(self, head: bytes, pieces: Iterator[bytes]) -> None:
        self._held = memoryview(head)  # a slice of bytes would copy the rest at each read of 16 KiB
        self._pieces = pieces

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        parts, left = list[memoryview](), size
        while left:
            piece = self._held or memoryview(next(self._pieces, b""))
            if not piece:
                break
            parts.append(piece[:left])
            self._held = piece[left:]
            left -= len(parts[-1])
        return b"".join(parts)
