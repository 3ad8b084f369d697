"""New bases. Invariant: a chunk is offered living chunks that are less deep than it was: it never gets deeper.

So whatever leans on it stays sound at every moment, and every chain still ends by depth, in whatever order containers
are written anew. Offered are those of its family that came last before it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from nearkin.records import U8, U32, U64, Locations
from nearkin.store.chunks import grouped
from nearkin_janitor.families import NONE, Families
from nearkin_janitor.reach import Reach

OFFERED_MAX = 4
"""Living chunks before it that each chunk is offered as bases, the nearest ones that are less deep."""
LOOK_BACK = 8
"""So many before it are looked at for those."""


class Heirs:
    """The living chunks of some families, in stream order: 8 bytes each, and a byte for each chunk beside them."""

    def __init__(self, reach: Reach, families: Families, containers: Collection[int]) -> None:
        """`containers`: those whose chunks will ask. Raises Corrupt."""
        wanted = np.zeros(families.count, np.bool_)
        for container in containers:
            family = families.of[container]
            wanted[family[family != NONE]] = True
        self._families = families
        self._starts: dict[int, int] = {}
        self._depths: dict[int, U8] = {}
        members, at = [np.zeros(0, np.uint64)], 0
        for container in sorted(families.of):
            family, live = families.of[container], reach.chunks.get(container)
            if live is None:
                continue
            rows = np.flatnonzero(live)
            rows = rows[(family[rows] != NONE) & wanted[family[rows]]]
            if len(rows) or container in containers:
                self._starts[container] = at
                self._depths[container] = reach.directory(container).chunks.depths.copy()
                members.append(_keys(family[rows], at + rows))
                at += len(family)
        assert at < 1 << 32
        self._members = np.sort(np.concatenate(members))
        self._ids = np.array(list(self._starts), np.uint64)
        self._bounds = np.array(list(self._starts.values()), np.uint64)

    def depths(self, container: int) -> U8:
        """Return how deep the chunks of a container are by now; written to as they are given bases."""
        return self._depths[container]

    def family(self, container: int, ordinals: U32) -> NDArray[np.int32]:
        """Return the families of some chunks, NONE where they have none."""
        return self._families.chosen(container, ordinals)

    def offered(self, container: int, ordinals: U32, depth_below: int) -> Locations:
        """Return what some chunks of a container may lean on, each once: chunks less deep than `depth_below`."""
        family = self.family(container, ordinals)
        asking = family != NONE
        family, position = family[asking], self._starts[container] + ordinals[asking].astype(np.int64)
        at = np.searchsorted(self._members, _keys(family, position)).astype(np.int64)
        found, counts = [np.zeros(0, np.int64)], np.zeros(len(at), np.int64)
        for back in range(1, LOOK_BACK + 1):
            before = at - back
            rows = np.flatnonzero((before >= 0) & (counts < OFFERED_MAX))
            rows = rows[(self._members[before[rows]] >> np.uint64(32)).astype(np.int64) == family[rows]]
            rows = rows[self._depth_of(before[rows]) < depth_below]
            counts[rows] += 1
            found.append(before[rows])
        return self._located(np.unique(np.concatenate(found)))

    def _located(self, members: NDArray[np.int64]) -> Locations:
        positions = self._members[members] & np.uint64(0xFFFFFFFF)
        which = np.searchsorted(self._bounds, positions, side="right") - 1
        return Locations(self._ids[which], (positions - self._bounds[which]).astype(np.uint32))

    def _depth_of(self, members: NDArray[np.int64]) -> U8:
        locations = self._located(members)
        depths = np.zeros(len(locations), np.uint8)
        for container, rows in grouped(locations.containers):
            depths[rows] = self._depths[container][locations.ordinals[rows]]
        return depths


def _keys(family: NDArray[np.int32], positions: NDArray[np.int64]) -> U64:
    keys: U64 = (family.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return keys
