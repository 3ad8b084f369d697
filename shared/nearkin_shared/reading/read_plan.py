"""Read plans: the storage of requested chunks.

Invariant: rows are in request order.

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
"""Bound on rows planned ahead: 100 bytes each, and 32 usual batches have 16,000."""
BlockName = tuple[ContainerId, int]
"""A container and a block's number in it."""


@frozen
class ReadPlan:
    """Storage of each requested row.

    `rows` is CHUNK_ROW[n], zeros except for the length of a built-in zero chunk. Each column is a contiguous copy, as
    kernels require. `since`: number of container changes known when the plan was made.
    """

    locations: Locations
    rows: NDArray[np.void]
    since: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all chunks."""
        return int(self.rows["lengths"].sum(dtype=np.int64))

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
        """Return uint32[n] byte offsets of the encodings in their decoded blocks."""
        return self.rows["positions"].copy()

    @property
    def depths(self) -> U8:
        """Return uint8[n] deltas to decode."""
        return self.rows["depths"].copy()

    @property
    def bases(self) -> Locations:
        """Return the locations of the bases, (0, 0) at depth 0."""
        rows = self.rows
        return Locations(rows["base_containers"].copy(), rows["base_ordinals"].copy())

    @property
    def names(self) -> U8:
        """Return uint8[n, 32] names."""
        return self.rows["names"].copy()

    @property
    def ranks(self) -> U8:
        """Return uint8[n] ranks of the base finders."""
        return self.rows["ranks"].copy()

    @property
    def kinds(self) -> U8:
        """Return uint8[n] kinds of their blocks: docs/internals/formats/container.md."""
        return self.rows["kinds"].copy()

    def take(self, which: NDArray[np.intp] | Bools | slice) -> ReadPlan:
        """Return some of the rows."""
        return ReadPlan(self.locations.take(which), self.rows[which], self.since)


Placed = tuple[int, ReadPlan]
"""Start of a batch in its version, in bytes, and its plan."""


@frozen
class ByBlock:
    """Rows of a plan by block.

    Block i, `names[i]`, has rows[bounds[i]] to rows[bounds[i + 1]].
    """

    rows: NDArray[np.intp]
    bounds: NDArray[np.intp]
    names: list[BlockName]

    @property
    def counts(self) -> NDArray[np.intp]:
        """Return the number of rows of each block."""
        return np.diff(self.bounds)

    def rows_of(self, blocks: list[int]) -> NDArray[np.intp]:
        """Return the rows of some blocks, block by block."""
        sizes = self.counts[blocks]
        ends = np.cumsum(sizes)
        runs: NDArray[np.intp] = np.arange(ends[-1]) + np.repeat(self.bounds[:-1][blocks] - (ends - sizes), sizes)
        return self.rows[runs]


def by_block(plan: ReadPlan, chosen: NDArray[np.intp]) -> ByBlock:
    """Return the chosen rows by block; at least one row."""
    containers, blocks = plan.locations.containers[chosen], plan.blocks[chosen]
    order = np.lexsort((blocks, containers))
    containers, blocks = containers[order], blocks[order]
    changes = np.flatnonzero((containers[1:] != containers[:-1]) | (blocks[1:] != blocks[:-1])) + 1
    bounds = np.concatenate([np.zeros(1, np.intp), changes, np.full(1, len(chosen))])
    starts = bounds[:-1]
    names = list(zip(map(ContainerId, containers[starts].tolist()), blocks[starts].tolist(), strict=True))
    return ByBlock(chosen[order], bounds, names)


def announce_upcoming(plans: Iterable[Placed], notify: Callable[[ReadPlan], bool], count: int) -> Iterator[Placed]:
    """Yield the plans of batches, each after `notify` received it and `count` more.

    Fewer, if they have more than ROWS_AHEAD_MAX rows. Once `notify` returns False each plan is yielded at once.
    An error ahead is raised after all plans before it were yielded.
    """
    waiting, rows = deque[Placed](), 0
    try:
        for placed in plans:
            count = count if notify(placed[1]) else 0
            waiting.append(placed)
            rows += len(placed[1])
            while waiting and (len(waiting) > count or rows > ROWS_AHEAD_MAX):
                rows -= len(waiting[0][1])
                yield waiting.popleft()
    except NearkinError:
        yield from waiting
        raise
    yield from waiting
