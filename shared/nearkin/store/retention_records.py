"""Retention records next to manifests. Invariant: a version is retained until the latest time that any of them names.

    manifests/ab/abcd.../0000000000000001.nkm          version 1, which may name a time itself
    manifests/ab/abcd.../0000000000000001.0001.nkr     its retention was extended
    manifests/ab/abcd.../0000000000000001.0002.nkr     extended again: a later time

A record is created exclusively and never changed, so that none shortens a retention. It is removed with its version.
"""

from __future__ import annotations

from collections.abc import Callable

from nearkin.errors import Corrupt, NotFound
from nearkin.formats.manifest import Manifest
from nearkin.formats.retention_record import RetentionRecord, decode_retention, encode_retention
from nearkin.store.objects import ObjectStore
from nearkin.store.parity import read_decoded

SUFFIX = ".nkr"


class RetentionRecords:
    """The retention records of one store."""

    def __init__(
        self, objects: ObjectStore, folder_of: Callable[[str, str], str], record_key: Callable[[], bytes | None]
    ) -> None:
        """`folder_of` returns the folder of a key's manifests; `record_key` authenticates records of a plain store."""
        self._objects = objects
        self._folder_of = folder_of
        self._record_key = record_key

    def name(self, tenant: str, key: str, version: int, sequence: int) -> str:
        """Return the object name of a record."""
        return f"{self._folder_of(tenant, key)}/{version:016x}.{sequence:04x}{SUFFIX}"

    def encode(self, record: RetentionRecord) -> bytes:
        """Return the bytes of a record as this store writes it. Raises BadInput."""
        return encode_retention(record, self._record_key())

    def write(self, record: RetentionRecord) -> None:
        """Write a record, durably. Raises AlreadyExists (another extension came first), StoreUnavailable."""
        name = self.name(record.tenant, record.key, record.version, record.sequence)
        self._objects.put_new(name, self.encode(record))

    def read(self, name: str) -> RetentionRecord:
        """Return the record under an object name. Raises NotFound, Corrupt, FormatTooNew, StoreUnavailable."""
        key = self._record_key()
        record = read_decoded(self._objects, name, lambda data, what: decode_retention(data, what, key))
        if self.name(record.tenant, record.key, record.version, record.sequence) != name:
            raise Corrupt(f"{name}: is record {record.sequence} of {record.key!r} version {record.version}")
        return record

    def delete(self, name: str) -> None:
        """Remove a record whose version ended. Repeating it changes nothing."""
        self._objects.delete(name)

    def retain_until_us(self, manifest: Manifest, sequence: int | None = None) -> int:
        """Return up to when a version must not be deleted, microseconds since 1970; 0 for no retention.

        `sequence`: of the version's last record as just listed, 0 for none; looked up by default, which costs one read
        of a name that does not exist if the retention was never extended. Raises Corrupt (a record does not verify: up
        to when is not known), StoreUnavailable.
        """
        tenant, key, version = manifest.tenant, manifest.key, manifest.version
        if sequence is None:
            sequence = self._last_sequence(tenant, key, version)
        if not sequence:
            return manifest.retain_until_us
        record = self.read(self.name(tenant, key, version, sequence))
        return max(manifest.retain_until_us, record.retain_until_us)

    def _last_sequence(self, tenant: str, key: str, version: int) -> int:
        try:
            self._objects.get(self.name(tenant, key, version, 1))
        except NotFound:
            return 0
        except Corrupt:  # the names say whether there is a later one
            pass
        start, found = f"{version:016x}.", [1]
        for name, _ in self._objects.names(self._folder_of(tenant, key)):
            last = name.rpartition("/")[2]
            if last.startswith(start) and last.endswith(SUFFIX):
                found.append(int(last[len(start) : -len(SUFFIX)], 16))
        return max(found)
