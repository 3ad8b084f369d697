"""Neighbours of stored chunks. Invariant: only directories are read, each once a question; what cannot be read has no
neighbours.

What stood between two chunks when they were stored is what a changed version most likely changed (locality):

    fresh   . . L  f f f  R . .
    stored  . . L  o o    R . .     recipes of the container that holds L, from the row that brought L there
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
from nearkin_shared.types import U8, U32, U64, ZERO, Bools, ContainerId, Locations, bounds_of, group_by_container

ROWS_CACHE_BYTES = 8 * 1024 * 1024
BEHIND = 2
"""Rows before the one at which a gap goes on from the one before it: the old version may have had fewer until there."""
NO_NEIGHBOUR = -1
Rows = NDArray[np.int64]
Directories = dict[int, Directory]
"""As they were read for one question: a container may be written anew meanwhile, without some of its recipes."""


@dataclass(slots=True)
class _NeighbourLocations:
    """Rows of containers' recipes, NOWHERE where there is none; `most` is how many rows that container has."""

    containers: U64
    rows: Rows
    most: Rows

    @property
    def known(self) -> Bools:
        known: Bools = self.rows != NO_NEIGHBOUR
        return known


class Neighbourhood:
    """Finds what lay in gaps, by the recipes of containers."""

    def __init__(self, source: ContainerSource) -> None:
        self._source = source
        self._brought: ByteBoundedCache[tuple[ContainerId, int, int], U32] = ByteBoundedCache(
            ROWS_CACHE_BYTES, "recipes"
        )
        """By container, its chunks and the rows of its recipes: it has fewer of these once it was written anew."""

    def between(self, gaps: Gaps) -> Neighbours:
        """Return for each gap the stored chunks that lay there: 2 n + 6 at most where n chunks are fresh."""
        count, fresh = len(gaps), gaps.fresh.astype(np.int64)
        read: Directories = {}
        left = self._places(gaps.left_kinds, gaps.left, read, after=True)
        right = self._places(gaps.right_kinds, gaps.right, read, after=False)
        _continue(left, gaps.left_kinds, fresh)
        more = fresh // 2 + 2
        whole = left.known & right.known & (left.containers == right.containers)
        whole &= (right.rows >= left.rows) & (right.rows <= left.rows + 2 * fresh + 4)
        ahead_until = np.where(whole, right.rows, np.minimum(left.most, left.rows + fresh + more))
        back = right.known & ~whole
        # Both sides where they come from different surroundings; where only one is known, all that it may be.
        back_from = np.maximum(0, right.rows - np.where(left.known, more, fresh + more))
        drifts = (gaps.left_kinds == Anchor.CONTINUED) | (gaps.left_kinds == Anchor.ROW)
        from_row = np.maximum(0, left.rows - np.where(drifts, BEHIND, 0))
        starts = np.concatenate([np.where(left.known, from_row, 0), np.where(back, back_from, 0)])
        stops = np.concatenate([np.where(left.known, ahead_until, 0), np.where(back, right.rows, 0)])
        found, of = _chunks(read, np.concatenate([left.containers, right.containers]), starts, stops)
        of %= count or 1
        order = np.argsort(of, kind="stable")
        chunks = found.take(order)
        stored = chunks.containers >= np.uint64(ZERO + 1)
        bounds = bounds_of(np.bincount(of[order][stored], minlength=count))
        ends = np.minimum(np.where(whole, right.rows, left.rows + fresh), left.most)
        return Neighbours(
            gaps.fresh,
            bounds,
            chunks.take(stored),
            Locations(np.where(left.known, left.containers, 0), np.where(left.known, ends, 0).astype(np.uint32)),
        )

    def _places(self, kinds: U8, anchors: Locations, read: Directories, *, after: bool) -> _NeighbourLocations:
        """Return the rows at which the anchors stand, or those after them; add to `read` what was."""
        rows, most = np.full(len(kinds), NO_NEIGHBOUR, np.int64), np.zeros(len(kinds), np.int64)
        asked = np.flatnonzero((kinds != Anchor.NONE) & (kinds != Anchor.CONTINUED))
        for container, some in group_by_container(anchors.containers[asked]):
            directory = read.get(container)
            if directory is None:
                try:
                    directory = read[container] = self._source.directory(ContainerId(container))
                except (Corrupt, NotFound):
                    continue
            mine = asked[some]
            rows[mine] = self._rows(directory, kinds[mine], anchors.ordinals[mine].astype(np.int64), after)
            most[mine] = len(directory.segments.chunks)
        return _NeighbourLocations(anchors.containers, rows, most)

    def _rows(self, directory: Directory, kinds: U8, ordinals: Rows, after: bool) -> Rows:
        rows = np.full(len(kinds), NO_NEIGHBOUR, np.int64)
        at = kinds == Anchor.ROW
        rows[at] = np.minimum(ordinals[at], len(directory.segments.chunks))
        at = (kinds == Anchor.SEGMENT) & (ordinals < len(directory.segments))
        rows[at] = directory.segments.bounds[ordinals[at] + after]
        at = (kinds == Anchor.CHUNK) & (ordinals < len(directory.chunks))
        if at.any():
            brought = self._brought_by(directory)[ordinals[at]].astype(np.int64) - 1
            rows[at] = np.where(brought == NO_NEIGHBOUR, NO_NEIGHBOUR, brought + after)
        return rows

    def _brought_by(self, directory: Directory) -> U32:
        """Return for each chunk of a container 1 + the row of its recipes that mentions it first, 0 for none."""
        recipes = directory.segments.chunks
        name = directory.container, len(directory.chunks), len(recipes)
        known = self._brought.get(name)
        if known is not None:
            return known
        rows = np.zeros(len(directory.chunks), np.uint32)
        own = np.flatnonzero(recipes.containers == np.uint64(directory.container))[::-1]
        rows[recipes.ordinals[own]] = own + 1  # written backwards: the first mention wins
        if directory.container_bytes:  # an open container grows
            self._brought.put(name, rows, rows.nbytes)
        return rows


def _chunks(read: Directories, containers: U64, starts: Rows, stops: Rows) -> tuple[Locations, NDArray[np.intp]]:
    """Return (the chunks of rows [start, stop) of each container's recipes, the range that each comes from)."""
    counts = np.maximum(stops - starts, 0)
    of = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts, counts)
    found, holders = Locations.empty(len(of)), containers[of]
    for container, mine in group_by_container(holders):
        chunks = read[container].segments.chunks
        found.containers[mine], found.ordinals[mine] = chunks.containers[rows[mine]], chunks.ordinals[rows[mine]]
    return found, of


def _continue(left: _NeighbourLocations, kinds: U8, fresh: Rows) -> None:
    """Place gaps that go on where the one before them ended."""
    continued = kinds == Anchor.CONTINUED
    if not continued.any():
        return
    rows = np.arange(len(kinds))
    head = np.maximum.accumulate(np.where(continued, 0, rows))
    before = np.cumsum(fresh) - fresh
    behind = left.rows[head] + before - before[head]
    there = continued & (left.rows[head] != NO_NEIGHBOUR)
    left.containers = np.where(continued, left.containers[head], left.containers)
    left.most = np.where(continued, left.most[head], left.most)
    left.rows = np.where(there, np.minimum(behind, left.most), left.rows)
