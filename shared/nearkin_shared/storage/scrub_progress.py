"""How far scrubbing has come. Invariant: a restart goes on where the last word was; to lose it repeats a pass, no more.

scrub/0000000000000007.json     the highest sequence holds
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
"""2 has a MAC; 1, which is sealed or from an older release, has none."""
BYTES_MAX = 64 * 1024
_log = logging.getLogger("nearkin")


@frozen
class ScrubState:
    """Where a pass stands, and what the last whole one found. Times are microseconds since 1970, 0 for never."""

    begun_us: int = 0
    """When the pass that runs, or ran last, began."""
    containers_below: int = 0
    """Containers with ids below this were read in it."""
    names_from: str = ""
    """Manifests and marks before this name were; "" while containers are read."""
    read_bytes: int = 0
    read_objects: int = 0
    damaged_objects: int = 0
    ended_us: int = 0
    """When the last whole pass ended, with what it had come to: 0 until one has."""
    ended_bytes: int = 0
    ended_objects: int = 0
    ended_damaged: int = 0

    @property
    def running(self) -> bool:
        """Return whether a pass has begun and not ended."""
        return self.begun_us > self.ended_us


class ScrubStates:
    """The state of one store. Of several writers the last word counts."""

    def __init__(self, objects: ObjectStore) -> None:
        self._records = VersionedRecords(objects, FOLDER, "json", "a scrub's state")

    def read(self) -> ScrubState:
        """Return the state; one that is broken counts as none. Raises FormatTooNew, StoreUnavailable."""
        held = self._records.holding(self.at, _empty_state)
        return ScrubState() if held is None else held[1]

    def write(self, state: ScrubState) -> None:
        """Make `state` the one that holds, before the one until now goes."""
        before = sorted(self.list_records())
        try:
            self._records.add(self._records.following(before), encode_state(state, self._records.key))
        except AlreadyExists:
            return  # another one's word: as good as this one
        failpoint("scrub.recorded")
        self._records.remove(before)
        failpoint("scrub.done")

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each state that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def at(self, sequence: int) -> ScrubState:
        """Return one record. Raises NotFound, Corrupt (also where it is not authenticated), FormatTooNew."""
        return decode_state(self._records.get(sequence), self.name(sequence), self._records.key)


def _empty_state(err: Corrupt) -> ScrubState:
    _log.warning("%s: a new pass begins", err)
    return ScrubState()


def encode_state(state: ScrubState, key: bytes | None = None) -> bytes:
    """Return the state as JSON with a check over all of it, and a MAC if there is a key."""
    said: dict[str, object] = {"version": 1 if key is None else VERSION, **asdict(state)}
    if key is not None:
        said["mac"] = mac_of_json(said, key)
    return json.dumps({**said, "check": _check(said)}).encode()


def decode_state(data: bytes, what: str, key: bytes | None = None) -> ScrubState:
    """Return the state. Raises Corrupt, FormatTooNew."""
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
        said = json.loads(data)
        if said.pop("check") != _check(said):
            raise ValueError("its check does not agree")  # noqa: TRY301
        if said["version"] > VERSION:
            raise FormatTooNew(f"{what}: written by a later Nearkin; this one reads format {VERSION}: upgrade")
        if key is not None:
            check_json_mac(said, key, what)
        said.pop("mac", None)
        said.pop("version")
        if said.keys() != {field.name for field in fields(ScrubState)}:
            raise ValueError("fields are missing")  # noqa: TRY301
        return ScrubState(**said)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}") from err


def _check(said: dict[str, object]) -> str:
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest(length=8)
