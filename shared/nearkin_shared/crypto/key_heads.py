"""Record the highest key number of each owner.

    heads/keys/0000000000000007.nkh     JSON with a MAC under the store's first data key; the highest sequence counts

Invariant: an owner's newest key encrypts nothing if a later one is known to have been created.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import field

from nearkin_shared.errors import Corrupt, RetryableError
from nearkin_shared.formats.encrypted_object import OWNER_BYTES
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.storage.versioned_record import VersionedRecords
from nearkin_shared.utils.frozen import frozen

FOLDER = "heads/keys"
VERSION = 2
"""2 has `epochs`; a record without any is written as version 1."""
BYTES_MAX = 16 << 20
"""About 300,000 owners."""
RACES_MAX = 100


@frozen
class KeyHeadRecord:
    """The contents of one record, by owner of keys."""

    numbers: dict[bytes, int] = field(default_factory=dict)
    """Highest key number."""
    epochs: dict[bytes, int] = field(default_factory=dict)
    """Erasure epoch: when the owner was first erased or last cancelled, in microseconds since 1970.

    A time, so that an epoch that follows the loss of this record is later than all before."""


class KeyHeads:
    """The highest key number and the erasure epoch of each owner of keys.

    Safe between processes.
    """

    def __init__(self, objects: ObjectStore, mac_key: Callable[[], bytes]) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkh", "highest key numbers")
        self._mac_key = mac_key

    def read(self) -> KeyHeadRecord:
        """Return the newest record; an empty one before a key was created.

        Raises Corrupt, StoreUnavailable.
        """
        newest = self._records.holding(self.at, _broken_error)
        return KeyHeadRecord() if newest is None else newest[1]

    def at(self, sequence: int) -> KeyHeadRecord:
        """Return one record. Raises NotFound, Corrupt, StoreUnavailable."""
        name, data = self._records.name(sequence), self._records.get(sequence)
        try:
            if len(data) > BYTES_MAX:
                raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place names it
            record = json.loads(data)
            check_json_mac(record, self._mac_key(), name)
            if record["version"] not in (1, VERSION) or record["sequence"] != sequence:
                raise ValueError(f"version {record['version']}, sequence {record['sequence']}")  # noqa: TRY301
            numbers = _by_owner(record["heads"])
            epochs = _by_owner(record["epochs"]) if record["version"] == VERSION else {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise Corrupt(f"{name}: {err}") from err
        return KeyHeadRecord(numbers, epochs)

    def note(self, owner: bytes, number: int) -> None:
        """Record a key number of an owner. Raises Corrupt, RetryableError, StoreUnavailable."""
        self._raise_to(owner, number=number)

    def note_epoch(self, owner: bytes, epoch: int) -> None:
        """Record the erasure epoch of an owner. Raises Corrupt, RetryableError, StoreUnavailable."""
        self._raise_to(owner, epoch=epoch)

    def _raise_to(self, owner: bytes, *, number: int = 0, epoch: int = 0) -> None:
        """Raise the values of an owner to these at least; neither is ever lowered."""
        for _ in range(RACES_MAX):
            heads, listed = self.read(), sorted(self._records.list_records())
            if heads.numbers.get(owner, 0) >= number and heads.epochs.get(owner, 0) >= epoch:
                return
            numbers, epochs = _raised(heads.numbers, owner, number), _raised(heads.epochs, owner, epoch)
            sequence = self._records.following(listed)
            record: dict[str, object] = {"version": VERSION if epochs else 1, "sequence": sequence, "heads": numbers}
            if epochs:
                record["epochs"] = epochs
            try:
                self._records.add(
                    sequence, json.dumps({**record, "mac": mac_of_json(record, self._mac_key())}).encode()
                )
            except AlreadyExists:
                continue
            self._records.remove(listed)
            return
        raise RetryableError(f"{FOLDER}: changed {RACES_MAX} times while it was written; try again")


def _by_owner(record: dict[str, int]) -> dict[bytes, int]:
    found = {bytes.fromhex(owner): int(number) for owner, number in record.items()}
    if any(len(owner) != OWNER_BYTES for owner in found):
        raise ValueError("an owner of another length")
    return found


def _raised(values: dict[bytes, int], owner: bytes, value: int) -> dict[str, int]:
    """Return the fields of a record: `values`, with the one of `owner` raised to `value`."""
    raised = {**values, owner: max(value, values.get(owner, 0))} if value else values
    return {of.hex(): highest for of, highest in sorted(raised.items())}


def _broken_error(err: Corrupt) -> KeyHeadRecord:
    raise err
