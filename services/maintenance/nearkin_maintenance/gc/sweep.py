"""Apply the plans of a GC run: delete and rewrite containers.

    rebase       chunks whose bases are due: re-encoded against other bases, oldest containers first
    sweep        due data that no other chunk depends on: deleted, or the container rewritten, newest first
    merge        repeated changes of one region: collected in a merged block, oldest first (merge_planner.py)
    recompress   raw blocks: compressed with a deeper search, once (recompress.py)
    mark         data unreachable since this run: withdrawn from the index, recorded as pending delete

Each effect is an exclusive section that first refreshes the live set. Invariant (I8): a container is deleted before the
containers of its bases.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_maintenance.gc.gc_context import GcHooks, GcStore, Item
from nearkin_maintenance.gc.gc_plan import (
    ContainerAction,
    ContainerRemoval,
    GcPlan,
    carry_over,
    is_same_record,
    plan_rebase_removals,
    record_of,
)
from nearkin_maintenance.gc.mark import DroppedBases, LiveSet, Masks
from nearkin_maintenance.gc.retained_bytes import bytes_of_chunks
from nearkin_maintenance.optimize.container_swap import SwapResult
from nearkin_maintenance.optimize.rebase.base_trees import build_base_trees
from nearkin_maintenance.optimize.rebase.container_rebase import RebasePlan
from nearkin_maintenance.optimize.rebase.replacement_bases import ReplacementBases
from nearkin_maintenance.optimize.rebase.stream_positions import estimate_positions
from nearkin_maintenance.optimize.recompress import ContainerRecompression
from nearkin_shared.errors import Corrupt, NoRoom, NotFound, PermanentError
from nearkin_shared.formats.manifest import CREATED_US_MAX
from nearkin_shared.formats.pending_delete_record import PendingDelete, select_fitting
from nearkin_shared.index.protocols import SupportsGenerations
from nearkin_shared.objectstore.delegating import takes_bytes
from nearkin_shared.objectstore.metered import MeteredObjectStore
from nearkin_shared.results import GcReport
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import object_name
from nearkin_shared.storage.pending_deletes import EMPTY_BYTES, record_bytes
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin")


@dataclass(slots=True)
class GcTotals:
    """Counts of one GC run so far."""

    metered: MeteredObjectStore
    versions: int = 0
    deleted: int = 0
    rewritten: int = 0
    pending_delete_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    """Tombstones that are damaged or not authenticated: their versions are kept."""
    undeletable: int = 0
    """Deleted versions that are kept, because they can be undeleted or are retained."""
    recent: int = 0
    """Containers of which all data count as live, because their versions may be in flight."""
    no_room: NoRoom | None = None
    """Why some container was not rewritten: the next run does it, in the space that this one frees."""
    freed_before_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.freed_before_bytes = self.metered.freed_bytes

    @property
    def freed_bytes(self) -> int:
        """Return the bytes removed so far, less those written."""
        return self.metered.freed_bytes - self.freed_before_bytes


@frozen
class GcExecutor:
    """Writer of the effects of one GC run.

    `ids` (bytes of each container) and `totals` are up to date after each effect.
    """

    store: GcStore
    hooks: GcHooks
    concurrent_writes: ConcurrentWrites
    ids: dict[int, int]
    totals: GcTotals

    # --- 4: chunks that depend on pending deletes ---------------------------------------------------------------------

    def rebase(
        self, live_set: LiveSet, dropped_bases: DroppedBases, due: Mapping[int, PendingDelete], live_chunks: Masks
    ) -> None:
        """Re-encode chunks whose bases are due, oldest containers first.

        Due chunks of these containers that are no base of a chunk in another container are removed with it. If a
        container has to stay unchanged, so do all later ones: their chunks would depend on chunks of its next
        generation, and be no shallower than their own dependents. A damaged container also stops the rebase, unless it
        holds chunks of `live_chunks`; it becomes a pending delete like any unreachable container.
        """
        removals = plan_rebase_removals(live_set, self.ids, due, dropped_bases)
        needed = live_set.transitive_closure(live_set.chunks)
        order = list(topological_order(sorted({*needed, *dropped_bases.containers}), self._base_containers))
        replacements = ReplacementBases(live_set, build_base_trees(live_set, needed), dropped_bases.containers, order)
        rebase_plan = RebasePlan(dropped_bases.chunks, replacements, estimate_positions(live_set, needed))
        chunks: dict[int, U32 | None] = {container: removal.chunks for container, removal in removals.items()}
        segments = {container: removal.segments for container, removal in removals.items()}
        looked_up = self.concurrent_writes.prefetch_removals(chunks, segments)
        with self.concurrent_writes.exclusive() as index:
            index.withdraw(chunks, segments, (), looked_up)
            failpoint("rebase.withdrawn")
        remaining = dict(removals)
        containers = [ContainerId(c) for c in order if c in dropped_bases.containers]
        generations = self.store.rewriter.batch_rebase(removals, rebase_plan).generations(
            containers, self._report_tasks
        )
        for container in self.hooks.report_progress(containers, "containers rebased"):
            try:
                if not self._rewrite(container, remaining, partial(next, generations)):
                    return
            except NoRoom as err:
                self.totals.no_room = err
                return
            except Corrupt as err:
                if container in live_chunks and live_chunks[container].any():
                    raise
                _log.warning("%s: the container is dead and stays unchanged", err)
                return
            del remaining[container]
            failpoint("rebase.container")
        failpoint("rebase.done")

    def _report_tasks(self, tasks: Sequence[Item]) -> Iterator[Item]:
        """Yield the re-encoding tasks; before each, the run may be stopped."""
        for task in self.hooks.report_progress(tasks, "parts of containers re-encoded"):
            self.hooks.check()
            yield task

    # --- 5: pending deletes of earlier runs ---------------------------------------------------------------------------

    def sweep(self, plan: GcPlan) -> dict[int, ContainerRemoval]:
        """Delete the planned data; return what was deleted.

        Data that a concurrent put needs are kept, and so are containers for whose next generation there is no space.
        """
        if not plan.removals:
            return {}
        whole_containers = [container for container, removal in plan.removals.items() if removal.whole_container]
        looked_up = self.concurrent_writes.prefetch_removals(plan.chunks, plan.segments)
        with self.concurrent_writes.exclusive() as index:
            index.withdraw(plan.chunks, plan.segments, whole_containers, looked_up)
            failpoint("gc.due-withdrawn")
        remaining = dict(plan.removals)
        removed, deferred = {}, []
        # Dependents before their bases: after a crash, every container that is left can be decoded.
        containers = reversed(list(topological_order(sorted(plan.removals), self._base_containers)))
        for container in self.hooks.report_progress(list(containers), "containers swept"):
            self.hooks.check()
            removal = remaining[container]
            try:
                if removal.action is ContainerAction.DELETE:
                    done = self._remove(ContainerId(container), remaining)
                else:
                    make = partial(self.store.rewriter.rewritten, ContainerId(container), removal)
                    done = self._rewrite(ContainerId(container), remaining, make)
            except NoRoom as err:  # deleting other containers as a whole frees space
                self.totals.no_room, done = err, False
                deferred.append(container)
            del remaining[container]
            if done:
                removed[container] = removal
            else:
                self.concurrent_writes.retain(container)
        self.concurrent_writes.record_deferred(deferred)
        return removed

    def _remove(self, container: ContainerId, remaining: Mapping[int, ContainerRemoval]) -> bool:
        """Delete a container; return False if it has to stay."""
        with self.concurrent_writes.exclusive() as index:
            if container in self.concurrent_writes.retained(remaining):
                self.store.swap.renew(index, container)  # the index had withdrawn it
                return False
            self.totals.deleted += 1
            del self.ids[container]
            self.store.containers.delete(container, self.store.containers.generation(container))
            self.concurrent_writes.on_container_rewritten(container, None)
            failpoint("gc.container")
        return True

    def _rewrite(
        self, container: ContainerId, remaining: Mapping[int, ContainerRemoval], make: Callable[[], bytes]
    ) -> bool:
        """Write the next generation, then delete the previous one, at a bounded speed.

        Returns False if the container has to stay unchanged.
        """
        result = self.store.swap.replace(
            container,
            self.ids[container],
            make,
            lambda: container in self.concurrent_writes.retained(remaining),
            self.concurrent_writes,
        )
        return self._record_replacement(container, result)

    def _record_replacement(self, container: ContainerId, result: SwapResult | None) -> bool:
        if result is None:
            return False
        self.ids[container] = result.now_bytes
        self.totals.rewritten += 1
        return True

    def _base_containers(self, container: int) -> list[int]:
        try:
            return self.store.containers.directory(ContainerId(container)).base_containers()
        except (PermanentError, NotFound):
            return []

    # --- 6: merged blocks ---------------------------------------------------------------------------------------------

    def merge(self, live_set: LiveSet, recent: Collection[int], block_bytes: int, versions_min: int) -> None:
        """Rewrite merge targets and the containers that then reference them, oldest first.

        See `MergePlanner.plan`. If a target has to stay unchanged, so do the containers that would reference it.
        """
        planner = self.store.rewriter.gatherer
        merge_plan = planner.plan(live_set, self.ids, recent, block_bytes, versions_min)
        if merge_plan is None:
            return
        executor = planner.executor(merge_plan)
        listed = [
            container for container in merge_plan.containers if container in self.ids
        ]  # others are newer than the run
        for container in self._rewrite_each(listed, executor.data, "merged"):
            executor.on_container_rewritten(container)
            failpoint("merge.container")
        live_set.mark_references()

    # --- 7: recompression ---------------------------------------------------------------------------------------------

    def recompress(self, live_set: LiveSet, recent: Collection[int]) -> None:
        """Compress raw blocks with a deeper search, once each, oldest containers first."""
        recompressor = self.store.rewriter.recompressor
        containers = recompressor.chosen(self.ids, recent, live_set)
        executor = ContainerRecompression(recompressor, containers)
        for _ in self._rewrite_each(containers, executor.data, "recompressed"):
            failpoint("recompress.container")

    def _rewrite_each(
        self, containers: Sequence[ContainerId], make: Callable[[ContainerId], bytes | None], done: str
    ) -> Iterator[ContainerId]:
        """Write the next generation that `make` returns for each container; yield those written.

        A container stays unchanged if another process rewrote it, if it is damaged, or if there is no space.
        """
        for container in self.hooks.report_progress(containers, f"containers {done}"):
            self.hooks.check()
            try:
                result = self.store.swap.replace(
                    container,
                    self.ids[container],
                    partial(make, container),
                    partial(self.concurrent_writes.is_rewritten_or_retained, container),
                    self.concurrent_writes,
                )
            except NoRoom as err:
                _log.warning("%s: no further container is %s in this GC run", err, done)
                return
            except Corrupt as err:
                _log.warning("%s: the container is not %s", err, done)
                continue
            if self._record_replacement(container, result):
                yield container

    # --- 8: data unreachable since this run ---------------------------------------------------------------------------

    def mark_for_deletion(
        self,
        plan: GcPlan,
        record: dict[int, PendingDelete],
        before: dict[int, PendingDelete],
        unplanned: Mapping[int, PendingDelete] = MappingProxyType({}),
    ) -> dict[int, PendingDelete]:
        """Withdraw planned data from the index and write the pending-delete record.

        The record lists data of earlier runs that are still unreachable, and the data of `plan`. `unplanned`: entries
        of containers that the plan is not about; they stay as they are.
        """
        looked_up = self.concurrent_writes.prefetch_removals(plan.chunks, plan.segments)
        with self.concurrent_writes.exclusive() as index:
            retained = self.concurrent_writes.retained(plan.removals)
            removals = {c: removal for c, removal in plan.removals.items() if c not in retained}
            plan = GcPlan(removals, plan.stale_references)
            if plan.removals:
                index.withdraw(plan.chunks, plan.segments, (), looked_up)
                failpoint("gc.pending-withdrawn")
            now_us = self.hooks.now_us()  # after the withdrawal: the grace begins when no process finds the data
            updated = record_of(plan, now_us)
            for container in updated.keys() & record.keys():
                if record[container].at_us <= now_us:  # else recorded by a clock that was ahead
                    updated[container] = carry_over(record[container], updated[container])
            updated = select_fitting({**unplanned, **updated})
            # A record is inconsistent after a crash, or if it is damaged: then it is written again.
            if not is_same_record(updated, before) or not self.store.pending_deletes.is_consistent():
                generation = 1
                if isinstance(index, SupportsGenerations):  # before the record: see GcGeneration
                    generation = index.advance_generation(max(self.store.pending_deletes.list_records(), default=0) + 1)
                    failpoint("gc.generation")
                self.store.pending_deletes.replace(updated, generation)
        self.totals.pending_delete_bytes = pending_delete_bytes(self.store, updated, self.ids)
        return updated


def make_report(
    totals: GcTotals, record: Mapping[int, PendingDelete], grace_us: int, now_us: int, started: float
) -> GcReport:
    """Return the report of a run that leaves a pending-delete record.

    `started` is a value of `time.perf_counter`.
    """
    all_due_us = [entry.at_us + grace_us for entry in record.values()]
    later_us = [moment_us for moment_us in all_due_us if moment_us > now_us]  # other data are kept by dependents
    due_us = min(later_us or all_due_us, default=None)
    return GcReport(
        dry_run=False,
        versions=totals.versions,
        refused_records=totals.refused,
        containers_deleted=totals.deleted,
        containers_rewritten=totals.rewritten,
        freed_bytes=totals.freed_bytes,
        pending_delete_containers=len(record),
        pending_delete_bytes=totals.pending_delete_bytes,
        due=None if due_us is None else datetime.fromtimestamp(min(due_us / 1e6, CREATED_US_MAX // 1_000_000), UTC),
        held=totals.held,
        undeletable_versions=totals.undeletable,
        recent_containers=totals.recent,
        seconds=time.perf_counter() - started,
    )


def pending_delete_bytes(store: GcStore, record: dict[int, PendingDelete], sizes: Mapping[int, int]) -> int:
    """Return the stored bytes of a record and of the data that it lists.

    An empty record counts as 0.
    """
    total_bytes = record_bytes(record) - EMPTY_BYTES
    for container, entry in record.items():
        stored_bytes = sizes[container]
        if not entry.whole:
            shares = bytes_of_chunks(store.containers.directory(ContainerId(container)))
            stored_bytes = int(shares[entry.chunks].sum())
        name = object_name(ContainerId(container))
        total_bytes += takes_bytes(store.pending_deletes.objects, name, stored_bytes)
    return total_bytes
