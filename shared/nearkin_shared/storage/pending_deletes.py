"""Records of what is condemned. Invariant: the one of the highest sequence holds; it is whole before a lower one goes.

gc/0000000000000007.nkg     what was unreached when round 7 looked

Once there was one there always is: an empty one keeps the numbers, so that none comes back. A maintenance worker
that slept on its way to write number 1 would else find it free once all was collected, and what it condemned then
would hold again.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.pending_delete_record import PendingDelete, Record, decode_record, encode_record
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords
from nearkin_shared.utils.failpoints import failpoint

FOLDER = "gc"
GENERATION_SECONDS = 5.0
"""A GC generation may be this old when an index is asked: what a newer one withdrew is freed a grace later."""
_log = logging.getLogger("nearkin")


class PendingDeleteStore:
    """The record of one store. One maintenance worker at a time writes it."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkg", "what is condemned")

    @property
    def objects(self) -> ObjectStore:
        """Return where they lie."""
        return self._records.objects

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def read(self) -> dict[int, PendingDelete]:
        """Return what is condemned. A record that is broken counts as none: its round begins anew.

        Raises FormatTooNew, StoreUnavailable.
        """
        held = self._records.holding(self.at, _empty_record)
        return {} if held is None else held[1]

    def is_consistent(self) -> bool:
        """Return whether one record is there, and whole, or there never was any: no crash, no damage.

        Raises FormatTooNew, StoreUnavailable.
        """
        listed = self.list_records()
        if len(listed) != 1:
            return not listed
        try:
            self.at(*listed)
        except (Corrupt, NotFound):
            return False
        return True

    def at(self, sequence: int) -> dict[int, PendingDelete]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        name = self.name(sequence)
        found, record = decode_record(self._records.get(sequence), name, key=self._records.key)
        if found != sequence:
            raise Corrupt(f"{name}: is record {found}")
        return record

    def replace(self, record: Record, sequence_min: int = 1) -> None:
        """Make `record` the one that holds, before the ones until now go; the first one is not empty.

        `sequence_min`: the GC generation that the index has begun. Raises AlreadyExists: another maintenance was
        first, and its record holds.
        """
        before = sorted(self.list_records())
        if record or before:
            sequence = max(self._records.following(before), sequence_min)
            self._records.add(sequence, encode_record(sequence, record, key=self._records.key))
        failpoint("gc.recorded")
        self._records.remove(before)
        failpoint("gc.done")


class GcGeneration:
    """The sequence of the newest record, as an index of several writers is asked by it; shared by threads.

    Invariant: an entry that a GC run withdrew is answered by no partition of this generation, so that an index restored
    from an older dump is noticed before what it names is freed.
    """

    def __init__(self, objects: ObjectStore, refresh_seconds: float = GENERATION_SECONDS) -> None:
        self._condemned = PendingDeleteStore(objects)
        self._refresh_seconds = refresh_seconds
        self._lock = threading.Lock()
        self._generation, self._read_at = 0, -math.inf

    def __call__(self) -> int:
        """Return it, at most `refresh_seconds` old. Raises Corrupt, StoreUnavailable."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_at > self._refresh_seconds:
                self._generation = max(self._condemned.list_records(), default=self._generation)
                self._read_at = now
            return self._generation


def _empty_record(err: Corrupt) -> dict[int, PendingDelete]:
    _log.warning("%s: what it condemned is condemned anew", err)
    return {}


def record_bytes(record: Record) -> int:
    """Return what `replace` writes, unless it is empty and the first."""
    return len(encode_record(1, record))


EMPTY_BYTES = record_bytes({})
