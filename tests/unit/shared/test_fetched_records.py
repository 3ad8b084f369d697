"""Test which fetched records a step takes: a flood of one partition holds back no other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import Batch, End, Envelope, encode
from nearkin_shared.kafka.fetched_records import LARGE_MAX, PARTITION_RECORDS_MAX, FetchedRecords
from nearkin_shared.limits import MIB

NOTHING = np.zeros(0, np.uint8)
ENVELOPE = Envelope(bytes(16), "t", "k", blobs=1)
BATCH = encode(Batch(ENVELOPE, (BatchedBlob("k", 0, bytes(32), bytes(16), 1),), NOTHING))
END = encode(End(Envelope(bytes(16), "t", "k"), 1, bytes(16), 0, bytes(32)))


@dataclass
class Numbered:
    """A record."""

    partition: int
    offset: int
    value: bytes = b"value"


def held(*records: Numbered) -> FetchedRecords[Numbered]:
    found: FetchedRecords[Numbered] = FetchedRecords()
    for record in records:
        found.add(record)
    return found


def places(records: list[Numbered]) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in records]


def flood(partition: int, count: int, value: bytes = b"value") -> list[Numbered]:
    return [Numbered(partition, offset, value) for offset in range(count)]


def test_short_queue_is_taken_before_a_long_one() -> None:
    """Two records of a quiet partition are a step of their own: the next one, whatever else is held."""
    fetched = held(*flood(0, 100), *flood(1, 100), Numbered(2, 7), Numbered(2, 8))
    assert places(fetched.take(8)) == [(2, 7), (2, 8)]


def test_long_queues_have_every_other_step() -> None:
    """Records of quiet partitions that come again and again do not hold back the others."""
    fetched = held(*flood(0, 100))
    found = []
    for offset in range(10):
        fetched.add(Numbered(1, offset))
        found += places(fetched.take(8))
    assert sum(partition == 0 for partition, _ in found) >= 5 * 7
    assert [offset for partition, offset in found if partition == 1] == list(range(10))


def test_long_queues_share_a_step_in_order() -> None:
    """Each has its share, and its records follow each other."""
    fetched = held(*flood(0, 100), *flood(1, 100))
    assert places(fetched.take(6)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert places(fetched.take(3)) == [(0, 3), (0, 4), (1, 3)]
    assert len(fetched) == 191


def test_batches_hold_back_no_other_partition() -> None:
    """A step has few batches, and the small records of others all the same."""
    fetched = held(*flood(0, 9, BATCH), *flood(1, 9))
    taken = fetched.take(8)
    assert [record.partition for record in taken] == [0] * LARGE_MAX + [1] * (8 - LARGE_MAX)


def test_partition_is_full_by_records_or_by_bytes() -> None:
    """The bytes are bounded for all partitions together, so each has its share."""
    fetched = held(*flood(0, PARTITION_RECORDS_MAX), *flood(1, 4, bytes(4 * MIB)))
    assert fetched.is_full(0, 1)
    assert not fetched.is_full(1, 1)
    assert fetched.is_full(1, 2)
    while not fetched.has_room(0, 1):
        assert fetched.take(8)
    assert len(fetched) > PARTITION_RECORDS_MAX // 4, "it has room long before it is empty"


def test_end_is_known_until_it_is_taken() -> None:
    fetched = held(Numbered(0, 0), Numbered(0, 1, END))
    assert fetched.has_end
    fetched.take(1)
    assert fetched.has_end
    fetched.take(1)
    assert not fetched.has_end


def test_dropped_partition_leaves_the_others() -> None:
    fetched = held(*flood(0, 3, END), *flood(1, 3))
    fetched.drop(0)
    fetched.drop(5)
    assert not fetched.has_end
    assert places(fetched.take(8)) == [(1, 0), (1, 1), (1, 2)]
