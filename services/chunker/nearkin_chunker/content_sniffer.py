"""Find the kind of content from its first bytes and from samples, never from a name.

The signatures are a table of our own: a release of a library that knows one signature more would move the cuts of
stored data, and libraries name formats, while cutting needs page sizes and borders.

Invariant: the result depends on the first HEAD_BYTES of an item (of a safetensors file: its header) and its end.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from nearkin_chunker.safetensors_header import WANTED_BYTES_MAX as TENSORS_HEADER_MAX
from nearkin_chunker.safetensors_header import header_bytes, tensor_borders
from nearkin_chunker.tar_headers import BLOCK_BYTES, is_header
from nearkin_shared.limits import KIB
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

HEAD_BYTES = 64 * KIB
"""Bytes of an item that decide its kind, and of a stretch that decide whether it is dense."""
ITEM_BYTES_MIN = 4 * KIB
"""Smaller items are cut like all others: they are a chunk or two anyway."""
HEADER_WAIT_BYTES_MAX = max(HEAD_BYTES, TENSORS_HEADER_MAX)
_SAMPLES, _SAMPLE_BYTES = 16, 256
_DENSE_RATIO = 3, 2
"""Pairs of equal bytes in a sample, at most so many times those of random bytes: text has 15 times, compressed data and
the entropy-coded part of media 1.0 to 1.2 times (docs/adr/0066)."""

_MEDIA = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"OggS", b"fLaC", b"ID3", b"\x1a\x45\xdf\xa3")
_MEDIA_RIFF = (b"WEBP", b"AVI ")
_COMPRESSED = (b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh", b"7z\xbc\xaf\x27\x1c", b"\x04\x22\x4d\x18")
_FIRST_BYTES = frozenset(signature[0] for signature in (*_MEDIA, *_COMPRESSED, b"RIFF"))

_SQLITE = b"SQLite format 3\0"
_SQLITE_HEADER = Struct(">16xH6xII60xI")
assert _SQLITE_HEADER.size == 96  # https://www.sqlite.org/fileformat.html, section 1.3
_POSTGRES_PAGE_BYTES = 8 * KIB
_POSTGRES_LAYOUT = (0x04, 0x20)
"""pd_pagesize_version, little-endian: pages of 8192 bytes, layout version 4 (since PostgreSQL 8.3)."""
_POSTGRES_PAGES_MIN = 2
_INNODB_PAGE_SIZES = (16 * KIB, 8 * KIB, 4 * KIB, 32 * KIB)
_INNODB_FIRST = Struct(">4xI16xH20xI")
"""Page number, page type, and pages of the file, from page 0 (its FIL and FSP headers)."""
_INNODB_FSP_HEADER, _INNODB_BITMAP = 8, 5
PAGE_BYTES_MIN = 4 * KIB
"""Smaller pages are cut in groups: a message holds at most so many chunks."""


@frozen
class Finding:
    """The kind of an item and what its rule needs."""

    kind: str
    page_bytes: int = 0
    """Page size of a database."""
    size_bytes: int | None = None
    """Bytes of the item that have this kind, if its header states them."""
    borders: tuple[int, ...] = ()
    """Sizes of the stretches of a safetensors file."""


_OTHER = Finding("other")


def needed_bytes(data: U8) -> int:
    """Return how many bytes of an item `find_kind` needs, unless the item is shorter."""
    if len(data) < 9:
        return HEAD_BYTES
    return max(HEAD_BYTES, header_bytes(data))


def find_kind(data: U8, rules: frozenset[str]) -> Finding:
    """Return the kind of an item from its first `needed_bytes`, or all of a shorter item."""
    if len(data) < ITEM_BYTES_MIN:
        return _OTHER
    head = data[:BLOCK_BYTES].tobytes()
    found = _structured(data, head) or _signed(data, head)
    if found is None and len(data) >= HEAD_BYTES and is_dense(data):
        found = Finding("encrypted")
    return found if found is not None and found.kind in rules else _OTHER


def is_dense(data: U8) -> bool:
    """Return whether samples of the first HEAD_BYTES look as if nothing could compress them."""
    data = data[:HEAD_BYTES]
    if len(data) < ITEM_BYTES_MIN:  # the end of an item
        return True
    if len(data) <= _SAMPLES * _SAMPLE_BYTES:
        sample = data
    else:
        step = (len(data) - _SAMPLE_BYTES) // (_SAMPLES - 1)
        sample = np.concatenate([data[at * step : at * step + _SAMPLE_BYTES] for at in range(_SAMPLES)])
    counts = np.bincount(sample, minlength=256)
    size = len(sample)
    pairs = int(counts @ counts) - size  # whole numbers: the same on every machine
    return pairs * 256 * _DENSE_RATIO[1] <= size * (size - 1) * _DENSE_RATIO[0]


def _signed(data: U8, head: bytes) -> Finding | None:
    """Return the kind of an item with a signature of media or of a compressed stream.

    The signature alone does not make large chunks: the cutter also wants dense bytes.
    """
    if head[0] not in _FIRST_BYTES and head[4:8] != b"ftyp":
        return None
    is_media = head.startswith(_MEDIA) or head[4:8] == b"ftyp" or (head[:4] == b"RIFF" and head[8:12] in _MEDIA_RIFF)
    if is_media:
        return Finding("media")
    return Finding("compressed") if head.startswith(_COMPRESSED) else None


def _structured(data: U8, head: bytes) -> Finding | None:
    """Return the kind of an item with an inner structure."""
    if head.startswith(_SQLITE):
        return _sqlite(head)
    if is_header(head):
        return Finding("tar")
    if head[8:9] == b"{":
        borders = tensor_borders(data)
        if borders:
            return Finding("safetensors", borders=borders)
    return _innodb(data, head) or (_postgres(data) if tuple(head[18:20]) == _POSTGRES_LAYOUT else None)


def _sqlite(head: bytes) -> Finding | None:
    """Return the page size and the size of an SQLite database, if its header is valid."""
    page_bytes, changes, pages, valid_for = _SQLITE_HEADER.unpack_from(head)
    page_bytes = 64 * KIB if page_bytes == 1 else page_bytes
    if not 512 <= page_bytes <= 64 * KIB or page_bytes & (page_bytes - 1) or changes != valid_for or not pages:
        return None
    return Finding("database", max(page_bytes, PAGE_BYTES_MIN), pages * page_bytes)


def _innodb(data: U8, head: bytes) -> Finding | None:
    """Return page size and size of an InnoDB tablespace, by its first two pages."""
    number, kind, pages = _INNODB_FIRST.unpack_from(head)
    if number or kind != _INNODB_FSP_HEADER or pages < 2:
        return None
    for page_bytes in _INNODB_PAGE_SIZES:
        if len(data) >= page_bytes + _INNODB_FIRST.size:
            second, second_kind, _ = _INNODB_FIRST.unpack_from(data, page_bytes)
            if (second, second_kind) == (1, _INNODB_BITMAP):
                return Finding("database", page_bytes, pages * page_bytes)
    return None


def _postgres(data: U8) -> Finding | None:
    """Return the page size of a PostgreSQL relation, if its first pages are pages."""
    pages = min(len(data), HEAD_BYTES) // _POSTGRES_PAGE_BYTES
    if pages < _POSTGRES_PAGES_MIN or postgres_pages(data[: pages * _POSTGRES_PAGE_BYTES]) < pages:
        return None
    return Finding("database", _POSTGRES_PAGE_BYTES)


def postgres_pages(data: U8) -> int:
    """Return how many pages at the start of `data` a PostgreSQL relation may have.

    Pages are initialised, or all zero.
    """
    pages = data[: len(data) // _POSTGRES_PAGE_BYTES * _POSTGRES_PAGE_BYTES].reshape(-1, _POSTGRES_PAGE_BYTES)
    lower, upper, special = (
        pages[:, at].astype(np.uint16) | (pages[:, at + 1].astype(np.uint16) << 8) for at in (12, 14, 16)
    )
    made = (pages[:, 18] == _POSTGRES_LAYOUT[0]) & (pages[:, 19] == _POSTGRES_LAYOUT[1])
    made &= (lower >= 24) & (lower <= upper) & (upper <= special) & (special <= _POSTGRES_PAGE_BYTES)
    wrong = np.flatnonzero(~(made | ~pages[:, :24].any(axis=1)))
    return int(wrong[0]) if len(wrong) else len(pages)
