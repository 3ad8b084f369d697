"""Epochs of a Redis index, and the numbers of containers within an epoch.

Invariant: a number means the same container for as long as its epoch's name exists anywhere.

    {m}:epoch            "layout name partitions run whole": run is the server's run_id, whole 1 once it was rebuilt
    {m}:name:containers  container id 8 -> first number 8, then its summary once all its entries exist
    {m}:name:table       records in order of their numbers: first number 8, container id 8, span 4, domain 16
    {m}:name:next        the next free number
    {t0}:name ...        a partition of table t, see `scripts`

One script assigns all numbers, after comparing epoch and run_id. A server that restarted, that was restored from an
older dump, or a replica that took over without the last writes has another run_id: the epoch then continues under a new
name, by renaming the existing keys (`partitions`), so that no number that a client knows is used any more. A server
without an epoch receives an empty one. Every partition has a state from its epoch's start, so a partition without state
was lost.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from nearkin_shared.errors import FormatTooNew, StoreUnavailable
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.index.redis.key_encoding import Table
from nearkin_shared.index.redis.partitions import LOOKUP_LETTERS, Partitions, meta_key, partition_key
from nearkin_shared.types import U64, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

LAYOUT = 1
_EPOCH = re.compile(rb"(\d+) ([\w-]{8}) ([1-9]\d{0,3}) (\w+) ([01])")
_RECORD = np.dtype([("first", "<u8"), ("container", "<u8"), ("span", "<u4"), ("domain", "<u8", (2,))])
assert _RECORD.itemsize == 36
TAIL_RECORDS = 1000
"""Records read along with each lookup, for new containers; more take calls of RECORDS_A_CALL."""
RECORDS_A_CALL = 100_000
EPOCH_TRIES_MAX = 5

_log = logging.getLogger("nearkin.redis")


class EpochReplaced(Exception):
    """The epoch of a request has ended."""


def _domain(domain: bytes) -> U64:
    """Return a domain as records hold it; an empty domain matches no tenant's."""
    return np.frombuffer(domain.ljust(16, b"\0"), "<u8")


@frozen
class NumberedContainers:
    """Numbers of containers at one moment.

    Container i has the numbers from firsts[i] to firsts[i] + spans[i]; `firsts` ascend.
    """

    end: int
    """First number that was not assigned yet."""
    firsts: U64
    spans: U64
    containers: U64


class ContainerTable:
    """Copy of one epoch's table from numbers to containers. Shared by threads.

    44 bytes per container. Records are only appended, so the copy stays valid for as long as the epoch's name exists.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records = np.zeros(1024, _RECORD)
        self._firsts = np.zeros(1024, np.uint64)  # separate, or each search would first gather them
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, offset: int, records: Sequence[bytes]) -> None:
        """Append records that begin at `offset`; existing ones stay."""
        with self._lock:
            fresh = records[self._count - offset :] if offset <= self._count else ()
            if not fresh:
                return
            packed = b"".join(fresh)
            if len(packed) != len(fresh) * _RECORD.itemsize:
                return  # foreign data: the numbers of these records stay unknown
            count = self._count + len(fresh)
            if count > len(self._records):
                grown = np.zeros(max(count, 2 * len(self._records)), _RECORD)
                grown[: self._count] = self._records[: self._count]
                self._records, self._firsts = grown, grown["first"].astype(np.uint64)
            self._records[self._count : count] = np.frombuffer(packed, _RECORD)
            self._firsts[self._count : count] = self._records["first"][self._count : count]
            self._count = count

    def covers(self, numbers: U64) -> bool:
        """Return whether the copied records include all numbers."""
        if not len(numbers):
            return True
        with self._lock:
            last = self._records[self._count - 1] if self._count else None
        return last is not None and int(numbers.max()) < int(last["first"]) + int(last["span"])

    def locate(self, numbers: U64, domain: bytes) -> tuple[Locations, Bools]:
        """Return (locations, found).

        Not found are 0, unassigned numbers and those of another domain.
        """
        with self._lock:
            records, firsts = self._records[: self._count], self._firsts[: self._count]
        rows = np.searchsorted(firsts, numbers, side="right") - 1
        record = records[np.maximum(rows, 0)] if len(records) else np.zeros(len(numbers), _RECORD)
        found = (rows >= 0) & (numbers - record["first"] < record["span"])
        found &= (record["domain"] == _domain(domain)).all(axis=1)
        locations = Locations.empty(len(numbers))
        locations.containers[found] = record["container"][found]
        locations.ordinals[found] = (numbers - record["first"])[found]
        return locations, found

    def numbers(self, containers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return (first number, span) of the containers that have numbers.

        The last pair, if a container received numbers twice.
        """
        with self._lock:
            records = self._records[: self._count]
        selected = records[np.isin(records["container"], np.array(containers, np.uint64))]
        columns = (selected[name].tolist() for name in ("container", "first", "span"))
        return {container: (first, span) for container, first, span in zip(*columns, strict=True)}

    def records_until(self, end: int) -> NumberedContainers:
        """Return all records; `end` is the first number that was unassigned before the read."""
        with self._lock:
            records = self._records[: self._count]
        firsts, spans, containers = (records[name].astype(np.uint64) for name in ("first", "span", "container"))
        return NumberedContainers(end, firsts, spans, containers)

    def containers(self, domain: bytes | None) -> U64:
        """Return the ids of a domain's containers, or of all, in stream order."""
        with self._lock:
            records = self._records[: self._count]
        if domain is not None:
            records = records[(records["domain"] == _domain(domain)).all(axis=1)]
        # Distinct: a container published again has new numbers. With return_index, or np.unique imports numpy.ma.
        return np.unique(records["container"], return_index=True)[0].astype(np.uint64)


@frozen
class Epoch:
    """One period of the index, between two losses or restarts of a server."""

    name: str
    value: bytes
    """Value in Redis."""
    partitions: int
    whole: bool
    prefix: str
    table: ContainerTable = field(default_factory=ContainerTable, compare=False)

    def meta(self, what: str) -> str:
        """Return the key of a table about containers."""
        return meta_key(self.prefix, self.name, what)

    def partition(self, table: Table | str, number: int) -> str:
        """Return the key of a partition; its braces choose its slot in a Cluster."""
        return partition_key(self.prefix, self.name, table if isinstance(table, str) else table.letter, number)


class Epochs:
    """The current epoch and its succession. Shared by threads."""

    def __init__(
        self, server: RedisServer, prefix: str, partitions: int, generation: Callable[[], int] = lambda: 0
    ) -> None:
        """Join or begin an epoch.

        `generation` returns the GC generation of the object store: entries of an older one may name deleted data.
        """
        self._generation, self._generation_seen = generation, 0
        self._server = server
        self._prefix = prefix
        self._partitions = partitions
        self._lock = threading.Lock()
        self.key: str = f"{prefix}:{{m}}:epoch"
        self._successor_key = f"{prefix}:{{m}}:successor"
        self._epoch, _ = self._next(None)

    @property
    def current(self) -> Epoch:
        """Return the epoch as last seen."""
        return self._epoch

    @property
    def generation(self) -> int:
        """Return the GC generation that a partition needs for its entries to be used.

        Raises: StoreUnavailable.
        """
        return max(self._generation_seen, self._generation())

    def partitions_of(self, epoch: Epoch) -> Partitions:
        """Return the partitions of an epoch."""
        return Partitions(self._server, self._prefix, epoch.name, epoch.partitions)

    def advance(self, at_least: int) -> int:
        """Begin a GC generation and return its number.

        Call it after all entries that a GC run withdraws were removed.

        Raises: EpochReplaced.
        """
        epoch, required = self._epoch, self.generation
        partitions = self.partitions_of(epoch)
        states = partitions.inspect()
        if states is None:
            raise EpochReplaced
        generation = max(at_least, required + 1, *(state.generation + 1 for state in states))
        if not partitions.advance(required, generation):
            raise EpochReplaced
        self._generation_seen = generation
        return generation

    def is_stale(self) -> bool:
        """Return whether the epoch is incomplete or a partition is stale.

        A stale partition lacks a GC run, or was created empty. Continues the epoch if the server of a partition
        restarted.
        """
        for _ in range(EPOCH_TRIES_MAX):
            epoch = self.check()
            states = self.partitions_of(epoch).inspect()
            if states is not None and all(state.same_server for state in states):
                stale = any(state.generation < self.generation or state.is_incomplete for state in states)
                return stale or not epoch.whole
            self.renew(epoch)
        raise StoreUnavailable(f"{self._server.name}: restarted {EPOCH_TRIES_MAX} times in a row; try again later")

    def is_incomplete(self, epoch: Epoch) -> bool:
        """Return whether entries of published containers may be missing."""
        states = self.partitions_of(epoch).inspect()
        return states is None or any(state.is_incomplete for state in states if state.letter in LOOKUP_LETTERS)

    def has_unchecked(self, epoch: Epoch) -> bool:
        """Return whether entries may name deleted data, or unassigned numbers."""
        states = self.partitions_of(epoch).inspect()
        return states is None or self._server.clustered or any(s.generation < self.generation for s in states)

    def mark_checked(self, epoch: Epoch, generation: int) -> bool:
        """Declare all partitions checked; return False if one was lost or its server restarted."""
        return self.partitions_of(epoch).mark_checked(generation)

    def compare(self, epoch: Epoch, value: bytes | None) -> None:
        """Compare the current value in Redis with a caller's epoch.

        Raises: EpochReplaced.
        """
        if value == epoch.value:
            return
        found = self._parse(value)
        if found is None or found.name != epoch.name:
            raise EpochReplaced
        with self._lock:
            if self._epoch.name == found.name:
                self._epoch = found  # it is complete now

    def check(self) -> Epoch:
        """Read the epoch from Redis, which may have restarted, and return it."""
        epoch = self._epoch
        value = self._server.one(RedisServer.call("check", [self.key], epoch.name))
        try:
            self.compare(epoch, value)
        except EpochReplaced:
            self.renew(epoch)
        return self._epoch

    def renew(self, ended: Epoch) -> None:
        """Leave an epoch that ended: join the one that another client began, or begin one."""
        with self._lock:
            if self._epoch.name != ended.name:
                return  # another thread has renewed it
            self._epoch, adopted = self._next(ended)
            _log.warning(
                "%s: epoch %s of the index ended (restart, failover or loss); %s epoch %s",
                self._server.name,
                ended.name,
                "joined" if adopted else "began",
                self._epoch.name,
            )

    def _is_current(self, epoch: Epoch) -> bool:
        return self._server.one(RedisServer.call("check", [self.key], epoch.name)) is not None

    def _next(self, ended: Epoch | None) -> tuple[Epoch, bool]:
        """Return the current epoch and whether another client began it.

        Begins one if there is none but `ended`.
        """
        value: bytes | None = self._server.one(("GET", self.key))
        for _ in range(EPOCH_TRIES_MAX):
            found = self._parse(value)
            if found is not None and (ended is None or found.name != ended.name) and self._is_current(found):
                return found, True
            name, value = self._begin(value or b"", found)
            found = self._parse(value)
            if found is not None and found.name == name:
                return found, False
        raise StoreUnavailable(f"{self._server.name}: {EPOCH_TRIES_MAX} new epochs ended immediately; try again later")

    def _begin(self, value: bytes, before: Epoch | None) -> tuple[str, bytes]:
        """Create the partitions of a new epoch, then activate it if `value` is still current.

        It continues the epoch `before`, if known: all clients that do so concurrently use one name. Returns the new
        epoch's name, and the current value.
        """
        name, count, keys = secrets.token_urlsafe(6), self._partitions, list[str]()
        generation = self.generation
        if before is None:
            keys = Partitions(self._server, self._prefix, name, count).create(generation)
        else:
            agreed = self._server.one(RedisServer.call("successor", [self._successor_key], before.name, name))
            name, count = agreed.decode(), before.partitions
            Partitions(self._server, self._prefix, name, count).adopt(before.name, generation)
        selected = f"{LAYOUT} {name} {count}"
        current_value: bytes = self._server.one(RedisServer.call("begin", [self.key], value, selected))
        if not current_value.startswith(selected.encode()):
            self._server.run([("UNLINK", key) for key in keys])
        return name, current_value

    def _parse(self, value: bytes | None) -> Epoch | None:
        """Return the epoch of a value, with its known table, or None for an invalid value.

        Raises: FormatTooNew.
        """
        match = _EPOCH.fullmatch(value or b"")
        if match is None or value is None:
            return None
        layout, name, partitions, _, whole = match.groups()
        if int(partitions) & (int(partitions) - 1):
            return None
        if int(layout) > LAYOUT:
            raise FormatTooNew(
                f"{self._server.name}: index layout {int(layout)} is newer than this Nearkin reads ({LAYOUT}); upgrade "
                f"it, or set another redis.prefix"
            )
        known = getattr(self, "_epoch", None)
        is_same = known is not None and known.name == name.decode()
        table = known.table if is_same and known is not None else ContainerTable()
        return Epoch(name.decode(), value, int(partitions), whole == b"1", self._prefix, table)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def tail(self, epoch: Epoch) -> tuple[int, Command]:
        """Return the number of known records, and the command that reads some after them."""
        known = len(epoch.table)
        return known, ("LRANGE", epoch.meta("table"), known, known + TAIL_RECORDS - 1)

    def cover(self, epoch: Epoch, numbers: U64) -> None:
        """Read the table until it covers all numbers, or ends."""
        while not epoch.table.covers(numbers):
            known = len(epoch.table)
            found = self._server.one(("LRANGE", epoch.meta("table"), known, known + RECORDS_A_CALL - 1))
            epoch.table.extend(known, found)
            if len(epoch.table) == known:
                return

    def cover_all(self, epoch: Epoch) -> None:
        """Read the table to its end."""
        self.cover(epoch, np.full(1, np.iinfo(np.uint64).max, np.uint64))

    def container_numbers(self, epoch: Epoch) -> NumberedContainers:
        """Return the current numbers of containers."""
        end = int(self._server.one(("GET", epoch.meta("next"))) or 1)  # before the records
        self.cover_all(epoch)
        return epoch.table.records_until(end)

    def first_numbers(self, epoch: Epoch, spans: Sequence[tuple[ContainerId, int, bytes]]) -> list[int]:
        """Return the number of ordinal 0 of each (container, ordinals, domain), in one round trip.

        Repeated calls in one epoch return the same numbers.

        Raises: EpochReplaced.
        """
        keys = [self.key, *(epoch.meta(what) for what in ("containers", "table", "next"))]
        answers: list[Any] = self._server.run(
            [
                RedisServer.call("assign", keys, epoch.name, container.to_bytes(8, "little"), span, domain)
                for container, span, domain in spans
            ]
        )
        if None in answers:
            raise EpochReplaced
        if min(answers, default=0) < 0:
            raise StoreUnavailable(
                f"{self._server.name}: all 2^40 numbers of chunks and segments are assigned; use another redis.prefix"
            )
        return [int(answer) for answer in answers]

    def finish(self, epoch: Epoch, summaries: Sequence[tuple[ContainerId, bytes]]) -> None:
        """Store the summaries of containers whose entries all exist.

        Raises: EpochReplaced.
        """
        keys = [self.key, epoch.meta("containers")]
        calls = [
            RedisServer.call("finish", keys, epoch.name, container.to_bytes(8, "little"), summary)
            for container, summary in summaries
        ]
        if None in self._server.run(calls):
            raise EpochReplaced
