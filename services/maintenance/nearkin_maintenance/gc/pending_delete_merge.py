"""From one record of what is condemned to the next. Invariant: what is condemned anew waits for a grace of its own."""

from __future__ import annotations

import numpy as np

from nearkin_maintenance.gc.gc_plan import Drop
from nearkin_shared.formats.pending_delete_record import Condemned


def note_gone(record: dict[int, Condemned], container: int, drop: Drop) -> None:
    """Take what has gone out of what is condemned."""
    before = record.pop(container)
    chunks, segments = np.setdiff1d(before.chunks, drop.chunks), np.setdiff1d(before.segments, drop.segments)
    if not drop.everything and len(chunks) + len(segments):
        record[container] = Condemned(before.at_us, chunks, segments, whole=False)


def carried(before: Condemned, now: Condemned) -> Condemned:
    """Return what was condemned before and still is; what was condemned since waits until that has gone."""
    if before.whole and now.whole:
        return before
    chunks, segments = np.intersect1d(before.chunks, now.chunks), np.intersect1d(before.segments, now.segments)
    if not len(chunks) + len(segments):
        return now
    same = len(chunks) == len(now.chunks) and len(segments) == len(now.segments)
    return Condemned(before.at_us, chunks, segments, now.whole and same)


def _same(one: Condemned, other: Condemned) -> bool:
    same = np.array_equal(one.chunks, other.chunks) and np.array_equal(one.segments, other.segments)
    return same and one.whole == other.whole


def same_record(one: dict[int, Condemned], other: dict[int, Condemned]) -> bool:
    """Return whether two say the same, of the same time: then none is written."""
    return one.keys() == other.keys() and all(
        _same(one[container], other[container]) and one[container].at_us == other[container].at_us for container in one
    )
