"""Who takes how much, and since when. Invariant: all shares add up to the stored bytes; nothing of it is kept but in
memory, so any gateway shows the same.

What one version takes is not stored by itself: blocks, directories and recipes are shared. Its own manifest is counted
as it is; all else is shared out by what was left of each version after dedup and delta. What several versions share
is thus counted where it was put first.

    growth:  every version at the time of its commit, its share added up     the last point is what is stored now
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from nearkin.index.catalog import CatalogEntry
from nearkin.records import Stats
from nearkin_gateway.catalogue import TENANTS_OPEN_MAX, Catalogue

ENTRIES_MAX = 200_000
"""Versions that are looked at: some 3 s of a Redis index. With more, the shares are told to be of a part."""
PREFIXES_MAX = 100
GROWTH_VERSIONS_MAX = 20_000
"""Versions whose time is remembered, of each tenant: some 4 MB. A store with more shows no curve."""
GROWTH_READ_MAX = 2_000
"""Manifests that one question reads: some 0.2 s of a local store, 0.5 s of an S3 server. The next one goes on."""
POINTS_MAX = 240


@dataclass(slots=True)
class Share:
    """What some versions stand for and take. `prefix` up to the first slash, "" for keys without; None: all others."""

    prefix: str | None
    versions: int = 0
    deleted_versions: int = 0
    logical_bytes: int = 0
    stored_bytes: float = 0.0

    @property
    def reduction_ratio(self) -> float:
        """Return logical / stored."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def add(self, entry: CatalogEntry, stored_bytes: float) -> None:
        """Count a version."""
        if entry.deleted:
            self.deleted_versions += 1
        else:
            self.versions += 1
        self.logical_bytes += entry.ledger.logical_bytes
        self.stored_bytes += stored_bytes


@dataclass(frozen=True, slots=True)
class Reduction:
    """A tenant by prefix, the largest first. `whole` False: there are more versions than were looked at."""

    prefixes: list[Share]
    total: Share
    whole: bool


@dataclass(frozen=True, slots=True)
class Point:
    """What was there at a time; microseconds since 1970."""

    time_us: int
    logical_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How what is there came to be. `read` of `versions` are in it; `points` empty where there are too many."""

    points: list[Point]
    versions: int
    read: int
    too_many: bool


@dataclass(slots=True)
class _Known:
    of: Stats
    entries: list[tuple[CatalogEntry, float]]
    whole: bool


class Insight:
    """Shares and growth of tenants. Safe between threads; all calls block: they belong on a thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._times: OrderedDict[str, dict[tuple[str, int], int | None]] = OrderedDict()

    def reduction(self, tenant: str) -> Reduction:
        """Return what a tenant's prefixes take. Raises StoreUnavailable, NotFound where nobody sums it up here."""
        known = self._entries(tenant)
        total, found = Share(None), dict[str, Share]()
        for entry, stored_bytes in known.entries:
            folder, slash, _ = entry.key.partition("/")
            prefix = folder + slash if slash else ""
            total.add(entry, stored_bytes)
            found.setdefault(prefix, Share(prefix)).add(entry, stored_bytes)
        ordered = sorted(found.values(), key=lambda share: (-share.logical_bytes, share.prefix or ""))
        shown, rest = ordered[:PREFIXES_MAX], ordered[PREFIXES_MAX:]
        if rest:
            others = Share(None)
            for share in rest:
                others.versions += share.versions
                others.deleted_versions += share.deleted_versions
                others.logical_bytes += share.logical_bytes
                others.stored_bytes += share.stored_bytes
            shown = [*shown, others]
        return Reduction(shown, total, known.whole)

    def growth(self, tenant: str) -> Growth:
        """Return how what is there came to be. Raises StoreUnavailable, NotFound."""
        known = self._entries(tenant)
        count = len(known.entries)
        if count > GROWTH_VERSIONS_MAX or not known.whole:
            return Growth([], count, 0, too_many=True)
        times = self._committed(tenant, known)
        dated = [
            (when, entry.ledger.logical_bytes, stored)
            for entry, stored in known.entries
            if (when := times.get((entry.key, entry.version))) is not None
        ]
        dated.sort()
        return Growth(_points(dated), count, len(dated), too_many=False)

    def _entries(self, tenant: str) -> _Known:
        """Return every version with its share, made anew when the sums are: every STATS_SECONDS at most."""
        stats = self._catalogue.stats(tenant)
        with self._lock:
            known = self._known.get(tenant)
            if known is not None and known.of is stats:
                return known
        entries = list(islice(self._catalogue.entries(tenant), ENTRIES_MAX + 1))
        whole = len(entries) <= ENTRIES_MAX and self._catalogue.whole
        known = _Known(stats, _shared_out(entries[:ENTRIES_MAX], stats.ledger.stored_bytes), whole)
        with self._lock:
            self._known[tenant] = known
            self._known.move_to_end(tenant)
            if len(self._known) > TENANTS_OPEN_MAX:
                self._known.popitem(last=False)
        return known

    def _committed(self, tenant: str, known: _Known) -> dict[tuple[str, int], int | None]:
        """Return when versions were committed: what is known, and some more."""
        names = [(entry.key, entry.version) for entry, _ in known.entries]
        with self._lock:
            times = self._times.get(tenant, {})
        fresh = [name for name in names if name not in times][:GROWTH_READ_MAX]
        read = dict(zip(fresh, self._catalogue.created_us(tenant, fresh), strict=True))
        times = {**times, **read}
        times = {name: times[name] for name in names if name in times}
        with self._lock:
            self._times[tenant] = times
            self._times.move_to_end(tenant)
            if len(self._times) > TENANTS_OPEN_MAX:
                self._times.popitem(last=False)
        return times


def _shared_out(entries: list[CatalogEntry], stored_bytes: int) -> list[tuple[CatalogEntry, float]]:
    """Return each version with its share; the shares add up to `stored_bytes`."""
    own = [entry.manifest_bytes + entry.marks_bytes for entry in entries]
    left = [max(0, entry.ledger.unique_bytes - entry.ledger.delta_saved_bytes) for entry in entries]
    if not sum(left):
        left = [1] * len(entries)
    rest, all_left = max(0, stored_bytes - sum(own)), sum(left)
    return [(entry, mine + rest * part / all_left) for entry, mine, part in zip(entries, own, left, strict=True)]


def _points(dated: list[tuple[int, int, float]]) -> list[Point]:
    """Return sums over time, at most POINTS_MAX: the last of each of as many equal stretches."""
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
