"""Containers that a round removes or writes anew. Invariant: what leans goes before what it leans on.

Each effect is a turn that first looks what came since.

rebase   what leans on what an earlier round condemned: on what lives, the oldest first
sweep    what is due and nothing leans on: gone, or written anew without it, the newest first
gather   what newer versions changed of a stretch: into its block, the oldest first (merge_planner.py)
recompress   what puts compressed in a hurry: by a deeper search, once (recompress.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_maintenance.gc.gc_plan import ContainerRemoval, GcPlan, plan_rebase_removals
from nearkin_maintenance.gc.mark import DroppedBases, LiveSet, Masks
from nearkin_maintenance.optimize.base_trees import build_base_trees
from nearkin_maintenance.optimize.compact import Rewriter
from nearkin_maintenance.optimize.container_rebase import RebasePlan
from nearkin_maintenance.optimize.container_swap import ContainerSwap, SwapResult
from nearkin_maintenance.optimize.recompress import ContainerRecompression
from nearkin_maintenance.optimize.replacement_bases import ReplacementBases
from nearkin_maintenance.optimize.stream_positions import estimate_positions
from nearkin_shared.errors import Corrupt, NoRoom, NotFound, PermanentError
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.objectstore.metered import MeteredObjectStore
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin")

Item = TypeVar("Item")


@dataclass(slots=True)
class GcTotals:
    """What a round did so far."""

    counted: MeteredObjectStore
    versions: int = 0
    deleted: int = 0
    rewritten: int = 0
    pending_delete_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    """Marks that are damaged or not authenticated: their versions stay."""
    no_room: NoRoom | None = None
    """Why some container was not written anew: the next round does it, with the room that this one makes."""
    freed_before_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.freed_before_bytes = self.counted.freed_bytes

    @property
    def freed_bytes(self) -> int:
        """Return what was removed so far, less what was put."""
        return self.counted.freed_bytes - self.freed_before_bytes


class GcProgress(Protocol):
    """Tells how far a round is."""

    def __call__(self, items: Sequence[Item], text: str, /) -> Iterator[Item]:
        """Yield the items, and tell before each how many are done."""


@frozen
class GcExecutor:
    """What one round writes. `ids`, the bytes of each container, and `sums` say at any time what was done."""

    containers: ContainerStore
    rewriter: Rewriter
    replacing: ContainerSwap
    since: ConcurrentWrites
    ids: dict[int, int]
    sums: GcTotals
    counted: GcProgress
    go_on: Callable[[], None]
    """Asked before each container; ends the round by raising."""

    # --- 4: what leans on what an earlier round condemned ------------------------------------------------------------

    def rebase(self, reach: LiveSet, rebased: DroppedBases, due: Mapping[int, PendingDelete], living: Masks) -> None:
        """Write containers anew that lean on what may go, the oldest first: the others then lean on what is in it.

        What of them is due, and no other container leans on, goes with it. Where one has to stay as it is, so do those
        after it: they would lean on what it was to become, and be no shallower than what leans on them. So does one
        that is broken, if it holds nothing of `living`: it is condemned as any that nobody reaches.
        """
        beside = plan_rebase_removals(reach, self.ids, due, rebased)
        needed = reach.transitive_closure(reach.chunks)
        order = list(topological_order(sorted({*needed, *rebased.containers}), self._base_containers))
        heirs = ReplacementBases(reach, build_base_trees(reach, needed), rebased.containers, order)
        rebasing = RebasePlan(rebased.chunks, heirs, estimate_positions(reach, needed))
        chunks: dict[int, U32 | None] = {container: drop.chunks for container, drop in beside.items()}
        segments = {container: drop.segments for container, drop in beside.items()}
        looked_up = self.since.prefetch_removals(chunks, segments)
        with self.since.exclusive() as index:
            index.withdraw(chunks, segments, (), looked_up)
            failpoint("rebase.forgot")
        left = dict(beside)
        containers = [ContainerId(c) for c in order if c in rebased.containers]
        made = self.rewriter.batch_rebase(beside, rebasing).generations(containers, self._report_tasks)
        for container in self.counted(containers, "containers written anew"):
            try:
                if not self._rewrite(container, left, partial(next, made)):
                    return
            except NoRoom as err:
                self.sums.no_room = err
                return
            except Corrupt as err:
                if container in living and living[container].any():
                    raise
                _log.warning("%s: dead, and left as it is", err)
                return
            del left[container]
            failpoint("rebase.container")
        failpoint("rebase.done")

    def _report_tasks(self, tasks: Sequence[Item]) -> Iterator[Item]:
        """Yield the parts of containers that are encoded again; before each the round may be ended."""
        for task in self.counted(tasks, "parts of containers encoded again"):
            self.go_on()
            yield task

    # --- 5: what an earlier round condemned --------------------------------------------------------------------------

    def sweep(self, plan: GcPlan) -> dict[int, ContainerRemoval]:
        """Let go of what nothing needs; return what has gone.

        What a put has come to need meanwhile stays, and what there is no room to write anew.
        """
        if not plan.removals:
            return {}
        whole = [container for container, drop in plan.removals.items() if drop.whole_container]
        looked_up = self.since.prefetch_removals(plan.chunks, plan.segments)
        with self.since.exclusive() as index:
            index.withdraw(plan.chunks, plan.segments, whole, looked_up)
            failpoint("gc.forgot-due")
        left = dict(plan.removals)
        gone, later = {}, []
        # What leans goes before what it leans on: whatever is there after a crash can be decoded.
        containers = reversed(list(topological_order(sorted(plan.removals), self._base_containers)))
        for container in self.counted(list(containers), "containers that go, or parts of them"):
            self.go_on()
            drop = left[container]
            try:
                if drop.whole_container:
                    done = self._remove(ContainerId(container), left)
                else:
                    make = partial(self.rewriter.rewritten, ContainerId(container), drop)
                    done = self._rewrite(ContainerId(container), left, make)
            except NoRoom as err:  # others may go as a whole, which makes room
                self.sums.no_room, done = err, False
                later.append(container)
            del left[container]
            if done:
                gone[container] = drop
            else:
                self.since.retain(container)
        self.since.record_deferred(later)
        return gone

    def _remove(self, container: ContainerId, left: Mapping[int, ContainerRemoval]) -> bool:
        """Remove a container; return False where it has to stay."""
        with self.since.exclusive() as index:
            if container in self.since.retained(left):
                self.replacing.renew(index, container)  # it was no longer counted
                return False
            self.sums.deleted += 1
            del self.ids[container]
            self.containers.delete(container, self.containers.generation(container))
            self.since.on_container_rewritten(container, None)
            failpoint("gc.container")
        return True

    def _rewrite(self, container: ContainerId, left: Mapping[int, ContainerRemoval], make: Callable[[], bytes]) -> bool:
        """Put the next generation that is made, then remove the one until now. At a bounded speed.

        Returns False where it has to stay as it is.
        """
        replaced = self.replacing.replace(
            container,
            self.ids[container],
            make,
            lambda: container in self.since.retained(left),
            self.since,
        )
        return self._record_replacement(container, replaced)

    def _record_replacement(self, container: ContainerId, replaced: SwapResult | None) -> bool:
        if replaced is None:
            return False
        self.ids[container] = replaced.now_bytes
        self.sums.rewritten += 1
        return True

    def _base_containers(self, container: int) -> list[int]:
        try:
            return self.containers.directory(ContainerId(container)).base_containers()
        except (PermanentError, NotFound):
            return []

    # --- 6: what chains tell again and again ------------------------------------------------------------------------

    def merge(self, reach: LiveSet, young: Collection[int], block_bytes: int, versions_min: int) -> None:
        """Write containers anew that take in what leans on them, and those that refer to it then, the oldest first.

        As `MergePlanner.plan` says. Where one has to stay as it is, so does what would refer to it.
        """
        gatherer = self.rewriter.gatherer
        gathering = gatherer.plan(reach, self.ids, young, block_bytes, versions_min)
        if gathering is None:
            return
        anew = gatherer.executor(gathering)
        known = [container for container in gathering.containers if container in self.ids]  # others came since
        for container in self._rewrite_each(known, anew.data, "gathered"):
            anew.on_container_rewritten(container)
            failpoint("gather.container")
        reach.mark_references()

    # --- 7: what puts compressed in a hurry --------------------------------------------------------------------------

    def recompress(self, reach: LiveSet, young: Collection[int]) -> None:
        """Write containers anew whose blocks come smaller by a deeper search, the oldest first; once each."""
        recompressor = self.rewriter.recompressor
        chosen = recompressor.chosen(self.ids, young, reach)
        anew = ContainerRecompression(recompressor, chosen)
        for _ in self._rewrite_each(chosen, anew.data, "compressed further"):
            failpoint("recompress.container")

    def _rewrite_each(
        self, containers: Sequence[ContainerId], make: Callable[[ContainerId], bytes | None], done: str
    ) -> Iterator[ContainerId]:
        """Put the next generation that `make` makes of each, and yield those for which one was put.

        What somebody else wrote anew, what is broken, and what there is no room for stays as it is.
        """
        for container in self.counted(containers, f"containers {done}"):
            self.go_on()
            try:
                replaced = self.replacing.replace(
                    container,
                    self.ids[container],
                    partial(make, container),
                    partial(self.since.is_rewritten_or_retained, container),
                    self.since,
                )
            except NoRoom as err:
                _log.warning("%s: no more is %s in this round", err, done)
                return
            except Corrupt as err:
                _log.warning("%s: it is not %s", err, done)
                continue
            if self._record_replacement(container, replaced):
                yield container
