"""Names that shards sent with their answers, found while these shards vouch for them.

    answer of a shard -> names of its hits' containers -> table of whole names -> later keys, without a request

A shard grants its names for `HELD_SECONDS`. It acknowledges a withdrawal only after `GRANT_SECONDS`, when all earlier
grants have ended. The same grant in a later answer of the shard prolongs it: nothing was withdrawn in between; another
one drops all names.

Invariant: a name is found only while its shard's grant lasts; so after a withdrawal no client finds what it removed.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from nearkin_shared.errors import BadInput
from nearkin_shared.index.shards.key_ranges import Owners, owners_of_keys
from nearkin_shared.index.shards.shard_messages import CARRIED_BYTES_MAX, KEY_BYTES, Carried, CarriedRows, Table
from nearkin_shared.kernels.fingerprint_table import NameTable
from nearkin_shared.limits import KIB
from nearkin_shared.observability import counters
from nearkin_shared.types import U8, Bools, Locations

HELD_SECONDS = 1.0
"""Life of a grant, which the client measures from before its request."""
GRANT_SECONDS = 1.25
"""The same in the shard, whose clock may be a quarter faster."""
CARRIED_BYTES_MIN, CARRIED_BYTES_FIRST = 16 * KIB, 32 * KIB
ANSWERS_WITHOUT = 15
"""Answers that carry no names after one of CARRIED_BYTES_MIN that was not used: lookups follow no stream."""
NAMES_MAX = {"chunks": 1 << 17, "segments": 1 << 15}
"""Names that a client holds, at most 16 MB; half of them are dropped at once."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that continues during suspend."""


def now_seconds() -> float:
    """Return the time of the clock that measures grants."""
    return time.clock_gettime(_CLOCK)


class _HeldTable:
    """Names of one table in two halves; the older half is dropped when the other one is full."""

    def __init__(self, table: Table, shards: int) -> None:
        self._width, self._half_max = KEY_BYTES[table], NAMES_MAX[table] // 2
        self._carried, self._used = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
        """Names of each shard's last answer that carried some, and rows found since then."""
        self._budgets = np.full(shards, CARRIED_BYTES_FIRST)
        self._without = np.zeros(shards, np.int64)
        self.clear()

    def clear(self) -> None:
        """Drop all names."""
        self.halves: list[NameTable] = []

    def budget(self, shard: int) -> int:
        """Return the bytes that the shard's next answer may carry."""
        if self._without[shard]:
            self._without[shard] -= 1
            return 0
        return int(self._budgets[shard])

    def count_used(self, owners: Owners) -> None:
        """Count rows that were found, by shard."""
        self._used += np.bincount(owners, minlength=len(self._used))

    def add(self, shard: int, rows: CarriedRows) -> None:
        """Add the names of an answer; the budget grows if those of the answer before were used."""
        is_useful = self._used[shard] * 2 >= self._carried[shard]
        budget = self._budgets[shard] * 2 if is_useful else self._budgets[shard] // 2
        self._without[shard] = 0 if budget >= CARRIED_BYTES_MIN else ANSWERS_WITHOUT
        self._budgets[shard] = min(CARRIED_BYTES_MAX, max(CARRIED_BYTES_MIN, budget))
        self._carried[shard], self._used[shard] = len(rows.keys), 0
        if not self.halves or len(self.halves[0]) + len(rows.keys) > self._half_max:
            self.halves = [NameTable(self._width, self._half_max), *self.halves[:1]]
        self.halves[0].put_first_many(*rows)


class HeldNames:
    """Names of all shards by table. Shared by threads."""

    def __init__(self, shards: int) -> None:
        self._lock = threading.Lock()
        self._grants = [b""] * shards
        self._ends = np.zeros(shards)
        """When the grant of each shard ends."""
        self._tables: dict[str, _HeldTable] = {
            "chunks": _HeldTable("chunks", shards),
            "segments": _HeldTable("segments", shards),
        }

    def budget(self, table: Table, shard: int) -> int:
        """Return the bytes of names that the next answer of a shard may carry."""
        with self._lock:
            return self._tables[table].budget(shard) if table in self._tables else 0

    def is_empty(self, table: Table) -> bool:
        """Return whether no name of a table is held."""
        return table not in self._tables or not self._tables[table].halves

    def find(self, table: Table, keys: U8, owners: Owners) -> tuple[Locations, Bools]:
        """Return (locations, found) of keys, whose shards are `owners`."""
        locations, found = Locations.empty(len(keys)), np.zeros(len(keys), np.bool_)
        with self._lock:
            is_granted = self._ends > now_seconds()
            held = self._tables[table]
            halves = held.halves[:]
        rows = np.flatnonzero(is_granted[owners])
        for half in halves:
            containers, ordinals, is_there = half.get_many(np.ascontiguousarray(keys[rows]))
            at = rows[is_there]
            locations.containers[at], locations.ordinals[at] = containers[is_there], ordinals[is_there]
            found[at] = True
            rows = rows[~is_there]
        counters.CACHE_LOOKUPS.add(int(found.sum()), "shards", "yes")
        counters.CACHE_LOOKUPS.add(int((~found).sum()), "shards", "no")
        with self._lock:
            held.count_used(owners[found])
        return locations, found

    def note(self, shard: int, table: Table, carried: Carried, requested_at: float) -> None:
        """Hold the names of an answer, whose request was sent after `requested_at`.

        Raises: BadInput.
        """
        ends = requested_at + HELD_SECONDS
        rows = carried.rows(table) if carried.ordinals or carried.keys else None
        if rows is not None and (owners_of_keys(table, rows.keys, len(self._grants)) != shard).any():
            raise BadInput(f"carried: names of other shards than {shard} of {len(self._grants)}")
        with self._lock:
            if carried.grant == self._grants[shard]:
                self._ends[shard] = max(self._ends[shard], ends)
            else:
                for held in self._tables.values() if self._grants[shard] else ():
                    held.clear()
                self._grants[shard], self._ends[shard] = carried.grant, ends
            if rows is not None:
                self._tables[table].add(shard, rows)
