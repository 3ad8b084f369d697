"""From one record of what is condemned to the next. Invariant: what is condemned anew waits for a grace of its own."""

from __future__ import annotations

import numpy as np

from nearkin_maintenance.gc.gc_plan import ContainerRemoval
from nearkin_shared.formats.pending_delete_record import PendingDelete


def record_deletion(record: dict[int, PendingDelete], container: int, drop: ContainerRemoval) -> None:
    """Take what has gone out of what is condemned."""
    before = record.pop(container)
    chunks, segments = np.setdiff1d(before.chunks, drop.chunks), np.setdiff1d(before.segments, drop.segments)
    if not drop.whole_container and len(chunks) + len(segments):
        record[container] = PendingDelete(before.at_us, chunks, segments, whole=False)


def carry_over(before: PendingDelete, now: PendingDelete) -> PendingDelete:
    """Return what was condemned before and still is; what was condemned since waits until that has gone."""
    if before.whole and now.whole:
        return before
    chunks, segments = np.intersect1d(before.chunks, now.chunks), np.intersect1d(before.segments, now.segments)
    if not len(chunks) + len(segments):
        return now
    same = len(chunks) == len(now.chunks) and len(segments) == len(now.segments)
    return PendingDelete(before.at_us, chunks, segments, now.whole and same)


def _same(one: PendingDelete, other: PendingDelete) -> bool:
    same = np.array_equal(one.chunks, other.chunks) and np.array_equal(one.segments, other.segments)
    return same and one.whole == other.whole


def same_record(one: dict[int, PendingDelete], other: dict[int, PendingDelete]) -> bool:
    """Return whether two say the same, of the same time: then none is written."""
    return one.keys() == other.keys() and all(
        _same(one[container], other[container]) and one[container].at_us == other[container].at_us for container in one
    )
