"""Progress of the scrub.

Invariant: a restarted scrub continues at the last record; its loss costs a repeated pass only.

    scrub/0000000000000007.json     the highest sequence is valid
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields

from blake3 import blake3

from nearkin_shared.errors import Corrupt, FormatTooNew
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

FOLDER = "scrub"
VERSION = 2
"""2 has a MAC; 1, encrypted or from an older release, has none."""
BYTES_MAX = 64 * 1024
_log = logging.getLogger("nearkin")


@frozen
class ScrubState:
    """Progress of a pass, and result of the last complete one.

    Times are microseconds since 1970, 0 for never.
    """

    begun_us: int = 0
    """Start of the current or last pass."""
    containers_below: int = 0
    """Containers with ids below this were read in it."""
    names_from: str = ""
    """Manifests and marks before this name were read; "" while containers are read."""
    read_bytes: int = 0
    read_objects: int = 0
    damaged_objects: int = 0
    ended_us: int = 0
    """End of the last complete pass, whose result follows; 0 before the first."""
    ended_bytes: int = 0
    ended_objects: int = 0
    ended_damaged: int = 0

    @property
    def running(self) -> bool:
        """Return whether a pass has begun and not ended."""
        return self.begun_us > self.ended_us


class ScrubStates:
    """Progress records of one store. The last of several writers wins."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "json", "a scrub's state")

    def read(self) -> ScrubState:
        """Return the state; a damaged record is ignored.

        Raises: FormatTooNew, StoreUnavailable.
        """
        newest = self._records.holding(self.at, _empty_state)
        return ScrubState() if newest is None else newest[1]

    def write(self, state: ScrubState) -> None:
        """Write `state` before deleting the earlier record."""
        before = sorted(self.list_records())
        try:
            self._records.add(self._records.following(before), encode_state(state, self._records.key))
        except AlreadyExists:
            return  # another writer's state is equally valid
        failpoint("scrub.recorded")
        self._records.remove(before)
        failpoint("scrub.done")

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record by sequence. Raises Corrupt for an invalid name."""
        return self._records.list_records()

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def at(self, sequence: int) -> ScrubState:
        """Return one record.

        Raises: NotFound, Corrupt (also if not authenticated), FormatTooNew.
        """
        return decode_state(self._records.get(sequence), self.name(sequence), self._records.key)


def _empty_state(err: Corrupt) -> ScrubState:
    _log.warning("%s: a new pass begins", err)
    return ScrubState()


def encode_state(state: ScrubState, key: bytes | None = None) -> bytes:
    """Encode the state as JSON with a check, and a MAC if there is a key."""
    fields_by_name: dict[str, object] = {"version": 1 if key is None else VERSION, **asdict(state)}
    if key is not None:
        fields_by_name["mac"] = mac_of_json(fields_by_name, key)
    return json.dumps({**fields_by_name, "check": _check(fields_by_name)}).encode()


def decode_state(data: bytes, what: str, key: bytes | None = None) -> ScrubState:
    """Decode the state. Raises Corrupt, FormatTooNew."""
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
        fields_by_name = json.loads(data)
        if fields_by_name.pop("check") != _check(fields_by_name):
            raise ValueError("its check fails")  # noqa: TRY301
        if fields_by_name["version"] > VERSION:
            raise FormatTooNew(f"{what}: written by a later Nearkin; this one reads up to format {VERSION}; upgrade")
        if key is not None:
            check_json_mac(fields_by_name, key, what)
        fields_by_name.pop("mac", None)
        fields_by_name.pop("version")
        if fields_by_name.keys() != {field.name for field in fields(ScrubState)}:
            raise ValueError("fields are missing")  # noqa: TRY301
        return ScrubState(**fields_by_name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}") from err


def _check(fields_by_name: dict[str, object]) -> str:
    return blake3(json.dumps(fields_by_name, sort_keys=True).encode()).hexdigest(length=8)
