"""Retention records next to manifests.

Invariant: a version is retained until the latest time in its manifest and records.

    manifests/ab/abcd.../0000000000000001.nkm         version 1, which may have a time itself
    manifests/ab/abcd.../0000000000000001.0001.nkr    its retention was extended
    manifests/ab/abcd.../0000000000000001.0002.nkr    extended again: a later time

A record is created exclusively and never changed, so that none shortens a retention. It is removed with its version.
The highest existing record counts: the loss of a lower one ends no retention.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.retention_record import RetentionRecord, decode_retention, encode_retention
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.parity import read_decoded

SUFFIX = ".nkr"
_NAME = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{4})\.nkr")


class RetentionRecords:
    """Retention records of one store."""

    def __init__(
        self, objects: ObjectStore, folder_of: Callable[[str, str], str], record_key: Callable[[], bytes | None]
    ) -> None:
        """Create the records.

        `folder_of` returns the folder of a key's manifests; `record_key` authenticates records of a plain store.
        """
        self._objects = objects
        self._folder_of = folder_of
        self._record_key = record_key

    def name(self, tenant: str, key: str, version: int, sequence: int) -> str:
        """Return the object name of a record."""
        return f"{self._folder_of(tenant, key)}/{version:016x}.{sequence:04x}{SUFFIX}"

    def encode(self, record: RetentionRecord) -> bytes:
        """Encode a record as this store writes it. Raises BadInput."""
        return encode_retention(record, self._record_key())

    def write(self, record: RetentionRecord) -> None:
        """Write a record, durably.

        Raises: AlreadyExists (another extension came first), StoreUnavailable.
        """
        name = self.name(record.tenant, record.key, record.version, record.sequence)
        self._objects.put_new(name, self.encode(record))

    def read(self, name: str) -> RetentionRecord:
        """Return the record under an object name.

        Raises: NotFound, Corrupt, FormatTooNew, StoreUnavailable.
        """
        key = self._record_key()
        record = read_decoded(self._objects, name, lambda data, what: decode_retention(data, what, key))
        if self.name(record.tenant, record.key, record.version, record.sequence) != name:
            raise Corrupt(f"{name}: is record {record.sequence} of {record.key!r} version {record.version}")
        return record

    def delete(self, name: str) -> None:
        """Delete a record whose version ended. Idempotent."""
        self._objects.delete(name)

    def exists(self, name: str) -> bool:
        """Return whether a record exists under an object name. Raises StoreUnavailable."""
        try:
            self._objects.size_bytes(name)
        except NotFound:
            return False
        return True

    def retain_until_us(self, manifest: Manifest, sequence: int | None = None) -> int:
        """Return the end of a version's retention, microseconds since 1970; 0 for none.

        `sequence` is that of the version's last record as just listed, 0 for none; by default the key's folder is
        listed.

        Raises: Corrupt (a record does not verify: the end is unknown), StoreUnavailable.
        """
        tenant, key, version = manifest.tenant, manifest.key, manifest.version
        if sequence is None:
            sequence = self._last_sequence(tenant, key, version)
        if not sequence:
            return manifest.retain_until_us
        record = self.read(self.name(tenant, key, version, sequence))
        return max(manifest.retain_until_us, record.retain_until_us)

    def current_retain_until_us(self, manifest: Manifest, listed: int) -> int:
        """Return the result of `retain_until_us` from an earlier listing's last sequence.

        `listed` is that sequence, 0 for none. An extension since then has the next sequence: that name is looked up,
        and the folder listed only if it exists.

        Raises: Corrupt, StoreUnavailable.
        """
        following = self.name(manifest.tenant, manifest.key, manifest.version, listed + 1)
        return self.retain_until_us(manifest, None if self.exists(following) else listed)

    def _last_sequence(self, tenant: str, key: str, version: int) -> int:
        """Return the highest sequence among a version's records, 0 without any.

        Raises: Corrupt, for an unknown name.
        """
        start, found = f"{version:016x}.", 0
        for name, _ in self._objects.names(self._folder_of(tenant, key)):
            last = name.rpartition("/")[2]
            if last.startswith(start) and last.endswith(SUFFIX):
                found = max(found, record_sequence(name)[1])
        return found


def record_sequence(name: str) -> tuple[str, int]:
    """Return (object name of the manifest, sequence) of a record's name. Raises Corrupt."""
    folder, _, last = name.rpartition("/")
    matched = _NAME.fullmatch(last)
    if matched is None:
        raise Corrupt(f"{name}: not a retention record's name; move it out of the store")
    return f"{folder}/{matched[1]}.nkm", int(matched[2], 16)
