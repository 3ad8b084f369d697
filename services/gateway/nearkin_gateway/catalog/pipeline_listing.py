"""List the versions of the pipeline's store.

Invariant: a listing shows exactly the committed versions.

catalog complete      -> from the index, page by page: its entries hold every field of a listing
catalog in rebuild    -> from the manifests, each read once and cached: they are immutable
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from nearkin_shared.errors import NotFound, PermanentError, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.fleet.fleet_index import FleetIndex
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.results import Damage, Ledger, Stats
from nearkin_shared.stats import OtherObjects, sum_up
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.manifests import ManifestStore, marked_version

UNINDEXED_MAX = 50_000
"""Manifests that are listed without an index: some 15 MB remembered, and 20 s of reading at 2 ms each by 8 threads."""
READERS = 8
_log = logging.getLogger("nearkin.gateway")


class PipelineListing:
    """Listings and statistics for a gateway in front of the pipeline."""

    def __init__(self, index: FleetIndex, found: descriptor.Descriptor, objects: ObjectStore) -> None:
        self._index = index
        self._secret, self._bits = bytes.fromhex(found.secret), found.fingerprint_bits
        self._descriptor_bytes = chunking_record.descriptor_bytes(objects)
        self._manifests = ManifestStore(objects)
        self._read: dict[str, tuple[str, str, int] | None] = {}
        """(tenant, key, version) by name; None for an unreadable manifest. Replaced, never cleared: a concurrent
        listing may still read the old dictionary."""
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Return whether the index holds all that the store does."""
        return not self._index.check()

    @property
    def _has_catalog(self) -> bool:
        """Return whether the index lists every version, which is early in its recovery."""
        return self._index.has_catalog

    def catalog_after(
        self, tenant: str, prefix: str, after_key: str, after_version: int | None, count: int
    ) -> Iterator[CatalogEntry]:
        """Yield entries by key and version, after what was given. Raises StoreUnavailable.

        While the catalog is being made they have a key and a version alone.
        """
        if not self._has_catalog:
            found = after(iter(self._unindexed(tenant, prefix)), after_key, after_version)
            return (CatalogEntry(key, version, 0, 0.0, Ledger()) for key, version in found)
        self._read = {}
        return self._index.catalog_after(tenant, prefix, after_key, after_version, count)

    def marked_keys(self, tenant: str, prefix: str, from_key: str = "") -> Iterator[str]:
        """Yield the keys from `from_key` on with a tombstone, in order. Raises StoreUnavailable."""
        if self._has_catalog:
            entries = self._index.catalog_after(tenant, prefix, from_key, 0 if from_key else None)
            return (key for key, _ in groupby(entry.key for entry in entries if entry.sequence))
        return (key for key in self._unindexed_marked(tenant, prefix) if key >= from_key)

    def entries(self, tenant: str) -> Iterator[CatalogEntry]:
        """Yield the entry of each version by key and version; some are absent until `is_complete`."""
        return self._index.catalog(tenant)

    def stats(self, tenant: str) -> Stats:
        """Return a tenant's statistics from the index; too small until `is_complete`."""
        index = self._index.for_domain(Fingerprinter(self._secret, tenant, self._bits).domain)
        containers = list(index.containers())
        return sum_up(
            ((tenant, entry) for entry in index.catalog(tenant)),
            containers,
            sum(container.container_bytes for container in containers),
            OtherObjects(self._descriptor_bytes),
            index_bytes=0,
        )

    def _unindexed(self, tenant: str, prefix: str) -> list[tuple[str, int]]:
        with self._lock:
            names = [name for name, _ in self._manifests.names()]
            if len(names) > UNINDEXED_MAX:
                raise StoreUnavailable(
                    f"the index is being rebuilt, and {len(names)} versions are too many to list without it: "
                    "blobs can be read, listings come later"
                )
            read = self._read
            fresh = [name for name in names if name not in read]
            with ThreadPoolExecutor(READERS, "nearkin-listing") as threads:
                read.update(zip(fresh, threads.map(self._version_of, fresh), strict=True))
            found = [version for name in names if (version := read[name]) is not None]
        return sorted((key, version) for owner, key, version in found if owner == tenant and key.startswith(prefix))

    def _version_of(self, name: str) -> tuple[str, str, int] | None:
        """Return (tenant, key, version), or None (no tenant known) for an unreadable manifest."""
        try:
            manifest = self._manifests.read(name)
        except NotFound:  # collected meanwhile
            return None
        except PermanentError as err:
            _log.error("version not listed until the index is rebuilt: %s", err)
            return None
        return manifest.tenant, manifest.key, manifest.version

    def _unindexed_marked(self, tenant: str, prefix: str) -> list[str]:
        """Return them from the marks themselves, the first of each version."""
        _, marks = self._manifests.names_and_marks()
        first = {marked_version(name)[0]: name for name, _ in reversed(marks)}
        if len(first) > UNINDEXED_MAX:
            raise StoreUnavailable(
                f"the index is being rebuilt, and {len(first)} deletions are too many to list without it"
            )
        with ThreadPoolExecutor(READERS, "nearkin-listing") as threads:
            found = list(threads.map(self._owner_of, first.values()))
        return sorted({key for owner, key in filter(None, found) if owner == tenant and key.startswith(prefix)})

    def _owner_of(self, name: str) -> tuple[str, str] | None:
        try:
            mark = self._manifests.read_mark(name)
        except NotFound:
            return None
        except PermanentError as err:
            _log.error("version not listed until the index is rebuilt: %s", err)
            return None
        return mark.tenant, mark.key


def damaged_json(damaged: Iterable[Damage]) -> list[dict[str, object]]:
    """Return what could not be read as JSON has it."""
    return [
        {"key": key, "version": version, "object_name": damage.object_name, "problem": damage.problem}
        for damage in damaged
        for key, version in damage.versions
    ]


def after(entries: Iterator[tuple[str, int]], key: str, version: int | None) -> Iterator[tuple[str, int]]:
    """Yield what comes after a key, or after one version of it."""
    if version is None:
        return (entry for entry in entries if entry[0] > key)
    return (entry for entry in entries if entry > (key, version))
