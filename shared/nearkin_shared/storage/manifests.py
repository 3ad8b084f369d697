"""Manifests and marks of versions in an object store.

Invariant: a version exists exactly when its manifest does (I2), and is visible unless its highest mark deletes it.

    manifests/ab/abcd.../0000000000000001.nkm           version 1
    manifests/ab/abcd.../0000000000000001.0001.nkt      deleted
    manifests/ab/abcd.../0000000000000001.0002.nkt      undeleted: visible again
    manifests/ab/abcd.../0000000000000001.0001.nkr      its retention was extended (retention_records.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from nearkin_shared.errors import Corrupt, NotFound, PermanentError
from nearkin_shared.formats.manifest import (
    NO_DIGEST,
    NO_PREVIOUS,
    Manifest,
    Previous,
    check_manifest_bytes,
    decode_manifest,
    encode_manifest,
    moment_of,
)
from nearkin_shared.formats.tombstone import Mark, MarkKind, decode_mark, encode_mark
from nearkin_shared.objectstore.base import ObjectStore, check_tenant
from nearkin_shared.objectstore.delegating import are_missing, clear_bytes, file_sizes, record_key_of, takes_bytes
from nearkin_shared.objectstore.group_put import put_new_many
from nearkin_shared.objectstore.parity import read_decoded
from nearkin_shared.preconditions import Precondition
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.clock_records import RecordedTime
from nearkin_shared.storage.committed_origins import BlobOrigin, CommittedOrigins
from nearkin_shared.storage.key_locks import KeyLocks, ProcessKeyLocks
from nearkin_shared.storage.retention_records import SUFFIX as RETENTION_SUFFIX
from nearkin_shared.storage.retention_records import RetentionRecords, record_sequence
from nearkin_shared.utils.frozen import frozen

MANIFEST_SUFFIX = ".nkm"
MARK_SUFFIX = ".nkt"
KEY_DIGESTS_MAX = 1024
"""Digests of keys that are kept, 1.2 MB with keys of 1 KiB: a commit needs that of each key four times."""
_NAME = re.compile(r"([0-9a-f]{16})(?:\.nkm|\.([0-9a-f]{4})\.(nkt|nkr))")


_WHOLE_NAME = re.compile(rf"manifests/[0-9a-f]{{2}}/([0-9a-f]{{32}})/{_NAME.pattern}")


@frozen
class History:
    """State of one version, from the names in its key's folder."""

    version: int
    committed: bool = False
    """Whether its manifest exists."""
    sequence: int = 0
    """Sequence of its highest mark, 0 for none."""
    marks_bytes: int = 0
    """Bytes of all its marks and retention records."""
    retention: int = 0
    """Sequence of its last retention record, 0 for none."""

    @property
    def is_lost(self) -> bool:
        """Return whether the manifest is missing although no tombstone deletes the version."""
        return not self.committed and self.sequence % 2 == 0


class ManifestListing(NamedTuple):
    """(object name, bytes) of all objects of versions, each list sorted."""

    manifests: list[tuple[str, int]]
    marks: list[tuple[str, int]]
    retentions: list[tuple[str, int]]


@lru_cache(KEY_DIGESTS_MAX)
def key_digest(tenant: str, key: str) -> str:
    """Return the digest of (tenant, key) in object names: 32 hex digits.

    A key never becomes a path (I9).
    """
    return blake3(tenant.encode() + b"\0" + key.encode()).hexdigest(length=16)


def key_folder(digest: bytes) -> str:
    """Return the folder of all objects of a key, by the digest of the key."""
    return f"manifests/{digest.hex()[:2]}/{digest.hex()}"


def object_name(tenant: str, key: str, version: int) -> str:
    """Return the object name of one version's manifest."""
    return f"{_folder(tenant, key)}/{version:016x}{MANIFEST_SUFFIX}"


def mark_name(tenant: str, key: str, version: int, sequence: int) -> str:
    """Return the object name of one mark of a version."""
    return f"{_folder(tenant, key)}/{version:016x}.{sequence:04x}{MARK_SUFFIX}"


def marked_version(name: str) -> tuple[str, int]:
    """Return (object name of the manifest, sequence) of a mark's name. Raises Corrupt."""
    folder, _, last = name.rpartition("/")
    matched = _NAME.fullmatch(last)
    if matched is None or matched[3] != "nkt":
        raise Corrupt(f"{name}: not a mark's name; move it out of the store")
    return f"{folder}/{matched[1]}.nkm", int(matched[2], 16)


def key_and_version(name: str) -> tuple[bytes, int] | None:
    """Return (digest of the key, version) of an object name, or None if invalid."""
    matched = _WHOLE_NAME.fullmatch(name)
    return None if matched is None else (bytes.fromhex(matched[1]), int(matched[2], 16))


def retained_manifest(name: str) -> str:
    """Return the manifest's object name of a retention record's name. Raises Corrupt."""
    return record_sequence(name)[0]


def _folder(tenant: str, key: str) -> str:
    digest = key_digest(tenant, key)
    return f"manifests/{digest[:2]}/{digest}"


def _digest_of_manifest(data: bytes, what: str) -> bytes:
    """Return the digest of an intact manifest. Raises Corrupt."""
    check_manifest_bytes(data, what)
    return blake3(data).digest()


class ManifestStore:
    """Manifests and marks by (tenant, key, version).

    Raises: TenantErased, for calls by name about an erased tenant.
    """

    def __init__(self, objects: ObjectStore, locks: KeyLocks | None = None, record_key: bytes | None = None) -> None:
        """Create the store of manifests.

        `locks` are shared by all processes that put conditionally or delete; by default one process's own. `record_key`
        authenticates marks if `objects` has no key of its own.
        """
        self._objects = objects
        self.locks: KeyLocks | ProcessKeyLocks = locks or ProcessKeyLocks()
        self._given_key = record_key
        self.known_time: RecordedTime = RecordedTime(objects)
        self.origins: CommittedOrigins = CommittedOrigins(self.get)
        self.retentions: RetentionRecords = RetentionRecords(objects, _folder, lambda: self._record_key)

    @property
    def objects(self) -> ObjectStore:
        """Return the object store that holds the manifests."""
        return self._objects

    @property
    def authenticates_marks(self) -> bool:
        """Return whether marks have a MAC; those of an encrypted store are encrypted instead."""
        return self._record_key is not None

    @property
    def _record_key(self) -> bytes | None:
        return self._given_key or record_key_of(self._objects)

    # --- committed versions, deleted ones too -----------------------------------------------------------------------

    def put(self, manifest: Manifest) -> int:
        """Commit a version; return the manifest's size in bytes.

        Raises: AlreadyExists (another put took this number).
        """
        data = encode_manifest(manifest)
        self._objects.put_new(object_name(manifest.tenant, manifest.key, manifest.version), data)
        return len(data)

    def put_many(self, manifests: Sequence[Manifest], threads: Executor) -> list[int | None]:
        """Commit versions of different keys, each by itself; return the bytes of each manifest.

        None: another put took this number. Raises StoreUnavailable: some may be committed.
        """
        encoded = [encode_manifest(manifest) for manifest in manifests]
        names = [object_name(manifest.tenant, manifest.key, manifest.version) for manifest in manifests]
        created = put_new_many(self._objects, list(zip(names, encoded, strict=True)), threads)
        return [len(data) if is_new else None for data, is_new in zip(encoded, created, strict=True)]

    def stored_bytes(self, manifest: Manifest, manifest_bytes: int) -> int:
        """Return the stored size of a manifest, with its parity and encryption."""
        name = object_name(manifest.tenant, manifest.key, manifest.version)
        return takes_bytes(self._objects, name, manifest_bytes)

    def get(self, tenant: str, key: str, version: int) -> Manifest:
        """Return one version's manifest, deleted or not.

        Raises: NotFound, Corrupt, StoreUnavailable.
        """
        check_tenant(self._objects, tenant)
        name = object_name(tenant, key, version)
        manifest = read_decoded(self._objects, name, decode_manifest)
        if (manifest.tenant, manifest.key, manifest.version) != (tenant, key, version):
            raise Corrupt(f"{name}: is the manifest of {manifest.key!r} version {manifest.version}")
        return manifest

    def info(self, manifest: Manifest, sequence: int | None = None) -> VersionInfo:
        """Return a version as callers see it, with the latest end of its retention.

        `sequence` as in `RetentionRecords.retain_until_us`.

        Raises: Corrupt, StoreUnavailable.
        """
        until_us = self.retentions.retain_until_us(manifest, sequence)
        if until_us == manifest.retain_until_us:
            return manifest.info
        return replace(manifest.info, retain_until=moment_of(until_us))

    def size_bytes(self, manifest: Manifest) -> int:
        """Return the size of a stored manifest in bytes. Raises NotFound, StoreUnavailable."""
        return self._objects.size_bytes(object_name(manifest.tenant, manifest.key, manifest.version))

    def is_committed(self, tenant: str, key: str, version: int) -> bool:
        """Return whether a version's manifest exists, regardless of marks.

        Raises: StoreUnavailable.
        """
        try:
            self._objects.size_bytes(object_name(tenant, key, version))
        except NotFound:
            return False
        return True

    def versions(self, tenant: str, key: str) -> list[int]:
        """Return the numbers of a key's versions, deleted ones too, ascending."""
        return sorted(self.histories(tenant, key))

    def histories(self, tenant: str, key: str) -> dict[int, History]:
        """Return the state of each version of a key, from one listing. Raises Corrupt."""
        check_tenant(self._objects, tenant)
        found: dict[int, History] = {}
        for name, size_bytes in self._objects.names(_folder(tenant, key)):
            matched = _NAME.fullmatch(name.rpartition("/")[2])
            if matched is None:
                raise Corrupt(f"{name}: not a manifest's name; move it out of the store")
            version = int(matched[1], 16)
            history = found.get(version, History(version))
            if matched[2] is None:
                found[version] = replace(history, committed=True)
                continue
            sequence, marks_bytes = int(matched[2], 16), history.marks_bytes + size_bytes
            if matched[3] == "nkr":
                last = max(history.retention, sequence)
                found[version] = replace(history, retention=last, marks_bytes=marks_bytes)
            else:
                found[version] = replace(history, sequence=max(history.sequence, sequence), marks_bytes=marks_bytes)
        return found

    def are_new(self, keys: Sequence[tuple[str, str]]) -> list[bool]:
        """Return which of (tenant, key) have no object; False: `histories` finds out.

        Raises: TenantErased, StoreUnavailable.
        """
        for tenant in {tenant for tenant, _ in keys}:
            check_tenant(self._objects, tenant)
        return are_missing(self._objects, [_folder(tenant, key) for tenant, key in keys])

    def folder_files(self, tenant: str, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, int] | None]]:
        """Yield each key's folder and {file name: stored bytes} in it.

        None instead of the files if `histories` must list the folder.
        """
        folders = [_folder(tenant, key) for key in keys]
        return zip(folders, file_sizes(self._objects, folders), strict=True)

    def clear_bytes(self, name: str, stored_bytes: int) -> int:
        """Return the plain size of a manifest from its stored size; negative if truncated."""
        return clear_bytes(self._objects, name, stored_bytes)

    def find_previous(self, tenant: str, key: str, histories: Mapping[int, History]) -> Previous:
        """Return the newest manifest of a key for the chain of its next version.

        `histories` as just listed. A manifest that GC removed since is skipped; a damaged one is named without a
        digest, so that a put does not fail because of it.

        Raises: StoreUnavailable.
        """
        for version in sorted(histories, reverse=True):
            if histories[version].committed:
                try:
                    return Previous(version, self.digest(tenant, key, version))
                except NotFound:
                    continue
                except PermanentError:
                    return Previous(version, NO_DIGEST)
        return NO_PREVIOUS

    def find_origin(
        self, tenant: str, key: str, histories: Mapping[int, History], origin: BlobOrigin | None
    ) -> Manifest | None:
        """Return the version that an earlier attempt with this origin committed, or None.

        Raises: StoreUnavailable.
        """
        if origin is None:
            return None
        versions = [version for version, history in histories.items() if history.committed]
        return self.origins.find(tenant, key, versions, origin)

    def digest(self, tenant: str, key: str, version: int) -> bytes:
        """Return BLAKE3 of a manifest's plain bytes.

        Raises: NotFound, Corrupt, StoreUnavailable.
        """
        return read_decoded(self._objects, object_name(tenant, key, version), _digest_of_manifest)

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield (object name, bytes) of every manifest, in no order."""
        others = MARK_SUFFIX, RETENTION_SUFFIX
        return ((name, size) for name, size in self._objects.names("manifests") if not name.endswith(others))

    def names_and_marks(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return (object name, bytes) of every manifest, and of every mark, sorted."""
        listed = self.listing()
        return listed.manifests, listed.marks

    def listing(self, keys: Iterable[bytes] | None = None) -> ManifestListing:
        """Return (object name, bytes) of every manifest, mark and retention record, sorted.

        `keys`: digests of keys; only their objects are listed.

        Raises: StoreUnavailable.
        """
        found = ManifestListing([], [], [])
        folders = ["manifests"] if keys is None else [key_folder(key) for key in sorted(keys)]
        for entry in sorted(entry for folder in folders for entry in self._objects.names(folder)):
            if entry[0].endswith(MARK_SUFFIX):
                found.marks.append(entry)
            elif entry[0].endswith(RETENTION_SUFFIX):
                found.retentions.append(entry)
            else:
                found.manifests.append(entry)
        return found

    def read(self, name: str) -> Manifest:
        """Return the manifest under an object name.

        Raises: NotFound, Corrupt, StoreUnavailable.
        """
        manifest = read_decoded(self._objects, name, decode_manifest)
        if object_name(manifest.tenant, manifest.key, manifest.version) != name:
            raise Corrupt(f"{name}: is the manifest of {manifest.key!r} version {manifest.version}")
        return manifest

    def read_stored(self, name: str) -> bytes:
        """Return the bytes under an object name, unchecked.

        Raises: NotFound, StoreUnavailable.
        """
        return self._objects.get(name)

    def delete(self, tenant: str, key: str, version: int) -> None:
        """Delete a manifest whose mark records that it was collected. Idempotent."""
        self._objects.delete(object_name(tenant, key, version))

    def delete_mark(self, name: str) -> None:
        """Delete a mark without effect. Idempotent."""
        self._objects.delete(name)

    # --- visible versions ---------------------------------------------------------------------------------------------

    def newest(self, tenant: str, key: str) -> Manifest | None:
        """Return the newest visible version, or None. Raises Corrupt, StoreUnavailable."""
        histories = self.histories(tenant, key)
        if histories and histories[max(histories)].sequence % 2:
            # A listing may contain a mark and miss a version committed before it: the next listing has it.
            histories = self.histories(tenant, key)
        return self._newest_of(tenant, key, histories)

    def check_precondition(
        self, tenant: str, key: str, histories: Mapping[int, History], precondition: Precondition | None
    ) -> None:
        """Check a put's precondition against the histories that determine its version number.

        Raises: PreconditionFailed, Corrupt (the newest version cannot be read), StoreUnavailable.
        """
        if precondition is not None:
            newest = self._newest_of(tenant, key, histories)
            precondition.check(key, None if newest is None else newest.info)

    def exclusive_if(self, precondition: Precondition | None, tenant: str, key: str) -> AbstractContextManager[None]:
        """Lock the key for a conditional put; do nothing for other puts.

        Raises: RetryableError.
        """
        return nullcontext() if precondition is None else self.locks.for_put(tenant, key)

    def _newest_of(self, tenant: str, key: str, histories: Mapping[int, History]) -> Manifest | None:
        for version in sorted(histories, reverse=True):
            if self.shows(tenant, key, histories[version]):
                return self.get(tenant, key, version)
        return None

    def read_visible(self, tenant: str, key: str, version: int) -> Manifest:
        """Return a visible version. Raises NotFound, Corrupt, StoreUnavailable."""
        if not self.is_seen(tenant, key, version):
            raise NotFound(f"key {key!r} version {version}: deleted")
        return self.get(tenant, key, version)

    def is_seen(self, tenant: str, key: str, version: int) -> bool:
        """Return whether a version is visible.

        One small read if it never had a mark, as most versions.
        """
        check_tenant(self._objects, tenant)
        try:
            self._objects.get(mark_name(tenant, key, version, 1))
        except NotFound:
            return True
        except Corrupt:  # an encrypted mark that is damaged: it exists, and the names alone have the rest
            pass
        history = self.histories(tenant, key).get(version)
        return history is not None and self.shows(tenant, key, history)

    def shows(self, tenant: str, key: str, history: History) -> bool:
        """Return whether a version with this history is visible.

        Raises: Corrupt, if its mark cannot be read.
        """
        if not history.committed or history.sequence % 2:
            return False
        if not history.sequence:
            return True
        return self.mark(tenant, key, history.version, history.sequence).kind is MarkKind.UNDELETED

    def is_ended(self, tenant: str, key: str, version: int) -> bool:
        """Return whether the highest mark of a version deletes or collects it.

        A collected version may have this mark alone: it records that the number is used.

        Raises: Corrupt, StoreUnavailable.
        """
        history = self.histories(tenant, key).get(version)
        if history is None or not history.sequence:
            return False
        return bool(history.sequence % 2) or self.mark(tenant, key, version, history.sequence).kind is not (
            MarkKind.UNDELETED
        )

    # --- marks -------------------------------------------------------------------------------------------------------

    def put_mark(self, mark: Mark) -> int:
        """Write the next mark of a version; return its size in bytes.

        Raises: AlreadyExists (another change came first).
        """
        data = self.encode_mark(mark)
        self._objects.put_new(mark_name(mark.tenant, mark.key, mark.version, mark.sequence), data)
        return len(data)

    def takes_bytes(self, mark: Mark) -> int:
        """Return the stored size of a mark, with its parity and encryption."""
        name = mark_name(mark.tenant, mark.key, mark.version, mark.sequence)
        return takes_bytes(self._objects, name, len(self.encode_mark(mark)))

    def encode_mark(self, mark: Mark) -> bytes:
        """Encode a mark as this store writes it. Raises BadInput."""
        return encode_mark(mark, self._record_key)

    def mark(self, tenant: str, key: str, version: int, sequence: int) -> Mark:
        """Return a mark. Raises NotFound, Corrupt, StoreUnavailable."""
        return self.read_mark(mark_name(tenant, key, version, sequence))

    def read_mark(self, name: str) -> Mark:
        """Return the mark under an object name. Raises NotFound, Corrupt, StoreUnavailable."""
        key = self._record_key
        mark = read_decoded(self._objects, name, lambda data, what: decode_mark(data, what, key))
        if mark_name(mark.tenant, mark.key, mark.version, mark.sequence) != name:
            raise Corrupt(f"{name}: is mark {mark.sequence} of {mark.key!r} version {mark.version}")
        return mark
