"""Encode and decode the table of the blobs of a batch.

    u32 bytes of the table | JSON: one list a blob | bytes of all blobs, one behind the other

    [key, bytes, BLAKE3, origin, start in us, metadata or null, traceparent or null, segments or null]

A batch is one message on `frames`, and from there to `placed` one blob to every stage; the committer makes a version of
each of its blobs.

Invariant: a decoded table has the number of blobs that its message announces, each within the bounds of an end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.manifest import CREATED_US_MAX, check_metadata
from nearkin_shared.formats.message_layout import BLOB_BYTES, BLOBS_MAX, TABLE_BYTES_MAX
from nearkin_shared.limits import KEY_BYTES_MAX, SEGMENT_BYTES_MAX
from nearkin_shared.utils.frozen import frozen

DIGEST_BYTES = 32
TRACEPARENT_CHARACTERS_MAX = 256
_COLUMNS = 8
_IDS = 1 << 8 * BLOB_BYTES


@frozen
class BatchedBlob:
    """One blob of a batch."""

    key: str
    size_bytes: int
    blake3: bytes
    origin: bytes
    """16 bytes that all attempts to store the same blob share."""
    began_us: int
    """Microseconds since 1970 at the start of the upload."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    traceparent: bytes | None = None
    segments: int | None = None
    """Number of its segments; None before the chunker."""


def blob_id(batch: bytes, number: int) -> bytes:
    """Return the id of a blob of a batch: the id of the batch, counted on."""
    return ((int.from_bytes(batch, "big") + number) % _IDS).to_bytes(BLOB_BYTES, "big")


def encode_table(blobs: Sequence[BatchedBlob]) -> bytes:
    """Encode the blobs of a batch. Raises BadInput."""
    if not 1 <= len(blobs) <= BLOBS_MAX:
        raise BadInput(f"message: a batch of {len(blobs)} blobs: want 1 to {BLOBS_MAX}")
    text = json.dumps([row_of(blob) for blob in blobs], ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > TABLE_BYTES_MAX:
        raise BadInput(f"message: {len(text)} bytes for the table of a batch: want at most {TABLE_BYTES_MAX}")
    return text


def row_of(blob: BatchedBlob) -> list[object]:
    """Return a blob's row of the table."""
    return [
        blob.key,
        blob.size_bytes,
        blob.blake3.hex(),
        blob.origin.hex(),
        blob.began_us,
        dict(blob.metadata) or None,
        None if blob.traceparent is None else blob.traceparent.decode("latin-1"),
        blob.segments,
    ]


def decode_table(text: bytes, count: int) -> tuple[BatchedBlob, ...]:
    """Decode the table of a batch of `count` blobs. Raises ValueError, TypeError, BadInput."""
    rows = json.loads(text)
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"a table that is not a list of {count} blobs")
    return tuple(map(_blob, rows))


def _blob(row: object) -> BatchedBlob:
    if not isinstance(row, list) or len(row) != _COLUMNS:
        raise TypeError(f"a blob of a batch that is not a list of {_COLUMNS} values")
    key, size_bytes, digest, origin, began_us, metadata, traceparent, segments = row
    if not isinstance(key, str) or len(key.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"key {key!r:.80}: want text of at most {KEY_BYTES_MAX} bytes")
    if metadata is not None and not isinstance(metadata, dict):
        raise TypeError("metadata that is not a JSON object")
    if metadata:
        check_metadata(metadata)
    if traceparent is not None and (not isinstance(traceparent, str) or len(traceparent) > TRACEPARENT_CHARACTERS_MAX):
        raise TypeError(f"traceparent {traceparent!r:.80}: want text")
    found = BatchedBlob(
        key,
        _number(size_bytes, "size_bytes", SEGMENT_BYTES_MAX),
        bytes.fromhex(digest),
        bytes.fromhex(origin),
        _number(began_us, "began_us", CREATED_US_MAX),
        metadata or {},
        None if traceparent is None else traceparent.encode("latin-1"),
        None if segments is None else _number(segments, "segments", SEGMENT_BYTES_MAX),
    )
    if len(found.blake3) != DIGEST_BYTES or len(found.origin) != BLOB_BYTES:
        raise ValueError("an origin or a digest of the wrong size")
    return found


def _number(value: object, name: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} {value!r:.80}: want a number from 0 to {most}")
    return value
