"""Removal of entries from a Redis index.

Invariant: an entry is removed only while it still has the removed number. Idempotent.

    by name   chunks whose names their directories give: partition and bucket follow, nothing else is read
    by walk   super-features and segments, and chunks without a name: all buckets of a table are read, ascending

A bucket split during a walk moves entries to a higher bucket only, so none is missed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import numpy as np

from nearkin_shared.index.protocols import ContainerDirectories
from nearkin_shared.index.redis import key_encoding
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.epoch import Epoch, EpochReplaced, NumberedContainers
from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, SEGMENTS, Table
from nearkin_shared.index.redis.partition_calls import Numbered, remove_calls
from nearkin_shared.types import U8, U32, U64, Bools, group_by_container
from nearkin_shared.utils.frozen import frozen

BUCKETS_A_READ = 1000
"""About 720 KB per reply."""
PARTITIONS_A_READ = 2
"""Partitions read in one round trip: the server answers no other client for 3 ms."""
ROWS_A_SCRIPT = 512
NAMES_A_BATCH = 1 << 16
"""Chunks removed by name in one round trip: 3 MB."""
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
    server: RedisServer,
    epoch: Epoch,
    chunks: Mapping[int, U32 | None],
    segments: Mapping[int, U32 | None],
    directories: ContainerDirectories | None = None,
) -> int:
    """Remove all entries that name ordinals of containers, of any domain; return the count.

    `chunks` None removes the container's segments too. Chunks that `directories` name are removed by name.

    Raises: EpochReplaced.
    """
    numbers = epoch.table.numbers([*chunks, *segments])
    of_chunks = RemovedNumbers.of(numbers, chunks)
    lost = {container: None for container, ordinals in chunks.items() if ordinals is None}
    of_segments = RemovedNumbers.of(numbers, {**segments, **lost})
    count, unnamed = 0, dict(chunks)
    if directories is not None:
        count, unnamed = _remove_named(server, epoch, numbers, chunks, directories)
    of_unnamed = RemovedNumbers.of(numbers, unnamed)
    for table, removed in ((CHUNKS, of_unnamed), (FEATURES, of_chunks), (SEGMENTS, of_segments)):
        if len(removed.firsts):
            count += _remove_numbers(server, epoch, table, removed.contains)
    return count


def _remove_named(
    server: RedisServer,
    epoch: Epoch,
    numbers: Mapping[int, tuple[int, int]],
    chunks: Mapping[int, U32 | None],
    directories: ContainerDirectories,
) -> tuple[int, dict[int, U32 | None]]:
    """Remove chunks by name; return the count, and the removals whose names are unknown."""
    count, unnamed = 0, dict[int, U32 | None]()
    batch: list[Numbered] = []
    rows = 0
    for container, ordinals in chunks.items():
        if container not in numbers:
            continue
        found = _named(directories, container, ordinals, *numbers[container])
        if found is None:
            unnamed[container] = ordinals
            continue
        batch.append(found)
        rows += len(found[0])
        if rows >= NAMES_A_BATCH:
            count += _removed(server, remove_calls(epoch, CHUNKS, batch))
            batch, rows = [], 0
    return count + _removed(server, remove_calls(epoch, CHUNKS, batch)), unnamed


def _named(
    directories: ContainerDirectories, container: int, ordinals: U32 | None, first: int, span: int
) -> Numbered | None:
    """Return keys and numbers of a container's chunks, None unless each number has a name.

    A directory has none of a chunk that was removed from it. The entry may still exist if the chunk was lost.
    """
    directory = directories.get(container)
    if directory is None or max(len(directory.chunks), len(directory.segments)) < span:
        return None
    there = directory.chunks.there
    rows = np.arange(len(there), dtype=np.uint32) if ordinals is None else ordinals[ordinals < span]
    if len(rows) and (int(rows.max()) >= len(there) or not there[rows].all()):
        return None
    return key_encoding.chunk_keys(directory.chunks.names[rows]), np.uint64(first) + rows.astype(np.uint64)


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
        count += _remove_numbers(server, epoch, table, partial(_is_missing, numbered, existing))
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


def _remove_numbers(server: RedisServer, epoch: Epoch, table: Table, contains: Callable[[U64], Bools]) -> int:
    """Read a table and remove the entries whose numbers `contains` selects.

    Returns the number of removed entries.
    """
    count = 0
    for start in range(0, epoch.partitions, PARTITIONS_A_READ):
        stop = min(start + PARTITIONS_A_READ, epoch.partitions)
        for read in _walk(server, [epoch.partition(table, partition) for partition in range(start, stop)]):
            calls: list[Command] = []
            for key, buckets in read:
                packed = b"".join(bucket for bucket in buckets if bucket and len(bucket) % table.width == 0)
                entries: U8 = np.frombuffer(packed, np.uint8).reshape(-1, table.width)
                is_removed = contains(key_encoding.numbers_of(entries[:, table.key_bytes :].tobytes()))
                calls += _remove_rows(key, table, entries[is_removed])
            count += _removed(server, calls)
    return count


def _walk(server: RedisServer, keys: list[str]) -> Iterator[list[tuple[str, list[bytes | None]]]]:
    """Yield (key, buckets) of partitions until all buckets were read.

    A script that returns only the buckets with a removed number takes twice the server's time.
    """
    states = server.run([("HGET", key, "") for key in keys])
    left = {key: (0, _count_buckets(state)) for key, state in zip(keys, states, strict=True)}
    while left:
        commands: list[Command] = []
        for key, (start, count) in left.items():
            numbers = range(start, min(start + BUCKETS_A_READ, count))
            commands.append(("HMGET", key, "", *(number.to_bytes(3, "little") for number in numbers)))
        replies = server.run(commands)
        yield [(key, reply[1:]) for key, reply in zip(left, replies, strict=True)]
        after = {}
        for (key, (start, count)), reply in zip(left.items(), replies, strict=True):
            stop, count_now = min(start + BUCKETS_A_READ, count), _count_buckets(reply[0])
            if count_now > stop:
                after[key] = stop, count_now
        left = after


def _count_buckets(state: bytes | None) -> int:
    """Return the number of buckets of a partition in this state. Raises EpochReplaced."""
    match = _STATE.fullmatch(state or b"")
    if match is None:
        raise EpochReplaced
    return (1 << int(match[1])) + int(match[2])


def _remove_rows(key: str, table: Table, entries: U8) -> list[Command]:
    """Return the calls that remove entries of one partition."""
    sizes = (table.key_bytes, table.width, table.bucket_entries)
    return [
        RedisServer.call("remove", [key], entries[start : start + ROWS_A_SCRIPT].tobytes(), *sizes)
        for start in range(0, len(entries), ROWS_A_SCRIPT)
    ]


def _removed(server: RedisServer, calls: list[Command]) -> int:
    """Call `remove` and return the number of removed entries. Raises EpochReplaced."""
    answers = server.run(calls)
    if None in answers:
        raise EpochReplaced
    return -sum(map(int, answers))


def drop_containers(server: RedisServer, epoch_key: str, epoch: Epoch, containers: Collection[int]) -> None:
    """Remove containers from the summaries. Raises EpochReplaced."""
    keys = [epoch_key, epoch.meta("containers")]
    calls = [RedisServer.call("drop", keys, epoch.name, container.to_bytes(8, "little")) for container in containers]
    if None in server.run(calls):
        raise EpochReplaced
