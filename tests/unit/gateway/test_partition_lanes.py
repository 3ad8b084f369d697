"""Test which partition an upload is given."""

from __future__ import annotations

from collections import Counter

import pytest

from nearkin_gateway.uploads.in_flight import BULK_COST_BYTES, InFlightUploads
from nearkin_gateway.uploads.partition_lanes import PartitionLanes, partition_of_blob

WAITING: dict[int, int] = {}


def put(lanes: PartitionLanes, in_flight: InFlightUploads, tenant: str, count: int) -> Counter[int]:
    """Begin uploads without an outcome; return how many each partition has."""
    found = Counter[int]()
    for _ in range(count):
        blob, partition = lanes.new_blob(tenant, 1000)
        assert partition is not None
        assert partition == partition_of_blob(blob, 4)
        in_flight.begin(blob, tenant, partition)
        in_flight.grow(blob, 1000, 1000)
        found[partition] += 1
    return found


def test_flood_of_one_tenant_spares_the_last_partition() -> None:
    """Spread it over the others, and give blobs of another tenant the partition with the least work."""
    in_flight = InFlightUploads()
    lanes = PartitionLanes(4, in_flight, lambda: True, lambda: WAITING)
    put(lanes, in_flight, "flood", 32)
    flood = put(lanes, in_flight, "flood", 300)
    assert set(flood) == {0, 1, 2}
    assert min(flood.values()) > 50
    assert set(put(lanes, in_flight, "quiet", 8)) == {3}
    assert set(put(lanes, in_flight, "third", 8)) == {3}


@pytest.mark.parametrize("size_bytes", [BULK_COST_BYTES, None])
def test_large_upload_spares_the_last_partition(size_bytes: int | None) -> None:
    """Count the upload that begins: one of 16 MiB, or of unknown length, is much, though nothing is in flight."""
    lanes = PartitionLanes(4, InFlightUploads(), lambda: True, lambda: {0: 9, 1: 9, 2: 9})
    assert {lanes.new_blob("large", size_bytes)[1] for _ in range(100)} == {0, 1, 2}
    assert {lanes.new_blob("quiet", 1000)[1] for _ in range(20)} == {3}


def test_floods_of_other_gateways_are_avoided() -> None:
    """Count the records that wait in Kafka too."""
    in_flight = InFlightUploads()
    lanes = PartitionLanes(4, in_flight, lambda: True, lambda: {0: 900, 2: 1000, 3: 800})
    assert set(put(lanes, in_flight, "quiet", 20)) == {1}


def test_light_tenants_use_all_partitions() -> None:
    in_flight = InFlightUploads()
    lanes = PartitionLanes(4, in_flight, lambda: True, lambda: WAITING)
    found = Counter[int]()
    for number in range(20):
        found += put(lanes, in_flight, f"t{number}", 2)
    assert found == {0: 10, 1: 10, 2: 10, 3: 10}


def test_single_tenant_uses_all_partitions() -> None:
    in_flight = InFlightUploads()
    lanes = PartitionLanes(4, in_flight, lambda: False, lambda: WAITING)
    assert set(put(lanes, in_flight, "only", 300)) == {0, 1, 2, 3}
    without_kafka = PartitionLanes(0, in_flight, lambda: False, lambda: WAITING)
    assert without_kafka.new_blob("only", 1000)[1] is None
