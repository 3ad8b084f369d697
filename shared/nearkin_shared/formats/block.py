"""Encode and decode blocks.

A block is a header and a payload: chunks, VCDIFF deltas, or chunks in a frame that refers to bases.

Invariant: a written block was decoded and compared; a read block is checksummed before it is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.container_layout import (
    BLOCK,
    BLOCK_RAW_BYTES_MAX,
    KINDS,
    LOST,
    ORDINARY,
    PATCH,
    RAW,
    STORED,
    ZSTD,
)
from nearkin_shared.kernels.zstd_frames import FrameEncoder, decode_frame
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from typing_extensions import Buffer


@frozen
class EncodedBlock:
    """A finished block: header and payload to write, and its values for the directory."""

    header: bytes
    payload: bytes | memoryview
    raw_bytes: int
    codec: int
    kind: int
    depth: int
    role: int = ORDINARY

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payload without the header."""
        return len(self.payload)

    @property
    def record(self) -> bytes:
        """Header and payload, copied."""
        return b"".join([self.header, self.payload])


def encode_block(
    raw: U8, kind: int, depth: int, encoder: FrameEncoder, options: Mapping[int, int] | None = None
) -> EncodedBlock:
    """Compress `raw`, or store it if that is not smaller; decode and compare it (I7).

    `options` are zstd parameters for this block, None: the encoder's. Raises Corrupt if the decoded bytes differ:
    memory
    or the library failed.
    """
    frame = encoder.encode(raw, None, options)
    if len(frame) < len(raw):
        return _frame(raw, ZSTD, kind, depth, frame)
    return _frame(raw, STORED, kind, depth, raw.tobytes())


def encode_patch(
    raw: U8, prefix: Buffer, depth: int, encoder: FrameEncoder, options: Mapping[int, int]
) -> EncodedBlock:
    """Compress `raw` as one frame with `prefix` (at least 8 bytes) as its dictionary.

    `options` are zstd parameters for this block.
    """
    return _frame(raw, ZSTD, PATCH, depth, encoder.encode(raw, prefix, options))


def _frame(raw: U8, codec: int, kind: int, depth: int, payload: bytes | memoryview) -> EncodedBlock:
    fields = (b"NKB1", codec, kind, depth, 0, len(raw), len(payload))
    check = columns.check_bytes(BLOCK.pack(*fields, b"")[:-8], payload)
    return EncodedBlock(BLOCK.pack(*fields, check), payload, len(raw), codec, kind, depth)


def lost_block(raw_bytes: int, record: bytes) -> EncodedBlock:
    """Return the block that replaces `raw_bytes` of lost chunks: every reader refuses it.

    `record` is the corrupt record of these chunks, kept as found; of a block that was lost before, its kept bytes.
    """
    kept = record[BLOCK.size :] if record[:4] == LOST else record
    return EncodedBlock(BLOCK.pack(LOST, STORED, RAW, 0, 0, raw_bytes, len(kept), b""), kept, raw_bytes, STORED, RAW, 0)


def _allocate(size_bytes: int) -> U8:
    return np.empty(size_bytes, np.uint8)


class CheckedBlock(NamedTuple):
    """The contents of a block record; the checksum of `payload` was verified."""

    codec: int
    kind: int
    raw_bytes: int
    payload: memoryview


def checked_block(record: bytes | memoryview, what: str) -> CheckedBlock:
    """Verify one block record (header and payload). Raises Corrupt, with the name `what`."""
    view = memoryview(record)
    try:
        magic, codec, kind, _depth, reserved, raw_bytes, stored_bytes, check = BLOCK.unpack_from(view)
    except struct.error as err:
        raise Corrupt(f"{what}: truncated") from err
    payload = view[BLOCK.size :]
    if magic == LOST:
        raise Corrupt(f"{what}: its bytes are lost: put the same content again, or run `nearkin repair` with a copy")
    if magic != b"NKB1" or len(payload) != stored_bytes or raw_bytes > BLOCK_RAW_BYTES_MAX:
        raise Corrupt(f"{what}: not a block of {stored_bytes} bytes")
    if columns.check_bytes(view[: BLOCK.size - 8], payload) != check:
        raise Corrupt(f"{what}: checksum does not agree")
    if reserved or kind >= len(KINDS) or codec > ZSTD:
        raise FormatTooNew(
            f"{what}: compression {codec}, kind {kind}, flags {reserved}: unknown to this Nearkin; upgrade"
        )
    if kind == PATCH and codec != ZSTD:
        raise Corrupt(f"{what}: a patch block that is not compressed")
    if codec == STORED and raw_bytes != stored_bytes:
        raise Corrupt(f"{what}: stored as {stored_bytes} bytes, announced as {raw_bytes}")
    return CheckedBlock(codec, kind, raw_bytes, payload)


def decode_block(
    record: bytes | memoryview, what: str, prefix: Buffer | None = None, take: Callable[[int], U8] = _allocate
) -> U8:
    """Decode one block record (header and payload). Raises Corrupt, with the name `what`.

    `prefix`: the bytes of a patch block's bases; None verifies a patch block and returns no bytes. `take` returns a
    buffer
    of the given size.
    """
    checked = checked_block(record, what)
    if checked.kind == PATCH and prefix is None:
        return np.zeros(0, np.uint8)
    if checked.codec == STORED:
        return np.frombuffer(checked.payload, np.uint8)
    decoded = take(checked.raw_bytes)
    decode_frame(checked.payload, decoded, what, prefix if checked.kind == PATCH else None)
    return decoded
