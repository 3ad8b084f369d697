"""Pending-delete records of a store.

Invariant: the record of the highest sequence is valid; it is complete before a lower one is deleted.

    gc/0000000000000007.nkg     data unreachable in GC run 7

After the first record there is always one: an empty one keeps the sequence, so that no number is reused. Otherwise a
maintenance worker that was suspended before writing number 1 could write it after all data were collected, and its
outdated record would be valid again.
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
"""Greatest age of a GC generation at a lookup: data withdrawn by a newer run are deleted a grace later."""
_log = logging.getLogger("nearkin")


class PendingDeleteStore:
    """Pending-delete record of one store. One maintenance worker at a time writes it."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkg", "pending deletes")

    @property
    def objects(self) -> ObjectStore:
        """Return the object store of the records."""
        return self._records.objects

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record by sequence. Raises Corrupt for an invalid name."""
        return self._records.list_records()

    def read(self) -> dict[int, PendingDelete]:
        """Return the pending deletes.

        A damaged record counts as empty: the next GC run marks its data again.

        Raises: FormatTooNew, StoreUnavailable.
        """
        newest = self._records.holding(self.at, _empty_record)
        return {} if newest is None else newest[1]

    def is_consistent(self) -> bool:
        """Return whether exactly one intact record exists, or none ever existed.

        Otherwise a process crashed, or a record is damaged.

        Raises: FormatTooNew, StoreUnavailable.
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
        """Write `record` before deleting the earlier ones; the first one is not empty.

        `sequence_min` is the GC generation that the index has begun.

        Raises: AlreadyExists: another maintenance worker was first, and its record is valid.
        """
        before = sorted(self.list_records())
        if record or before:
            sequence = max(self._records.following(before), sequence_min)
            self._records.add(sequence, encode_record(sequence, record, key=self._records.key))
        failpoint("gc.recorded")
        self._records.remove(before)
        failpoint("gc.done")


class GcGeneration:
    """Sequence of the newest record, required by lookups in a Redis index.

    Shared by threads.

    Invariant: a partition of this generation has no entry that a GC run withdrew, so that an index restored from an
    older dump is noticed before the data that it names are deleted.
    """

    def __init__(self, objects: ObjectStore, refresh_seconds: float = GENERATION_SECONDS) -> None:
        self._store = PendingDeleteStore(objects)
        self._refresh_seconds = refresh_seconds
        self._lock = threading.Lock()
        self._generation, self._read_at = 0, -math.inf

    def __call__(self) -> int:
        """Return the GC generation, at most `refresh_seconds` old.

        Raises: Corrupt, StoreUnavailable.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._read_at > self._refresh_seconds:
                self._generation = max(self._store.list_records(), default=self._generation)
                self._read_at = now
            return self._generation


def _empty_record(err: Corrupt) -> dict[int, PendingDelete]:
    _log.warning("%s: damaged record ignored; the next GC run marks its data for deletion again", err)
    return {}


def record_bytes(record: Record) -> int:
    """Return the size of the record that `replace` writes, unless it is empty and the first."""
    return len(encode_record(1, record))


EMPTY_BYTES = record_bytes({})
