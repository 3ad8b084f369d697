"""Structure check of an LMDB file without LMDB.

LMDB follows damaged page numbers without a check, and so may crash.

    page        number 8 | 2 | flags 2 | lower 2, upper 2 (overflow: pages 4) | offsets of nodes 2 ... | ... nodes
    node        low 2, high 2, flags 2, key bytes 2 | key | value; in a branch page the first three are a page's number
    meta        page header | magic 4, version 4, 16 | free pages' tree 48 | main tree 48 | last page 8 | transaction 8
    tree        page bytes 4 | flags 2 | depth 2 | pages 8 * 3 | entries 8 | root 8

The check walks all pages reachable from the newest meta page: every number that LMDB uses as an address or a length is
in its bounds, and no page is used twice or free. Contents are checked on reading (entry_encoding.py,
sorted_run_table.py). Memory: one bit per page. Time: 1 s for about 100,000 pages of entries; pages of large values are
not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct

from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import open_private

HEADER = Struct("<QHHHH")
assert HEADER.size == 16
NODE = Struct("<HHHH")
META = Struct("<II16s48s48sQQ")
TREE = Struct("<IHHQQQQQ")
assert TREE.size == 48
MAGIC, FORMAT = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, METAPAGE = 0x01, 0x02, 0x04, 0x08
BIG_VALUE, SUBTREE = 0x01, 0x02
NO_ROOT = 2**64 - 1
DEPTH_MAX = 32
KEY_BYTES_MAX = 511
PAGE_BYTES_MAX = 65536
UNWRITTEN_PAGES_MAX = 1 << 22
TRIES_MAX = 4
"""Attempts; each but the first means that a writer committed meanwhile."""


class PageDamage(Exception):
    """Page that differs from LMDB's format."""


@frozen
class _Meta:
    page_bytes: int
    free: bytes
    main: bytes
    last_page: int
    transaction: int


def find_page_damage(path: Path) -> str | None:
    """Return the damage in the structure of an LMDB file, or None. Raises OSError."""
    descriptor = open_private(path, os.O_RDONLY)
    try:
        for _ in range(TRIES_MAX):
            meta = _newest_meta(descriptor)
            try:
                _Walk(descriptor, meta).check()
            except PageDamage as err:
                if _newest_meta(descriptor).transaction == meta.transaction:
                    return str(err)
            else:
                return None
    except PageDamage as err:
        return str(err)
    finally:
        os.close(descriptor)
    return None  # a writer commits all the time: the file is in use and intact


def _newest_meta(descriptor: int) -> _Meta:
    first = _parse_meta(os.pread(descriptor, HEADER.size + META.size, 0))
    second = _parse_meta(os.pread(descriptor, HEADER.size + META.size, first.page_bytes if first else 4096))
    found = [meta for meta in (first, second) if meta is not None]
    if not found:
        raise PageDamage("neither of its first two pages is an LMDB meta page")
    # LMDB uses the newer one regardless of the other, and refuses the file if the first is not a meta page.
    return max(found, key=lambda meta: meta.transaction)


def _parse_meta(data: bytes) -> _Meta | None:
    if len(data) < HEADER.size + META.size:
        return None
    flags = HEADER.unpack_from(data)[2]
    magic, version, _, free, main, last_page, transaction = META.unpack_from(data, HEADER.size)
    page_bytes = TREE.unpack(free)[0]
    if not flags & METAPAGE or magic != MAGIC or version != FORMAT:
        return None
    if not 512 <= page_bytes <= PAGE_BYTES_MAX or page_bytes & (page_bytes - 1):
        return None
    return _Meta(page_bytes, free, main, last_page, transaction)


class _Walk:
    """One pass over the pages that a meta page reaches."""

    def __init__(self, descriptor: int, meta: _Meta) -> None:
        self._descriptor = descriptor
        self._meta = meta
        self._size_bytes = os.fstat(descriptor).st_size
        # A page that was freed before it was ever written may be beyond the file's end.
        if meta.last_page > self._size_bytes // meta.page_bytes + UNWRITTEN_PAGES_MAX:
            raise PageDamage(f"the file has {self._size_bytes} bytes for {meta.last_page + 1} pages")
        self._used = bytearray(meta.last_page // 8 + 1)

    def check(self) -> None:
        """Check all trees and the free list. Raises PageDamage."""
        free: list[bytes] = []
        self._check_tree(self._meta.free, free, is_main=False)
        self._check_tree(self._meta.main, None, is_main=True)
        for ids in free:
            self._check_free(ids)

    def _check_free(self, value: bytes) -> None:
        """Check a list of free pages: a used page in it would be overwritten.

        The list is a count followed by page numbers.
        """
        count, rest = divmod(len(value), 8)
        if rest or not count or int.from_bytes(value[:8], "little") >= count:
            raise PageDamage("a list of free pages has a wrong length")
        for at in range(8, 8 * (int.from_bytes(value[:8], "little") + 1), 8):
            self._use(int.from_bytes(value[at : at + 8], "little"), 1, "a list of free pages")

    def _use(self, first: int, count: int, where: str) -> None:
        """Mark pages as used.

        Raises: PageDamage, if a page does not exist or was used before.
        """
        if not (first >= 2 and count >= 1 and first + count - 1 <= self._meta.last_page):
            raise PageDamage(f"{where} names page {first}, which does not exist")
        for page in range(first, first + count):
            if self._used[page >> 3] >> (page & 7) & 1:
                raise PageDamage(f"{where} names page {page}, which is used twice or free")
            self._used[page >> 3] |= 1 << (page & 7)

    def _check_tree(self, packed: bytes, values: list[bytes] | None, *, is_main: bool) -> None:
        _, flags, depth, *_, root = TREE.unpack(packed)
        if root == NO_ROOT:
            return
        if not 1 <= depth <= DEPTH_MAX or flags & ~0x08:  # integer keys are allowed in the free pages' tree only
            raise PageDamage(f"a tree has depth {depth}, flags {flags:#x}")
        pages = [(root, 1)]
        while pages:
            number, level = pages.pop()
            data, offsets = self._read_page(number, LEAF if level == depth else BRANCH)
            if level < depth:
                pages += [(child, level + 1) for child in self._children(number, data, offsets)]
            else:
                self._check_leaf(number, data, offsets, values, is_main=is_main)

    def _read_page(self, number: int, kind: int) -> tuple[bytes, list[int]]:
        """Return a page of nodes and the offsets of the nodes."""
        self._use(number, 1, "a tree")
        page_bytes = self._meta.page_bytes
        data = os.pread(self._descriptor, page_bytes, number * page_bytes)
        if len(data) < page_bytes:
            raise PageDamage(f"page {number} is beyond the end of the file")
        header_number, _, flags, lower, upper = HEADER.unpack_from(data)
        if header_number != number or flags & 0x7F != kind:
            raise PageDamage(f"page {number} has number {header_number}, flags {flags:#x}")
        if not HEADER.size <= lower <= upper <= page_bytes or lower % 2:
            raise PageDamage(f"page {number} has free space from {lower} to {upper}")
        offsets = [int.from_bytes(data[at : at + 2], "little") for at in range(HEADER.size, lower, 2)]
        if not offsets or any(at < upper or at + NODE.size > page_bytes or at % 2 for at in offsets):
            raise PageDamage(f"page {number} has nodes outside its bounds")
        return data, offsets

    def _children(self, number: int, data: bytes, offsets: list[int]) -> Iterator[int]:
        for at in offsets:
            low, high, top, key_bytes = NODE.unpack_from(data, at)
            if key_bytes > KEY_BYTES_MAX or at + NODE.size + key_bytes > len(data):
                raise PageDamage(f"page {number} has a key of {key_bytes} bytes")
            yield low | high << 16 | top << 32

    def _check_leaf(
        self, number: int, data: bytes, offsets: list[int], values: list[bytes] | None, *, is_main: bool
    ) -> None:
        spans = []
        for at in offsets:
            low, high, flags, key_bytes = NODE.unpack_from(data, at)
            value_bytes, start = low | high << 16, at + NODE.size + key_bytes
            inline_bytes = 8 if flags & BIG_VALUE else value_bytes
            if not key_bytes or key_bytes > KEY_BYTES_MAX or flags & ~(BIG_VALUE | SUBTREE) or flags == 3:
                raise PageDamage(f"page {number} has a node with a key of {key_bytes} bytes, flags {flags:#x}")
            if start + inline_bytes > len(data):
                raise PageDamage(f"page {number} has a value of {value_bytes} bytes")
            spans.append((at, start + inline_bytes))
            if flags & SUBTREE:
                if not is_main or value_bytes != TREE.size:
                    raise PageDamage(f"page {number} has a tree within a tree")
                self._check_tree(data[start : start + TREE.size], None, is_main=False)
            elif flags & BIG_VALUE:
                found = self._check_big(int.from_bytes(data[start : start + 8], "little"), value_bytes, values)
                if values is not None:
                    values.append(found)
            elif values is not None:
                values.append(data[start : start + value_bytes])
        spans.sort()
        if any(before[1] > after[0] for before, after in pairwise(spans)):
            raise PageDamage(f"page {number} has nodes that overlap")

    def _check_big(self, first: int, value_bytes: int, values: list[bytes] | None) -> bytes:
        """Check the pages of a large value; return the value if `values` collects them."""
        if not 2 <= first <= self._meta.last_page:
            raise PageDamage(f"a value names page {first}, which does not exist")
        page_bytes = self._meta.page_bytes
        if first * page_bytes + HEADER.size + value_bytes > self._size_bytes:
            raise PageDamage(f"page {first} begins a value of {value_bytes} bytes, beyond the end of the file")
        header = os.pread(self._descriptor, HEADER.size, first * page_bytes)
        header_number, _, flags, low, high = HEADER.unpack(header)
        count = low | high << 16  # more pages than needed if a longer value was replaced in one transaction
        if header_number != first or flags & 0x7F != OVERFLOW or count < -(-(HEADER.size + value_bytes) // page_bytes):
            raise PageDamage(f"page {first} does not begin a value of {value_bytes} bytes: {count} pages, {flags:#x}")
        self._use(first, count, "a value")
        return b"" if values is None else os.pread(self._descriptor, value_bytes, first * page_bytes + HEADER.size)
