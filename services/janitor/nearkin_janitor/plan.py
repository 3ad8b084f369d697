"""What is to go. Invariant: whatever stays can be decoded: its bases stay with it, dead blocks' bases too.

reached -> closed under bases -> containers with little or nothing in them -> what no block that stays leans on: drops
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from nearkin.formats.condemned import Condemned, Record
from nearkin.records import U32, Bools
from nearkin.store.chunks import grouped
from nearkin_janitor.reach import Masks, Reach, filled


@dataclass(frozen=True, slots=True)
class Drop:
    """What of a container goes. `everything`: it goes as a whole, `chunks` and `segments` being all it has."""

    chunks: U32
    segments: U32
    everything: bool

    def __len__(self) -> int:
        return len(self.chunks) + len(self.segments) + self.everything


@dataclass(frozen=True, slots=True)
class Plan:
    """`drops` by container. `naming`: of the containers that stay, the dead segments that name a dropped chunk."""

    drops: Mapping[int, Drop]
    naming: Mapping[int, U32] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, U32 | None]:
        """Return by container the chunks that no index may name; None: all, and its segments too."""
        return {container: None if drop.everything else drop.chunks for container, drop in self.drops.items()}

    @property
    def segments(self) -> dict[int, U32]:
        """Return by container the segments that no index may name."""
        partly = {container: drop.segments for container, drop in self.drops.items() if not drop.everything}
        return {**partly, **self.naming}


def to_condemn(reach: Reach, ids: Collection[int]) -> Plan:
    """Return what is to be condemned of the containers `ids`: those of which nothing is reached.

    Raises Corrupt where something that is needed cannot be read.
    """
    live = reach.closed(reach.chunks)
    dead = {c for c in ids if not _any(live, c) and not _any(reach.segments, c)}
    stays = [c for c in ids if c not in dead]
    while True:
        kept = reach.closed(live, [*stays])
        held = [c for c in dead if _any(kept, c)]
        if not held:
            break
        dead.difference_update(held)
        stays += held
    return _plan(reach, kept, dead, ids)


def to_sweep(reach: Reach, ids: Collection[int], due: Record) -> Plan:
    """Return what may go now: of what was condemned in an earlier round, all that is unreached still."""
    due = {container: entry for container, entry in due.items() if container in ids}
    seeds: Masks = {container: mask.copy() for container, mask in reach.chunks.items()}
    stays = []
    for container in ids:
        if container not in due:
            if _any(seeds, container) or reach.readable(container) is not None:  # else broken, and nobody's
                stays.append(container)
        elif not due[container].whole:
            spared = np.ones(len(reach.directory(container).chunks), np.bool_)
            spared[due[container].chunks] = False
            mine = filled(seeds.get(container, np.zeros(0, np.bool_)), len(spared))
            seeds[container] = mine | spared
    kept = reach.closed(seeds, stays)
    return _plan(reach, kept, due, ids, due)


def _plan(reach: Reach, kept: Masks, going: Collection[int], ids: Collection[int], due: Record | None = None) -> Plan:
    drops = {}
    for container in going:
        drop = _drop(reach, kept, container, None if due is None else due[container])
        if len(drop):
            drops[container] = drop
    return Plan(drops, _naming(reach, drops, ids))


def _drop(reach: Reach, kept: Masks, container: int, due: Condemned | None) -> Drop:
    directory = reach.readable(container)
    chunks_kept, segments_kept = kept.get(container), reach.segments.get(container)
    nothing_kept = (chunks_kept is None or not chunks_kept.any()) and (segments_kept is None or not segments_kept.any())
    if directory is None:
        none = np.zeros(0, np.uint32)
        return Drop(none, none, nothing_kept and (due is None or due.whole))
    chunks = ~filled(np.zeros(0, np.bool_) if chunks_kept is None else chunks_kept, len(directory.chunks))
    segments = ~filled(np.zeros(0, np.bool_) if segments_kept is None else segments_kept, len(directory.segments))
    if due is not None:
        chunks &= _of(due.chunks, len(chunks))
        segments &= _of(due.segments, len(segments))
    return Drop(
        np.flatnonzero(chunks).astype(np.uint32),
        np.flatnonzero(segments).astype(np.uint32),
        bool(chunks.all() and segments.all()),
    )


def _naming(reach: Reach, drops: Mapping[int, Drop], ids: Collection[int]) -> dict[int, U32]:
    """Return of the containers that stay the segments that name a chunk which goes: all dead ones."""
    found = {}
    for container in ids if drops else ():
        if container in drops and drops[container].everything:
            continue
        directory = reach.readable(container)
        if directory is None:
            continue
        recipes = directory.segments
        hit = np.zeros(len(recipes.chunks), np.bool_)
        for holder, rows in grouped(recipes.chunks.containers):
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


def record_of(plan: Plan, at_us: int) -> dict[int, Condemned]:
    """Return the plan as it is recorded, condemned at `at_us`."""
    return {c: Condemned(at_us, drop.chunks, drop.segments, drop.everything) for c, drop in plan.drops.items()}
