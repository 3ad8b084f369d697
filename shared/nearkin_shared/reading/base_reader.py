"""Reading bases. Invariant: what cannot be read is not available, no error, and all else is.

locations -> those that are there -> in place of what is too deep its ancestor, and what stood beside that
          -> bytes, each distinct chunk once
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
from nearkin_shared.reading.read_plan import Plan
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import U32, ZERO, Bools, ContainerId, Locations, Pieces, bounds_of, group_by_container
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

CONTENTS_BYTES_MAX = 32 * 1024 * 1024
"""Of bases read for one batch, at most."""

NEIGHBOUR_BYTES_MAX = 64 * 1024
"""A longer chunk is not read for standing beside one that is: one that a round joined is as long as eight or more."""
MISSING_MAX = 1 << 16
_NO_LENGTHS: U32 = np.zeros(0, np.uint32)


class BaseReader:
    """Bytes of what may be a base, by location."""

    def __init__(self, source: ContainerSource, helpers: ThreadPool = SERIAL) -> None:
        """`helpers` decode beside the caller."""
        self._source = source
        self._reader = ChunkReader(source, helpers)
        self._missing: set[int] = set()
        """Containers that were collected, and that older recipes still name."""

    def contents(
        self,
        locations: Locations,
        depth_below: int | None = None,
        *,
        no_deltas: bool = False,
        bounds: U32 | None = None,
    ) -> Contents:
        """Return bytes and depths of what can be read; a chunk that is lost or broken is not available, no error.

        With `depth_below` chunks as deep as that are replaced as `LookupRequest` says, and deltas with `no_deltas`;
        with `bounds` there may be more of them. What comes after CONTENTS_BYTES_MAX is not available either.
        """
        if self._missing and not (there := self._there(locations)).all():
            return self._some(locations, there, depth_below, no_deltas)
        try:
            return self._contents(locations, depth_below, no_deltas, bounds)
        except (Corrupt, NotFound):
            there = self._there(locations)
            if not there.all():  # garbage that was collected: what is around it is read as ever
                return self._some(locations, there, depth_below, no_deltas)
            return self._contents_piecewise(locations, depth_below, no_deltas)

    def _some(self, locations: Locations, there: Bools, depth_below: int | None, no_deltas: bool) -> Contents:
        rows = np.flatnonzero(there)
        return _spread(self.contents(locations.take(rows), depth_below, no_deltas=no_deltas), rows, locations)

    def _there(self, locations: Locations) -> Bools:
        """Return which rows are chunks that their containers have."""
        there = np.ones(len(locations), np.bool_)
        for container, rows in group_by_container(locations.containers):
            if container == ZERO:
                continue
            lengths = self._lengths(container)
            ordinals = locations.ordinals[rows]
            there[rows] = ordinals < len(lengths)
            beyond = np.zeros(1, np.uint32)
            there[rows] &= np.concatenate([lengths, beyond])[np.minimum(ordinals, len(lengths))] > 0
        return there

    def _lengths(self, container: int) -> U32:
        """Return the lengths of a container's chunks, none where it is not there."""
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
            plan = self._replaced(plan, depth_below, no_deltas)
            if bounds is not None:
                plan, bounds = self._with_stream_neighbours(locations, plan, depth_below, no_deltas, bounds)
        distinct, which = plan.locations.mentions()
        kept = np.cumsum(plan.lengths[distinct], dtype=np.uint64) <= CONTENTS_BYTES_MAX
        pieces = self._reader.lease(plan.take(distinct[kept]))
        pieces = Pieces.place(len(distinct), [(np.flatnonzero(kept), pieces)])
        return Contents(plan.locations, pieces.take(which), plan.depths, kept[which], bounds)

    def _with_stream_neighbours(
        self, asked: Locations, plan: Plan, depth_below: int, no_deltas: bool, bounds: U32
    ) -> tuple[Plan, U32]:
        """Return `plan` with what stood beside the ancestors in it, each group's behind its others; and the bounds."""
        moved = (plan.locations.containers != asked.containers) | (plan.locations.ordinals != asked.ordinals)
        which, containers, tables = self._reader.tables(plan.locations)
        left_out = container_layout.XDELTA3 if no_deltas else None
        of, ordinals, groups = rows_beside(
            tables, which, plan.locations.ordinals, moved, bounds, depth_below, NEIGHBOUR_BYTES_MAX, left_out
        )
        if not len(groups):
            return plan, bounds
        rows = np.empty(len(of), CHUNK_ROW)
        take_rows(tables, of, ordinals, rows)
        locations = Locations.join([plan.locations, Locations(containers[of], ordinals)])
        counts = np.diff(bounds)
        order = np.argsort(np.concatenate([np.repeat(np.arange(len(counts)), counts), groups]), kind="stable")
        both = Plan(locations, np.concatenate([plan.rows, rows]), plan.since)
        return both.take(order), bounds_of(counts + np.bincount(groups, minlength=len(counts)))

    def _replaced(self, plan: Plan, depth_below: int, no_deltas: bool) -> Plan:
        """Return the plan of the first ancestor of each row that is less deep than `depth_below`, and no delta."""
        containers, ordinals = plan.locations.containers.copy(), plan.locations.ordinals.copy()
        replaced = Plan(Locations(containers, ordinals), plan.rows, plan.since)
        for _ in range(DEPTH_MAX + 1):
            deep = np.flatnonzero(_unfit(replaced, depth_below, no_deltas))
            if not len(deep):
                return replaced
            below = self._reader.plan(replaced.bases.take(deep))
            containers[deep], ordinals[deep] = below.locations.containers, below.locations.ordinals
            replaced.rows[deep] = below.rows
        raise Corrupt(f"a chain of more than {DEPTH_MAX} deltas")

    def _contents_piecewise(self, locations: Locations, depth_below: int | None, no_deltas: bool) -> Contents:
        """Read container by container, leaving out what fails: only on the way through damage."""
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


def _unfit(plan: Plan, depth_below: int, no_deltas: bool) -> Bools:
    """Return which chunks are no bases: they lie too deep, or are deltas where that matters."""
    unfit: Bools = plan.depths >= depth_below
    if no_deltas:
        unfit |= plan.kinds == container_layout.XDELTA3
    return unfit


def _spread(found: Contents, rows: NDArray[np.intp], locations: Locations) -> Contents:
    """Return what was found of some rows as answers for all of `locations`: the others are not available."""
    count = len(locations)
    replaced = Locations(locations.containers.copy(), locations.ordinals.copy())
    replaced.containers[rows], replaced.ordinals[rows] = found.locations.containers, found.locations.ordinals
    depths, available = np.zeros(count, np.uint8), np.zeros(count, np.bool_)
    depths[rows], available[rows] = found.depths, found.available
    return Contents(replaced, Pieces.place(count, [(rows, found.pieces)]), depths, available)
