"""New bases. Invariant: a chunk is offered living chunks that are less deep than it was: it never gets deeper.

So whatever leans on it stays sound at every moment, and every chain still ends by depth. Offered are those of its
family that came last before it, and what stands beside these, of containers before its own in the order in which they
are written: what is offered is as shallow as is said by then, and no two containers come to lean on each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks
from nearkin_maintenance.optimize.base_trees import NONE, BaseTrees
from nearkin_shared.types import U8, U32, U64, Locations, group_by_container

CANDIDATES_MAX = 4
"""Living chunks before it that each chunk is offered as bases, the nearest ones that are less deep."""
LOOK_BACK = 8
"""So many before it are looked at for those."""
DEPTH_UNREACHABLE = 256
"""Deeper than anything."""


class ReplacementBases:
    """The living chunks of some families, in stream order: 8 bytes each, and a byte for each chunk beside them."""

    def __init__(self, reach: LiveSet, families: BaseTrees, containers: Collection[int], order: Iterable[int]) -> None:
        """`containers`: those whose chunks will ask. `order`: all containers, each behind those that it leans on; in it
        those are written. Raises Corrupt.
        """
        wanted = np.zeros(families.count, np.bool_)
        for container in containers:
            family = families.by_container[container]
            wanted[family[family != NONE]] = True
        self._families = families
        self._starts: dict[int, int] = {}
        self._depths: dict[int, U8] = {}
        self._live: Masks = {}
        members, at = [np.zeros(0, np.uint64)], 0
        for container in sorted(families.by_container):
            family, live = families.by_container[container], reach.chunks.get(container)
            if live is None:
                continue
            rows = np.flatnonzero(live)
            rows = rows[(family[rows] != NONE) & wanted[family[rows]]]
            if len(rows) or container in containers:
                self._starts[container] = at
                self._live[container] = live
                self._depths[container] = reach.directory(container).chunks.depths.copy()
                members.append(_keys(family[rows], at + rows))
                at += len(family)
        assert at < 1 << 32
        self._members = np.sort(np.concatenate(members))
        self._ids = np.array(list(self._starts), np.uint64)
        places = {container: place for place, container in enumerate(order)}
        self._order = np.array([places[container] for container in self._starts], np.int64)
        self._bounds = np.array(list(self._starts.values()), np.uint64)

    def depths(self, container: int) -> U8:
        """Return how deep the chunks of a container are by now; written to as they are given bases."""
        return self._depths[container]

    def current_depths(self, locations: Locations, depths: U8) -> U8:
        """Return how deep chunks are by now, `depths` of those that nobody here asks about."""
        found = depths.copy()
        for container, rows in group_by_container(locations.containers):
            known = self._depths.get(container)
            if known is not None:
                found[rows] = known[locations.ordinals[rows]]
        return found

    def family(self, container: int, ordinals: U32) -> NDArray[np.int32]:
        """Return the families of some chunks, NONE where they have none."""
        return self._families.trees_of(container, ordinals)

    def max_base_depths(self, container: int, ordinals: U32) -> U8:
        """Return uint8[n], how deep the bases of some chunks may not be: less deep than they are, and yet less deep
        where a later one of the family would find nothing else that is less deep than it is.
        """
        family = self.family(container, ordinals)
        below = self._depths[container][ordinals].astype(np.int64)
        asking = np.flatnonzero(family != NONE)
        family, position = family[asking], self._starts[container] + ordinals[asking].astype(np.int64)
        at = np.searchsorted(self._members, _keys(family, position)).astype(np.int64)
        before, behind = np.full(len(at), DEPTH_UNREACHABLE), np.full(len(at), DEPTH_UNREACHABLE)
        for step in range(1, LOOK_BACK + 1):
            for least, other in ((before, at - step), (behind, at + step)):
                rows = np.flatnonzero((other >= 0) & (other < len(self._members)))
                rows = rows[(self._members[other[rows]] >> np.uint64(32)).astype(np.int64) == family[rows]]
                depths = self._depth_of(other[rows]).astype(np.int64)
                if least is behind:
                    depths[depths == 0] = DEPTH_UNREACHABLE  # it leans on nothing
                least[rows] = np.minimum(least[rows], depths)
        leaned_on = asking[before >= behind]
        below[leaned_on] = np.minimum(below[leaned_on], behind[before >= behind] - 1)
        return below.astype(np.uint8)

    def candidates(self, container: int, ordinals: U32, max_base_depths: U8) -> Locations:
        """Return what some chunks of a container, in order, may lean on: chunks before all of them.

        `max_base_depths` uint8[n]: of each one's family those that are less deep; and, however deep, what stands beside
        these, for what one chunk holds now may have been cut in two, of different families.
        """
        family = self.family(container, ordinals)
        asking = family != NONE
        below = max_base_depths[asking]
        family, position = family[asking], self._starts[container] + ordinals[asking].astype(np.int64)
        at = np.searchsorted(self._members, _keys(family, position)).astype(np.int64)
        found, counts = [np.zeros(0, np.int64)], np.zeros(len(at), np.int64)
        for back in range(1, LOOK_BACK + 1):
            before = at - back
            rows = np.flatnonzero((before >= 0) & (counts < CANDIDATES_MAX))
            rows = rows[(self._members[before[rows]] >> np.uint64(32)).astype(np.int64) == family[rows]]
            rows = rows[self._depth_of(before[rows]) < below[rows]]
            counts[rows] += 1
            found.append(before[rows])
        members = self._locate(np.unique(np.concatenate(found)))
        some = Locations.join([members, *self._stream_neighbours(members)])
        here = some.containers == container
        written = self._order[np.searchsorted(self._ids, some.containers)]
        before = written < self._order[np.searchsorted(self._ids, np.uint64(container))]
        return some.take(before | (here & (some.ordinals < ordinals[0])))

    def _stream_neighbours(self, members: Locations) -> Iterator[Locations]:
        """Yield the living chunks that stand right before and behind some, in their containers."""
        for container, rows in group_by_container(members.containers):
            live, ordinals = self._live[container], members.ordinals[rows].astype(np.int64)
            beside = np.concatenate([ordinals - 1, ordinals + 1])
            beside = beside[(beside >= 0) & (beside < len(live))]
            beside = beside[live[beside]]
            yield Locations(np.full(len(beside), container, np.uint64), beside.astype(np.uint32))

    def _locate(self, members: NDArray[np.int64]) -> Locations:
        positions = self._members[members] & np.uint64(0xFFFFFFFF)
        which = np.searchsorted(self._bounds, positions, side="right") - 1
        return Locations(self._ids[which], (positions - self._bounds[which]).astype(np.uint32))

    def _depth_of(self, members: NDArray[np.int64]) -> U8:
        locations = self._locate(members)
        depths = np.zeros(len(locations), np.uint8)
        for container, rows in group_by_container(locations.containers):
            depths[rows] = self._depths[container][locations.ordinals[rows]]
        return depths


def _keys(family: NDArray[np.int32], positions: NDArray[np.int64]) -> U64:
    keys: U64 = (family.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return keys
