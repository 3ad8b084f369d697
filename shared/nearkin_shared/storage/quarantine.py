"""Quarantine: record of known damage.

Invariant: no index returns quarantined data, and nothing stored later depends on them, until a later read finds them
intact.

    quarantine/0000000000000007.nkq     like gc/*.nkg: the highest sequence is valid, and complete before a lower one is
                                        deleted
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
from nearkin_shared.types import U32, Locations, group_by_container
from nearkin_shared.utils.failpoints import failpoint

FOLDER = "quarantine"
_NONE: U32 = np.zeros(0, np.uint32)
_log = logging.getLogger("nearkin")


class Quarantine:
    """Quarantine of one store. A writer holds the store's lock or lease."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float]) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkq", "quarantined data")
        self._clock = clock

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record by sequence. Raises Corrupt for an invalid name."""
        return self._records.list_records()

    def read(self) -> dict[int, PendingDelete]:
        """Return the quarantined data by container.

        A damaged record counts as empty: `verify` writes it again.

        Raises: FormatTooNew, StoreUnavailable. Corrupt, for an invalid name in its folder.
        """
        return self._read_newest()[1]

    def at(self, sequence: int) -> dict[int, PendingDelete]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        name = self.name(sequence)
        found, record = decode_record(self._records.get(sequence), name, QUARANTINED, self._records.key)
        if found != sequence:
            raise Corrupt(f"{name}: is record {found}")
        return record

    def note(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32], *, everything: bool) -> None:
        """Record damage by container: ordinals of chunks (None: all) and of segments.

        With `everything` it is all damage, so other quarantined data are intact again; else it is added.

        Raises: AlreadyExists, if another writer was first.
        """
        sequence, before = self._read_newest()
        now_us = int(self._clock() * 1e6)
        record: dict[int, PendingDelete] = {} if everything else dict(before)
        for container in {**chunks, **segments}:
            broken, recipes = chunks.get(container, _NONE), segments.get(container, _NONE)
            entry = PendingDelete(now_us, _NONE if broken is None else broken, recipes, broken is None)
            earlier = before.get(container)
            if earlier is not None:
                entry = replace(entry, at_us=earlier.at_us)
                if not everything:
                    united = np.union1d(earlier.chunks, entry.chunks), np.union1d(earlier.segments, entry.segments)
                    entry = PendingDelete(earlier.at_us, *united, earlier.whole or entry.whole)
            record[container] = entry
        self._replace(sequence, before, record)

    def release(self, checked: Mapping[int, PendingDelete | None]) -> None:
        """Remove containers that are intact again (None), or replace their remaining damage."""
        sequence, before = self._read_newest()
        record = dict(before)
        for container, entry in checked.items():
            if entry is None:
                record.pop(container, None)
            else:
                record[container] = replace(entry, at_us=before.get(container, entry).at_us)
        self._replace(sequence, before, record)

    def _read_newest(self) -> tuple[int, dict[int, PendingDelete]]:
        return self._records.holding(self.at, _empty_record) or (0, {})

    def _replace(self, sequence: int, before: Record, record: Record) -> None:
        """Write `record` after `sequence`, the number of `before`.

        A record that another writer adds meanwhile stays.

        Raises: AlreadyExists, if another writer added one.
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
    _log.warning("%s: damaged quarantine record ignored; run `nearkin verify`", err)
    return {}


def _same(first: Record, second: Record) -> bool:
    return first.keys() == second.keys() and all(
        (entry.at_us, entry.whole) == (second[container].at_us, second[container].whole)
        and np.array_equal(entry.chunks, second[container].chunks)
        and np.array_equal(entry.segments, second[container].segments)
        for container, entry in first.items()
    )


def quarantined_segments(record: Record, segments: Locations) -> int:
    """Return how many of the segments have quarantined chunks."""
    count = 0
    for container, rows in group_by_container(segments.containers) if record else ():
        entry = record.get(container)
        if entry is not None:
            count += len(rows) if entry.whole else int(np.isin(segments.ordinals[rows], entry.segments).sum())
    return count


def join_records(first: Record, second: Record) -> Record:
    """Return the union of two records, which an index rebuild leaves out."""
    found = dict(first)
    for container, entry in second.items():
        own = found.get(container)
        if own is not None:
            chunks, segments = np.union1d(own.chunks, entry.chunks), np.union1d(own.segments, entry.segments)
            entry = PendingDelete(own.at_us, chunks, segments, own.whole or entry.whole)  # noqa: PLW2901
        found[container] = entry
    return found
