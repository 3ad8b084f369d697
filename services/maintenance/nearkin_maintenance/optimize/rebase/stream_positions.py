"""Estimate the stream positions of chunks.

    c2   0   1   2   3   4      the container with the most chunks: one position for every few of them
    c1   0   1  (1)  2   4      linked to it by bases: positions of its bases or of its dependents, interpolated
    c9   5   6                  linked to none of these: positions after all others

Invariant: a chunk has about the position of its base, in whatever container it is stored.

Memory: 8 bytes per chunk with a base in another container, and per 16 chunks; 4 per chunk of a container with merged
blocks.
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
"""Of the chunks with a base in one container, every second one becomes a link."""
SMOOTHING_CHUNKS = 2
"""Positions are medians over this many neighbours on each side: a single distant base does not move them."""

F64 = NDArray[np.float64]


class StreamPositions:
    """Stream positions of chunks, in chunks of the largest container."""

    def __init__(self) -> None:
        self._every_few: dict[int, F64] = {}
        self._anchors: dict[int, NDArray[np.int32]] = {}
        """Anchor chunk of each chunk, by container and ordinal, for containers with merged blocks."""

    def __contains__(self, container: int) -> bool:
        return container in self._every_few

    def add(self, container: int, every_few: F64, anchors: NDArray[np.int32]) -> None:
        """Add a container: the position of every few chunks, and the anchor chunk of each chunk."""
        self._every_few[container] = every_few
        if np.any(anchors != np.arange(len(anchors))):
            self._anchors[container] = anchors

    def positions_of(self, container: int, ordinals: NDArray[np.integer]) -> F64:
        """Return float64[n]: the positions of chunks of a known container."""
        known, anchors = self._every_few[container], self._anchors.get(container)
        chunks = ordinals if anchors is None else anchors[ordinals]
        found: F64 = np.interp(chunks / EVERY_CHUNKS, np.arange(len(known)) + 0.5, known)
        return found


class _PositionLink(NamedTuple):
    """Chunks of a container, and the chunks of another one at the same positions."""

    other: int
    rows: NDArray[np.uint32]
    of_other: NDArray[np.uint32]


def estimate_positions(live_set: LiveSet, needed: Masks) -> StreamPositions:
    """Return the positions in all containers with any `needed` chunk. Raises Corrupt."""
    positions, links, end = StreamPositions(), _links(live_set, needed), 0
    counts = {container: len(live_set.directory(container).chunks) for container in needed}
    for largest in sorted(counts, key=lambda container: (-counts[container], container)):
        if largest in positions:
            continue
        found = np.arange(0.5, -(-counts[largest] // EVERY_CHUNKS)) * EVERY_CHUNKS + end
        end += counts[largest]
        linked, next_ones = defaultdict[int, int](int), [(0, largest)]
        while next_ones:  # containers with the most links to known positions first
            _, container = heapq.heappop(next_ones)
            if container in positions:
                continue
            directory = live_set.directory(container)
            if container != largest:
                found = _interpolate(_medians(counts[container], links[container], positions))
            positions.add(container, _smooth(found), _anchor_chunk(directory))
            for link in links[container]:
                if link.other not in positions:
                    linked[link.other] += len(link.rows)
                    heapq.heappush(next_ones, (-linked[link.other], link.other))
    return positions


def _links(live_set: LiveSet, needed: Masks) -> dict[int, list[_PositionLink]]:
    """Return the links of each container, in both directions, from best bases.

    Merged chunks are left out.
    """
    links: dict[int, list[_PositionLink]] = {container: [] for container in needed}
    for container in needed:
        directory = live_set.directory(container)
        bases = directory.chunks.bases
        own = _anchor_chunk(directory) == np.arange(len(bases))
        for other, rows in group_by_container(bases.containers):
            linked_rows = rows[own[rows]][::LINKED_EVERY]
            if other != container and other in links and len(linked_rows):
                own_rows, other_rows = linked_rows.astype(np.uint32), bases.ordinals[linked_rows]
                links[container].append(_PositionLink(other, own_rows, other_rows))
                links[other].append(_PositionLink(container, other_rows, own_rows))
    return links


def _anchor_chunk(directory: Directory) -> NDArray[np.int32]:
    """Return the chunk that gives each chunk's position: itself, or the first of its block.

    The first of the block applies to merged chunks.
    """
    chunks = directory.chunks
    found = np.arange(len(chunks), dtype=np.int32)
    linked_rows = np.flatnonzero(merged_blocks(directory)[chunks.blocks] & chunks.there)
    rows = linked_rows[np.argsort(chunks.blocks[linked_rows], kind="stable")]
    if len(rows):
        begins = np.flatnonzero(np.append(True, np.diff(chunks.blocks[rows]) != 0))
        begun_at = np.repeat(begins, np.diff(np.append(begins, len(rows))))
        is_merged = rows - rows[begun_at] != np.arange(len(rows)) - begun_at
        found[rows[is_merged]] = rows[begun_at][is_merged]
    return found


def _medians(count: int, links: list[_PositionLink], positions: StreamPositions) -> F64:
    """Return the median position of every few of `count` chunks, nan where no link gives one."""
    known_links = [link for link in links if link.other in positions]
    found = np.concatenate([positions.positions_of(link.other, link.of_other) for link in known_links])
    group = np.concatenate([link.rows for link in known_links]) // EVERY_CHUNKS
    order = np.lexsort((found, group))
    counts = np.bincount(group, minlength=-(-count // EVERY_CHUNKS))
    medians, linked_rows = np.full(len(counts), np.nan), np.flatnonzero(counts)
    medians[linked_rows] = found[order[(np.cumsum(counts) - counts // 2 - 1)[linked_rows]]]
    return medians


def _interpolate(found: F64) -> F64:
    """Return positions with nan replaced by interpolation."""
    known = np.flatnonzero(~np.isnan(found))
    return np.interp(np.arange(len(found)), known, found[known]).astype(np.float64)


def _smooth(found: F64) -> F64:
    if not len(found):  # only recipes of known chunks or of zeros
        return found
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(found, SMOOTHING_CHUNKS, mode="edge"), 2 * SMOOTHING_CHUNKS + 1
    )
    smoothed: F64 = np.median(around, axis=1)
    return smoothed
