"""Heads of keys. Invariant: a key whose newest manifest was removed, marks and all, is known by its head.

heads/versions/0000000000000007.nkh     the highest sequence holds

A GC run records the highest version number of each key that it lists, deleted ones too: of a key some manifest or mark
of the highest version stays for ever, so a lower number later means that it was removed behind the store's back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.head_record import ENTRIES_MAX, decode_heads, encode_heads
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.storage.manifests import ManifestStore, key_and_version, key_digest, object_name
from nearkin_shared.storage.versioned_record import VersionedRecords

FOLDER = "heads/versions"
FRESH_SECONDS = 300.0
"""As long a reader remembers the record."""
FOLDERS_LISTED_MAX = 64
"""Folders of keys listed one by one; beyond, one listing of all manifests is cheaper."""
_log = logging.getLogger("nearkin")


class VersionHeads:
    """The record of one store. Who writes it holds the lock, or lease, of GC runs. Safe between threads."""

    def __init__(self, objects: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkh", "heads of keys")
        self._clock = clock
        self._lock = threading.Lock()
        self._read: tuple[float, dict[bytes, int]] | None = None

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def at(self, sequence: int) -> dict[bytes, int]:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        found, heads = decode_heads(self._records.get(sequence), self.name(sequence), self._records.key)
        if found != sequence:
            raise Corrupt(f"{self.name(sequence)}: is record {found}")
        return heads

    def read(self) -> dict[bytes, int]:
        """Return the heads by digest of the key. A record that does not verify counts as none; `verify` names it."""
        held = self._records.holding(self.at, _none)
        return {} if held is None else held[1]

    def check(self, manifests: ManifestStore, tenant: str, key: str, seen: int) -> None:
        """Raise Corrupt where the key had a version above all that exist now. `seen`: its newest that can be read."""
        with self._lock:
            if self._read is None or self._clock() - self._read[0] > FRESH_SECONDS:
                self._read = self._clock(), self.read()
            head = self._read[1].get(bytes.fromhex(key_digest(tenant, key)), 0)
        if head > seen and head > max(manifests.histories(tenant, key), default=0):
            raise Corrupt(
                f"{object_name(tenant, key, head)}: removed, manifest and marks: a GC run has listed {key!r} version "
                f"{head}; put it back from a copy (`nearkin repair --from`), ask for an older one by its number, or "
                "give it up with `nearkin rebuild-index`"
            )

    def update(self, manifests: ManifestStore) -> dict[bytes, int]:
        """Record the heads of now; return those that are higher than what is listed: rolled back.

        A head is never lowered. Raises StoreUnavailable, AlreadyExists (another process wrote the record).
        """
        before, now = self.read(), listed_heads(manifests)
        self._replace(before, {**before, **{key: max(head, before.get(key, 0)) for key, head in now.items()}})
        return self._without_hidden(lowered_heads(before, now))

    def find_rolled_back(self, manifests: ManifestStore, known: Mapping[bytes, int] | None = None) -> dict[bytes, int]:
        """Return the heads above all versions that exist. Raises StoreUnavailable.

        `known` versions by key, of an index for example, are not looked for. A head counts only if it is found twice:
        between a reading and a listing an erasure may have removed both.
        """
        found = self._find_rolled_back(manifests, known or {})
        again = self._find_rolled_back(manifests, known or {}) if found else {}
        return {key: head for key, head in found.items() if key in again}

    def _find_rolled_back(self, manifests: ManifestStore, known: Mapping[bytes, int]) -> dict[bytes, int]:
        found = lowered_heads(self.read(), known)
        if not known or len(found) > FOLDERS_LISTED_MAX:
            found = lowered_heads(found, listed_heads(manifests)) if found else {}
        else:
            found = {key: head for key, head in found.items() if not self._exists(key, head)}
        return self._without_hidden(found)

    def _exists(self, key: bytes, version: int) -> bool:
        """Return whether a version of a key, or a later one, has a manifest or a mark."""
        folder = head_name(key, version).rpartition("/")[0]
        listed = (key_and_version(name) for name, _ in self._records.objects.names(folder))
        return any(found is not None and found[1] >= version for found in listed)

    def _without_hidden(self, heads: dict[bytes, int]) -> dict[bytes, int]:
        """Return the heads without those of closed tenants, whose objects no listing names."""
        objects = self._records.objects
        if not heads or not isinstance(objects, EncryptedObjectStore):
            return heads
        hidden = {found[0] for name, _ in objects.erased_objects() if (found := key_and_version(name)) is not None}
        return {key: head for key, head in heads.items() if key not in hidden}

    def accept(self, manifests: ManifestStore) -> None:
        """Make the heads what is listed now: what was removed is given up. Raises StoreUnavailable."""
        before = self.read()
        if lowered_heads(before, now := listed_heads(manifests)):
            self._replace(before, now)

    def forget(self, names: Iterable[str]) -> None:
        """Remove the heads of keys whose manifests and marks, by name, are about to be removed for good."""
        before = self.read()
        gone = {named[0] for named in map(key_and_version, names) if named is not None}
        self._replace(before, {key: head for key, head in before.items() if key not in gone})

    def _replace(self, before: Mapping[bytes, int], heads: dict[bytes, int]) -> None:
        listed = sorted(self.list_records())
        if heads == before and len(listed) <= 1:
            return
        if len(heads) > ENTRIES_MAX:
            _log.warning("%s: %d keys, heads of %d are kept", FOLDER, len(heads), ENTRIES_MAX)
            heads = dict(sorted(heads.items())[:ENTRIES_MAX])
        sequence = self._records.following(listed)
        try:
            self._records.add(sequence, encode_heads(sequence, heads, self._records.key))
        except AlreadyExists:
            return  # another run's, as good as this one
        self._records.remove(listed)
        with self._lock:
            self._read = None


def listed_heads(manifests: ManifestStore) -> dict[bytes, int]:
    """Return the highest version of each key whose manifests or marks are listed. Raises StoreUnavailable.

    A name that no release writes is of no key; `verify` names it.
    """
    found: dict[bytes, int] = {}
    for entries in manifests.names_and_marks():
        for name, _ in entries:
            if (named := key_and_version(name)) is not None:
                key, version = named
                found[key] = max(found.get(key, 0), version)
    return found


def lowered_heads(before: Mapping[bytes, int], now: Mapping[bytes, int]) -> dict[bytes, int]:
    """Return the heads of `before` above those of `now`."""
    return {key: head for key, head in before.items() if head > now.get(key, 0)}


def head_name(digest: bytes, version: int) -> str:
    """Return the object name of the manifest that a head stands for."""
    return f"manifests/{digest.hex()[:2]}/{digest.hex()}/{version:016x}.nkm"


def _none(err: Corrupt | NotFound) -> dict[bytes, int]:
    _log.warning("%s: removals of newest versions before the next GC run are not noticed by it", err)
    return {}
