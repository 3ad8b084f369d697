"""Read the content of a file of a stored tree, for archives and single files.

    version  ... | content without holes | ...    ->  pieces, compared with the digest of the entry
                                                  ->  the file as its reader sees it: holes are zeros

Invariant (I8): the last piece follows only if all pieces have the digest of the entry.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from blake3 import blake3

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES
from nearkin_shared.reading.tree_reader import PlacedEntry

READ_BYTES = 1 << 20
"""Bytes of a piece, at most."""


def read_content(contents: io.RawIOBase, placed: PlacedEntry) -> Iterator[bytes]:
    """Yield the stored bytes of a file, without holes.

    `contents` is the version from its start. Raises Corrupt, before the last bytes, if they do not have the digest.
    """
    entry, hasher, left = placed.entry, blake3(), placed.entry.content_bytes
    contents.seek(placed.start)
    while left:
        piece = _read(contents, min(left, READ_BYTES))
        hasher.update(piece)
        left -= len(piece)
        if not piece or (not left and hasher.digest(length=DIGEST_BYTES) != entry.digest):
            raise Corrupt(f"{entry.path!r}: BLAKE3 of its content differs from its entry; run `nearkin verify`")
        yield piece


def _read(contents: io.RawIOBase, size: int) -> bytes:
    """Read bytes; after damage once more: it may be in what is read over.

    Raises Corrupt.
    """
    try:
        return contents.read(size) or b""
    except Corrupt:
        contents.seek(contents.tell())
        return contents.read(size) or b""


def read_file(contents: io.RawIOBase, placed: PlacedEntry) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file as a reader of the file system sees them: holes are zeros.

    Raises Corrupt as `read_content` does.
    """
    pieces = read_content(contents, placed)
    if placed.entry.extents is None:
        yield from pieces
        return
    position, piece = 0, memoryview(b"")  # a slice of bytes would copy the rest for each extent
    for offset, length in placed.entry.extents:
        yield from _zeros(offset - position)
        left = length
        while left:
            piece = piece or memoryview(next(pieces))
            yield piece[:left]
            piece, left = piece[left:], left - min(left, len(piece))
        position = offset + length
    yield from _zeros(placed.entry.size - position)


def _zeros(count: int) -> Iterator[bytes]:
    for start in range(0, count, READ_BYTES):
        yield bytes(min(READ_BYTES, count - start))
