"""What an LMDB index lets go of. Invariant: afterwards no entry names what is unwanted, whenever it was looked up.

    look up, while others write -> keys      100 bytes each
    forget: of these keys what still names what is unwanted; all entries are read where more may name it by now

Reading all entries took 0.2 of the 0.25 s that a condemnation kept puts waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.frozen import frozen
from nearkin.records import U8, U32, U64, Bools, Locations, grouped

ENTRIES_AT_ONCE = 1 << 16
LOCATION_BYTES = 12
Unwanted = Mapping[int, U32 | None]
"""By container: ordinals, or None for all."""


@frozen
class Found:
    """What was looked up: keys by table, in the index of `file` when it had published `containers`."""

    file: tuple[int, int]
    containers: U64
    keys: Mapping[str, Sequence[bytes]]

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


def look_up(rows: Iterator[tuple[U8, Locations]], unwanted: Unwanted) -> list[bytes]:
    """Return the keys of a table's `rows` whose location is unwanted."""
    found: list[bytes] = []
    for keys, locations in rows if unwanted else ():
        mine: NDArray[np.intp] = np.flatnonzero(_named(locations, unwanted))
        found += [keys[row].tobytes() for row in mine.tolist()]
    return found


def drop(txn: Any, db: Any, unwanted: Unwanted, keys: Sequence[bytes] | None = None) -> None:
    """Delete the entries whose location is unwanted; of `keys` alone, or of all.

    Of all, ENTRIES_AT_ONCE at a time: no list of all of them is held.
    """
    ordinals = {
        container.to_bytes(8, "little"): None if rows is None else frozenset(rows.tolist())
        for container, rows in unwanted.items()
    }

    def is_unwanted(value: bytes) -> bool:
        container = value[:8]
        if container not in ordinals:
            return False
        rows = ordinals[container]
        return rows is None or int.from_bytes(value[8:LOCATION_BYTES], "little") in rows

    if keys is not None:
        for key in keys:
            value = txn.get(key, db=db)
            if value is not None and is_unwanted(value):
                txn.delete(key, db=db)
        return
    after = b""
    while ordinals:
        cursor = txn.cursor(db)
        some = []
        if cursor.set_range(after) if after else cursor.first():
            for key, value in cursor:
                if is_unwanted(value):
                    some.append(key)
                    if len(some) >= ENTRIES_AT_ONCE:
                        break
        for key in some:
            txn.delete(key, db=db)
        if len(some) < ENTRIES_AT_ONCE:
            return
        after = some[-1]


def _named(locations: Locations, unwanted: Unwanted) -> Bools:
    named = np.zeros(len(locations), np.bool_)
    for container, rows in grouped(locations.containers):
        if container in unwanted:
            ordinals = unwanted[container]
            named[rows] = True if ordinals is None else np.isin(locations.ordinals[rows], ordinals)
    return named
