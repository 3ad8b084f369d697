"""Try old neighbours as bases, span by span.

    gaps of 4 MiB of fresh chunks: bytes of their old neighbours -> tried -> [shallower ones, by level] -> next span

Chunks near each other have bases near each other, so the blocks decoded for one request are cached for the next one.
With requests level by level for a whole batch, chains of many versions would be decoded again for each level.

Invariant: a span has its bases, shallower ones included, before the next span is requested.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.base_choice import PolicyChoice, Targets, local_ranks, try_bases
from nearkin_delta.depth_limit import OverdeepChunks, find_overdeep, reduce_depth
from nearkin_shared.limits import MIB
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults, Neighbours
from nearkin_shared.types import U32, Bools, Locations, bounds_of
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

SPAN_BYTES = 4 * MIB
"""Fresh bytes of a span. The 37th of a row of dumps decoded 1.9 GB so, and 3.0 in batches of 16 MiB (ADR 33)."""
SPANS_MAX = 8
"""Spans per batch: each takes one request and one per level, and a stage has at most ROUNDS_MAX requests."""


class LocalityCandidates:
    """Locality candidates of one batch, and the bases chosen from them."""

    def __init__(
        self,
        targets: Targets,
        neighbours: Neighbours,
        max_depth: int,
        *,
        no_deltas: bool,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`targets`: the fresh chunks in stream order; `no_deltas`: reject VCDIFF deltas as bases."""
        self._targets, self._neighbours = targets, neighbours
        self._max_depth, self._no_deltas, self._helpers = max_depth, no_deltas, helpers
        self._bounds = bounds_of(neighbours.fresh)
        self._waiting = deque(_spans(targets, self._bounds))
        self._span: slice | None = None
        """Gaps whose neighbours were requested last; None after a request for shallower ones, and at first."""
        self._open: list[PolicyChoice] = []
        self._crowded: OverdeepChunks | None = None
        self.parts: list[PolicyChoice] = []
        """Choices of the completed spans."""

    @property
    def found(self) -> Bools:
        """Return a mask of the fresh chunks with a base, in completed spans."""
        found = np.zeros(len(self._targets), np.bool_)
        for part in self.parts:
            found[part.chunks[part.chosen.found]] = True
        return found

    def reads(self, facts: LookupResults) -> LookupRequest | None:
        """Process the results of the last request and return the next one.

        None when all spans are complete.
        """
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
        """Return the bounds of each gap's old neighbours within those of the span."""
        bounds = self._neighbours.bounds[span.start : span.stop + 1]
        theirs: U32 = bounds - bounds[0]
        return theirs

    def _tried(self, span: slice, facts: LookupResults) -> PolicyChoice:
        assert facts.contents is not None
        mine = self._bounds[span.start : span.stop + 1]
        rows: NDArray[np.intp] = np.arange(mine[0], mine[-1], dtype=np.intp)
        targets, contents = self._targets.take(rows), facts.contents
        theirs = self._theirs(span) if contents.bounds is None else contents.bounds
        chosen = try_bases(targets, mine - mine[0], contents, theirs, self._helpers)
        return PolicyChoice(rows, chosen, contents, local_ranks(len(rows)))


def _spans(targets: Targets, bounds: NDArray[np.uint32]) -> list[slice]:
    """Return runs of gaps of about SPAN_BYTES of fresh chunks each, at most SPANS_MAX."""
    ends = np.append(0, np.cumsum(targets.lengths, dtype=np.int64))
    span_bytes = max(SPAN_BYTES, -(-int(ends[-1]) // SPANS_MAX))
    span = ends[bounds[:-1]] // span_bytes
    cuts = [0, *(np.flatnonzero(np.diff(span)) + 1).tolist(), len(span)]
    return [slice(first, last) for first, last in pairwise(cuts) if first < last]
