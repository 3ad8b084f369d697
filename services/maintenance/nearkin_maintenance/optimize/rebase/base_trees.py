"""Group chunks into trees over one root base, and choose the dead bases to drop.

    v1 <- v2 <- v3 <- v4 <- v5, v6, v7        one tree: all chunks whose best bases lead to the same root chunk
    dead  dead  dead  dead  live              v5 stored raw, v6 and v7 against it: v1 to v4 can be deleted

A chunk of a reference block, or one whose best base is a chunk of a merged block, is a root too: else the neighbours of
a chunk within a merged block would count as its ancestors.

Invariant: a dead base is dropped only where that is estimated to save bytes.

Memory: 5 bytes per needed chunk and 40 per tree.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks, dependent_blocks, is_in, mask_of
from nearkin_maintenance.gc.retained_bytes import NAME_AND_ROW_BYTES, bytes_of_chunks
from nearkin_maintenance.optimize.rebase.unreferenced_merged_blocks import merged_blocks_to_drop
from nearkin_shared.formats.block_kinds import merged_blocks, reference_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.storage.container_graph import topological_order
from nearkin_shared.types import U32, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

NO_TREE = -1
MERGED_LENGTH_FACTOR = 3
"""A base in a merged block counts as merged content if it is longer than its chunk by this factor."""
RAW_SHARE = 0.5
"""Estimated compressed share of a chunk that is stored raw and was a reference before."""
_NO_ROWS: Bools = np.zeros(0, np.bool_)


@frozen
class BaseTrees:
    """The tree of each needed chunk.

    `by_container` is int32 by container and ordinal, NO_TREE if not needed.
    """

    by_container: dict[int, NDArray[np.int32]]
    count: int

    def trees_of(self, container: int, ordinals: U32) -> NDArray[np.int32]:
        """Return the trees of the chunks `ordinals` of a container."""
        known = self.by_container.get(container)
        if known is None:
            return np.full(len(ordinals), NO_TREE, np.int32)
        return np.where(ordinals < len(known), known[np.minimum(ordinals, len(known) - 1)], NO_TREE).astype(np.int32)


def build_base_trees(live_set: LiveSet, needed: Masks) -> BaseTrees:
    """Return the trees of the chunks `needed`, a set closed under bases. Raises Corrupt."""
    found, merged_bases = BaseTrees({}, 0), _MergedBases(live_set, needed)
    count = 0
    for container in topological_order(sorted(needed), lambda c: live_set.directory(c).base_containers()):
        directory = live_set.directory(container)
        chunks, is_needed = directory.chunks, mask_of(needed[container], len(directory.chunks))
        tree = found.by_container[container] = np.full(len(chunks), NO_TREE, np.int32)
        is_reference = merged_bases.bases_of(directory)
        for depth in range(int(chunks.depths[is_needed].max(initial=0)) + 1):
            rows = np.flatnonzero(is_needed & (chunks.depths == depth))
            if depth:
                rows = rows[~is_reference[rows]]
                tree[rows] = _trees_of_bases(found, chunks.bases.take(rows))
                rows = np.flatnonzero(is_needed & (chunks.depths == depth))
            new_roots = rows[tree[rows] == NO_TREE]
            tree[new_roots] = np.arange(count, count + len(new_roots))
            count += len(new_roots)
    return BaseTrees(found.by_container, count)


class _MergedBases:
    """Find the chunks whose best base is merged content."""

    def __init__(self, live_set: LiveSet, needed: Masks) -> None:
        self._live_set, self._needed = live_set, needed
        self._merged: dict[int, Bools] = {}

    def bases_of(self, directory: Directory) -> Bools:
        """Return bool[n]; False for chunks whose base container is not needed."""
        chunks = directory.chunks
        found = reference_blocks(directory)[chunks.blocks]
        for other, rows in group_by_container(chunks.bases.containers):
            if other not in self._needed:
                continue
            bases, ordinals = self._live_set.directory(other).chunks, chunks.bases.ordinals[rows]
            if other not in self._merged:
                self._merged[other] = merged_blocks(self._live_set.directory(other))
            long = bases.lengths[ordinals] > MERGED_LENGTH_FACTOR * chunks.lengths[rows].astype(np.int64)
            found[rows] |= long & self._merged[other][bases.blocks[ordinals]]
        return found


def _trees_of_bases(trees: BaseTrees, bases: Locations) -> NDArray[np.int32]:
    found = np.full(len(bases), NO_TREE, np.int32)
    for container, rows in group_by_container(bases.containers):
        found[rows] = trees.trees_of(container, bases.ordinals[rows])
    return found


class _TreeBytes:
    """Stored bytes of each tree, in sums by kind.

    Estimates, since a chunk's share of its block is one.
    """

    def __init__(self, live_set: LiveSet, trees: BaseTrees, needed: Masks) -> None:
        count, merged_bases = trees.count, _MergedBases(live_set, needed)
        self.total_bytes, self.dead, self.dependent_bytes, self.roots = (np.zeros(count) for _ in range(4))
        self.smallest_bytes = np.full(count, np.inf)
        self.dependents = np.zeros(count, np.int64)
        for container, tree in trees.by_container.items():
            directory = live_set.directory(container)
            rows = np.flatnonzero(mask_of(needed[container], len(directory.chunks)))
            of, share = tree[rows], bytes_of_chunks(directory)[rows]
            live = mask_of(live_set.chunks.get(container, _NO_ROWS), len(directory.chunks))[rows]
            delta = directory.chunks.depths[rows] > 0
            is_dependent = live & delta
            is_dependent[is_dependent] = ~is_in(live_set.chunks, directory.chunks.bases.take(rows[is_dependent]))
            encoded = np.maximum(share - NAME_AND_ROW_BYTES, 0)
            is_reference = merged_bases.bases_of(directory)[rows]
            raw = np.where(is_reference, RAW_SHARE * directory.chunks.lengths[rows], encoded)
            self.total_bytes += np.bincount(of, share, count)
            self.dead += np.bincount(of, share * ~live, count)
            self.roots += np.bincount(of, raw * (~live & (~delta | is_reference)), count)
            self.dependent_bytes += np.bincount(of, encoded * is_dependent, count)
            self.dependents += np.bincount(of, is_dependent, count).astype(np.int64)
            np.minimum.at(self.smallest_bytes, of[delta], encoded[delta])


def bases_worth_dropping(live_set: LiveSet, trees: BaseTrees, needed: Masks, share: float) -> Masks:
    """Return the dead chunks whose trees shrink without them, if that saves over `share`.

    Their dependents are encoded again: the oldest like the old root, raw or against a live chunk at a lower depth; the
    others against a nearby chunk, for about the bytes of the tree's smallest delta.
    """
    sums = _TreeBytes(live_set, trees, needed)
    smallest_bytes = np.where(np.isfinite(sums.smallest_bytes), sums.smallest_bytes, 0)
    mean = sums.dependent_bytes / np.maximum(sums.dependents, 1)
    new_root_bytes = np.where(sums.roots > 0, sums.roots, sums.dead + mean)
    saved_bytes = (
        sums.dead + sums.dependent_bytes - new_root_bytes - np.maximum(sums.dependents - 1, 0) * smallest_bytes
    )
    some_dead = sums.dead > 0
    dropped = merged_blocks_to_drop(live_set, needed, share) if live_set.has_references else Masks()
    # A share of all trees, not of these only: a rewrite costs as much however few chunks of a container change.
    if saved_bytes[some_dead & (saved_bytes > 0)].sum() <= share * sums.total_bytes.sum():
        return dropped
    chosen = some_dead & (saved_bytes > share / 2 * sums.total_bytes)
    for container, tree in trees.by_container.items():
        live = mask_of(live_set.chunks.get(container, _NO_ROWS), len(tree))
        directory = live_set.directory(container)
        is_merged = (
            live_set.has_references & (merged_blocks(directory) | reference_blocks(directory))[directory.chunks.blocks]
        )
        dead = ~live & (tree != NO_TREE) & chosen[tree] & ~is_merged
        if dead.any():
            dropped[container] = dead | dropped.get(container, np.zeros(len(dead), np.bool_))
    return dropped


def containers_depending_on(live_set: LiveSet, ids: Collection[int], live: Masks, on: Masks) -> set[int]:
    """Return the containers with `live` chunks in blocks that depend on the chunks `on`."""
    found = set()
    for container in ids if on else ():
        if (mask := live.get(container)) is None or not mask.any():
            continue
        directory = live_set.directory(container)
        used = np.zeros(len(directory.blocks), np.bool_)
        used[directory.chunks.blocks[mask_of(mask, len(directory.chunks))]] = True
        if np.any(used & dependent_blocks(directory, on)):
            found.add(container)
    return found
