"""Pause of garbage collection.

Invariant: GC is paused while a record exists; an unreadable record pauses it too.

    pause/0000000000000001.json     time and initiator of the pause; resuming removes all records
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from nearkin_shared.errors import Corrupt, GcPaused
from nearkin_shared.formats.manifest import moment_of
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.storage.disk_reserve import SpaceReserve
from nearkin_shared.storage.versioned_record import VersionedRecords
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

FOLDER = "pause"
VERSION = 1
WHO_CHARACTERS_MAX = 256


@frozen
class Pause:
    """Time (microseconds since 1970) and initiator of a pause; 0 and "" if unreadable."""

    at_us: int
    who: str


class GcPauseFlag:
    """Pause of one store, stored as an object: every worker, gateway and command sees it."""

    def __init__(
        self, objects: ObjectStore, clock: Callable[[], float] = time.time, reserve: SpaceReserve | None = None
    ) -> None:
        """Create the flag; `reserve` is disk space for use once the disk is full."""
        self._reserve = reserve
        self._records = VersionedRecords(objects, FOLDER, "json", "a pause")
        self._clock = clock

    def read(self) -> Pause | None:
        """Return the pause, or None. Raises StoreUnavailable."""
        found = self._records.holding(self.at, lambda _: Pause(0, ""))
        return None if found is None else found[1]

    def check(self) -> None:
        """Raise GcPaused if GC is paused. Raises StoreUnavailable."""
        found = self.read()
        if found is not None:
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.at_us / 1e6))
            raise GcPaused(
                f"garbage collection is paused since {since} by {found.who or 'an unreadable record'}; "
                "changes made before remain; `nearkin gc --resume` continues it"
            )

    def pause(self, who: str) -> Pause:
        """Pause GC before the next step of a GC run; return the pause, or the one in effect.

        Raises: StoreUnavailable.
        """
        before = self.read()
        if before is not None:
            return before
        made = Pause(int(self._clock() * 1e6), who[:WHO_CHARACTERS_MAX])
        fields: dict[str, object] = {"version": VERSION, "at_us": made.at_us, "who": made.who}
        if (key := self._records.key) is not None:
            fields["mac"] = mac_of_json(fields, key)
        payload = json.dumps(fields).encode()
        try:
            if self._reserve is None:
                self._records.add(1, payload)
            else:
                self._reserve.run(lambda: self._records.add(1, payload))
        except AlreadyExists:  # by another process, concurrently
            return self.read() or made
        failpoint("pause.recorded")
        return made

    def resume(self) -> bool:
        """Resume GC; return whether it was paused. Raises StoreUnavailable."""
        sequences = sorted(self.list_records())
        self._records.remove(sequences)
        failpoint("pause.removed")
        return bool(sequences)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record. Raises Corrupt for an invalid name."""
        return self._records.list_records()

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def at(self, sequence: int) -> Pause:
        """Return one record.

        Raises: NotFound, Corrupt (also if not authenticated), StoreUnavailable.
        """
        try:
            payload = json.loads(self._records.get(sequence))
            if (key := self._records.key) is not None:
                check_json_mac(payload, key, self.name(sequence))
            found = Pause(int(payload["at_us"]), str(payload["who"]))
            moment_of(found.at_us)  # raises for a time that cannot be formatted
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
            raise Corrupt(f"{self._records.name(sequence)}: {err}") from err
        return found
