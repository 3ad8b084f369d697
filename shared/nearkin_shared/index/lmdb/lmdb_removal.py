"""Selection of the entries that an LMDB index removes.

Invariant: after the removal no entry names a removed location, however old the lookup.

    find_keys     while others write -> keys
    withdraw      of these keys, the entries that still name a removed location; all entries are read if other keys
                  may name one by now

Reading all entries took 0.2 of the 0.25 s that marking for deletion blocked puts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nearkin_shared.types import U8, U32, U64, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

Removals = Mapping[int, U32 | None]
"""Ordinals to remove by container, or None for all."""


@frozen
class RemovalLookup:
    """Keys found by table in the index of `file`, when it had published `containers`."""

    file: tuple[int, int]
    containers: U64
    keys: Mapping[str, U8]

    def covers(self, file: tuple[int, int], containers: U64, removals: Mapping[str, Removals]) -> bool:
        """Return whether no other key can name a removal.

        Entries appear with their container's publication only.
        """
        if file != self.file:
            return False
        published = set(np.setdiff1d(containers, self.containers).tolist())
        return not any(published & rows.keys() for rows in removals.values())


def removals_by_table(chunks: Removals, segments: Mapping[int, U32]) -> dict[str, Removals]:
    """Return the removals of each table: a container without chunks has no segments."""
    lost: dict[int, U32 | None] = {container: None for container, rows in chunks.items() if rows is None}
    return {"chunks": chunks, "features": chunks, "segments": {**segments, **lost}}


def find_keys(rows: Iterator[tuple[U8, Locations]], removals: Removals, key_bytes: int) -> U8:
    """Return the keys, uint8[n, key_bytes], of `rows` whose location is removed."""
    found = [np.zeros((0, key_bytes), np.uint8)]
    if removals:
        found += [keys[is_removed(locations, removals)] for keys, locations in rows]
    return np.concatenate(found)


def is_removed(locations: Locations, removals: Removals) -> Bools:
    """Return which locations are removed."""
    containers = np.sort(np.fromiter(removals, np.uint64, len(removals)))
    removed = np.zeros(len(locations), np.bool_)
    if not len(containers):
        return removed
    at = np.minimum(np.searchsorted(containers, locations.containers), len(containers) - 1)
    listed = np.flatnonzero(containers[at] == locations.containers)
    for container, rows in group_by_container(locations.containers[listed]):
        ordinals = removals[container]
        removed[listed[rows]] = True if ordinals is None else np.isin(locations.ordinals[listed[rows]], ordinals)
    return removed
