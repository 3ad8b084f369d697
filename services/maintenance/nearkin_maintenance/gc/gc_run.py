"""Run garbage collection: mark, plan, apply.

    1 delete generations that newer ones replaced       2 expire versions: tombstone, index, manifest, tombstones
    3 mark the live set of all other versions
    4 rebase: re-encode live chunks whose bases are due
    5 sweep: delete due data that no chunk depends on: index, then the container or its next generation
    6 merge repeated changes of one region into a block (merge_planner.py)
    7 compress raw blocks with a deeper search, once (recompress.py)
    8 mark other unreachable data for deletion: index, then the pending-delete record

Invariant (I6): data are deleted only if two GC runs, at least one grace apart, found them unreachable. A process that
read an index entry before its withdrawal has committed when the grace (`gc.grace_seconds`) ends, and the next mark
finds its version. docs/adr/0015-two-phase-garbage-collection.md.

Marking, planning and encoding run concurrently with puts. Each effect is an exclusive section that first refreshes the
live set (concurrent_writes.py). A run that stops at any step leaves a sound store; the next run repeats the rest.

Each step is planned without effects (gc_plan.py), then applied by the executor (sweep.py). `GcRun` builds a pass over
the store (`run`), or over an overlay whose writes are discarded (`preview`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_maintenance.gc.gc_context import GcHooks, GcStore, meter_writes
from nearkin_maintenance.gc.gc_plan import (
    GcPlan,
    plan_pending,
    plan_rebase,
    plan_sweep,
    protect_recent,
    record_removal,
)
from nearkin_maintenance.gc.incremental_run import IncrementalPass, IncrementalResult
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.online_run import OnlinePass, confirm_listed, without_recent
from nearkin_maintenance.gc.reference_counts import ReferenceCounts
from nearkin_maintenance.gc.retained_bytes import retained_bytes_by_reason
from nearkin_maintenance.gc.roots import Roots, RootVersion, find_roots
from nearkin_maintenance.gc.sweep import GcExecutor, GcTotals, make_report, pending_delete_bytes
from nearkin_maintenance.gc.version_expiry import VersionExpiry
from nearkin_maintenance.gc.writer_gate import NoWriters, WriterGate
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.optimize.container_swap import ContainerSwap
from nearkin_maintenance.verify.manifest_validation import ValidatingManifestReader
from nearkin_shared.config.storage import HYBRID, MARK_SWEEP, GcSettings
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
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.protocols import CollectedVersion, ContainerSummary, SupportsCollection
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import overlaid
from nearkin_shared.objectstore.metered import MeteredObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.results import GcReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint


class GcRefused(PermanentError):
    """A GC run would be unsafe in this store."""


_log = logging.getLogger("nearkin")

LATER_RUNS_MAX = 8
"""GC runs that a preview simulates: pending deletes are freed by the next run, data that they held by the one after."""
REFUSED_NAMED_MAX = 20
"""Refused tombstones that one run names in the log."""
_UNBOUNDED = 1 << 62
BLOCKS_BYTES = 96 * MIB
"""Decoded blocks that a GC run caches. Merging 16 dumps took 19, 13 and 12 s with 64, 128 and 256 MiB; a run over the
last 12 of 44 merged ones peaks at 441 MB with 96 MiB, at 504 MB with 128, and takes 5.5 and 5.2 s."""
SERVICE_MODES = (MARK_SWEEP, HYBRID)
"""Values of `gc.mode` that services support."""


class GcRun:
    """One GC run over a store, all tenants of it.

    One at a time: the caller holds the GC lock or the GC lease.
    """

    def __init__(
        self,
        objects: ObjectStore,
        containers: ContainerStore,
        settings: GcSettings,
        rewriter: Rewriter,
        *,
        hooks: GcHooks | None = None,
        online: bool = False,
        ledger: ReferenceCounts | None = None,
    ) -> None:
        """`online`: services write concurrently, as in docs/adr/0015.

        `ledger`: reference counts that decide whether marking can find anything; without, every run marks.

        Raises: ConfigError if `online` and `gc.mode` do not fit.
        """
        if online:
            require_service_mode(settings)
        self._objects = objects
        self._containers = containers.of(None)
        self._settings = settings
        self._rewriter = rewriter
        self._hooks = hooks or GcHooks()
        self._online = online
        self._ledger = ledger

    def run(self, index: SupportsCollection) -> GcReport:
        """Collect garbage without excluding other writers.

        Either no other process writes, or leases and the protection of recent containers cover concurrent writes.

        Raises: Corrupt (the needs of a version are unknown: nothing is marked for deletion), StoreUnavailable,
        RetryableError (a tenant was erased meanwhile).
        """
        return self.run_online(NoWriters(index))

    def run_online(self, gate: WriterGate) -> GcReport:
        """Collect garbage; exclude other writers while an effect is applied.

        Raises: the errors of `run`, and StoreLocked.
        """
        with self._opened() as store:
            return self._pass(store, gate, self._hooks, self._ledger).run()

    def run_incremental(self, gate: WriterGate) -> IncrementalResult:
        """Collect what the changes since the last run made unreachable.

        Without a report in the result the run has to mark: call `run_online` then. Requires a ledger.

        Raises: the errors of `run_online`.
        """
        assert self._ledger is not None
        with self._opened() as store:
            return IncrementalPass(store, self._settings, gate, self._hooks, self._ledger).run()

    def run_by_change(self, index: SupportsCollection) -> IncrementalResult:
        """Do what `run_incremental` does in a fleet, whose services write meanwhile.

        Raises: the errors of `run`.
        """
        assert self._ledger is not None
        with self._opened() as store:
            return OnlinePass(store, self._settings, index, self._hooks, self._ledger).run()

    def confirm(self) -> None:
        """Record, after a run that marked, that its tables have all listed versions.

        Raises: StoreUnavailable.
        """
        assert self._ledger is not None
        confirm_listed(self._ledger, self._containers, ManifestStore(self._objects), self._hooks.now_us())

    def preview(self, *, deleted_too: bool = False) -> GcReport:
        """Return the report that `run` would give, and the retained bytes by reason.

        Changes nothing: runs this GC run and the next ones over an overlay of the store. Their writes are stored in the
        system's temporary folder, encrypted if the store is, and need space there. `deleted_too`: as if every undelete
        window had ended.
        """
        with _translate_erasure(), overlaid(self._objects) as overlay:
            VersionHeads(overlay).raise_recorded(ManifestStore(overlay))  # as a run does before it expires versions
            metered, objects = meter_writes(overlay)
            containers = self._containers.with_own_caches(objects, BLOCKS_BYTES)
            store = self._open(objects, containers, metered, _UNBOUNDED)
            hooks, gate = replace(self._hooks, check=lambda: None), NoWriters(NoIndex())
            report = self._pass(store, gate, hooks).run(deleted_too=deleted_too, dry_run=True)
            later_bytes = 0
            for _ in range(LATER_RUNS_MAX):
                later = self._pass(store, gate, hooks, grace_us=0).run(deleted_too=deleted_too)
                later_bytes += later.freed_bytes
                if not later.pending_delete_containers and not later.freed_bytes:
                    break
        return replace(report, pending_delete_bytes=later_bytes)

    @contextmanager
    def _opened(self) -> Iterator[GcStore]:
        """Yield the store, whose writes are counted.

        Raises: GcPaused, RetryableError (a tenant was erased meanwhile).
        """
        self._hooks.check()
        with _translate_erasure():
            metered, objects = meter_writes(self._objects)
            containers = self._containers.with_objects(objects)
            yield self._open(objects, containers, metered, int(self._settings.bytes_per_second))

    def _open(
        self, objects: ObjectStore, containers: ContainerStore, metered: MeteredObjectStore, bytes_per_second: int
    ) -> GcStore:
        return GcStore(
            containers,
            ManifestStore(objects),
            PendingDeleteStore(objects),
            self._rewriter.with_containers(containers),
            ContainerSwap(containers, bytes_per_second),
            metered,
        )

    def _pass(
        self,
        store: GcStore,
        gate: WriterGate,
        hooks: GcHooks,
        ledger: ReferenceCounts | None = None,
        grace_us: int | None = None,
    ) -> GcPass:
        grace_us = self._settings.grace_seconds * 1_000_000 if grace_us is None else grace_us
        return GcPass(store, self._settings, gate, hooks, ledger, grace_us, self._online)


class GcPass:
    """One execution of the steps of a GC run over a `GcStore`."""

    def __init__(
        self,
        store: GcStore,
        settings: GcSettings,
        gate: WriterGate,
        hooks: GcHooks,
        ledger: ReferenceCounts | None,
        grace_us: int,
        online: bool,
    ) -> None:
        self._containers, self._manifests = store.containers, store.manifests
        self._pending_deletes = store.pending_deletes
        self._store = store
        self._settings = settings
        self._gate = gate
        self._hooks = hooks
        self._ledger = ledger
        self._grace_us = grace_us
        self._online = online
        self._totals = GcTotals(store.metered)
        self._listed_us = 0
        """Time before the listing: a version that is not listed may need data that become due later."""

    def run(self, *, deleted_too: bool = False, dry_run: bool = False) -> GcReport:
        """Do all steps. `dry_run`: also sum up the bytes that remain, by reason.

        Raises: the errors of `GcRun.run_online`.
        """
        started, token = time.perf_counter(), self._gate.change_token()
        self._check_clock()
        self._listed_us = self._hooks.now_us()
        generations = self._containers.generations()  # before the manifests: a concurrent put then adds no garbage
        roots = self._find_roots(generations, deleted_too=deleted_too)
        recent = self._recent_containers(generations)
        if not self._needs_marking(generations, roots, recent):
            return self._report(self._run_without_mark(generations, roots), started)
        self._totals.recent = len(recent)
        refs_cache = None if self._ledger is None else self._ledger.refs_cache(self._hooks.now_us())
        names = [version.manifest for version in roots.kept]
        reported_names = self._hooks.report_progress(names, "manifests read")
        live_set = LiveSet(self._containers, self._manifests, reported_names, recent, refs_cache, generations)
        if live_set.by_services is not None and not (self._settings.assume_services_stopped or self._online):
            raise GcRefused(
                f"{live_set.by_services}: committed by services; nothing was changed. Their maintenance service runs "
                "GC; if no service will ever write this store again, set gc.assume_services_stopped"
            )
        if self._ledger is not None:
            self._ledger.audit({c: mask for c, mask in live_set.segments.items() if c not in recent})
        sizes = self._remove_replaced(generations)  # 1
        kept = self._expire_versions(roots)  # 2
        if len(kept) > len(roots.kept):  # some were undeleted meanwhile
            names = [version.manifest for version in kept]
            live_set = LiveSet(self._containers, self._manifests, names, recent, refs_cache, generations)  # 3
        failpoint("gc.marked")
        self._hooks.check()
        names = [version.manifest for version in (*roots.kept, *roots.ended)]
        writes = ConcurrentWrites(self._gate, token, self._containers, self._manifests, generations, names, live_set)
        before = self._pending_deletes.read()
        executor = self._make_executor(writes, sizes)
        record = self._apply(executor, live_set, before, recent)  # 4 to 7
        writes.refresh()
        plan = plan_pending(live_set, sizes, self._settings.compact_below)
        failpoint("gc.marking-planned")
        record = executor.mark_for_deletion(plan, record, before)  # 8
        if dry_run:
            readable = [version.manifest for version in kept if version.manifest not in roots.undeletable]
            others = LiveSet(self._containers, self._manifests, readable, recent, known_containers=generations)
            self._totals.held = retained_bytes_by_reason(live_set, others, sizes, record)
        if self._ledger is not None:
            self._ledger.record_marking(self._hooks.now_us())
        return self._report(record, started, dry_run=dry_run)

    def _apply(
        self,
        executor: GcExecutor,
        live_set: LiveSet,
        before: Mapping[int, PendingDelete],
        recent: Collection[int],
    ) -> dict[int, PendingDelete]:
        """Rebase, sweep, merge and recompress containers.

        Returns the rest of the pending-delete record.
        """
        settings, totals, sizes = self._settings, self._totals, executor.ids
        record = {container: entry for container, entry in before.items() if container in sizes}
        due = {container: entry for container, entry in record.items() if self._is_due(entry)}
        protected = protect_recent(live_set, sizes, due) if due else live_set
        dropped_bases = plan_rebase(protected, sizes, due, settings.compact_below)
        with self._store.rewriter.with_helper_thread():
            if dropped_bases is not None:
                executor.rebase(protected, dropped_bases, due, live_set.chunks)  # 4
            executor.concurrent_writes.refresh()
            plan = plan_sweep(live_set, sizes, due) if due else GcPlan({})
            failpoint("gc.swept-planned")
            for container, removal in executor.sweep(plan).items():  # 5
                record_removal(record, container, removal)
            if totals.no_room is not None and not totals.deleted:
                raise totals.no_room
            if settings.merge_block_bytes and totals.no_room is None:
                executor.merge(live_set, recent, int(settings.merge_block_bytes), settings.merge_versions_min)  # 6
            if totals.no_room is None:
                executor.recompress(live_set, recent)  # 7
        return record

    def _needs_marking(
        self, generations: Mapping[ContainerId, dict[int, int]], roots: Roots, recent: Collection[ContainerId]
    ) -> bool:
        """Return whether marking may find data to mark for deletion or to free.

        In a fleet always: OnlinePass was first. `recent` containers are examined by a later run.
        """
        if self._ledger is None:
            return True
        names = [version.manifest for version in roots.kept]
        reader = ValidatingManifestReader(self._manifests, self._containers, generations)
        now_us = self._hooks.now_us()
        examined = generations.keys() - recent
        candidates = self._ledger.update(names, examined, reader.read, self._read_directory, now_us)
        record = self._pending_deletes.read()
        is_as_written = self._pending_deletes.is_consistent() and record.keys() <= set(
            generations
        )  # else crash, damage
        return self._online or candidates.marking or not is_as_written or any(map(self._is_due, record.values()))

    def _run_without_mark(
        self, generations: Mapping[ContainerId, dict[int, int]], roots: Roots
    ) -> dict[int, PendingDelete]:
        """Do steps 1 and 2 only; return the pending-delete record, which stays as it is."""
        sizes = self._remove_replaced(generations)  # 1
        self._expire_versions(roots)  # 2
        record = self._pending_deletes.read()
        self._totals.pending_delete_bytes = pending_delete_bytes(self._store, record, sizes)
        return record

    def _read_directory(self, container: int) -> Directory | None:
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound):
            return None

    def _report(self, record: Mapping[int, PendingDelete], started: float, *, dry_run: bool = False) -> GcReport:
        report = make_report(self._totals, record, self._grace_us, self._hooks.now_us(), started)
        return replace(report, dry_run=dry_run)

    def _find_roots(self, generations: Collection[int], *, deleted_too: bool) -> Roots:
        """Return all versions of the store.

        Each key keeps a manifest or its last tombstone, whatever is freed. A store with containers and neither of them
        has lost a disk, or its first put is running or has failed: its containers wait until they are older than the
        grace.

        Raises: StoreUnavailable if the manifests are not accessible, Corrupt.
        """
        now_us = self._hooks.now_us()
        heads = VersionHeads(self._manifests.objects).read()
        roots = find_roots(self._manifests, CREATED_US_MAX + 1 if deleted_too else now_us, heads=heads)
        self._totals.refused = len(roots.refused)
        metrics.CORRUPT.labels("record").inc(len(roots.refused))
        for name in roots.refused[:REFUSED_NAMED_MAX]:
            _log.warning(
                "gc: %s: damaged or not authenticated by the store's key, its version is kept; if an older release "
                "wrote it, gc.sign_old_records signs it",
                name,
            )
        since_ms = (now_us - self._grace_us) // 1000
        if not roots.highest and (old := sum(container >> 20 < since_ms for container in generations)):
            raise StoreUnavailable(
                f"manifests: the store has {old} containers, but no manifest and no tombstone; if manifests are stored "
                "on a disk of their own, mount it. Data of puts that failed before the first version was committed are "
                "freed once a version is"
            )
        return roots

    def _recent_containers(self, containers: Collection[ContainerId]) -> set[ContainerId]:
        """Return the containers whose versions may be in flight: all their data count as live.

        Container ids begin with the time of their creation.
        """
        if not self._online:
            return set()
        older = without_recent(containers, self._listed_us, self._grace_us)
        return {container for container in containers if container not in older}

    def _make_executor(self, writes: ConcurrentWrites, sizes: dict[int, int]) -> GcExecutor:
        def check() -> None:
            self._gate.on_rewrite_start()
            self._hooks.check()

        hooks = replace(self._hooks, check=check)
        return GcExecutor(self._store, hooks, writes, sizes, self._totals)

    def _check_clock(self) -> None:
        """Raise BadInput for a time that a pending-delete record cannot hold."""
        now_us = self._hooks.now_us()
        if not 0 <= now_us <= CREATED_US_MAX:
            raise BadInput(
                f"the clock shows {now_us} us after 1970: want a time from 1970 to 9999; set it, no garbage is "
                "collected meanwhile"
            )

    def _is_due(self, entry: PendingDelete) -> bool:
        return entry.at_us + self._grace_us <= self._listed_us

    # --- 1, 2: generations and versions that an earlier run did not finish --------------------------------------------

    def _remove_replaced(self, listed: Mapping[ContainerId, dict[int, int]]) -> dict[int, int]:
        """Delete replaced generations; return the bytes of each container."""
        sizes: dict[int, int] = {}
        for container, generations in listed.items():
            newest = max(generations)
            sizes[container] = generations[newest]
            if len(generations) == 1:
                continue
            with self._gate.exclusive() as index:  # no put that has read an older generation is then in flight
                self._store.swap.renew(index, container)
                failpoint("gc.renewed")
                for older in sorted(generations.keys() - {newest}):
                    self._containers.delete(container, older)
                    failpoint("gc.replaced")
                self._gate.on_container_rewritten(container)
        return sizes

    def _expire_versions(self, roots: Roots) -> tuple[RootVersion, ...]:
        """Delete the objects of versions that cannot be undeleted.

        Returns all other versions, the roots.
        """
        expired = VersionExpiry(self._manifests, self._hooks.now_us).expire(roots, self._gate)
        self._totals.versions += expired.versions
        self._totals.undeletable = expired.count_undeletable(roots)
        return expired.kept


@contextmanager
def _translate_erasure() -> Iterator[None]:
    """Make the erasure of a tenant during a GC run a retryable error.

    The next run finds none of its objects.
    """
    try:
        yield
    except TenantErased as err:
        raise RetryableError(f"{err}; the tenant was erased during this GC run, which has stopped; retry it") from err


def require_service_mode(settings: GcSettings) -> None:
    """Raise ConfigError for a GC mode that services do not support."""
    if settings.mode not in SERVICE_MODES:
        raise ConfigError(
            f"gc.mode = {settings.mode!r}: services collect by change or by marking alone; set gc.mode to "
            f"{MARK_SWEEP!r} or {HYBRID!r}"
        )


class NoIndex:
    """An index that a preview uses in place of the store's."""

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
