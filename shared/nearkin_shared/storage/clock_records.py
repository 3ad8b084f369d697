"""Records of the times at which GC runs found the clock plausible.

Invariant: the record of the highest sequence is valid.

    heads/clock/0000000000000007.json   {"version": 1, "at_us": ..., "mac": ...}

Like all heads they can be lost without losing data: the next GC run then starts from the stored objects.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords

FOLDER = "heads/clock"
VERSION = 1
FRESH_SECONDS = 300.0
"""Time for which a process reuses a record that it has read."""
_log = logging.getLogger("nearkin")


@runtime_checkable
class SupportsServerTime(Protocol):
    """Object store that dates objects."""

    @property
    def has_server_clock(self) -> bool:
        """Return whether it dates them by a clock other than this machine's."""

    def modified_seconds(self, name: str) -> float:
        """Return when an object was written, seconds since 1970.

        Raises: NotFound, StoreUnavailable.
        """


class ClockRecords:
    """Clock records of one store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "json", "a clock record")

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record, by sequence.

        Raises: Corrupt, for an invalid name.
        """
        return self._records.list_records()

    def read(self) -> int | None:
        """Return the last recorded time, microseconds since 1970.

        None without a record that verifies.
        """
        found = self._records.holding(self.at, _ignore)
        return None if found is None else found[1]

    def stamp(self) -> bytes:
        """Return a value that differs after any change of the record, also to an earlier one.

        Raises: Corrupt, StoreUnavailable.
        """
        return self._records.stamp()

    def at(self, sequence: int) -> int | None:
        """Return the time of one record. Raises NotFound, Corrupt, StoreUnavailable."""
        name = self.name(sequence)
        try:
            fields = json.loads(self._records.get(sequence))
            if (key := self._records.key) is not None:
                check_json_mac(fields, key, name)
            at_us = int(fields["at_us"])
            if fields["version"] != VERSION or not 0 <= at_us <= CREATED_US_MAX:
                raise ValueError(f"version {fields['version']}, time {at_us}")  # noqa: TRY301 - one place names it
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise Corrupt(f"{name}: {err}") from err
        return at_us

    def write(self, at_us: int) -> str | None:
        """Replace the record; return its name, or None if another run wrote one.

        Raises: StoreUnavailable.
        """
        listed = sorted(self.list_records())
        sequence = self._records.following(listed)
        fields: dict[str, object] = {"version": VERSION, "at_us": at_us}
        if (key := self._records.key) is not None:
            fields["mac"] = mac_of_json(fields, key)
        try:
            self._records.add(sequence, json.dumps(fields).encode())
        except AlreadyExists:
            return None
        self._records.remove(listed)
        return self.name(sequence)

    @property
    def _server(self) -> SupportsServerTime | None:
        """Return the object store below all wrappers, or None without a server clock."""
        lowest = self._records.objects
        while (below := getattr(lowest, "inner", None)) is not None:
            lowest = below
        return lowest if isinstance(lowest, SupportsServerTime) and lowest.has_server_clock else None

    @property
    def has_server_clock(self) -> bool:
        """Return whether the object store dates objects by its own clock."""
        return self._server is not None

    def server_seconds(self, name: str) -> float | None:
        """Return when the object store's server wrote a record, or None without a clock."""
        server = self._server
        try:
            return None if server is None else server.modified_seconds(name)
        except NotFound:  # another run replaced it
            return None


class RecordedTime:
    """Last time recorded by a GC run, for processes whose clock may be behind.

    Safe between threads.
    """

    def __init__(self, objects: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = ClockRecords(objects)
        self._clock = clock
        self._lock = threading.Lock()
        self._read: tuple[float, int] | None = None

    def latest_us(self, now_us: int) -> int:
        """Return `now_us`, or the recorded time if that is later.

        Reads the record at most every FRESH_SECONDS. A record that does not verify is ignored.

        Raises: StoreUnavailable.
        """
        with self._lock:
            if self._read is None or self._clock() - self._read[0] > FRESH_SECONDS:
                try:
                    recorded_us = self._records.read() or 0
                except Corrupt as err:  # a file with another name
                    _log.warning("the time of the last GC run is unknown: %s", err)
                    recorded_us = 0
                self._read = self._clock(), recorded_us
            return max(now_us, self._read[1])


def _ignore(err: Corrupt) -> int | None:
    _log.warning("gc: invalid clock record ignored: %s", err)
    return None
