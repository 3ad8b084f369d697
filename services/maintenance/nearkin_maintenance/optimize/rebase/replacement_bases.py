"""Offer live chunks as replacements of dead bases.

The candidates of a chunk are the last chunks of its tree before it and their stream neighbours, in containers that are
written before its own: so their depths are final, and no two containers depend on each other.

Invariant: a chunk is offered only candidates shallower than itself, so that it never gets deeper. Its dependents stay
decodable at every moment, and every chain ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks
from nearkin_maintenance.optimize.rebase.base_trees import NO_TREE, BaseTrees
from nearkin_shared.types import U8, U32, U64, Locations, group_by_container

CANDIDATES_MAX = 4
"""Candidates from the tree of each chunk, the nearest before it that are shallow enough."""
LOOK_BACK = 8
"""Chunks of the tree examined for those."""
DEPTH_UNREACHABLE = 256
"""Above every depth."""


class ReplacementBases:
    """The live chunks of some trees in stream order.

    Memory: 8 bytes each, and a byte per chunk of their containers.
    """

    def __init__(self, live_set: LiveSet, trees: BaseTrees, containers: Collection[int], order: Iterable[int]) -> None:
        """`containers`: those to rebase.

        `order`: all containers in the order of writing, each after its bases'.

        Raises: Corrupt if a directory is damaged.
        """
        is_used_tree = np.zeros(trees.count, np.bool_)
        for container in containers:
            trees_of = trees.by_container[container]
            is_used_tree[trees_of[trees_of != NO_TREE]] = True
        self._trees = trees
        self._starts: dict[int, int] = {}
        self._depths: dict[int, U8] = {}
        self._live: Masks = {}
        members, at = [np.zeros(0, np.uint64)], 0
        for container in sorted(trees.by_container):
            trees_of, live = trees.by_container[container], live_set.chunks.get(container)
            if live is None:
                continue
            rows = np.flatnonzero(live)
            rows = rows[(trees_of[rows] != NO_TREE) & is_used_tree[trees_of[rows]]]
            if len(rows) or container in containers:
                self._starts[container] = at
                self._live[container] = live
                self._depths[container] = live_set.directory(container).chunks.depths.copy()
                members.append(_keys(trees_of[rows], at + rows))
                at += len(trees_of)
        assert at < 1 << 32
        self._members = np.sort(np.concatenate(members))
        self._ids = np.array(list(self._starts), np.uint64)
        order_positions = {container: order_position for order_position, container in enumerate(order)}
        self._order = np.array([order_positions[container] for container in self._starts], np.int64)
        self._bounds = np.array(list(self._starts.values()), np.uint64)

    def depths(self, container: int) -> U8:
        """Return the array of current depths of a container's chunks, which the rebase updates."""
        return self._depths[container]

    def current_depths(self, locations: Locations, depths: U8) -> U8:
        """Return the current depths of chunks.

        `depths` applies to containers that are not rebased.
        """
        found = depths.copy()
        for container, rows in group_by_container(locations.containers):
            known = self._depths.get(container)
            if known is not None:
                found[rows] = known[locations.ordinals[rows]]
        return found

    def trees_of(self, container: int, ordinals: U32) -> NDArray[np.int32]:
        """Return the trees of chunks, NO_TREE where they have none."""
        return self._trees.trees_of(container, ordinals)

    def max_base_depths(self, container: int, ordinals: U32) -> U8:
        """Return the maximum base depth (uint8[n]) of each chunk.

        Below its own depth, and lower still where a later chunk of the same tree would otherwise have no candidate.
        """
        trees_of = self.trees_of(container, ordinals)
        below = self._depths[container][ordinals].astype(np.int64)
        rows_in_trees = np.flatnonzero(trees_of != NO_TREE)
        trees_of, position = trees_of[rows_in_trees], self._starts[container] + ordinals[rows_in_trees].astype(np.int64)
        at = np.searchsorted(self._members, _keys(trees_of, position)).astype(np.int64)
        before, behind = np.full(len(at), DEPTH_UNREACHABLE), np.full(len(at), DEPTH_UNREACHABLE)
        for step in range(1, LOOK_BACK + 1):
            for lowest, other in ((before, at - step), (behind, at + step)):
                rows = np.flatnonzero((other >= 0) & (other < len(self._members)))
                rows = rows[(self._members[other[rows]] >> np.uint64(32)).astype(np.int64) == trees_of[rows]]
                depths = self._member_depths(other[rows]).astype(np.int64)
                if lowest is behind:
                    depths[depths == 0] = DEPTH_UNREACHABLE  # a raw chunk needs no candidate
                lowest[rows] = np.minimum(lowest[rows], depths)
        limited = rows_in_trees[before >= behind]
        below[limited] = np.minimum(below[limited], behind[before >= behind] - 1)
        return below.astype(np.uint8)

    def candidates(self, container: int, ordinals: U32, max_base_depths: U8) -> Locations:
        """Return base candidates of consecutive chunks, all stored before the first of them.

        From the tree of each chunk those within its bound in `max_base_depths` (uint8[n]), and their stream neighbours
        at any depth: one chunk may hold content that was cut into two chunks of different trees before.
        """
        trees_of = self.trees_of(container, ordinals)
        rows_in_trees = trees_of != NO_TREE
        below = max_base_depths[rows_in_trees]
        trees_of, position = trees_of[rows_in_trees], self._starts[container] + ordinals[rows_in_trees].astype(np.int64)
        at = np.searchsorted(self._members, _keys(trees_of, position)).astype(np.int64)
        found, counts = [np.zeros(0, np.int64)], np.zeros(len(at), np.int64)
        for back in range(1, LOOK_BACK + 1):
            before = at - back
            rows = np.flatnonzero((before >= 0) & (counts < CANDIDATES_MAX))
            rows = rows[(self._members[before[rows]] >> np.uint64(32)).astype(np.int64) == trees_of[rows]]
            rows = rows[self._member_depths(before[rows]) < below[rows]]
            counts[rows] += 1
            found.append(before[rows])
        members = self._locate(np.unique(np.concatenate(found)))
        some = Locations.join([members, *self._stream_neighbours(members)])
        is_own = some.containers == container
        written = self._order[np.searchsorted(self._ids, some.containers)]
        before = written < self._order[np.searchsorted(self._ids, np.uint64(container))]
        return some.take(before | (is_own & (some.ordinals < ordinals[0])))

    def _stream_neighbours(self, members: Locations) -> Iterator[Locations]:
        """Yield the live chunks directly before and after `members` in their containers."""
        for container, rows in group_by_container(members.containers):
            live, ordinals = self._live[container], members.ordinals[rows].astype(np.int64)
            neighbours = np.concatenate([ordinals - 1, ordinals + 1])
            neighbours = neighbours[(neighbours >= 0) & (neighbours < len(live))]
            neighbours = neighbours[live[neighbours]]
            yield Locations(np.full(len(neighbours), container, np.uint64), neighbours.astype(np.uint32))

    def _locate(self, members: NDArray[np.int64]) -> Locations:
        positions = self._members[members] & np.uint64(0xFFFFFFFF)
        which = np.searchsorted(self._bounds, positions, side="right") - 1
        return Locations(self._ids[which], (positions - self._bounds[which]).astype(np.uint32))

    def _member_depths(self, members: NDArray[np.int64]) -> U8:
        locations = self._locate(members)
        depths = np.zeros(len(locations), np.uint8)
        for container, rows in group_by_container(locations.containers):
            depths[rows] = self._depths[container][locations.ordinals[rows]]
        return depths


def _keys(trees_of: NDArray[np.int32], positions: NDArray[np.int64]) -> U64:
    keys: U64 = (trees_of.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return keys
