"""Write a folder of a tree as a zip archive.

Members are not compressed, as most content of a backup is read once or compressed already. Symlinks are members of
their own kind, hard links are copies; devices and FIFOs are left out.

Invariant: a file whose content does not have its digest ends the archive before its directory: no program opens it.
"""

from __future__ import annotations

import io
import stat
import time
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from nearkin.trees.stored_content import read_file
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import EntryKind
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

ENTRIES_MAX = 100_000
"""Members of an archive: their list, at the end, is held in memory, 1 KB each."""
EXPANDED_BYTES_MAX = 1 << 40
"""Content of an archive with holes as zeros and a copy for each hard link: a version of 1 KB may have more."""
_TYPES = {EntryKind.FILE: stat.S_IFREG, EntryKind.FOLDER: stat.S_IFDIR, EntryKind.SYMLINK: stat.S_IFLNK}
_FIRST_SECOND, _LAST_SECOND = 315_532_800, 4_354_819_198
"""1980 to 2107, the times that a zip archive can have."""
_UNIX, _FOLDER_ATTRIBUTE = 3, 0x10


def check_zip_size(tree: TreeReader, path: bytes) -> None:
    """Raise BadInput for a folder with too many entries or bytes.

    Raises NotFound for a path without entry.
    """
    single = tree.find(path) if path else None
    is_folder = single is None or single.entry.kind == EntryKind.FOLDER
    expanded_bytes = 0
    for number, placed in enumerate(tree.below(path) if is_folder or single is None else (single,)):
        if number >= ENTRIES_MAX:
            raise BadInput(f"zip: more than {ENTRIES_MAX:,} entries; download the folder as tar")
        if placed.entry.kind in (EntryKind.FILE, EntryKind.HARD_LINK):
            content = tree.content_of(placed).entry
            expanded_bytes += content.size if content.kind == EntryKind.FILE else 0
        if expanded_bytes > EXPANDED_BYTES_MAX:
            raise BadInput(
                f"zip: more than {EXPANDED_BYTES_MAX:,} bytes with holes and copies of hard links; download as tar"
            )


def write_zip(tree: TreeReader, contents: io.RawIOBase, path: bytes, output: BinaryIO) -> None:
    """Write the archive of a folder, names relative to it, or of one other entry.

    `contents`: the version from its start. Raises NotFound, Corrupt, and OSError of the output.
    """
    single = tree.find(path) if path else None
    if single is not None and single.entry.kind != EntryKind.FOLDER:
        base, entries = single.entry.folder, iter((single,))
    else:
        base, entries = path, _below(tree, path)
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for placed in entries:
            entry = placed.entry
            content = tree.content_of(placed)
            if content.entry.kind not in _TYPES:
                continue
            name = entry.path[len(base) :].lstrip(b"/") if base else entry.path
            header = _header(name, content)
            with archive.open(header, "w", force_zip64=True) as member:
                if content.entry.kind == EntryKind.FILE:
                    for piece in read_file(contents, content):
                        member.write(piece)
                else:
                    member.write(content.entry.target)


def _below(tree: TreeReader, path: bytes) -> Iterator[PlacedEntry]:
    return (placed for placed in tree.below(path) if placed.entry.name)


def _header(name: bytes, placed: PlacedEntry) -> zipfile.ZipInfo:
    entry, text = placed.entry, name.decode("utf-8", "backslashreplace")
    seconds = min(max(entry.mtime_ns // 1_000_000_000, _FIRST_SECOND), _LAST_SECOND)
    is_folder = entry.kind == EntryKind.FOLDER
    header = zipfile.ZipInfo(f"{text}/" if is_folder else text, time.gmtime(seconds)[:6])
    header.create_system = _UNIX
    header.external_attr = (_TYPES[EntryKind(entry.kind)] | entry.mode) << 16 | (_FOLDER_ATTRIBUTE if is_folder else 0)
    return header
