"""Define the table from tags to container numbers in plain Python.

Entries and saved bytes are those of the kernel.

Invariant: a bucket and the rest of an entry give the entry's hash back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput

PARTITIONS: Final = 256
NUMBER_MAX: Final = (1 << 30) - 2
FILTER_BITS_MIN: Final = 8
FILTER_BITS_MAX: Final = 24
LEVEL_MAX: Final = 15
BUCKETS_MAX: Final = 1 << 27
HEADER: Final = np.dtype(
    [("buckets", "<u4"), ("hash_bits", "u1"), ("number_bits", "u1"), ("zero", "<u2"), ("entries", "<u8")]
)
_BUCKETS_MIN, _BUCKET_ENTRIES, _ENTRY_BYTES = 4, 4, 5
_ENTRY_BITS, _HASH_BITS, _REST_BITS_MIN, _NUMBER_BITS_MAX = 40, 36, 6, 30
_KICKS_MAX = 500
_BUCKETS_TRIED = 64
_LEVEL_BITS, _LEVEL_HASH_BITS = 28, 20
_MASK = (1 << 64) - 1


@dataclass
class _Partition:
    """Buckets of one partition; an entry of 0 is free."""

    buckets: int = 0
    hash_bits: int = _HASH_BITS
    number_bits: int = 0
    random: int = 1
    entries: int = 0
    slots: list[list[int]] = field(default_factory=list)

    @property
    def bucket_bits(self) -> int:
        return self.buckets.bit_length() - 1

    @property
    def rest_bits(self) -> int:
        return self.hash_bits - self.bucket_bits

    @property
    def can_grow(self) -> bool:
        return self.buckets < BUCKETS_MAX and self.rest_bits > _REST_BITS_MIN

    def is_last(self, entries: int) -> bool:
        """Return whether more buckets would not help."""
        is_half_free = self.buckets >= _BUCKETS_TRIED and entries * 2 < self.buckets * _BUCKET_ENTRIES
        return is_half_free or not self.can_grow

    def place(self, hashed: int) -> tuple[int, int]:
        """Return (bucket, rest) of a hash."""
        product = hashed * self.buckets
        return product >> self.hash_bits, (product & ((1 << self.hash_bits) - 1)) >> self.bucket_bits

    def other(self, bucket: int, rest: int) -> int:
        mixed = ((rest * 0x9E3779B97F4A7C15) & _MASK) >> 32
        return (((mixed * self.buckets) >> 32) - bucket) % self.buckets

    def hash_back(self, bucket: int, entry: int) -> int:
        rest = entry >> (self.number_bits + 1)
        if entry >> self.number_bits & 1:
            bucket = self.other(bucket, rest)
        return -(-((bucket << self.hash_bits) + (rest << self.bucket_bits)) // self.buckets)

    def number(self, entry: int) -> int:
        """Return the stored number of an entry: the container's + 1."""
        return entry & ((1 << self.number_bits) - 1)

    def choices(self, hashed: int, stored: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (bucket, entry) in the first and in the second bucket of a hash."""
        bucket, rest = self.place(hashed)
        first = (rest << (self.number_bits + 1)) | stored
        return (bucket, first), (self.other(bucket, rest), first | 1 << self.number_bits)

    def put_free(self, bucket: int, entry: int) -> bool:
        if 0 not in self.slots[bucket]:
            return False
        self.slots[bucket][self.slots[bucket].index(0)] = entry
        self.entries += 1
        return True

    def insert(self, hashed: int, stored: int, *, is_new: bool = False) -> tuple[int, int] | None:
        """Insert an entry; return (hash, stored number) of the one left without a slot, if any."""
        choices = self.choices(hashed, stored)
        if not is_new and any(entry in self.slots[bucket] for bucket, entry in choices):
            return None
        if any(self.put_free(bucket, entry) for bucket, entry in choices):
            return None
        bucket, entry = choices[1]
        for _ in range(_KICKS_MAX):
            self.random = (self.random * 6364136223846793005 + 1442695040888963407) & _MASK
            slot = self.random >> 62
            entry, self.slots[bucket][slot] = self.slots[bucket][slot] ^ 1 << self.number_bits, entry
            bucket = self.other(bucket, entry >> (self.number_bits + 1))
            if self.put_free(bucket, entry):
                return None
        return self.hash_back(bucket, entry), self.number(entry)


class TagTable:
    """A table from tags to container numbers; the stub has the details."""

    def __init__(self, filter_bits: int = FILTER_BITS_MAX) -> None:
        _check_bounds("filter_bits", filter_bits, FILTER_BITS_MIN, FILTER_BITS_MAX)
        self.filter_bits: Final = filter_bits
        self.dropped = 0
        self._partitions = [_Partition() for _ in range(PARTITIONS)]
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(partition.entries for partition in self._partitions)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buckets as the kernel allocates them."""
        return sum(partition.buckets for partition in self._partitions) * _BUCKET_ENTRIES * _ENTRY_BYTES

    @property
    def tag_bits(self) -> int:
        """Return the fewest bits that an entry has beyond its bucket."""
        return min(partition.rest_bits if partition.slots else _HASH_BITS for partition in self._partitions)

    def put_many(self, tags: NDArray[np.uint64], number: int) -> None:
        """Add the tags of a container."""
        _check_vector("tags", tags, np.uint64)
        _check_bounds("number", number, 0, NUMBER_MAX)
        with self._lock:
            for tag in tags.tolist():
                self._put(tag >> 56, tag, number + 1)

    def _put(self, at: int, tag: int, stored: int) -> None:
        partition = self._partitions[at]
        number_bits = min((stored + (stored >> 2) + 16).bit_length(), _NUMBER_BITS_MAX)
        if not partition.slots:
            partition = self._rebuilt(at, _BUCKETS_MIN, number_bits)
        elif stored.bit_length() > partition.number_bits:
            partition = self._rebuilt(at, partition.buckets, number_bits)
        if (partition.entries + 1) * 20 > partition.buckets * _BUCKET_ENTRIES * 19 and partition.can_grow:
            partition = self._rebuilt(at, _larger(partition.buckets), max(number_bits, partition.number_bits))
        left = partition.insert(_hash_of(partition, tag), stored)
        if left is not None:
            if partition.is_last(partition.entries):
                self.dropped += 1
            else:
                self._rebuilt(at, _larger(partition.buckets), partition.number_bits, left)

    def _rebuilt(self, at: int, buckets: int, number_bits: int, left: tuple[int, int] | None = None) -> _Partition:
        """Move all entries of a partition, and the one left, into so many buckets or more."""
        before = self._partitions[at]
        moved = [
            (before.hash_back(bucket, entry), before.number(entry))
            for bucket, slots in enumerate(before.slots)
            for entry in slots
            if entry
        ]
        moved += [] if left is None else [left]
        while True:
            buckets = min(buckets, BUCKETS_MAX)
            hash_bits = min(_ENTRY_BITS - 1 - number_bits + buckets.bit_length() - 1, _HASH_BITS)
            if moved:
                hash_bits = min(hash_bits, before.hash_bits)
            slots = [[0] * _BUCKET_ENTRIES for _ in range(buckets)]
            fresh = _Partition(buckets, hash_bits, number_bits, before.random, 0, slots)
            shift = max(0, before.hash_bits - hash_bits)
            failed = 0
            for hashed, stored in moved:
                failed += fresh.insert(hashed >> shift, stored, is_new=True) is not None
                if failed and not fresh.is_last(before.entries):
                    break
            if not failed or fresh.is_last(before.entries):
                self.dropped += failed
                self._partitions[at] = fresh
                return fresh
            buckets = _larger(buckets)

    def candidates(self, tags: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return (rows, numbers): the containers that may have a tag, by row and number."""
        _check_vector("tags", tags, np.uint64)
        rows, numbers = [], []
        with self._lock:
            for row, tag in enumerate(tags.tolist()):
                partition = self._partitions[tag >> 56]
                if not partition.entries:
                    continue
                skip = partition.number_bits + 1 + max(0, partition.rest_bits - self.filter_bits)
                side = 1 << partition.number_bits
                found = {
                    partition.number(entry) - 1
                    for bucket, wanted in partition.choices(_hash_of(partition, tag), 0)
                    for entry in partition.slots[bucket]
                    if entry and not (entry ^ wanted) >> skip and not (entry ^ wanted) & side
                }
                rows += [row] * len(found)
                numbers += sorted(found)
        return np.array(rows, np.int64), np.array(numbers, np.uint32)

    def remove_many(self, tags: NDArray[np.uint64], number: int) -> int:
        """Remove tags of a container; return how many entries were removed."""
        _check_vector("tags", tags, np.uint64)
        _check_bounds("number", number, 0, NUMBER_MAX)
        removed = 0
        with self._lock:
            for tag in tags.tolist():
                partition = self._partitions[tag >> 56]
                if not partition.entries or (number + 1).bit_length() > partition.number_bits:
                    continue
                for bucket, entry in partition.choices(_hash_of(partition, tag), number + 1):
                    if entry in partition.slots[bucket]:
                        partition.slots[bucket][partition.slots[bucket].index(entry)] = 0
                        partition.entries -= 1
                        removed += 1
        return removed

    def remove_containers(self, numbers: NDArray[np.uint32]) -> int:
        """Remove all entries of containers; return how many."""
        _check_vector("numbers", numbers, np.uint32)
        gone = {number + 1 for number in numbers.tolist()}
        removed = 0
        with self._lock:
            for partition in self._partitions:
                for slots in partition.slots:
                    for slot, entry in enumerate(slots):
                        if partition.number(entry) in gone:
                            slots[slot] = 0
                            partition.entries -= 1
                            removed += 1
        return removed

    def keep_levels(self, levels: NDArray[np.uint8]) -> int:
        """Remove each tag whose level is below that of its container; return how many."""
        _check_vector("levels", levels, np.uint8)
        if len(levels) and levels.max() > LEVEL_MAX:
            raise BadInput(f"levels up to {levels.max()}: the highest is {LEVEL_MAX}")
        removed = 0
        with self._lock:
            for at, partition in enumerate(self._partitions):
                if partition.hash_bits < _LEVEL_HASH_BITS or not partition.entries:
                    continue
                removed += self._keep(partition, at, levels.tolist())
                buckets = partition.entries * 20 // (_BUCKET_ENTRIES * 18) + _BUCKETS_TRIED
                if buckets < partition.buckets - partition.buckets // 4:
                    self._rebuilt(at, buckets, partition.number_bits)
        return removed

    @staticmethod
    def _keep(partition: _Partition, at: int, levels: list[int]) -> int:
        before = partition.entries
        for bucket, slots in enumerate(partition.slots):
            for slot, entry in enumerate(slots):
                number = partition.number(entry) - 1
                if entry and number < len(levels):
                    start = partition.hash_back(bucket, entry) >> (partition.hash_bits - _LEVEL_HASH_BITS)
                    if _mix_of((at << _LEVEL_HASH_BITS) | start) >> (32 - levels[number]):
                        slots[slot] = 0
                        partition.entries -= 1
        return before - partition.entries

    def save_partition(self, partition: int) -> bytes:
        """Return a partition's entries."""
        _check_bounds("partition", partition, 0, PARTITIONS - 1)
        with self._lock:
            saved = self._partitions[partition]
            row = (saved.buckets, saved.hash_bits, saved.number_bits, 0, saved.entries)
            entries = (entry for slots in saved.slots for entry in slots)
            return np.array([row], HEADER).tobytes() + b"".join(
                entry.to_bytes(_ENTRY_BYTES, "little") for entry in entries
            )

    def load_partition(self, partition: int, data: bytes | memoryview) -> None:
        """Replace a partition by what `save_partition` returned."""
        _check_bounds("partition", partition, 0, PARTITIONS - 1)
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) < HEADER.itemsize:
            raise BadInput(f"partition {partition}: {type(data).__name__}: needs at least {HEADER.itemsize} bytes")
        header = np.frombuffer(data, HEADER, 1)[0]
        loaded = _Partition(int(header["buckets"]), int(header["hash_bits"]), int(header["number_bits"]))
        loaded.entries = int(header["entries"])
        size_bytes = HEADER.itemsize + loaded.buckets * _BUCKET_ENTRIES * _ENTRY_BYTES
        fits = not header["zero"] and len(data) == size_bytes
        if loaded.buckets:
            fits = fits and _BUCKETS_MIN <= loaded.buckets <= BUCKETS_MAX and loaded.hash_bits <= _HASH_BITS
            fits = fits and 1 <= loaded.number_bits <= _NUMBER_BITS_MAX
            fits = fits and 1 <= loaded.rest_bits <= _ENTRY_BITS - 1 - loaded.number_bits
        else:
            fits = fits and not loaded.entries
        if not fits:
            raise BadInput(
                f"partition {partition}: {loaded.buckets} buckets, {loaded.hash_bits} and {loaded.number_bits} bits "
                f"in {len(data)} bytes: not a saved one"
            )
        if not loaded.buckets:
            loaded = _Partition()
        else:
            self._read_slots(loaded, bytes(data[HEADER.itemsize :]), partition)
        with self._lock:
            self._partitions[partition] = loaded

    @staticmethod
    def _read_slots(loaded: _Partition, data: bytes, partition: int) -> None:
        starts = range(0, len(data), _ENTRY_BYTES)
        entries = [int.from_bytes(data[start : start + _ENTRY_BYTES], "little") for start in starts]
        used = [entry for entry in entries if entry]
        width = loaded.number_bits + 1 + loaded.rest_bits
        problem = f"partition {partition}: its entries differ from their count, or one has no number or no hash"
        if len(used) != loaded.entries or any(not loaded.number(entry) or entry >> width for entry in used):
            raise BadInput(problem)
        loaded.slots = [entries[at : at + _BUCKET_ENTRIES] for at in range(0, len(entries), _BUCKET_ENTRIES)]
        hashes = (loaded.hash_back(bucket, one) for bucket, slots in enumerate(loaded.slots) for one in slots if one)
        if any(hashed >> loaded.hash_bits for hashed in hashes):
            raise BadInput(problem)


def tag_mixes(tags: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the number of each tag that gives its level."""
    _check_vector("tags", tags, np.uint64)
    return np.array([_mix_of(tag >> (64 - _LEVEL_BITS)) for tag in tags.tolist()], np.uint32)


def _mix_of(start: int) -> int:
    start ^= start >> 16
    start = start * 0x85EBCA6B & 0xFFFFFFFF
    start ^= start >> 13
    start = start * 0xC2B2AE35 & 0xFFFFFFFF
    return start ^ (start >> 16)


def _hash_of(partition: _Partition, tag: int) -> int:
    return (tag << 8 & _MASK) >> (64 - partition.hash_bits)


def _larger(buckets: int) -> int:
    return buckets + max(buckets // 16, 4)


def _check_bounds(what: str, value: object, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise BadInput(f"{what} {value!r}: needs a whole number from {lowest} to {highest}")


def _check_vector(what: str, array: Any, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise BadInput(f"{what} {found}: needs a {np.dtype(dtype).name} array of shape (n,)")
