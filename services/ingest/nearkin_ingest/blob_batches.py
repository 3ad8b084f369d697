"""Gather small records into batches.

    record -> its tenant's batch for its key's partition -> one message on `frames`: full, or at the end of the step

A batch has keys of one partition of topic `placed`, so that one committer still decides on the versions of a key. A
larger record waits for the batch before it: the blobs of a key pass all stages in the order of their records.

Invariant: every added blob is in a message when `send_all` has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from nearkin_ingest.frames import STAGE, attempt_id, partition_of
from nearkin_ingest.records import Intake
from nearkin_shared.formats.blob_table import BatchedBlob, blob_id
from nearkin_shared.formats.message import Batch, Envelope, encode
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.record_guard import headers_of
from nearkin_shared.limits import KIB

BLOB_BYTES_MAX = 16 * KIB
"""Larger blobs gain little: their own work is several times what a message, a container and a manifest cost."""
BLOBS_MAX = 256
"""Blobs of a batch. Of 64, 256 and 1024 the first pays each stage's fixed work four times as often, and the last holds
back other blobs for a second."""
BATCH_BYTES_MAX = 512 * KIB
TABLE_BYTES_MAX = 160 * KIB
"""By the bound of each row; the reader accepts some more."""
ROW_BYTES = 256
"""Bytes of a blob's row in the table besides its texts, at most."""
ROW_BYTES_MAX = 8 * KIB
CHARACTER_BYTES_MAX = 6
"""Of a character in JSON: a control character is written as an escape."""


@dataclass(slots=True)
class _OpenBatch:
    """A batch that is being filled."""

    blobs: list[BatchedBlob] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    value_bytes: int = 0
    table_bytes: int = 0


class BlobBatches:
    """The open batches of one consumer. Not thread-safe."""

    def __init__(self, outbox: Outbox, on_sent: Callable[[bytes, int], None]) -> None:
        """`on_sent` receives the id and the bytes of each blob that is sent."""
        self._outbox, self._on_sent = outbox, on_sent
        self._open: dict[tuple[str, int], _OpenBatch] = {}

    @staticmethod
    def takes(intake: Intake) -> bool:
        """Return whether a record's blob is small enough for a batch."""
        return intake.value is not None and len(intake.value) <= BLOB_BYTES_MAX and _row_bytes(intake) <= ROW_BYTES_MAX

    def add(self, intake: Intake, origin: bytes, partitions: int) -> None:
        """Add a blob that `takes` accepts; send its batch first if there is no room in it."""
        assert intake.value is not None
        place = intake.tenant, partition_of(intake.tenant, intake.key, partitions)
        row_bytes = _row_bytes(intake)
        batch = self._open.get(place)
        if batch is None or not _has_room(batch, len(intake.value), row_bytes):
            if batch is not None:
                self._send(place, batch, partitions)
            batch = self._open[place] = _OpenBatch()
        digest = blake3(intake.value).digest()
        batch.blobs.append(
            BatchedBlob(
                intake.key,
                len(intake.value),
                digest,
                origin,
                intake.began_us,
                intake.metadata,
                intake.traceparent,
            )
        )
        batch.values.append(intake.value)
        batch.value_bytes += len(intake.value)
        batch.table_bytes += row_bytes

    def send_before(self, intake: Intake, partitions: int) -> None:
        """Send the batch that may have blobs of the same key as a larger one."""
        place = intake.tenant, partition_of(intake.tenant, intake.key, partitions)
        batch = self._open.pop(place, None)
        if batch is not None:
            self._send(place, batch, partitions)

    def send_all(self, partitions: int) -> None:
        """Send all batches. Raises StoreUnavailable."""
        while self._open:
            place, batch = self._open.popitem()
            self._send(place, batch, partitions)

    def _send(self, place: tuple[str, int], batch: _OpenBatch, partitions: int) -> None:
        tenant, key = place[0], batch.blobs[0].key
        attempt = attempt_id(tenant, key, partitions)
        envelope = Envelope(attempt, tenant, key, blobs=len(batch.blobs))
        payload = np.frombuffer(b"".join(batch.values), np.uint8)
        value = encode(Batch(envelope, tuple(batch.blobs), payload))
        self._outbox.send("frames", attempt, value, headers_of(STAGE, "batch", envelope, None))
        for number, blob in enumerate(batch.blobs):
            self._on_sent(blob_id(attempt, number), blob.size_bytes)


def _has_room(batch: _OpenBatch, value_bytes: int, row_bytes: int) -> bool:
    return (
        len(batch.blobs) < BLOBS_MAX
        and batch.value_bytes + value_bytes <= BATCH_BYTES_MAX
        and batch.table_bytes + row_bytes <= TABLE_BYTES_MAX
    )


def _row_bytes(intake: Intake) -> int:
    """Return a bound of the bytes of a blob's row in the table."""
    texts = [intake.key, *intake.metadata, *intake.metadata.values(), (intake.traceparent or b"").decode("latin-1")]
    return ROW_BYTES + CHARACTER_BYTES_MAX * sum(map(len, texts))
