"""Plans: how wanted chunks are kept. Invariant: rows stand in the order in which they were asked for.

locations -> one row of its container's directory each -> by block, for one visit each
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import NearkinError
from nearkin_shared.types import U8, U32, Bools, ContainerId, Locations
from nearkin_shared.utils.frozen import frozen

ROWS_AHEAD_MAX = 1 << 16
"""Of plans that are made before they are wanted: 100 bytes each, and 32 usual batches have 16,000."""
BlockName = tuple[ContainerId, int]
"""A container and a block's number in it."""


@frozen
class Plan:
    """How each wanted row is kept: `rows` CHUNK_ROW[n], zeros but for the length where the built-in zero chunk is.

    Each column is a copy, contiguous as kernels want it. `since`: how many changes of containers were known by then.
    """

    locations: Locations
    rows: NDArray[np.void]
    since: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> U32:
        """Return uint32[n] bytes of the chunks."""
        return self.rows["lengths"].copy()

    @property
    def encoded(self) -> U32:
        """Return uint32[n] bytes of their encodings."""
        return self.rows["encoded"].copy()

    @property
    def blocks(self) -> U32:
        """Return uint32[n] numbers of their blocks."""
        return self.rows["blocks"].copy()

    @property
    def positions(self) -> U32:
        """Return uint32[n]: where in the decoded block each encoding starts, bytes."""
        return self.rows["positions"].copy()

    @property
    def depths(self) -> U8:
        """Return uint8[n] deltas to decode."""
        return self.rows["depths"].copy()

    @property
    def bases(self) -> Locations:
        """Return where the bases lie, (0, 0) at depth 0."""
        rows = self.rows
        return Locations(rows["base_containers"].copy(), rows["base_ordinals"].copy())

    @property
    def names(self) -> U8:
        """Return uint8[n, 32] names."""
        return self.rows["names"].copy()

    @property
    def ranks(self) -> U8:
        """Return uint8[n]: what found the bases."""
        return self.rows["ranks"].copy()

    @property
    def kinds(self) -> U8:
        """Return uint8[n] kinds of their blocks: docs/internals/formats/container.md."""
        return self.rows["kinds"].copy()

    def take(self, which: NDArray[np.intp] | Bools | slice) -> Plan:
        """Return some of the rows."""
        return Plan(self.locations.take(which), self.rows[which], self.since)


Placed = tuple[int, Plan]
"""Where a batch starts in its version, bytes, and its plan."""


@frozen
class ByBlock:
    """Rows of a plan by the block that holds them: block i, `names[i]`, has rows[bounds[i]] to rows[bounds[i + 1]]."""

    rows: NDArray[np.intp]
    bounds: NDArray[np.intp]
    names: list[BlockName]

    @property
    def counts(self) -> NDArray[np.intp]:
        """Return how many rows each block holds."""
        return np.diff(self.bounds)

    def rows_of(self, blocks: list[int]) -> NDArray[np.intp]:
        """Return the rows of some blocks, block by block."""
        sizes = self.counts[blocks]
        ends = np.cumsum(sizes)
        runs: NDArray[np.intp] = np.arange(ends[-1]) + np.repeat(self.bounds[:-1][blocks] - (ends - sizes), sizes)
        return self.rows[runs]


def by_block(plan: Plan, wanted: NDArray[np.intp]) -> ByBlock:
    """Return the wanted rows by block; one at least."""
    containers, blocks = plan.locations.containers[wanted], plan.blocks[wanted]
    order = np.lexsort((blocks, containers))
    containers, blocks = containers[order], blocks[order]
    changes = np.flatnonzero((containers[1:] != containers[:-1]) | (blocks[1:] != blocks[:-1])) + 1
    bounds = np.concatenate([np.zeros(1, np.intp), changes, np.full(1, len(wanted))])
    starts = bounds[:-1]
    names = list(zip(map(ContainerId, containers[starts].tolist()), blocks[starts].tolist(), strict=True))
    return ByBlock(wanted[order], bounds, names)


def announce_upcoming(plans: Iterable[Placed], see: Callable[[Plan], bool], count: int) -> Iterator[Placed]:
    """Yield all plans of batches, each once `see` was told of it and of `count` after it, or of ROWS_AHEAD_MAX rows.

    Once `see` says no, each as it is made. What is broken ahead is raised when all before it were yielded.
    """
    waiting, rows = deque[Placed](), 0
    try:
        for placed in plans:
            count = count if see(placed[1]) else 0
            waiting.append(placed)
            rows += len(placed[1])
            while waiting and (len(waiting) > count or rows > ROWS_AHEAD_MAX):
                rows -= len(waiting[0][1])
                yield waiting.popleft()
    except NearkinError:
        yield from waiting
        raise
    yield from waiting
