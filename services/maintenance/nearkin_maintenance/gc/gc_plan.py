"""What is to go. Invariant: whatever stays can be decoded: its bases stay with it, dead blocks' bases too.

reached -> closed under bases -> containers with little or nothing in them -> what no block that stays leans on: drops
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import DroppedBases, LiveSet, Masks, mark_ordinals, mask_of
from nearkin_maintenance.gc.retained_bytes import bytes_of_chunks
from nearkin_maintenance.optimize.base_trees import bases_worth_dropping, build_base_trees, containers_depending_on
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.pending_delete_record import PendingDelete, Record
from nearkin_shared.types import U32, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

PLAN_PASSES_MAX = 4
"""So often containers are looked at again because dead blocks elsewhere hold more of them than was thought."""
NUMBERS_MAX = container_layout.BLOCKS_MAX // 2
"""A container that has used more numbers of blocks is not written anew: each time may take as many again."""
REBASED_SHARE = 0.2
"""What giving up dead bases must gain of all that is needed: this share of what may be dead in a container. At 0.5 30
days of small edits took up to 1.19 times a fresh store, at 0.2 up to 1.10, and wrote 15 % more
(benchmarks/gc_each_day.py).
"""
_NONE: Bools = np.zeros(0, np.bool_)


@frozen
class ContainerRemoval:
    """What of a container goes. `whole_container`: it goes as a whole, `chunks` and `segments` being all it has."""

    chunks: U32
    segments: U32
    whole_container: bool

    def __len__(self) -> int:
        return len(self.chunks) + len(self.segments) + self.whole_container


@frozen
class GcPlan:
    """`removals` by container. `stale_references`: of the containers that stay, the dead segments that name a dropped
    chunk.
    """

    removals: Mapping[int, ContainerRemoval]
    stale_references: Mapping[int, U32] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, U32 | None]:
        """Return by container the chunks that no index may name; None: all, and its segments too."""
        return {container: None if drop.whole_container else drop.chunks for container, drop in self.removals.items()}

    @property
    def segments(self) -> dict[int, U32]:
        """Return by container the segments that no index may name."""
        partly = {container: drop.segments for container, drop in self.removals.items() if not drop.whole_container}
        return {**partly, **self.stale_references}


def plan_pending(
    reach: LiveSet,
    ids: Collection[int],
    compact_below: float = 0.0,
) -> GcPlan:
    """Return what is to be condemned of the containers `ids`.

    Those of which nothing is reached go; those of which less than `compact_below` is, by bytes, are to be written anew,
    and so are those whose dead blocks hold so much of others. Dead bases go too where that is worth it (base_trees.py).
    Raises Corrupt where something that is needed cannot be read.
    """
    giving_up = _dropped_bases(reach, ids, compact_below)
    live = reach.transitive_closure(reach.chunks, (), giving_up)
    shares = _Shares(reach, live, ids)
    again = {*giving_up.containers, *giving_up.chunks} if giving_up is not None else ()
    going = {c for c in ids if c in again or shares.is_reclaimable(c, compact_below)}
    for _ in range(PLAN_PASSES_MAX):
        kept = reach.transitive_closure(live, [c for c in ids if c not in going], giving_up)
        staying = {c for c in going if c not in again and not shares.is_mostly_dead(c, kept, compact_below)}
        if not staying:
            break
        going -= staying
    else:
        kept = reach.transitive_closure(live, [c for c in ids if c not in going], giving_up)
    return _plan(reach, kept, going, ids)


def _dropped_bases(reach: LiveSet, ids: Collection[int], compact_below: float) -> DroppedBases | None:
    if not compact_below:
        return None
    needed = reach.transitive_closure(reach.chunks)
    chunks = bases_worth_dropping(reach, build_base_trees(reach, needed), needed, (1 - compact_below) * REBASED_SHARE)
    if not chunks:
        return None
    writable = [c for c in ids if c in needed and len(reach.directory(c).blocks) <= NUMBERS_MAX]
    return DroppedBases(chunks, containers_depending_on(reach, writable, reach.chunks, chunks))


def protect_recent(reach: LiveSet, ids: Collection[int], due: Record) -> LiveSet:
    """Return `reach` with all named that is not due: what died since is needed as long as its grace lasts."""
    found = reach.references()
    for container in ids:
        directory = reach.readable(container)
        if directory is None or (container in due and due[container].whole):
            continue
        there = directory.chunks.there.copy()
        if container in due:
            there &= ~_of(due[container].chunks, len(there))
        found.chunks[container] = there | mask_of(found.chunks.get(container, _NONE), len(there))
    return found


def plan_rebase(reach: LiveSet, ids: Collection[int], due: Record, compact_below: float) -> DroppedBases | None:
    """Return what was condemned in an earlier round and may go once nothing leans on it, and what leans on it.

    `reach` is what is `protect_recent`: dead chunks that lean on what is due would hold it, and it what it leans on.
    """
    if not compact_below or not due:
        return None
    swept, held = plan_sweep(reach, ids, due), Masks()
    for container, entry in due.items():
        directory = reach.readable(container)
        if directory is None:
            continue
        dead = _of(entry.chunks, len(directory.chunks)) & directory.chunks.there
        dead &= ~mask_of(reach.chunks.get(container, _NONE), len(dead))
        if container in swept.removals:
            dead[swept.removals[container].chunks] = False
        if dead.any():
            held[container] = dead
    living = [c for c in ids if c in reach.chunks and len(reach.directory(c).blocks) <= NUMBERS_MAX]
    containers = containers_depending_on(reach, living, reach.chunks, held)
    return DroppedBases(held, containers) if containers else None


def plan_rebase_removals(
    reach: LiveSet, ids: Collection[int], due: Record, rebased: DroppedBases
) -> dict[int, ContainerRemoval]:
    """Return what may go of the containers that get other bases: what is due, and what no other container leans on."""
    leaned: Masks = {}
    for container in ids:
        directory = reach.readable(container)
        if directory is None:
            continue
        deltas = directory.chunks.there & (directory.chunks.depths > 0)
        bases = Locations.join([directory.chunks.bases.take(deltas), directory.prefixes.bases])
        for other, rows in group_by_container(bases.containers):
            if other != container and other in rebased.containers:
                mark_ordinals(leaned, other, bases.ordinals[rows])
    drops = {}
    for container in rebased.containers:
        directory = reach.directory(container)
        there, recipes = directory.chunks.there, np.diff(directory.segments.bounds) > 0
        chunks, segments = np.zeros(len(there), np.bool_), np.zeros(len(recipes), np.bool_)
        if container in due:
            segments = recipes & _of(due[container].segments, len(recipes))
            segments &= ~mask_of(reach.segments.get(container, _NONE), len(recipes))
            chunks = there & _of(due[container].chunks, len(there))
            chunks &= ~mask_of(reach.chunks.get(container, _NONE), len(there))
            chunks &= ~mask_of(leaned.get(container, _NONE), len(there))
            chunks &= ~reach.closure_within(container, there & ~chunks, rebased)
        drops[container] = ContainerRemoval(
            np.flatnonzero(chunks).astype(np.uint32), np.flatnonzero(segments).astype(np.uint32), whole_container=False
        )
    return drops


class _Shares:
    """What of each container is needed, in bytes: 4 bytes of memory for each chunk of the store."""

    def __init__(self, reach: LiveSet, live: Masks, ids: Collection[int]) -> None:
        self._reach = reach
        self._of_chunks: dict[int, NDArray[np.float32]] = {}
        self._live = live
        self._dead: dict[int, float] = {}
        self._total: dict[int, float] = {}
        for container in ids:
            directory = reach.directory(container) if _any(live, container) else reach.readable(container)
            if directory is None:
                continue
            shares = bytes_of_chunks(directory).astype(np.float32)
            needed = mask_of(live.get(container, _NONE), len(shares))
            self._of_chunks[container] = shares
            self._total[container] = float(shares.sum())
            self._dead[container] = float(shares[~needed].sum())

    def is_reclaimable(self, container: int, compact_below: float) -> bool:
        """Return whether a container may go, or be written anew."""
        if not _any(self._live, container) and not _any(self._reach.segments, container):
            return True
        total, dead = self._total.get(container, 0.0), self._dead.get(container, 0.0)
        if not dead or not compact_below or len(self._reach.directory(container).blocks) > NUMBERS_MAX:
            return False
        allowed = (1 - compact_below) * total
        return dead > allowed or dead + self._bytes_held_by_dead(container) > allowed

    def _bytes_held_by_dead(self, container: int) -> float:
        """Return the bytes of dead chunks elsewhere that this container's dead blocks lean on; half dead ones half."""
        directory = self._reach.directory(container)
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        dead = ~mask_of(self._live.get(container, _NONE), len(chunks)) & chunks.there
        dead_raw = np.bincount(chunks.blocks, chunks.encoded * dead, len(blocks))
        dead_share = dead_raw / np.maximum(blocks.raw, 1)
        deltas = np.flatnonzero(dead & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3))
        of_prefix = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
        bases = Locations.join([chunks.bases.take(deltas), prefixes.bases])
        weights = np.concatenate([np.ones(len(deltas)), dead_share[of_prefix]])
        held = 0.0
        for other, rows in group_by_container(bases.containers):
            if other != container and other in self._of_chunks:
                shares, ordinals = self._of_chunks[other], bases.ordinals[rows]
                needless = ~mask_of(self._live.get(other, _NONE), len(shares))
                held += float((shares[ordinals] * needless[ordinals] * weights[rows]).sum())
        return held

    def is_mostly_dead(self, container: int, kept: Masks, compact_below: float) -> bool:
        """Return whether a container is still worth it, once what dead blocks elsewhere hold of it is counted."""
        shares = self._of_chunks.get(container)
        mask = mask_of(kept.get(container, _NONE), 0 if shares is None else len(shares))
        if not compact_below or shares is None:
            return not mask.any()
        held_too = self._bytes_held_by_dead(container)
        return float(shares[mask].sum()) <= compact_below * self._total[container] + held_too


def plan_sweep(reach: LiveSet, ids: Collection[int], due: Record) -> GcPlan:
    """Return what may go now: of what was condemned in an earlier round, all that is unreached still."""
    due = {container: entry for container, entry in due.items() if container in ids}
    seeds: Masks = {container: mask.copy() for container, mask in reach.chunks.items()}
    stays = []
    for container in ids:
        if container not in due:
            if _any(seeds, container) or reach.readable(container) is not None:  # else broken, and nobody's
                stays.append(container)
        elif not due[container].whole:
            spared = reach.directory(container).chunks.there.copy()
            spared[due[container].chunks] = False
            mine = mask_of(seeds.get(container, _NONE), len(spared))
            seeds[container] = mine | spared
    kept = reach.transitive_closure(seeds, stays)
    return _plan(reach, kept, due, ids, due)


def _plan(
    reach: LiveSet, kept: Masks, going: Collection[int], ids: Collection[int], due: Record | None = None
) -> GcPlan:
    drops = {}
    for container in going:
        drop = _drop(reach, kept, container, None if due is None else due[container])
        if len(drop):
            drops[container] = drop
    return GcPlan(drops, _naming(reach, drops, ids))


def _drop(reach: LiveSet, kept: Masks, container: int, due: PendingDelete | None) -> ContainerRemoval:
    directory = reach.readable(container)
    chunks_kept, segments_kept = kept.get(container), reach.segments.get(container)
    nothing_kept = (chunks_kept is None or not chunks_kept.any()) and (segments_kept is None or not segments_kept.any())
    if directory is None:
        none = np.zeros(0, np.uint32)
        return ContainerRemoval(none, none, nothing_kept and (due is None or due.whole))
    there, recipes = directory.chunks.there, np.diff(directory.segments.bounds) > 0
    chunks = there & ~mask_of(_NONE if chunks_kept is None else chunks_kept, len(there))
    segments = recipes & ~mask_of(_NONE if segments_kept is None else segments_kept, len(recipes))
    if due is not None and not due.whole:
        chunks &= _of(due.chunks, len(chunks))
        segments &= _of(due.segments, len(segments))
    return ContainerRemoval(
        np.flatnonzero(chunks).astype(np.uint32),
        np.flatnonzero(segments).astype(np.uint32),
        bool(np.array_equal(chunks, there) and np.array_equal(segments, recipes)) and nothing_kept,
    )


def _naming(reach: LiveSet, drops: Mapping[int, ContainerRemoval], ids: Collection[int]) -> dict[int, U32]:
    """Return of the containers that stay the segments that name a chunk which goes: all dead ones."""
    found = {}
    for container in ids if drops else ():
        if container in drops and drops[container].whole_container:
            continue
        directory = reach.readable(container)
        if directory is None:
            continue
        recipes = directory.segments
        hit = np.zeros(len(recipes.chunks), np.bool_)
        for holder, rows in group_by_container(recipes.chunks.containers):
            if holder in drops:
                hit[rows] = np.isin(recipes.chunks.ordinals[rows], drops[holder].chunks)
        of_row = np.repeat(np.arange(len(recipes), dtype=np.uint32), np.diff(recipes.bounds))
        named = np.unique(of_row[hit])
        if container in drops:
            named = np.union1d(named, drops[container].segments)
        if len(named):
            found[container] = named.astype(np.uint32)
    return found


def _of(ordinals: U32, count: int) -> Bools:
    mask = np.zeros(count, np.bool_)
    mask[ordinals[ordinals < count]] = True
    return mask


def _any(masks: Masks, container: int) -> bool:
    mask = masks.get(container)
    return mask is not None and bool(mask.any())


def record_of(plan: GcPlan, at_us: int) -> dict[int, PendingDelete]:
    """Return the plan as it is recorded, condemned at `at_us`."""
    return {
        c: PendingDelete(at_us, drop.chunks, drop.segments, drop.whole_container) for c, drop in plan.removals.items()
    }
