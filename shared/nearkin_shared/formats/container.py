"""Encode and decode containers.

    0        4     6      8              16        32
    | NKC1 | ver | flags | container id | domain  | block ... | directory | footer |

Chunks are numbered in stream order, across blocks; deltas and patch blocks name bases by (container, ordinal), and
segment recipes name their chunks the same way, so that a fingerprint is written once in the life of a chunk
(docs/internals/formats/container.md).

Invariant: every byte belongs to exactly one checksummed record; a reader needs nothing but the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from nearkin_shared.errors import BadInput, Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.block import EncodedBlock
from nearkin_shared.formats.container_layout import (
    BLOCK,
    CONTAINER_BYTES_MAX,
    FOOTER,
    HEADER,
    ORDINARY,
    VERSION,
    VERSION_MIN,
    VERSION_WHOLE,
)
from nearkin_shared.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.formats.directory_codec import decode_directory, encode_directory
from nearkin_shared.types import CONTAINER_ID_MIN, ContainerId


class EncodedContainer(NamedTuple):
    """The consecutive parts of a container; `recipe_bytes` are a part of `directory_bytes`."""

    parts: Sequence[bytes | memoryview]
    directory_bytes: int
    recipe_bytes: int

    @property
    def data(self) -> bytes:
        """The whole container, copied."""
        return b"".join(self.parts)

    def read_back(self, what: str) -> Directory:
        """Decode the directory from its bytes. Raises Corrupt if the parts are no container."""
        header, directory, footer = self.parts[0], self.parts[-4], b"".join(self.parts[-3:])
        container_bytes = sum(len(part) for part in self.parts)
        _, size, check = footer_of(header, footer, container_bytes, what)
        if size != len(directory):
            raise Corrupt(f"{what}: a directory of {len(directory)} bytes but its footer states {size}")
        container, domain = container_id_of(header, what)
        return decode_directory(directory, container, domain, container_bytes, check, what)


def encode_container(
    container: ContainerId,
    domain: bytes,
    depth_max: int,
    sketch_names: Sequence[str],
    blocks: Sequence[EncodedBlock | None],
    chunks: ChunkTable,
    segments: SegmentTable,
    prefixes: PrefixTable | None = None,
) -> EncodedContainer:
    """Return the container, ready to write. A block that is None was removed."""
    whole = bool(chunks.there.all()) and all(block is not None and block.role == ORDINARY for block in blocks)
    version = VERSION_WHOLE if whole else VERSION
    parts: list[bytes | memoryview] = [HEADER.pack(b"NKC1", version, 0, container, domain)]
    for block in blocks:
        if block is not None:
            parts += [block.header, block.payload]
    prefixes = prefixes or PrefixTable.empty(len(blocks))
    directory, recipe_bytes = encode_directory(
        container, depth_max, sketch_names, blocks, chunks, segments, prefixes, whole=whole
    )
    offset = sum(len(part) for part in parts)
    lead = FOOTER.pack(offset, len(directory), columns.check_bytes(directory), b"", b"")[:20]
    frame_check = columns.check_bytes(parts[0], lead)
    return EncodedContainer([*parts, directory, lead, frame_check, b"NKCF"], len(directory), recipe_bytes)


def container_id_of(header: bytes | memoryview, what: str) -> tuple[ContainerId, bytes]:
    """Return (id, domain) of a container's header. Raises Corrupt, FormatTooNew."""
    try:
        magic, version, flags, container, domain = HEADER.unpack_from(header)
    except struct.error as err:
        raise Corrupt(f"{what}: shorter than a header") from err
    if magic != b"NKC1":
        raise Corrupt(f"{what}: not a container (starts with {magic!r})")
    if version > VERSION or flags:
        raise FormatTooNew(
            f"{what}: container format {version}, flags {flags}; this Nearkin reads up to {VERSION}: upgrade"
        )
    if version < VERSION_MIN or container < CONTAINER_ID_MIN:
        raise Corrupt(f"{what}: container format {version}, id {container}: no release of Nearkin wrote such")
    return ContainerId(container), domain


def footer_of(
    header: bytes | memoryview, footer: bytes | memoryview, container_bytes: int, what: str
) -> tuple[int, int, bytes]:
    """Return (directory offset, directory bytes, directory checksum). Raises Corrupt."""
    try:
        offset, size, check, frame_check, magic = FOOTER.unpack(footer)
    except struct.error as err:
        raise Corrupt(f"{what}: shorter than a footer") from err
    if (
        magic != b"NKCF"
        or columns.check_bytes(memoryview(header)[: HEADER.size], memoryview(footer)[:20]) != frame_check
    ):
        raise Corrupt(f"{what}: footer's checksum does not agree")
    if offset + size + FOOTER.size != container_bytes or offset < HEADER.size:
        raise Corrupt(f"{what}: {container_bytes} bytes but its footer states {offset + size + FOOTER.size}")
    return offset, size, check


def decode_container(data: bytes | memoryview, what: str) -> Directory:
    """Return the directory of a container in memory, after checking header and footer."""
    view = memoryview(data)
    if len(view) < HEADER.size + FOOTER.size:
        raise Corrupt(f"{what}: {len(view)} bytes are too few for a container")
    if len(view) > CONTAINER_BYTES_MAX:
        raise BadInput(f"{what}: {len(view)} bytes; a container has at most {CONTAINER_BYTES_MAX}")
    # Check the footer first: its checksum covers the header, so that a flipped bit is not reported as a newer format.
    offset, size, check = footer_of(view, view[-FOOTER.size :], len(view), what)
    container, domain = container_id_of(view, what)
    return decode_directory(view[offset : offset + size], container, domain, len(view), check, what)


def copied_block(directory: Directory, number: int, record: bytes | memoryview, role: int) -> EncodedBlock:
    """Return an unchanged block of a container, of role `role`, for its next generation."""
    blocks = directory.blocks
    return EncodedBlock(
        bytes(record[: BLOCK.size]),
        record[BLOCK.size :],
        int(blocks.raw[number]),
        int(blocks.codecs[number]),
        int(blocks.kinds[number]),
        int(blocks.depths[number]),
        role,
    )
