"""Quarantine: what is known to be broken. Invariant: no index finds it, and nothing stored later leans on it, until it
was read again and is sound.

quarantine/0000000000000007.nkq     as gc/*.nkg: the highest sequence holds; whole before a lower one goes
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.pending_delete_record import (
    QUARANTINED,
    PendingDelete,
    Record,
    decode_record,
    encode_record,
)
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords
from nearkin_shared.types import U32
from nearkin_shared.utils.failpoints import failpoint

FOLDER = "quarantine"
_NONE: U32 = np.zeros(0, np.uint32)
_log = logging.getLogger("nearkin")


class Quarantine:
    """The record of one store. Who writes it holds the store's lock or lease."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float]) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkq", "what is quarantined")
        self._clock = clock

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def read(self) -> dict[int, PendingDelete]:
        """Return by container what is quarantined. A record that is broken counts as none: `verify` makes it anew.

        Raises FormatTooNew, StoreUnavailable, Corrupt for a stray name in its folder.
        """
        return self._held()[1]

    def at(self, sequence: int) -> dict[int, PendingDelete]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        name = self.name(sequence)
        found, record = decode_record(self._records.get(sequence), name, QUARANTINED, self._records.key)
        if found != sequence:
            raise Corrupt(f"{name}: is record {found}")
        return record

    def note(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32], *, everything: bool) -> None:
        """Record what is broken: by container, ordinals of chunks (None: all) and of segments.

        `everything`: all that is broken, so whatever else was quarantined is sound again; else it is added. Raises
        AlreadyExists where another writer was first.
        """
        sequence, before = self._held()
        now_us = int(self._clock() * 1e6)
        record: dict[int, PendingDelete] = {} if everything else dict(before)
        for container in {**chunks, **segments}:
            broken, recipes = chunks.get(container, _NONE), segments.get(container, _NONE)
            entry = PendingDelete(now_us, _NONE if broken is None else broken, recipes, broken is None)
            earlier = before.get(container)
            if earlier is not None:
                entry = replace(entry, at_us=earlier.at_us)
                if not everything:
                    both = np.union1d(earlier.chunks, entry.chunks), np.union1d(earlier.segments, entry.segments)
                    entry = PendingDelete(earlier.at_us, *both, earlier.whole or entry.whole)
            record[container] = entry
        self._replace(sequence, before, record)

    def release(self, looked_at: Mapping[int, PendingDelete | None]) -> None:
        """Take containers out that are sound again (None), or say what of them is still broken."""
        sequence, before = self._held()
        record = dict(before)
        for container, entry in looked_at.items():
            if entry is None:
                record.pop(container, None)
            else:
                record[container] = replace(entry, at_us=before.get(container, entry).at_us)
        self._replace(sequence, before, record)

    def _held(self) -> tuple[int, dict[int, PendingDelete]]:
        return self._records.holding(self.at, _empty_record) or (0, {})

    def _replace(self, sequence: int, before: Record, record: Record) -> None:
        """Make `record` the next one after `sequence`, which `before` is of: what another writer adds meanwhile stays.

        Raises AlreadyExists where one did.
        """
        listed = [lower for lower in sorted(self.list_records()) if lower <= sequence]
        if _same(before, record) and len(listed) == bool(record):
            return
        if record:
            following = self._records.following([sequence])
            self._records.add(following, encode_record(following, record, QUARANTINED, self._records.key))
            failpoint("quarantine.recorded")
        self._records.remove(listed)
        failpoint("quarantine.done")


def _empty_record(err: Corrupt) -> dict[int, PendingDelete]:
    _log.warning("%s: run `nearkin verify`", err)
    return {}


def _same(one: Record, other: Record) -> bool:
    return one.keys() == other.keys() and all(
        (entry.at_us, entry.whole) == (other[container].at_us, other[container].whole)
        and np.array_equal(entry.chunks, other[container].chunks)
        and np.array_equal(entry.segments, other[container].segments)
        for container, entry in one.items()
    )


def join_records(one: Record, other: Record) -> Record:
    """Return what is in one record or the other, as an index that is made anew leaves it out."""
    found = dict(one)
    for container, entry in other.items():
        mine = found.get(container)
        if mine is not None:
            chunks, segments = np.union1d(mine.chunks, entry.chunks), np.union1d(mine.segments, entry.segments)
            entry = PendingDelete(mine.at_us, chunks, segments, mine.whole or entry.whole)  # noqa: PLW2901
        found[container] = entry
    return found
