"""Find base candidates of a batch by successive lookup requests.

    names, gaps -> old neighbours, span by span (locality_candidates.py) -> [super-features] -> bytes of the candidates
                   each: bytes -> [shallower ones, by level]                     -> [shallower ones, by level]

Each step is one `LookupRequest`; intermediate results are kept until the bases are chosen.

Invariant: a request depends on the results so far only, and nothing is requested twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nearkin_delta import base_choice as choice
from nearkin_delta.base_choice import BaseChoice, Targets, try_bases
from nearkin_delta.candidate_budget import FEW, FEW_OF_RANK, CandidateBudget, RankBudget
from nearkin_delta.depth_limit import OverdeepChunks, find_overdeep, reduce_depth
from nearkin_delta.gap_alignment import Alignment, StreamMark
from nearkin_delta.locality_candidates import LocalityCandidates
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.container_layout import PATCH
from nearkin_shared.pipeline.stage import Contents, LookupRequest, LookupResults, Neighbours
from nearkin_shared.types import Bools, FreshBatch, Locations, PairedBatch
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool

AsksBases = Literal["never", "again", "late"]
"""Whether the storing stage looks up super-features.

"never": the resemblance stage did. "again": that stage runs in another process and may not know the chunks stored here;
the first request repeats the lookup. "late": that stage did not; they are looked up for the chunks without a locality
candidate, which in a later version are few.
"""


@dataclass(slots=True)
class _BatchState:
    """State of a batch between two lookup requests."""

    near: LocalityCandidates | None = None
    """Bases found by locality."""
    near_done: bool = False
    asked: Bools | None = None
    """Mask of the fresh chunks that try the base found by a super-feature."""
    similar: list[choice.PolicyChoice] | None = None
    """Their choices."""
    crowded: OverdeepChunks | None = None


class BaseFinder:
    """Requests candidates step by step, tries them, and chooses.

    Adapts to each blob's success rate.
    """

    def __init__(self, settings: Settings, kind: int, asks_bases: AsksBases, helpers: ThreadPool = SERIAL) -> None:
        """`kind`: of the delta blocks written. `helpers` try bases concurrently with the caller."""
        delta, policy = settings.delta, settings.base.policy
        self._asks_bases = asks_bases
        self._helpers = helpers
        self._max_depth = delta.max_depth
        self._local = policy != "first-fit" and delta.codec != "none"
        self._similar = policy != "locality" and delta.codec != "none"
        self._no_deltas = kind == PATCH
        """A patch has no VCDIFF delta as its base: with patches over deltas over patches, each block is decoded by
        itself, and the cost of a read doubles or more with each level."""
        self._tries = self._local or kind == PATCH
        """Whether candidates are tried, and overdeep ones replaced by their own bases."""
        self._alignment = Alignment()
        self._trials = CandidateBudget(0 if settings.block.thorough else FEW)
        self._rank_trials = RankBudget(FEW_OF_RANK if self._tries and not settings.block.thorough else 0)
        self._batch = _BatchState()
        self.is_on = True
        """Whether bases are sought: batches without are no part of a stream that later ones are aligned with."""

    @property
    def depth_bound(self) -> int:
        """Return the depth bound of base candidates: any depth if overdeep ones are replaced."""
        return self._max_depth + self._tries

    @property
    def _depth_below(self) -> int | None:
        return self._max_depth if self._tries else None

    def reads(
        self, batch: PairedBatch, facts: LookupResults, stream: Hashable, here: StreamMark
    ) -> LookupRequest | None:
        """Return the next request for names, neighbours, late super-features or bytes.

        None when complete.

        `here`: where the next chunk of `stream` will be stored.
        """
        if facts.chunks is None:
            self._batch = _BatchState()
        if not len(batch.fresh.fresh):  # only duplicates: no candidates needed, and a request costs 0.5 ms a batch
            if self._local and self.is_on:
                self._alignment.begin(batch.fresh.batch, stream, here)
            return None
        if facts.chunks is None or not self.is_on:
            return self._first_question(batch, stream, here) if facts.chunks is None else None
        if facts.neighbours is not None and not self._batch.near_done:
            more = self._near(batch, facts, facts.neighbours, stream)
            if more is not None:
                return more
            self._batch.near_done = True
        if not self._similar or facts.similar is not None:
            return self._overdeep_chunks(batch, facts, stream)
        if self._asks_bases == "late" and facts.bases is None:
            return self._late_question(batch, facts, stream)
        paired = self.with_bases(batch, facts)
        asked = self._asked(paired, facts, stream)
        return LookupRequest(similar=paired.bases.take(asked), depth_below=self._depth_below, no_deltas=self._no_deltas)

    def with_bases(self, batch: PairedBatch, facts: LookupResults) -> PairedBatch:
        """Return `batch` with the candidates that this stage requested."""
        if facts.bases is None:
            return batch
        late = self._asks_bases == "late"
        asked = np.flatnonzero(self._without_base(batch, facts) if late else ~batch.base_found)
        found, bases, ranks = batch.base_found.copy(), batch.bases, batch.base_rank.copy()
        bases = Locations(bases.containers.copy(), bases.ordinals.copy())
        found[asked], ranks[asked] = facts.bases.found, facts.bases.ranks
        bases.containers[asked] = facts.bases.locations.containers
        bases.ordinals[asked] = facts.bases.locations.ordinals
        return replace(batch, base_found=found, bases=bases, base_rank=ranks)

    def choose(self, batch: PairedBatch, facts: LookupResults, stream: Hashable) -> tuple[BaseChoice, Contents]:
        """Return the bases of all fresh chunks and their bytes, and end the batch.

        `batch`: as returned by `with_bases`.
        """
        of = self._batch
        similar = self._similar_chunks(batch, facts, stream) if of.similar is None else of.similar
        near = [] if of.near is None else of.near.parts
        chosen = choice.join_choices(len(batch.fresh.fresh), [*near, *similar])
        if self._local and self.is_on:
            self._alignment.follow(batch, stream, facts.neighbours)
        self._batch = _BatchState()
        return chosen

    def pass_known(self, fresh: FreshBatch, stream: Hashable, here: StreamMark) -> None:
        """Record the position after a batch of known segments only."""
        if self._local and self.is_on:
            self._alignment.pass_known(fresh, stream, here)

    def _first_question(self, batch: PairedBatch, stream: Hashable, here: StreamMark) -> LookupRequest:
        names = batch.fresh.batch.names[batch.fresh.fresh]
        gaps = self._alignment.gaps(batch, stream, here) if self._local and self.is_on else None
        if self._asks_bases == "again" and self._similar and self.is_on:
            unknown = batch.super_features[~batch.base_found]
            return LookupRequest(names=names, sketch=batch.sketch, super_features=unknown, gaps=gaps)
        return LookupRequest(names=names, gaps=gaps)

    def _late_question(self, batch: PairedBatch, facts: LookupResults, stream: Hashable) -> LookupRequest:
        """Request candidates by super-features, of those ranks that yield enough bases."""
        super_features = batch.super_features[self._without_base(batch, facts)]
        ranks = self._rank_trials.should_request(_only_blob(batch, stream), super_features.shape[1])
        return LookupRequest(sketch=batch.sketch, super_features=np.where(ranks, super_features, np.uint64(0)))

    def _near(
        self, batch: PairedBatch, facts: LookupResults, neighbours: Neighbours, stream: Hashable
    ) -> LookupRequest | None:
        """Request old neighbours until all promising ones were tried, then return None."""
        of = self._batch
        if of.near is None:
            if not self._trials.should_try(_only_blob(batch, stream)):
                return None
            no_deltas, helpers = self._no_deltas, self._helpers
            of.near = LocalityCandidates(
                _targets(batch), neighbours, self._max_depth, no_deltas=no_deltas, helpers=helpers
            )
        more = of.near.reads(facts)
        if more is None:
            had_some = int(neighbours.fresh[np.diff(neighbours.bounds) > 0].sum())
            self._trials.record_result(had_some, int(np.count_nonzero(of.near.found)))
        return more

    def _overdeep_chunks(self, batch: PairedBatch, facts: LookupResults, stream: Hashable) -> LookupRequest | None:
        """Request shallower bases of chunks at the maximum depth that super-features found."""
        if not self._tries:
            return None
        of = self._batch
        if of.similar is None:
            of.similar = self._similar_chunks(self.with_bases(batch, facts), facts, stream)
            of.crowded = find_overdeep(of.similar, self._max_depth)
        elif of.crowded is not None and facts.lower is not None:
            lower = facts.lower
            of.similar, of.crowded = reduce_depth(of.similar, of.crowded, _targets(batch), lower, self._helpers)
        if of.crowded is None:
            return None
        bounds = of.crowded.bounds
        return LookupRequest(
            lower=of.crowded.asked, depth_below=of.crowded.depth_below, no_deltas=self._no_deltas, bounds=bounds
        )

    def _without_base(self, batch: PairedBatch, facts: LookupResults) -> Bools:
        """Return a mask of the fresh chunks that are still unknown and have no locality base."""
        assert facts.chunks is not None
        near = self._batch.near
        return ~facts.chunks.found if near is None else ~(facts.chunks.found | near.found)

    def _asked(self, batch: PairedBatch, facts: LookupResults, stream: Hashable) -> Bools:
        """Return a mask of the fresh chunks that try the base found by a super-feature."""
        if self._batch.asked is None:
            asked = batch.base_found & self._without_base(batch, facts)
            if self._asks_bases != "late":  # "late" has requested only these already
                rows = np.flatnonzero(asked)
                asked[rows] = self._rank_trials.should_try(_only_blob(batch, stream), batch.base_rank[rows])
            self._batch.asked = asked
        return self._batch.asked

    def _similar_chunks(self, batch: PairedBatch, facts: LookupResults, stream: Hashable) -> list[choice.PolicyChoice]:
        """Return the choices among super-feature candidates, and update their budget."""
        if facts.similar is None:
            return []
        asked = np.flatnonzero(self._asked(batch, facts, stream))
        if self._tries:
            each = np.arange(len(asked) + 1, dtype=np.uint32)
            similar = try_bases(_targets(batch).take(asked), each, facts.similar, each, self._helpers)
        else:
            similar = choice.choose_untried(facts.similar, self._max_depth)
        self._rank_trials.record_result(batch.base_rank[asked], similar.found)
        return (
            [choice.PolicyChoice(asked, similar, facts.similar, batch.base_rank[asked])] if similar.found.any() else []
        )


def _targets(batch: PairedBatch) -> Targets:
    rows, segments = batch.fresh.fresh, batch.fresh.batch
    return Targets(segments.payload, segments.offsets[rows], segments.lengths[rows])


def _only_blob(batch: PairedBatch, stream: Hashable) -> Hashable:
    """Return the blob of a batch, or None if it has several."""
    blobs = batch.fresh.batch.blobs
    return (stream, int(blobs[0])) if (blobs == blobs[0]).all() else None
