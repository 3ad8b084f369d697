"""Dedup stage. Invariant: exactly the first copy of each unknown chunk stays fresh, in stream order.

Coarse first (MAD2, Sungem): a known segment is one lookup; only chunks of unknown segments are looked up.
"""

from __future__ import annotations

import numpy as np

from nearkin.kernels.nametable import first_occurrence
from nearkin.records import Bools, FreshBatch, Locations, SegmentBatch
from nearkin.stage import Facts, Reads


class DedupStage:
    """Segments, then chunks."""

    name = "dedup"

    def reads(self, batch: SegmentBatch, facts: Facts) -> Reads | None:
        """Ask for all segments; then for the chunks of unknown segments that are not all zero."""
        if facts.segments is None:
            return Reads(segment_ids=batch.segment_ids)
        if facts.chunks is None:
            return Reads(names=batch.names[self._asked(batch, facts.segments.found)])
        return None

    def decide(self, batch: SegmentBatch, facts: Facts) -> FreshBatch:
        """Drop what is known. Fresh chunks keep their stream order."""
        assert facts.segments is not None
        assert facts.chunks is not None
        asked = self._asked(batch, facts.segments.found)
        count = len(batch.lengths)
        known = np.ones(count, np.bool_)
        known[asked] = facts.chunks.found
        locations = Locations.empty(count)
        locations.containers[asked] = facts.chunks.locations.containers
        locations.ordinals[asked] = facts.chunks.locations.ordinals
        first = np.arange(count, dtype=np.int64)
        unknown = np.flatnonzero(~known)
        first[unknown] = unknown[first_occurrence(batch.names[unknown])]
        return FreshBatch(
            batch=batch,
            segment_known=facts.segments.found,
            segment_locations=facts.segments.locations,
            chunk_known=known,
            chunk_locations=locations,
            first=first,
            fresh=unknown[first[unknown] == unknown],
        )

    @staticmethod
    def _asked(batch: SegmentBatch, segment_known: Bools) -> Bools:
        """Return which chunks must be looked up: of segments neither known nor repeated in this batch, not all zero."""
        first = first_occurrence(batch.segment_ids)
        skipped = segment_known | (first != np.arange(len(first)))
        asked: Bools = np.repeat(~skipped, np.diff(batch.chunk_bounds)) & ~batch.zero
        return asked
