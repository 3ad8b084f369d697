"""Lending of decoded blocks. Invariant: what is lent stays as it is for as long as somebody looks at it.

block -> much of it is wanted: rows that look into it | little: a copy of that | a delta, a zero chunk: decoded anew
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.scatter_copy import gather
from nearkin_shared.reading.read_plan import ByBlock, Plan
from nearkin_shared.types import U8, Pieces, offsets_of

LEASED_BYTES_MAX = 48 * 1024 * 1024
"""Of decoded blocks that are looked at where they lie, for one question of one batch."""
LEASED_SHARE = 8
"""Where less than this part of a block is wanted that is copied: the block need not stay for it."""


class BufferLeases:
    """Where the rows of one plan lie, block after block."""

    def __init__(self, plan: Plan, take: Callable[[int], U8]) -> None:
        """`take` gives memory for what is copied, undefined."""
        self._take = take
        self._lengths = plan.lengths
        self._offsets = plan.positions.astype(np.uint64)
        self._which = np.zeros(len(plan), np.int32)
        self._buffers: list[U8] = []
        self._lent: dict[int, int] = {}
        """Number of each block that is lent, by its identity: what lies in several windows counts once."""
        self._lent_bytes = 0

    def use(self, blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
        """Lend what the rows of some blocks want of them. Raises BadInput where that leaves them."""
        rows, counts = blocks.rows_of(visits), blocks.counts[visits]
        starts = np.cumsum(counts) - counts
        lengths, offsets = self._lengths[rows].astype(np.int64), self._offsets[rows].astype(np.int64)
        wanted, ends = (
            np.add.reduceat(lengths, starts).tolist(),
            np.maximum.reduceat(offsets + lengths, starts).tolist(),
        )
        which, copied = np.zeros(len(visits), np.int32), list[int]()
        for place, content in enumerate(contents):
            number = self._number(content, wanted[place]) if ends[place] <= len(content) else None
            if number is None:
                copied.append(place)
            else:
                which[place] = number
        self._which[rows] = np.repeat(which, counts)
        if copied:
            self._copy(blocks, [visits[place] for place in copied], [contents[place] for place in copied])

    def finish(self, rows: NDArray[np.intp], content: U8) -> Pieces:
        """Return all that is lent; `rows`, which no block holds as they are, lie one behind the other in `content`."""
        self._offsets[rows], self._which[rows] = offsets_of(self._lengths[rows]), self._add(content)
        return Pieces(tuple(self._buffers), self._which, self._offsets, self._lengths)

    def _copy(self, blocks: ByBlock, visits: list[int], contents: list[U8]) -> None:
        rows = blocks.rows_of(visits)
        lengths = self._lengths[rows]
        out, places = self._take(int(lengths.sum(dtype=np.uint64))), offsets_of(lengths)
        which = np.repeat(np.arange(len(visits), dtype=np.int32), blocks.counts[visits])
        gather(contents, which, self._offsets[rows], lengths, out, places)
        self._offsets[rows], self._which[rows] = places, self._add(out)

    def _number(self, content: U8, wanted_bytes: int) -> int | None:
        """Return the number of a block that is lent, None where it is not."""
        number = self._lent.get(id(content))
        if number is not None:
            return number
        if wanted_bytes * LEASED_SHARE < len(content) or self._lent_bytes + len(content) > LEASED_BYTES_MAX:
            return None
        self._lent_bytes += len(content)
        self._lent[id(content)] = number = self._add(content)
        return number

    def _add(self, content: U8) -> int:
        """Return the number of the buffer that it is from now on."""
        self._buffers.append(content)
        return len(self._buffers) - 1
