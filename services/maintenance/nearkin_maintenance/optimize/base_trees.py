"""Families of chunks. Invariant: a dead base is given up only where that is estimated to save bytes.

    v1 <- v2 <- v3 <- v4 <- v5, v6, v7        one family: all that go back to the same chunk by their best bases
    dead  dead  dead  dead  live              v5 kept raw, v6 and v7 against it: v1 to v4 go

One that refers to a chunk which holds many, or leans on such a one, is the first of a family, too: or what stands
beside it would count as what came before it.

Memory: 5 bytes for each chunk that is needed, and 40 for each family.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks, dependent_blocks, is_in, mask_of
from nearkin_maintenance.gc.retained_bytes import NAME_AND_ROW_BYTES, bytes_of_chunks
from nearkin_maintenance.optimize.unreferenced_merged_blocks import dead_chains
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.types import U32, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

NONE = -1
MANY = 3
"""A base so many times as long as what leans on it holds many."""
RAW_SHARE = 0.5
"""What a chunk that refers to another takes by itself, of its bytes."""
_NO_ROWS: Bools = np.zeros(0, np.bool_)


@frozen
class BaseTrees:
    """Which family each chunk that is needed is of: `by_container` int32 by container and ordinal, NONE where it is
    not.
    """

    by_container: dict[int, NDArray[np.int32]]
    count: int

    def trees_of(self, container: int, ordinals: U32) -> NDArray[np.int32]:
        """Return the families of some chunks."""
        known = self.by_container.get(container)
        if known is None:
            return np.full(len(ordinals), NONE, np.int32)
        return np.where(ordinals < len(known), known[np.minimum(ordinals, len(known) - 1)], NONE).astype(np.int32)


def build_base_trees(reach: LiveSet, needed: Masks) -> BaseTrees:
    """Return the families of the chunks `needed`, which is closed under bases. Raises Corrupt."""
    found, many = BaseTrees({}, 0), _MergedBases(reach, needed)
    count = 0
    for container in topological_order(sorted(needed), lambda c: reach.directory(c).base_containers()):
        directory = reach.directory(container)
        chunks, mine = directory.chunks, mask_of(needed[container], len(directory.chunks))
        family = found.by_container[container] = np.full(len(chunks), NONE, np.int32)
        refers = many.bases_of(directory)
        for depth in range(int(chunks.depths[mine].max(initial=0)) + 1):
            rows = np.flatnonzero(mine & (chunks.depths == depth))
            if depth:
                rows = rows[~refers[rows]]
                family[rows] = _each(found, chunks.bases.take(rows))
                rows = np.flatnonzero(mine & (chunks.depths == depth))
            first = rows[family[rows] == NONE]
            family[first] = np.arange(count, count + len(first))
            count += len(first)
    return BaseTrees(found.by_container, count)


class _MergedBases:
    """Which chunks have a best base that holds many: one that was joined, as what is gathered is."""

    def __init__(self, reach: LiveSet, needed: Masks) -> None:
        self._reach, self._needed = reach, needed
        self._gathered: dict[int, Bools] = {}

    def bases_of(self, directory: Directory) -> Bools:
        """Return bool[n]; of what is not needed nothing is known."""
        chunks = directory.chunks
        found = reference_blocks(directory)[chunks.blocks]
        for other, rows in group_by_container(chunks.bases.containers):
            if other not in self._needed:
                continue
            bases, ordinals = self._reach.directory(other).chunks, chunks.bases.ordinals[rows]
            if other not in self._gathered:
                self._gathered[other] = merged_blocks(self._reach.directory(other))
            long = bases.lengths[ordinals] > MANY * chunks.lengths[rows].astype(np.int64)
            found[rows] |= long & self._gathered[other][bases.blocks[ordinals]]
        return found


def _each(families: BaseTrees, bases: Locations) -> NDArray[np.int32]:
    found = np.full(len(bases), NONE, np.int32)
    for container, rows in group_by_container(bases.containers):
        found[rows] = families.trees_of(container, bases.ordinals[rows])
    return found


class _TreeBytes:
    """What each family takes, in bytes: estimates, since a chunk's share of its block is one."""

    def __init__(self, reach: LiveSet, families: BaseTrees, needed: Masks) -> None:
        count, many = families.count, _MergedBases(reach, needed)
        self.all_of, self.dead, self.leaning, self.roots = (np.zeros(count) for _ in range(4))
        self.least = np.full(count, np.inf)
        self.leaners = np.zeros(count, np.int64)
        for container, family in families.by_container.items():
            directory = reach.directory(container)
            rows = np.flatnonzero(mask_of(needed[container], len(directory.chunks)))
            of, share = family[rows], bytes_of_chunks(directory)[rows]
            live = mask_of(reach.chunks.get(container, _NO_ROWS), len(directory.chunks))[rows]
            delta = directory.chunks.depths[rows] > 0
            leans = live & delta
            leans[leans] = ~is_in(reach.chunks, directory.chunks.bases.take(rows[leans]))
            encoded = np.maximum(share - NAME_AND_ROW_BYTES, 0)
            refers = many.bases_of(directory)[rows]
            raw = np.where(refers, RAW_SHARE * directory.chunks.lengths[rows], encoded)
            self.all_of += np.bincount(of, share, count)
            self.dead += np.bincount(of, share * ~live, count)
            self.roots += np.bincount(of, raw * (~live & (~delta | refers)), count)
            self.leaning += np.bincount(of, encoded * leans, count)
            self.leaners += np.bincount(of, leans, count).astype(np.int64)
            np.minimum.at(self.least, of[delta], encoded[delta])


def bases_worth_dropping(reach: LiveSet, families: BaseTrees, needed: Masks, share: float) -> Masks:
    """Return the dead chunks of the families that would take clearly less without them, once that is `share` of all.

    What leans on them is then encoded again: the oldest as the root was, raw, or against one that lives further down;
    the others against one that lies near, for about what the smallest delta of the family takes.
    """
    sums = _TreeBytes(reach, families, needed)
    least = np.where(np.isfinite(sums.least), sums.least, 0)
    mean = sums.leaning / np.maximum(sums.leaners, 1)
    heir = np.where(sums.roots > 0, sums.roots, sums.dead + mean)
    gain = sums.dead + sums.leaning - heir - np.maximum(sums.leaners - 1, 0) * least
    some_dead = sums.dead > 0
    given_up = dead_chains(reach, needed, share) if reach.has_references else Masks()
    # Of all, not of these families: what is written for it may be all there is, whatever little has changed.
    if gain[some_dead & (gain > 0)].sum() <= share * sums.all_of.sum():
        return given_up
    chosen = some_dead & (gain > share / 2 * sums.all_of)
    for container, family in families.by_container.items():
        live = mask_of(reach.chunks.get(container, _NO_ROWS), len(family))
        directory = reach.directory(container)
        settled = (
            reach.has_references & (merged_blocks(directory) | reference_blocks(directory))[directory.chunks.blocks]
        )
        dead = ~live & (family != NONE) & chosen[family] & ~settled
        if dead.any():
            given_up[container] = dead | given_up.get(container, np.zeros(len(dead), np.bool_))
    return given_up


def containers_depending_on(reach: LiveSet, ids: Collection[int], live: Masks, on: Masks) -> set[int]:
    """Return the containers with blocks that lean on any of the chunks `on`, and hold some of the chunks `live`."""
    found = set()
    for container in ids if on else ():
        if (mask := live.get(container)) is None or not mask.any():
            continue
        directory = reach.directory(container)
        used = np.zeros(len(directory.blocks), np.bool_)
        used[directory.chunks.blocks[mask_of(mask, len(directory.chunks))]] = True
        if np.any(used & dependent_blocks(directory, on)):
            found.add(container)
    return found
