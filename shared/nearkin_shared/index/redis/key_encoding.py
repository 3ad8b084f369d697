"""Encoding of names and numbers in a partition.

Invariant: equal keys mean equal names, up to known odds.

    table     key                                            value
    chunks    check tag 8, fold of SHA-1 and length 5        number 5
    segments  check tag 8, fold of SHA-1 5                   number 5
    features  mix of namespace, rank and super-feature 5     number 5

A number means (container, ordinal) as `nearkin_shared.index.redis.epoch` defines. Rows are uint8[n, width]. Partitions
are chosen by bits that no uploader can choose: the check tag is keyed. docs/adr/0007-redis-index.md has the odds.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.index.container_entries import feature_keys
from nearkin_shared.index.redis.scripts import HASHED_BYTES
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, U8, U64
from nearkin_shared.utils.frozen import frozen

U16 = NDArray[np.uint16]

NUMBER_BYTES = 5
_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1], axis=1).ravel()
"""Each byte with its bits in reversed order."""
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@frozen
class Table:
    """Name of a table and the sizes of its entries."""

    letter: str
    key_bytes: int
    value_bytes: int
    bucket_entries: int

    @property
    def width(self) -> int:
        """Return the bytes of an entry."""
        return self.key_bytes + self.value_bytes


CHUNKS = Table("c", 13, NUMBER_BYTES, 40)
SEGMENTS = Table("s", 13, NUMBER_BYTES, 40)
FEATURES = Table("f", 5, NUMBER_BYTES, 64)
TABLES = (CHUNKS, SEGMENTS, FEATURES)


@frozen
class Keys:
    """Keys uint8[n, k] of one table, and uint16[n] whose low bits choose the partition."""

    rows: U8
    partitions: U16

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def join(parts: list[Keys]) -> Keys:
        """Return all keys of at least one part, in order."""
        return Keys(np.concatenate([p.rows for p in parts]), np.concatenate([p.partitions for p in parts]))

    def bucket_order(self, partitions: int) -> NDArray[np.intp]:
        """Return the rows by partition and bucket, those of one bucket in their order.

        Bits of the hash count from its lowest one: so rows of a bucket follow one another, however many buckets there
        are.
        """
        found = (self.partitions & np.uint16(partitions - 1)).astype(np.uint64)
        for column in _REVERSED[self.rows[:, :HASHED_BYTES]].T:
            found = (found << np.uint64(8)) | column
        return np.argsort(found, kind="stable")


def chunk_keys(names: U8) -> Keys:
    """Return the keys of uint8[n, 32] chunk names; every bit of a name affects its key."""
    names = np.ascontiguousarray(names).reshape(-1, NAME_BYTES)
    words = names.view("<u8")  # fingerprint 20 bytes, tag 8, length 4: the tag spans two words
    tail = words[:, 2]
    tags = (tail >> np.uint64(32)) | (words[:, 3] << np.uint64(32))
    lengths = words[:, 3] & np.uint64(0xFFFFFFFF00000000)
    return _tag_keys(tags, words[:, 0] ^ words[:, 1] ^ (tail & np.uint64(0xFFFFFFFF)) ^ lengths)


def segment_keys(segment_ids: U8) -> Keys:
    """Return the keys of uint8[s, 20] segment ids."""
    ids = np.ascontiguousarray(segment_ids).reshape(-1, SEGMENT_ID_BYTES)
    words = np.ascontiguousarray(ids).view("<u4").astype(np.uint64)
    tags = words[:, 3] | (words[:, 4] << np.uint64(32))
    return _tag_keys(tags, words[:, 0] ^ (words[:, 1] << np.uint64(32)) ^ (words[:, 2] << np.uint64(20)))


def _tag_keys(tags: U64, fold: U64) -> Keys:
    rows = np.empty((len(tags), 13), np.uint8)
    rows[:, :8] = _bytes(tags)
    rows[:, 8:] = _bytes(fold ^ (fold >> np.uint64(40)))[:, :5]
    return Keys(rows, ((tags >> np.uint64(48)) ^ (fold >> np.uint64(44))).astype(np.uint16))


def super_feature_keys(sketch: str, domain: bytes, rank: int, super_features: U64) -> Keys:
    """Return the keys of uint64[n] super-features: 40 bits of a mix, and the partition bits."""
    namespace = feature_keys(sketch, domain, np.zeros((1, rank + 1), np.uint64))[rank, :9].tobytes()
    seed = np.frombuffer(blake2b(namespace, digest_size=8).digest(), "<u8")[0]
    mixed = _mix(super_features ^ seed)
    return Keys(_bytes(mixed)[:, :5].copy(), (mixed >> np.uint64(48)).astype(np.uint16))


def with_numbers(keys: Keys, numbers: U64) -> U8:
    """Return entries: each key followed by its number, below 2^40."""
    return np.concatenate([keys.rows, _bytes(numbers)[:, :NUMBER_BYTES]], axis=1)


def numbers_of(values: bytes) -> U64:
    """Return uint64[n] of n packed numbers."""
    wide = np.zeros((len(values) // NUMBER_BYTES, 8), np.uint8)
    wide[:, :NUMBER_BYTES] = np.frombuffer(values, np.uint8).reshape(-1, NUMBER_BYTES)
    return wide.view("<u8").ravel()


def _bytes(values: U64) -> U8:
    return np.ascontiguousarray(values).astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)


def _mix(values: U64) -> U64:
    """Permute 64-bit values so that every bit affects every bit (splitmix64's last steps)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def order_by_partition(partitions: U16, count: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return (order, bounds) of rows by partition; the order within one is kept.

    Rows of p are bounds[p] .. bounds[p + 1].
    """
    chosen = partitions & np.uint16(count - 1)
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(chosen, minlength=count), out=bounds[1:])
    return np.argsort(chosen, kind="stable"), bounds
