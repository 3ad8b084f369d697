"""Hold fetched records, and give each partition its share of the next step.

    client's queue -> one queue for each partition -> a step: records by round robin

A partition whose queue is full is not fetched meanwhile: Kafka keeps what is behind. So records of one partition wait
for a few records of the others, however many of those there are.

Invariant: the records of a partition are taken in their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from nearkin_shared.formats.message import Encoded, is_batch, is_end, is_staged
from nearkin_shared.limits import MIB

PARTITION_RECORDS_MAX = 256
"""Records of a partition that are held: with small ones, the work of some seconds."""
HELD_BYTES_MAX = 32 * MIB
"""Bound of all of them, in equal shares of the partitions."""
LARGE_MAX = 2
"""Batches of small blobs, and references to packs, in a step: each has up to 256 blobs or 8 MiB, and all other records
wait for the step."""


class FetchedRecord(Protocol):
    """Record with a partition and a value."""

    @property
    def partition(self) -> int:
        """Return its partition."""

    @property
    def value(self) -> Encoded:
        """Return its value."""


Fetched = TypeVar("Fetched", bound=FetchedRecord)


class FetchedRecords(Generic[Fetched]):
    """The records that one loop has fetched and not processed. Not thread-safe."""

    def __init__(self) -> None:
        self._queues: OrderedDict[int, deque[Fetched]] = OrderedDict()
        """By partition, none of them empty; the next one is the first."""
        self._bytes: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()
        self._was_short = False
        """Whether the last step had records of short queues alone."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def has_end(self) -> bool:
        """Return whether the end of a blob is among them."""
        return self._ends.total() > 0

    def add(self, record: Fetched) -> None:
        """Hold a record."""
        self._queues.setdefault(record.partition, deque()).append(record)
        self._bytes[record.partition] += len(record.value)
        self._ends[record.partition] += is_end(record.value)

    def take(self, count: int, *, short_alone: bool = False) -> list[Fetched]:
        """Remove and return the records of the next step, with LARGE_MAX large ones at most.

        By round robin over partitions; every other step has those alone that need no more than their share of it, and
        with `short_alone` every step. Records of a partition follow each other, since stages join the messages of a
        blob.
        """
        share = count // max(1, len(self._queues))
        short = [partition for partition, queue in self._queues.items() if len(queue) <= share]
        self._was_short = short_alone or (not self._was_short and 0 < len(short) < len(self._queues))
        waiting = deque(short if self._was_short else self._queues)
        found: dict[int, list[Fetched]] = {}
        large = 0
        while waiting and count:
            partition = waiting.popleft()
            queue = self._queues[partition]
            if _is_large(queue[0]):
                if large == LARGE_MAX:
                    continue
                large += 1
            found.setdefault(partition, []).append(queue.popleft())
            count -= 1
            if queue:
                waiting.append(partition)
        for partition, records in found.items():
            self._taken(partition, records)
        return [record for records in found.values() for record in records]

    def is_full(self, partition: int, partitions: int) -> bool:
        """Return whether a partition's queue is full; `partitions`: how many share the memory."""
        return self._fill(partition, partitions) >= 1.0

    def has_room(self, partition: int, partitions: int) -> bool:
        """Return whether a partition's queue is half empty."""
        return self._fill(partition, partitions) <= 0.5

    def drop(self, partition: int) -> None:
        """Forget the records of a partition."""
        self._queues.pop(partition, None)
        del self._bytes[partition], self._ends[partition]

    def _taken(self, partition: int, records: Sequence[Fetched]) -> None:
        self._bytes[partition] -= sum(len(record.value) for record in records)
        self._ends[partition] -= sum(is_end(record.value) for record in records)
        if self._queues[partition]:
            self._queues.move_to_end(partition)
        else:
            del self._queues[partition]

    def _fill(self, partition: int, partitions: int) -> float:
        bytes_max = HELD_BYTES_MAX / max(1, partitions)
        records = len(self._queues.get(partition, ()))
        return max(records / PARTITION_RECORDS_MAX, self._bytes[partition] / bytes_max)


def _is_large(record: FetchedRecord) -> bool:
    return is_batch(record.value) or is_staged(record.value)
