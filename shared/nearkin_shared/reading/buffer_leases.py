"""Leases of decoded blocks.

Invariant: a leased buffer is not reused while a reader refers to it.

    block -> much of it needed: rows that refer to it | little: a copy of that part | a delta or zero chunk: decoded
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.scatter_copy import gather
from nearkin_shared.reading.read_plan import ByBlock, ReadPlan
from nearkin_shared.types import U8, Pieces, offsets_of

LEASED_BYTES_MAX = 48 * 1024 * 1024
"""Bound on leased decoded blocks of one lookup of a batch."""
LEASED_SHARE = 2
"""If less than half of a block is needed it is copied: the block need not stay in memory. With an eighth, a put whose
bases were slices of merged blocks kept 335 MiB of them, by which the cache shrank from 200 MiB to 23."""


class BufferLeases:
    """Positions of the rows of one plan, block after block."""

    def __init__(self, plan: ReadPlan, take: Callable[[int], U8]) -> None:
        """Create the leases; `take` returns uninitialised memory for copies."""
        self._take = take
        self._lengths = plan.lengths
        self._offsets = plan.positions.astype(np.uint64)
        self._which = np.zeros(len(plan), np.int32)
        self._buffers: list[U8] = []
        self._leased: dict[int, int] = {}
        """Buffer number of each leased block by its identity: a block in several windows counts once."""
        self._leased_bytes = 0

    def use(self, blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
        """Lease the parts of some blocks that their rows need.

        Raises: BadInput, for a row beyond its block.
        """
        rows, counts = blocks.rows_of(visits), blocks.counts[visits]
        starts = np.cumsum(counts) - counts
        lengths, offsets = self._lengths[rows].astype(np.int64), self._offsets[rows].astype(np.int64)
        needed, ends = (
            np.add.reduceat(lengths, starts).tolist(),
            np.maximum.reduceat(offsets + lengths, starts).tolist(),
        )
        which, copied = np.zeros(len(visits), np.int32), list[int]()
        for position, content in enumerate(contents):
            number = self._number(content, needed[position]) if ends[position] <= len(content) else None
            if number is None:
                copied.append(position)
            else:
                which[position] = number
        self._which[rows] = np.repeat(which, counts)
        if copied:
            self._copy(blocks, [visits[position] for position in copied], [contents[position] for position in copied])

    def finish(self, rows: NDArray[np.intp], content: U8) -> Pieces:
        """Return all leased pieces; `content` has the consecutive bytes of other `rows`."""
        self._offsets[rows], self._which[rows] = offsets_of(self._lengths[rows]), self._add(content)
        return Pieces(tuple(self._buffers), self._which, self._offsets, self._lengths)

    def _copy(self, blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
        rows = blocks.rows_of(visits)
        lengths = self._lengths[rows]
        out, positions = self._take(int(lengths.sum(dtype=np.uint64))), offsets_of(lengths)
        which = np.repeat(np.arange(len(visits), dtype=np.int32), blocks.counts[visits])
        gather(contents, which, self._offsets[rows], lengths, out, positions)
        self._offsets[rows], self._which[rows] = positions, self._add(out)

    def _number(self, content: U8, needed_bytes: int) -> int | None:
        """Return the buffer number of a leased block, or None if it must be copied."""
        number = self._leased.get(id(content))
        if number is not None:
            return number
        if needed_bytes * LEASED_SHARE < len(content) or self._leased_bytes + len(content) > LEASED_BYTES_MAX:
            return None
        self._leased_bytes += len(content)
        self._leased[id(content)] = number = self._add(content)
        return number

    def _add(self, content: U8) -> int:
        """Add a buffer and return its number."""
        self._buffers.append(content)
        return len(self._buffers) - 1
