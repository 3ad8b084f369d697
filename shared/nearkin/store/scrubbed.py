"""How far scrubbing has come. Invariant: a restart goes on where the last word was; to lose it repeats a pass, no more.

scrub/0000000000000007.json     the highest sequence holds
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, fields

from blake3 import blake3

from nearkin.errors import Corrupt, FormatTooNew
from nearkin.frozen import frozen
from nearkin.store.numbered import NumberedRecords
from nearkin.store.objects import AlreadyExists, ObjectStore

FOLDER = "scrub"
VERSION = 1
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
        self._records = NumberedRecords(objects, FOLDER, "json", "a scrub's state")

    def read(self) -> ScrubState:
        """Return the state; one that is broken counts as none. Raises FormatTooNew, StoreUnavailable."""
        held = self._records.holding(self._at, _nothing)
        return ScrubState() if held is None else held[1]

    def write(self, state: ScrubState) -> None:
        """Make `state` the one that holds, before the one until now goes."""
        before = sorted(self.listed())
        try:
            self._records.add(max(before, default=0) + 1, encode_state(state))
        except AlreadyExists:
            return  # another one's word: as good as this one
        self._records.remove(before)

    def listed(self) -> dict[int, int]:
        """Return the bytes of each state that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.listed()

    def _at(self, sequence: int) -> ScrubState:
        return decode_state(self._records.get(sequence), self._records.name(sequence))


def _nothing(err: Corrupt) -> ScrubState:
    _log.warning("%s: a new pass begins", err)
    return ScrubState()


def encode_state(state: ScrubState) -> bytes:
    """Return the state as JSON with a check over all of it."""
    said = {"version": VERSION, **asdict(state)}
    return json.dumps({**said, "check": _check(said)}).encode()


def decode_state(data: bytes, what: str) -> ScrubState:
    """Return the state. Raises Corrupt, FormatTooNew."""
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
        said = json.loads(data)
        if said.pop("check") != _check(said):
            raise ValueError("its check does not agree")  # noqa: TRY301
        if said.pop("version") > VERSION:
            raise FormatTooNew(f"{what}: written by a later Nearkin; this one reads format {VERSION}: upgrade")
        if said.keys() != {field.name for field in fields(ScrubState)}:
            raise ValueError("fields are missing")  # noqa: TRY301
        return ScrubState(**said)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{what}: {err}") from err


def _check(said: dict[str, object]) -> str:
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest(length=8)
