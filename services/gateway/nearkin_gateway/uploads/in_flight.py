"""Count the uploads that a gateway has begun and whose outcome is not known, by tenant.

Invariant: an upload is counted from its first byte to its outcome, at most IN_FLIGHT_MAX of them at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

IN_FLIGHT_MAX = 200_000
"""Uploads counted at a time, some 50 MB; beyond it the oldest one is no longer counted, in its tenant's favour."""

BLOB_COST_BYTES = 512 * 1024
"""Work of a blob in addition to that of its bytes: 12.7 ms of CPU, as much as 0.3 to 0.6 MB of a large blob."""
BULK_COST_BYTES = 16 * 1024 * 1024
"""A tenant with more in flight is slowed and kept out of one partition: 32 small blobs, or 16 MiB of a large one."""


@dataclass(slots=True)
class InFlightUpload:
    """One upload: bytes as announced or received so far; stored bytes are estimated."""

    tenant: str
    partition: int | None = None
    """Of Kafka's topics, if it goes through the pipeline."""
    logical_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class InFlightSums:
    """The uploads in flight of one tenant."""

    blobs: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        """Return the work of the uploads, in bytes, with BLOB_COST_BYTES for each blob."""
        return self.blobs * BLOB_COST_BYTES + self.logical_bytes

    @property
    def is_bulk(self) -> bool:
        """Return whether these are so many that uploads of others should not wait behind them."""
        return self.cost_bytes >= BULK_COST_BYTES


@dataclass(slots=True)
class InFlightUploads:
    """All uploads in flight of one gateway; for one event loop."""

    _uploads: OrderedDict[bytes, InFlightUpload] = field(default_factory=OrderedDict)
    _sums: dict[str, InFlightSums] = field(default_factory=dict)
    _partitions: dict[int, InFlightSums] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._uploads)

    def of(self, tenant: str) -> InFlightSums:
        """Return the sums of a tenant."""
        return self._sums.get(tenant) or InFlightSums()

    def of_partition(self, partition: int) -> InFlightSums:
        """Return the sums of a partition."""
        return self._partitions.get(partition) or InFlightSums()

    def is_bulk_with(self, tenant: str, size_bytes: int | None) -> bool:
        """Return whether a tenant has much in flight with one more upload.

        None: its length is not known. It may become large, and keeps its partition.
        """
        return size_bytes is None or self.of(tenant).cost_bytes + BLOB_COST_BYTES + size_bytes >= BULK_COST_BYTES

    def begin(self, blob: bytes, tenant: str, partition: int | None = None) -> None:
        """Count an upload."""
        upload = self._uploads[blob] = InFlightUpload(tenant, partition)
        self._sums.setdefault(tenant, InFlightSums())
        if partition is not None:
            self._partitions.setdefault(partition, InFlightSums())
        for sums in self._of(upload):
            sums.blobs += 1
        if len(self._uploads) > IN_FLIGHT_MAX:
            self.end(next(iter(self._uploads)))

    def grow(self, blob: bytes, logical_bytes: int, stored_bytes: int) -> None:
        """Count more bytes of an upload."""
        upload = self._uploads.get(blob)
        if upload is not None:
            upload.logical_bytes += logical_bytes
            upload.stored_bytes += stored_bytes
            for sums in self._of(upload):
                sums.logical_bytes += logical_bytes
                sums.stored_bytes += stored_bytes

    def end(self, blob: bytes) -> None:
        """Stop counting an upload, if it was counted."""
        upload = self._uploads.pop(blob, None)
        if upload is None:
            return
        for sums in self._of(upload):
            sums.blobs -= 1
            sums.logical_bytes -= upload.logical_bytes
            sums.stored_bytes -= upload.stored_bytes
        if not self._sums[upload.tenant].blobs:
            del self._sums[upload.tenant]

    def _of(self, upload: InFlightUpload) -> list[InFlightSums]:
        found = [self._sums[upload.tenant]]
        return found if upload.partition is None else [*found, self._partitions[upload.partition]]
