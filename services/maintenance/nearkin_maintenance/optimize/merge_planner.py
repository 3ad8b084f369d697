"""What to gather. Invariant: a chunk is taken in where it lies less deep than before, so that none gets deeper.

    before   a b c (raw)    a1 <- a    a2 <- a1    a3 <- a2    a4 <- a1: as deep as it may be, and far from a3
    after    a b c a1 a2 a3 a4 (one raw block)     and where a1 to a4 lay, references to these

Chunks that go back to the same stretch of a container by their best bases are taken into the block of that stretch,
the oldest first, until it is full. What comes then begins a stretch beside, in its own container, that leans on the
full one; at the bound of depth on the one below that.

Memory: 9 bytes for each chunk that is needed, 12 for each that is taken in. docs/adr/0033-merged-blocks.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks, mask_of
from nearkin_shared.formats import location_runs
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.types import I32, U8, U64, Bools, ContainerId, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

NO_REGION = -1
CAPPED_SHARE = 0.05
"""A container takes in what leans on it once chunks of this share of its own bytes are as deep as they may be."""
CHUNKS_MAX = 1 << 20
"""A container of more is not written anew for this."""
REFERENCES_MAX = 1 << 17
"""Blocks that one round makes to refer to what is taken in: they are in memory until their containers are written."""


@frozen
class MergeBounds:
    """`depth_max`: chunks are never put deeper; `block_bytes`: what a block holds at most; `stretch_bytes`: what of a
    container's own chunks one begins with; `joined_bytes`: chunks are joined to one of so many bytes at most;
    `versions_min`: a stretch takes nothing in before so many containers have chunks that are named and go back to it.
    """

    depth_max: int
    block_bytes: int
    stretch_bytes: int
    joined_bytes: int
    versions_min: int


@frozen
class MergePlan:
    """What is taken in, and by what. `containers`: all that are needed, each after those that it leans on."""

    bounds: MergeBounds
    containers: list[ContainerId]
    regions: dict[int, I32]
    """By container and ordinal: the stretch in which a chunk is to lie there."""
    parents: I32
    """Of each stretch the one on which it leans, NOWHERE where there is none."""
    begun: Bools
    """Which stretches are to begin now."""
    _holders: U64
    """The container of each stretch."""
    _homes: I32
    """Of all chunks that are taken in the stretches that take them, ascending; and the chunks, in stream order."""
    _taken: Locations

    def chunks_merged_into(self, stretch: int) -> Locations:
        """Return what a stretch takes in, in stream order."""
        bounds = np.searchsorted(self._homes, [stretch, stretch + 1])
        return self._taken.take(slice(int(bounds[0]), int(bounds[1])))

    def own_chunks(self, stretch: int) -> Locations:
        """Return the chunks of its own container that are to lie in a stretch, in stream order."""
        container = int(self._holders[stretch])
        rows = np.flatnonzero(self.regions[container] == stretch)
        return Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32))

    def merge_targets(self, container: int) -> list[int]:
        """Return the stretches of a container that take something in."""
        own = np.unique(self.regions[container])
        takes = np.searchsorted(self._homes, own) < np.searchsorted(self._homes, own, side="right")
        return [int(stretch) for stretch in own[takes]]


def plan_merge(reach: LiveSet, ids: Collection[int], young: Collection[int], bounds: MergeBounds) -> MergePlan | None:
    """Return what it is worth to gather, None: nothing. Raises Corrupt where something that is needed cannot be read.

    Containers that are `young`, or not among `ids`, neither take in nor give.
    """
    needed = reach.transitive_closure(reach.chunks)
    if not any(_ends(reach.directory(c), mask, bounds.depth_max) for c, mask in needed.items()):
        return None
    planner = _Planner(reach, bounds)
    left_alone = {*young, *(c for c in needed if c not in ids)}
    for container in topological_order(sorted(needed), lambda c: reach.directory(c).base_containers()):
        planner.add(container, needed, container not in left_alone)
    return planner.finish()


def _ends(directory: Directory, needed: Bools, depth_max: int) -> bool:
    """Return whether chains end here because they may not be longer."""
    if int(directory.blocks.depths.max(initial=0)) < depth_max:
        return False
    mask = mask_of(needed, len(directory.chunks))
    return bool(np.any(mask & (directory.chunks.depths >= depth_max)))


class _Column:
    """An array that grows at its end."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._room = np.zeros(1024, dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def values(self) -> NDArray[Any]:
        """Return all of it, a view that lasts until the next `append`."""
        return self._room[: self._used]

    def append(self, values: NDArray[Any]) -> None:
        """Add values behind the last one."""
        needed = self._used + len(values)
        if needed > len(self._room):
            grown = np.zeros(max(needed, 2 * len(self._room)), self._room.dtype)
            grown[: self._used] = self.values
            self._room = grown
        self._room[self._used : needed] = values
        self._used = needed


class _Regions:
    """All stretches, by number. A full one hands on what comes to the one begun beside it."""

    def __init__(self, depth_max: int, block_bytes: int) -> None:
        self._depth_max, self._block_bytes = depth_max, block_bytes
        self._held = _Column(np.int64)
        self._holders, self._depths = _Column(np.uint64), _Column(np.uint8)
        self._parents, self._next = _Column(np.int32), _Column(np.int32)
        self._begun = _Column(np.bool_)
        self._roots, self._versions = _Column(np.int32), _Column(np.int32)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def holders(self) -> U64:
        """Return the container of each."""
        return self._holders.values

    @property
    def parents(self) -> I32:
        """Return of each the one on which it leans, NOWHERE where there is none."""
        return self._parents.values

    @property
    def started_mask(self) -> Bools:
        """Return which have begun in this round."""
        return self._begun.values

    def add(self, container: int, held_bytes: NDArray[np.int64], depths: U8) -> None:
        """Add what is there of a container."""
        count, first = len(held_bytes), len(self)
        self._held.append(held_bytes)
        self._holders.append(np.full(count, container, np.uint64))
        self._depths.append(depths)
        self._parents.append(np.full(count, NO_REGION, np.int32))
        self._next.append(np.arange(first, first + count, dtype=np.int32))
        self._begun.append(np.zeros(count, np.bool_))
        self._roots.append(np.arange(first, first + count, dtype=np.int32))
        self._versions.append(np.zeros(count, np.int32))

    def count_version(self, homes: I32) -> None:
        """Count one more version of which chunks go back to these stretches, or to those beside which they began."""
        self._versions.values[np.unique(self._roots.values[homes])] += 1

    def versions(self, stretches: I32) -> int:
        """Return how many versions have chunks that go back to one of these stretches, at most."""
        return int(self._versions.values[self._roots.values[stretches]].max(initial=0))

    def current_region(self, stretches: I32) -> I32:
        """Return those that take in by now what comes to these; NOWHERE stays."""
        found, following = stretches.copy(), self._next.values
        mine = np.flatnonzero(found != NO_REGION)
        while len(mine):
            then = following[found[mine]]
            mine, then = mine[then != found[mine]], then[then != found[mine]]
            found[mine] = then
        return found

    def hold(self, stretches: I32, lengths: NDArray[np.int64], depth: int, within: Bools) -> Bools:
        """Let stretches hold chunks that lie at `depth`, until they are full; return which they do.

        They lie less deep, or as deep for chunks of their own container, those `within`.
        """
        held, total = self._held.values, location_runs.group_totals(stretches, lengths) + lengths
        fits: Bools = held[stretches] + total <= self._block_bytes
        fits &= self._depths.values[stretches] < depth + within
        np.add.at(held, stretches[fits], lengths[fits])
        return fits

    def begin(self, beside: int, container: int, depth: int) -> int:
        """Return a new stretch of a container beside one that is full, for chunks of `depth`; NOWHERE: too deep."""
        parent, depths = beside, self._depths.values
        while parent != NO_REGION and int(depths[parent]) + 2 > self._depth_max:
            parent = int(self._parents.values[parent])
        if parent == NO_REGION or int(depths[parent]) + 1 > depth:
            return NO_REGION
        new = len(self)
        self.add(container, np.zeros(1, np.int64), depths[parent : parent + 1] + np.uint8(1))
        self._begun.values[new] = True
        self.chain_region(new, parent, beside)
        return new

    def chain_region(self, stretch: int, parent: int, beside: int) -> None:
        """Let a stretch take in what comes to another: it leans on `parent`."""
        self._parents.values[stretch] = parent
        self._roots.values[stretch] = self._roots.values[beside]
        (last,) = self.current_region(np.array([beside], np.int32)).tolist()
        (end,) = self.current_region(np.array([stretch], np.int32)).tolist()
        if last != end:  # else it comes to it already
            self._next.values[last] = stretch

    def is_full(self, stretch: int, length: int) -> bool:
        """Return whether a chunk is too much for a stretch."""
        return int(self._held.values[stretch]) + length > self._block_bytes


class _Planner:
    def __init__(self, reach: LiveSet, bounds: MergeBounds) -> None:
        self._reach, self._bounds = reach, bounds
        self._all = _Regions(bounds.depth_max, bounds.block_bytes)
        self._stretches: dict[int, I32] = {}
        self._homes: dict[int, I32] = {}
        """Of each chunk the stretch to which what leans on it goes back."""
        self._taken: dict[int, Bools] = {}
        self._capped: dict[int, int] = {}
        """Bytes by container that it would take in and are as deep as they may be."""

    def add(self, container: int, needed: Masks, gives: bool) -> None:
        """Take the next container. `gives`: whether its chunks may be taken in elsewhere, and it may take in."""
        directory = self._reach.directory(container)
        chunks, count = directory.chunks, len(directory.chunks)
        gives = gives and count <= CHUNKS_MAX
        settled = merged_blocks(directory)
        own = self._stretches[container] = self._current_regions(directory, settled, gives)
        first = len(self._all)
        homes = self._homes[container] = own.copy()
        self._link_regions(directory, settled, own)
        self._taken[container] = np.zeros(count, np.bool_)
        refers = reference_blocks(directory)[chunks.blocks]
        mine = mask_of(needed[container], count) & chunks.there & (refers | ~settled[chunks.blocks])
        live = mask_of(self._reach.chunks.get(container, np.zeros(0, np.bool_)), count)
        for depth in range(1, int(chunks.depths[mine].max(initial=0)) + 1):
            rows = np.flatnonzero(mine & (chunks.depths == depth))
            found = self._all.current_region(self._at(chunks.bases.take(rows)))
            rows, found = rows[found != NO_REGION], found[found != NO_REGION]
            homes[rows] = found
            here = self._all.holders[found] == np.uint64(container)
            may = ~refers[rows] & live[rows] & ~(here & (found < first)) & gives
            self._place(container, rows[may], found[may], first)
        self._all.count_version(homes[mine & live & (chunks.depths > 0)])
        self._sum(directory)

    def _place(self, container: int, rows: NDArray[np.intp], found: I32, first: int) -> None:
        """Take chunks of one depth in, or let them begin stretches. `first`: of those begun here."""
        if not len(rows):
            return
        chunks = self._reach.directory(container).chunks
        lengths, depth = chunks.lengths[rows].astype(np.int64), int(chunks.depths[rows[0]])
        own, homes, taken = self._stretches[container], self._homes[container], self._taken[container]
        within = found >= first
        fits = self._all.hold(found, lengths, depth, within)
        own[rows[fits & within]] = found[fits & within]
        taken[rows[fits & ~within]] = True
        rest = np.flatnonzero(~fits & ~within)
        begun = found[rest]
        for full in np.unique(begun).tolist():
            these = found[rest] == full
            if self._all.is_full(full, int(lengths[rest[these]].max())):
                begun[these] = self._all.begin(full, container, depth)
            else:  # it lies too deep
                begun[these] = NO_REGION
        rest, begun = rest[begun != NO_REGION], begun[begun != NO_REGION]
        fits = self._all.hold(begun, lengths[rest], depth, np.ones(len(rest), np.bool_))
        homes[rows[rest]] = begun
        own[rows[rest[fits]]] = begun[fits]

    def _current_regions(self, directory: Directory, settled: Bools, gives: bool) -> I32:
        """Return the stretch of each chunk as it is: parts of raw blocks, and all of any other."""
        chunks, blocks = directory.chunks, directory.blocks
        lengths = chunks.lengths.astype(np.int64)
        part = location_runs.group_totals(chunks.blocks, lengths) // self._bounds.stretch_bytes
        part[settled[chunks.blocks] | (blocks.depths[chunks.blocks] > 0)] = 0
        distinct, which = np.unique(chunks.blocks.astype(np.int64) << 32 | part, return_inverse=True)
        held = np.bincount(which, lengths, len(distinct)).astype(np.int64)
        whole = 2 * blocks.raw[distinct >> 32].astype(np.int64) > 3 * self._bounds.block_bytes  # worth more than parts
        held[whole | (not gives)] = self._bounds.block_bytes  # full
        first = len(self._all)
        self._all.add(directory.container, held, blocks.depths[distinct >> 32])
        own: I32 = (first + which).astype(np.int32)
        return own

    def _link_regions(self, directory: Directory, settled: Bools, own: I32) -> None:
        """Find beside which stretches those were begun that an earlier round gathered."""
        chunks = directory.chunks
        rows = np.flatnonzero(settled[chunks.blocks] & chunks.there & (chunks.depths > 0))
        stretches, firsts = np.unique(own[rows], return_index=True)
        for stretch, beside in zip(stretches.tolist(), self._at(chunks.bases.take(rows[firsts])).tolist(), strict=True):
            if beside not in (NO_REGION, stretch):
                self._all.chain_region(stretch, beside, beside)

    def _at(self, bases: Locations) -> I32:
        found = np.full(len(bases), NO_REGION, np.int32)
        for container, rows in group_by_container(bases.containers):
            if container in self._homes:
                found[rows] = self._homes[container][bases.ordinals[rows]]
        return found

    def _sum(self, directory: Directory) -> None:
        chunks, taken = directory.chunks, self._taken[directory.container]
        rows = np.flatnonzero(taken & (chunks.depths >= self._bounds.depth_max))
        for holder, mine in group_by_container(self._all.holders[self._homes[directory.container][rows]]):
            capped_bytes = int(chunks.lengths[rows[mine]].sum(dtype=np.int64))
            self._capped[holder] = self._capped.get(holder, 0) + capped_bytes

    def finish(self) -> MergePlan | None:
        """Return what came of all containers, None where nothing is worth it."""
        takers = [holder for holder in self._stretches if self._saves_bytes(holder)]
        worth = np.isin(self._all.holders, np.array(takers, np.uint64))
        homes, taken = [np.zeros(0, np.int32)], [Locations.empty()]
        for container, mask in self._taken.items():
            rows = np.flatnonzero(mask & worth[self._homes[container]])
            homes.append(self._homes[container][rows])
            taken.append(Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32)))
        all_homes, all_taken = np.concatenate(homes), Locations.join(taken)
        if not len(all_homes):
            return None
        order = np.argsort(all_homes, kind="stable")
        all_homes, all_taken = all_homes[order], all_taken.take(order)
        some = self._references(all_homes, all_taken) <= REFERENCES_MAX
        containers = [ContainerId(container) for container in self._stretches]
        parents, begun, holders = self._all.parents.copy(), self._all.started_mask.copy(), self._all.holders.copy()
        homes_taken = all_homes[some], all_taken.take(some)
        return MergePlan(self._bounds, containers, self._stretches, parents, begun, holders, *homes_taken)

    def _references(self, homes: I32, taken: Locations) -> NDArray[np.int64]:
        """Return how many blocks refer to what is taken in up to each chunk, at most.

        One for each stretch and container from which it takes, and two for as many bytes as are joined.
        """
        first = np.ones(len(homes), np.bool_)
        first[1:] = (homes[1:] != homes[:-1]) | (taken.containers[1:] != taken.containers[:-1])
        joined = 2 * np.cumsum(_lengths(self._reach, taken)) // self._bounds.joined_bytes
        found: NDArray[np.int64] = np.cumsum(first) + joined
        return found

    def _saves_bytes(self, holder: int) -> bool:
        raw_bytes = int(self._reach.directory(holder).blocks.raw.sum(dtype=np.int64))
        many = self._all.versions(self._stretches[holder]) >= self._bounds.versions_min
        return many and self._capped.get(holder, 0) > CAPPED_SHARE * raw_bytes


def _lengths(reach: LiveSet, locations: Locations) -> NDArray[np.int64]:
    found = np.zeros(len(locations), np.int64)
    for container, rows in group_by_container(locations.containers):
        found[rows] = reach.directory(container).chunks.lengths[locations.ordinals[rows]]
    return found
