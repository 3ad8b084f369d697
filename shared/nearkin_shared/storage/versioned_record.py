"""Numbered records. Invariant: the one of the highest sequence holds; it is whole before a lower one goes.

FOLDER/0000000000000007.SUFFIX      sixteen hex digits

A reader holds no lock: between its listing and its reading the one that it saw may have been replaced. Then it looks
again; a record that went is never taken for none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.delegating import record_key_of

Found = TypeVar("Found")

SEQUENCE_MAX = (1 << 64) - 1
READ_TRIES_MAX = 8
"""Each but the first means that a writer put a record, and removed one, since the listing: some 20 ms of S3."""


class VersionedRecords:
    """The records in one folder of an object store, as bytes."""

    def __init__(self, objects: ObjectStore, folder: str, suffix: str, what: str) -> None:
        """`what` the records are of, for errors."""
        self.objects = objects
        self._folder, self._suffix, self._what = folder, suffix, what
        self._name = re.compile(rf"{folder}/([0-9a-f]{{16}})\.{suffix}")

    @property
    def key(self) -> bytes | None:
        """Return the key that authenticates the records, None where they have no MAC."""
        return record_key_of(self.objects)

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return f"{self._folder}/{sequence:016x}.{self._suffix}"

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        found = {}
        for name, size_bytes in self.objects.names(self._folder):
            matched = self._name.fullmatch(name)
            if matched is None:
                raise Corrupt(f"{name}: not a name of {self._what}; move it out of the store")
            found[int(matched[1], 16)] = size_bytes
        return found

    def get(self, sequence: int) -> bytes:
        """Return one record. Raises NotFound, Corrupt (the device cannot read it), StoreUnavailable."""
        return self.objects.get(self.name(sequence))

    def holding(self, at: Callable[[int], Found], broken: Callable[[Corrupt], Found]) -> tuple[int, Found] | None:
        """Return the sequence of the record that holds and what `at` makes of that; None where there is none.

        `broken` says what counts where it is damaged. Raises Corrupt for a name that is none's, and StoreUnavailable;
        never NotFound.
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
            f"{self._folder}: {READ_TRIES_MAX} times the newest record was gone when it was read; try again"
        )

    def following(self, sequences: Iterable[int]) -> int:
        """Return the number above all of these, 1 for none. Raises Corrupt for a number that none can follow."""
        highest = max(sequences, default=0)
        if highest >= SEQUENCE_MAX:
            raise Corrupt(f"{self.name(highest)}: no record can follow it, so no release wrote it: remove the file")
        return highest + 1

    def add(self, sequence: int, data: bytes) -> None:
        """Put a record. Raises AlreadyExists where another writer's holds, StoreUnavailable."""
        self.objects.put_new(self.name(sequence), data)
        highest = max(self.list_records(), default=sequence)
        if highest > sequence:
            raise AlreadyExists(f"{self.name(sequence)}: record {highest} of another writer holds")

    def remove(self, sequences: Iterable[int]) -> None:
        """Remove records, in the order given: ascending, so that whoever dies in between leaves the one that holds."""
        for sequence in sequences:
            self.objects.delete(self.name(sequence))
