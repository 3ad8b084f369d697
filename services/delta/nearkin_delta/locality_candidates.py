"""Old neighbours as bases. Invariant: a span of a batch has its bases, shallower ones included, before the next asks.

    gaps of 4 MiB of fresh chunks: bytes of their old neighbours -> tried -> [shallower ones, by level] -> next span

What lies close together leans on what lies close together, so the blocks that one question has decoded are at hand for
the next one. Asked level by level for a whole batch, chains of many versions are decoded again for each level.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.base_choice import Part, Targets, local_ranks, try_bases
from nearkin_delta.depth_limit import OverdeepChunks, find_overdeep, reduce_depth
from nearkin_shared.limits import MIB
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults, Neighbours
from nearkin_shared.types import U32, Bools, Locations, bounds_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

SPAN_BYTES = 4 * MIB
"""Of fresh chunks. The 37th of a row of dumps decoded 1.9 GB so, and 3.0 by batches of 16 MiB (docs/adr/0033)."""
SPANS_MAX = 8
"""Of a batch: each asks once, and once more for each level, and a stage has ROUNDS_MAX questions."""


class LocalityCandidates:
    """The bases that locality finds for one batch."""

    def __init__(
        self,
        targets: Targets,
        neighbours: Neighbours,
        max_depth: int,
        *,
        no_deltas: bool,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`targets`: the fresh chunks, in stream order; `no_deltas`: a VCDIFF delta is no base."""
        self._targets, self._neighbours = targets, neighbours
        self._max_depth, self._no_deltas, self._helpers = max_depth, no_deltas, helpers
        self._bounds = bounds_of(neighbours.fresh)
        self._waiting = deque(_spans(targets, self._bounds))
        self._span: slice | None = None
        """Gaps whose neighbours were asked for last; None: shallower ones were, or nothing yet."""
        self._open: list[Part] = []
        self._crowded: OverdeepChunks | None = None
        self.parts: list[Part] = []
        """What was chosen in the spans that are done."""

    @property
    def found(self) -> Bools:
        """Return which fresh chunks have a base, of the spans that are done."""
        found = np.zeros(len(self._targets), np.bool_)
        for part in self.parts:
            found[part.chunks[part.chosen.found]] = True
        return found

    def reads(self, facts: LookupResults) -> LookupRequest | None:
        """Take the answer to what was asked last, and ask on; None: all spans are done."""
        if self._span is not None:
            self._open, self._span = [self._tried(self._span, facts)], None
            self._crowded = find_overdeep(self._open, self._max_depth)
        elif self._crowded is not None and facts.lower is not None:
            self._open, self._crowded = reduce_depth(
                self._open, self._crowded, self._targets, facts.lower, self._helpers
            )
        if self._crowded is not None:
            asked, below = self._crowded.asked, self._crowded.depth_below
            bounds = self._crowded.bounds
            return LookupRequest(lower=asked, depth_below=below, no_deltas=self._no_deltas, bounds=bounds)
        self.parts += self._open
        self._open = []
        while self._waiting:
            span = self._waiting.popleft()
            chunks = self._chunks(span)
            if len(chunks):
                self._span = span
                bounds = self._theirs(span)
                return LookupRequest(
                    contents=chunks, depth_below=self._max_depth, no_deltas=self._no_deltas, bounds=bounds
                )
        return None

    def _chunks(self, span: slice) -> Locations:
        bounds = self._neighbours.bounds
        return self._neighbours.chunks.take(slice(int(bounds[span.start]), int(bounds[span.stop])))

    def _theirs(self, span: slice) -> U32:
        """Return the bounds of the old neighbours of each gap of a span among those of the span."""
        bounds = self._neighbours.bounds[span.start : span.stop + 1]
        theirs: U32 = bounds - bounds[0]
        return theirs

    def _tried(self, span: slice, facts: LookupResults) -> Part:
        assert facts.contents is not None
        mine = self._bounds[span.start : span.stop + 1]
        rows: NDArray[np.intp] = np.arange(mine[0], mine[-1], dtype=np.intp)
        targets, contents = self._targets.take(rows), facts.contents
        theirs = self._theirs(span) if contents.bounds is None else contents.bounds
        chosen = try_bases(targets, mine - mine[0], contents, theirs, self._helpers)
        return Part(rows, chosen, contents, local_ranks(len(rows)))


def _spans(targets: Targets, bounds: NDArray[np.uint32]) -> list[slice]:
    """Return runs of gaps of about SPAN_BYTES of fresh chunks each, SPANS_MAX at most."""
    ends = np.append(0, np.cumsum(targets.lengths, dtype=np.int64))
    span_bytes = max(SPAN_BYTES, -(-int(ends[-1]) // SPANS_MAX))
    span = ends[bounds[:-1]] // span_bytes
    cuts = [0, *(np.flatnonzero(np.diff(span)) + 1).tolist(), len(span)]
    return [slice(first, last) for first, last in pairwise(cuts) if first < last]
