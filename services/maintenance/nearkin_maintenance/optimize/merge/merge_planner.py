"""Plan which chunks of later versions move into merged blocks.

    before   a b c (raw)    a1 <- a    a2 <- a1    a3 <- a2    a4 <- a1: at the maximum depth, and far from a3
    after    a b c a1 a2 a3 a4 (one raw block)     and reference blocks where a1 to a4 were stored

A region is a run of chunks of one container that becomes one block. Chunks whose best bases lead to the same region
are merged into its block, oldest first, until it is full. Later chunks start a new region in their own container, whose
block depends on the full one; at the depth bound, on the parent of that.

Invariant: a chunk is merged only where its depth shrinks, so that no chunk gets deeper.

Memory: 9 bytes per needed chunk and 12 per merged chunk. docs/adr/0033-merged-blocks.md.
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
"""A container becomes a merge target if dependent chunks of this share of its bytes are at the maximum depth."""
CHUNKS_MAX = 1 << 20
"""Containers with more chunks are not rewritten for a merge."""
REFERENCES_MAX = 1 << 17
"""Reference blocks of one GC run: they stay in memory until their containers are written."""


@frozen
class MergeBounds:
    """Bounds of a merge.

    `depth_max`: of any chunk afterwards; `block_bytes`: of a merged block; `region_bytes`: of a container's own chunks
    in one region; `joined_bytes`: of one chunk that is joined from several; `versions_min`: containers with live chunks
    that depend on a region, before it becomes a merge target.
    """

    depth_max: int
    block_bytes: int
    region_bytes: int
    joined_bytes: int
    versions_min: int


@frozen
class MergePlan:
    """Chunks to merge by region.

    `containers`: all needed ones, each after the containers of its bases.
    """

    bounds: MergeBounds
    containers: list[ContainerId]
    regions: dict[int, I32]
    """By container and ordinal: the region in which a chunk is stored afterwards."""
    parents: I32
    """The region on which each region depends, or NO_REGION."""
    new_regions: Bools
    """Mask of the regions that this run creates."""
    _holders: U64
    """The container of each region."""
    _homes: I32
    """Target regions of all merged chunks, ascending; `_merged` has the chunks, in stream order."""
    _merged: Locations

    def chunks_merged_into(self, region: int) -> Locations:
        """Return the chunks to merge into a region, in stream order."""
        bounds = np.searchsorted(self._homes, [region, region + 1])
        return self._merged.take(slice(int(bounds[0]), int(bounds[1])))

    def own_chunks(self, region: int) -> Locations:
        """Return the chunks of its own container that a region holds, in stream order."""
        container = int(self._holders[region])
        rows = np.flatnonzero(self.regions[container] == region)
        return Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32))

    def merge_targets(self, container: int) -> list[int]:
        """Return the regions of a container into which chunks are merged."""
        own = np.unique(self.regions[container])
        takes = np.searchsorted(self._homes, own) < np.searchsorted(self._homes, own, side="right")
        return [int(region) for region in own[takes]]


def plan_merge(
    live_set: LiveSet, ids: Collection[int], recent: Collection[int], bounds: MergeBounds
) -> MergePlan | None:
    """Return the merges that save bytes, or None.

    Containers that are `recent`, or not among `ids`, are neither sources nor targets.

    Raises: Corrupt if a needed object cannot be read.
    """
    needed = live_set.transitive_closure(live_set.chunks)
    if not any(_has_chains_at_limit(live_set.directory(c), mask, bounds.depth_max) for c, mask in needed.items()):
        return None
    planner = _Planner(live_set, bounds)
    excluded = {*recent, *(c for c in needed if c not in ids)}
    for container in topological_order(sorted(needed), lambda c: live_set.directory(c).base_containers()):
        planner.add(container, needed, container not in excluded)
    return planner.finish()


def _has_chains_at_limit(directory: Directory, needed: Bools, depth_max: int) -> bool:
    """Return whether needed chunks are at the maximum depth."""
    if int(directory.blocks.depths.max(initial=0)) < depth_max:
        return False
    mask = mask_of(needed, len(directory.chunks))
    return bool(np.any(mask & (directory.chunks.depths >= depth_max)))


class _Column:
    """Growable array."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._room = np.zeros(1024, dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def values(self) -> NDArray[Any]:
        """Return all values: a view that is valid until the next `append`."""
        return self._room[: self._used]

    def append(self, values: NDArray[Any]) -> None:
        """Add values after the last one."""
        needed = self._used + len(values)
        if needed > len(self._room):
            grown = np.zeros(max(needed, 2 * len(self._room)), self._room.dtype)
            grown[: self._used] = self.values
            self._room = grown
        self._room[self._used : needed] = values
        self._used = needed


class _Regions:
    """All regions, by number. A full region is succeeded by one that was started from it."""

    def __init__(self, depth_max: int, block_bytes: int) -> None:
        self._depth_max, self._block_bytes = depth_max, block_bytes
        self._held = _Column(np.int64)
        self._holders, self._depths = _Column(np.uint64), _Column(np.uint8)
        self._parents, self._next = _Column(np.int32), _Column(np.int32)
        self._is_new = _Column(np.bool_)
        self._roots, self._versions = _Column(np.int32), _Column(np.int32)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def holders(self) -> U64:
        """Return the container of each region."""
        return self._holders.values

    @property
    def parents(self) -> I32:
        """Return the region on which each region depends, or NO_REGION."""
        return self._parents.values

    @property
    def started_mask(self) -> Bools:
        """Return a mask of the regions that this GC run creates."""
        return self._is_new.values

    def add(self, container: int, held_bytes: NDArray[np.int64], depths: U8) -> None:
        """Add regions that already exist in a container."""
        count, first = len(held_bytes), len(self)
        self._held.append(held_bytes)
        self._holders.append(np.full(count, container, np.uint64))
        self._depths.append(depths)
        self._parents.append(np.full(count, NO_REGION, np.int32))
        self._next.append(np.arange(first, first + count, dtype=np.int32))
        self._is_new.append(np.zeros(count, np.bool_))
        self._roots.append(np.arange(first, first + count, dtype=np.int32))
        self._versions.append(np.zeros(count, np.int32))

    def count_version(self, homes: I32) -> None:
        """Count one more version that depends on these regions or their predecessors."""
        self._versions.values[np.unique(self._roots.values[homes])] += 1

    def versions(self, regions: I32) -> int:
        """Return the largest number of versions that depend on one of `regions`."""
        return int(self._versions.values[self._roots.values[regions]].max(initial=0))

    def current_region(self, regions: I32) -> I32:
        """Return the region that currently receives each region's new chunks (NO_REGION stays)."""
        found, following = regions.copy(), self._next.values
        mine = np.flatnonzero(found != NO_REGION)
        while len(mine):
            then = following[found[mine]]
            mine, then = mine[then != found[mine]], then[then != found[mine]]
            found[mine] = then
        return found

    def reserve(self, regions: I32, lengths: NDArray[np.int64], depth: int, is_own: Bools) -> Bools:
        """Add chunks at `depth` to regions until they are full; return a mask of the chunks added.

        A chunk becomes shallower, or keeps its depth in a region of its own container (`is_own`).
        """
        held, total = self._held.values, location_runs.group_totals(regions, lengths) + lengths
        fits: Bools = held[regions] + total <= self._block_bytes
        fits &= self._depths.values[regions] < depth + is_own
        np.add.at(held, regions[fits], lengths[fits])
        return fits

    def start_region(self, origin: int, container: int, depth: int) -> int:
        """Return a new region of a container that succeeds a full one.

        NO_REGION if chunks of `depth` do not fit.
        """
        parent, depths = origin, self._depths.values
        while parent != NO_REGION and int(depths[parent]) + 2 > self._depth_max:
            parent = int(self._parents.values[parent])
        if parent == NO_REGION or int(depths[parent]) + 1 > depth:
            return NO_REGION
        new = len(self)
        self.add(container, np.zeros(1, np.int64), depths[parent : parent + 1] + np.uint8(1))
        self._is_new.values[new] = True
        self.chain_region(new, parent, origin)
        return new

    def chain_region(self, region: int, parent: int, origin: int) -> None:
        """Make a region the successor of region `origin`; it depends on `parent`."""
        self._parents.values[region] = parent
        self._roots.values[region] = self._roots.values[origin]
        (last,) = self.current_region(np.array([origin], np.int32)).tolist()
        (end,) = self.current_region(np.array([region], np.int32)).tolist()
        if last != end:  # else it is the successor already
            self._next.values[last] = region

    def is_full(self, region: int, length: int) -> bool:
        """Return whether a chunk does not fit into a region."""
        return int(self._held.values[region]) + length > self._block_bytes


class _Planner:
    def __init__(self, live_set: LiveSet, bounds: MergeBounds) -> None:
        self._live_set, self._bounds = live_set, bounds
        self._regions = _Regions(bounds.depth_max, bounds.block_bytes)
        self._chunk_regions: dict[int, I32] = {}
        self._homes: dict[int, I32] = {}
        """The region to which the dependents of each chunk belong."""
        self._merged: dict[int, Bools] = {}
        self._capped: dict[int, int] = {}
        """Bytes by container of the chunks at the maximum depth that would be merged into it."""

    def add(self, container: int, needed: Masks, can_merge: bool) -> None:
        """Add the next container. `can_merge`: whether it may be a source and a target."""
        directory = self._live_set.directory(container)
        chunks, count = directory.chunks, len(directory.chunks)
        can_merge = can_merge and count <= CHUNKS_MAX
        is_merged = merged_blocks(directory)
        own = self._chunk_regions[container] = self._current_regions(directory, is_merged, can_merge)
        first = len(self._regions)
        homes = self._homes[container] = own.copy()
        self._link_regions(directory, is_merged, own)
        self._merged[container] = np.zeros(count, np.bool_)
        refers = reference_blocks(directory)[chunks.blocks]
        mine = mask_of(needed[container], count) & chunks.there & (refers | ~is_merged[chunks.blocks])
        live = mask_of(self._live_set.chunks.get(container, np.zeros(0, np.bool_)), count)
        for depth in range(1, int(chunks.depths[mine].max(initial=0)) + 1):
            rows = np.flatnonzero(mine & (chunks.depths == depth))
            found = self._regions.current_region(self._base_regions(chunks.bases.take(rows)))
            rows, found = rows[found != NO_REGION], found[found != NO_REGION]
            homes[rows] = found
            here = self._regions.holders[found] == np.uint64(container)
            is_mergeable = ~refers[rows] & live[rows] & ~(here & (found < first)) & can_merge
            self._assign_chunks(container, rows[is_mergeable], found[is_mergeable], first)
        self._regions.count_version(homes[mine & live & (chunks.depths > 0)])
        self._sum_capped_bytes(directory)

    def _assign_chunks(self, container: int, rows: NDArray[np.intp], found: I32, first: int) -> None:
        """Merge chunks of one depth or start regions for them.

        `first`: number of the first new region here.
        """
        if not len(rows):
            return
        chunks = self._live_set.directory(container).chunks
        lengths, depth = chunks.lengths[rows].astype(np.int64), int(chunks.depths[rows[0]])
        own, homes, merged = self._chunk_regions[container], self._homes[container], self._merged[container]
        is_own = found >= first
        fits = self._regions.reserve(found, lengths, depth, is_own)
        own[rows[fits & is_own]] = found[fits & is_own]
        merged[rows[fits & ~is_own]] = True
        rest = np.flatnonzero(~fits & ~is_own)
        new_regions = found[rest]
        for full in np.unique(new_regions).tolist():
            these = found[rest] == full
            if self._regions.is_full(full, int(lengths[rest[these]].max())):
                new_regions[these] = self._regions.start_region(full, container, depth)
            else:  # the depth of the region is too high
                new_regions[these] = NO_REGION
        rest, new_regions = rest[new_regions != NO_REGION], new_regions[new_regions != NO_REGION]
        fits = self._regions.reserve(new_regions, lengths[rest], depth, np.ones(len(rest), np.bool_))
        homes[rows[rest]] = new_regions
        own[rows[rest[fits]]] = new_regions[fits]

    def _current_regions(self, directory: Directory, is_merged: Bools, can_merge: bool) -> I32:
        """Return the region of each chunk as stored: part of a raw block, or any other block."""
        chunks, blocks = directory.chunks, directory.blocks
        lengths = chunks.lengths.astype(np.int64)
        part = location_runs.group_totals(chunks.blocks, lengths) // self._bounds.region_bytes
        part[is_merged[chunks.blocks] | (blocks.depths[chunks.blocks] > 0)] = 0
        distinct, which = np.unique(chunks.blocks.astype(np.int64) << 32 | part, return_inverse=True)
        held = np.bincount(which, lengths, len(distinct)).astype(np.int64)
        # A large block is closed: it saves more as a whole than in parts.
        is_large = 2 * blocks.raw[distinct >> 32].astype(np.int64) > 3 * self._bounds.block_bytes
        held[is_large | (not can_merge)] = self._bounds.block_bytes  # full
        first = len(self._regions)
        self._regions.add(directory.container, held, blocks.depths[distinct >> 32])
        own: I32 = (first + which).astype(np.int32)
        return own

    def _link_regions(self, directory: Directory, is_merged: Bools, own: I32) -> None:
        """Restore the succession of regions that earlier GC runs created."""
        chunks = directory.chunks
        rows = np.flatnonzero(is_merged[chunks.blocks] & chunks.there & (chunks.depths > 0))
        regions, firsts = np.unique(own[rows], return_index=True)
        for region, origin in zip(
            regions.tolist(), self._base_regions(chunks.bases.take(rows[firsts])).tolist(), strict=True
        ):
            if origin not in (NO_REGION, region):
                self._regions.chain_region(region, origin, origin)

    def _base_regions(self, bases: Locations) -> I32:
        found = np.full(len(bases), NO_REGION, np.int32)
        for container, rows in group_by_container(bases.containers):
            if container in self._homes:
                found[rows] = self._homes[container][bases.ordinals[rows]]
        return found

    def _sum_capped_bytes(self, directory: Directory) -> None:
        chunks, merged = directory.chunks, self._merged[directory.container]
        rows = np.flatnonzero(merged & (chunks.depths >= self._bounds.depth_max))
        for holder, mine in group_by_container(self._regions.holders[self._homes[directory.container][rows]]):
            capped_bytes = int(chunks.lengths[rows[mine]].sum(dtype=np.int64))
            self._capped[holder] = self._capped.get(holder, 0) + capped_bytes

    def finish(self) -> MergePlan | None:
        """Return the plan for all containers, or None if no merge saves bytes."""
        target_containers = [holder for holder in self._chunk_regions if self._saves_bytes(holder)]
        is_target = np.isin(self._regions.holders, np.array(target_containers, np.uint64))
        homes, merged = [np.zeros(0, np.int32)], [Locations.empty()]
        for container, mask in self._merged.items():
            rows = np.flatnonzero(mask & is_target[self._homes[container]])
            homes.append(self._homes[container][rows])
            merged.append(Locations(np.full(len(rows), container, np.uint64), rows.astype(np.uint32)))
        all_homes, all_taken = np.concatenate(homes), Locations.join(merged)
        if not len(all_homes):
            return None
        order = np.argsort(all_homes, kind="stable")
        all_homes, all_taken = all_homes[order], all_taken.take(order)
        some = self._references(all_homes, all_taken) <= REFERENCES_MAX
        containers = [ContainerId(container) for container in self._chunk_regions]
        parents, new_regions, holders = (
            self._regions.parents.copy(),
            self._regions.started_mask.copy(),
            self._regions.holders.copy(),
        )
        homes_taken = all_homes[some], all_taken.take(some)
        return MergePlan(self._bounds, containers, self._chunk_regions, parents, new_regions, holders, *homes_taken)

    def _references(self, homes: I32, merged: Locations) -> NDArray[np.int64]:
        """Return a bound of the reference blocks needed up to each merged chunk.

        One per region and source container, and two per `joined_bytes`.
        """
        first = np.ones(len(homes), np.bool_)
        first[1:] = (homes[1:] != homes[:-1]) | (merged.containers[1:] != merged.containers[:-1])
        joined = 2 * np.cumsum(_lengths(self._live_set, merged)) // self._bounds.joined_bytes
        found: NDArray[np.int64] = np.cumsum(first) + joined
        return found

    def _saves_bytes(self, holder: int) -> bool:
        raw_bytes = int(self._live_set.directory(holder).blocks.raw.sum(dtype=np.int64))
        many = self._regions.versions(self._chunk_regions[holder]) >= self._bounds.versions_min
        return many and self._capped.get(holder, 0) > CAPPED_SHARE * raw_bytes


def _lengths(live_set: LiveSet, locations: Locations) -> NDArray[np.int64]:
    found = np.zeros(len(locations), np.int64)
    for container, rows in group_by_container(locations.containers):
        found[rows] = live_set.directory(container).chunks.lengths[locations.ordinals[rows]]
    return found
