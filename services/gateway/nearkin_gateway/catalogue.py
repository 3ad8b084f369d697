"""What is stored, for readers. Invariant: a tenant sees its own; all else is NotFound (I9).

manifests and containers come from the object store; the index is asked for listings and sums alone. All calls block:
they belong on a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from nearkin.config import Settings
from nearkin.errors import BadInput, NotFound, Permanent
from nearkin.explain import explain
from nearkin.fingerprints import Fingerprinter
from nearkin.formats.manifest import Manifest
from nearkin.records import Damage, Explanation, Stats, VersionInfo
from nearkin.restore import Blob
from nearkin.sources import check_key
from nearkin.store import descriptor
from nearkin.store.containers import ContainerStore
from nearkin.store.manifests import ManifestStore, object_name
from nearkin.store.objects import ObjectStore

TENANTS_OPEN_MAX = 8
"""Tenants whose containers are cached; each has 48 MiB of directories and its share of restore.cache_bytes."""
BLOCK_CACHE_BYTES_MIN = 8 * 1024 * 1024
STATS_SECONDS = 2.0
"""Sums are made again after this long at the earliest: they read all of an index."""
EXPLAINED_CHUNKS_MAX = 200_000
"""About 1.6 GB of a blob, and 60 MB of JSON with its segments."""
LISTED_MAX = 1000
_log = logging.getLogger("nearkin.gateway")


class Listing(Protocol):
    """What is asked of an index; by tenant."""

    @property
    def whole(self) -> bool:
        """Return whether its sums are those of the whole store."""

    def versions(
        self, tenant: str, prefix: str, after_key: str, after_version: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield (key, version), by key and version, of keys that start with `prefix`.

        Only keys that sort after `after_key`, and where a version is given that key's later ones too.
        """

    def stats(self, tenant: str) -> Stats:
        """Return the sums."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Versions, and those that should be among them but cannot be read."""

    found: list[VersionInfo]
    damaged: list[Damage]


@dataclass(frozen=True, slots=True)
class _Tenant:
    fingerprinter: Fingerprinter
    containers: ContainerStore


class Catalogue:
    """Reads blobs of any tenant. Safe between threads."""

    def __init__(
        self, objects: ObjectStore, found: descriptor.Descriptor, settings: Settings, listing: Listing
    ) -> None:
        self._objects = objects
        self._descriptor = found
        self._settings = settings
        self._listing = listing
        self._manifests = ManifestStore(objects)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._stats: OrderedDict[str, tuple[float, Stats]] = OrderedDict()
        self._lock = threading.Lock()
        self._cache_bytes = max(BLOCK_CACHE_BYTES_MIN, int(settings.restore.cache_bytes) // 4)

    def manifest(self, tenant: str, key: str, version: int | None = None) -> Manifest:
        """Return a version's manifest, the newest by default. Raises NotFound, Corrupt, StoreUnavailable."""
        check_key(key)
        if version is None:
            version = max(self._manifests.versions(tenant, key), default=0)
            if not version:
                raise NotFound(f"key {key!r}: there is none")
        try:
            return self._manifests.get(tenant, key, version)
        except NotFound as err:
            raise NotFound(f"key {key!r} version {version}: there is none") from err

    def blob(self, tenant: str, manifest: Manifest, start: int, stop: int) -> Blob:
        """Return the bytes [start, stop) of a version, verified piece by piece."""
        mine = self._tenant(tenant)
        return Blob(manifest.info, manifest, mine.containers, mine.fingerprinter, start, stop)

    def versions(self, tenant: str, key: str, after: int, limit: int) -> tuple[Listed, int | None]:
        """Return versions of a key above `after`, oldest first, and the `after` for more. Raises NotFound."""
        check_key(key)
        numbers = self._manifests.versions(tenant, key)
        if not numbers:
            raise NotFound(f"key {key!r}: there is none")
        wanted = [number for number in numbers if number > after]
        found = self._infos(tenant, [(key, number) for number in wanted[:limit]])
        return found, wanted[limit - 1] if len(wanted) > limit else None

    def listed(
        self, tenant: str, prefix: str, after: str, limit: int, *, all_versions: bool
    ) -> tuple[Listed, str | None]:
        """Return up to `limit` versions by key, the newest of each key or all, and what to say for more.

        `after` is a key, or a key, NUL and a version, which is what is said for more of all versions.
        """
        after_key, _, number = after.partition("\0")
        after_version = int(number) if number.isascii() and number.isdigit() else None
        entries = iter(self._listing.versions(tenant, prefix, after_key, after_version))
        if not all_versions:
            entries = (max(same) for _, same in groupby(entries, key=lambda entry: entry[0]))
        wanted = list(islice(entries, limit + 1))
        found = self._infos(tenant, wanted[:limit])
        if len(wanted) <= limit:
            return found, None
        key, version = wanted[limit - 1]
        return found, f"{key}\0{version}" if all_versions else key

    def _infos(self, tenant: str, versions: Sequence[tuple[str, int]]) -> Listed:
        """Return what is known of versions; one that is lost or broken is named apart."""
        found: list[VersionInfo] = []
        damaged: list[Damage] = []
        for key, version in versions:
            name = object_name(tenant, key, version)
            try:
                found.append(self._manifests.get(tenant, key, version).info)
            except Permanent as err:
                _log.error("%s: %s", name, err)
                damaged.append(Damage(name, str(err), ((key, version),)))
        return Listed(found, damaged)

    def explain(self, tenant: str, key: str, version: int | None) -> Explanation:
        """Return how each chunk of a version is kept. Raises NotFound, Corrupt, BadInput where it has too many."""
        manifest = self.manifest(tenant, key, version)
        if manifest.ledger.chunks > EXPLAINED_CHUNKS_MAX:
            raise BadInput(
                f"key {key!r}: {manifest.ledger.chunks} chunks are too many to explain over HTTP (at most "
                f"{EXPLAINED_CHUNKS_MAX}); run `nearkin explain` on the store"
            )
        return explain(manifest.info, manifest, self._tenant(tenant).containers)

    def stats(self, tenant: str) -> Stats:
        """Return the sums, at most STATS_SECONDS old."""
        with self._lock:
            made, kept = self._stats.get(tenant, (0.0, None))
        if kept is not None and time.monotonic() - made < STATS_SECONDS:
            return kept
        fresh = self._listing.stats(tenant)
        with self._lock:
            self._stats[tenant] = (time.monotonic(), fresh)
            self._stats.move_to_end(tenant)
            if len(self._stats) > TENANTS_OPEN_MAX:
                self._stats.popitem(last=False)
        return fresh

    @property
    def whole(self) -> bool:
        """Return whether the sums are those of the whole store."""
        return self._listing.whole

    def check(self) -> None:
        """Raise where the object store does not answer."""
        self._objects.size_bytes(descriptor.NAME)

    def _tenant(self, name: str) -> _Tenant:
        with self._lock:
            found = self._tenants.get(name)
            if found is None:
                fingerprinter = Fingerprinter(
                    bytes.fromhex(self._descriptor.secret), name, self._descriptor.fingerprint_bits
                )
                found = _Tenant(fingerprinter, ContainerStore(self._objects, fingerprinter.domain, self._cache_bytes))
                self._tenants[name] = found
                if len(self._tenants) > TENANTS_OPEN_MAX:
                    self._tenants.popitem(last=False)
            self._tenants.move_to_end(name)
            return found
