"""What an LMDB index lets go of. Invariant: afterwards no entry names what is unwanted, whenever it was looked up.

    look up, while others write -> keys
    forget: of these keys what still names what is unwanted; all entries are read where more may name it by now

Reading all entries took 0.2 of the 0.25 s that a condemnation kept puts waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nearkin_shared.types import U8, U32, U64, Bools, Locations, group_by_container
from nearkin_shared.utils.frozen import frozen

Unwanted = Mapping[int, U32 | None]
"""By container: ordinals, or None for all."""


@frozen
class RemovalLookup:
    """What was looked up: keys by table, in the index of `file` when it had published `containers`."""

    file: tuple[int, int]
    containers: U64
    keys: Mapping[str, U8]

    def holds(self, file: tuple[int, int], containers: U64, unwanted: Mapping[str, Unwanted]) -> bool:
        """Return whether nothing else can name what is unwanted: entries come with their container's publication."""
        if file != self.file:
            return False
        published = set(np.setdiff1d(containers, self.containers).tolist())
        return not any(published & rows.keys() for rows in unwanted.values())


def by_table(chunks: Unwanted, segments: Mapping[int, U32]) -> dict[str, Unwanted]:
    """Return what is unwanted in each table: without a container's chunks, none of its segments."""
    lost: dict[int, U32 | None] = {container: None for container, rows in chunks.items() if rows is None}
    return {"chunks": chunks, "features": chunks, "segments": {**segments, **lost}}


def look_up(rows: Iterator[tuple[U8, Locations]], unwanted: Unwanted, key_bytes: int) -> U8:
    """Return the keys, uint8[n, key_bytes], of a table's `rows` whose location is unwanted."""
    found = [np.zeros((0, key_bytes), np.uint8)]
    if unwanted:
        found += [keys[is_unwanted(locations, unwanted)] for keys, locations in rows]
    return np.concatenate(found)


def is_unwanted(locations: Locations, unwanted: Unwanted) -> Bools:
    """Return which locations are unwanted."""
    containers = np.sort(np.fromiter(unwanted, np.uint64, len(unwanted)))
    named = np.zeros(len(locations), np.bool_)
    if not len(containers):
        return named
    at = np.minimum(np.searchsorted(containers, locations.containers), len(containers) - 1)
    mine = np.flatnonzero(containers[at] == locations.containers)
    for container, rows in group_by_container(locations.containers[mine]):
        ordinals = unwanted[container]
        named[mine[rows]] = True if ordinals is None else np.isin(locations.ordinals[mine[rows]], ordinals)
    return named
