"""Dedup stage: look up segments, then the chunks of unknown segments.

Coarse first (MAD2, Sungem): a known segment is one lookup; only chunks of unknown segments are looked up.

Invariant: exactly the first copy of each unknown chunk stays fresh, in stream order.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.types import U8, U32, Bools, FreshBatch, Locations, SegmentBatch


class DedupStage:
    """Removes known segments, then known and repeated chunks."""

    name = "dedup"

    def __init__(self, scopes: U32 | None = None) -> None:
        """`scopes` uint32[s]: segments of each scope are decided independently. None: one scope."""
        self._scopes = scopes

    def reads(self, batch: SegmentBatch, facts: LookupResults) -> LookupRequest | None:
        """Request all segments; then chunks of unknown ones, except zeros and claimed chunks."""
        if facts.segments is None:
            return LookupRequest(segment_ids=batch.segment_ids)
        if facts.chunks is None:
            return LookupRequest(names=batch.names[self._asked(batch, facts.segments.found)])
        return None

    def decide(self, batch: SegmentBatch, facts: LookupResults) -> FreshBatch:
        """Return the fresh chunks, in stream order, and the locations of known ones."""
        assert facts.segments is not None
        assert facts.chunks is not None
        asked = self._asked(batch, facts.segments.found)
        count = len(batch.lengths)
        known = np.ones(count, np.bool_)
        known[asked] = facts.chunks.found
        locations = Locations.empty(count)
        locations.containers[asked] = facts.chunks.locations.containers
        locations.ordinals[asked] = facts.chunks.locations.ordinals
        if batch.claimed is not None:
            locations.containers[batch.claimed.rows] = batch.claimed.locations.containers
            locations.ordinals[batch.claimed.rows] = batch.claimed.locations.ordinals
        first = np.arange(count, dtype=np.int64)
        unknown = np.flatnonzero(~known)
        scopes = None
        if self._scopes is not None:
            scopes = np.repeat(self._scopes, np.diff(batch.chunk_bounds))[unknown]
        first[unknown] = unknown[first_occurrence(_with_scope(batch.names[unknown], scopes))]
        return FreshBatch(
            batch=batch,
            segment_known=facts.segments.found,
            segment_locations=facts.segments.locations,
            chunk_known=known,
            chunk_locations=locations,
            first=first,
            fresh=unknown[first[unknown] == unknown],
        )

    def _asked(self, batch: SegmentBatch, segment_known: Bools) -> Bools:
        """Return a mask of the chunks to look up.

        They are of unknown, unrepeated segments, and neither zeros nor claimed.
        """
        first = first_occurrence(_with_scope(batch.segment_ids, self._scopes))
        skipped = segment_known | (first != np.arange(len(first)))
        asked: Bools = np.repeat(~skipped, np.diff(batch.chunk_bounds)) & ~batch.zero
        if batch.claimed is not None:
            asked[batch.claimed.rows] = False
        return asked


def _with_scope(keys: U8, scopes: U32 | None) -> U8:
    """Return keys that are equal only within a scope."""
    if scopes is None:
        return keys
    found = np.empty((len(keys), keys.shape[1] + 4), np.uint8)
    found[:, :-4] = keys
    found[:, -4:] = scopes.astype("<u4").view(np.uint8).reshape(-1, 4)
    return found
