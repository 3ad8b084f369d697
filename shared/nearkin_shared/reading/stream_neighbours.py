"""Stored neighbours of chunks in their streams.

Invariant: only directories are read, each once per lookup; an unreadable chunk has no neighbours.

The chunks stored between two chunks are those that a changed version most likely changed (locality):

    fresh     . . L  f f f  R . .
    stored    . . L  o o  R . .     recipes of the newest container read that names L, from its row there
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.directory import Directory
from nearkin_shared.pipeline.stage import Anchor, Gaps, Neighbours
from nearkin_shared.reading.block_cache import ByteBoundedCache
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import (
    CONTAINER_ID_MIN,
    U8,
    U32,
    U64,
    ZERO,
    Bools,
    ContainerId,
    Locations,
    bounds_of,
    group_by_container,
)

ROWS_CACHE_BYTES = 8 * 1024 * 1024
ROWS_BEHIND = 2
"""Rows before the continuation of a gap: the old version may have had fewer until there."""
NO_NEIGHBOUR = -1
KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without regular digits: containers and ordinals close to one another have different keys."""
Rows = NDArray[np.int64]
Directories = dict[int, Directory]
"""Directories read for one lookup: a container may be rewritten meanwhile, without some of its recipes."""


@dataclass(slots=True)
class _NeighbourLocations:
    """Rows of containers' recipes, NO_NEIGHBOUR for none.

    `row_counts` are the numbers of rows of the containers.
    """

    containers: U64
    rows: Rows
    row_counts: Rows

    @property
    def known(self) -> Bools:
        known: Bools = self.rows != NO_NEIGHBOUR
        return known


class Neighbourhood:
    """Lookup of the chunks of gaps in the recipes of containers."""

    def __init__(self, source: ContainerSource) -> None:
        self._source = source
        self._first_rows: ByteBoundedCache[tuple[ContainerId, int, int], U32] = ByteBoundedCache(
            ROWS_CACHE_BYTES, "recipes"
        )
        """First recipe rows of chunks by container, its chunks and recipe rows: a rewritten container has fewer."""
        self._references: ByteBoundedCache[tuple[ContainerId, int, int], tuple[U64, U32]] = ByteBoundedCache(
            ROWS_CACHE_BYTES, "references"
        )

    def between(self, gaps: Gaps) -> Neighbours:
        """Return the stored chunks of each gap: at most 2 n + 6 for n fresh chunks."""
        count, fresh = len(gaps), gaps.fresh.astype(np.int64)
        read: Directories = {}
        left = self._find_rows(gaps.left_kinds, gaps.left, read, after=True)
        right = self._find_rows(gaps.right_kinds, gaps.right, read, after=False)
        self._move_to_newest(left, gaps.left_kinds, gaps.left, read, after=True)
        self._move_to_newest(right, gaps.right_kinds, gaps.right, read, after=False)
        _continue(left, gaps.left_kinds, fresh)
        slack = fresh // 2 + 2
        is_between = left.known & right.known & (left.containers == right.containers)
        is_between &= (right.rows >= left.rows) & (right.rows <= left.rows + 2 * fresh + 4)
        ahead_until = np.where(is_between, right.rows, np.minimum(left.row_counts, left.rows + fresh + slack))
        back = right.known & ~is_between
        # Both sides, if they come from different surroundings; if only one is known, its full width.
        back_from = np.maximum(0, right.rows - np.where(left.known, slack, fresh + slack))
        drifts = (gaps.left_kinds == Anchor.CONTINUED) | (gaps.left_kinds == Anchor.ROW)
        from_row = np.maximum(0, left.rows - np.where(drifts, ROWS_BEHIND, 0))
        starts = np.concatenate([np.where(left.known, from_row, 0), np.where(back, back_from, 0)])
        stops = np.concatenate([np.where(left.known, ahead_until, 0), np.where(back, right.rows, 0)])
        found, range_of_row = _chunks(read, np.concatenate([left.containers, right.containers]), starts, stops)
        range_of_row %= count or 1
        order = np.argsort(range_of_row, kind="stable")
        chunks = found.take(order)
        stored = chunks.containers >= np.uint64(ZERO + 1)
        bounds = bounds_of(np.bincount(range_of_row[order][stored], minlength=count))
        ends = np.minimum(np.where(is_between, right.rows, left.rows + fresh), left.row_counts)
        return Neighbours(
            gaps.fresh,
            bounds,
            chunks.take(stored),
            Locations(np.where(left.known, left.containers, 0), np.where(left.known, ends, 0).astype(np.uint32)),
        )

    def _find_rows(self, kinds: U8, anchors: Locations, read: Directories, *, after: bool) -> _NeighbourLocations:
        """Return the rows of the anchors, or the rows after them; add directories to `read`."""
        rows, row_counts = np.full(len(kinds), NO_NEIGHBOUR, np.int64), np.zeros(len(kinds), np.int64)
        anchored = np.flatnonzero((kinds != Anchor.NONE) & (kinds != Anchor.CONTINUED))
        for container, rows_of_container in group_by_container(anchors.containers[anchored]):
            directory = read.get(container)
            if directory is None:
                try:
                    directory = read[container] = self._source.directory(ContainerId(container))
                except (Corrupt, NotFound):
                    continue
            selected = anchored[rows_of_container]
            rows[selected] = self._rows(directory, kinds[selected], anchors.ordinals[selected].astype(np.int64), after)
            row_counts[selected] = len(directory.segments.chunks)
        return _NeighbourLocations(anchors.containers, rows, row_counts)

    def _move_to_newest(
        self, places: _NeighbourLocations, kinds: U8, anchors: Locations, read: Directories, *, after: bool
    ) -> None:
        """Move chunk anchors to the newest container read of which the recipes name them once.

        In its own container, a chunk that later versions left unchanged has the neighbours of the first of them.
        """
        mine = np.flatnonzero(kinds == Anchor.CHUNK)
        if not len(mine):
            return
        wanted, containers = _keys(anchors.take(mine)), places.containers.copy()
        for container in sorted(read):
            keys, rows = self._find_references(read[container])
            at = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
            found = keys[at] == wanted if len(keys) else np.zeros(len(mine), np.bool_)
            moved = mine[found]
            containers[moved] = container
            places.rows[moved] = rows[at[found]].astype(np.int64) + after
            places.row_counts[moved] = len(read[container].segments.chunks)
        places.containers = containers

    def _find_references(self, directory: Directory) -> tuple[U64, U32]:
        """Return the keys of other containers' chunks that recipes name once, and their rows."""
        recipes = directory.segments.chunks
        name = directory.container, len(directory.chunks), len(recipes)
        known = self._references.get(name)
        if known is not None:
            return known
        other = np.flatnonzero(
            (recipes.containers != np.uint64(directory.container)) & (recipes.containers >= np.uint64(CONTAINER_ID_MIN))
        )
        keys, firsts, counts = np.unique(_keys(recipes.take(other)), return_index=True, return_counts=True)
        is_single = counts == 1
        found = keys[is_single], other[firsts[is_single]].astype(np.uint32)
        if directory.container_bytes:  # an open container grows
            self._references.put(name, found, found[0].nbytes + found[1].nbytes)
        return found

    def _rows(self, directory: Directory, kinds: U8, ordinals: Rows, after: bool) -> Rows:
        rows = np.full(len(kinds), NO_NEIGHBOUR, np.int64)
        at = kinds == Anchor.ROW
        rows[at] = np.minimum(ordinals[at], len(directory.segments.chunks))
        at = (kinds == Anchor.SEGMENT) & (ordinals < len(directory.segments))
        rows[at] = directory.segments.bounds[ordinals[at] + after]
        at = (kinds == Anchor.CHUNK) & (ordinals < len(directory.chunks))
        if at.any():
            first_rows = self._find_first_rows(directory)[ordinals[at]].astype(np.int64) - 1
            rows[at] = np.where(first_rows == NO_NEIGHBOUR, NO_NEIGHBOUR, first_rows + after)
        return rows

    def _find_first_rows(self, directory: Directory) -> U32:
        """Return 1 + the first recipe row of each chunk of a container, 0 for none."""
        recipes = directory.segments.chunks
        name = directory.container, len(directory.chunks), len(recipes)
        known = self._first_rows.get(name)
        if known is not None:
            return known
        rows = np.zeros(len(directory.chunks), np.uint32)
        own = np.flatnonzero(recipes.containers == np.uint64(directory.container))[::-1]
        rows[recipes.ordinals[own]] = own + 1  # written backwards: the first row wins
        if directory.container_bytes:  # an open container grows
            self._first_rows.put(name, rows, rows.nbytes)
        return rows


def _keys(locations: Locations) -> U64:
    """Return one number per location; of equal ones the candidates are worse, never wrong."""
    keys: U64 = locations.containers * KEY_FACTOR + locations.ordinals
    return keys


def _chunks(read: Directories, containers: U64, starts: Rows, stops: Rows) -> tuple[Locations, NDArray[np.intp]]:
    """Return (chunks of rows [start, stop) of each container's recipes, range of each)."""
    counts = np.maximum(stops - starts, 0)
    range_of_row = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(range_of_row)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
    found, holders = Locations.empty(len(range_of_row)), containers[range_of_row]
    for container, selected in group_by_container(holders):
        chunks = read[container].segments.chunks
        found.containers[selected], found.ordinals[selected] = (
            chunks.containers[rows[selected]],
            chunks.ordinals[rows[selected]],
        )
    return found, range_of_row


def _continue(left: _NeighbourLocations, kinds: U8, fresh: Rows) -> None:
    """Set the rows of gaps that continue where the one before them ended."""
    continued = kinds == Anchor.CONTINUED
    if not continued.any():
        return
    rows = np.arange(len(kinds))
    head = np.maximum.accumulate(np.where(continued, 0, rows))
    before = np.cumsum(fresh) - fresh
    continued_row = left.rows[head] + before - before[head]
    is_known = continued & (left.rows[head] != NO_NEIGHBOUR)
    left.containers = np.where(continued, left.containers[head], left.containers)
    left.row_counts = np.where(continued, left.row_counts[head], left.row_counts)
    left.rows = np.where(is_known, np.minimum(continued_row, left.row_counts), left.rows)
