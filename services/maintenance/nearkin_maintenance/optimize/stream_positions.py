"""Places in the stream. Invariant: what leans on a chunk lies at about its place, whatever container it is in.

    c2   0   1   2   3   4      the container of the most chunks: a place for every few of them
    c1   0   1  (1)  2   4      one that it leans on, or that leans on it: where the others' bases, or its own, lie
    c9   5   6                  one that nothing leads to begins behind all others

Memory: 8 bytes for each chunk with a base in another container, and for every 16 chunks; 4 for each of a container that
took something in.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin_maintenance.gc.mark import LiveSet, Masks
from nearkin_shared.formats.block_kinds import merged_blocks
from nearkin_shared.formats.directory import Directory
from nearkin_shared.types import group_by_container

EVERY_CHUNKS = 16
LINKED_EVERY = 2
"""Of so many chunks that lean on one container the place of one is looked at."""
SMOOTHING_CHUNKS = 2
"""Places are the medians of those around, so many on each side: what resembles something far away is no move."""

F64 = NDArray[np.float64]


class StreamPositions:
    """Where in the stream the chunks of some containers lie, in chunks of the one that has the most."""

    def __init__(self) -> None:
        self._of: dict[int, F64] = {}
        self._stands_at: dict[int, NDArray[np.int32]] = {}
        """By container and ordinal, of those that took something in: the chunk at whose place each stands."""

    def __contains__(self, container: int) -> bool:
        return container in self._of

    def put(self, container: int, of: F64, stands_at: NDArray[np.int32]) -> None:
        """Add a container: the places of every few of its chunks, and at which of these each stands."""
        self._of[container] = of
        if np.any(stands_at != np.arange(len(stands_at))):
            self._stands_at[container] = stands_at

    def at(self, container: int, ordinals: NDArray[np.integer]) -> F64:
        """Return float64[n]: the places of some chunks of a container that is known."""
        known, stands_at = self._of[container], self._stands_at.get(container)
        chunks = ordinals if stands_at is None else stands_at[ordinals]
        found: F64 = np.interp(chunks / EVERY_CHUNKS, np.arange(len(known)) + 0.5, known)
        return found


class _PositionLink(NamedTuple):
    """Chunks of a container, and those of another that lie where they do."""

    other: int
    rows: NDArray[np.uint32]
    of_other: NDArray[np.uint32]


def estimate_positions(reach: LiveSet, needed: Masks) -> StreamPositions:
    """Return the places of all containers of which something is `needed`. Raises Corrupt."""
    places, links, end = StreamPositions(), _links(reach, needed), 0
    counts = {container: len(reach.directory(container).chunks) for container in needed}
    for largest in sorted(counts, key=lambda container: (-counts[container], container)):
        if largest in places:
            continue
        found = np.arange(0.5, -(-counts[largest] // EVERY_CHUNKS)) * EVERY_CHUNKS + end
        end += counts[largest]
        linked, next_ones = defaultdict[int, int](int), [(0, largest)]
        while next_ones:  # those with the most links to what has places first
            _, container = heapq.heappop(next_ones)
            if container in places:
                continue
            directory = reach.directory(container)
            if container != largest:
                found = _interpolate(_medians(counts[container], links[container], places))
            places.put(container, _smooth(found), _anchor_chunk(directory))
            for link in links[container]:
                if link.other not in places:
                    linked[link.other] += len(link.rows)
                    heapq.heappush(next_ones, (-linked[link.other], link.other))
    return places


def _links(reach: LiveSet, needed: Masks) -> dict[int, list[_PositionLink]]:
    """Return from each container those to others, in both directions: by best bases, but of what was taken in."""
    links: dict[int, list[_PositionLink]] = {container: [] for container in needed}
    for container in needed:
        directory = reach.directory(container)
        bases = directory.chunks.bases
        own = _anchor_chunk(directory) == np.arange(len(bases))
        for other, rows in group_by_container(bases.containers):
            some = rows[own[rows]][::LINKED_EVERY]
            if other != container and other in links and len(some):
                here, there = some.astype(np.uint32), bases.ordinals[some]
                links[container].append(_PositionLink(other, here, there))
                links[other].append(_PositionLink(container, there, here))
    return links


def _anchor_chunk(directory: Directory) -> NDArray[np.int32]:
    """Return for each chunk itself, for one that was taken in the first one of its block."""
    chunks = directory.chunks
    found = np.arange(len(chunks), dtype=np.int32)
    some = np.flatnonzero(merged_blocks(directory)[chunks.blocks] & chunks.there)
    rows = some[np.argsort(chunks.blocks[some], kind="stable")]
    if len(rows):
        begins = np.flatnonzero(np.append(True, np.diff(chunks.blocks[rows]) != 0))
        begun_at = np.repeat(begins, np.diff(np.append(begins, len(rows))))
        behind = rows - rows[begun_at] != np.arange(len(rows)) - begun_at
        found[rows[behind]] = rows[begun_at][behind]
    return found


def _medians(count: int, links: list[_PositionLink], places: StreamPositions) -> F64:
    """Return the median place of every few of `count` chunks, nan where nothing tells it."""
    told = [link for link in links if link.other in places]
    found = np.concatenate([places.at(link.other, link.of_other) for link in told])
    group = np.concatenate([link.rows for link in told]) // EVERY_CHUNKS
    order = np.lexsort((found, group))
    counts = np.bincount(group, minlength=-(-count // EVERY_CHUNKS))
    medians, some = np.full(len(counts), np.nan), np.flatnonzero(counts)
    medians[some] = found[order[(np.cumsum(counts) - counts // 2 - 1)[some]]]
    return medians


def _interpolate(found: F64) -> F64:
    """Return places with what lies between those in place of nan."""
    known = np.flatnonzero(~np.isnan(found))
    return np.interp(np.arange(len(found)), known, found[known]).astype(np.float64)


def _smooth(found: F64) -> F64:
    if not len(found):  # recipes of known chunks alone, or of zeros
        return found
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(found, SMOOTHING_CHUNKS, mode="edge"), 2 * SMOOTHING_CHUNKS + 1
    )
    smoothed: F64 = np.median(around, axis=1)
    return smoothed
