"""Choose the partition of each upload, so that a tenant's flood delays no other tenant.

    tenant with much in flight   any partition but the last one     the last one is left to the others
    any other tenant             the partition with the least work

The upload that begins counts: a tenant whose first upload is large, or of unknown length, has much in flight.
A blob's id decides its partition in every topic that is keyed by it, so ids are drawn until one fits.

Invariant: with one partition, or one tenant, every partition is used by all.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping

from nearkin_gateway.uploads.in_flight import BLOB_COST_BYTES, InFlightUploads
from nearkin_gateway.uploads.upload_status import new_id


def partition_of_blob(blob: bytes, partitions: int) -> int:
    """Return the partition of a blob id: that of librdkafka's partitioner of keyed messages."""
    return zlib.crc32(blob) % partitions


class PartitionLanes:
    """The partitions of one gateway's uploads; for one event loop."""

    def __init__(
        self,
        partitions: int,
        in_flight: InFlightUploads,
        has_several_tenants: Callable[[], bool],
        waiting: Callable[[], Mapping[int, int]],
    ) -> None:
        """`partitions`: 0 without Kafka.

        `waiting`: records by partition that wait for the first stage, of all gateways, as last read.
        """
        self._partitions, self._in_flight = partitions, in_flight
        self._has_several_tenants, self._waiting = has_several_tenants, waiting

    def new_blob(self, tenant: str, size_bytes: int | None) -> tuple[bytes, int | None]:
        """Return the id of a new attempt, and its partition.

        `size_bytes`: of its body; None: not known.
        """
        blob = new_id()
        if self._partitions < 2 or not self._has_several_tenants():
            return blob, partition_of_blob(blob, self._partitions) if self._partitions else None
        chosen = self._choose(tenant, size_bytes)
        while partition_of_blob(blob, self._partitions) != chosen:  # `partitions` draws on average, 1 us each
            blob = new_id()
        return blob, chosen

    def _choose(self, tenant: str, size_bytes: int | None) -> int:
        if self._in_flight.is_bulk_with(tenant, size_bytes):
            return random.randrange(self._partitions - 1)  # noqa: S311 - spreads load
        waiting = self._waiting()
        costs = [
            self._in_flight.of_partition(number).cost_bytes + waiting.get(number, 0) * BLOB_COST_BYTES // 2
            for number in range(self._partitions)
        ]
        least = min(costs)
        return random.choice([number for number, cost in enumerate(costs) if cost == least])  # noqa: S311
