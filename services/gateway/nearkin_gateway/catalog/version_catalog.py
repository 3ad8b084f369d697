"""Read the versions of a tenant.

Invariant (I9): a tenant sees its own versions only; every other is NotFound.

Manifests and containers are read from the object store, listings and statistics from the index. All calls block:
run them on a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice, takewhile
from typing import Protocol

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, Corrupt, NotFound, StoreUnavailable
from nearkin_shared.explain import explain
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.objectstore.base import ObjectStore, check_tenant
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.results import Damage, Deletion, Explanation, Stats, VersionInfo
from nearkin_shared.storage import descriptor
from nearkin_shared.storage.containers import ContainerStore, DamageListener
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import MANIFEST_SUFFIX, ManifestStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubState, ScrubStates
from nearkin_shared.storage.version_listing import check_newest, infos_of, missing_version, visible_version
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import check_key, is_reserved_key

TENANTS_OPEN_MAX = 8
"""Tenants whose fingerprinters are kept; all read through the same caches of directories and of decoded blocks."""
STATS_SECONDS = 2.0
"""Sums are made again after this long at the earliest: they read all of an index."""
STATS_SHARE = 0.05
"""Sums that take longer than STATS_COSTLY_SECONDS use at most this share of a core, however often they are asked."""
STATS_COSTLY_SECONDS = 0.05
EXPLAINED_CHUNKS_MAX = 200_000
"""About 1.6 GB of a blob, and 60 MB of JSON with its segments."""
LISTED_MAX = 1000
PAGE_BYTES_MAX = 4 * 1024 * 1024
"""Of keys and metadata on one page, and the entry that passes it: 1000 versions may have 64 KiB of metadata each."""
VERSION_MAX = (1 << 63) - 1
READERS = 8
"""Manifests of all pages are read so many at a time: an S3 server answers each in some 2 ms."""
READ_AHEAD = 64
INDEXED_A_PAGE = 1000
"""Index entries of one key that are read together."""
EXAMINED_MAX = 10_000
"""Keys, or versions, that one page looks at, should they be deleted: some 5 s of an S3 server."""
_log = logging.getLogger("nearkin.gateway")


class CatalogQueries(Protocol):
    """The queries by tenant that an index answers."""

    @property
    def is_complete(self) -> bool:
        """Return whether its sums are those of the whole store."""

    def catalog_after(
        self, tenant: str, prefix: str, after_key: str, after_version: int | None, count: int
    ) -> Iterator[CatalogEntry]:
        """Yield what is kept of versions, by key and version, of keys that start with `prefix`.

        Only of keys that sort after `after_key`, and where a version is given of that key's later ones too. About
        `count` are wanted: few are read where few are.
        """

    def marked_keys(self, tenant: str, prefix: str, from_key: str = "") -> Iterator[str]:
        """Yield the keys from `from_key` on that may have a deleted version, by key."""

    def stats(self, tenant: str) -> Stats:
        """Return the sums."""

    def entries(self, tenant: str) -> Iterator[CatalogEntry]:
        """Yield what is kept of every version, deleted ones too, by key and version."""


@dataclass(slots=True)
class ListedVersions:
    """Versions, and those that should be among them but cannot be read."""

    found: list[VersionInfo] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    size_bytes: int = 0
    """Of what callers named, about: characters."""

    @property
    def full(self) -> bool:
        """Return whether no more should go on the same page."""
        return self.size_bytes >= PAGE_BYTES_MAX

    def __len__(self) -> int:
        return len(self.found) + len(self.damaged)

    def add(self, entry: VersionInfo | Damage) -> None:
        """Add what a listing shows."""
        if isinstance(entry, Damage):
            _log.error("%s: %s", entry.object_name, entry.problem)
            self.damaged.append(entry)
        else:
            self.found.append(entry)
            self.size_bytes += len(entry.key) + sum(len(name) + len(value) for name, value in entry.metadata.items())


@frozen
class _Tenant:
    fingerprinter: Fingerprinter
    containers: ContainerStore


class VersionCatalog:
    """Reads blobs of any tenant. Safe between threads."""

    def __init__(
        self, objects: ObjectStore, found: descriptor.Descriptor, settings: Settings, listing: CatalogQueries
    ) -> None:
        self._objects = objects
        self._descriptor = found
        self._settings = settings
        self._listing = listing
        self._manifests = ManifestStore(objects)
        self._heads = VersionHeads(objects)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._stats: OrderedDict[str, _CachedStats] = OrderedDict()
        self._lock = threading.Lock()
        self._summing = threading.Lock()
        """Held while sums are made: they list every container, and many may ask at once."""
        self._readers = ThreadPoolExecutor(READERS, "nearkin-catalogue")
        # One cache for all tenants: a quarter of it for each of up to eight decoded most bases again and again.
        self._containers = ContainerStore(objects, domain_of(settings.tenant), int(settings.restore.cache_bytes))

    def report_damage_to(self, listener: DamageListener) -> None:
        """Call `listener` with each read error; before the first read."""
        self._containers.on_damage = listener

    def close(self) -> None:
        """Stop the threads for parallel reads; blobs returned before can still be read."""
        self._readers.shutdown(cancel_futures=True)

    def manifest(self, tenant: str, key: str, version: int | None = None) -> Manifest:
        """Return a manifest, of the newest version by default.

        Raises NotFound, Corrupt, StoreUnavailable.
        """
        check_key(key)
        if version is None:
            newest = self._manifests.newest(tenant, key)
            seen = 0 if newest is None else newest.version
            check_newest(self._manifests, tenant, key, newest, lambda: self._later_versions(tenant, key, seen))
            self._heads.check(self._manifests, tenant, key, seen)
            if newest is None:
                raise NotFound(f"key {key!r}: there is none")
            return newest
        self._heads.check_marks(self._manifests, tenant, key, version)
        try:
            return self._manifests.read_visible(tenant, key, version)
        except NotFound as err:
            raise NotFound(f"key {key!r} version {version}: there is none") from err

    def info(self, tenant: str, key: str, version: int | None = None) -> VersionInfo:
        """Return the info of a version with its latest retention. Raises as `manifest` does."""
        return self._manifests.info(self.manifest(tenant, key, version))

    def _indexed_versions(self, tenant: str, key: str) -> list[int]:
        """Return the versions of a key that the index lists; none while the index is incomplete."""
        return [entry.version for entry in self._entries_of(tenant, key)] if self._listing.is_complete else []

    def _entries_of(self, tenant: str, key: str) -> Iterator[CatalogEntry]:
        """Yield the index entries of a key, read INDEXED_A_PAGE at a time."""
        listed = self._listing.catalog_after(tenant, key, key, 0, INDEXED_A_PAGE)
        return takewhile(lambda entry: entry.key == key, listed)

    def _later_versions(self, tenant: str, key: str, version: int) -> list[int]:
        """Return the indexed versions of a key above `version`; none until the index is complete."""
        if not self._listing.is_complete:
            return []
        listed = self._listing.catalog_after(tenant, key, key, version, 1)
        return [entry.version for entry in takewhile(lambda entry: entry.key == key, listed)]

    def blob(self, tenant: str, manifest: Manifest, start: int, stop: int) -> VersionReader:
        """Return the bytes [start, stop) of a version, verified piece by piece."""
        mine = self._tenant(tenant)
        return VersionReader(manifest.info, manifest, mine.containers.counting(), mine.fingerprinter, start, stop)

    def versions(self, tenant: str, key: str, after: int, limit: int) -> tuple[ListedVersions, int | None]:
        """Return versions of a key above `after`, oldest first, and the next `after`.

        Raises NotFound.
        """
        check_key(key)
        indexed = self._indexed_versions(tenant, key)  # before the folder: a version of a later put is in both
        histories = self._manifests.histories(tenant, key)
        lost = {number for number in indexed if number not in histories or histories[number].is_lost}
        lost &= set(self._indexed_versions(tenant, key)) if lost else lost  # GC may have removed a version meanwhile
        numbers = {number for number, history in histories.items() if self._manifests.shows(tenant, key, history)}
        if not numbers | lost:
            raise NotFound(f"key {key!r}: there is none")
        wanted = sorted(number for number in numbers | lost if number > after)
        found = ListedVersions()
        for taken, version in enumerate(wanted[:limit], 1):
            if version in lost:
                found.add(missing_version(tenant, key, version))
            else:
                for entry in infos_of(self._manifests, tenant, key, [histories[version]]):
                    found.add(entry)
            if (taken == limit or found.full) and taken < len(wanted):
                return found, version
        return found, None

    def list_versions(
        self, tenant: str, prefix: str, after: str, limit: int, *, all_versions: bool
    ) -> tuple[ListedVersions, str | None]:
        """Return up to `limit` versions by key, newest or all, and the cursor of the next page.

        A page ends early after EXAMINED_MAX keys or versions, most of them deleted.
        `after`: a key, or in listings of all versions a key, NUL and a version.
        """
        check_tenant(self._objects, tenant)
        after_key, after_version = _after(after)
        # One extra entry shows that there is a next page; a second shows that the last key has no further version.
        entries = self._listing.catalog_after(tenant, prefix, after_key, after_version, limit + 2)
        listed = (entry for entry in entries if not is_reserved_key(entry.key))
        wanted = _units(listed, all_versions=all_versions)
        found, last, examined = ListedVersions(), after, 0
        while some := list(islice(wanted, min(limit + 1 - len(found), READ_AHEAD))):
            for unit, entry in zip(some, self._shown(tenant, some, all_versions=all_versions), strict=True):
                if entry is not None:
                    if len(found) == limit or found.full:
                        return found, last
                    found.add(entry)
                last = f"{unit[-1].key}\0{unit[-1].version}" if all_versions else unit[-1].key
            examined += len(some)
            if examined >= EXAMINED_MAX:
                return found, last
        return found, None

    def _shown(
        self, tenant: str, some: Sequence[Sequence[CatalogEntry]], *, all_versions: bool
    ) -> Iterator[VersionInfo | Damage | None]:
        """Yield what a listing shows of each unit, in order.

        The index is notified of a mark or retention record before that is written, so of a version without any it
        knows all.
        A folder of a local store is listed too: a version whose manifest is missing there is damaged.
        Manifests are read of the others, and of those of which the index keeps too little.
        """
        read = partial(visible_version, self._manifests, tenant, all_versions=all_versions)
        waiting: list[VersionInfo | Future[VersionInfo | Damage | None]] = []
        folders = self._manifests.folder_files(tenant, [unit[-1].key for unit in some])
        for unit, (_, files) in zip(some, folders, strict=True):
            is_missing = files is not None and f"{unit[-1].version:016x}{MANIFEST_SUFFIX}" not in files
            info = None if is_missing or unit[-1].has_records else unit[-1].info
            if info is None:
                names = unit[-1].key, tuple(entry.version for entry in unit)
                waiting.append(self._readers.submit(read, names))
            else:
                waiting.append(info)
        for entry in waiting:
            yield entry.result() if isinstance(entry, Future) else entry

    def list_deleted(
        self, deletions: Deletions, tenant: str, prefix: str, after: str, limit: int
    ) -> tuple[list[Deletion], list[Damage], str | None]:
        """Return up to `limit` deletions by key, unreadable versions, and the next cursor.

        A page ends early after EXAMINED_MAX keys.
        """
        check_tenant(self._objects, tenant)
        after_key, after_version = _after(after)
        found: list[Deletion] = []
        damaged: list[Damage] = []
        entries = partial(self._entries_of, tenant)
        examined = 0
        for key in self._listing.marked_keys(tenant, prefix, after_key):
            if is_reserved_key(key) or (key == after_key and after_version is None):
                continue
            for entry in deletions.list_deleted(tenant, [key], damaged.append, entries=entries):
                if key == after_key and after_version is not None and entry.version <= after_version:
                    continue
                if len(found) == limit:
                    return found, damaged, f"{found[-1].key}\0{found[-1].version}"
                found.append(entry)
            examined += 1
            if examined >= EXAMINED_MAX:
                return found, damaged, key
        return found, damaged, None

    def forget_stats(self, tenant: str) -> None:
        """Discard the cached statistics, because this gateway changed the store.

        The next call of `stats` computes them again as soon as STATS_SHARE allows.
        """
        with self._lock:
            kept = self._stats.get(tenant)
            if kept is not None:
                self._stats[tenant] = replace(kept, changed=True)

    def explain(self, tenant: str, key: str, version: int | None) -> Explanation:
        """Return how each chunk of a version is stored.

        Raises NotFound, Corrupt, BadInput (it has too many chunks).
        """
        manifest = self.manifest(tenant, key, version)
        if manifest.ledger.chunks > EXPLAINED_CHUNKS_MAX:
            raise BadInput(
                f"key {key!r}: {manifest.ledger.chunks} chunks are too many to explain over HTTP (at most "
                f"{EXPLAINED_CHUNKS_MAX}); run `nearkin explain` on the store"
            )
        return explain(manifest.info, manifest, self._tenant(tenant).containers)

    def stats(self, tenant: str) -> Stats:
        """Return the statistics of a tenant, at most STATS_SECONDS old.

        Older where computing them would take more than STATS_SHARE of the time.
        """
        kept = self._kept_stats(tenant)
        if kept is not None:
            return kept
        with self._summing:
            kept = self._kept_stats(tenant)  # another made them meanwhile
            if kept is not None:
                return kept
            return self._sum_up(tenant)

    def recount(self, tenant: str, *, needs_whole: bool) -> tuple[Stats, bool]:
        """Return the statistics of a tenant, computed now, and whether they are whole.

        Then they have every version that was committed before the call; while the index is rebuilt they are too small.
        Raises StoreUnavailable, also where they are not whole and `needs_whole`.
        """
        with self._summing:
            is_whole = self._listing.is_complete
            if is_whole or not needs_whole:
                stats = self._sum_up(tenant)
                # Asked again: a rebuild that began meanwhile has removed what was not read yet.
                is_whole = is_whole and self._listing.is_complete
                if is_whole or not needs_whole:
                    return stats, is_whole
        raise StoreUnavailable(
            f"the index is being rebuilt: the bytes that tenant {tenant!r} has stored are not known, and its "
            "quotas need them; uploads are taken again when the rebuild has ended"
        )

    def _sum_up(self, tenant: str) -> Stats:
        began = time.monotonic()
        fresh = self._listing.stats(tenant)
        with self._lock:
            self._stats[tenant] = _CachedStats(fresh, began, time.monotonic())
            self._stats.move_to_end(tenant)
            if len(self._stats) > TENANTS_OPEN_MAX:
                self._stats.popitem(last=False)
        return fresh

    def _kept_stats(self, tenant: str) -> Stats | None:
        with self._lock:
            kept = self._stats.get(tenant)
        return kept.stats if kept is not None and kept.is_fresh(time.monotonic()) else None

    def entries(self, tenant: str) -> Iterator[CatalogEntry]:
        """Yield what the index keeps of every version, deleted ones too, by key and version."""
        return self._listing.entries(tenant)

    def created_us(self, tenant: str, names: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the commit time of each (key, version), microseconds since 1970.

        None for an unreadable version.
        """

        def created(name: tuple[str, int]) -> int | None:
            try:
                return self._manifests.get(tenant, *name).created_us
            except (NotFound, Corrupt):
                return None  # collected since, or damaged: listings name it

        return list(self._readers.map(created, names))

    @property
    def secret(self) -> bytes:
        """Return the store's secret, which keys what gateways sign."""
        return bytes.fromhex(self._descriptor.secret)

    @property
    def is_complete(self) -> bool:
        """Return whether the sums are those of the whole store."""
        return self._listing.is_complete

    def scrub(self) -> tuple[ScrubState, dict[int, PendingDelete]]:
        """Return how far scrubbing has come, and what is quarantined by container."""
        return ScrubStates(self._objects).read(), Quarantine(self._objects, time.time).read()

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased where a tenant was. Raises StoreUnavailable."""
        check_tenant(self._objects, tenant)

    def check(self) -> None:
        """Raise where the object store does not answer."""
        try:
            self._objects.size_bytes(descriptor.NAME)
        except NotFound as err:
            raise StoreUnavailable(f"{descriptor.NAME}: not found; restore it from a copy of the store") from err

    def _tenant(self, name: str) -> _Tenant:
        with self._lock:
            found = self._tenants.get(name)
            if found is None:
                fingerprinter = Fingerprinter(
                    bytes.fromhex(self._descriptor.secret), name, self._descriptor.fingerprint_bits
                )
                found = _Tenant(fingerprinter, self._containers.of(fingerprinter.domain))
                self._tenants[name] = found
                if len(self._tenants) > TENANTS_OPEN_MAX:
                    self._tenants.popitem(last=False)
            self._tenants.move_to_end(name)
            return found


@dataclass(frozen=True, slots=True)
class _CachedStats:
    """Sums of one tenant and when they were made, in seconds of the monotonic clock."""

    stats: Stats
    began: float
    ended: float
    changed: bool = False
    """This gateway has stored or deleted a version since."""

    def is_fresh(self, now: float) -> bool:
        """Return whether the sums are returned again instead of being made again."""
        took = self.ended - self.began
        if took > STATS_COSTLY_SECONDS and now - self.ended < took / STATS_SHARE:
            return True
        return not self.changed and now - self.ended < STATS_SECONDS


def _units(entries: Iterator[CatalogEntry], *, all_versions: bool) -> Iterator[list[CatalogEntry]]:
    """Yield what one line of a listing is made of: a version, or all versions of a key."""
    if all_versions:
        return ([entry] for entry in entries)
    return (list(same) for _, same in groupby(entries, key=lambda entry: entry.key))


def _after(after: str) -> tuple[str, int | None]:
    """Split a cursor into its key and, if present, its version."""
    key, _, number = after.partition("\0")
    return key, min(int(number), VERSION_MAX) if number.isascii() and number.isdigit() else None
