"""Encode and decode the group index and the footer of a tree.

    | contents of files, in the order of the entries | entry groups ... | group index | footer 64 |

Readers start at the end: the footer gives the bounds of the index, the index gives for each group its first entry,
its digest and where its contents start. The digest of a tree is BLAKE3 of index and footer; each group's digest is in
the index, each file's digest in its group (docs/internals/formats/tree.md).

Invariant: a reader that compares the three digests accepts no other tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats.columns import CHECK_BYTES, check_bytes
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, ROWS_MAX, sort_key

VERSION = 1
FOOTER_BYTES = 64
_MAGIC = b"NKTREE\r\n"
_FOOTER = Struct("<8sHHIQQQ")
"""Magic, format version, flags, bytes of the summary; bytes of the contents, of the groups and of the index."""
assert _FOOTER.size + CHECK_BYTES <= FOOTER_BYTES  # docs/internals/formats/tree.md
GROUPS_MAX = 1 << 22
SUMMARY_BYTES_MAX = 16 << 20
INDEX_BYTES_MAX = 1 << 30


class GroupInfo(NamedTuple):
    """A group of the index."""

    folder: bytes
    """Of the first entry."""
    name: bytes
    """Of the first entry."""
    rows: int
    block_bytes: int
    content_bytes: int
    """Contents of the group's files."""
    digest: bytes

    @property
    def first_key(self) -> tuple[bytes, bytes]:
        """The key that orders groups, and entries within them."""
        return sort_key(self.folder), self.name


class TreeSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Properties of a tree as a whole."""

    root: bytes
    """Absolute path of the folder that was stored."""
    host: str = ""
    entries: int = 0
    files: int = 0
    folders: int = 0
    size_bytes: int = 0
    """Bytes of all files as `ls` shows them: with holes, hard links counted once."""
    users: dict[int, str] = {}
    """Names of owners."""
    groups: dict[int, str] = {}
    unread: int = 0
    """Entries that could not be read, and files that changed while they were read."""
    partial: tuple[bytes, ...] | msgspec.UnsetType = msgspec.UNSET
    """Folders of the tree of which something was left out, ascending; unset if they are too many, or not known."""
    hash_state: bytes | msgspec.UnsetType = msgspec.UNSET
    """Of a checkpoint that ends inside a file: the state of the hasher after the bytes of its last entry, for the next
    backup (`nearkin_shared.kernels.reference.content_hasher_reference`)."""


class TreeFooter(NamedTuple):
    """The bounds of a tree's parts, bytes."""

    summary_bytes: int
    content_bytes: int
    groups_bytes: int
    index_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tree."""
        return self.content_bytes + self.groups_bytes + self.index_bytes + FOOTER_BYTES


class GroupIndex(NamedTuple):
    """The decoded index: positions are offsets in the tree."""

    summary: TreeSummary
    groups: list[GroupInfo]
    content_starts: list[int]
    block_starts: list[int]


_encode_summary = msgspec.msgpack.Encoder().encode
_decode_summary = msgspec.msgpack.Decoder(TreeSummary).decode


def group_digest(block: bytes) -> bytes:
    """Return the digest of an encoded group."""
    return blake3(block).digest(length=DIGEST_BYTES)


def encode_end(summary: TreeSummary, groups: Sequence[GroupInfo]) -> bytes:
    """Encode the index and the footer. Raises BadInput for a tree that no reader would accept."""
    head = _encode_summary(summary)
    index = b"".join(
        (
            head,
            np.uint32(len(groups)).tobytes(),
            np.array([group.rows for group in groups], "<u4").tobytes(),
            np.array([group.block_bytes for group in groups], "<u4").tobytes(),
            np.array([group.content_bytes for group in groups], "<u8").tobytes(),
            np.array([len(group.folder) + 1 + len(group.name) for group in groups], "<u4").tobytes(),
            *(group.digest for group in groups),
            *(group.folder + b"\0" + group.name for group in groups),
        )
    )
    for what, count, most in (
        ("a list of owners", len(head), SUMMARY_BYTES_MAX),
        ("groups of entries", len(groups), GROUPS_MAX),
        ("an index", len(index), INDEX_BYTES_MAX),
    ):
        if count > most:
            raise BadInput(f"tree: {what} of {count:,}, {most:,} at most; nothing was stored: use several keys")
    content_bytes = sum(group.content_bytes for group in groups)
    groups_bytes = sum(group.block_bytes for group in groups)
    footer = _FOOTER.pack(_MAGIC, VERSION, 0, len(head), content_bytes, groups_bytes, len(index))
    footer += bytes(FOOTER_BYTES - CHECK_BYTES - len(footer))
    return index + footer + check_bytes(footer)


def tree_digest(end: bytes) -> bytes:
    """Return the digest of a tree, from its index and footer."""
    return blake3(end).digest()


def decode_footer(data: bytes, size_bytes: int, what: str) -> TreeFooter:
    """Decode the last FOOTER_BYTES of a blob of `size_bytes`. Raises Corrupt, FormatTooNew."""
    if len(data) != FOOTER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise Corrupt(f"{what}: is not a tree (its last bytes are no footer of one)")
    if check_bytes(data[:-CHECK_BYTES]) != data[-CHECK_BYTES:]:
        raise Corrupt(f"{what}: the checksum of its footer does not agree")
    _, version, flags, summary_bytes, content_bytes, groups_bytes, index_bytes = _FOOTER.unpack_from(data)
    if version > VERSION or flags:
        raise FormatTooNew(f"{what}: tree format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade")
    footer = TreeFooter(summary_bytes, content_bytes, groups_bytes, index_bytes)
    if footer.size_bytes != size_bytes or not summary_bytes <= index_bytes <= INDEX_BYTES_MAX:
        raise Corrupt(f"{what}: parts of {footer.size_bytes} bytes in a blob of {size_bytes}")
    return footer


def decode_index(data: bytes, footer: TreeFooter, what: str) -> GroupIndex:
    """Decode an index of `footer.index_bytes`. Raises Corrupt."""
    if footer.summary_bytes > SUMMARY_BYTES_MAX:
        raise Corrupt(f"{what}: a summary of {footer.summary_bytes} bytes, {SUMMARY_BYTES_MAX} at most")
    try:
        summary = _decode_summary(data[: footer.summary_bytes])
        position = footer.summary_bytes
        (count,) = np.frombuffer(data[position : position + 4], "<u4").tolist()
        if count > GROUPS_MAX or position + 4 + count * (20 + DIGEST_BYTES) > len(data):
            raise Corrupt(f"{what}: {count} groups in {len(data)} bytes")
        position += 4
        columns = []
        for dtype in ("<u4", "<u4", "<u8", "<u4"):
            stop = position + count * np.dtype(dtype).itemsize
            columns.append(np.frombuffer(data[position:stop], dtype).tolist())
            position = stop
        rows, block_bytes, content_bytes, lengths = columns
        digests = [data[start : start + DIGEST_BYTES] for start in range(position, position + count * 16, 16)]
        position += count * DIGEST_BYTES
        if position + sum(lengths) != len(data):
            raise Corrupt(f"{what}: names of {sum(lengths)} bytes, {len(data) - position} are left")
        starts = [position, *(position + end for end in accumulate(lengths))]
        firsts = [data[start:stop].partition(b"\0") for start, stop in pairwise(starts)]
    except (ValueError, msgspec.MsgspecError) as err:
        raise Corrupt(f"{what}: its index does not parse: {err}") from err
    if sum(block_bytes) != footer.groups_bytes or sum(content_bytes) != footer.content_bytes:
        raise Corrupt(f"{what}: groups of {sum(block_bytes)} bytes, {footer.groups_bytes} are stated")
    groups = [
        GroupInfo(folder, name, *numbers)
        for (folder, _, name), *numbers in zip(firsts, rows, block_bytes, content_bytes, digests, strict=True)
    ]
    if any(not 0 < group.rows <= ROWS_MAX for group in groups) or any(
        after.first_key <= before.first_key for before, after in pairwise(groups)
    ):
        raise Corrupt(f"{what}: its groups are empty, too large or not in order")
    content_starts = [0, *accumulate(content_bytes)]
    block_starts = [footer.content_bytes + end for end in (0, *accumulate(block_bytes))]
    return GroupIndex(summary, groups, content_starts, block_starts)
