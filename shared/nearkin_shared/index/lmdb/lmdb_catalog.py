"""Catalog of an LMDB index: versions and their marks.

versions    tenant 8, key..., version 8 -> manifest's bytes, ledger, times: plain or encrypted (version_entries.py)
meta        "mark" + key of versions    -> highest mark 4, bytes of all marks 8
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import CatalogEntry, entry_of
from nearkin_shared.index.lmdb.entry_encoding import (
    KEY_HEAD_BYTES,
    MARK_HEAD,
    MARKED,
    decode_version,
    delete_keys_under,
    marks_under,
    parse_version,
    version_fields,
)
from nearkin_shared.index.lmdb.lmdb_transactions import LmdbTransactions
from nearkin_shared.index.lmdb.version_entries import EntryNames
from nearkin_shared.index.protocols import CollectedVersion, MarkedVersion
from nearkin_shared.tenant_names import collision_of

Row = tuple[bytes, bytes, bytes]
"""Key and value of a version, and its packed marks."""
ENTRIES_A_PAGE = 1024
ENTRIES_FIRST_MIN = 16
"""Least number of entries read at once: a key may have several versions."""
VERSION_MAX = (1 << 64) - 1
NO_MARKS = MARKED.pack(0, 0)


class LmdbCatalog(LmdbTransactions):
    """Versions of all tenants in an LMDB index.

    `names` translates the names of versions to keys and values.
    """

    def __init__(
        self, folder: Path, map_bytes: int, names: EntryNames, *, read_only: bool = False, durable: bool = True
    ) -> None:
        super().__init__(folder, map_bytes, read_only=read_only, durable=durable)
        self._names = names

    def commit(self, manifest: Manifest, manifest_bytes: int) -> None:
        """Add a version to the catalog, once, in one transaction."""
        self.commit_many([(manifest, manifest_bytes)])

    def commit_many(self, versions: Sequence[tuple[Manifest, int]]) -> None:
        """Add versions, each with its manifest's size in bytes, in one transaction."""
        self.add_entries([(manifest.tenant, entry_of(manifest, size_bytes)) for manifest, size_bytes in versions])

    def add_entries(self, entries: Sequence[tuple[str, CatalogEntry]]) -> None:
        """Add versions of (tenant, entry without marks), in one transaction."""
        with self._writing() as txn:
            for tenant, entry in entries:
                key = self._names.version_key(tenant, entry.key, entry.version)
                value = self._names.encode(key, {"tenant": tenant, **version_fields(entry)})
                txn.put(key, value, db=self._versions, overwrite=False)

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Remove versions from the catalog, in one transaction."""
        with self._writing() as txn:
            for version in versions:
                key = self._names.version_key(version.tenant, version.key, version.version)
                name = MARK_HEAD + key
                if version.marks_bytes:
                    txn.put(name, MARKED.pack(version.sequence, version.marks_bytes), db=self._meta)
                else:
                    txn.delete(name, db=self._meta)
                if self._is_listed(txn, key, version.tenant):
                    txn.delete(key, db=self._versions)

    def withdraw_tenants(self, tenants: Collection[str]) -> None:
        """Remove the versions and marks of tenants, in one transaction."""
        with self._writing() as txn:
            for tenant in tenants:
                head = self._names.tenant_head(tenant)
                owners = list(self._owners_under(txn, head))
                if all(owner == tenant for _, owner in owners):
                    delete_keys_under(txn, self._versions, head)
                    delete_keys_under(txn, self._meta, MARK_HEAD + head)
                    continue
                for key in (key for key, owner in owners if owner == tenant):
                    txn.delete(key, db=self._versions)
                    txn.delete(MARK_HEAD + key, db=self._meta)

    def check_owner(self, tenant: str) -> None:
        """Refuse a tenant whose hash only another tenant's versions have.

        Raises: TenantCollision.
        """
        with self._reading() as txn:
            first = next((owner for _, owner in self._owners_under(txn, self._names.tenant_head(tenant))), tenant)
            if first != tenant and not any(
                owner == tenant for _, owner in self._owners_under(txn, self._names.tenant_head(tenant))
            ):
                raise collision_of(tenant, "the index")

    def _owners_under(self, txn: Any, head: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield (key in `versions`, tenant) of all keys that start with `head`.

        Tenants may share a hash.
        """
        cursor = txn.cursor(self._versions)
        if cursor.set_range(head):
            for key, value in cursor:
                if not key.startswith(head):
                    return
                yield bytes(key), self._names.decode(key, value)["tenant"]

    def _is_listed(self, txn: Any, key: bytes, tenant: str) -> bool:
        """Return whether the catalog has a version under its own tenant.

        Another tenant may have the same hash.
        """
        value = txn.get(key, db=self._versions)
        return value is not None and self._names.decode(key, value)["tenant"] == tenant

    def mark_many(self, marks: Sequence[MarkedVersion]) -> None:
        """Record the marks of versions in one transaction; the highest wins.

        The version need not be in the catalog.
        """
        with self._writing() as txn:
            for mark in marks:
                name = MARK_HEAD + self._names.version_key(mark.tenant, mark.key, mark.version)
                if (mark.sequence, mark.marks_bytes) > MARKED.unpack(txn.get(name, NO_MARKS, db=self._meta)):
                    txn.put(name, MARKED.pack(mark.sequence, mark.marks_bytes), db=self._meta)

    def correct_marks(self, marks: Sequence[MarkedVersion]) -> None:
        """Replace the recorded marks by the given ones, lower or not; 0 and no bytes remove them."""
        with self._writing() as txn:
            for mark in marks:
                name = MARK_HEAD + self._names.version_key(mark.tenant, mark.key, mark.version)
                if mark.sequence or mark.marks_bytes:
                    txn.put(name, MARKED.pack(mark.sequence, mark.marks_bytes), db=self._meta)
                else:
                    txn.delete(name, db=self._meta)

    def versions_of(self, tenant: str, key: str) -> list[int]:
        """Return the version numbers of a key, ascending.

        The first and last are not those of another tenant with the same hash.
        """
        start = self._names.version_key(tenant, key, 0)
        found: deque[bytes] = deque()
        with self._reading() as txn:
            cursor = txn.cursor(self._versions)
            if cursor.set_range(start):
                for entry in cursor.iternext(keys=True, values=False):
                    if not entry.startswith(start[:-8]):
                        break
                    found.append(entry)
            # Only at the ends: comparing the tenant of each of 30,000 versions would take 0.2 s.
            while found and not self._is_listed(txn, found[-1], tenant):
                found.pop()
            while found and not self._is_listed(txn, found[0], tenant):
                found.popleft()
        return [int.from_bytes(entry[-8:], "big") for entry in found]

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version."""
        found = self._read_versions(self._names.prefix_head(tenant, prefix))
        matching = [entry for owner, entry in found if owner == tenant and entry.key.startswith(prefix)]
        matching.sort(key=lambda entry: (entry.key.encode(), entry.version))
        return iter(matching)

    def catalogs(self) -> Iterator[tuple[str, CatalogEntry]]:
        """Yield (tenant, version) of all tenants, in no particular order."""
        return iter(self._read_versions(b""))

    def _read_versions(self, head: bytes) -> list[tuple[str, CatalogEntry]]:
        found = []
        with self._reading() as txn:
            marks = dict(marks_under(txn, self._meta, head))
            cursor = txn.cursor(self._versions)
            if cursor.set_range(head) if head else cursor.first():
                for key, value in cursor:
                    if not key.startswith(head):
                        break
                    row = parse_version(key, self._names.text(key, value))
                    found.append((row.tenant, decode_version(row, MARKED.unpack(marks.get(key, NO_MARKS)))))
        return found

    def version_names(self, keys: Collection[bytes]) -> dict[bytes, tuple[str, str, int]]:
        """Return (tenant, key, version) of each key of a snapshot that is still listed."""
        found = {}
        with self._reading() as txn:
            for key in keys:
                value = txn.get(key, db=self._versions)
                if value is not None:
                    row = parse_version(key, self._names.text(key, value))
                    found[key] = row.tenant, row.key, row.version
        return found

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = ENTRIES_A_PAGE
    ) -> Iterator[CatalogEntry]:
        """Yield the entries of `catalog` after `key`; with `version`, after that version of it.

        Reads about `count` entries at a time. Under encrypted names it reads all of the tenant's.
        """
        position = (key.encode(), VERSION_MAX if version is None else version)
        first = self._names.group_head(tenant, max(prefix, key))
        if first is None:
            yield from (entry for entry in self.catalog(tenant, prefix) if not key or _order(entry) > position)
            return
        head = self._names.tenant_head(tenant)
        start, group, group_rows = first if key > prefix else first[:-1], b"", list[Row]()
        count = max(ENTRIES_FIRST_MIN, min(count, ENTRIES_A_PAGE))
        while True:
            page = self._rows_from(head, start, count)
            for row in page:
                group_of_row = row[0][: row[0].index(b"\0", len(head)) + 1]
                if group_of_row != group:
                    yield from self._select(group_rows, tenant, prefix, key, position)
                    group, group_rows = group_of_row, []
                group_rows.append(row)
            if len(page) < count or (group_rows and not self._may_follow(group, head, prefix)):
                yield from self._select(group_rows, tenant, prefix, key, position)
                return
            start, count = page[-1][0] + b"\0", ENTRIES_A_PAGE

    @staticmethod
    def _may_follow(group: bytes, head: bytes, prefix: str) -> bool:
        """Return whether this or a later group may have keys that start with `prefix`."""
        start = prefix.encode().partition(b"\0")[0][:KEY_HEAD_BYTES]
        return group[len(head) :][: len(start)] <= start

    def _rows_from(self, head: bytes, start: bytes, count: int) -> list[Row]:
        """Return up to `count` keys, values and marks of a tenant's versions, from `start` on."""
        found: list[Row] = []
        with self._reading() as txn:
            cursor = txn.cursor(self._versions)
            any_marks = next(marks_under(txn, self._meta, head), None) is not None
            if cursor.set_range(max(head, start)):
                for key, value in cursor:
                    if len(found) == count or not key.startswith(head):
                        break
                    mark = txn.get(MARK_HEAD + key, NO_MARKS, db=self._meta) if any_marks else NO_MARKS
                    found.append((key, value, mark))
        return found

    def _select(
        self, rows: Sequence[Row], tenant: str, prefix: str, key: str, position: tuple[bytes, int]
    ) -> list[CatalogEntry]:
        """Return the matching entries of one group, by key and version."""
        matching = []
        for name, value, mark in rows:
            row = parse_version(name, self._names.text(name, value))
            if row.tenant == tenant and row.key.startswith(prefix):
                entry = decode_version(row, MARKED.unpack(mark))
                if not key or _order(entry) > position:
                    matching.append(entry)
        return sorted(matching, key=_order) if len(matching) > 1 else matching

    def manifest_names(self, tenant: str, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (key, version) of all versions whose key starts with `prefix`, by key and version."""
        return ((entry.key, entry.version) for entry in self.catalog(tenant, prefix))


def _order(entry: CatalogEntry) -> tuple[bytes, int]:
    return entry.key.encode(), entry.version
