"""Quarantine: what is known to be broken. Invariant: no index finds it, and nothing stored later leans on it, until it
was read again and is sound.

quarantine/0000000000000007.nkq     as gc/*.nkg: the highest sequence holds; whole before a lower one goes
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from nearkin.errors import Corrupt, NotFound
from nearkin.formats.condemned import QUARANTINED, Condemned, Record, decode_record, encode_record
from nearkin.records import U32
from nearkin.store.objects import ObjectStore

FOLDER = "quarantine"
_NAME = re.compile(r"quarantine/([0-9a-f]{16})\.nkq")
_NONE: U32 = np.zeros(0, np.uint32)
_log = logging.getLogger("nearkin")


def record_name(sequence: int) -> str:
    """Return the object name of a record."""
    return f"{FOLDER}/{sequence:016x}.nkq"


class Quarantine:
    """The record of one store. Who writes it holds the store's lock or lease."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float]) -> None:
        self._objects = objects
        self._clock = clock

    def listed(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        found = {}
        for name, size_bytes in self._objects.names(FOLDER):
            matched = _NAME.fullmatch(name)
            if matched is None:
                raise Corrupt(f"{name}: not a name of what is quarantined; move it out of the store")
            found[int(matched[1], 16)] = size_bytes
        return found

    def read(self) -> dict[int, Condemned]:
        """Return by container what is quarantined. A record that is broken counts as none: `verify` makes it anew.

        Raises FormatTooNew, StoreUnavailable.
        """
        sequence = max(self.listed(), default=None)
        if sequence is None:
            return {}
        try:
            return self.at(sequence)
        except (Corrupt, NotFound) as err:
            _log.warning("%s: run `nearkin verify`", err)
            return {}

    def at(self, sequence: int) -> dict[int, Condemned]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        name = record_name(sequence)
        found, record = decode_record(self._objects.get(name), name, QUARANTINED)
        if found != sequence:
            raise Corrupt(f"{name}: is record {found}")
        return record

    def note(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32], *, everything: bool) -> None:
        """Record what is broken: by container, ordinals of chunks (None: all) and of segments.

        `everything`: all that is broken, so whatever else was quarantined is sound again; else it is added.
        """
        before, now_us = self.read(), int(self._clock() * 1e6)
        record: dict[int, Condemned] = {} if everything else dict(before)
        for container in {**chunks, **segments}:
            broken, recipes = chunks.get(container, _NONE), segments.get(container, _NONE)
            entry = Condemned(now_us, _NONE if broken is None else broken, recipes, broken is None)
            earlier = before.get(container)
            if earlier is not None:
                entry = replace(entry, at_us=earlier.at_us)
                if not everything:
                    both = np.union1d(earlier.chunks, entry.chunks), np.union1d(earlier.segments, entry.segments)
                    entry = Condemned(earlier.at_us, *both, earlier.whole or entry.whole)
            record[container] = entry
        self._replace(before, record)

    def release(self, looked_at: Mapping[int, Condemned | None]) -> None:
        """Take containers out that are sound again (None), or say what of them is still broken."""
        before = self.read()
        record = dict(before)
        for container, entry in looked_at.items():
            if entry is None:
                record.pop(container, None)
            else:
                record[container] = replace(entry, at_us=before.get(container, entry).at_us)
        self._replace(before, record)

    def _replace(self, before: Record, record: Record) -> None:
        listed = sorted(self.listed())
        if _same(before, record) and len(listed) == bool(record):
            return
        if record:
            sequence = max(listed, default=0) + 1
            self._objects.put_new(record_name(sequence), encode_record(sequence, record, QUARANTINED))
        for sequence in listed:  # ascending: whoever dies in between leaves the one that holds
            self._objects.delete(record_name(sequence))


def _same(one: Record, other: Record) -> bool:
    return one.keys() == other.keys() and all(
        (entry.at_us, entry.whole) == (other[container].at_us, other[container].whole)
        and np.array_equal(entry.chunks, other[container].chunks)
        and np.array_equal(entry.segments, other[container].segments)
        for container, entry in one.items()
    )


def joined(one: Record, other: Record) -> Record:
    """Return what is in one record or the other, as an index that is made anew leaves it out."""
    found = dict(one)
    for container, entry in other.items():
        mine = found.get(container)
        if mine is not None:
            chunks, segments = np.union1d(mine.chunks, entry.chunks), np.union1d(mine.segments, entry.segments)
            entry = Condemned(mine.at_us, chunks, segments, mine.whole or entry.whole)  # noqa: PLW2901
        found[container] = entry
    return found
