"""Records of what is condemned. Invariant: the one of the highest sequence holds; it is whole before a lower one goes.

gc/0000000000000007.nkg     what was unreached when round 7 looked
"""

from __future__ import annotations

import logging
import re

from nearkin.errors import Corrupt
from nearkin.failpoints import failpoint
from nearkin.formats.condemned import Condemned, Record, decode_record, encode_record
from nearkin.store.objects import ObjectStore

FOLDER = "gc"
_NAME = re.compile(r"gc/([0-9a-f]{16})\.nkg")
_log = logging.getLogger("nearkin")


def record_name(sequence: int) -> str:
    """Return the object name of a record."""
    return f"{FOLDER}/{sequence:016x}.nkg"


class CondemnedStore:
    """The record of one store. One janitor at a time writes it."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    @property
    def objects(self) -> ObjectStore:
        """Return where they lie."""
        return self._objects

    def listed(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        found = {}
        for name, size_bytes in self._objects.names(FOLDER):
            matched = _NAME.fullmatch(name)
            if matched is None:
                raise Corrupt(f"{name}: not a name of what is condemned; move it out of the store")
            found[int(matched[1], 16)] = size_bytes
        return found

    def read(self) -> dict[int, Condemned]:
        """Return what is condemned. A record that is broken counts as none: its round begins anew.

        Raises FormatTooNew, StoreUnavailable.
        """
        sequence = max(self.listed(), default=None)
        if sequence is None:
            return {}
        try:
            return self.at(sequence)
        except Corrupt as err:
            _log.warning("%s: what it condemned is condemned anew", err)
            return {}

    def at(self, sequence: int) -> dict[int, Condemned]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        name = record_name(sequence)
        found, record = decode_record(self._objects.get(name), name)
        if found != sequence:
            raise Corrupt(f"{name}: is record {found}")
        return record

    def replace(self, record: Record) -> None:
        """Make `record` the one that holds, before the ones until now go; an empty one is no object."""
        before = sorted(self.listed())
        if record:
            sequence = max(before, default=0) + 1
            self._objects.put_new(record_name(sequence), encode_record(sequence, record))
        failpoint("gc.recorded")
        for sequence in before:  # ascending: whoever dies in between leaves the one that holds
            self._objects.delete(record_name(sequence))
        failpoint("gc.done")


def record_bytes(record: Record) -> int:
    """Return what `replace` would write."""
    return len(encode_record(1, record)) if record else 0
