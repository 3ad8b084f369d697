"""Block. Invariant: what is written was decoded and compared; what is read is checksummed before it is decoded.

A block is a header and a payload: chunks, VCDIFF deltas, or chunks in a frame that refers to bases.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats import columns
from nearkin_shared.formats.container_layout import BLOCK, BLOCK_RAW_BYTES_MAX, KINDS, LOST, PATCH, RAW, STORED, ZSTD
from nearkin_shared.kernels.zstd_frames import FrameEncoder, decode_frame
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from typing_extensions import Buffer


@frozen
class EncodedBlock:
    """A sealed block: its header and payload, ready to write, and what the directory says of it."""

    header: bytes
    payload: bytes | memoryview
    raw_bytes: int
    codec: int
    kind: int
    depth: int

    @property
    def stored_bytes(self) -> int:
        """Return the payload's bytes, header not counted."""
        return len(self.payload)

    @property
    def record(self) -> bytes:
        """Return header and payload, a copy."""
        return b"".join([self.header, self.payload])


def encode_block(
    raw: U8, kind: int, depth: int, encoder: FrameEncoder, options: Mapping[int, int] | None = None
) -> EncodedBlock:
    """Return `raw` compressed, or as it is where that is not smaller. Decoded and compared before it is kept (I7).

    `options` are those of zstd for this block, None: the encoder's. Raises Corrupt when the decoded bytes differ:
    memory or the library failed.
    """
    frame = encoder.encode(raw, None, options)
    if len(frame) < len(raw):
        return _frame(raw, ZSTD, kind, depth, frame)
    return _frame(raw, STORED, kind, depth, raw.tobytes())


def encode_patch(
    raw: U8, prefix: Buffer, depth: int, encoder: FrameEncoder, options: Mapping[int, int]
) -> EncodedBlock:
    """Return `raw` as one frame that refers to `prefix`, 8 bytes at least; else as `encode_block`.

    `options` are those of zstd for this block.
    """
    return _frame(raw, ZSTD, PATCH, depth, encoder.encode(raw, prefix, options))


def _frame(raw: U8, codec: int, kind: int, depth: int, payload: bytes | memoryview) -> EncodedBlock:
    fields = (b"NKB1", codec, kind, depth, 0, len(raw), len(payload))
    check = columns.check_bytes(BLOCK.pack(*fields, b"")[:-8], payload)
    return EncodedBlock(BLOCK.pack(*fields, check), payload, len(raw), codec, kind, depth)


def lost_block(raw_bytes: int, was: bytes) -> EncodedBlock:
    """Return what stands for chunks whose bytes are lost, `raw_bytes` together: every reader refuses it.

    `was` is the broken record that they lay in, kept as it was found; of a block that was lost before, what that kept.
    """
    kept = was[BLOCK.size :] if was[:4] == LOST else was
    return EncodedBlock(BLOCK.pack(LOST, STORED, RAW, 0, 0, raw_bytes, len(kept), b""), kept, raw_bytes, STORED, RAW, 0)


def _new(size_bytes: int) -> U8:
    return np.empty(size_bytes, np.uint8)


class CheckedBlock(NamedTuple):
    """What a block record holds: `payload` as it is stored, of which the checksum agrees."""

    codec: int
    kind: int
    raw_bytes: int
    payload: memoryview


def checked_block(record: bytes | memoryview, what: str) -> CheckedBlock:
    """Return what one block record (header and payload) holds. Raises Corrupt, naming `what`."""
    view = memoryview(record)
    try:
        magic, codec, kind, _depth, reserved, raw_bytes, stored_bytes, check = BLOCK.unpack_from(view)
    except struct.error as err:
        raise Corrupt(f"{what}: cut short") from err
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
    record: bytes | memoryview, what: str, prefix: Buffer | None = None, take: Callable[[int], U8] = _new
) -> U8:
    """Return the decoded bytes of one block record (header and payload). Raises Corrupt, naming `what`.

    `prefix`: the bytes of a patch block's bases; None checks the block and returns no bytes of it. `take` returns room
    for so many bytes.
    """
    checked = checked_block(record, what)
    if checked.kind == PATCH and prefix is None:
        return np.zeros(0, np.uint8)
    if checked.codec == STORED:
        return np.frombuffer(checked.payload, np.uint8)
    decoded = take(checked.raw_bytes)
    decode_frame(checked.payload, decoded, what, prefix if checked.kind == PATCH else None)
    return decoded
