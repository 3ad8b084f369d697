"""Garbage collection. Invariant: what goes was unreached in two rounds, a grace apart; to die anywhere repeats work.

    1 generations that newer ones have replaced      2 versions gone for good: mark, index, manifest, marks
    3 what every other version reaches
    4 what an earlier round condemned, is due and is unreached still: index, then container, or a new generation of it
    5 what else is unreached: index, then record

Between the index forgetting what is condemned and its going lies `gc.grace_seconds`: who was told of it before has
committed by then, and the mark of that round sees the version. docs/decisions/0015-garbage-collection.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from nearkin.config import GcSettings
from nearkin.errors import NotFound, Permanent
from nearkin.failpoints import failpoint
from nearkin.formats.condemned import Condemned
from nearkin.formats.manifest import CREATED_US_MAX, Manifest
from nearkin.formats.mark import Kind, Mark, encode_mark
from nearkin.index.catalog import summarise_directory
from nearkin.index.protocols import Collected, SupportsCollection
from nearkin.records import ContainerId, GcReport
from nearkin.store.condemned import CondemnedStore, record_bytes
from nearkin.store.containers import ContainerStore
from nearkin.store.manifests import ManifestStore, mark_name
from nearkin.store.objects import AlreadyExists
from nearkin_janitor.holding import bytes_of_chunks, held_by
from nearkin_janitor.order import leaning_last
from nearkin_janitor.plan import Drop, Plan, record_of, to_condemn, to_sweep
from nearkin_janitor.reach import Reach
from nearkin_janitor.rewrite import Rewriter
from nearkin_janitor.roots import Roots, Version, find_roots


class Refused(Permanent):
    """A round would not be sound here."""


COLLECTED_AT_ONCE = 256
"""Versions leave the index so many a transaction."""
WHO = "gc"


@dataclass(slots=True)
class _Sums:
    versions: int = 0
    deleted: int = 0
    rewritten: int = 0
    freed_bytes: int = 0
    later_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)


class Collector:
    """One round over a store, all tenants of it. One at a time: its caller holds the store's lock or a lease."""

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        condemned: CondemnedStore,
        settings: GcSettings,
        rewriter: Rewriter,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._containers = containers.of(None)
        self._rewriter = rewriter
        self._compact_below = settings.compact_below
        self._services_ended = settings.services_ended
        self._bytes_per_second = int(settings.bytes_per_second)
        self._manifests = manifests
        self._condemned = condemned
        self._grace_us = settings.grace_seconds * 1_000_000
        self._clock = clock

    def run(self, index: SupportsCollection) -> GcReport:
        """Do a round. Raises Corrupt (what a version needs cannot be read: nothing is condemned), StoreUnavailable."""
        return self._round(index)

    def preview(self, *, deleted_too: bool = False) -> GcReport:
        """Return what `run` would report, and what holds the rest; nothing is changed.

        `deleted_too`: as if no deleted version could be brought back any more.
        """
        return self._round(None, deleted_too=deleted_too)

    def _round(self, index: SupportsCollection | None, *, deleted_too: bool = False) -> GcReport:
        started, sums = time.perf_counter(), _Sums()
        generations = self._containers.generations()  # before the manifests: a put meanwhile adds no garbage
        roots = find_roots(self._manifests, CREATED_US_MAX + 1 if deleted_too else self._now_us())
        reach = Reach(self._containers, self._manifests, [version.manifest for version in roots.kept])
        if reach.by_services is not None and not self._services_ended:
            raise Refused(
                f"{reach.by_services} came through services, whose index cannot forget what is freed: nothing was "
                "changed; if none will ever write this store again, set gc.services_ended"
            )
        ids = self._replaced(generations, index, sums)  # 1
        kept = self._collect(roots, index, sums)  # 2
        if len(kept) > len(roots.kept):  # some were brought back meanwhile
            reach = Reach(self._containers, self._manifests, [version.manifest for version in kept])  # 3
        if index is not None:
            failpoint("gc.marked")
        before = self._condemned.read()
        record = {container: entry for container, entry in before.items() if container in ids}
        due = {container: entry for container, entry in record.items() if self._is_due(entry)}
        swept = to_sweep(reach, ids, due) if due else Plan({})
        # Both are planned before anything is done, so that a preview plans the same. What is written anew now is looked
        # at in the next round: its bases are others then.
        staying = [c for c in ids if c not in swept.drops or not swept.drops[c].everything]
        plan = to_condemn(reach, staying, self._compact_below, just_written=swept.drops.keys())
        self._sweep(swept, ids, index, sums)  # 4
        for container in swept.drops:
            record.pop(container)
        record = self._condemn(plan, ids, record, before, index, sums)  # 5
        if index is None:
            undeletable = [version.manifest for version in kept if version.manifest not in roots.undeletable]
            sums.held = held_by(reach, Reach(self._containers, self._manifests, undeletable), ids, record)
        due_us = min((entry.at_us + self._grace_us for entry in record.values()), default=None)
        return GcReport(
            dry_run=index is None,
            versions=sums.versions,
            containers_deleted=sums.deleted,
            containers_rewritten=sums.rewritten,
            freed_bytes=sums.freed_bytes,
            condemned_containers=len(record),
            freed_later_bytes=sums.later_bytes,
            due=None if due_us is None else datetime.fromtimestamp(due_us / 1e6, UTC),
            held=sums.held,
            seconds=time.perf_counter() - started,
        )

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _is_due(self, entry: Condemned) -> bool:
        return entry.at_us + self._grace_us <= self._now_us()

    # --- 1: what was cut short --------------------------------------------------------------------------------------

    def _replaced(
        self, listed: Mapping[ContainerId, dict[int, int]], index: SupportsCollection | None, sums: _Sums
    ) -> dict[int, int]:
        """Remove generations that have been replaced; return the bytes of each container."""
        ids: dict[int, int] = {}
        for container, generations in listed.items():
            newest = max(generations)
            ids[container] = generations[newest]
            if len(generations) > 1 and index is not None:
                self._renew(index, container)
                failpoint("gc.renewed")
            for older in sorted(generations.keys() - {newest}):
                sums.freed_bytes += generations[older]
                if index is not None:
                    self._containers.delete(container, older)
                    failpoint("gc.replaced")
        return ids

    def _renew(self, index: SupportsCollection, container: ContainerId) -> None:
        """Tell the index what is left of a container, before what was goes."""
        directory = self._containers.directory(container)
        index.renew(summarise_directory(directory))

    # --- 2: versions -------------------------------------------------------------------------------------------------

    def _collect(self, roots: Roots, index: SupportsCollection | None, sums: _Sums) -> tuple[Version, ...]:
        """Free manifests and marks of versions that are gone for good; return all others, the roots."""
        kept = list(roots.kept)
        for start in range(0, len(roots.ended), COLLECTED_AT_ONCE):
            going = []
            for version in roots.ended[start : start + COLLECTED_AT_ONCE]:
                if index is not None and not self._sentenced(version):
                    kept.append(version)  # brought back meanwhile
                    continue
                going.append(version)
            stay = [self._staying(version, roots) for version in going]
            if index is not None:
                told = zip(going, stay, strict=True)
                index.collect_many([self._told(version, marks_bytes) for version, marks_bytes in told])
                failpoint("gc.uncatalogued")
            for version, marks_bytes in zip(going, stay, strict=True):
                freed_bytes = version.manifest_bytes + version.marks_bytes - marks_bytes
                sums.versions += bool(version.committed)
                sums.freed_bytes += freed_bytes
                if index is not None:
                    self._remove(version, roots)
        return tuple(kept)

    def _sentenced(self, version: Version) -> bool:
        """Make the mark by which a version never comes back; return False where an undeletion has come first."""
        assert version.ended is not None
        if version.ended.kind is Kind.COLLECTED:
            return True
        try:
            self._manifests.put_mark(self._sentence(version.ended))
        except AlreadyExists:
            return False
        failpoint("gc.sentenced")
        return True

    def _sentence(self, mark: Mark) -> Mark:
        number, now_us = mark.sequence + 1, self._now_us()
        return Mark(mark.tenant, mark.key, mark.version, number, Kind.COLLECTED, now_us, 0, who=WHO)

    def _staying(self, version: Version, roots: Roots) -> int:
        """Return the bytes of the mark that stays: the last one of the key's highest version."""
        assert version.ended is not None
        if version.manifest not in roots.highest:
            return 0
        if version.ended.kind is Kind.COLLECTED:
            return version.marks[-1][2]
        return len(encode_mark(self._sentence(version.ended)))

    def _told(self, version: Version, marks_bytes: int) -> Collected:
        mark = version.ended
        assert mark is not None
        manifest: Manifest | None = None
        if version.committed:
            try:
                manifest = self._manifests.get(mark.tenant, mark.key, mark.version)
            except Permanent:
                manifest = None
        sequence = mark.sequence + (mark.kind is Kind.DELETED)
        return Collected(mark.tenant, mark.key, mark.version, manifest, sequence, marks_bytes)

    def _remove(self, version: Version, roots: Roots) -> None:
        """Remove the manifest, then marks, ascending: the last one says until the end what became of the version."""
        assert version.ended is not None
        mark = version.ended
        self._manifests.delete(mark.tenant, mark.key, mark.version)
        failpoint("gc.manifest")
        names = [name for _, name, _ in version.marks]
        if mark.kind is Kind.DELETED:
            names.append(mark_name(mark.tenant, mark.key, mark.version, mark.sequence + 1))
        for name in names[:-1] if version.manifest in roots.highest else names:
            self._manifests.delete_mark(name)
        failpoint("gc.marks")

    # --- 4: what an earlier round condemned --------------------------------------------------------------------------

    def _sweep(self, plan: Plan, ids: dict[int, int], index: SupportsCollection | None, sums: _Sums) -> None:
        if index is not None and plan.drops:
            whole = [container for container, drop in plan.drops.items() if drop.everything]
            index.forget(plan.chunks, plan.segments, whole)
            failpoint("gc.forgot-due")
        # What leans goes before what it leans on: whatever is there after a crash can be decoded.
        for container in reversed(list(leaning_last(sorted(plan.drops), self._leans_on))):
            drop = plan.drops[container]
            if drop.everything:
                sums.deleted += 1
                sums.freed_bytes += ids.pop(container)
                if index is not None:
                    self._containers.delete(ContainerId(container), self._containers.generation(ContainerId(container)))
                    failpoint("gc.container")
                continue
            sums.rewritten += 1
            before_bytes = ids[container]
            ids[container] = self._rewrite(ContainerId(container), drop, index, before_bytes)
            sums.freed_bytes += before_bytes - ids[container]

    def _rewrite(self, container: ContainerId, drop: Drop, index: SupportsCollection | None, before_bytes: int) -> int:
        """Put the next generation, then remove the one until now; return the new bytes. At a bounded speed."""
        started, data = time.perf_counter(), self._rewriter.rewritten(container, drop)
        if index is not None:
            generation = self._containers.generation(container)
            failpoint("compact.made")
            self._containers.put(container, data, generation + 1)
            failpoint("compact.put")
            self._renew(index, container)
            failpoint("compact.renewed")
            self._containers.delete(container, generation)
            failpoint("compact.replaced")
            allowed_seconds = (before_bytes + len(data)) / self._bytes_per_second
            time.sleep(max(0.0, allowed_seconds - (time.perf_counter() - started)))
        return len(data)

    def _leans_on(self, container: int) -> list[int]:
        try:
            return self._containers.directory(ContainerId(container)).leans_on()
        except (Permanent, NotFound):
            return []

    # --- 5: what is unreached from now on ----------------------------------------------------------------------------

    def _condemn(
        self,
        plan: Plan,
        ids: Mapping[int, int],
        record: dict[int, Condemned],
        before: dict[int, Condemned],
        index: SupportsCollection | None,
        sums: _Sums,
    ) -> dict[int, Condemned]:
        """Return the record of this round: what was condemned before and is unreached still, and what is now."""
        if index is not None and plan.drops:
            index.forget(plan.chunks, plan.segments, ())
            failpoint("gc.forgot")
        now_us = self._now_us()  # after the index has forgotten: the grace begins when nobody is told any more
        found = record_of(plan, now_us)
        for container in found.keys() & record.keys():
            if record[container].at_us <= now_us:  # else condemned by a clock that was ahead
                found[container] = _carried(record[container], found[container])
        old = self._condemned.listed()
        if not _same_record(found, before) or len(old) != bool(before):  # the latter after a crash, or damage
            sums.freed_bytes += sum(old.values()) - record_bytes(found)
            if index is not None:
                self._condemned.replace(found)
        sums.later_bytes = record_bytes(found)
        for container, entry in found.items():
            sums.later_bytes += ids[container]
            if not entry.whole:
                sums.later_bytes -= self._left(ContainerId(container), entry, ids[container], exactly=index is None)
        return found

    def _left(self, container: ContainerId, entry: Condemned, now_bytes: int, *, exactly: bool) -> int:
        """Return the bytes of a container without what is condemned of it: as it would be written, or an estimate."""
        if exactly:
            return len(self._rewriter.rewritten(container, Drop(entry.chunks, entry.segments, everything=False)))
        shares = bytes_of_chunks(self._containers.directory(container))
        return now_bytes - int(shares[entry.chunks].sum())


def _carried(before: Condemned, now: Condemned) -> Condemned:
    """Return what was condemned before and still is; what was condemned since waits until that has gone."""
    if before.whole and now.whole:
        return before
    chunks, segments = np.intersect1d(before.chunks, now.chunks), np.intersect1d(before.segments, now.segments)
    if not len(chunks) + len(segments):
        return now
    same = len(chunks) == len(now.chunks) and len(segments) == len(now.segments)
    return Condemned(before.at_us, chunks, segments, now.whole and same)


def _same(one: Condemned, other: Condemned) -> bool:
    same = np.array_equal(one.chunks, other.chunks) and np.array_equal(one.segments, other.segments)
    return same and one.whole == other.whole


def _same_record(one: dict[int, Condemned], other: dict[int, Condemned]) -> bool:
    return one.keys() == other.keys() and all(
        _same(one[container], other[container]) and one[container].at_us == other[container].at_us for container in one
    )
