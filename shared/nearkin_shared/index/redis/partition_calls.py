"""Calls of the table scripts, by partition.

A call carries at most KEYS_A_SCRIPT rows; rows are grouped by partition, in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nearkin_shared.index.redis import key_encoding
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.epoch import Epoch
from nearkin_shared.index.redis.key_encoding import U16, Keys, Table
from nearkin_shared.types import U8, U64

KEYS_A_SCRIPT = 512
"""A script blocks the server for all clients: about 2 ms for this many keys."""
Numbered = tuple[Keys, U64]
"""Keys and the number of each."""


def find_calls(
    epoch: Epoch, table: Table, keys: Keys, tables_max: int, generation: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], list[Command]]:
    """Return (order, calls) of a lookup; `order` is the order of the values.

    A call looks up at most KEYS_A_SCRIPT keys in up to `tables_max` partitions: a command costs the client 20 us or
    more, which for a hundred keys in sixteen partitions was more than the lookup itself.
    """
    order, bounds = key_encoding.order_by_partition(keys.partitions, epoch.partitions)
    data, width, starts = keys.rows[order].tobytes(), table.key_bytes, bounds.tolist()
    calls: list[Command] = []
    names: list[str] = []
    counts: list[int] = []
    first = at = 0

    def append_call() -> None:
        part = data[first * width : at * width]
        sizes = (width, table.width, table.bucket_entries)
        calls.append(RedisServer.call("find", names, part, *sizes, generation, *counts))

    for partition in np.flatnonzero(np.diff(bounds)).tolist():
        while at < starts[partition + 1]:
            if len(names) == tables_max or at - first == KEYS_A_SCRIPT:
                append_call()
                names, counts, first = [], [], at
            count = min(starts[partition + 1] - at, KEYS_A_SCRIPT - (at - first))
            names.append(epoch.partition(table, partition))
            counts.append(count)
            at += count
    append_call()
    return order, calls


def _partition_calls(
    epoch: Epoch, script: str, table: Table, packed: U8, partitions: U16, *extra_arguments: Any
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], list[Command]]:
    """Return (order, calls) for rows by partition, at most KEYS_A_SCRIPT per call."""
    order, bounds = key_encoding.order_by_partition(partitions, epoch.partitions)
    data, width = packed[order].tobytes(), packed.shape[1]
    calls = []
    for partition in np.flatnonzero(np.diff(bounds)).tolist():
        key = epoch.partition(table, partition)
        start, stop = int(bounds[partition]), int(bounds[partition + 1])
        for at in range(start, stop, KEYS_A_SCRIPT):
            part = data[at * width : min(at + KEYS_A_SCRIPT, stop) * width]
            calls.append(
                RedisServer.call(
                    script, [key], part, table.key_bytes, table.width, table.bucket_entries, *extra_arguments
                )
            )
    return order, calls


def insert_calls(epoch: Epoch, table: Table, parts: Sequence[Numbered]) -> list[Command]:
    """Return the calls that add all parts, joined and by bucket: a bucket is written once.

    Of a key that is in several parts the first number is added.
    """
    if not parts:
        return []
    keys, numbers = Keys.join([keys for keys, _ in parts]), np.concatenate([numbers for _, numbers in parts])
    highest = int(numbers.max()) if len(numbers) else 0
    order = keys.bucket_order(epoch.partitions)
    packed = key_encoding.with_numbers(keys, numbers)[order]
    return _partition_calls(epoch, "insert", table, packed, keys.partitions[order], highest)[1]


def remove_calls(epoch: Epoch, table: Table, parts: Sequence[Numbered]) -> list[Command]:
    """Return the calls that remove the entries with these keys and numbers, by partition."""
    if not parts:
        return []
    keys, numbers = Keys.join([keys for keys, _ in parts]), np.concatenate([numbers for _, numbers in parts])
    return _partition_calls(epoch, "remove", table, key_encoding.with_numbers(keys, numbers), keys.partitions)[1]


def entries_of(buckets: Any, width: int) -> U8:
    """Return all whole entries of a partition's reply to HGETALL."""
    pairs = buckets.items() if isinstance(buckets, dict) else zip(buckets[::2], buckets[1::2], strict=True)
    packed = b"".join(bucket for number, bucket in pairs if len(number) == 3 and len(bucket) % width == 0)
    return np.frombuffer(packed, np.uint8).reshape(-1, width)
