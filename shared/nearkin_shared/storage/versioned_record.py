"""Numbered records in a folder.

Invariant: the record of the highest sequence is valid; it is complete before a lower one is deleted.

    FOLDER/0000000000000007.SUFFIX    sixteen hex digits

A reader holds no lock: the record that it listed may be replaced before it is read. The reader then lists again; a
deleted record is never taken for a missing one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from blake3 import blake3

from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.delegating import record_key_of

Found = TypeVar("Found")

SEQUENCE_MAX = (1 << 64) - 1
READ_TRIES_MAX = 8
"""Each but the first means that a writer replaced the record since the listing: about 20 ms of S3."""


class VersionedRecords:
    """Records in one folder of an object store, as bytes."""

    def __init__(self, objects: ObjectStore, folder: str, suffix: str, what: str) -> None:
        """Create the records; `what` describes them in errors."""
        self.objects = objects
        self._folder, self._suffix, self._what = folder, suffix, what
        self._name = re.compile(rf"{folder}/([0-9a-f]{{16}})\.{suffix}")

    @property
    def key(self) -> bytes | None:
        """Return the key that authenticates the records, or None if they have no MAC."""
        return record_key_of(self.objects)

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return f"{self._folder}/{sequence:016x}.{self._suffix}"

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record by sequence. Raises Corrupt for an invalid name."""
        found = {}
        for name, size_bytes in self.objects.names(self._folder):
            matched = self._name.fullmatch(name)
            if matched is None:
                raise Corrupt(f"{name}: not a name of {self._what}; move it out of the store")
            found[int(matched[1], 16)] = size_bytes
        return found

    def get(self, sequence: int) -> bytes:
        """Return one record.

        Raises: NotFound, Corrupt (the device cannot read it), StoreUnavailable.
        """
        return self.objects.get(self.name(sequence))

    def holding(self, at: Callable[[int], Found], broken: Callable[[Corrupt], Found]) -> tuple[int, Found] | None:
        """Return the sequence of the valid record and its content read by `at`, or None.

        `broken` returns the content of a damaged record.

        Raises: Corrupt for an invalid name, StoreUnavailable; never NotFound.
        """
        for _ in range(READ_TRIES_MAX):
            sequence = max(self.list_records(), default=None)
            if sequence is None:
                return None
            try:
                return sequence, at(sequence)
            except NotFound:
                continue
            except Corrupt as err:
                return sequence, broken(err)
        raise StoreUnavailable(
            f"{self._folder}: the newest record was replaced during each of {READ_TRIES_MAX} reads; try again"
        )

    def stamp(self) -> bytes:
        """Return a value that differs after any change of the record, also to an earlier one.

        Raises: Corrupt, StoreUnavailable.
        """
        found = self.holding(self.get, _unread)
        return b"" if found is None else found[0].to_bytes(8) + blake3(found[1]).digest(16)

    def following(self, sequences: Iterable[int]) -> int:
        """Return the next sequence after these, 1 for none.

        Raises: Corrupt, for the highest possible number.
        """
        highest = max(sequences, default=0)
        if highest >= SEQUENCE_MAX:
            raise Corrupt(f"{self.name(highest)}: invalid sequence, no record can follow it; remove the file")
        return highest + 1

    def add(self, sequence: int, data: bytes) -> None:
        """Write a record.

        Raises: AlreadyExists, if another writer's record is newer. StoreUnavailable.
        """
        self.objects.put_new(self.name(sequence), data)
        highest = max(self.list_records(), default=sequence)
        if highest > sequence:
            raise AlreadyExists(f"{self.name(sequence)}: record {highest} of another writer is newer")

    def remove(self, sequences: Iterable[int]) -> None:
        """Delete records in the given order.

        Ascending, so that a crash in between leaves the valid one.
        """
        for sequence in sequences:
            self.objects.delete(self.name(sequence))


def _unread(err: Corrupt) -> bytes:
    raise err
