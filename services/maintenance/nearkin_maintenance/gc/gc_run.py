"""Garbage collection. Invariant: what goes was unreached in two rounds, a grace apart; to die anywhere repeats work.

    1 generations that newer ones have replaced      2 versions gone for good: mark, index, manifest, marks
    3 what every other version reaches
    4 what leans on what an earlier round condemned and is due: a new generation that leans on what lives
    5 what an earlier round condemned, is due and nothing leans on: index, then container, or a new generation of it
    6 by `gc.merge_block_bytes`, what newer versions changed of a stretch, over and over: into its block
    7 by `gc.recompress_level`, what puts compressed in a hurry: by a deeper search, once (recompress.py)
    8 what else is unreached: index, then record

Between the index forgetting what is condemned and its going lies `gc.grace_seconds`: who was told of it before has
committed by then, and the mark of that round sees the version. docs/adr/0015-two-phase-garbage-collection.md.
Marking, planning and encoding go on beside puts; each effect is a turn, which first looks what came since
(concurrent_writes.py).
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_maintenance.gc.gc_plan import GcPlan, plan_pending, plan_rebase, plan_sweep, protect_recent, record_of
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.pending_delete_merge import carry_over, record_deletion, same_record
from nearkin_maintenance.gc.reference_counts import ReferenceCounts
from nearkin_maintenance.gc.retained_bytes import bytes_of_chunks, retained_bytes_by_reason
from nearkin_maintenance.gc.roots import Roots, Version, find_roots
from nearkin_maintenance.gc.sweep import GcExecutor, GcTotals, Item
from nearkin_maintenance.gc.version_expiry import VersionExpiry
from nearkin_maintenance.gc.writer_gate import NoWriters, WriterGate
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.optimize.container_swap import ContainerSwap
from nearkin_maintenance.verify.manifest_validation import ValidatingManifestReader
from nearkin_shared.config.storage import MARK_SWEEP, GcSettings
from nearkin_shared.errors import (
    BadInput,
    ConfigError,
    Corrupt,
    NotFound,
    PermanentError,
    RetryableError,
    StoreUnavailable,
    TenantErased,
)
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.pending_delete_record import PendingDelete, fitting
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, SupportsCollection, SupportsGenerations
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.delegating import rewrap_lowest, takes_bytes
from nearkin_shared.objectstore.encrypted_store import overlaid
from nearkin_shared.objectstore.metered import MeteredObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.results import GcReport
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import EMPTY_BYTES, PendingDeleteStore, record_bytes
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint


class GcRefused(PermanentError):
    """A round would not be sound here."""


_log = logging.getLogger("nearkin")

Steps = Callable[[int, int, str], None]
"""Told how many are done, of how many, and what is being done."""

LATER_RUNS_MAX = 8
"""A preview looks so many rounds ahead: what is condemned goes in the next, what held it in the one after."""
REFUSED_NAMED_MAX = 20
"""Marks that were refused are named in the log, so many a run."""
_UNBOUNDED = 1 << 62
BLOCKS_BYTES = 96 * MIB
"""Of decoded blocks that a round keeps at hand. To gather 16 dumps took 19, 13 and 12 s with 64, 128 and 256 MiB; a
round over the last 12 of 44 gathered ones peaks at 441 MB with 96, at 504 with 128, and takes 5.5 and 5.2 s."""
RECENT_GRACES = 2
"""Beside services, a container is no garbage for so many graces."""


class GcRun:
    """One round over a store, all tenants of it. One at a time: its caller holds the lock of rounds, or a lease."""

    def __init__(
        self,
        containers: ContainerStore,
        manifests: ManifestStore,
        condemned: PendingDeleteStore,
        settings: GcSettings,
        rewriter: Rewriter,
        *,
        clock: Callable[[], float] = time.time,
        online: bool = False,
        ledger: ReferenceCounts | None = None,
        go_on: Callable[[], None] = lambda: None,
        steps: Steps | None = None,
    ) -> None:
        """`online`: services write meanwhile, as docs/adr/0015 says that several writers must.

        `ledger`: what says when marking has something to look at; without, a round always marks. `go_on` is asked
        before each container is written or removed, and ends the round by raising; `steps` hears how far that is, and
        how many manifests are read. Raises ConfigError.
        """
        if online:
            require_marking(settings)
        self._ledger = ledger
        self._go_on = go_on
        self._steps = steps
        self._containers = containers.of(None)
        self._rewriter = rewriter
        self._compact_below = settings.compact_below
        self._assume_services_stopped = settings.assume_services_stopped
        self._replacing = ContainerSwap(self._containers, int(settings.bytes_per_second))
        self._merge_block_bytes, self._merge_versions_min = int(settings.merge_block_bytes), settings.merge_versions_min
        self._manifests = manifests
        self._condemned = condemned
        self._grace_us = settings.grace_seconds * 1_000_000
        self._clock = clock
        self._online = online

    def run(self, index: SupportsCollection) -> GcReport:
        """Do a round that keeps nobody out: nobody else writes, or leases and young containers guard what comes.

        Raises Corrupt (what a version needs cannot be read: nothing is condemned), StoreUnavailable, RetryableError (a
        tenant was erased meanwhile).
        """
        return self.run_online(NoWriters(index))

    def run_online(self, turns: WriterGate) -> GcReport:
        """Do a round that keeps others out for each effect alone. Raises as `run` does, and StoreLocked."""
        self._go_on()
        with _erased_meanwhile():
            counted, objects = meter_writes(self._condemned.objects)
            return self._with_objects(objects, self._containers.with_objects(objects))._run(turns, counted)

    def preview(self, *, deleted_too: bool = False) -> GcReport:
        """Return what `run` would report, and what holds the rest; nothing is changed.

        It is a round, and those after it, over what lies in the store; what they write goes to the system's temporary
        folder, sealed as it would be in the store, and needs room there. `deleted_too`: as if no deleted version could
        be brought back any more.
        """
        with _erased_meanwhile(), overlaid(self._condemned.objects) as overlay:
            counted, objects = meter_writes(overlay)
            containers = self._containers.with_own_caches(objects, BLOCKS_BYTES)
            imagined = self._with_objects(objects, containers)
            imagined._replacing, imagined._ledger = ContainerSwap(containers, _UNBOUNDED), None
            imagined._go_on = lambda: None
            told = imagined._run(NoWriters(NoIndex()), counted, deleted_too=deleted_too, dry_run=True)
            imagined._grace_us = pending_delete_bytes = 0
            for _ in range(LATER_RUNS_MAX):
                later = imagined._run(NoWriters(NoIndex()), counted, deleted_too=deleted_too)
                pending_delete_bytes += later.freed_bytes
                if not later.pending_delete_containers and not later.freed_bytes:
                    break
        return replace(told, pending_delete_bytes=pending_delete_bytes)

    def _with_objects(self, objects: ObjectStore, containers: ContainerStore) -> GcRun:
        """Return what does the same through another object store."""
        other = copy.copy(self)
        other._containers, other._rewriter = containers, self._rewriter.with_containers(containers)
        other._manifests, other._condemned = ManifestStore(objects), PendingDeleteStore(objects)
        other._replacing = self._replacing.with_containers(containers)
        return other

    def _run(
        self, turns: WriterGate, counted: MeteredObjectStore, *, deleted_too: bool = False, dry_run: bool = False
    ) -> GcReport:
        started, sums, state = time.perf_counter(), GcTotals(counted), turns.change_token()
        self._check_clock()
        generations = self._containers.generations()  # before the manifests: a put meanwhile adds no garbage
        roots = self._roots(generations, sums, deleted_too=deleted_too)
        if not self._to_mark(generations, roots):
            return self._report(sums, self._unmarked(generations, roots, turns, sums), started)
        young = self._recent_containers(generations)
        summaries = None if self._ledger is None else self._ledger.summaries(self._now_us())
        named = [version.manifest for version in roots.kept]
        names_read = self._with_progress(named, "what versions need")
        reach = LiveSet(self._containers, self._manifests, names_read, young, summaries, generations)
        if reach.by_services is not None and not (self._assume_services_stopped or self._online):
            raise GcRefused(
                f"{reach.by_services} came through services: nothing was changed. Their maintenance service collects; "
                "if none will ever write this store again, set gc.assume_services_stopped"
            )
        ids = self._remove_replaced(generations, turns, sums)  # 1
        kept = self._expire_versions(roots, turns, sums)  # 2
        if len(kept) > len(roots.kept):  # some were brought back meanwhile
            named = [version.manifest for version in kept]
            reach = LiveSet(self._containers, self._manifests, named, young, summaries, generations)  # 3
        failpoint("gc.marked")
        self._go_on()
        names = [version.manifest for version in (*roots.kept, *roots.ended)]
        since = ConcurrentWrites(turns, state, self._containers, self._manifests, generations, names, reach)
        before = self._condemned.read()
        record = {container: entry for container, entry in before.items() if container in ids}
        due = {container: entry for container, entry in record.items() if self._is_due(entry)}
        needed = protect_recent(reach, ids, due) if due else reach
        rebased = plan_rebase(needed, ids, due, self._compact_below)
        writing = self._writing(since, ids, sums, turns)
        with self._rewriter.with_helper_thread():
            if rebased is not None:
                writing.rebase(needed, rebased, due, reach.chunks)  # 4
            since.refresh()
            swept = plan_sweep(reach, ids, due) if due else GcPlan({})
            failpoint("gc.swept-planned")
            for container, drop in writing.sweep(swept).items():  # 5
                record_deletion(record, container, drop)
            if sums.no_room is not None and not sums.deleted:
                raise sums.no_room
            if self._merge_block_bytes and sums.no_room is None:
                writing.merge(reach, young, self._merge_block_bytes, self._merge_versions_min)  # 6
            if sums.no_room is None:
                writing.recompress(reach, young)  # 7
        since.refresh()
        plan = plan_pending(reach, ids, self._compact_below)
        failpoint("gc.condemned-planned")
        record = self._mark_for_deletion(plan, ids, record, before, since, sums)  # 8
        if dry_run:
            undeletable = [version.manifest for version in kept if version.manifest not in roots.undeletable]
            others = LiveSet(self._containers, self._manifests, undeletable, young, listed=generations)
            sums.held = retained_bytes_by_reason(reach, others, ids, record)
        if self._ledger is not None:
            self._ledger.record_marking(self._now_us())
        return self._report(sums, record, started, dry_run=dry_run)

    def _to_mark(self, generations: Collection[ContainerId], roots: Roots) -> bool:
        """Return whether marking may find something to condemn or to free."""
        if self._ledger is None:
            return True
        names = [version.manifest for version in roots.kept]
        naming = ValidatingManifestReader(self._manifests, self._containers, generations)
        told = self._ledger.update(names, generations, naming.read, self._readable, self._now_us())
        record = self._condemned.read()
        as_marked = self._condemned.is_consistent() and record.keys() <= set(generations)  # else a crash, or damage
        return told.marking or not as_marked or any(map(self._is_due, record.values()))

    def _unmarked(
        self, generations: Mapping[ContainerId, dict[int, int]], roots: Roots, turns: WriterGate, sums: GcTotals
    ) -> dict[int, PendingDelete]:
        """End versions, and what was replaced; return the record, which stays."""
        ids = self._remove_replaced(generations, turns, sums)  # 1
        self._expire_versions(roots, turns, sums)  # 2
        record = self._condemned.read()
        sums.pending_delete_bytes = self._pending_delete_bytes(record, ids)
        return record

    def _readable(self, container: int) -> Directory | None:
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound):
            return None

    def _report(
        self, sums: GcTotals, record: Mapping[int, PendingDelete], started: float, *, dry_run: bool = False
    ) -> GcReport:
        all_due_us = [entry.at_us + self._grace_us for entry in record.values()]
        later_us = [moment_us for moment_us in all_due_us if moment_us > self._now_us()]  # the rest is held by others
        due_us = min(later_us or all_due_us, default=None)
        return GcReport(
            dry_run=dry_run,
            versions=sums.versions,
            refused_records=sums.refused,
            containers_deleted=sums.deleted,
            containers_rewritten=sums.rewritten,
            freed_bytes=sums.freed_bytes,
            pending_delete_containers=len(record),
            pending_delete_bytes=sums.pending_delete_bytes,
            due=None if due_us is None else datetime.fromtimestamp(min(due_us / 1e6, CREATED_US_MAX // 1_000_000), UTC),
            held=sums.held,
            seconds=time.perf_counter() - started,
        )

    def _roots(self, generations: Collection[int], sums: GcTotals, *, deleted_too: bool) -> Roots:
        """Return all versions. Raises StoreUnavailable where manifests cannot be where they were, Corrupt.

        Of each key a manifest or its last mark stays, whatever is freed: none of either means a disk that is not there,
        or a first put that is at work, or has failed: what is younger than the grace goes on waiting for it.
        """
        now_us = self._now_us()
        roots = find_roots(self._manifests, CREATED_US_MAX + 1 if deleted_too else now_us)
        sums.refused = len(roots.refused)
        metrics.CORRUPT.labels("record").inc(len(roots.refused))
        for name in roots.refused[:REFUSED_NAMED_MAX]:
            _log.warning(
                "gc: %s: damaged or not authenticated by the store's key, its version is kept; if it is of an older "
                "release gc.sign_old_records signs it",
                name,
            )
        since_ms = (now_us - self._grace_us) // 1000
        if not roots.highest and (old := sum(container >> 20 < since_ms for container in generations)):
            raise StoreUnavailable(
                f"manifests: there is none, and no mark, beside {old} containers: if they lie on a disk of their own "
                "mount it. What a put left that failed before any version was committed is freed once one is"
            )
        return roots

    def _recent_containers(self, containers: Collection[int]) -> list[int]:
        """Return those whose versions may still be on their way: all of them is needed. Ids begin with their time."""
        since_ms = (self._now_us() - RECENT_GRACES * self._grace_us) // 1000
        return [container for container in containers if container >> 20 >= since_ms] if self._online else []

    def _writing(self, since: ConcurrentWrites, ids: dict[int, int], sums: GcTotals, turns: WriterGate) -> GcExecutor:
        def go_on() -> None:
            turns.on_rewrite_start()
            self._go_on()

        containers, rewriter, replacing = self._containers, self._rewriter, self._replacing
        return GcExecutor(containers, rewriter, replacing, since, ids, sums, self._with_progress, go_on)

    def _with_progress(self, items: Sequence[Item], text: str) -> Iterator[Item]:
        """Yield the items, and tell before each how many are done."""
        for done, item in enumerate(items):
            if self._steps is not None:
                self._steps(done, len(items), text)
            yield item

    def _check_clock(self) -> None:
        """Refuse to condemn by a time that no record can hold."""
        now_us = self._now_us()
        if not 0 <= now_us <= CREATED_US_MAX:
            raise BadInput(
                f"the clock says {now_us} us after 1970: want a time from 1970 to 9999; set it, no garbage is "
                "collected meanwhile"
            )

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _is_due(self, entry: PendingDelete) -> bool:
        return entry.at_us + self._grace_us <= self._now_us()

    # --- 1: what was cut short --------------------------------------------------------------------------------------

    def _remove_replaced(
        self, listed: Mapping[ContainerId, dict[int, int]], turns: WriterGate, sums: GcTotals
    ) -> dict[int, int]:
        """Remove generations that have been replaced; return the bytes of each container."""
        ids: dict[int, int] = {}
        for container, generations in listed.items():
            newest = max(generations)
            ids[container] = generations[newest]
            if len(generations) == 1:
                continue
            with turns.exclusive() as index:  # a put that has read the older one is not in flight then
                self._replacing.renew(index, container)
                failpoint("gc.renewed")
                for older in sorted(generations.keys() - {newest}):
                    self._containers.delete(container, older)
                    failpoint("gc.replaced")
                turns.on_container_rewritten(container)
        return ids

    def _expire_versions(self, roots: Roots, turns: WriterGate, sums: GcTotals) -> tuple[Version, ...]:
        """Free what is left of versions that are gone for good; return all others, the roots."""
        ended = VersionExpiry(self._manifests, self._now_us).expire(roots, turns)
        sums.versions += ended.versions
        return ended.kept

    # --- 7: what is unreached from now on ----------------------------------------------------------------------------

    def _mark_for_deletion(
        self,
        plan: GcPlan,
        ids: Mapping[int, int],
        record: dict[int, PendingDelete],
        before: dict[int, PendingDelete],
        since: ConcurrentWrites,
        sums: GcTotals,
    ) -> dict[int, PendingDelete]:
        """Return the record of this round: what was condemned before and is unreached still, and what is now."""
        looked_up = since.prefetch_removals(plan.chunks, plan.segments)
        with since.exclusive() as index:
            kept = since.retained(plan.removals)
            plan = GcPlan({c: drop for c, drop in plan.removals.items() if c not in kept}, plan.stale_references)
            if plan.removals:
                index.withdraw(plan.chunks, plan.segments, (), looked_up)
                failpoint("gc.forgot")
            now_us = self._now_us()  # after the index has forgotten: the grace begins when nobody is told any more
            found = record_of(plan, now_us)
            for container in found.keys() & record.keys():
                if record[container].at_us <= now_us:  # else condemned by a clock that was ahead
                    found[container] = carry_over(record[container], found[container])
            found = fitting(found)
            if (
                not same_record(found, before) or not self._condemned.is_consistent()
            ):  # the latter after a crash, or damage
                generation = 1
                if isinstance(index, SupportsGenerations):  # before the record: see GcGeneration
                    generation = index.advance_generation(max(self._condemned.list_records(), default=0) + 1)
                    failpoint("gc.generation")
                self._condemned.replace(found, generation)
        sums.pending_delete_bytes = self._pending_delete_bytes(found, ids)
        return found

    def _pending_delete_bytes(self, record: dict[int, PendingDelete], ids: Mapping[int, int]) -> int:
        """Return what a record and what it names take, beyond an empty record."""
        pending_delete_bytes = record_bytes(record) - EMPTY_BYTES
        for container, entry in record.items():
            stored_bytes = ids[container]
            if not entry.whole:
                shares = bytes_of_chunks(self._containers.directory(ContainerId(container)))
                stored_bytes = int(shares[entry.chunks].sum())
            pending_delete_bytes += takes_bytes(
                self._condemned.objects, object_name(ContainerId(container)), stored_bytes
            )
        return pending_delete_bytes


def meter_writes(objects: ObjectStore) -> tuple[MeteredObjectStore, ObjectStore]:
    """Return the same store, and what counts in it all that is written and removed."""
    counted: list[MeteredObjectStore] = []

    def wrap(lowest: ObjectStore) -> ObjectStore:
        counted.append(MeteredObjectStore(lowest))
        return counted[0]

    through = rewrap_lowest(objects, wrap)
    return counted[0], through


@contextmanager
def _erased_meanwhile() -> Iterator[None]:
    """Say of a tenant whose keys go while a round reads what they sealed that the next round finds none of it."""
    try:
        yield
    except TenantErased as err:
        raise RetryableError(f"{err}; that came while a round was at work, and ended it: run it again") from err


def require_marking(settings: GcSettings) -> None:
    """Raise ConfigError where rounds beside services are to do what only a store of one process can."""
    if settings.mode != MARK_SWEEP:
        raise ConfigError(
            f"gc.mode = {settings.mode!r}: beside services a round always marks, their index keeps no such counts; "
            f"set gc.mode to {MARK_SWEEP!r}"
        )


class NoIndex:
    """An index that a preview tells nothing."""

    def withdraw(
        self,
        chunks: Mapping[int, U32 | None],
        segments: Mapping[int, U32],
        containers: Collection[int],
        looked_up: object = None,
    ) -> None:
        """Do nothing."""

    def renew(self, summary: ContainerSummary) -> None:
        """Do nothing."""

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Do nothing."""
