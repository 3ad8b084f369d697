"""Plan the removals of a GC run. Nothing here writes.

    live set -> closure over bases -> containers with few live bytes -> chunks that no remaining block needs: removals

Invariant (I8): every chunk that remains can be decoded: its bases remain, and so do the bases of dead blocks that
remain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import DroppedBases, LiveSet, Masks, mark_ordinals, mask_of
from nearkin_maintenance.gc.retained_bytes import bytes_of_chunks
from nearkin_maintenance.optimize.rebase.base_trees import (
    bases_worth_dropping,
    build_base_trees,
    containers_depending_on,
)
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.pending_delete_record import PendingDelete, Record
from nearkin_shared.types import U32, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

PLAN_PASSES_MAX = 4
"""Maximum re-evaluations of containers, after dead blocks elsewhere proved to need more of them."""
NUMBERS_MAX = container_layout.BLOCKS_MAX // 2
"""Block numbers above which a container is not rewritten: each rewrite may use as many new numbers again."""
REBASED_SHARE = 0.2
"""Minimum gain of dropping dead bases, as a share of the bytes that may be dead in a container.

With 0.5, 30 days of small edits took up to 1.19 times a fresh store, with 0.2 up to 1.10, for 15 % more written bytes
(benchmarks/gc_each_day.py).
"""
_NONE: Bools = np.zeros(0, np.bool_)


class ContainerAction(Enum):
    """Action of a GC run on one container."""

    KEEP = auto()  # no data to remove, or removal costs more than it frees
    MARK_CHUNKS = auto()  # some data are unreachable since this run: withdraw them, wait one grace
    MARK_CONTAINER = auto()  # all data are unreachable since this run: withdraw them, wait one grace
    REWRITE = auto()  # some data are due: write the next generation without them
    REBASE = auto()  # live chunks depend on due bases: re-encode them against others, without due data
    DELETE = auto()  # all data are due


@frozen
class ContainerRemoval:
    """Chunks and segments to remove from a container, and the action that removes them."""

    action: ContainerAction
    chunks: U32
    segments: U32

    @property
    def whole_container(self) -> bool:
        """Return whether `chunks` and `segments` are all data of the container."""
        return self.action in {ContainerAction.MARK_CONTAINER, ContainerAction.DELETE}


@frozen
class GcPlan:
    """Removals by container.

    `stale_references`: dead segments, of containers that remain, whose recipes name a removed chunk.
    """

    removals: Mapping[int, ContainerRemoval]
    stale_references: Mapping[int, U32] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, U32 | None]:
        """Return the chunks to withdraw from the index, by container.

        None: all of them, and all segments.
        """
        return {
            container: None if removal.whole_container else removal.chunks
            for container, removal in self.removals.items()
        }

    @property
    def segments(self) -> dict[int, U32]:
        """Return the segments to withdraw from the index, by container."""
        partial = {
            container: removal.segments for container, removal in self.removals.items() if not removal.whole_container
        }
        return {**partial, **self.stale_references}


def plan_pending(
    live_set: LiveSet,
    ids: Collection[int],
    compact_below: float = 0.0,
) -> GcPlan:
    """Plan which data of the containers `ids` become pending deletes.

    Containers without live data are removed as a whole. A container is rewritten if the live share of its bytes is less
    than `compact_below`, dead chunks elsewhere that its dead blocks keep included. Dead bases are dropped if that saves
    more bytes than it costs (base_trees.py).

    Raises: Corrupt if live data cannot be read.
    """
    dropped_bases = _dropped_bases(live_set, ids, compact_below)
    live = live_set.transitive_closure(live_set.chunks, (), dropped_bases)
    shares = _Shares(live_set, live, ids)
    rewritten = {*dropped_bases.containers, *dropped_bases.chunks} if dropped_bases is not None else ()
    rewritten = {*rewritten, *_with_unreadable_bases(live_set, live, ids)}
    selected = {c for c in ids if c in rewritten or shares.is_reclaimable(c, compact_below)}
    for _ in range(PLAN_PASSES_MAX):
        kept = live_set.transitive_closure(live, [c for c in ids if c not in selected], dropped_bases)
        retained = {c for c in selected if c not in rewritten and not shares.is_mostly_dead(c, kept, compact_below)}
        if not retained:
            break
        selected -= retained
    else:
        kept = live_set.transitive_closure(live, [c for c in ids if c not in selected], dropped_bases)
    return _plan_removals(live_set, kept, selected, ids)


def _with_unreadable_bases(live_set: LiveSet, live: Masks, ids: Collection[int]) -> list[int]:
    """Return containers with dead blocks whose bases are in a container that cannot be read.

    They lose these blocks, so that the unreadable container, which no version needs, can be deleted.
    """
    unreadable = [c for c in ids if not _has_any(live, c) and live_set.readable(c) is None]
    found = []
    for container in ids if unreadable else ():
        directory = live_set.readable(container)
        if directory is not None and not set(unreadable).isdisjoint(directory.base_containers()):
            found += [container] if len(directory.blocks) <= NUMBERS_MAX else []
    return found


def _dropped_bases(live_set: LiveSet, ids: Collection[int], compact_below: float) -> DroppedBases | None:
    if not compact_below:
        return None
    needed = live_set.transitive_closure(live_set.chunks)
    chunks = bases_worth_dropping(
        live_set, build_base_trees(live_set, needed), needed, (1 - compact_below) * REBASED_SHARE
    )
    if not chunks:
        return None
    writable = [c for c in ids if c in needed and len(live_set.directory(c).blocks) <= NUMBERS_MAX]
    return DroppedBases(chunks, containers_depending_on(live_set, writable, live_set.chunks, chunks))


def protect_recent(live_set: LiveSet, ids: Collection[int], due: Record) -> LiveSet:
    """Return the live set extended by all chunks that are not due.

    A chunk that became unreachable recently is kept until its own grace is over.
    """
    found = live_set.references()
    for container in ids:
        directory = live_set.readable(container)
        if directory is None or (container in due and due[container].whole):
            continue
        is_stored = directory.chunks.there.copy()
        if container in due:
            is_stored &= ~_mask_of_ordinals(due[container].chunks, len(is_stored))
        found.chunks[container] = is_stored | mask_of(found.chunks.get(container, _NONE), len(is_stored))
    return found


def plan_rebase(live_set: LiveSet, ids: Collection[int], due: Record, compact_below: float) -> DroppedBases | None:
    """Plan which due chunks are dropped as bases, and which containers depend on them.

    `live_set` is the result of `protect_recent`: otherwise dead chunks that depend on due chunks would keep them.
    """
    if not compact_below or not due:
        return None
    sweep_plan, bases_due = plan_sweep(live_set, ids, due), Masks()
    for container, entry in due.items():
        directory = live_set.readable(container)
        if directory is None:
            continue
        dead = _mask_of_ordinals(entry.chunks, len(directory.chunks)) & directory.chunks.there
        dead &= ~mask_of(live_set.chunks.get(container, _NONE), len(dead))
        if container in sweep_plan.removals:
            dead[sweep_plan.removals[container].chunks] = False
        if dead.any():
            bases_due[container] = dead
    writable = [c for c in ids if c in live_set.chunks and len(live_set.directory(c).blocks) <= NUMBERS_MAX]
    containers = containers_depending_on(live_set, writable, live_set.chunks, bases_due)
    return DroppedBases(bases_due, containers) if containers else None


def plan_rebase_removals(
    live_set: LiveSet, ids: Collection[int], due: Record, dropped_bases: DroppedBases
) -> dict[int, ContainerRemoval]:
    """Plan the removals in containers that are rebased.

    These are the due chunks that are no base of a chunk in another container.
    """
    external_bases: Masks = {}
    for container in ids:
        directory = live_set.readable(container)
        if directory is None:
            continue
        deltas = directory.chunks.there & (directory.chunks.depths > 0)
        bases = Locations.join([directory.chunks.bases.take(deltas), directory.prefixes.bases])
        for other, rows in group_by_container(bases.containers):
            if other != container and other in dropped_bases.containers:
                mark_ordinals(external_bases, other, bases.ordinals[rows])
    removals = {}
    for container in dropped_bases.containers:
        directory = live_set.directory(container)
        is_stored, recipes = directory.chunks.there, np.diff(directory.segments.bounds) > 0
        chunks, segments = np.zeros(len(is_stored), np.bool_), np.zeros(len(recipes), np.bool_)
        if container in due:
            segments = recipes & _mask_of_ordinals(due[container].segments, len(recipes))
            segments &= ~mask_of(live_set.segments.get(container, _NONE), len(recipes))
            chunks = is_stored & _mask_of_ordinals(due[container].chunks, len(is_stored))
            chunks &= ~mask_of(live_set.chunks.get(container, _NONE), len(is_stored))
            chunks &= ~mask_of(external_bases.get(container, _NONE), len(is_stored))
            chunks &= ~live_set.closure_within(container, is_stored & ~chunks, dropped_bases)
        removals[container] = ContainerRemoval(
            ContainerAction.REBASE, np.flatnonzero(chunks).astype(np.uint32), np.flatnonzero(segments).astype(np.uint32)
        )
    return removals


class _Shares:
    """Live and dead bytes of each container.

    Memory: 4 bytes for each chunk of the store.
    """

    def __init__(self, live_set: LiveSet, live: Masks, ids: Collection[int]) -> None:
        self._live_set = live_set
        self._chunk_bytes: dict[int, NDArray[np.float32]] = {}
        self._live = live
        self._dead_bytes: dict[int, float] = {}
        self._total_bytes: dict[int, float] = {}
        for container in ids:
            directory = live_set.directory(container) if _has_any(live, container) else live_set.readable(container)
            if directory is None:
                continue
            shares = bytes_of_chunks(directory).astype(np.float32)
            needed = mask_of(live.get(container, _NONE), len(shares))
            self._chunk_bytes[container] = shares
            self._total_bytes[container] = float(shares.sum())
            self._dead_bytes[container] = float(shares[~needed].sum())

    def is_reclaimable(self, container: int, compact_below: float) -> bool:
        """Return whether a container may be deleted or rewritten."""
        if not _has_any(self._live, container) and not _has_any(self._live_set.segments, container):
            return True
        total, dead = self._total_bytes.get(container, 0.0), self._dead_bytes.get(container, 0.0)
        if not dead or not compact_below or len(self._live_set.directory(container).blocks) > NUMBERS_MAX:
            return False
        dead_bytes_max = (1 - compact_below) * total
        return dead > dead_bytes_max or dead + self._bytes_held_by_dead(container) > dead_bytes_max

    def _bytes_held_by_dead(self, container: int) -> float:
        """Return the bytes of dead chunks elsewhere that this container's dead blocks depend on.

        A patch block counts by its dead share.
        """
        directory = self._live_set.directory(container)
        chunks, blocks, prefixes = directory.chunks, directory.blocks, directory.prefixes
        dead = ~mask_of(self._live.get(container, _NONE), len(chunks)) & chunks.there
        dead_raw = np.bincount(chunks.blocks, chunks.encoded * dead, len(blocks))
        dead_share = dead_raw / np.maximum(blocks.raw, 1)
        deltas = np.flatnonzero(dead & (blocks.kinds[chunks.blocks] == container_layout.XDELTA3))
        prefix_blocks = np.repeat(np.arange(len(blocks)), np.diff(prefixes.bounds))
        bases = Locations.join([chunks.bases.take(deltas), prefixes.bases])
        weights = np.concatenate([np.ones(len(deltas)), dead_share[prefix_blocks]])
        held_bytes = 0.0
        for other, rows in group_by_container(bases.containers):
            if other != container and other in self._chunk_bytes:
                shares, ordinals = self._chunk_bytes[other], bases.ordinals[rows]
                is_dead = ~mask_of(self._live.get(other, _NONE), len(shares))
                held_bytes += float((shares[ordinals] * is_dead[ordinals] * weights[rows]).sum())
        return held_bytes

    def is_mostly_dead(self, container: int, kept: Masks, compact_below: float) -> bool:
        """Return whether rewriting a container saves enough, given the chunks `kept`.

        Dead chunks elsewhere that its dead blocks keep are included.
        """
        shares = self._chunk_bytes.get(container)
        mask = mask_of(kept.get(container, _NONE), 0 if shares is None else len(shares))
        if not compact_below or shares is None:
            return not mask.any()
        held_bytes = self._bytes_held_by_dead(container)
        return float(shares[mask].sum()) <= compact_below * self._total_bytes[container] + held_bytes


def plan_sweep(live_set: LiveSet, ids: Collection[int], due: Record) -> GcPlan:
    """Plan which pending deletes are deleted now: those that are due and still unreachable."""
    due = {container: entry for container, entry in due.items() if container in ids}
    roots: Masks = {container: mask.copy() for container, mask in live_set.chunks.items()}
    remaining = []
    for container in ids:
        if container not in due:
            if _has_any(roots, container) or live_set.readable(container) is not None:  # else damaged and unneeded
                remaining.append(container)
        elif not due[container].whole:
            not_due = live_set.directory(container).chunks.there.copy()
            not_due[due[container].chunks] = False
            own = mask_of(roots.get(container, _NONE), len(not_due))
            roots[container] = own | not_due
    kept = live_set.transitive_closure(roots, remaining)
    return _plan_removals(live_set, kept, due, ids, due)


def plan_whole(empty: LiveSet, containers: Collection[int], due: Record | None = None) -> GcPlan:
    """Plan the removal of whole containers that no version and no other container needs.

    `empty`: a live set without roots. `due`: their pending deletes; without, they become pending deletes.
    """
    return _plan_removals(empty, {}, containers, (), due)


def _plan_removals(
    live_set: LiveSet, kept: Masks, selected: Collection[int], ids: Collection[int], due: Record | None = None
) -> GcPlan:
    removals = {}
    for container in selected:
        removal = _plan_removal(live_set, kept, container, None if due is None else due[container])
        if removal.action is not ContainerAction.KEEP:
            removals[container] = removal
    return GcPlan(removals, _find_stale_references(live_set, removals, ids))


def _plan_removal(live_set: LiveSet, kept: Masks, container: int, due: PendingDelete | None) -> ContainerRemoval:
    directory = live_set.readable(container)
    chunks_kept, segments_kept = kept.get(container), live_set.segments.get(container)
    is_unneeded = (chunks_kept is None or not chunks_kept.any()) and (segments_kept is None or not segments_kept.any())
    if directory is None:
        no_ordinals = np.zeros(0, np.uint32)
        is_whole = is_unneeded and (due is None or due.whole)
        return ContainerRemoval(_choose_action(is_whole, False, due), no_ordinals, no_ordinals)
    is_stored, recipes = directory.chunks.there, np.diff(directory.segments.bounds) > 0
    chunks = is_stored & ~mask_of(_NONE if chunks_kept is None else chunks_kept, len(is_stored))
    segments = recipes & ~mask_of(_NONE if segments_kept is None else segments_kept, len(recipes))
    if due is not None and not due.whole:
        chunks &= _mask_of_ordinals(due.chunks, len(chunks))
        segments &= _mask_of_ordinals(due.segments, len(segments))
    is_whole = is_unneeded and np.array_equal(chunks, is_stored) and np.array_equal(segments, recipes)
    removed_chunks, removed_segments = (np.flatnonzero(mask).astype(np.uint32) for mask in (chunks, segments))
    has_any = bool(len(removed_chunks) or len(removed_segments))
    return ContainerRemoval(_choose_action(is_whole, has_any, due), removed_chunks, removed_segments)


def _choose_action(is_whole: bool, has_any: bool, due: PendingDelete | None) -> ContainerAction:
    """Return the action that removes all data of a container, some, or none.

    `due` is None when data become pending.
    """
    if is_whole:
        return ContainerAction.MARK_CONTAINER if due is None else ContainerAction.DELETE
    if has_any:
        return ContainerAction.MARK_CHUNKS if due is None else ContainerAction.REWRITE
    return ContainerAction.KEEP


def _find_stale_references(
    live_set: LiveSet, removals: Mapping[int, ContainerRemoval], ids: Collection[int]
) -> dict[int, U32]:
    """Return the segments of remaining containers whose recipes name a removed chunk.

    All of them are dead.
    """
    found = {}
    for container in ids if removals else ():
        if container in removals and removals[container].whole_container:
            continue
        directory = live_set.readable(container)
        if directory is None:
            continue
        recipes = directory.segments
        is_removed = np.zeros(len(recipes.chunks), np.bool_)
        for holder, rows in group_by_container(recipes.chunks.containers):
            if holder in removals:
                is_removed[rows] = np.isin(recipes.chunks.ordinals[rows], removals[holder].chunks)
        row_segments = np.repeat(np.arange(len(recipes), dtype=np.uint32), np.diff(recipes.bounds))
        stale = np.unique(row_segments[is_removed])
        if container in removals:
            stale = np.union1d(stale, removals[container].segments)
        if len(stale):
            found[container] = stale.astype(np.uint32)
    return found


def _mask_of_ordinals(ordinals: U32, count: int) -> Bools:
    mask = np.zeros(count, np.bool_)
    mask[ordinals[ordinals < count]] = True
    return mask


def _has_any(masks: Masks, container: int) -> bool:
    mask = masks.get(container)
    return mask is not None and bool(mask.any())


def record_of(plan: GcPlan, at_us: int) -> dict[int, PendingDelete]:
    """Return the pending-delete record of a plan, with time `at_us`."""
    return {
        c: PendingDelete(at_us, removal.chunks, removal.segments, removal.whole_container)
        for c, removal in plan.removals.items()
    }


def record_removal(record: dict[int, PendingDelete], container: int, removal: ContainerRemoval) -> None:
    """Remove deleted chunks and segments from the pending-delete record."""
    before = record.pop(container)
    chunks, segments = np.setdiff1d(before.chunks, removal.chunks), np.setdiff1d(before.segments, removal.segments)
    if not removal.whole_container and len(chunks) + len(segments):
        record[container] = PendingDelete(before.at_us, chunks, segments, whole=False)


def carry_over(before: PendingDelete, now: PendingDelete) -> PendingDelete:
    """Return the part of `now` that was pending before, with its earlier time.

    Invariant (I6): data that became pending since wait until that part is deleted, and then for their own grace.
    """
    if before.whole and now.whole:
        return before
    chunks, segments = np.intersect1d(before.chunks, now.chunks), np.intersect1d(before.segments, now.segments)
    if not len(chunks) + len(segments):
        return now
    is_equal = len(chunks) == len(now.chunks) and len(segments) == len(now.segments)
    return PendingDelete(before.at_us, chunks, segments, now.whole and is_equal)


def is_same_record(record: Record, other: Record) -> bool:
    """Return whether two records list the same data with the same times: then none is written."""
    return record.keys() == other.keys() and all(
        _is_same(entry, other[container]) for container, entry in record.items()
    )


def _is_same(entry: PendingDelete, other: PendingDelete) -> bool:
    is_equal = np.array_equal(entry.chunks, other.chunks) and np.array_equal(entry.segments, other.segments)
    return is_equal and entry.whole == other.whole and entry.at_us == other.at_us
