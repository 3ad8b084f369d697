"""Highest version numbers and record sequences of keys, to detect removed objects.

Invariant: the removal of a key's newest manifest with its marks, or of a version's last mark, is detected by its head,
also after a later put of the key: GC removes the last object of a recorded head only once a higher head is recorded.

    heads/versions/0000000000000007.nkh     the highest sequence is valid

A GC run records the highest version number of each key that it lists, deleted ones too: a manifest or mark of a key's
highest version stays for ever, so a lower number later means that it was removed outside Nearkin. Of each version with
a manifest it records the highest sequences of marks and retention records, which only rise until GC removes the
manifest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats.head_record import ENTRIES_MAX, Heads, Sequences, decode_heads, encode_heads
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.delegating import file_sizes
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
"""Time for which a reader reuses the record."""
_log = logging.getLogger("nearkin")


class VersionHeads:
    """Heads of one store. Safe between threads.

    A writer holds the lock, or lease, of GC runs.
    """

    def __init__(self, objects: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = VersionedRecords(objects, FOLDER, "nkh", "heads of keys")
        self._clock = clock
        self._lock = threading.Lock()
        self._read: tuple[float, Heads] | None = None

    def name(self, sequence: int) -> str:
        """Return the object name of a record."""
        return self._records.name(sequence)

    def list_records(self) -> dict[int, int]:
        """Return the bytes of each record by sequence. Raises Corrupt for an invalid name."""
        return self._records.list_records()

    def at(self, sequence: int) -> Heads:
        """Return one record. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        found, heads = decode_heads(self._records.get(sequence), self.name(sequence), self._records.key)
        if found != sequence:
            raise Corrupt(f"{self.name(sequence)}: is record {found}")
        return heads

    def read(self) -> Heads:
        """Return the heads by digest of the key.

        A record that does not verify is ignored; `verify` reports it.
        """
        newest = self._records.holding(self.at, _none)
        return Heads() if newest is None else newest[1]

    def stamp(self) -> bytes:
        """Return a value that differs after any change of the record, also to an earlier one.

        Raises: Corrupt, StoreUnavailable.
        """
        return self._records.stamp()

    def _recent(self) -> Heads:
        """Return the heads, at most FRESH_SECONDS old."""
        with self._lock:
            if self._read is None or self._clock() - self._read[0] > FRESH_SECONDS:
                self._read = self._clock(), self.read()
            return self._read[1]

    def head_of(self, tenant: str, key: str) -> int:
        """Return the highest version of a key that a GC run has listed, 0 for none.

        Raises: StoreUnavailable.
        """
        return self._recent().versions.get(bytes.fromhex(key_digest(tenant, key)), 0)

    def highest_taken(self, tenant: str, key: str) -> int:
        """Return the highest version number of a key that a GC run has listed.

        0 if the heads cannot be read: a foreign file among the records must not stop a put.

        Raises: StoreUnavailable.
        """
        try:
            return self.head_of(tenant, key)
        except Corrupt as err:
            _log.warning("%s: the number of a removed version may be reused", err)
            return 0

    def check(self, manifests: ManifestStore, tenant: str, key: str, seen: int) -> None:
        """Raise Corrupt if the key had a version above all existing ones, or lost a mark.

        `seen`: its newest readable version.
        """
        self.check_marks(manifests, tenant, key)
        head = self.head_of(tenant, key)
        if head > seen and head > max(manifests.histories(tenant, key), default=0):
            raise Corrupt(
                f"{object_name(tenant, key, head)}: removed with its marks; a GC run has listed {key!r} version "
                f"{head}; restore it from a copy (`nearkin repair --from`), get an older one by its number, or "
                "accept the loss with `nearkin rebuild-index`"
            )

    def check_marks(self, manifests: ManifestStore, tenant: str, key: str, version: int | None = None) -> None:
        """Raise Corrupt if a version of the key lacks a mark or retention record.

        `version`: only this one. Lost are those that an earlier GC run has listed. Lists the key's folder only if it
        had any.

        Raises: StoreUnavailable.
        """
        lost = self.find_lost_records(manifests, tenant, key)
        found = next((of for of in sorted(lost) if version in (None, of)), None)
        if found is not None:
            raise Corrupt(
                f"{lost[found]}: removed; a GC run has listed it, and {key!r} version {found} lacks it now; restore "
                "it from a copy (`nearkin repair --from`), or accept the loss with `nearkin rebuild-index`"
            )

    def find_lost_records(self, manifests: ManifestStore, tenant: str, key: str) -> dict[int, str]:
        """Return the lost mark or retention record of each version of the key.

        It must be missing in two listings: a GC run that ends the version removes its manifest first, which one listing
        may miss.

        Raises: StoreUnavailable.
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

    def raise_recorded(self, manifests: ManifestStore) -> dict[bytes, int]:
        """Raise the heads of recorded keys to their highest versions; return lost heads.

        These stay. Nothing else is recorded: a run that fails later has not accepted new keys or marks. Raises: as
        `update` does.
        """
        before = self.read()
        now = list_heads(manifests, before.versions)
        lost = self._without_hidden(lost_heads(before.versions, now))
        highest = now.heads.versions
        versions = {k: head if k in lost else max(head, highest.get(k, 0)) for k, head in before.versions.items()}
        if versions != before.versions:
            self._replace(before, Heads(versions, before.sequences))
        return lost

    def update(self, manifests: ManifestStore, keys: Collection[bytes] | None = None) -> RolledBack:
        """Record the current heads; return the missing objects that an earlier run recorded.

        A head is never lowered. `keys`: digests of the only keys that are listed.

        Raises: StoreUnavailable, AlreadyExists (another process wrote the record).
        """
        before = self.read()
        recorded = {key: head for key, head in before.versions.items() if keys is None or key in keys}
        now = list_heads(manifests, recorded, keys)
        lost = self._without_hidden(lost_heads(recorded, now))
        versions = {**before.versions}
        sequences = {key: {**of} for key, of in before.sequences.items() if key not in now.heads.versions}
        for key, head in now.heads.versions.items():
            if key not in lost:  # else the loss would be forgotten
                versions[key] = head
        for key, version in now.committed:
            known, found = _sequences(before, key, version), _sequences(now.heads, key, version)
            highest = _verified(manifests, key, version, known, found)
            if highest != NO_SEQUENCES:
                sequences.setdefault(key, {})[version] = highest
        self._replace(before, Heads(versions, sequences))
        return RolledBack(lost, find_lost(before, now))

    def find_rolled_back(
        self, manifests: ManifestStore, known: Collection[tuple[bytes, int]] = frozenset()
    ) -> dict[bytes, int]:
        """Return the heads whose version has neither manifest nor mark. Raises StoreUnavailable.

        `known` versions (digest of the key, number), of an index for example, are not looked up. A head must be missing
        in two listings: between a read and a listing GC or an erasure may have removed both.
        """
        found = self._find_rolled_back(manifests, known)
        again = self._find_rolled_back(manifests, known) if found else {}
        return {key: head for key, head in found.items() if again.get(key) == head}

    def _find_rolled_back(self, manifests: ManifestStore, known: Collection[tuple[bytes, int]]) -> dict[bytes, int]:
        found = {key: head for key, head in self.read().versions.items() if (key, head) not in known}
        if found and not known:
            found = lost_heads(found, list_heads(manifests, found))
        else:
            folders = zip(found.items(), self._files(found), strict=True)
            found = {key: head for (key, head), files in folders if not _has_version(files, head)}
        return self._without_hidden(found)

    def find_keys_without_records(self) -> set[bytes]:
        """Return the digests of keys of which a version lost its last mark or retention record.

        Reads no manifest. A record must be missing in two listings: GC removes it after its manifest. Raises
        StoreUnavailable.
        """
        known = self.read().sequences
        found = self._without_records(known)
        return self._without_records({key: known[key] for key in found}) if found else set()

    def _without_records(self, known: Mapping[bytes, Mapping[int, Sequences]]) -> set[bytes]:
        found = set()
        for key, files in zip(known, self._files(known), strict=True):
            for version, sequences in known[key].items():
                stem = f"{version:016x}"
                now = Sequences(_highest(files, stem, MARK_SUFFIX), _highest(files, stem, RETENTION_SUFFIX))
                if f"{stem}.nkm" in files and lost_record(key, version, sequences, now) is not None:
                    found.add(key)
        return found

    def _files(self, keys: Iterable[bytes]) -> Iterator[Collection[str]]:
        """Yield the names of the files in the folder of each key; foreign names are left out."""
        folders = [head_name(key, 0).rpartition("/")[0] for key in keys]
        for folder, files in zip(folders, file_sizes(self._records.objects, folders), strict=True):
            names = files if files is not None else (n for n, _ in self._records.objects.names(folder))
            found = (name.rpartition("/")[2] for name in names)
            yield {name for name in found if key_and_version(f"{folder}/{name}") is not None}

    def warn_if_removed(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Warn that the recorded head of a key was removed, before a put.

        `versions`: the key's existing ones, as just listed. Raises: StoreUnavailable.
        """
        head, digest = self.highest_taken(tenant, key), bytes.fromhex(key_digest(tenant, key))
        if head and head not in versions and self.read().versions.get(digest) == head:  # not a cached, older head
            _log.warning(
                "key %r: version %d, which a GC run has listed as the newest, was removed; versions put now get a "
                "higher number. GC frees nothing until the manifest is restored from a copy (`nearkin repair --from`) "
                "or given up with `nearkin rebuild-index`; `nearkin verify` names it",
                key, head,
            )  # fmt: skip

    def _without_hidden(self, heads: dict[bytes, int]) -> dict[bytes, int]:
        """Return the heads without those of erased tenants, whose objects are not listed."""
        objects = self._records.objects
        if not heads or not isinstance(objects, EncryptedObjectStore):
            return heads
        hidden = {found[0] for name, _ in objects.erased_objects() if (found := key_and_version(name)) is not None}
        return {key: head for key, head in heads.items() if key not in hidden}

    def accept(self, manifests: ManifestStore) -> None:
        """Replace the heads by the listed ones, which accepts all removals.

        Raises: StoreUnavailable.
        """
        before = self.read()
        now = list_heads(manifests, before.versions)
        if lost_heads(before.versions, now) or find_lost(before, now):
            self._replace(before, now.heads)

    def forget(self, names: Iterable[str]) -> None:
        """Remove the heads of keys whose manifests and marks are about to be removed."""
        before = self.read()
        removed_keys = {key_version[0] for key_version in map(key_and_version, names) if key_version is not None}
        versions = {key: head for key, head in before.versions.items() if key not in removed_keys}
        sequences = {key: of for key, of in before.sequences.items() if key not in removed_keys}
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
            return  # another run's, equally valid
        self._records.remove(listed)
        with self._lock:
            self._read = None


class ListedHeads(NamedTuple):
    """Heads of the objects of one listing."""

    heads: Heads
    committed: set[tuple[bytes, int]]
    """(digest of the key, version) of each manifest."""
    existing: set[bytes]
    """Digests of keys of which the recorded version has a manifest or a mark."""


class RolledBack(NamedTuple):
    """Objects that an earlier GC run has recorded and that are no longer listed."""

    versions: dict[bytes, int]
    """Heads whose version has neither manifest nor mark, by digest of the key."""
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


def list_heads(
    manifests: ManifestStore, recorded: Mapping[bytes, int], keys: Collection[bytes] | None = None
) -> ListedHeads:
    """Return the heads of all listed manifests, marks and retention records.

    `keys`: digests of the only keys to list. `recorded` versions by digest of the key are looked for. Invalid names are
    ignored; `verify` reports them.

    Raises: StoreUnavailable.
    """
    versions: dict[bytes, int] = {}
    sequences: dict[bytes, dict[int, Sequences]] = {}
    committed, existing = set(), set()
    listed = manifests.listing(keys)
    for entries in listed:
        for name, _ in entries:
            if (key_version := key_and_version(name)) is None:
                continue
            key, version = key_version
            if entries is listed.manifests:
                committed.add(key_version)
            elif key_version in committed:
                of = sequences.setdefault(key, {})
                before, number = of.get(version, NO_SEQUENCES), int(name.rpartition("/")[2].split(".")[1], 16)
                if entries is listed.marks:
                    of[version] = Sequences(max(number, before.mark), before.retention)
                else:
                    of[version] = Sequences(before.mark, max(number, before.retention))
            if entries is not listed.retentions:
                versions[key] = max(version, versions.get(key, 0))
                if recorded.get(key) == version:
                    existing.add(key)
    return ListedHeads(Heads(versions, sequences), committed, existing)


def find_lost(before: Heads, now: ListedHeads) -> dict[tuple[bytes, int], str]:
    """Return the lost marks and retention records of committed versions.

    Names by digest of the key and version.
    """
    found = {}
    for key, of in before.sequences.items():
        for version, known in of.items():
            if (key, version) in now.committed:
                name = lost_record(key, version, known, _sequences(now.heads, key, version))
                if name is not None:
                    found[key, version] = name
    return found


def lost_record(digest: bytes, version: int, known: Sequences | None, now: Sequences) -> str | None:
    """Return the name of a version's lost mark or retention record, or None."""
    if known is None:
        return None
    stem = head_name(digest, version).removesuffix(".nkm")
    if now.retention < known.retention:
        return f"{stem}.{known.retention:04x}{RETENTION_SUFFIX}"
    if now.mark < known.mark:
        return f"{stem}.{known.mark:04x}{MARK_SUFFIX}"
    return None


def _verified(manifests: ManifestStore, key: bytes, version: int, known: Sequences, found: Sequences) -> Sequences:
    """Return the higher sequences of both; a new one counts only if its record verifies.

    Otherwise a forged record would be missed for ever after its removal.
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


def lost_heads(recorded: Mapping[bytes, int], now: ListedHeads) -> dict[bytes, int]:
    """Return the recorded heads whose version has neither manifest nor mark any more."""
    return {key: head for key, head in recorded.items() if key not in now.existing}


def _has_version(files: Collection[str], version: int) -> bool:
    """Return whether a key's folder has a manifest or a mark of a version."""
    stem = f"{version:016x}"
    return any(name.startswith(stem) and not name.endswith(RETENTION_SUFFIX) for name in files)


def _highest(files: Collection[str], stem: str, suffix: str) -> int:
    """Return the highest sequence of a version's marks or retention records, 0 for none."""
    return max((int(name[17:21], 16) for name in files if name.startswith(stem) and name.endswith(suffix)), default=0)


def head_name(digest: bytes, version: int) -> str:
    """Return the object name of a head's manifest."""
    return f"manifests/{digest.hex()[:2]}/{digest.hex()}/{version:016x}.nkm"


def _none(err: Corrupt | NotFound) -> Heads:
    _log.warning("%s: removals of newest versions before the next GC run go undetected", err)
    return Heads()
