"""Several batches through one stage. Invariant: each is decided as if it were alone; only the questions are joined.

A question costs the client of an index nearly the same for one batch as for sixteen (benchmarks/pipeline.py).
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
    """Run a stage over batches. For stages that ask the index alone, and change nothing a later batch could ask for."""
    with counters.STAGE_SECONDS.time(stage.name):
        return _decide(stage, batches, source)


def _decide(
    stage: Stage[BatchT_contra, ResultT_co], batches: Sequence[BatchT_contra], source: LookupSource
) -> list[ResultT_co]:
    facts = [LookupResults()] * len(batches)
    for _ in range(LOOKUP_PASSES_MAX + 1):
        wanted = [stage.reads(batch, known) for batch, known in zip(batches, facts, strict=True)]
        asking = [(number, reads) for number, reads in enumerate(wanted) if reads is not None]
        if not asking:
            return [stage.decide(batch, known) for batch, known in zip(batches, facts, strict=True)]
        if len(asking) == 1:
            number, reads = asking[0]
            facts[number] = source.answer(reads, facts[number])
        else:
            _answer(asking, facts, source)
    raise RuntimeError(f"stage {stage.name} still asks after {LOOKUP_PASSES_MAX} rounds")


def _answer(asking: Sequence[tuple[int, LookupRequest]], facts: list[LookupResults], source: LookupSource) -> None:
    """Add the answers to `facts`, each kind of question asked once for all that ask it."""
    segments = [(number, reads.segment_ids) for number, reads in asking if reads.segment_ids is not None]
    if segments:
        answer = source.answer(
            LookupRequest(segment_ids=np.concatenate([ids for _, ids in segments])), LookupResults()
        ).segments
        assert answer is not None
        for number, rows in _rows([(number, len(ids)) for number, ids in segments]):
            facts[number] = replace(
                facts[number], segments=FoundLocations(answer.locations.take(rows), answer.found[rows])
            )
    chunks = [(number, reads.names) for number, reads in asking if reads.names is not None]
    if chunks:
        answer = source.answer(
            LookupRequest(names=np.concatenate([names for _, names in chunks])), LookupResults()
        ).chunks
        assert answer is not None
        for number, rows in _rows([(number, len(names)) for number, names in chunks]):
            facts[number] = replace(
                facts[number], chunks=FoundLocations(answer.locations.take(rows), answer.found[rows])
            )
    sketched = [(number, reads.super_features) for number, reads in asking if reads.super_features is not None]
    if sketched:
        joined = LookupRequest(
            sketch=asking[0][1].sketch, super_features=np.concatenate([found for _, found in sketched])
        )
        bases = source.answer(joined, LookupResults()).bases
        assert bases is not None
        for number, rows in _rows([(number, len(found)) for number, found in sketched]):
            part = FoundBases(
                bases.super_features[rows], bases.locations.take(rows), bases.ranks[rows], bases.found[rows]
            )
            facts[number] = replace(facts[number], bases=part)


def _rows(counts: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Return (which batch, its rows in the joined question)."""
    bounds = pairwise(accumulate((count for _, count in counts), initial=0))
    return [(number, slice(start, stop)) for (number, _), (start, stop) in zip(counts, bounds, strict=True)]
