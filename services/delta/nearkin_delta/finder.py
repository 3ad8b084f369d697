"""How a batch's bases are found. Invariant: what is asked follows from the answers so far, each question once a batch.

    names, gaps -> bytes of old neighbours -> [super-features] -> bytes of what they name -> [shallower ones, by level]

Each round is one `Reads`; what was worked out between two of them is kept until the bases are chosen.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nearkin.config import Settings
from nearkin.formats.layout import PATCH
from nearkin.parallel import ALONE, Helpers
from nearkin.records import Bools, FreshBatch, Locations, PairedBatch, bounds_of
from nearkin.stage import Contents, Facts, Reads
from nearkin_delta import bases as choice
from nearkin_delta.bases import Chosen, Targets, try_bases
from nearkin_delta.gaps import Alignment, Mark
from nearkin_delta.levels import Crowded, crowded, relieved
from nearkin_delta.trials import FEW, FEW_OF_RANK, RankTrials, Trials

AsksBases = Literal["never", "again", "late"]
"""Whether super-features are looked up by the stage that stores.

"never": the resemblance stage did it. "again": that stage runs elsewhere, and may not have seen what was placed here;
they are asked about with the first question. "late": that stage did not ask; they are asked about for the chunks for
which locality has found none, which in a later version are few.
"""


@dataclass(slots=True)
class _WorkedOut:
    """What is known of a batch between two rounds of reading."""

    near: Chosen | None = None
    """Bases that locality found."""
    asked: Bools | None = None
    """Which fresh chunks try the base that a super-feature found."""
    parts: list[choice.Part] | None = None
    """What each policy chose."""
    crowded: Crowded | None = None


class BaseFinder:
    """Asks for candidates round after round, tries them, and chooses; learns from each blob which are worth trying."""

    def __init__(self, settings: Settings, kind: int, asks_bases: AsksBases, helpers: Helpers = ALONE) -> None:
        """`kind`: of the blocks that are written with bases. `helpers` try bases beside the caller."""
        delta, policy = settings.delta, settings.base.policy
        self._asks_bases = asks_bases
        self._helpers = helpers
        self._max_depth = delta.max_depth
        self._local = policy != "first-fit" and delta.codec != "none"
        self._similar = policy != "locality" and delta.codec != "none"
        self._no_deltas = kind == PATCH
        """A patch leans on no VCDIFF delta: of patches on deltas on patches each block is decoded by itself, and what
        a read costs doubles and more with each level."""
        self._tries = self._local or kind == PATCH
        """Whether bases are tried before they are used, and too deep ones replaced by their own."""
        self._alignment = Alignment()
        self._trials = Trials(0 if settings.base.try_all else FEW)
        self._rank_trials = RankTrials(FEW_OF_RANK if self._tries and not settings.base.try_all else 0)
        self._batch = _WorkedOut()

    @property
    def depth_bound(self) -> int:
        """Return below which depth a chunk is offered as a base: any, where deep ones are replaced."""
        return self._max_depth + self._tries

    @property
    def _depth_below(self) -> int | None:
        return self._max_depth if self._tries else None

    def reads(self, batch: PairedBatch, facts: Facts, stream: Hashable, here: Mark) -> Reads | None:
        """Ask for the fresh chunks once more, for what lay in their place, late for super-features, and for bytes.

        `here`: where the next chunk of `stream` will be stored.
        """
        if facts.chunks is None:
            self._batch = _WorkedOut()
        if not len(batch.fresh.fresh):  # duplicates alone: nothing to look for, and asking costs 0.5 ms a batch
            if self._local:
                self._alignment.begin(batch.fresh.batch, stream, here)
            return None
        if facts.chunks is None:
            return self._first_question(batch, stream, here)
        if facts.neighbours is not None and facts.contents is None:
            tried = self._trials.wanted(_alone(batch, stream))
            neighbours = facts.neighbours.chunks if tried else Locations.empty()
            return Reads(contents=neighbours, depth_below=self._depth_below, no_deltas=self._no_deltas)
        if not self._similar or facts.similar is not None:
            return self._crowded_ones(batch, facts, stream)
        if self._asks_bases == "late" and facts.bases is None:
            return self._late_question(batch, facts, stream)
        paired = self.with_bases(batch, facts)
        asked = self._asked(paired, facts, stream)
        return Reads(similar=paired.bases.take(asked), depth_below=self._depth_below, no_deltas=self._no_deltas)

    def with_bases(self, batch: PairedBatch, facts: Facts) -> PairedBatch:
        """Return `batch` with the candidates that were found when this stage asked for them."""
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

    def choose(self, batch: PairedBatch, facts: Facts, stream: Hashable) -> tuple[Chosen, Contents]:
        """Return the bases of all fresh chunks, and their bytes; the batch is done then.

        `batch` as `with_bases` returned it.
        """
        parts = self._parts_of(batch, facts, stream) if self._batch.parts is None else self._batch.parts
        chosen = choice.joined(len(batch.fresh.fresh), parts)
        if self._local:
            self._alignment.follow(batch, stream, facts.neighbours)
        self._batch = _WorkedOut()
        return chosen

    def pass_known(self, fresh: FreshBatch, stream: Hashable, here: Mark) -> None:
        """Take note of a batch of known segments alone."""
        if self._local:
            self._alignment.pass_known(fresh, stream, here)

    def _first_question(self, batch: PairedBatch, stream: Hashable, here: Mark) -> Reads:
        names = batch.fresh.batch.names[batch.fresh.fresh]
        gaps = self._alignment.gaps(batch, stream, here) if self._local else None
        if self._asks_bases == "again" and self._similar:
            unknown = batch.super_features[~batch.base_found]
            return Reads(names=names, sketch=batch.sketch, super_features=unknown, gaps=gaps)
        return Reads(names=names, gaps=gaps)

    def _late_question(self, batch: PairedBatch, facts: Facts, stream: Hashable) -> Reads:
        """Ask for what the super-features name, of those ranks of which enough turn out to be bases."""
        super_features = batch.super_features[self._without_base(batch, facts)]
        ranks = self._rank_trials.asked(_alone(batch, stream), super_features.shape[1])
        return Reads(sketch=batch.sketch, super_features=np.where(ranks, super_features, np.uint64(0)))

    def _crowded_ones(self, batch: PairedBatch, facts: Facts, stream: Hashable) -> Reads | None:
        """Ask for shallower bases of the chunks that would stand at the end of a full chain."""
        if not self._tries:
            return None
        of = self._batch
        if of.parts is None:
            of.parts = self._parts_of(self.with_bases(batch, facts), facts, stream)
            of.crowded = crowded(of.parts, self._max_depth)
        elif of.crowded is not None and facts.lower is not None:
            lower = facts.lower
            of.parts, of.crowded = relieved(of.parts, of.crowded, _targets(batch), lower, self._helpers)
        if of.crowded is None:
            return None
        return Reads(lower=of.crowded.asked, depth_below=of.crowded.depth_below, no_deltas=self._no_deltas)

    def _near(self, batch: PairedBatch, facts: Facts) -> Chosen | None:
        """Return what locality found of bases that are worth it."""
        if facts.neighbours is None or facts.contents is None:
            return None
        if self._batch.near is None:
            fresh = facts.neighbours.fresh
            bounds = bounds_of(fresh)
            tried = len(facts.contents.pieces) == len(facts.neighbours.chunks)
            their_bounds = facts.neighbours.bounds if tried else np.zeros(len(bounds), np.uint32)
            self._batch.near = try_bases(_targets(batch), bounds, facts.contents, their_bounds, self._helpers)
            if tried:
                had_some = int(fresh[np.diff(their_bounds) > 0].sum())
                self._trials.heard(had_some, int(np.count_nonzero(self._batch.near.found)))
        return self._batch.near

    def _without_base(self, batch: PairedBatch, facts: Facts) -> Bools:
        """Return which fresh chunks are still unknown, and locality found no base for them."""
        assert facts.chunks is not None
        near = self._near(batch, facts)
        return ~facts.chunks.found if near is None else ~(facts.chunks.found | near.found)

    def _asked(self, batch: PairedBatch, facts: Facts, stream: Hashable) -> Bools:
        """Return which fresh chunks are to try the base that a super-feature found."""
        if self._batch.asked is None:
            asked = batch.base_found & self._without_base(batch, facts)
            if self._asks_bases != "late":  # then no other was asked for
                rows = np.flatnonzero(asked)
                asked[rows] = self._rank_trials.wanted(_alone(batch, stream), batch.base_rank[rows])
            self._batch.asked = asked
        return self._batch.asked

    def _parts_of(self, batch: PairedBatch, facts: Facts, stream: Hashable) -> list[choice.Part]:
        """Return what each policy chose. The next batch's trials follow from it."""
        count = len(batch.fresh.fresh)
        parts: list[choice.Part] = []
        near = self._near(batch, facts)
        if near is not None and facts.contents is not None:
            parts.append(choice.Part(np.arange(count), near, facts.contents, choice.local_ranks(count)))
        if facts.similar is not None:
            asked = np.flatnonzero(self._asked(batch, facts, stream))
            if self._tries:
                each = np.arange(len(asked) + 1, dtype=np.uint32)
                similar = try_bases(_targets(batch).take(asked), each, facts.similar, each, self._helpers)
            else:
                similar = choice.untried(facts.similar, self._max_depth)
            self._rank_trials.heard(batch.base_rank[asked], similar.found)
            if similar.found.any():
                parts.append(choice.Part(asked, similar, facts.similar, batch.base_rank[asked]))
        return parts


def _targets(batch: PairedBatch) -> Targets:
    rows, segments = batch.fresh.fresh, batch.fresh.batch
    return Targets(segments.payload, segments.offsets[rows], segments.lengths[rows])


def _alone(batch: PairedBatch, stream: Hashable) -> Hashable:
    """Return the blob that a batch belongs to, None for one of several."""
    blobs = batch.fresh.batch.blobs
    return (stream, int(blobs[0])) if (blobs == blobs[0]).all() else None
