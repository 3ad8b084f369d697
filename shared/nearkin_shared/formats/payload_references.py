"""Encode messages whose bytes are in packs of the object store.

    columns of the kind | pack, pack, ...

    pack: position in the blob u64 | bytes u64 | stored at u64, milliseconds since 1970 | BLAKE3 32

The payload of a message of kind SEGMENTS, FRESH or PAIRED is replaced by references in format REFERENCED_VERSION. All
chunks of the message are listed with their lengths, so the bytes of a chunk are at the message's position plus the
lengths of the chunks before it.

Invariant: the packs of a message have all bytes of its chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.message import (
    STAGED_BYTES_MAX,
    Fresh,
    Segments,
    counts_of,
    fresh_columns,
    header_of,
    parts_of,
    segment_columns,
)
from nearkin_shared.formats.message_batches import read_fresh, read_paired
from nearkin_shared.formats.message_layout import (
    COLUMNS,
    REFERENCED_VERSION,
    VERSION,
    Encoded,
    MessageKind,
    MessageParts,
    Pack,
    UndecodedMessage,
    head_of,
    problem_of,
    read_header,
)
from nearkin_shared.types import U8, U32, U64, offsets_of

_PACK = Struct("<QQQ32s")
_PAYLOAD_BYTES_AT = 40
"""Offset of the payload's size in a header: docs/internals/formats/message.md."""


def is_referenced(value: Encoded) -> bool:
    """Return whether the data begin as a message with references does: a hint, as `is_end`."""
    return head_of(value)[4:5] == bytes([REFERENCED_VERSION])


def encode_referenced(message: Segments | Fresh, packs: Sequence[Pack]) -> bytes:
    """Encode segments without their bytes, which the packs have. Raises BadInput."""
    kind = MessageKind.SEGMENTS if isinstance(message, Segments) else MessageKind.FRESH
    if isinstance(message, Segments):
        batch, columns, fresh = message.batch, segment_columns(message.batch), 0
    else:
        batch, columns, fresh = message.batch.batch, fresh_columns(message.batch), len(message.batch.fresh)
    envelope, counts, payload = message.envelope, counts_of(batch, fresh), _payload(packs)
    tenant, key = envelope.tenant.encode(), envelope.key.encode()
    problem = problem_of(len(tenant), len(key), 0, counts, len(payload), kind)
    if problem is not None:
        raise BadInput(f"message: {problem}")
    header = header_of(kind, envelope, counts, len(payload), len(tenant), 0, len(key), REFERENCED_VERSION)
    written = [np.ascontiguousarray(columns[name], dtype) for name, dtype, _ in COLUMNS[kind]]
    return parts_of([header, tenant, key, *written], payload).join()


def _payload(packs: Sequence[Pack]) -> bytes:
    if not packs:
        raise BadInput("message: references to no pack")
    return b"".join(_PACK.pack(pack.position, pack.size_bytes, pack.staged_ms, pack.blake3) for pack in packs)


def packs_of(message: UndecodedMessage) -> list[Pack]:
    """Return the packs of a message with references, in the order of the blob.

    Each begins at or before the end of the one before it, and ends behind it. Raises Corrupt.
    """
    try:
        entries = list(_PACK.iter_unpack(message.payload.data))
    except struct.error as err:
        raise Corrupt(f"{message.what}: its references do not parse: {err}") from err
    found: list[Pack] = []
    for position, size_bytes, staged_ms, digest in entries:
        pack = Pack(message.envelope.blob, position, size_bytes, staged_ms, digest)
        is_next = not found or position <= found[-1].end < pack.end
        if not 1 <= size_bytes <= STAGED_BYTES_MAX or staged_ms > CREATED_US_MAX // 1000 or not is_next:
            raise Corrupt(
                f"{message.what}: a reference to {size_bytes} bytes at {position}, stored at {staged_ms} ms: want 1 to "
                f"{STAGED_BYTES_MAX} bytes, each pack at the end of the one before it, and times before the year 10000"
            )
        found.append(pack)
    if not found:
        raise Corrupt(f"{message.what}: references to no pack")
    return found


def distinct_packs(messages: Iterable[UndecodedMessage]) -> list[Pack]:
    """Return the packs of consecutive messages of one blob, each once, in its order.

    Raises Corrupt.
    """
    found: list[Pack] = []
    for message in messages:
        found += [pack for pack in packs_of(message) if not found or pack.end > found[-1].end]
    return found


def wanted_bytes(message: UndecodedMessage) -> tuple[U64, U32]:
    """Return (position in the blob uint64[f], length uint32[f]) of the fresh chunks.

    Raises Corrupt.
    """
    is_paired = message.kind is MessageKind.PAIRED
    fresh = read_paired([message])[0].fresh if is_paired else read_fresh([message])[0]
    lengths = fresh.batch.lengths
    starts = offsets_of(lengths) + np.uint64(message.envelope.position)
    return starts[fresh.fresh], lengths[fresh.fresh]


def with_bytes(message: UndecodedMessage, payload: U8) -> UndecodedMessage:
    """Return the message with its chunks' bytes in place of references. Raises Corrupt."""
    head = bytearray(message.head[: message.starts[-1]])
    head[4] = VERSION
    struct.pack_into("<I", head, _PAYLOAD_BYTES_AT, len(payload))
    return read_header(MessageParts(bytes(head), payload), message.what)
