"""Epochs. Invariant: a number means the same container for as long as its epoch's name is seen anywhere.

    {m}:epoch            "layout name partitions run whole": run is the server's run_id, whole 1 once it was rebuilt
    {m}:name:containers  container id 8 -> first number 8, then its summary once all its entries are there
    {m}:name:table       records in order of their numbers: first number 8, container id 8, span 4, domain 16
    {m}:name:next        the next free number
    {t0}:name ...        a partition of table t, see `scripts`

Numbers are given out in one place, by a script that first compares epoch and run_id. A server that restarted, that was
restored from an older dump, or a replica that took over with the last writes missing has another run_id: the epoch is
continued under a new name, by renaming the keys that are there (`partitions`), so that no number that a client knows is
used any more. A server without an epoch gets an empty one. Every partition has a state from its epoch's first moment
on, so that one whose state is gone was lost.
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
from nearkin_shared.index.redis.connection import Command, Server
from nearkin_shared.index.redis.key_encoding import Table
from nearkin_shared.index.redis.partitions import LOOKUP_LETTERS, Partitions, meta_key, partition_key
from nearkin_shared.types import U64, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

LAYOUT = 1
_EPOCH = re.compile(rb"(\d+) ([\w-]{8}) ([1-9]\d{0,3}) (\w+) ([01])")
_RECORD = np.dtype([("first", "<u8"), ("container", "<u8"), ("span", "<u4"), ("domain", "<u8", (2,))])
assert _RECORD.itemsize == 36
TAIL_RECORDS = 1000
"""Read along with each lookup, should there be so many new containers; more take calls of RECORDS_A_CALL."""
RECORDS_A_CALL = 100_000
EPOCH_TRIES_MAX = 5

_log = logging.getLogger("nearkin.redis")


class EpochReplaced(Exception):
    """What was asked belongs to an epoch that is no more."""


def _domain(domain: bytes) -> U64:
    """Return a domain as records hold it; who names none gets one that is no tenant's."""
    return np.frombuffer(domain.ljust(16, b"\0"), "<u8")


@frozen
class NumberedContainers:
    """Which numbers containers had at one moment: container i those of spans[i] from firsts[i], ascending."""

    end: int
    """No number from here on had been given out."""
    firsts: U64
    spans: U64
    containers: U64


class ContainerTable:
    """Which container each number lies in: a copy of one epoch's table, 44 bytes a container. Shared by threads.

    Entries are only ever appended, so what was copied stays right for as long as the epoch's name does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records = np.zeros(1024, _RECORD)
        self._firsts = np.zeros(1024, np.uint64)  # apart, or each search would first gather them
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, offset: int, records: Sequence[bytes]) -> None:
        """Take records that begin at `offset`; what is there already stays."""
        with self._lock:
            fresh = records[self._count - offset :] if offset <= self._count else ()
            if not fresh:
                return
            joined = b"".join(fresh)
            if len(joined) != len(fresh) * _RECORD.itemsize:
                return  # not ours: numbers that it would explain stay unknown
            count = self._count + len(fresh)
            if count > len(self._records):
                grown = np.zeros(max(count, 2 * len(self._records)), _RECORD)
                grown[: self._count] = self._records[: self._count]
                self._records, self._firsts = grown, grown["first"].astype(np.uint64)
            self._records[self._count : count] = np.frombuffer(joined, _RECORD)
            self._firsts[self._count : count] = self._records["first"][self._count : count]
            self._count = count

    def covers(self, numbers: U64) -> bool:
        """Return whether all numbers were given out before the last record that was taken."""
        if not len(numbers):
            return True
        with self._lock:
            last = self._records[self._count - 1] if self._count else None
        return last is not None and int(numbers.max()) < int(last["first"]) + int(last["span"])

    def locate(self, numbers: U64, domain: bytes) -> tuple[Locations, Bools]:
        """Return (locations, found); not found: 0, a number that nobody was given, or another domain's."""
        with self._lock:
            records, firsts = self._records[: self._count], self._firsts[: self._count]
        rows = np.searchsorted(firsts, numbers, side="right") - 1
        held = records[np.maximum(rows, 0)] if len(records) else np.zeros(len(numbers), _RECORD)
        found = (rows >= 0) & (numbers - held["first"] < held["span"])
        found &= (held["domain"] == _domain(domain)).all(axis=1)
        locations = Locations.empty(len(numbers))
        locations.containers[found] = held["container"][found]
        locations.ordinals[found] = (numbers - held["first"])[found]
        return locations, found

    def numbers(self, containers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return (first number, span) of the containers that have numbers: the last where one was given some twice."""
        with self._lock:
            records = self._records[: self._count]
        wanted = records[np.isin(records["container"], np.array(containers, np.uint64))]
        columns = (wanted[name].tolist() for name in ("container", "first", "span"))
        return {container: (first, span) for container, first, span in zip(*columns, strict=True)}

    def records_until(self, end: int) -> NumberedContainers:
        """Return all records; `end` is the first number that was not given out before they were read."""
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
        # Each once: one that came back has numbers anew. With return_index, or np.unique imports numpy.ma.
        return np.unique(records["container"], return_index=True)[0].astype(np.uint64)


@frozen
class Epoch:
    """One life of the index."""

    name: str
    value: bytes
    """As it stands in Redis."""
    partitions: int
    whole: bool
    prefix: str
    table: ContainerTable = field(default_factory=ContainerTable, compare=False)

    def meta(self, what: str) -> str:
        """Return the name of one of the keys about containers."""
        return meta_key(self.prefix, self.name, what)

    def partition(self, table: Table | str, number: int) -> str:
        """Return the key of a partition; its braces choose its slot in a Cluster."""
        return partition_key(self.prefix, self.name, table if isinstance(table, str) else table.letter, number)


class Epochs:
    """The epoch in force, and how one follows another. Shared by threads."""

    def __init__(self, server: Server, prefix: str, partitions: int, generation: Callable[[], int] = lambda: 0) -> None:
        """`generation` returns the GC generation of the object store: what GC may have freed has an older one."""
        self._generation, self._generation_seen = generation, 0
        self._server = server
        self._prefix = prefix
        self._partitions = partitions
        self._lock = threading.Lock()
        self.key = f"{prefix}:{{m}}:epoch"
        self._successor_key = f"{prefix}:{{m}}:successor"
        self._epoch, _ = self._next(None)

    @property
    def current(self) -> Epoch:
        """Return the epoch as last seen."""
        return self._epoch

    @property
    def generation(self) -> int:
        """Return the GC generation that a partition needs for its entries to be answered. Raises StoreUnavailable."""
        return max(self._generation_seen, self._generation())

    def partitions_of(self, epoch: Epoch) -> Partitions:
        """Return the partitions of an epoch."""
        return Partitions(self._server, self._prefix, epoch.name, epoch.partitions)

    def advance(self, at_least: int) -> int:
        """Begin a GC generation after all entries that a GC run withdraws were removed; return it. Raises
        EpochReplaced.
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
        """Return whether the epoch is not whole, or a partition is stale: a GC run is missing, or it was created empty.

        Continues the epoch where the server of a partition, or of one node of a Cluster, is another than before.
        """
        for _ in range(EPOCH_TRIES_MAX):
            epoch = self.check()
            states = self.partitions_of(epoch).inspect()
            if states is not None and all(state.same_server for state in states):
                stale = any(state.generation < self.generation or state.is_incomplete for state in states)
                return stale or not epoch.whole
            self.renew(epoch)
        raise StoreUnavailable(f"{self._server.name}: it restarted {EPOCH_TRIES_MAX} times at once; try again later")

    def is_incomplete(self, epoch: Epoch) -> bool:
        """Return whether entries of containers may be missing that the index lists as published."""
        states = self.partitions_of(epoch).inspect()
        return states is None or any(state.is_incomplete for state in states if state.letter in LOOKUP_LETTERS)

    def has_unchecked(self, epoch: Epoch) -> bool:
        """Return whether entries may name what GC has freed, or numbers that no container has."""
        states = self.partitions_of(epoch).inspect()
        return states is None or self._server.clustered or any(s.generation < self.generation for s in states)

    def mark_checked(self, epoch: Epoch, generation: int) -> bool:
        """Declare all partitions checked; return False where one was lost or its server restarted meanwhile."""
        return self.partitions_of(epoch).mark_checked(generation)

    def seen(self, epoch: Epoch, value: bytes | None) -> None:
        """Compare what Redis says now with the epoch that a caller works in. Raises EpochReplaced."""
        if value == epoch.value:
            return
        found = self._parsed(value)
        if found is None or found.name != epoch.name:
            raise EpochReplaced
        with self._lock:
            if self._epoch.name == found.name:
                self._epoch = found  # it is whole now

    def check(self) -> Epoch:
        """Ask Redis, which is not always the one it was; return the epoch that is in force then."""
        epoch = self._epoch
        value = self._server.one(Server.call("check", [self.key], epoch.name))
        try:
            self.seen(epoch, value)
        except EpochReplaced:
            self.renew(epoch)
        return self._epoch

    def renew(self, gone: Epoch) -> None:
        """Leave an epoch: take up the one that another client began, or begin one."""
        with self._lock:
            if self._epoch.name != gone.name:
                return  # another thread was here
            self._epoch, adopted = self._next(gone)
            _log.warning(
                "%s: epoch %s of the index ended (restart, failover or loss); %s epoch %s",
                self._server.name,
                gone.name,
                "joined" if adopted else "began",
                self._epoch.name,
            )

    def _still(self, epoch: Epoch) -> bool:
        return self._server.one(Server.call("check", [self.key], epoch.name)) is not None

    def _next(self, gone: Epoch | None) -> tuple[Epoch, bool]:
        """Return the epoch in force and whether another client began it; begin one where there is none but `gone`."""
        value: bytes | None = self._server.one(("GET", self.key))
        for _ in range(EPOCH_TRIES_MAX):
            found = self._parsed(value)
            if found is not None and (gone is None or found.name != gone.name) and self._still(found):
                return found, True
            name, value = self._begin(value or b"", found)
            found = self._parsed(value)
            if found is not None and found.name == name:
                return found, False
        raise StoreUnavailable(f"{self._server.name}: {EPOCH_TRIES_MAX} new epochs were gone at once; try again later")

    def _begin(self, value: bytes, before: Epoch | None) -> tuple[str, bytes]:
        """Make the partitions of a new epoch, then put it into force, unless `value` is in force no more.

        It continues the epoch `before`, where that is known: all clients that do so at once use one name.
        Returns the new epoch's name, and the value that is in force now.
        """
        name, count, keys = secrets.token_urlsafe(6), self._partitions, list[str]()
        generation = self.generation
        if before is None:
            keys = Partitions(self._server, self._prefix, name, count).create(generation)
        else:
            agreed = self._server.one(Server.call("successor", [self._successor_key], before.name, name))
            name, count = agreed.decode(), before.partitions
            Partitions(self._server, self._prefix, name, count).adopt(before.name, generation)
        wanted = f"{LAYOUT} {name} {count}"
        now: bytes = self._server.one(Server.call("begin", [self.key], value, wanted))
        if not now.startswith(wanted.encode()):
            self._server.run([("UNLINK", key) for key in keys])
        return name, now

    def _parsed(self, value: bytes | None) -> Epoch | None:
        """Return the epoch of a value, with what is known of it; None for what nobody wrote. Raises FormatTooNew."""
        match = _EPOCH.fullmatch(value or b"")
        if match is None or value is None:
            return None
        layout, name, partitions, _, whole = match.groups()
        if int(partitions) & (int(partitions) - 1):
            return None
        if int(layout) > LAYOUT:
            raise FormatTooNew(
                f"{self._server.name}: index layout {int(layout)}; this Nearkin reads up to {LAYOUT}: upgrade it, "
                f"or set another redis.prefix"
            )
        known = getattr(self, "_epoch", None)
        same = known is not None and known.name == name.decode()
        table = known.table if same and known is not None else ContainerTable()
        return Epoch(name.decode(), value, int(partitions), whole == b"1", self._prefix, table)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def tail(self, epoch: Epoch) -> tuple[int, Command]:
        """Return how many records are known, and the command that reads some after them."""
        known = len(epoch.table)
        return known, ("LRANGE", epoch.meta("table"), known, known + TAIL_RECORDS - 1)

    def cover(self, epoch: Epoch, numbers: U64) -> None:
        """Read on in the table until it explains all numbers, or ends."""
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
        """Return which numbers containers have by now."""
        end = int(self._server.one(("GET", epoch.meta("next"))) or 1)  # before the records
        self.cover_all(epoch)
        return epoch.table.records_until(end)

    def first_numbers(self, epoch: Epoch, spans: Sequence[tuple[ContainerId, int, bytes]]) -> list[int]:
        """Return the number of ordinal 0 of each (container, ordinals, domain), in one round trip.

        They are the same whenever asked in one epoch. Raises EpochReplaced.
        """
        keys = [self.key, *(epoch.meta(what) for what in ("containers", "table", "next"))]
        answers: list[Any] = self._server.run(
            [
                Server.call("assign", keys, epoch.name, container.to_bytes(8, "little"), span, domain)
                for container, span, domain in spans
            ]
        )
        if None in answers:
            raise EpochReplaced
        if min(answers, default=0) < 0:
            raise StoreUnavailable(f"{self._server.name}: 2^40 chunks and segments are numbered; use another prefix")
        return [int(answer) for answer in answers]

    def finish(self, epoch: Epoch, summaries: Sequence[tuple[ContainerId, bytes]]) -> None:
        """Keep containers' summaries: all their entries are there. Raises EpochReplaced."""
        keys = [self.key, epoch.meta("containers")]
        calls = [
            Server.call("finish", keys, epoch.name, container.to_bytes(8, "little"), summary)
            for container, summary in summaries
        ]
        if None in self._server.run(calls):
            raise EpochReplaced
