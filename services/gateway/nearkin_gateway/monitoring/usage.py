"""Report the stored bytes by prefix and over time.

Invariant: all shares add up to the stored bytes; the state is bounded and in memory, so any gateway shows the same.

Versions share blocks, directories and recipes, so the bytes of one version are an estimate: its manifest, and a part
of all other bytes in proportion to its bytes after dedup and delta. Data that several versions share are counted for
the version that was put first.

    growth:  cumulative shares of versions by commit time; the last point equals the stored bytes now
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from nearkin_gateway.catalog.version_catalog import TENANTS_OPEN_MAX, VersionCatalog
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.results import Stats
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.validation import is_reserved_key

ENTRIES_MAX = 200_000
"""Versions examined, which takes some 3 s with a Redis index. With more, shares are reported as partial."""
PREFIXES_MAX = 100
"""Prefixes reported, the largest ones; the others are one sum."""
PREFIXES_KEPT_MAX = 10_000
"""Prefixes that are told apart while they are counted: some 3 MB."""
GROWTH_VERSIONS_MAX = 20_000
"""Versions whose time is remembered, of each tenant: some 6 MB. A store with more shows no curve."""
GROWTH_READ_MAX = 2_000
"""Manifests that one question reads: some 0.2 s of a local store, 0.5 s of an S3 server. The next one goes on."""
POINTS_MAX = 240
TOTAL_SECONDS = 60.0
"""Each tenant's sums read all of its index; a page that lists fifty of them is looked at every 5 s."""
TOTALS_MAX = 256


@dataclass(slots=True)
class PrefixUsage:
    """Logical and stored bytes of the versions with a prefix.

    `prefix`: text before the first slash, "" for keys without a slash, None for all other prefixes.
    """

    prefix: str | None
    versions: int = 0
    deleted_versions: int = 0
    logical_bytes: int = 0
    own_bytes: int = 0
    """Of manifests and marks."""
    left_bytes: int = 0
    """After dedup and delta."""
    stored_bytes: float = 0.0

    @property
    def reduction_ratio(self) -> float:
        """Return logical / stored."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def count(self, entry: CatalogEntry) -> None:
        """Count a version; of a checkpoint its stored bytes alone."""
        if not is_reserved_key(entry.key):
            self.versions += not entry.deleted
            self.deleted_versions += entry.deleted
            self.logical_bytes += entry.ledger.logical_bytes
        self.own_bytes += _own_bytes(entry)
        self.left_bytes += _left(entry)

    def add(self, other: PrefixUsage) -> None:
        """Add what others were counted to."""
        self.versions += other.versions
        self.deleted_versions += other.deleted_versions
        self.logical_bytes += other.logical_bytes
        self.own_bytes += other.own_bytes
        self.left_bytes += other.left_bytes


@frozen
class Reduction:
    """The shares of a tenant, largest first. `whole` False: some versions were not examined."""

    prefixes: list[PrefixUsage]
    total: PrefixUsage
    whole: bool


@frozen
class Point:
    """Stored and logical bytes at a time in microseconds since 1970."""

    time_us: int
    logical_bytes: int
    stored_bytes: int


@frozen
class Growth:
    """The growth of a tenant, from `read` of `versions`; no `points` if there are too many."""

    points: list[Point]
    versions: int
    read: int
    too_many: bool


@dataclass(slots=True)
class _UsagePass:
    """One pass over a tenant's versions.

    `rows`: (key, version, logical, own, left), None if there are too many.
    """

    of: Stats
    total: PrefixUsage
    prefixes: list[PrefixUsage] = field(default_factory=list)
    rows: list[tuple[str, int, int, int, int]] | None = field(default_factory=list)
    whole: bool = True

    @property
    def versions(self) -> int:
        """Return how many were looked at."""
        return self.total.versions + self.total.deleted_versions

    def stored_bytes(self, own_bytes: int, left_bytes: int, versions: int) -> float:
        """Return what of the stored bytes falls to some versions."""
        rest = max(0, self.of.ledger.stored_bytes - self.total.own_bytes)
        if not self.total.left_bytes:  # nothing but zeros and duplicates: all alike
            return own_bytes + rest * versions / max(1, self.versions)
        return own_bytes + rest * left_bytes / self.total.left_bytes


class UsageStats:
    """Shares and growth of tenants. Thread-safe; all calls block: run them on a thread."""

    def __init__(self, catalogue: VersionCatalog) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._counted: OrderedDict[str, _UsagePass] = OrderedDict()
        self._totals: OrderedDict[str, tuple[float, Reduction]] = OrderedDict()
        self._times: OrderedDict[str, dict[tuple[str, int], int | None]] = OrderedDict()

    def reduction(self, tenant: str) -> Reduction:
        """Return the shares of a tenant's prefixes.

        Raises StoreUnavailable, NotFound (this gateway has no statistics of the tenant).
        """
        counted = self._count(tenant)
        return Reduction(counted.prefixes, counted.total, counted.whole)

    def total(self, tenant: str) -> Reduction:
        """Return a tenant's totals, at most TOTAL_SECONDS old, for a list of many tenants.

        Raises as `reduction` does.
        """
        with self._lock:
            made, kept = self._totals.get(tenant, (0.0, None))
        if kept is not None and time.monotonic() - made < TOTAL_SECONDS:
            return kept
        counted = self._count(tenant)
        found = Reduction([], counted.total, counted.whole)
        with self._lock:
            self._totals[tenant] = (time.monotonic(), found)
            self._totals.move_to_end(tenant)
            if len(self._totals) > TOTALS_MAX:
                self._totals.popitem(last=False)
        return found

    def growth(self, tenant: str) -> Growth:
        """Return the growth of a tenant. Raises StoreUnavailable, NotFound."""
        counted = self._count(tenant)
        if counted.rows is None or not counted.whole:
            return Growth([], counted.versions, 0, too_many=True)
        times = self._committed(tenant, [(key, version) for key, version, *_ in counted.rows])
        dated = [
            (when, logical_bytes, counted.stored_bytes(own_bytes, left_bytes, 1))
            for key, version, logical_bytes, own_bytes, left_bytes in counted.rows
            if (when := times.get((key, version))) is not None
        ]
        dated.sort()
        return Growth(points_of(dated), counted.versions, len(dated), too_many=False)

    def _count(self, tenant: str) -> _UsagePass:
        """Return a pass over a tenant's versions, repeated at most every STATS_SECONDS."""
        stats = self._catalogue.stats(tenant)
        with self._counting:  # once for all who ask at the same time
            with self._lock:
                counted = self._counted.get(tenant)
                if counted is not None and counted.of is stats:
                    return counted
            counted = count_versions(stats, self._catalogue.entries(tenant))
            counted.whole = counted.whole and self._catalogue.is_complete
            with self._lock:
                self._counted[tenant] = counted
                self._counted.move_to_end(tenant)
                if len(self._counted) > TENANTS_OPEN_MAX:
                    self._counted.popitem(last=False)
            return counted

    def _committed(self, tenant: str, names: list[tuple[str, int]]) -> dict[tuple[str, int], int | None]:
        """Return the known commit times, after reading some more."""
        with self._lock:
            times = self._times.get(tenant, {})
        fresh = [name for name in names if name not in times][:GROWTH_READ_MAX]
        times = {**times, **dict(zip(fresh, self._catalogue.created_us(tenant, fresh), strict=True))}
        times = {name: times[name] for name in names if name in times}
        with self._lock:
            self._times[tenant] = times
            self._times.move_to_end(tenant)
            if len(self._times) > TENANTS_OPEN_MAX:
                self._times.popitem(last=False)
        return times


def count_versions(stats: Stats, entries: Iterable[CatalogEntry]) -> _UsagePass:
    """Return versions summed up by prefix; the shares add up to the stored bytes of `stats`."""
    counted, by_prefix, others = _UsagePass(stats, PrefixUsage(None)), dict[str, PrefixUsage](), PrefixUsage(None)
    remaining = iter(entries)
    for entry in islice(remaining, ENTRIES_MAX):
        folder, slash, _ = entry.key.partition("/")
        prefix = folder + slash if slash else ""
        share = by_prefix.get(prefix)
        if share is None:
            share = PrefixUsage(prefix) if len(by_prefix) < PREFIXES_KEPT_MAX else others
            if share is not others:
                by_prefix[prefix] = share
        share.count(entry)
        counted.total.count(entry)
        if counted.rows is not None and not is_reserved_key(entry.key):
            logical_bytes = entry.ledger.logical_bytes
            counted.rows.append((entry.key, entry.version, logical_bytes, _own_bytes(entry), _left(entry)))
            if len(counted.rows) > GROWTH_VERSIONS_MAX:
                counted.rows = None
    counted.whole = next(remaining, None) is None
    ordered = sorted(by_prefix.values(), key=lambda share: (-share.logical_bytes, share.prefix or ""))
    for share in ordered[PREFIXES_MAX:]:
        others.add(share)
    counted.prefixes = ordered[:PREFIXES_MAX]
    if others.versions + others.deleted_versions + others.own_bytes:
        counted.prefixes.append(others)
    for share in (*counted.prefixes, counted.total):
        share.stored_bytes = counted.stored_bytes(
            share.own_bytes, share.left_bytes, share.versions + share.deleted_versions
        )
    return counted


def points_of(dated: list[tuple[int, int, float]]) -> list[Point]:
    """Return cumulative sums of (microseconds, logical, stored).

    At most POINTS_MAX points: the last of each equal period.
    """
    if not dated:
        return []
    first_us = dated[0][0]
    stretch_us = max(1, (dated[-1][0] - first_us) // (POINTS_MAX - 1) + 1)
    logical, stored = 0, 0.0
    points: dict[int, Point] = {}
    for when, logical_bytes, stored_bytes in dated:
        logical += logical_bytes
        stored += stored_bytes
        points[(when - first_us) // stretch_us] = Point(when, logical, round(stored))
    return list(points.values())


def _own_bytes(entry: CatalogEntry) -> int:
    return entry.manifest_bytes + entry.marks_bytes


def _left(entry: CatalogEntry) -> int:
    return max(0, entry.ledger.unique_bytes - entry.ledger.delta_saved_bytes)
