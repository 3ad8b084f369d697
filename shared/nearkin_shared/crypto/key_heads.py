"""Highest key numbers. Invariant: an owner's newest key seals nothing while a later one is known to have been made.

heads/keys/0000000000000007.nkh     JSON with a MAC under the store's first data key; the highest sequence holds
"""

from __future__ import annotations

import json
from collections.abc import Callable

from nearkin_shared.errors import Corrupt, RetryableError
from nearkin_shared.formats.encrypted_object import OWNER_BYTES
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords

FOLDER = "heads/keys"
VERSION = 1
BYTES_MAX = 16 << 20
"""Some 300,000 owners."""
RACES_MAX = 100


class KeyHeads:
    """The highest number that each owner of keys was given. Safe between processes."""

    def __init__(self, objects: ObjectStore, mac_key: Callable[[], bytes]) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkh", "highest key numbers")
        self._mac_key = mac_key

    def read(self) -> dict[bytes, int]:
        """Return the highest number by owner; none before a key was made by this release. Raises Corrupt."""
        held = self._records.holding(self.at, _broken_error)
        return {} if held is None else held[1]

    def at(self, sequence: int) -> dict[bytes, int]:
        """Return one record. Raises NotFound, Corrupt, StoreUnavailable."""
        name, data = self._records.name(sequence), self._records.get(sequence)
        try:
            if len(data) > BYTES_MAX:
                raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
            said = json.loads(data)
            check_json_mac(said, self._mac_key(), name)
            if said["version"] != VERSION or said["sequence"] != sequence:
                raise ValueError(f"version {said['version']}, sequence {said['sequence']}")  # noqa: TRY301
            found = {bytes.fromhex(owner): int(number) for owner, number in said["heads"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise Corrupt(f"{name}: {err}") from err
        if any(len(owner) != OWNER_BYTES for owner in found):
            raise Corrupt(f"{name}: an owner of another length")
        return found

    def note(self, owner: bytes, number: int) -> None:
        """Record that an owner was given a key number. Raises Corrupt, RetryableError, StoreUnavailable."""
        for _ in range(RACES_MAX):
            heads, listed = self.read(), sorted(self._records.list_records())
            if heads.get(owner, 0) >= number:
                return
            sequence = self._records.following(listed)
            said: dict[str, object] = {
                "version": VERSION,
                "sequence": sequence,
                "heads": {one.hex(): highest for one, highest in sorted({**heads, owner: number}.items())},
            }
            try:
                self._records.add(sequence, json.dumps({**said, "mac": mac_of_json(said, self._mac_key())}).encode())
            except AlreadyExists:
                continue
            self._records.remove(listed)
            return
        raise RetryableError(f"{FOLDER}: changed {RACES_MAX} times while it was written; try again")


def _broken_error(err: Corrupt) -> dict[bytes, int]:
    raise err
