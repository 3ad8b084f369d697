"""Times at which GC runs found the clock plausible. Invariant: of two records the one of the highest sequence holds.

    heads/clock/0000000000000007.json     {"version": 1, "at_us": ..., "mac": ...}

Like all heads they can be lost without losing data: then the next GC run begins again with what the store holds.
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
"""As long a process uses a record that it has read."""
_log = logging.getLogger("nearkin")


@runtime_checkable
class SupportsServerTime(Protocol):
    """An object store that dates objects."""

    @property
    def has_server_clock(self) -> bool:
        """Return whether it does so by another clock than this machine's."""

    def modified_seconds(self, name: str) -> float:
        """Return when an object was written, seconds since 1970. Raises NotFound, StoreUnavailable."""


class ClockRecords:
    """The clock records of one store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "json", "a clock record")

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record, by sequence. Raises Corrupt for a name that is no record's."""
        return self._records.list_records()

    def read(self) -> int | None:
        """Return the last time recorded, microseconds since 1970; None without a record that verifies."""
        held = self._records.holding(self.at, _ignore)
        return None if held is None else held[1]

    def at(self, sequence: int) -> int | None:
        """Return the time of one record. Raises NotFound, Corrupt, StoreUnavailable."""
        name = self.name(sequence)
        try:
            said = json.loads(self._records.get(sequence))
            if (key := self._records.key) is not None:
                check_json_mac(said, key, name)
            at_us = int(said["at_us"])
            if said["version"] != VERSION or not 0 <= at_us <= CREATED_US_MAX:
                raise ValueError(f"version {said['version']}, time {at_us}")  # noqa: TRY301 - one place names it
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise Corrupt(f"{name}: {err}") from err
        return at_us

    def write(self, at_us: int) -> str | None:
        """Replace the record; return its name, None if another run wrote one. Raises StoreUnavailable."""
        listed = sorted(self.list_records())
        sequence = self._records.following(listed)
        said: dict[str, object] = {"version": VERSION, "at_us": at_us}
        if (key := self._records.key) is not None:
            said["mac"] = mac_of_json(said, key)
        try:
            self._records.add(sequence, json.dumps(said).encode())
        except AlreadyExists:
            return None
        self._records.remove(listed)
        return self.name(sequence)

    @property
    def _server(self) -> SupportsServerTime | None:
        """Return the object store below all wrappers, None if its server has no clock of its own."""
        lowest = self._records.objects
        while (below := getattr(lowest, "inner", None)) is not None:
            lowest = below
        return lowest if isinstance(lowest, SupportsServerTime) and lowest.has_server_clock else None

    @property
    def has_server_clock(self) -> bool:
        """Return whether the object store dates what it stores by another clock than this machine's."""
        return self._server is not None

    def server_seconds(self, name: str) -> float | None:
        """Return when the object store's server wrote a record by its own clock; None if it has none."""
        server = self._server
        try:
            return None if server is None else server.modified_seconds(name)
        except NotFound:  # another run replaced it
            return None


class RecordedTime:
    """The last time that a GC run recorded, for processes whose clock may be behind. Safe between threads."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = ClockRecords(objects)
        self._clock = clock
        self._lock = threading.Lock()
        self._read: tuple[float, int] | None = None

    def latest_us(self, now_us: int) -> int:
        """Return `now_us`, or the time recorded if that is later. Reads the record every FRESH_SECONDS at most.

        A record that does not verify counts as none. Raises StoreUnavailable.
        """
        with self._lock:
            if self._read is None or self._clock() - self._read[0] > FRESH_SECONDS:
                try:
                    recorded_us = self._records.read() or 0
                except Corrupt as err:  # a file with another name
                    _log.warning("the time of the last GC run is not known: %s", err)
                    recorded_us = 0
                self._read = self._clock(), recorded_us
            return max(now_us, self._read[1])


def _ignore(err: Corrupt) -> int | None:
    _log.warning("gc: %s: does not count", err)
    return None
