"""Heads of keys. Invariant: a key whose newest manifest or last mark of a version was removed is known by its head.

heads/versions/0000000000000007.nkh     the highest sequence holds

A GC run records the highest version number of each key that it lists, deleted ones too: of a key some manifest or mark
of the highest version stays for ever, so a lower number later means that it was removed behind the store's back. Of
each version that has a manifest it records the highest sequences of marks and retention records, which only rise until
GC removes the manifest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats.head_record import ENTRIES_MAX, Heads, Sequences, decode_heads, encode_heads
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.storage.manifests import (
    MARK_SUFFIX,
    ManifestStore,
    key_and_version,
    key_digest,
    object_name,
)
from nearkin_shared.storage.retention_records import SUFFIX as RETENTION_SUFFIX
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
        self._read: tuple[float, Heads] | None = None

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record that is there, by sequence. Raises Corrupt for a name that is none's."""
        return self._records.list_records()

    def at(self, sequence: int) -> Heads:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        found, heads = decode_heads(self._records.get(sequence), self.name(sequence), self._records.key)
        if found != sequence:
            raise Corrupt(f"{self.name(sequence)}: is record {found}")
        return heads

    def read(self) -> Heads:
        """Return the heads by digest of the key. A record that does not verify counts as none; `verify` names it."""
        held = self._records.holding(self.at, _none)
        return Heads() if held is None else held[1]

    def _recent(self) -> Heads:
        """Return the heads as they were FRESH_SECONDS ago, or later."""
        with self._lock:
            if self._read is None or self._clock() - self._read[0] > FRESH_SECONDS:
                self._read = self._clock(), self.read()
            return self._read[1]

    def head_of(self, tenant: str, key: str) -> int:
        """Return the highest version of a key as a GC run has seen it, 0 for none. Raises StoreUnavailable."""
        return self._recent().versions.get(bytes.fromhex(key_digest(tenant, key)), 0)

    def highest_taken(self, tenant: str, key: str) -> int:
        """Return the highest version number of a key that a GC run has listed, 0 if the heads cannot be read.

        For a put, which a stray file among the records must not stop. Raises StoreUnavailable.
        """
        try:
            return self.head_of(tenant, key)
        except Corrupt as err:
            _log.warning("%s: the number of a removed version may be reused", err)
            return 0

    def check(self, manifests: ManifestStore, tenant: str, key: str, seen: int) -> None:
        """Raise Corrupt where the key had a version above all that exist now, or a version of it has lost a mark.

        `seen`: its newest that can be read.
        """
        self.check_marks(manifests, tenant, key)
        head = self.head_of(tenant, key)
        if head > seen and head > max(manifests.histories(tenant, key), default=0):
            raise Corrupt(
                f"{object_name(tenant, key, head)}: removed, manifest and marks: a GC run has listed {key!r} version "
                f"{head}; put it back from a copy (`nearkin repair --from`), ask for an older one by its number, or "
                "give it up with `nearkin rebuild-index`"
            )

    def check_marks(self, manifests: ManifestStore, tenant: str, key: str, version: int | None = None) -> None:
        """Raise Corrupt where a version of the key, or this one, lacks a mark or retention record of an earlier GC run.

        Lists the key's folder only if it has had some. Raises StoreUnavailable.
        """
        lost = self.find_lost_records(manifests, tenant, key)
        found = next((of for of in sorted(lost) if version in (None, of)), None)
        if found is not None:
            raise Corrupt(
                f"{lost[found]}: removed: a GC run has listed it, and {key!r} version {found} is there without it; put "
                "it back from a copy (`nearkin repair --from`), or give it up with `nearkin rebuild-index`"
            )

    def find_lost_records(self, manifests: ManifestStore, tenant: str, key: str) -> dict[int, str]:
        """Return by version the mark or retention record that a version of the key has lost. Raises StoreUnavailable.

        Found twice: a GC run that ends the version removes its manifest first, which one listing may miss.
        """
        digest = bytes.fromhex(key_digest(tenant, key))
        known = self._recent().sequences.get(digest, {})
        found: dict[int, str] = {}
        for _ in range(2):
            found = {}
            for version, history in manifests.histories(tenant, key).items() if known else ():
                now = Sequences(history.sequence, history.retention)
                if history.committed and (name := lost_record(digest, version, known.get(version), now)) is not None:
                    found[version] = name
            if not found:
                break
        return found

    def update(self, manifests: ManifestStore) -> RolledBack:
        """Record the heads of now; return what is missing that an earlier run recorded.

        A head is never lowered. Raises StoreUnavailable, AlreadyExists (another process wrote the record).
        """
        before, now = self.read(), list_heads(manifests)
        versions = {**before.versions}
        sequences = {key: {**of} for key, of in before.sequences.items() if key not in now.heads.versions}
        for key, head in now.heads.versions.items():
            versions[key] = max(head, before.versions.get(key, 0))
        for key, version in now.committed:
            known, found = _sequences(before, key, version), _sequences(now.heads, key, version)
            highest = _verified(manifests, key, version, known, found)
            if highest != NO_SEQUENCES:
                sequences.setdefault(key, {})[version] = highest
        self._replace(before, Heads(versions, sequences))
        lowered = self._without_hidden(lowered_heads(before.versions, now.heads.versions))
        return RolledBack(lowered, find_lost(before, now))

    def find_rolled_back(self, manifests: ManifestStore, known: Mapping[bytes, int] | None = None) -> dict[bytes, int]:
        """Return the heads above all versions that exist. Raises StoreUnavailable.

        `known` versions by key, of an index for example, are not looked for. A head counts only if it is found twice:
        between a reading and a listing an erasure may have removed both.
        """
        found = self._find_rolled_back(manifests, known or {})
        again = self._find_rolled_back(manifests, known or {}) if found else {}
        return {key: head for key, head in found.items() if key in again}

    def _find_rolled_back(self, manifests: ManifestStore, known: Mapping[bytes, int]) -> dict[bytes, int]:
        found = lowered_heads(self.read().versions, known)
        if not known or len(found) > FOLDERS_LISTED_MAX:
            found = lowered_heads(found, list_heads(manifests).heads.versions) if found else {}
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
        before, now = self.read(), list_heads(manifests)
        if lowered_heads(before.versions, now.heads.versions) or find_lost(before, now):
            self._replace(before, now.heads)

    def forget(self, names: Iterable[str]) -> None:
        """Remove the heads of keys whose manifests and marks, by name, are about to be removed for good."""
        before = self.read()
        gone = {named[0] for named in map(key_and_version, names) if named is not None}
        versions = {key: head for key, head in before.versions.items() if key not in gone}
        sequences = {key: of for key, of in before.sequences.items() if key not in gone}
        self._replace(before, Heads(versions, sequences))

    def _replace(self, before: Heads, heads: Heads) -> None:
        listed = sorted(self.list_records())
        if heads == before and len(listed) <= 1:
            return
        if len(heads.versions) > ENTRIES_MAX:
            _log.warning("%s: %d keys, heads of %d are kept", FOLDER, len(heads.versions), ENTRIES_MAX)
            heads = Heads(dict(sorted(heads.versions.items())[:ENTRIES_MAX]), heads.sequences)
        sequence = self._records.following(listed)
        try:
            self._records.add(sequence, encode_heads(sequence, heads, self._records.key))
        except AlreadyExists:
            return  # another run's, as good as this one
        self._records.remove(listed)
        with self._lock:
            self._read = None


class ListedHeads(NamedTuple):
    """The heads of what a listing has found."""

    heads: Heads
    committed: set[tuple[bytes, int]]
    """(digest of the key, version) of each manifest."""


class RolledBack(NamedTuple):
    """What a GC run does not list, and an earlier one has recorded."""

    versions: dict[bytes, int]
    """Heads above all versions of a key that exist, by digest."""
    records: dict[tuple[bytes, int], str]
    """Object name of a lost mark or retention record, by digest and version."""

    @property
    def names(self) -> list[str]:
        """Return the object names of lost manifests and records, sorted."""
        return sorted(
            {head_name(digest, version) for digest, version in self.versions.items()} | {*self.records.values()}
        )

    @property
    def keys(self) -> set[bytes]:
        """Return the digests of the keys."""
        return {*self.versions} | {digest for digest, _ in self.records}


NO_SEQUENCES = Sequences()


def list_heads(manifests: ManifestStore) -> ListedHeads:
    """Return the heads of the manifests, marks and retention records that are listed. Raises StoreUnavailable.

    A name that no release writes is of no key; `verify` names it.
    """
    versions: dict[bytes, int] = {}
    sequences: dict[bytes, dict[int, Sequences]] = {}
    committed = set()
    listed = manifests.listing()
    for entries in listed:
        for name, _ in entries:
            if (named := key_and_version(name)) is None:
                continue
            key, version = named
            if entries is listed.manifests:
                committed.add(named)
            elif named in committed:
                of = sequences.setdefault(key, {})
                before, number = of.get(version, NO_SEQUENCES), int(name.rpartition("/")[2].split(".")[1], 16)
                if entries is listed.marks:
                    of[version] = Sequences(max(number, before.mark), before.retention)
                else:
                    of[version] = Sequences(before.mark, max(number, before.retention))
            if entries is not listed.retentions:
                versions[key] = max(version, versions.get(key, 0))
    return ListedHeads(Heads(versions, sequences), committed)


def find_lost(before: Heads, now: ListedHeads) -> dict[tuple[bytes, int], str]:
    """Return the names of marks and retention records that committed versions have lost, by digest and version."""
    found = {}
    for key, of in before.sequences.items():
        for version, known in of.items():
            if (key, version) in now.committed:
                name = lost_record(key, version, known, _sequences(now.heads, key, version))
                if name is not None:
                    found[key, version] = name
    return found


def lost_record(digest: bytes, version: int, known: Sequences | None, now: Sequences) -> str | None:
    """Return the name of the mark or retention record that a version has lost, None where it has lost none."""
    if known is None:
        return None
    stem = head_name(digest, version).removesuffix(".nkm")
    if now.retention < known.retention:
        return f"{stem}.{known.retention:04x}{RETENTION_SUFFIX}"
    if now.mark < known.mark:
        return f"{stem}.{known.mark:04x}{MARK_SUFFIX}"
    return None


def _verified(manifests: ManifestStore, key: bytes, version: int, known: Sequences, found: Sequences) -> Sequences:
    """Return the higher sequences of both; one that is new counts only if its record verifies.

    Else a forged record, once it is removed, would be missed for ever.
    """
    stem, mark, retention = head_name(key, version).removesuffix(".nkm"), known.mark, known.retention
    if found.mark > mark:
        with suppress(PermanentError):
            read = manifests.read_mark(f"{stem}.{found.mark:04x}{MARK_SUFFIX}")
            mark = found.mark if read.authenticated or not manifests.authenticates_marks else mark
    if found.retention > retention:
        with suppress(PermanentError):
            manifests.retentions.read(f"{stem}.{found.retention:04x}{RETENTION_SUFFIX}")
            retention = found.retention
    return Sequences(mark, retention)


def _sequences(heads: Heads, key: bytes, version: int) -> Sequences:
    return heads.sequences.get(key, {}).get(version, NO_SEQUENCES)


def lowered_heads(before: Mapping[bytes, int], now: Mapping[bytes, int]) -> dict[bytes, int]:
    """Return the heads of `before` above those of `now`."""
    return {key: head for key, head in before.items() if head > now.get(key, 0)}


def head_name(digest: bytes, version: int) -> str:
    """Return the object name of the manifest that a head stands for."""
    return f"manifests/{digest.hex()[:2]}/{digest.hex()}/{version:016x}.nkm"


def _none(err: Corrupt | NotFound) -> Heads:
    _log.warning("%s: removals of newest versions before the next GC run are not noticed by it", err)
    return Heads()
