"""Messages between stages. Invariant: what `decode` returns is inside every bound that a stage relies on.

    0      4     5      6       8         24         32         40        44         46       48
    | NKS1 | ver | kind | fresh | blob id | position | sequence | payload | segments | chunks | SFs, name sizes, 0
    64
    | tenant | key | sketch | columns | payload |                                        docs/formats/message.md

`position` is the byte of the blob at which the message's first byte lies, `sequence` the number of its first segment:
the two make a repeated message recognisable. The payload is cut out of the received buffer, never copied.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import BadInput, Corrupt, FormatTooNew
from nearkin.formats.manifest import encode_metadata
from nearkin.kernels.gather import gather_new
from nearkin.limits import KEY_BYTES_MAX, METADATA_BYTES_MAX, SEGMENT_BYTES_MAX, TENANT_BYTES_MAX
from nearkin.records import (
    NAME_BYTES,
    SEGMENT_ID_BYTES,
    U8,
    U32,
    Bools,
    FreshBatch,
    Ledger,
    Locations,
    PairedBatch,
    SegmentBatch,
)

MAGIC = b"NKS1"
VERSION = 1
BLOB_BYTES = 16
LENGTH_AT = 28
"""In a name: after fingerprint and check tag."""
MESSAGE_BYTES_MAX = 1_048_576 - 16 * 1024
"""Kafka's default limit, less what a record batch and our headers take."""
CHUNKS_MAX = 4096
"""Chunks of a message: with SEGMENT_BYTES_MAX of payload and 24 bytes of SFs they stay below the limit above."""
SEGMENTS_MAX = CHUNKS_MAX
FAILURE_CHARACTERS_MAX = 500
END_BYTES_MAX = 2 * METADATA_BYTES_MAX
SKETCH_BYTES_MAX = 255
SUPER_FEATURES_MAX = 16

HEADER = Struct("<4sBBH16sQQIHHBBBxH10x")
assert HEADER.size == 64  # docs/formats/message.md


class Kind(IntEnum):
    """What a message carries."""

    FRAME = 1
    SEGMENTS = 2
    FRESH = 3
    PAIRED = 4
    PLACED = 5
    END = 6


_END = bytes([Kind.END])


@dataclass(frozen=True, slots=True)
class Envelope:
    """Whose message it is and where in the blob it belongs. `blob` 16 bytes: one upload attempt."""

    blob: bytes
    tenant: str
    key: str
    position: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A slice of a blob as received."""

    envelope: Envelope
    payload: U8


@dataclass(frozen=True, slots=True)
class Segments:
    """Chunked: payload without the all-zero chunks."""

    envelope: Envelope
    batch: SegmentBatch


@dataclass(frozen=True, slots=True)
class Fresh:
    """After dedup: payload of fresh chunks only."""

    envelope: Envelope
    batch: FreshBatch


@dataclass(frozen=True, slots=True)
class Paired:
    """After resemblance."""

    envelope: Envelope
    batch: PairedBatch


@dataclass(frozen=True, slots=True)
class Placed:
    """Durable: where the segments lie, and what they cost.

    `known` bool[s]: not introduced by this blob; `lengths` uint32[s]: bytes of the blob that each stands for.
    """

    envelope: Envelope
    segments: Locations
    known: Bools
    lengths: U32
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class End:
    """The blob has ended: whole, or with a `failure`. `segments` is how many there are, once it is chunked."""

    envelope: Envelope
    began_us: int
    """Microseconds since 1970 when the upload began."""
    origin: bytes
    """16 bytes that two attempts to store the same thing share: committed once."""
    size_bytes: int = 0
    blake3: bytes = b""
    sha256: bytes | None = None
    segments: int | None = None
    failure: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


Message = Frame | Segments | Fresh | Paired | Placed | End

_LEDGER = Struct("<12Q")
_LEDGER_FIELDS = tuple(Ledger.__slots__)
assert len(_LEDGER_FIELDS) == 12

_Array = NDArray[Any]

# Columns of each kind in the order they are written: (name, dtype, rows as a function of the counts, see `_rows`).
_SEGMENT_COLUMNS = (
    ("chunk_bounds", "<u4", "segments+1"),
    ("segment_ids", "u1", "segments*20"),
    ("names", "u1", "chunks*32"),
    ("zero", "u1", "chunks"),
)
_FRESH_COLUMNS = (
    ("segment_containers", "<u8", "segments"),
    ("chunk_containers", "<u8", "chunks"),
    ("segment_ordinals", "<u4", "segments"),
    ("chunk_ordinals", "<u4", "chunks"),
    *_SEGMENT_COLUMNS[:1],
    ("first", "<u2", "chunks"),
    ("segment_known", "u1", "segments"),
    ("chunk_known", "u1", "chunks"),
    *_SEGMENT_COLUMNS[1:],
)
_PAIRED_COLUMNS = (
    ("super_features", "<u8", "fresh*super_features"),
    ("base_containers", "<u8", "fresh"),
    *_FRESH_COLUMNS[:2],
    ("base_ordinals", "<u4", "fresh"),
    *_FRESH_COLUMNS[2:],
    ("base_found", "u1", "fresh"),
    ("base_rank", "u1", "fresh"),
)
_PLACED_COLUMNS = (
    ("containers", "<u8", "segments"),
    ("ordinals", "<u4", "segments"),
    ("lengths", "<u4", "segments"),
    ("known", "u1", "segments"),
)
_COLUMNS: dict[Kind, tuple[tuple[str, str, str], ...]] = {
    Kind.FRAME: (),
    Kind.SEGMENTS: _SEGMENT_COLUMNS,
    Kind.FRESH: _FRESH_COLUMNS,
    Kind.PAIRED: _PAIRED_COLUMNS,
    Kind.PLACED: _PLACED_COLUMNS,
    Kind.END: (),
}


@dataclass(frozen=True, slots=True)
class _Counts:
    segments: int = 0
    chunks: int = 0
    fresh: int = 0
    super_features: int = 0

    def rows(self, rule: str) -> int:
        """Return how many rows a column has."""
        match rule:
            case "segments+1":
                return self.segments + 1
            case "segments*20":
                return self.segments * SEGMENT_ID_BYTES
            case "chunks*32":
                return self.chunks * NAME_BYTES
            case "fresh*super_features":
                return self.fresh * self.super_features
            case _:
                return int(getattr(self, rule))


def encode(message: Message) -> bytes:
    """Return the message's bytes. Raises BadInput for what `decode` would refuse."""
    sketch, counts = "", _Counts()
    columns: dict[str, _Array] = {}
    payload: bytes | memoryview
    match message:
        case Frame():
            kind, payload = Kind.FRAME, message.payload.data
        case Segments():
            kind, counts, columns = Kind.SEGMENTS, _counts(message.batch), _segment_columns(message.batch)
            payload = _gathered(message.batch, np.flatnonzero(~message.batch.zero))
        case Fresh():
            fresh = message.batch
            kind, counts = Kind.FRESH, _counts(fresh.batch, len(fresh.fresh))
            columns, payload = _fresh_columns(fresh), _gathered(fresh.batch, fresh.fresh)
        case Paired():
            fresh = message.batch.fresh
            kind, sketch = Kind.PAIRED, message.batch.sketch
            counts = _counts(fresh.batch, len(fresh.fresh), message.batch.super_features.shape[1])
            columns, payload = _paired_columns(message.batch), _gathered(fresh.batch, fresh.fresh)
        case Placed():
            kind, counts = Kind.PLACED, _Counts(segments=len(message.segments))
            columns = {
                "containers": message.segments.containers,
                "ordinals": message.segments.ordinals,
                "lengths": message.lengths,
                "known": message.known,
            }
            payload = _LEDGER.pack(*(getattr(message.ledger, name) for name in _LEDGER_FIELDS))
        case End():
            kind, payload = Kind.END, _end_text(message)
    envelope = message.envelope
    tenant, key, named = envelope.tenant.encode(), envelope.key.encode(), sketch.encode()
    problem = _problem(len(tenant), len(key), len(named), counts, len(payload), kind)
    if problem is not None or len(envelope.blob) != BLOB_BYTES:
        raise BadInput(f"message: {problem or f'blob id of {len(envelope.blob)} bytes: want {BLOB_BYTES}'}")
    header = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        counts.fresh,
        envelope.blob,
        envelope.position,
        envelope.sequence,
        len(payload),
        counts.segments,
        counts.chunks,
        counts.super_features,
        len(tenant),
        len(named),
        len(key),
    )
    parts = [header, tenant, key, named]
    for name, dtype, _ in _COLUMNS[kind]:
        parts.append(np.ascontiguousarray(columns[name], dtype).tobytes())
    data = b"".join([*parts, payload])
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadInput(f"message of {len(data)} bytes: want at most {MESSAGE_BYTES_MAX}; lower segment.max_bytes")
    return data


def is_end(data: bytes) -> bool:
    """Return whether data begin as an end's do, without reading on: a hint, no promise that they decode."""
    return data[:4] == MAGIC and data[5:6] == _END


def decode(data: bytes, what: str) -> Message:
    """Return the message; its payload is a view of `data`. Raises Corrupt, or FormatTooNew, naming `what`."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise Corrupt(f"{what}: {len(data)} bytes are too many for a message, want at most {MESSAGE_BYTES_MAX}")
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise Corrupt(f"{what}: not a Nearkin message ({len(data)} bytes, starts with {data[:4]!r})")
    if data[4] != VERSION:
        raise FormatTooNew(
            f"{what}: message format {data[4]}; this Nearkin reads {VERSION}: upgrade the workers together"
        )
    fields = HEADER.unpack_from(data)
    _, _, code, fresh, blob, position, sequence, payload_bytes, segments, chunks, ranks = fields[:11]
    tenant_bytes, sketch_bytes, key_bytes = fields[11:]
    counts = _Counts(segments, chunks, fresh, ranks)
    if code not in _COLUMNS:
        raise Corrupt(f"{what}: message kind {code} is not known")
    kind = Kind(code)
    problem = _problem(tenant_bytes, key_bytes, sketch_bytes, counts, payload_bytes, kind)
    if problem is not None:
        raise Corrupt(f"{what}: {problem}")
    start = HEADER.size
    try:
        tenant = data[start : start + tenant_bytes].decode()
        start += tenant_bytes
        key = data[start : start + key_bytes].decode()
        start += key_bytes
        sketch = data[start : start + sketch_bytes].decode()
        start += sketch_bytes
    except UnicodeDecodeError as err:
        raise Corrupt(f"{what}: names are not UTF-8") from err
    columns: dict[str, _Array] = {}
    for name, dtype, rule in _COLUMNS[kind]:
        rows = counts.rows(rule)
        width = np.dtype(dtype).itemsize
        if start + rows * width > len(data):
            raise Corrupt(f"{what}: cut short in {name}")
        columns[name] = np.frombuffer(data, dtype, rows, start)
        start += rows * width
    if start + payload_bytes != len(data):
        raise Corrupt(f"{what}: {len(data) - start} bytes of payload, {payload_bytes} announced")
    payload = np.frombuffer(data, np.uint8, payload_bytes, start)
    envelope = Envelope(blob, tenant, key, position, sequence)
    try:
        return _message(kind, envelope, counts, columns, sketch, payload, what)
    except (BadInput, ValueError, KeyError, TypeError, RecursionError, struct.error) as err:
        raise Corrupt(f"{what}: does not parse: {err}") from err


def _message(
    kind: Kind,
    envelope: Envelope,
    counts: _Counts,
    columns: dict[str, _Array],
    sketch: str,
    payload: U8,
    what: str,
) -> Message:
    match kind:
        case Kind.FRAME:
            return Frame(envelope, payload)
        case Kind.SEGMENTS:
            zero = _flags(columns["zero"])
            return Segments(envelope, _segment_batch(columns, payload, ~zero, counts, what))
        case Kind.FRESH:
            return Fresh(envelope, _fresh_batch(columns, payload, counts, what))
        case Kind.PAIRED:
            paired = PairedBatch(
                fresh=_fresh_batch(columns, payload, counts, what),
                sketch=sketch,
                super_features=columns["super_features"].reshape(counts.fresh, counts.super_features),
                base_found=_flags(columns["base_found"]),
                bases=Locations(columns["base_containers"], columns["base_ordinals"]),
                base_rank=columns["base_rank"],
            )
            return Paired(envelope, paired)
        case Kind.PLACED:
            ledger = Ledger(*_LEDGER.unpack(payload))
            segments = Locations(columns["containers"], columns["ordinals"])
            return Placed(envelope, segments, _flags(columns["known"]), columns["lengths"], ledger)
        case Kind.END:
            return _end(envelope, payload)


def _problem(
    tenant_bytes: int, key_bytes: int, sketch_bytes: int, counts: _Counts, payload_bytes: int, kind: Kind
) -> str | None:
    """Return what leaves its bound, if anything does: asked before writing and after reading."""
    payload_max = {Kind.END: END_BYTES_MAX, Kind.PLACED: _LEDGER.size}.get(kind, SEGMENT_BYTES_MAX)
    for name, found, most in (
        ("tenant bytes", tenant_bytes, TENANT_BYTES_MAX),
        ("key bytes", key_bytes, KEY_BYTES_MAX),
        ("sketch name bytes", sketch_bytes, SKETCH_BYTES_MAX),
        ("payload bytes", payload_bytes, payload_max),
        ("chunks", counts.chunks, CHUNKS_MAX),
        ("segments", counts.segments, SEGMENTS_MAX),
        ("fresh chunks", counts.fresh, counts.chunks),
        ("super-features", counts.super_features, SUPER_FEATURES_MAX),
    ):
        if found > most:
            return f"{found} {name}: want at most {most}"
    return None


# --- batches ---------------------------------------------------------------------------------------------------------


def _counts(batch: SegmentBatch, fresh: int = 0, super_features: int = 0) -> _Counts:
    return _Counts(batch.segments, len(batch.lengths), fresh, super_features)


def _gathered(batch: SegmentBatch, rows: NDArray[np.intp]) -> memoryview:
    """Return the bytes of the chosen chunks, one after another; a view where they already lie so."""
    offsets, lengths = batch.offsets[rows], batch.lengths[rows]
    if not len(rows):
        return memoryview(b"")
    start, stop = int(offsets[0]), int(offsets[-1]) + int(lengths[-1])
    if stop - start == int(lengths.sum(dtype=np.uint64)):
        return batch.payload[start:stop].data
    return gather_new([batch.payload], np.zeros(len(rows), np.int32), offsets, lengths).data


def _segment_columns(batch: SegmentBatch) -> dict[str, _Array]:
    return {
        "chunk_bounds": batch.chunk_bounds,
        "segment_ids": batch.segment_ids.reshape(-1),
        "names": batch.names.reshape(-1),
        "zero": batch.zero,
    }


def _fresh_columns(fresh: FreshBatch) -> dict[str, _Array]:
    return _segment_columns(fresh.batch) | {
        "segment_containers": fresh.segment_locations.containers,
        "segment_ordinals": fresh.segment_locations.ordinals,
        "chunk_containers": fresh.chunk_locations.containers,
        "chunk_ordinals": fresh.chunk_locations.ordinals,
        "first": fresh.first,
        "segment_known": fresh.segment_known,
        "chunk_known": fresh.chunk_known,
    }


def _paired_columns(paired: PairedBatch) -> dict[str, _Array]:
    return _fresh_columns(paired.fresh) | {
        "super_features": paired.super_features.reshape(-1),
        "base_containers": paired.bases.containers,
        "base_ordinals": paired.bases.ordinals,
        "base_found": paired.base_found,
        "base_rank": paired.base_rank,
    }


def _flags(column: U8) -> Bools:
    if len(column) and int(column.max()) > 1:
        raise ValueError(f"a flag of {int(column.max())}: want 0 or 1")
    return column.view(np.bool_)


def _segment_batch(
    columns: dict[str, _Array], payload: U8, carried: Bools | NDArray[np.intp], counts: _Counts, what: str
) -> SegmentBatch:
    """Return the batch; only the `carried` chunks have bytes, the offsets of the others are 0."""
    names = columns["names"].reshape(counts.chunks, NAME_BYTES)
    lengths = np.ascontiguousarray(names[:, LENGTH_AT:]).view("<u4").reshape(-1).astype(np.uint32)
    bounds = columns["chunk_bounds"].astype(np.uint32)
    steps = np.diff(bounds.astype(np.int64))
    if int(bounds[0]) or int(bounds[-1]) != counts.chunks or (len(steps) and int(steps.min()) < 1):
        raise Corrupt(f"{what}: segments of {steps.tolist()[:8]} chunks, {counts.chunks} in all")
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= SEGMENT_BYTES_MAX:
        raise Corrupt(f"{what}: a chunk of {int(lengths.max())} bytes: want 1 to {SEGMENT_BYTES_MAX}")
    offsets = np.zeros(counts.chunks, np.uint64)
    sizes = lengths[carried].astype(np.uint64)
    if int(sizes.sum()) != len(payload):
        raise Corrupt(f"{what}: chunks of {int(sizes.sum())} bytes in a payload of {len(payload)}")
    offsets[carried] = np.cumsum(sizes) - sizes
    return SegmentBatch(
        payload=payload,
        offsets=offsets,
        lengths=lengths,
        names=names,
        zero=_flags(columns["zero"]),
        chunk_bounds=bounds,
        blobs=np.zeros(counts.segments, np.uint32),
        segment_ids=columns["segment_ids"].reshape(counts.segments, SEGMENT_ID_BYTES),
    )


def _fresh_batch(columns: dict[str, _Array], payload: U8, counts: _Counts, what: str) -> FreshBatch:
    known, first = _flags(columns["chunk_known"]), columns["first"].astype(np.int64)
    own = np.arange(counts.chunks, dtype=np.int64)
    if np.any(first > own) or np.any(known[first] & (first != own)) or np.any(first[first] != first):
        raise Corrupt(f"{what}: a chunk repeats one that is not fresh before it")
    fresh = np.flatnonzero(~known & (first == own))
    if len(fresh) != counts.fresh:
        raise Corrupt(f"{what}: {len(fresh)} fresh chunks, {counts.fresh} announced")
    return FreshBatch(
        batch=_segment_batch(columns, payload, fresh, counts, what),
        segment_known=_flags(columns["segment_known"]),
        segment_locations=Locations(columns["segment_containers"], columns["segment_ordinals"]),
        chunk_known=known,
        chunk_locations=Locations(columns["chunk_containers"], columns["chunk_ordinals"]),
        first=first,
        fresh=fresh,
    )


# --- the end of a blob -----------------------------------------------------------------------------------------------


def _end_text(end: End) -> bytes:
    fields = {
        "began_us": end.began_us,
        "origin": end.origin.hex(),
        "size_bytes": end.size_bytes,
        "blake3": end.blake3.hex(),
        "sha256": end.sha256.hex() if end.sha256 is not None else None,
        "segments": end.segments,
        "failure": end.failure,
        "metadata": dict(end.metadata),
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def _end(envelope: Envelope, payload: U8) -> End:
    found = json.loads(payload.tobytes())
    if not isinstance(found, dict):
        raise TypeError("an end that is not a JSON object")
    sha256 = found["sha256"]
    end = End(
        envelope=envelope,
        began_us=_bounded(found["began_us"], "began_us"),
        origin=bytes.fromhex(found["origin"]),
        size_bytes=_bounded(found["size_bytes"], "size_bytes"),
        blake3=bytes.fromhex(found["blake3"]),
        sha256=None if sha256 is None else bytes.fromhex(sha256),
        segments=None if found["segments"] is None else _bounded(found["segments"], "segments"),
        failure=None if found["failure"] is None else str(found["failure"])[:FAILURE_CHARACTERS_MAX],
        metadata=found["metadata"],
    )
    encode_metadata(end.metadata)
    whole = end.failure is None
    if len(end.origin) != BLOB_BYTES or len(end.blake3) != (32 if whole else len(end.blake3)):
        raise ValueError("an origin or a digest of the wrong size")
    if end.sha256 is not None and len(end.sha256) != 32:
        raise ValueError("a SHA-256 of the wrong size")
    return end


def _bounded(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} {value!r}: want a number from 0 to 2^63 - 1")
    return value
