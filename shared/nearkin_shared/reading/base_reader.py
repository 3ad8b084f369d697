"""Contents of base candidates.

Invariant: an unreadable chunk is unavailable, not an error, and all other chunks are available.

    locations -> existing ones -> chunks at too great a depth replaced by their ancestors, with stream neighbours of
              these -> bytes, each distinct chunk once
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.directory import CHUNK_ROW
from nearkin_shared.kernels.colocated_rows import rows_beside
from nearkin_shared.kernels.table_rows import take_rows
from nearkin_shared.limits import DEPTH_MAX
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import U32, ZERO, Bools, ContainerId, Locations, Pieces, bounds_of, group_by_container
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

CONTENTS_BYTES_MAX = 32 * 1024 * 1024
"""Bound on the bytes of bases read for one batch."""

NEIGHBOUR_BYTES_MAX = 64 * 1024
"""Bound on stream neighbours: a merged chunk is as long as eight or more chunks."""
MISSING_MAX = 1 << 16
_NO_LENGTHS: U32 = np.zeros(0, np.uint32)


class BaseReader:
    """Reader of the bytes of base candidates by location."""

    def __init__(self, source: ContainerSource, helpers: ThreadPool = SERIAL) -> None:
        """Create the reader; `helpers` decode blocks concurrently with the caller."""
        self._source = source
        self._reader = ChunkReader(source, helpers)
        self._missing: set[int] = set()
        """Deleted containers that older recipes still reference."""

    def contents(
        self,
        locations: Locations,
        depth_below: int | None = None,
        *,
        no_deltas: bool = False,
        bounds: U32 | None = None,
    ) -> Contents:
        """Return bytes and depths of the readable chunks; others are unavailable.

        With `depth_below` chunks at that depth or more are replaced as `LookupRequest` describes, and deltas with
        `no_deltas`; with `bounds` the result may have more rows. Rows beyond CONTENTS_BYTES_MAX are unavailable too.
        """
        if self._missing and not (existing := self._existing_rows(locations)).all():
            return self._read_rows(locations, existing, depth_below, no_deltas)
        try:
            return self._contents(locations, depth_below, no_deltas, bounds)
        except (Corrupt, NotFound):
            existing = self._existing_rows(locations)
            if not existing.all():  # a collected chunk: its neighbours are read as usual
                return self._read_rows(locations, existing, depth_below, no_deltas)
            return self._contents_piecewise(locations, depth_below, no_deltas)

    def _read_rows(self, locations: Locations, existing: Bools, depth_below: int | None, no_deltas: bool) -> Contents:
        rows = np.flatnonzero(existing)
        return _spread(self.contents(locations.take(rows), depth_below, no_deltas=no_deltas), rows, locations)

    def _existing_rows(self, locations: Locations) -> Bools:
        """Return which rows are chunks of their containers."""
        existing = np.ones(len(locations), np.bool_)
        for container, rows in group_by_container(locations.containers):
            if container == ZERO:
                continue
            lengths = self._lengths(container)
            ordinals = locations.ordinals[rows]
            existing[rows] = ordinals < len(lengths)
            beyond = np.zeros(1, np.uint32)
            existing[rows] &= np.concatenate([lengths, beyond])[np.minimum(ordinals, len(lengths))] > 0
        return existing

    def _lengths(self, container: int) -> U32:
        """Return the lengths of a container's chunks, none if it does not exist."""
        if container in self._missing:
            return _NO_LENGTHS
        try:
            return self._source.directory(ContainerId(container)).chunks.lengths
        except (Corrupt, NotFound):
            if len(self._missing) >= MISSING_MAX:
                self._missing.clear()
            self._missing.add(container)
            return _NO_LENGTHS

    def _contents(
        self, locations: Locations, depth_below: int | None, no_deltas: bool, bounds: U32 | None = None
    ) -> Contents:
        plan = self._reader.plan(locations)
        if depth_below is not None:
            plan = self._replace_by_ancestors(plan, depth_below, no_deltas)
            if bounds is not None:
                plan, bounds = self._with_stream_neighbours(locations, plan, depth_below, no_deltas, bounds)
        distinct, which = plan.locations.mentions()
        is_within_bound = np.cumsum(plan.lengths[distinct], dtype=np.uint64) <= CONTENTS_BYTES_MAX
        pieces = self._reader.lease(plan.take(distinct[is_within_bound]))
        pieces = Pieces.place(len(distinct), [(np.flatnonzero(is_within_bound), pieces)])
        return Contents(plan.locations, pieces.take(which), plan.depths, is_within_bound[which], bounds)

    def _with_stream_neighbours(
        self, requested: Locations, plan: ReadPlan, depth_below: int, no_deltas: bool, bounds: U32
    ) -> tuple[ReadPlan, U32]:
        """Return `plan` with the stream neighbours of its ancestors, and the new bounds.

        The neighbours of a group follow its other rows.
        """
        is_replaced = (plan.locations.containers != requested.containers) | (
            plan.locations.ordinals != requested.ordinals
        )
        which, containers, tables = self._reader.tables(plan.locations)
        excluded_kind = container_layout.XDELTA3 if no_deltas else None
        owners, ordinals, groups = rows_beside(
            tables, which, plan.locations.ordinals, is_replaced, bounds, depth_below, NEIGHBOUR_BYTES_MAX, excluded_kind
        )
        if not len(groups):
            return plan, bounds
        rows = np.empty(len(owners), CHUNK_ROW)
        take_rows(tables, owners, ordinals, rows)
        locations = Locations.join([plan.locations, Locations(containers[owners], ordinals)])
        counts = np.diff(bounds)
        order = np.argsort(np.concatenate([np.repeat(np.arange(len(counts)), counts), groups]), kind="stable")
        joined = ReadPlan(locations, np.concatenate([plan.rows, rows]), plan.since)
        return joined.take(order), bounds_of(counts + np.bincount(groups, minlength=len(counts)))

    def _replace_by_ancestors(self, plan: ReadPlan, depth_below: int, no_deltas: bool) -> ReadPlan:
        """Return the plan of each row's first ancestor below `depth_below`, and no delta."""
        containers, ordinals = plan.locations.containers.copy(), plan.locations.ordinals.copy()
        replaced = ReadPlan(Locations(containers, ordinals), plan.rows, plan.since)
        for _ in range(DEPTH_MAX + 1):
            unfit = np.flatnonzero(_is_unfit(replaced, depth_below, no_deltas))
            if not len(unfit):
                return replaced
            ancestors = self._reader.plan(replaced.bases.take(unfit))
            containers[unfit], ordinals[unfit] = ancestors.locations.containers, ancestors.locations.ordinals
            replaced.rows[unfit] = ancestors.rows
        raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")

    def _contents_piecewise(self, locations: Locations, depth_below: int | None, no_deltas: bool) -> Contents:
        """Read container by container and leave out failures: only for damaged data."""
        count = len(locations)
        depths, available = np.zeros(count, np.uint8), np.zeros(count, np.bool_)
        found = Locations(locations.containers.copy(), locations.ordinals.copy())
        parts = list[tuple[NDArray[np.intp], Pieces]]()
        for _, rows in group_by_container(locations.containers):
            try:
                part = self._contents(locations.take(rows), depth_below, no_deltas)
            except (Corrupt, NotFound):
                continue
            depths[rows], available[rows] = part.depths, part.available
            found.containers[rows], found.ordinals[rows] = part.locations.containers, part.locations.ordinals
            parts.append((rows, part.pieces))
        return Contents(found, Pieces.place(count, parts), depths, available)


def _is_unfit(plan: ReadPlan, depth_below: int, no_deltas: bool) -> Bools:
    """Return which chunks cannot be bases: depth too great, or deltas if excluded."""
    unfit: Bools = plan.depths >= depth_below
    if no_deltas:
        unfit |= plan.kinds == container_layout.XDELTA3
    return unfit


def _spread(found: Contents, rows: NDArray[np.intp], locations: Locations) -> Contents:
    """Return the contents of some rows as those of all `locations`, others unavailable."""
    count = len(locations)
    replaced = Locations(locations.containers.copy(), locations.ordinals.copy())
    replaced.containers[rows], replaced.ordinals[rows] = found.locations.containers, found.locations.ordinals
    depths, available = np.zeros(count, np.uint8), np.zeros(count, np.bool_)
    depths[rows], available[rows] = found.depths, found.available
    return Contents(replaced, Pieces.place(count, [(rows, found.pieces)]), depths, available)
