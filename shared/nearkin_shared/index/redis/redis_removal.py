"""Removal of entries from a Redis index.

Invariant: an entry is removed only while it still has the removed number. Idempotent.

    withdraw  reads every bucket of three tables, ascending; a script removes the entries with removed numbers

A bucket split during the reads moves entries to a higher bucket only, so none is missed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from nearkin_shared.index.redis import key_encoding
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.epoch import Epoch, EpochReplaced, NumberedContainers
from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, SEGMENTS, Table
from nearkin_shared.types import U8, U32, U64, Bools, group_by_container
from nearkin_shared.utils.frozen import frozen

BUCKETS_A_READ = 1000
"""About 720 KB per reply."""
ROWS_A_SCRIPT = 512
_STATE = re.compile(rb"(\d+) (\d+) (\d+)")


@frozen
class RemovedNumbers:
    """Set of removed numbers: of containers from firsts[i] on, with masks from starts[i] on.

    The masks of all containers are concatenated in `masks`.
    """

    firsts: U64
    spans: U64
    starts: U64
    masks: Bools

    @staticmethod
    def of(numbers: Mapping[int, tuple[int, int]], removals: Mapping[int, U32 | None]) -> RemovedNumbers:
        """Return the numbers of ordinals, None for all, by container.

        `numbers` are (first, span) of each container.
        """
        pairs = sorted((numbers[container], rows) for container, rows in removals.items() if container in numbers)
        firsts, spans, masks = [], [], [np.zeros(0, np.bool_)]
        for (first, span), ordinals in pairs:
            mask = np.full(span, ordinals is None, np.bool_)
            if ordinals is not None:
                mask[ordinals[ordinals < span]] = True
            firsts.append(first)
            spans.append(span)
            masks.append(mask)
        wide = np.array(spans, np.uint64)
        return RemovedNumbers(np.array(firsts, np.uint64), wide, np.cumsum(wide) - wide, np.concatenate(masks))

    def contains(self, numbers: U64) -> Bools:
        """Return which numbers are in the set."""
        if not len(self.firsts):
            return np.zeros(len(numbers), np.bool_)
        at = np.maximum(np.searchsorted(self.firsts, numbers, side="right").astype(np.int64) - 1, 0)
        ordinals = numbers - self.firsts[at]
        inside = (numbers >= self.firsts[at]) & (ordinals < self.spans[at])
        found: Bools = inside & self.masks[np.where(inside, self.starts[at] + ordinals, 0).astype(np.int64)]
        return found


def withdraw_entries(
    server: RedisServer, epoch: Epoch, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32 | None]
) -> int:
    """Remove all entries that name ordinals of containers, of any domain; return the count.

    `chunks` None removes the container's segments too. Reads the whole index: 60 bytes per chunk.

    Raises: EpochReplaced.
    """
    numbers = epoch.table.numbers([*chunks, *segments])
    of_chunks = RemovedNumbers.of(numbers, chunks)
    lost = {container: None for container, ordinals in chunks.items() if ordinals is None}
    of_segments = RemovedNumbers.of(numbers, {**segments, **lost})
    count = 0
    for table, removed in ((CHUNKS, of_chunks), (FEATURES, of_chunks), (SEGMENTS, of_segments)):
        for partition in range(epoch.partitions) if len(removed.firsts) else ():
            count += _remove(server, epoch.partition(table, partition), table, removed.contains)
    return count


def withdraw_missing(
    server: RedisServer,
    epoch: Epoch,
    numbered: NumberedContainers,
    chunks: Mapping[int, Bools | None],
    segments: Mapping[int, Bools | None],
) -> int:
    """Remove entries with an unassigned number, or of missing chunks or segments.

    By container of the store: a mask of its chunks, or segments, that may be found; None for all. `numbered` was read
    before the store was listed: entries published since stay. Reads the whole index.

    Raises: EpochReplaced.
    """
    count = 0
    for table, existing in ((CHUNKS, chunks), (FEATURES, chunks), (SEGMENTS, segments)):
        for partition in range(epoch.partitions):
            count += _remove(server, epoch.partition(table, partition), table, partial(_is_missing, numbered, existing))
    return count


def _is_missing(numbered: NumberedContainers, existing: Mapping[int, Bools | None], numbers: U64) -> Bools:
    """Return which numbers mean no existing chunk or segment."""
    firsts, spans, containers = numbered.firsts, numbered.spans, numbered.containers
    old: Bools = numbers < np.uint64(numbered.end)
    if not len(firsts):
        return old
    at = np.maximum(np.searchsorted(firsts, numbers, side="right").astype(np.int64) - 1, 0)
    missing: Bools = (numbers < firsts[at]) | (numbers - firsts[at] >= spans[at])
    ordinals = np.where(missing, np.uint64(0), numbers - firsts[at]).astype(np.int64)
    for container, chunk_rows in group_by_container(containers[at]):
        mask = existing.get(container, _NO_ROWS)
        if mask is not None:
            inside = ordinals[chunk_rows] < len(mask)
            missing[chunk_rows] |= ~inside
            missing[chunk_rows[inside]] |= ~mask[ordinals[chunk_rows[inside]]]
    return missing & old


_NO_ROWS = np.zeros(0, np.bool_)


def _remove(server: RedisServer, key: str, table: Table, contains: Callable[[U64], Bools]) -> int:
    count = at = 0
    while at < (buckets := _buckets(server, key)):
        fields = [number.to_bytes(3, "little") for number in range(at, min(at + BUCKETS_A_READ, buckets))]
        found = server.one(("HMGET", key, *fields))
        at += len(fields)
        packed = b"".join(bucket for bucket in found if bucket and len(bucket) % table.width == 0)
        entries: U8 = np.frombuffer(packed, np.uint8).reshape(-1, table.width)
        is_removed = contains(key_encoding.numbers_of(entries[:, table.key_bytes :].tobytes()))
        rows = np.flatnonzero(is_removed)
        calls: list[Command] = [
            RedisServer.call(
                "remove",
                [key],
                entries[rows[start : start + ROWS_A_SCRIPT]].tobytes(),
                table.key_bytes,
                table.width,
                table.bucket_entries,
            )
            for start in range(0, len(rows), ROWS_A_SCRIPT)
        ]
        answers = server.run(calls)
        if None in answers:
            raise EpochReplaced
        count -= sum(answers)
    return count


def _buckets(server: RedisServer, key: str) -> int:
    """Return the current number of buckets of a partition."""
    state = server.one(("HGET", key, ""))
    match = _STATE.fullmatch(state or b"")
    if match is None:
        raise EpochReplaced
    return (1 << int(match[1])) + int(match[2])


def drop_containers(server: RedisServer, epoch_key: str, epoch: Epoch, containers: Collection[int]) -> None:
    """Remove containers from the summaries. Raises EpochReplaced."""
    keys = [epoch_key, epoch.meta("containers")]
    calls = [RedisServer.call("drop", keys, epoch.name, container.to_bytes(8, "little")) for container in containers]
    if None in server.run(calls):
        raise EpochReplaced
