"""Encode and decode the messages between stages.

Layout: message_layout.py. `position` of an envelope is the byte of the blob at which the message's first byte is,
`sequence` the number of its first segment: together they identify a repeated message. The payload is a view of the
received buffer.

Invariant: a decoded message is within every bound that a stage relies on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from nearkin_shared.errors import BadInput, Corrupt
from nearkin_shared.formats.blob_table import BatchedBlob, decode_table, encode_table
from nearkin_shared.formats.manifest import CREATED_US_MAX, encode_metadata
from nearkin_shared.formats.message_batches import read_fresh, read_paired, read_segments, read_sparse
from nearkin_shared.formats.message_layout import (
    BATCH_VERSION,
    BLOB_BYTES,
    CHUNKS_MAX,
    COLUMNS,
    CONDITIONAL_VERSION,
    ENDS,
    HEADER,
    LEDGER,
    MAGIC,
    MESSAGE_BYTES_MAX,
    REFERENCED_VERSION,
    SEGMENTS_MAX,
    SPARSE_VERSION,
    STAGED,
    STAGED_VERSION,
    TABLE_BYTES,
    TABLE_BYTES_MAX,
    VERSION,
    Column,
    Counts,
    Encoded,
    Envelope,
    MessageKind,
    MessageParts,
    Pack,
    UndecodedMessage,
    batch_problem,
    is_batch,
    is_end,
    is_staged,
    join_flags,
    joined,
    problem_of,
    read_header,
    split_messages,
    staged_bytes,
)
from nearkin_shared.kernels.scatter_copy import gather_new
from nearkin_shared.limits import MIB, SEGMENT_BYTES_MAX
from nearkin_shared.preconditions import Precondition, checked_tags
from nearkin_shared.results import LEDGER_FIELDS, Ledger
from nearkin_shared.types import U8, U32, Bools, FreshBatch, Locations, PairedBatch, SegmentBatch
from nearkin_shared.utils.frozen import frozen

__all__ = [
    "BLOB_BYTES",
    "CHUNKS_MAX",
    "ENDS",
    "FAILURE_CHARACTERS_MAX",
    "MESSAGE_BYTES_MAX",
    "SEGMENTS_MAX",
    "SEGMENT_BYTES_MAX",
    "Batch",
    "BatchEnd",
    "Encoded",
    "End",
    "Envelope",
    "Frame",
    "Fresh",
    "Message",
    "MessageKind",
    "MessageParts",
    "Paired",
    "Placed",
    "Segments",
    "Sparse",
    "StagedFrame",
    "UndecodedMessage",
    "decode",
    "encode",
    "encode_paired",
    "encode_parts",
    "is_batch",
    "is_end",
    "is_staged",
    "joined",
    "read",
    "read_header",
    "split_messages",
    "staged_bytes",
]

FAILURE_CHARACTERS_MAX = 500
DIGEST_BYTES = 32
STAGED_BYTES_MAX = 64 * MIB
"""Bound of a pack that a worker reads into memory."""
_VERSIONS = {
    MessageKind.STAGED: STAGED_VERSION,
    MessageKind.SPARSE: SPARSE_VERSION,
    MessageKind.STAGED_SPARSE: SPARSE_VERSION,
}


@frozen
class Frame:
    """A slice of a blob as received."""

    envelope: Envelope
    payload: U8


@frozen
class StagedFrame:
    """A reference to a slice of a blob in the object store.

    See `nearkin_shared.storage.staged_packs`.
    """

    envelope: Envelope
    origin: bytes
    """16 bytes that all attempts to store the same upload share."""
    began_us: int
    """Microseconds since 1970 at the start of the upload."""
    staged_ms: int
    """Milliseconds since 1970 when the slice was stored: a part of its object's name."""
    size_bytes: int
    blake3: bytes
    """Digest of the slice, 32 bytes."""
    is_sparse: bool = False
    """The pack has messages of kind SPARSE, and `envelope.position` counts their bytes, not those of the blob."""

    @property
    def pack(self) -> Pack:
        """Return the pack."""
        return Pack(self.envelope.blob, self.envelope.position, self.size_bytes, self.staged_ms, self.blake3)


@frozen
class Segments:
    """The output of the chunker; the payload has no all-zero chunks."""

    envelope: Envelope
    batch: SegmentBatch


@frozen
class Fresh:
    """The output of dedup; the payload has fresh chunks only."""

    envelope: Envelope
    batch: FreshBatch


@frozen
class Sparse:
    """Segments of a source that asked the index; the payload has the unknown chunks.

    Locations of known segments and chunks are claims: dedup looks all up again.
    """

    envelope: Envelope
    batch: FreshBatch


@frozen
class Paired:
    """The output of resemblance."""

    envelope: Envelope
    batch: PairedBatch


@frozen
class Placed:
    """The durable locations of segments, and what they cost.

    `known` bool[s]: not introduced by this blob; `lengths` uint32[s]: bytes of each segment in the blob.
    """

    envelope: Envelope
    segments: Locations
    known: Bools
    lengths: U32
    ledger: Ledger


@frozen
class End:
    """The end of a blob: complete, or with a `failure`; `segments` is their number if known."""

    envelope: Envelope
    began_us: int
    """Microseconds since 1970 at the start of the upload."""
    origin: bytes
    """16 bytes that all attempts to store the same upload share: committed once."""
    size_bytes: int = 0
    blake3: bytes = b""
    sha256: bytes | None = None
    segments: int | None = None
    failure: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    precondition: Precondition | None = None
    """Checked by the committer at the commit."""
    first_attempt_us: int | None = None
    """Earliest time of another attempt with this origin; None: none was made before `began_us`."""


@frozen
class Batch:
    """Whole small blobs of one tenant.

    Blob `i` is the next `blobs[i].size_bytes` of the payload.
    """

    envelope: Envelope
    blobs: tuple[BatchedBlob, ...]
    payload: U8


@frozen
class BatchEnd:
    """The end of a batch, all of whose segments were sent."""

    envelope: Envelope
    blobs: tuple[BatchedBlob, ...]

    @property
    def segments(self) -> int:
        """Number of segments of all blobs."""
        return sum(blob.segments or 0 for blob in self.blobs)


Message = Frame | StagedFrame | Segments | Sparse | Fresh | Paired | Placed | End | Batch | BatchEnd

assert len(LEDGER_FIELDS) == 12


def encode(message: Message) -> bytes:
    """Encode a message. Raises BadInput if `decode` would refuse it."""
    return encode_parts(message).join()


def encode_parts(message: Message) -> MessageParts:
    """Encode a message without copying its payload. Raises BadInput as `encode` does."""
    sketch, counts = "", Counts()
    columns: dict[str, Column] = {}
    payload: bytes | memoryview
    match message:
        case Frame():
            kind, payload = MessageKind.FRAME, message.payload.data
        case StagedFrame():
            kind = MessageKind.STAGED_SPARSE if message.is_sparse else MessageKind.STAGED
            payload = _staged_payload(message)
        case Segments():
            kind, counts, columns = MessageKind.SEGMENTS, counts_of(message.batch), segment_columns(message.batch)
            payload = _chunk_bytes(message.batch, np.flatnonzero(~message.batch.zero))
        case Fresh() | Sparse():
            fresh = message.batch
            kind = MessageKind.FRESH if isinstance(message, Fresh) else MessageKind.SPARSE
            counts = counts_of(fresh.batch, len(fresh.fresh))
            columns, payload = fresh_columns(fresh), _chunk_bytes(fresh.batch, fresh.fresh)
        case Paired():
            fresh = message.batch.fresh
            kind, sketch = MessageKind.PAIRED, message.batch.sketch
            counts = counts_of(fresh.batch, len(fresh.fresh), message.batch.super_features.shape[1])
            columns, payload = _paired_columns(message.batch), _chunk_bytes(fresh.batch, fresh.fresh)
        case Placed():
            kind, counts = MessageKind.PLACED, Counts(segments=len(message.segments))
            columns = {
                "containers": message.segments.containers,
                "ordinals": message.segments.ordinals,
                "lengths": message.lengths,
                "known": message.known,
            }
            payload = LEDGER.pack(*(getattr(message.ledger, name) for name in LEDGER_FIELDS))
        case End():
            kind, payload = MessageKind.END, _end_text(message)
        case Batch():
            kind, payload = MessageKind.BATCH, _batch_payload(message)
        case BatchEnd():
            kind, payload = MessageKind.BATCH_END, encode_table(message.blobs)
    envelope = message.envelope
    tenant, key, sketch_name = envelope.tenant.encode(), envelope.key.encode(), sketch.encode()
    problem = problem_of(len(tenant), len(key), len(sketch_name), counts, len(payload), kind)
    problem = problem or batch_problem(kind, envelope.blobs, is_batch=envelope.blobs > 0)
    if problem is not None or len(envelope.blob) != BLOB_BYTES:
        raise BadInput(f"message: {problem or f'blob id of {len(envelope.blob)} bytes: want {BLOB_BYTES}'}")
    conditional = isinstance(message, End) and message.precondition is not None
    version = CONDITIONAL_VERSION if conditional else _VERSIONS.get(kind, VERSION)
    header = header_of(kind, envelope, counts, len(payload), len(tenant), len(sketch_name), len(key), version)
    written = [np.ascontiguousarray(columns[name], dtype) for name, dtype, _ in COLUMNS[kind]]
    return parts_of([header, tenant, key, sketch_name, *written], payload)


def encode_paired(message: UndecodedMessage, paired: PairedBatch) -> MessageParts:
    """Encode the Paired that follows from a message of kind FRESH, with its payload.

    Equal to `encode`, without building the columns again. Raises BadInput.
    """
    assert message.kind is MessageKind.FRESH
    counts, envelope, sketch = message.counts, message.envelope, paired.sketch.encode()
    fresh, super_features = paired.super_features.shape
    if not len(paired.base_found) == len(paired.bases) == len(paired.base_rank) == fresh == counts.fresh:
        raise BadInput(f"{message.what}: {fresh} pairs for {counts.fresh} fresh chunks")
    tenant, key = envelope.tenant.encode(), envelope.key.encode()
    counts = Counts(counts.segments, counts.chunks, fresh, super_features)
    problem = problem_of(len(tenant), len(key), len(sketch), counts, message.payload_bytes, MessageKind.PAIRED)
    if problem is not None:
        raise BadInput(f"message: {problem}")
    return parts_of(
        [
            header_of(
                *(MessageKind.PAIRED, envelope, counts, message.payload_bytes, len(tenant), len(sketch), len(key)),
                version=REFERENCED_VERSION if message.is_referenced else VERSION,
            ),
            tenant,
            key,
            sketch,
            np.ascontiguousarray(paired.super_features, "<u8"),
            np.ascontiguousarray(paired.bases.containers, "<u8"),
            message.columns("segment_containers", "chunk_containers"),
            np.ascontiguousarray(paired.bases.ordinals, "<u4"),
            message.columns("segment_ordinals", "zero"),
            np.ascontiguousarray(paired.base_found, "u1"),
            np.ascontiguousarray(paired.base_rank, "u1"),
        ],
        message.payload,
    )


def header_of(
    kind: MessageKind,
    envelope: Envelope,
    counts: Counts,
    payload_bytes: int,
    tenant_bytes: int,
    sketch_bytes: int,
    key_bytes: int,
    version: int = VERSION,
) -> bytes:
    """Return the header of a message."""
    return HEADER.pack(
        MAGIC,
        BATCH_VERSION if envelope.blobs else version,
        kind,
        counts.fresh,
        envelope.blob,
        envelope.position,
        envelope.sequence,
        payload_bytes,
        counts.segments,
        counts.chunks,
        counts.super_features,
        tenant_bytes,
        sketch_bytes,
        key_bytes,
        envelope.blobs,
    )


def parts_of(head: Sequence[Buffer], payload: Buffer) -> MessageParts:
    """Return an encoded message. Raises BadInput if it is too large."""
    parts = MessageParts(b"".join(head), np.frombuffer(payload, np.uint8))
    if len(parts) > MESSAGE_BYTES_MAX:
        raise BadInput(f"message of {len(parts)} bytes: want at most {MESSAGE_BYTES_MAX}; raise chunker.min_bytes")
    return parts


def decode(value: Encoded, what: str) -> Message:
    """Decode a message; its payload is a view of `value`. Raises Corrupt, FormatTooNew."""
    return read(read_header(value, what))


def read(message: UndecodedMessage) -> Message:
    """Decode a message after its header. Raises Corrupt."""
    envelope = message.envelope
    try:
        match message.kind:
            case MessageKind.FRAME | MessageKind.STAGED | MessageKind.STAGED_SPARSE:
                return _slice(message)
            case MessageKind.SEGMENTS | MessageKind.PAIRED | MessageKind.SPARSE | MessageKind.FRESH:
                return _read_chunks(message)
            case MessageKind.PLACED:
                ledger = Ledger(*LEDGER.unpack(message.payload))
                segments = Locations(message.column("containers"), message.column("ordinals"))
                known = join_flags([message], "known")
                return Placed(envelope, segments, known, message.column("lengths"), ledger)
            case MessageKind.BATCH | MessageKind.BATCH_END:
                is_whole = message.kind is MessageKind.BATCH
                return _batch(envelope, message.payload) if is_whole else _batch_end(envelope, message.payload)
            case MessageKind.END:
                return _end(envelope, message.payload)
    except (BadInput, ValueError, KeyError, TypeError, RecursionError, struct.error) as err:
        raise Corrupt(f"{message.what}: does not parse: {err}") from err


def _read_chunks(message: UndecodedMessage) -> Segments | Sparse | Fresh | Paired:
    if message.is_referenced:
        raise ValueError("its bytes are in packs, which no reader of this topic takes")
    if message.kind is MessageKind.SEGMENTS:
        return Segments(message.envelope, read_segments([message]).part(0))
    if message.kind is MessageKind.PAIRED:
        return Paired(message.envelope, read_paired([message])[0])
    return _fresh(message)


# --- batches ---------------------------------------------------------------------------------------------------------


def counts_of(batch: SegmentBatch, fresh: int = 0, super_features: int = 0) -> Counts:
    """Return the rows of a message's columns."""
    return Counts(batch.segments, len(batch.lengths), fresh, super_features)


def _chunk_bytes(batch: SegmentBatch, rows: NDArray[np.intp]) -> memoryview:
    """Return the bytes of the chosen chunks; a view if they are consecutive."""
    offsets, lengths = batch.offsets[rows], batch.lengths[rows]
    if not len(rows):
        return memoryview(b"")
    start, stop = int(offsets[0]), int(offsets[-1]) + int(lengths[-1])
    if stop - start == int(lengths.sum(dtype=np.uint64)):
        return batch.payload[start:stop].data
    return gather_new([batch.payload], np.zeros(len(rows), np.int32), offsets, lengths).data


def segment_columns(batch: SegmentBatch) -> dict[str, Column]:
    """Return the columns of the kind SEGMENTS."""
    return {
        "chunk_bounds": batch.chunk_bounds,
        "segment_ids": batch.segment_ids.reshape(-1),
        "names": batch.names.reshape(-1),
        "zero": batch.zero,
    }


def fresh_columns(fresh: FreshBatch) -> dict[str, Column]:
    """Return the columns of the kind FRESH."""
    return segment_columns(fresh.batch) | {
        "segment_containers": fresh.segment_locations.containers,
        "segment_ordinals": fresh.segment_locations.ordinals,
        "chunk_containers": fresh.chunk_locations.containers,
        "chunk_ordinals": fresh.chunk_locations.ordinals,
        "first": fresh.first,
        "segment_known": fresh.segment_known,
        "chunk_known": fresh.chunk_known,
    }


def _paired_columns(paired: PairedBatch) -> dict[str, Column]:
    return fresh_columns(paired.fresh) | {
        "super_features": paired.super_features.reshape(-1),
        "base_containers": paired.bases.containers,
        "base_ordinals": paired.bases.ordinals,
        "base_found": paired.base_found,
        "base_rank": paired.base_rank,
    }


def _fresh(message: UndecodedMessage) -> Fresh | Sparse:
    if message.kind is MessageKind.FRESH:
        return Fresh(message.envelope, read_fresh([message])[0])
    return Sparse(message.envelope, read_sparse([message]).part(0))


def _slice(message: UndecodedMessage) -> Frame | StagedFrame:
    if message.kind is MessageKind.FRAME:
        return Frame(message.envelope, message.payload)
    return _staged(message.envelope, message.payload, is_sparse=message.kind is MessageKind.STAGED_SPARSE)


# --- references ------------------------------------------------------------------------------------------------------


def _staged_payload(message: StagedFrame) -> bytes:
    if len(message.origin) != BLOB_BYTES or len(message.blake3) != DIGEST_BYTES or message.size_bytes < 1:
        raise BadInput(
            f"message: a reference to {message.size_bytes} bytes, or with an origin or a digest of wrong size"
        )
    return STAGED.pack(message.size_bytes, message.staged_ms, message.began_us, message.origin, message.blake3)


def _staged(envelope: Envelope, payload: U8, *, is_sparse: bool) -> StagedFrame:
    size_bytes, staged_ms, began_us, origin, digest = STAGED.unpack(payload)
    if not 1 <= size_bytes <= STAGED_BYTES_MAX:
        raise ValueError(f"a reference to {size_bytes} bytes: want 1 to {STAGED_BYTES_MAX}")
    _check_bound(began_us, "began_us", CREATED_US_MAX)
    _check_bound(staged_ms, "staged_ms", CREATED_US_MAX // 1000)
    return StagedFrame(envelope, origin, began_us, staged_ms, size_bytes, digest, is_sparse)


# --- batches of blobs ------------------------------------------------------------------------------------------------


def _batch_payload(message: Batch) -> bytes:
    sizes = sum(blob.size_bytes for blob in message.blobs)
    if sizes != len(message.payload):
        raise BadInput(f"message: {len(message.payload)} bytes of a batch whose blobs have {sizes}")
    table = encode_table(message.blobs)
    return b"".join((TABLE_BYTES.pack(len(table)), table, message.payload.data))


def _batch(envelope: Envelope, payload: U8) -> Batch:
    (table_bytes,) = TABLE_BYTES.unpack_from(payload)
    start = TABLE_BYTES.size + table_bytes
    if table_bytes > TABLE_BYTES_MAX or start > len(payload):
        raise ValueError(f"a table of {table_bytes} bytes in a batch of {len(payload)}")
    blobs = decode_table(payload[TABLE_BYTES.size : start].tobytes(), envelope.blobs)
    if sum(blob.size_bytes for blob in blobs) != len(payload) - start:
        raise ValueError(f"{len(payload) - start} bytes of blobs, fewer or more than the table has")
    return Batch(envelope, blobs, payload[start:])


def _batch_end(envelope: Envelope, payload: U8) -> BatchEnd:
    blobs = decode_table(payload.tobytes(), envelope.blobs)
    if any(blob.segments is None for blob in blobs):
        raise ValueError("a blob without its number of segments at the end of a batch")
    return BatchEnd(envelope, blobs)


# --- the end of a blob -----------------------------------------------------------------------------------------------


def _end_text(end: End) -> bytes:
    fields: dict[str, object] = {
        "began_us": end.began_us,
        "origin": end.origin.hex(),
        "size_bytes": end.size_bytes,
        "blake3": end.blake3.hex(),
        "sha256": end.sha256.hex() if end.sha256 is not None else None,
        "segments": end.segments,
        "failure": None if end.failure is None else _sanitize_reason(end.failure),
        "metadata": dict(end.metadata),
    }
    if end.precondition is not None:
        fields |= {"if_match": end.precondition.if_match, "if_none_match": end.precondition.if_none_match}
    if end.first_attempt_us is not None:
        fields["first_attempt_us"] = end.first_attempt_us
    return json.dumps(fields, ensure_ascii=False).encode()


def _end(envelope: Envelope, payload: U8) -> End:
    found = json.loads(payload.tobytes())
    if not isinstance(found, dict):
        raise TypeError("an end that is not a JSON object")
    if not isinstance(found["metadata"], dict):
        raise TypeError("metadata that is not a JSON object")
    sha256, first_us = found["sha256"], found.get("first_attempt_us")
    end = End(
        envelope=envelope,
        began_us=_check_bound(found["began_us"], "began_us", CREATED_US_MAX),
        origin=bytes.fromhex(found["origin"]),
        size_bytes=_check_bound(found["size_bytes"], "size_bytes"),
        blake3=bytes.fromhex(found["blake3"]),
        sha256=None if sha256 is None else bytes.fromhex(sha256),
        segments=None if found["segments"] is None else _check_bound(found["segments"], "segments"),
        failure=None if found["failure"] is None else _sanitize_reason(found["failure"]),
        metadata=found["metadata"],
        precondition=_precondition(found),
        first_attempt_us=None if first_us is None else _check_bound(first_us, "first_attempt_us", CREATED_US_MAX),
    )
    encode_metadata(end.metadata)
    whole = end.failure is None
    if len(end.origin) != BLOB_BYTES or len(end.blake3) != (32 if whole else len(end.blake3)):
        raise ValueError("an origin or a digest of the wrong size")
    if end.sha256 is not None and len(end.sha256) != 32:
        raise ValueError("a SHA-256 of the wrong size")
    return end


def _precondition(found: Mapping[str, object]) -> Precondition | None:
    if_match = checked_tags("if_match", found.get("if_match"))
    if_none_match = checked_tags("if_none_match", found.get("if_none_match"))
    return None if if_match is None and if_none_match is None else Precondition(if_match, if_none_match)


def _sanitize_reason(failure: object) -> str:
    """Truncate and sanitize the reason of a failure, so that it can always be encoded."""
    return str(failure)[:FAILURE_CHARACTERS_MAX].encode(errors="replace").decode()


def _check_bound(value: object, name: str, most: int = (1 << 63) - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} {value!r}: want a number from 0 to {most}")
    return value
