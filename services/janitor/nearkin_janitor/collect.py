"""Garbage collection. Invariant: what goes was unreached in two rounds, a grace apart; to die anywhere repeats work.

    1 generations that newer ones have replaced      2 versions gone for good: mark, index, manifest, marks
    3 what every other version reaches
    4 what leans on what an earlier round condemned and is due: a new generation that leans on what lives
    5 what an earlier round condemned, is due and nothing leans on: index, then container, or a new generation of it
    6 what else is unreached: index, then record

Between the index forgetting what is condemned and its going lies `gc.grace_seconds`: who was told of it before has
committed by then, and the mark of that round sees the version. docs/decisions/0015-garbage-collection.md.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from nearkin.config import MARK_SWEEP, GcSettings
from nearkin.errors import ConfigError, Corrupt, NotFound, Permanent
from nearkin.failpoints import failpoint
from nearkin.formats.condemned import Condemned
from nearkin.formats.container import Directory
from nearkin.formats.manifest import CREATED_US_MAX, Manifest
from nearkin.formats.mark import Kind, Mark, encode_mark
from nearkin.index.catalog import summarise_directory
from nearkin.index.protocols import Collected, ContainerSummary, SupportsCollection
from nearkin.records import U32, ContainerId, GcReport
from nearkin.store.condemned import CondemnedStore, record_bytes
from nearkin.store.containers import ContainerStore
from nearkin.store.manifests import ManifestStore, mark_name
from nearkin.store.objects import AlreadyExists
from nearkin.store.overlay import Overlay
from nearkin_janitor.families import families_of
from nearkin_janitor.heirs import Heirs
from nearkin_janitor.holding import bytes_of_chunks, held_by
from nearkin_janitor.ledger import Ledger
from nearkin_janitor.order import leaning_last
from nearkin_janitor.plan import Drop, Plan, dropped_beside, record_of, to_condemn, to_rebase, to_sweep
from nearkin_janitor.reach import GivingUp, Reach
from nearkin_janitor.rewrite import Rebasing, Rewriter
from nearkin_janitor.roots import Roots, Version, find_roots


class Refused(Permanent):
    """A round would not be sound here."""


LATER_ROUNDS_MAX = 8
"""A preview looks so many rounds ahead: what is condemned goes in the next, what held it in the one after."""
_UNBOUNDED = 1 << 62
YOUNG_GRACES = 2
"""Beside services, a container is no garbage for so many graces."""
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
        online: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        """`online`: services write meanwhile, as docs/decisions/0015 says that several writers must.

        `ledger`: what says when marking has something to look at; without, a round always marks. Raises ConfigError.
        """
        if online:
            require_marking(settings)
        self._ledger = ledger
        self._containers = containers.of(None)
        self._rewriter = rewriter
        self._compact_below = settings.compact_below
        self._services_ended = settings.services_ended
        self._bytes_per_second = int(settings.bytes_per_second)
        self._manifests = manifests
        self._condemned = condemned
        self._grace_us = settings.grace_seconds * 1_000_000
        self._clock = clock
        self._online = online

    def run(self, index: SupportsCollection) -> GcReport:
        """Do a round. Raises Corrupt (what a version needs cannot be read: nothing is condemned), StoreUnavailable."""
        return self._round(index)

    def preview(self, *, deleted_too: bool = False) -> GcReport:
        """Return what `run` would report, and what holds the rest; nothing is changed.

        It is a round, and those after it, over what lies in the store; what they write goes to the system's temporary
        folder, which needs room for it. `deleted_too`: as if no deleted version could be brought back any more.
        """
        with Overlay(self._condemned.objects) as objects:
            containers = self._containers.apart(objects)
            imagined = copy.copy(self)
            imagined._containers, imagined._rewriter = containers, self._rewriter.over(containers)
            imagined._manifests, imagined._condemned = ManifestStore(objects), CondemnedStore(objects)
            imagined._bytes_per_second, imagined._ledger = _UNBOUNDED, None
            told = imagined._round(NoIndex(), deleted_too=deleted_too, dry_run=True)
            imagined._grace_us = later_bytes = 0
            for _ in range(LATER_ROUNDS_MAX):
                later = imagined._round(NoIndex(), deleted_too=deleted_too)
                later_bytes += later.freed_bytes
                if not later.condemned_containers and not later.freed_bytes:
                    break
        return replace(told, freed_later_bytes=later_bytes)

    def _round(self, index: SupportsCollection, *, deleted_too: bool = False, dry_run: bool = False) -> GcReport:
        started, sums = time.perf_counter(), _Sums()
        generations = self._containers.generations()  # before the manifests: a put meanwhile adds no garbage
        roots = find_roots(self._manifests, CREATED_US_MAX + 1 if deleted_too else self._now_us())
        if not self._to_mark(generations, roots):
            ids = self._replaced(generations, index, sums)  # 1
            self._collect(roots, index, sums)  # 2
            record = self._condemned.read()
            sums.later_bytes = self._later_bytes(record, ids)
            return self._report(sums, record, started)
        young = self._young(generations)
        reach = Reach(self._containers, self._manifests, [version.manifest for version in roots.kept], young)
        if reach.by_services is not None and not (self._services_ended or self._online):
            raise Refused(
                f"{reach.by_services} came through services: nothing was changed. Their janitor collects beside them; "
                "if none will ever write this store again, set gc.services_ended"
            )
        ids = self._replaced(generations, index, sums)  # 1
        kept = self._collect(roots, index, sums)  # 2
        if len(kept) > len(roots.kept):  # some were brought back meanwhile
            reach = Reach(self._containers, self._manifests, [version.manifest for version in kept], young)  # 3
        failpoint("gc.marked")
        before = self._condemned.read()
        record = {container: entry for container, entry in before.items() if container in ids}
        due = {container: entry for container, entry in record.items() if self._is_due(entry)}
        rebased = to_rebase(reach, ids, due, self._compact_below)
        if rebased is not None:
            self._rebase(reach, rebased, due, ids, index, sums)  # 4
        swept = to_sweep(reach, ids, due) if due else Plan({})
        self._sweep(swept, ids, index, sums)  # 5
        for container, drop in swept.drops.items():
            _note_gone(record, container, drop)
        plan = to_condemn(reach, ids, self._compact_below)
        record = self._condemn(plan, ids, record, before, index, sums)  # 6
        if dry_run:
            undeletable = [version.manifest for version in kept if version.manifest not in roots.undeletable]
            sums.held = held_by(reach, Reach(self._containers, self._manifests, undeletable, young), ids, record)
        if self._ledger is not None:
            self._ledger.confirmed(self._now_us())
        return self._report(sums, record, started, dry_run=dry_run)

    def _to_mark(self, generations: Collection[ContainerId], roots: Roots) -> bool:
        """Return whether marking may find something to condemn or to free."""
        if self._ledger is None:
            return True
        names = [version.manifest for version in roots.kept]
        told = self._ledger.bring_up(names, generations, self._manifests.read, self._readable, self._now_us())
        listed, record = self._condemned.listed(), self._condemned.read()
        as_marked = len(listed) == bool(record) and record.keys() <= set(generations)  # else a crash, or damage
        return told.marking or not as_marked or any(map(self._is_due, record.values()))

    def _readable(self, container: int) -> Directory | None:
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound):
            return None

    def _report(
        self, sums: _Sums, record: Mapping[int, Condemned], started: float, *, dry_run: bool = False
    ) -> GcReport:
        due_us = min((entry.at_us + self._grace_us for entry in record.values()), default=None)
        return GcReport(
            dry_run=dry_run,
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

    def _young(self, containers: Collection[int]) -> list[int]:
        """Return those whose versions may still be on their way: all of them is needed. Ids begin with their time."""
        since_ms = (self._now_us() - YOUNG_GRACES * self._grace_us) // 1000
        return [container for container in containers if container >> 20 >= since_ms] if self._online else []

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _is_due(self, entry: Condemned) -> bool:
        return entry.at_us + self._grace_us <= self._now_us()

    # --- 1: what was cut short --------------------------------------------------------------------------------------

    def _replaced(
        self, listed: Mapping[ContainerId, dict[int, int]], index: SupportsCollection, sums: _Sums
    ) -> dict[int, int]:
        """Remove generations that have been replaced; return the bytes of each container."""
        ids: dict[int, int] = {}
        for container, generations in listed.items():
            newest = max(generations)
            ids[container] = generations[newest]
            if len(generations) > 1:
                self._renew(index, container)
                failpoint("gc.renewed")
            for older in sorted(generations.keys() - {newest}):
                sums.freed_bytes += generations[older]
                self._containers.delete(container, older)
                failpoint("gc.replaced")
        return ids

    def _renew(self, index: SupportsCollection, container: ContainerId) -> None:
        """Tell the index what is left of a container, before what was goes."""
        directory = self._containers.directory(container)
        index.renew(summarise_directory(directory))

    # --- 2: versions -------------------------------------------------------------------------------------------------

    def _collect(self, roots: Roots, index: SupportsCollection, sums: _Sums) -> tuple[Version, ...]:
        """Free manifests and marks of versions that are gone for good; return all others, the roots."""
        kept = list(roots.kept)
        for start in range(0, len(roots.ended), COLLECTED_AT_ONCE):
            going = []
            for version in roots.ended[start : start + COLLECTED_AT_ONCE]:
                if not self._sentenced(version):
                    kept.append(version)  # brought back meanwhile
                    continue
                going.append(version)
            stay = [self._staying(version, roots) for version in going]
            told = zip(going, stay, strict=True)
            index.collect_many([self._told(version, marks_bytes) for version, marks_bytes in told])
            failpoint("gc.uncatalogued")
            for version, marks_bytes in zip(going, stay, strict=True):
                freed_bytes = version.manifest_bytes + version.marks_bytes - marks_bytes
                sums.versions += bool(version.committed)
                sums.freed_bytes += freed_bytes
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

    # --- 4: what leans on what an earlier round condemned ------------------------------------------------------------

    def _rebase(
        self,
        reach: Reach,
        rebased: GivingUp,
        due: dict[int, Condemned],
        ids: dict[int, int],
        index: SupportsCollection,
        sums: _Sums,
    ) -> None:
        """Write containers anew that lean on what may go, the oldest first: the others then lean on what is in it.

        What of them is due, and no other container leans on, goes with it.
        """
        beside = dropped_beside(reach, ids, due, rebased)
        families = families_of(reach, reach.closed(reach.chunks))
        rebasing = Rebasing(rebased.chunks, Heirs(reach, families, rebased.containers))
        index.forget(
            {container: drop.chunks for container, drop in beside.items()},
            {container: drop.segments for container, drop in beside.items()},
            (),
        )
        for container in leaning_last(sorted(rebased.containers), self._leans_on):
            self._anew(ContainerId(container), beside[container], ids, index, sums, rebasing)

    # --- 5: what an earlier round condemned --------------------------------------------------------------------------

    def _sweep(self, plan: Plan, ids: dict[int, int], index: SupportsCollection, sums: _Sums) -> None:
        if plan.drops:
            whole = [container for container, drop in plan.drops.items() if drop.everything]
            index.forget(plan.chunks, plan.segments, whole)
            failpoint("gc.forgot-due")
        # What leans goes before what it leans on: whatever is there after a crash can be decoded.
        for container in reversed(list(leaning_last(sorted(plan.drops), self._leans_on))):
            drop = plan.drops[container]
            if drop.everything:
                sums.deleted += 1
                sums.freed_bytes += ids.pop(container)
                self._containers.delete(ContainerId(container), self._containers.generation(ContainerId(container)))
                failpoint("gc.container")
                continue
            self._anew(ContainerId(container), drop, ids, index, sums)

    def _anew(
        self,
        container: ContainerId,
        drop: Drop,
        ids: dict[int, int],
        index: SupportsCollection,
        sums: _Sums,
        rebasing: Rebasing | None = None,
    ) -> None:
        """Put the next generation, then remove the one until now. At a bounded speed."""
        started, data = time.perf_counter(), self._rewriter.rewritten(container, drop, rebasing)
        generation, before_bytes = self._containers.generation(container), ids[container]
        failpoint("compact.made")
        self._containers.put(container, data, generation + 1)
        failpoint("compact.put")
        self._renew(index, container)
        failpoint("compact.renewed")
        self._containers.delete(container, generation)
        failpoint("compact.replaced")
        ids[container] = len(data)
        sums.rewritten += 1
        sums.freed_bytes += before_bytes - len(data)
        allowed_seconds = (before_bytes + len(data)) / self._bytes_per_second
        time.sleep(max(0.0, allowed_seconds - (time.perf_counter() - started)))

    def _leans_on(self, container: int) -> list[int]:
        try:
            return self._containers.directory(ContainerId(container)).leans_on()
        except (Permanent, NotFound):
            return []

    # --- 6: what is unreached from now on ----------------------------------------------------------------------------

    def _condemn(
        self,
        plan: Plan,
        ids: Mapping[int, int],
        record: dict[int, Condemned],
        before: dict[int, Condemned],
        index: SupportsCollection,
        sums: _Sums,
    ) -> dict[int, Condemned]:
        """Return the record of this round: what was condemned before and is unreached still, and what is now."""
        if plan.drops:
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
            self._condemned.replace(found)
        sums.later_bytes = self._later_bytes(found, ids)
        return found

    def _later_bytes(self, record: dict[int, Condemned], ids: Mapping[int, int]) -> int:
        """Return what a record and what it names take."""
        later_bytes = record_bytes(record)
        for container, entry in record.items():
            later_bytes += ids[container]
            if not entry.whole:
                shares = bytes_of_chunks(self._containers.directory(ContainerId(container)))
                later_bytes -= ids[container] - int(shares[entry.chunks].sum())
        return later_bytes


def require_marking(settings: GcSettings) -> None:
    """Raise ConfigError where rounds beside services are to do what only a store of one process can."""
    if settings.mode != MARK_SWEEP:
        raise ConfigError(
            f"gc.mode = {settings.mode!r}: beside services a round always marks, their index keeps no such counts; "
            f"set gc.mode to {MARK_SWEEP!r}"
        )


class NoIndex:
    """An index that a preview tells nothing."""

    def forget(
        self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32], containers: Collection[int]
    ) -> None:
        """Do nothing."""

    def renew(self, summary: ContainerSummary) -> None:
        """Do nothing."""

    def collect_many(self, versions: Sequence[Collected]) -> None:
        """Do nothing."""


def _note_gone(record: dict[int, Condemned], container: int, drop: Drop) -> None:
    """Take what has gone out of what is condemned."""
    before = record.pop(container)
    chunks, segments = np.setdiff1d(before.chunks, drop.chunks), np.setdiff1d(before.segments, drop.segments)
    if not drop.everything and len(chunks) + len(segments):
        record[container] = Condemned(before.at_us, chunks, segments, whole=False)


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
