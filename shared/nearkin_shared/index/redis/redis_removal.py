"""Letting go of entries. Invariant: an entry goes only if it still stands for what was to go; again changes nothing.

    forget    every bucket of three tables is read, ascending, and what names the unwanted is taken out by a script
    collect   1 is it listed?  2 counts  3 catalog      dying between any two only repeats work

A bucket that is parted while they are read gives entries to one of a higher number alone, so none is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from nearkin_shared.index.redis import key_encoding
from nearkin_shared.index.redis.connection import Command, Server
from nearkin_shared.index.redis.epoch import Epoch, EpochReplaced, NumberedContainers
from nearkin_shared.index.redis.key_encoding import CHUNKS, FEATURES, SEGMENTS, Table
from nearkin_shared.types import U8, U32, U64, Bools, group_by_container
from nearkin_shared.utils.frozen import frozen

BUCKETS_A_READ = 1000
"""Some 720 KB a reply."""
ROWS_A_SCRIPT = 512
_STATE = re.compile(rb"(\d+) (\d+) (\d+)")


@frozen
class UnwantedNumbers:
    """Numbers that no entry may have: of containers from firsts[i] on, `masks` one behind the other from starts[i]."""

    firsts: U64
    spans: U64
    starts: U64
    masks: Bools

    @staticmethod
    def of(numbers: Mapping[int, tuple[int, int]], wanted: Mapping[int, U32 | None]) -> UnwantedNumbers:
        """Return the numbers of ordinals, None for all, by container; `numbers` are (first, span) of each."""
        known = sorted((numbers[container], rows) for container, rows in wanted.items() if container in numbers)
        firsts, spans, masks = [], [], [np.zeros(0, np.bool_)]
        for (first, span), ordinals in known:
            mask = np.full(span, ordinals is None, np.bool_)
            if ordinals is not None:
                mask[ordinals[ordinals < span]] = True
            firsts.append(first)
            spans.append(span)
            masks.append(mask)
        wide = np.array(spans, np.uint64)
        return UnwantedNumbers(np.array(firsts, np.uint64), wide, np.cumsum(wide) - wide, np.concatenate(masks))

    def is_unwanted(self, numbers: U64) -> Bools:
        """Return which numbers are among them."""
        if not len(self.firsts):
            return np.zeros(len(numbers), np.bool_)
        at = np.maximum(np.searchsorted(self.firsts, numbers, side="right").astype(np.int64) - 1, 0)
        ordinals = numbers - self.firsts[at]
        inside = (numbers >= self.firsts[at]) & (ordinals < self.spans[at])
        found: Bools = inside & self.masks[np.where(inside, self.starts[at] + ordinals, 0).astype(np.int64)]
        return found


def withdraw_entries(
    server: Server, epoch: Epoch, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32 | None]
) -> int:
    """Take out all entries that name ordinals of containers, of any domain; return how many. Raises EpochReplaced.

    `chunks` None: its segments too. Reads the whole index: 60 bytes a chunk.
    """
    numbers = epoch.table.numbers([*chunks, *segments])
    of_chunks = UnwantedNumbers.of(numbers, chunks)
    lost = {container: None for container, ordinals in chunks.items() if ordinals is None}
    of_segments = UnwantedNumbers.of(numbers, {**segments, **lost})
    gone = 0
    for table, unwanted in ((CHUNKS, of_chunks), (FEATURES, of_chunks), (SEGMENTS, of_segments)):
        for partition in range(epoch.partitions) if len(unwanted.firsts) else ():
            gone += _forget(server, epoch.partition(table, partition), table, unwanted.is_unwanted)
    return gone


def withdraw_missing(
    server: Server,
    epoch: Epoch,
    numbered: NumberedContainers,
    chunks: Mapping[int, Bools | None],
    segments: Mapping[int, Bools | None],
) -> int:
    """Remove entries of numbers that no container has, or of chunks or segments that are not there.

    By container of the store: a mask of its chunks, or segments, that may be found; None for all of them. `numbered`
    was read before the store was listed: what was published since stays. Reads the whole index. Raises EpochReplaced.
    """
    gone = 0
    for table, there in ((CHUNKS, chunks), (FEATURES, chunks), (SEGMENTS, segments)):
        for partition in range(epoch.partitions):
            gone += _forget(server, epoch.partition(table, partition), table, partial(_is_missing, numbered, there))
    return gone


def _is_missing(numbered: NumberedContainers, there: Mapping[int, Bools | None], numbers: U64) -> Bools:
    """Return which numbers stand for nothing that is there."""
    firsts, spans, containers = numbered.firsts, numbered.spans, numbered.containers
    old: Bools = numbers < np.uint64(numbered.end)
    if not len(firsts):
        return old
    at = np.maximum(np.searchsorted(firsts, numbers, side="right").astype(np.int64) - 1, 0)
    missing: Bools = (numbers < firsts[at]) | (numbers - firsts[at] >= spans[at])
    ordinals = np.where(missing, np.uint64(0), numbers - firsts[at]).astype(np.int64)
    for container, rows_of in group_by_container(containers[at]):
        mask = there.get(container, _NOTHING)
        if mask is not None:
            inside = ordinals[rows_of] < len(mask)
            missing[rows_of] |= ~inside
            missing[rows_of[inside]] |= ~mask[ordinals[rows_of[inside]]]
    return missing & old


_NOTHING = np.zeros(0, np.bool_)


def _forget(server: Server, key: str, table: Table, is_unwanted: Callable[[U64], Bools]) -> int:
    gone = at = 0
    while at < (buckets := _buckets(server, key)):
        fields = [number.to_bytes(3, "little") for number in range(at, min(at + BUCKETS_A_READ, buckets))]
        found = server.one(("HMGET", key, *fields))
        at += len(fields)
        held = b"".join(bucket for bucket in found if bucket and len(bucket) % table.width == 0)
        entries: U8 = np.frombuffer(held, np.uint8).reshape(-1, table.width)
        named = is_unwanted(key_encoding.numbers_of(entries[:, table.key_bytes :].tobytes()))
        going = np.flatnonzero(named)
        calls: list[Command] = [
            Server.call(
                "remove",
                [key],
                entries[going[start : start + ROWS_A_SCRIPT]].tobytes(),
                table.key_bytes,
                table.width,
                table.bucket_entries,
            )
            for start in range(0, len(going), ROWS_A_SCRIPT)
        ]
        answers = server.run(calls)
        if None in answers:
            raise EpochReplaced
        gone -= sum(answers)
    return gone


def _buckets(server: Server, key: str) -> int:
    """Return how many buckets a partition has by now."""
    state = server.one(("HGET", key, ""))
    match = _STATE.fullmatch(state or b"")
    if match is None:
        raise EpochReplaced
    return (1 << int(match[1])) + int(match[2])


def drop_containers(server: Server, epoch_key: str, epoch: Epoch, containers: Collection[int]) -> None:
    """Count containers no more. Raises EpochReplaced."""
    keys = [epoch_key, epoch.meta("containers")]
    calls = [Server.call("gone", keys, epoch.name, container.to_bytes(8, "little")) for container in containers]
    if None in server.run(calls):
        raise EpochReplaced
