"""Whether garbage collection is paused. Invariant: it is while a record lies there; doubt pauses it.

pause/0000000000000001.json     who paused it, and when; to resume removes all
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
    """Since when, microseconds since 1970, and by whom; 0 and "" where the record cannot be read."""

    at_us: int
    who: str


class GcPauseFlag:
    """The pause of one store: it lies beside what it guards, so every maintenance, gateway and command sees it."""

    def __init__(
        self, objects: ObjectStore, clock: Callable[[], float] = time.time, reserve: SpaceReserve | None = None
    ) -> None:
        """`reserve`: disk space that a pause may use once the disk is full."""
        self._reserve = reserve
        self._records = VersionedRecords(objects, FOLDER, "json", "a pause")
        self._clock = clock

    def read(self) -> Pause | None:
        """Return the pause, None where collection runs. Raises StoreUnavailable."""
        held = self._records.holding(self.at, lambda _: Pause(0, ""))
        return None if held is None else held[1]

    def check(self) -> None:
        """Raise GcPaused where collection is paused; StoreUnavailable."""
        found = self.read()
        if found is not None:
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.at_us / 1e6))
            raise GcPaused(
                f"garbage collection is paused since {since} by {found.who or 'an unreadable record'}: what was done "
                "before stays so; `nearkin gc --resume` lets it go on"
            )

    def pause(self, who: str) -> Pause:
        """Pause collection, before the next step of a round that is at work; return the pause, an older one if one is.

        Raises StoreUnavailable.
        """
        before = self.read()
        if before is not None:
            return before
        made = Pause(int(self._clock() * 1e6), who[:WHO_CHARACTERS_MAX])
        fields: dict[str, object] = {"version": VERSION, "at_us": made.at_us, "who": made.who}
        if (key := self._records.key) is not None:
            fields["mac"] = mac_of_json(fields, key)
        said = json.dumps(fields).encode()
        try:
            if self._reserve is None:
                self._records.add(1, said)
            else:
                self._reserve.run(lambda: self._records.add(1, said))
        except AlreadyExists:  # by somebody else, at the same moment
            return self.read() or made
        failpoint("pause.recorded")
        return made

    def resume(self) -> bool:
        """Let collection go on; return whether it was paused. Raises StoreUnavailable."""
        there = sorted(self.list_records())
        self._records.remove(there)
        failpoint("pause.removed")
        return bool(there)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def at(self, sequence: int) -> Pause:
        """Return one record. Raises NotFound, Corrupt (also where it is not authenticated), StoreUnavailable."""
        try:
            said = json.loads(self._records.get(sequence))
            if (key := self._records.key) is not None:
                check_json_mac(said, key, self.name(sequence))
            found = Pause(int(said["at_us"]), str(said["who"]))
            moment_of(found.at_us)  # who tells of it says when in words
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
            raise Corrupt(f"{self._records.name(sequence)}: {err}") from err
        return found
