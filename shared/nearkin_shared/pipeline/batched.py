"""Execution of one stage over several batches with joined lookups.

Invariant: each batch is decided as if it were alone; only the lookups are joined.

One index lookup costs the client nearly the same for one batch as for sixteen (benchmarks/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from nearkin_shared.observability import counters
from nearkin_shared.pipeline.stage import (
    LOOKUP_PASSES_MAX,
    BatchT_contra,
    FoundBases,
    FoundLocations,
    LookupRequest,
    LookupResults,
    LookupSource,
    ResultT_co,
    Stage,
)


def run_stage_batched(
    stage: Stage[BatchT_contra, ResultT_co], batches: Sequence[BatchT_contra], source: LookupSource
) -> list[ResultT_co]:
    """Run a stage over several batches.

    Only for stages that look up nothing but the index and store nothing that a later batch could look up.
    """
    with counters.STAGE_SECONDS.time(stage.name):
        return _decide(stage, batches, source)


def _decide(
    stage: Stage[BatchT_contra, ResultT_co], batches: Sequence[BatchT_contra], source: LookupSource
) -> list[ResultT_co]:
    facts = [LookupResults()] * len(batches)
    for _ in range(LOOKUP_PASSES_MAX + 1):
        requests = [stage.reads(batch, results) for batch, results in zip(batches, facts, strict=True)]
        open_requests = [(number, request) for number, request in enumerate(requests) if request is not None]
        if not open_requests:
            return [stage.decide(batch, results) for batch, results in zip(batches, facts, strict=True)]
        if len(open_requests) == 1:
            number, request = open_requests[0]
            facts[number] = source.answer(request, facts[number])
        else:
            _answer(open_requests, facts, source)
    raise RuntimeError(f"stage {stage.name} requests lookups after {LOOKUP_PASSES_MAX} passes (bug)")


def _answer(requests: Sequence[tuple[int, LookupRequest]], facts: list[LookupResults], source: LookupSource) -> None:
    """Add the answers to `facts`, with one joined lookup per table for all batches."""
    segments = [(number, reads.segment_ids) for number, reads in requests if reads.segment_ids is not None]
    if segments:
        answer = source.answer(
            LookupRequest(segment_ids=np.concatenate([ids for _, ids in segments])), LookupResults()
        ).segments
        assert answer is not None
        for number, rows in _rows([(number, len(ids)) for number, ids in segments]):
            facts[number] = replace(
                facts[number], segments=FoundLocations(answer.locations.take(rows), answer.found[rows])
            )
    chunks = [(number, reads.names) for number, reads in requests if reads.names is not None]
    if chunks:
        answer = source.answer(
            LookupRequest(names=np.concatenate([names for _, names in chunks])), LookupResults()
        ).chunks
        assert answer is not None
        for number, rows in _rows([(number, len(names)) for number, names in chunks]):
            facts[number] = replace(
                facts[number], chunks=FoundLocations(answer.locations.take(rows), answer.found[rows])
            )
    feature_rows = [(number, reads.super_features) for number, reads in requests if reads.super_features is not None]
    if feature_rows:
        joined = LookupRequest(
            sketch=requests[0][1].sketch, super_features=np.concatenate([found for _, found in feature_rows])
        )
        bases = source.answer(joined, LookupResults()).bases
        assert bases is not None
        for number, rows in _rows([(number, len(found)) for number, found in feature_rows]):
            part = FoundBases(
                bases.super_features[rows], bases.locations.take(rows), bases.ranks[rows], bases.found[rows]
            )
            facts[number] = replace(facts[number], bases=part)


def _rows(counts: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return (batch number, rows of that batch in the joined lookup)."""
    bounds = pairwise(accumulate((count for _, count in counts), initial=0))
    return [(number, slice(start, stop)) for (number, _), (start, stop) in zip(counts, bounds, strict=True)]
