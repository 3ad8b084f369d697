"""Send a blob into the pipeline as frames and an end.

Frames and end are queued; they are durable once the outbox was flushed.

Invariant: a blob that was begun gets an end, with its digest or the reason of its failure.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from blake3 import blake3

from nearkin_ingest.records import Intake
from nearkin_shared.errors import BadInput, NearkinError, RetryableError, StoreUnavailable
from nearkin_shared.formats.message import BLOB_BYTES, FAILURE_CHARACTERS_MAX, End, Envelope, Frame, encode
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.record_guard import headers_of
from nearkin_shared.limits import FRAME_BYTES_MAX, GIB
from nearkin_shared.objectstore.base import ObjectStore, SupportsStamps
from nearkin_shared.storage.manifests import key_digest

STAGE = "ingest"
DATAREF_BYTES_MAX = 1024 * GIB
"""A larger object becomes a dead letter: the largest body that a gateway accepts by default."""


class DependencyUnavailable(RetryableError):
    """A dependency of one record is unavailable; other records may continue."""


def frames_of(value: bytes) -> Iterator[memoryview]:
    """Yield a value in frames."""
    view = memoryview(value)
    for start in range(0, len(view), FRAME_BYTES_MAX):
        yield view[start : start + FRAME_BYTES_MAX]


def object_frames(objects: ObjectStore, name: str) -> Iterator[bytes]:
    """Yield an object in frames, one in memory at a time.

    Raises: NotFound; BadInput; DependencyUnavailable.
    """
    try:
        size_bytes, _ = began = _stamp(objects, name)
        if size_bytes > DATAREF_BYTES_MAX:
            raise BadInput(f"dataref {name!r}: object of {size_bytes} bytes: want at most {DATAREF_BYTES_MAX}")
        for start in range(0, size_bytes, FRAME_BYTES_MAX):
            stop = min(start + FRAME_BYTES_MAX, size_bytes)
            (piece,) = objects.get_ranges(name, [start], [stop])
            if len(piece) != stop - start:
                raise DependencyUnavailable(
                    f"dataref {name!r}: size changed while reading (expected {stop - start} bytes at offset {start}, "
                    f"got {len(piece)}); retrying"
                )
            yield bytes(piece)
        if _stamp(objects, name) != began:  # else the halves may be of different objects
            raise DependencyUnavailable(f"dataref {name!r}: changed while reading; retrying")
    except StoreUnavailable as err:
        raise DependencyUnavailable(str(err)) from err


def _stamp(objects: ObjectStore, name: str) -> tuple[int, str | None]:
    return objects.stamp(name) if isinstance(objects, SupportsStamps) else (objects.size_bytes(name), None)


def attempt_id(tenant: str, key: str, partitions: int) -> bytes:
    """Return a new blob id on its key's partition: 6 bytes of ms since 1970, 10 random ones.

    Every topic of the pipeline is keyed by blob id, so the blobs of a key pass all stages in the order of their records
    and become versions in that order. Ids are drawn until one fits: `partitions` draws on average, 1 us each.
    """
    began = (time.time_ns() // 1_000_000).to_bytes(6, "big")
    wanted = partition_of(tenant, key, partitions)
    while True:
        drawn = began + os.urandom(BLOB_BYTES - 6)
        if zlib.crc32(drawn) % partitions == wanted:  # librdkafka's partitioner of keyed messages
            return drawn


def partition_of(tenant: str, key: str, partitions: int) -> int:
    """Return the partition of a key: that of topic `placed`, whose key is the same digest."""
    return zlib.crc32(bytes.fromhex(key_digest(tenant, key))) % partitions


def send_blob(
    outbox: Outbox, intake: Intake, attempt: bytes, origin: bytes, pieces: Iterator[memoryview] | Iterator[bytes]
) -> int:
    """Queue a blob; return its size.

    An error of `pieces` ends it as failed and is raised again.

    Raises: StoreUnavailable of the outbox; the errors of `pieces`.
    """
    hasher, position = blake3(), 0

    def envelope() -> Envelope:
        return Envelope(attempt, intake.tenant, intake.key, position)

    def send(kind: str, message: Frame | End) -> None:
        headers = headers_of(STAGE, kind, message.envelope, intake.traceparent)
        outbox.send("frames", attempt, encode(message), headers)

    try:
        for piece in pieces:
            send("frame", Frame(envelope(), np.frombuffer(piece, np.uint8)))
            hasher.update(piece)
            position += len(piece)
    except BaseException as err:
        if position:
            with suppress(NearkinError):  # without an end, the chunker ends it after upload_idle_seconds
                failure = f"{STAGE}: {str(err) or type(err).__name__}"[:FAILURE_CHARACTERS_MAX]
                send("end", End(envelope(), intake.began_us, origin, failure=failure))
        raise
    whole = End(envelope(), intake.began_us, origin, position, hasher.digest(), None, None, None, dict(intake.metadata))
    send("end", whole)
    return position


def header_pairs(found: object) -> tuple[tuple[str, bytes | None], ...]:
    """Return a client's headers (a list of pairs, or None) with values as bytes."""
    pairs = found if isinstance(found, list) else []
    return tuple((str(name), value.encode() if isinstance(value, str) else value) for name, value in pairs)
