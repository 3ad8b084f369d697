"""Delta stage. Invariant: the index is asked again before a chunk is stored (I5); every kept delta was decoded (I7).

recheck -> bases -> encode -> arbitrate -> place in the open container -> recipes -> finish it when it is full
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nearkin.config import Settings
from nearkin.formats.layout import PATCH
from nearkin.kernels.nametable import first_occurrence
from nearkin.limits import MIB
from nearkin.records import (
    NAME_BYTES,
    SEGMENT_ID_BYTES,
    U8,
    U32,
    U64,
    ZERO,
    Bools,
    FreshBatch,
    Locations,
    PairedBatch,
)
from nearkin.stage import Contents, Facts, Found, Reads
from nearkin_delta import bases as choice
from nearkin_delta.arbiter import keep_delta
from nearkin_delta.bases import Chosen, Targets, try_bases
from nearkin_delta.blocks import BlockCloser, Keeper, SparePrefixes
from nearkin_delta.builder import ContainerBuilder, Encodings, Prefixes, new_container_id
from nearkin_delta.codecs import Deltas, Pairs, check_round_trip, codec
from nearkin_delta.finished import FinishedContainer
from nearkin_delta.gaps import Alignment, Mark
from nearkin_delta.levels import Crowded, crowded, relieved
from nearkin_delta.trials import FEW, FEW_OF_RANK, RankTrials, Trials


@dataclass(frozen=True, slots=True)
class Placed:
    """What may be found from now on by this process alone; the index hears of it when the container is durable."""

    names: U8
    chunks: Locations
    sketch: str
    base_chunks: Locations
    super_features: U64
    segment_ids: U8
    segments: Locations


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Per chunk of the batch: what became of it. `blobs` uint32[n]; bytes as the ledger wants them."""

    blobs: U32
    lengths: U32
    duplicate: Bools
    zero: Bools
    delta: Bools
    delta_bytes: U32


@dataclass(frozen=True, slots=True)
class DeltaOutcome:
    """The batch's effects: `segments` in stream order with their `blobs`; containers that are finished, in order."""

    placed: Placed
    blobs: U32
    segments: Locations
    segment_known: Bools
    counts: ChunkCounts
    finished: tuple[FinishedContainer, ...] = field(default_factory=tuple)


ASIDE_BYTES_MAX = 16 * MIB
"""A container of more is finished at once: it would be held twice in memory for an encoder that is busy anyway."""
NOTHING_FRESH = Found(Locations.empty(), np.zeros(0, np.bool_))


class DeltaStage:
    """Encodes and places. Holds one open container: what is not yet put is forgotten with the process, by design."""

    name = "delta"

    def __init__(
        self,
        settings: Settings,
        domain: bytes,
        last_container: int,
        *,
        asks_bases: Literal["never", "again", "late"] = "never",
        encoding: Executor | None = None,
        keeper: Keeper | None = None,
        prefixes: SparePrefixes | None = None,
    ) -> None:
        """`asks_bases`: "again" where the resemblance stage runs elsewhere, and may not have seen what this stage
        placed: with the first question. "late" where that stage did not ask: for the chunks for which locality has
        found none, which in a later version are few.

        `encoding`: a thread that encodes the blocks of one batch while the next is read and looked up. `keeper`: keeps
        the bytes of blocks for batches to come. `prefixes`: memory of the stage before this one.
        """
        self._settings = settings
        self._asks_bases = asks_bases
        self._domain = domain
        self._last = last_container
        self._kind, self._encode = codec(settings.delta)
        self._local = settings.base.policy != "first-fit" and settings.delta.codec != "none"
        self._similar = settings.base.policy != "locality" and settings.delta.codec != "none"
        self._tries = self._local or self._kind == PATCH
        """Whether bases are tried before they are used, and too deep ones replaced by their own."""
        self.stream: Hashable = None
        """Whose batches these are, where one stage serves several: each blob of each stream is followed by itself."""
        self._alignment = Alignment()
        chunk_bytes = int(settings.chunker.max_bytes)
        self._closer = BlockCloser(settings.block, settings.delta, encoding, keeper, prefixes, chunk_bytes)
        self._found_near: Chosen | None = None
        self._trials = Trials(0 if settings.base.try_all else FEW)
        self._rank_trials = RankTrials(FEW_OF_RANK if self._tries and not settings.base.try_all else 0)
        self._asked_for: Bools | None = None
        self._parts: list[choice.Part] | None = None
        self._crowded: Crowded | None = None
        self.builder = self._new_builder((1, 2))
        self._sets_aside = encoding is not None and int(settings.container.target_bytes) <= ASIDE_BYTES_MAX
        self._full: ContainerBuilder | None = None
        """A container that takes no more, and whose last blocks are being encoded while the next batch is placed."""

    def _new_builder(self, ratio: tuple[int, int]) -> ContainerBuilder:
        container = new_container_id(self._last)
        self._last = container
        chosen = self._settings
        return ContainerBuilder(
            container, self._domain, chosen.block, chosen.delta, self._kind, self._depth_bound, self._closer, ratio
        )

    def begin(self) -> None:
        """Give the container that is open an id of now, if nothing is in it: its age is told from that."""
        if self.builder.empty:
            self.builder = self._new_builder(self.builder.ratio)

    @property
    def open(self) -> tuple[ContainerBuilder, ...]:
        """Return the containers that are not finished."""
        return (self.builder,) if self._full is None else (self._full, self.builder)

    @property
    def _here(self) -> Mark:
        return Mark(self.builder.container, self.builder.chunks, self.builder.segments)

    @property
    def _depth_bound(self) -> int:
        """Return below which depth a chunk is offered as a base: any, where deep ones are replaced."""
        return self._settings.delta.max_depth + self._tries

    def reads(self, batch: PairedBatch, facts: Facts) -> Reads | None:
        """Ask for the fresh chunks once more, for what lay in their place, late for super-features, and for bytes."""
        rows = batch.fresh.fresh
        if facts.chunks is None:
            self._forget_batch()
        if not len(rows):  # duplicates alone: nothing to look for, and what would be asked costs 0.5 ms a batch
            if self._local:
                self._alignment.begin(batch.fresh.batch, self.stream, self._here)
            return None
        if facts.chunks is None:
            return self._first_question(batch)
        if facts.neighbours is not None and facts.contents is None:
            return self._neighbours_contents(batch, facts.neighbours.chunks)
        if not self._similar or facts.similar is not None:
            return self._crowded_ones(batch, facts)
        if self._asks_bases == "late" and facts.bases is None:
            return Reads(sketch=batch.sketch, super_features=batch.super_features[self._without_base(batch, facts)])
        paired = self._with_bases(batch, facts)
        return Reads(similar=paired.bases.take(self._asked(paired, facts)), depth_below=self._depth_below)

    def _crowded_ones(self, batch: PairedBatch, facts: Facts) -> Reads | None:
        """Ask for shallower bases of the chunks that would stand at the end of a full chain."""
        if not self._tries:
            return None
        if self._parts is None:
            self._parts = self._parts_of(self._with_bases(batch, facts), facts)
            self._crowded = crowded(self._parts, self._settings.delta.max_depth)
        elif self._crowded is not None and facts.lower is not None:
            self._parts, self._crowded = relieved(self._parts, self._crowded, _targets(batch), facts.lower)
        if self._crowded is None:
            return None
        return Reads(lower=self._crowded.asked, depth_below=self._crowded.depth_below)

    def _forget_batch(self) -> None:
        """Let go of what was worked out between the rounds of reading of one batch."""
        self._found_near = self._asked_for = self._parts = self._crowded = None

    @property
    def _depth_below(self) -> int | None:
        return self._settings.delta.max_depth if self._tries else None

    def _first_question(self, batch: PairedBatch) -> Reads:
        names = batch.fresh.batch.names[batch.fresh.fresh]
        gaps = self._alignment.gaps(batch, self.stream, self._here) if self._local else None
        if self._asks_bases == "again" and self._similar:
            unknown = batch.super_features[~batch.base_found]
            return Reads(names=names, sketch=batch.sketch, super_features=unknown, gaps=gaps)
        return Reads(names=names, gaps=gaps)

    def _neighbours_contents(self, batch: PairedBatch, neighbours: Locations) -> Reads:
        tried = neighbours if self._trials.wanted(self._alone(batch)) else Locations.empty()
        return Reads(contents=tried, depth_below=self._depth_below)

    def _alone(self, batch: PairedBatch) -> Hashable:
        """Return the blob that a batch belongs to, None for one of several."""
        blobs = batch.fresh.batch.blobs
        return (self.stream, int(blobs[0])) if (blobs == blobs[0]).all() else None

    def _near(self, batch: PairedBatch, facts: Facts) -> Chosen | None:
        """Return what locality found of bases that are worth it; tried once a batch, between two rounds of reading."""
        if facts.neighbours is None or facts.contents is None:
            return None
        if self._found_near is None:
            targets, fresh = _targets(batch), facts.neighbours.fresh
            bounds = np.append(np.uint32(0), np.cumsum(fresh, dtype=np.uint32))
            tried = len(facts.contents.lengths) == len(facts.neighbours.chunks)
            their_bounds = facts.neighbours.bounds if tried else np.zeros(len(bounds), np.uint32)
            self._found_near = try_bases(targets, bounds, facts.contents, their_bounds)
            if tried:
                had_some = int(fresh[np.diff(their_bounds) > 0].sum())
                self._trials.heard(had_some, int(np.count_nonzero(self._found_near.found)))
        return self._found_near

    def _asked(self, batch: PairedBatch, facts: Facts) -> Bools:
        """Return which fresh chunks are to try the base that a super-feature found: asked once a batch, and kept."""
        if self._asked_for is None:
            rows = np.flatnonzero(batch.base_found & self._without_base(batch, facts))
            asked = np.zeros(len(batch.base_found), np.bool_)
            asked[rows[self._rank_trials.wanted(self._alone(batch), batch.base_rank[rows])]] = True
            self._asked_for = asked
        return self._asked_for

    def _without_base(self, batch: PairedBatch, facts: Facts) -> Bools:
        """Return which fresh chunks are still unknown, and locality found no base for them."""
        assert facts.chunks is not None
        near = self._near(batch, facts)
        return ~facts.chunks.found if near is None else ~(facts.chunks.found | near.found)

    def _with_bases(self, batch: PairedBatch, facts: Facts) -> PairedBatch:
        """Return `batch` with the bases that were found when this stage asked for them."""
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

    def _chosen(self, batch: PairedBatch, facts: Facts) -> tuple[Chosen, Contents]:
        """Return the bases of all fresh chunks, and their bytes."""
        parts = self._parts_of(batch, facts) if self._parts is None else self._parts
        return choice.joined(len(batch.fresh.fresh), parts, self._closer.room)

    def _parts_of(self, batch: PairedBatch, facts: Facts) -> list[choice.Part]:
        """Return what each policy chose: once a batch, since the next one's trials follow from it."""
        count = len(batch.fresh.fresh)
        parts: list[choice.Part] = []
        near = self._near(batch, facts)
        if near is not None and facts.contents is not None:
            parts.append(choice.Part(np.arange(count), near, facts.contents, choice.local_ranks(count)))
        if facts.similar is not None:
            asked = np.flatnonzero(self._asked(batch, facts))
            if self._tries:
                each = np.arange(len(asked) + 1, dtype=np.uint32)
                similar = try_bases(_targets(batch).take(asked), each, facts.similar, each)
            else:
                similar = choice.untried(facts.similar, self._settings.delta.max_depth)
            self._rank_trials.heard(batch.base_rank[asked], similar.found)
            if similar.found.any():
                parts.append(choice.Part(asked, similar, facts.similar, batch.base_rank[asked]))
        return parts

    def decide(self, batch: PairedBatch, facts: Facts) -> DeltaOutcome:
        """Store what is still fresh; fold in the rest."""
        known = facts.chunks or NOTHING_FRESH
        self.builder.next_turn()
        batch = self._with_bases(batch, facts)
        fresh, segments = batch.fresh, batch.fresh.batch
        still = ~known.found
        rows = fresh.fresh[still]
        chosen, bases = self._chosen(batch, facts)
        self._alignment.follow(batch, self.stream, facts.neighbours)
        self._forget_batch()
        chosen = choice.only(chosen, still)
        encode = self._patches if self._kind == PATCH else self._deltas
        encodings = encode(batch, rows, chosen, bases)
        placed = self.builder.add(encodings)
        self.builder.passed(segments.logical_bytes)

        locations = Locations(fresh.chunk_locations.containers.copy(), fresh.chunk_locations.ordinals.copy())
        zero = segments.zero
        locations.containers[zero], locations.ordinals[zero] = ZERO, segments.lengths[zero]
        folded = fresh.fresh[~still]
        locations.containers[folded] = known.locations.containers[~still]
        locations.ordinals[folded] = known.locations.ordinals[~still]
        locations.containers[rows], locations.ordinals[rows] = placed.containers, placed.ordinals
        repeated = fresh.first != np.arange(len(fresh.first))
        first = fresh.first[repeated]
        locations.containers[repeated], locations.ordinals[repeated] = (
            locations.containers[first],
            locations.ordinals[first],
        )

        eligible = encodings.depths < self._depth_bound
        super_features = batch.super_features[still][eligible]
        base_chunks = placed.take(eligible)
        self.builder.add_super_features(batch.sketch, base_chunks.ordinals, super_features)
        segment_locations, segment_known, new_ids, new_segments = self._segments(batch, locations)
        stored = np.zeros(len(segments.lengths), np.bool_)
        stored[rows] = True
        delta, delta_bytes = np.zeros(len(stored), np.bool_), np.zeros(len(stored), np.uint32)
        delta[rows] = encodings.depths > 0
        rest = chosen.rest if encodings.prefixes is not None else encodings.encoded
        delta_bytes[rows] = np.where(encodings.depths > 0, rest, 0)
        finished = self._turn_ended()
        return DeltaOutcome(
            Placed(encodings.names, placed, batch.sketch, base_chunks, super_features, new_ids, new_segments),
            segments.blobs,
            segment_locations,
            segment_known,
            ChunkCounts(
                np.repeat(segments.blobs, np.diff(segments.chunk_bounds)),
                segments.lengths,
                ~stored,
                zero,
                delta,
                delta_bytes,
            ),
            finished,
        )

    def fold(self, fresh: FreshBatch, sketch: str) -> DeltaOutcome:
        """Return what `decide` does for a batch of known segments alone: nothing is stored, much less is asked."""
        segments = fresh.batch
        self.builder.next_turn()
        if self._local:
            self._alignment.pass_known(fresh, self.stream, self._here)
        self.builder.passed(segments.logical_bytes)
        none, nowhere = np.zeros(len(segments.lengths), np.bool_), Locations.empty()
        return DeltaOutcome(
            Placed(
                np.zeros((0, NAME_BYTES), np.uint8),
                nowhere,
                sketch,
                nowhere,
                np.zeros((0, 0), np.uint64),
                np.zeros((0, SEGMENT_ID_BYTES), np.uint8),
                nowhere,
            ),
            segments.blobs,
            fresh.segment_locations,
            fresh.segment_known,
            ChunkCounts(
                np.repeat(segments.blobs, np.diff(segments.chunk_bounds)),
                segments.lengths,
                ~none,
                segments.zero,
                none,
                np.zeros(len(none), np.uint32),
            ),
            self._full_finished(),
        )

    def _turn_ended(self) -> tuple[FinishedContainer, ...]:
        """Finish the container that was full before this batch, and set aside the one that it has filled.

        Where blocks are encoded on a thread of their own: what is read of a container, and how deep it lies, is the
        same until then. Elsewhere what is full is finished at once.
        """
        finished = self._full_finished()
        if self.builder.full or self.builder.stored_bytes_estimate >= self._settings.container.target_bytes:
            if not self._sets_aside:
                return self.flush()
            self._full = self.builder
            self._full.close()
            self.builder = self._new_builder(self._full.ratio)
        return finished

    def _full_finished(self) -> tuple[FinishedContainer, ...]:
        full, self._full = self._full, None
        return () if full is None else (full.finish(),)

    def flush(self) -> tuple[FinishedContainer, ...]:
        """Finish what is open, if anything is."""
        finished = self._full_finished()
        if self.builder.empty:
            return finished
        finished = (*finished, self.builder.finish())
        self.builder = self._new_builder(self.builder.ratio)
        return finished

    def _patches(self, batch: PairedBatch, rows: NDArray[np.intp], chosen: Chosen, bases: Contents) -> Encodings:
        """Return the fresh chunks for blocks that are encoded whole, with all their bases."""
        segments = batch.fresh.batch
        lengths, found = segments.lengths[rows], chosen.found
        best, ranks = _best_bases(chosen, bases)
        used = chosen.rows
        return Encodings(
            segments.names[rows],
            lengths,
            np.where(found, chosen.depths + np.uint8(1), np.uint8(0)).astype(np.uint8),
            (segments.payload, np.zeros(0, np.uint8)),
            np.zeros(len(rows), np.int32),
            segments.offsets[rows],
            lengths,
            best,
            ranks,
            Prefixes(
                chosen.bounds, bases.locations.take(used), bases.payload, bases.offsets[used], bases.lengths[used]
            ),
        )

    def _deltas(self, batch: PairedBatch, rows: NDArray[np.intp], chosen: Chosen, bases: Contents) -> Encodings:
        """Return the fresh chunks as they will be written: each with a base as a delta, where that is smaller."""
        segments = batch.fresh.batch
        tried = np.flatnonzero(chosen.found)
        first = chosen.rows[chosen.bounds[tried]]
        pairs = Pairs(
            segments.payload,
            segments.offsets[rows[tried]],
            segments.lengths[rows[tried]],
            bases.payload,
            bases.offsets[first],
            bases.lengths[first],
        )
        deltas = self._encode(pairs, pairs.target_lengths) if len(pairs) else _no_deltas()
        kept = np.flatnonzero(keep_delta(pairs.targets, pairs.target_offsets, pairs.target_lengths, deltas.lengths))
        check_round_trip(pairs, deltas, kept)
        as_delta = tried[kept]
        lengths = segments.lengths[rows]
        depths, which = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.int32)
        offsets, encoded = segments.offsets[rows], lengths.copy()
        best, ranks = Locations.empty(len(rows)), np.zeros(len(rows), np.uint8)
        depths[as_delta] = bases.depths[first[kept]] + 1
        which[as_delta] = 1
        offsets[as_delta], encoded[as_delta] = deltas.offsets[kept], deltas.lengths[kept]
        found, found_ranks = _best_bases(chosen, bases)
        best.containers[as_delta], best.ordinals[as_delta] = found.containers[as_delta], found.ordinals[as_delta]
        ranks[as_delta] = found_ranks[as_delta]
        return Encodings(
            segments.names[rows],
            lengths,
            depths,
            (segments.payload, deltas.payload),
            which,
            offsets,
            encoded,
            best,
            ranks,
        )

    def _segments(self, batch: PairedBatch, chunks: Locations) -> tuple[Locations, Bools, U8, Locations]:
        """Write the recipes of new segments; return (all segments' locations, known, new ids, new locations)."""
        fresh, segments = batch.fresh, batch.fresh.batch
        first = first_occurrence(segments.segment_ids)
        introduced = ~fresh.segment_known & (first == np.arange(len(first)))
        counts = np.diff(segments.chunk_bounds)
        of_chunk = np.repeat(introduced, counts)
        new = np.flatnonzero(introduced)
        located = self.builder.add_segments(
            segments.segment_ids[new], counts[new].astype(np.uint32), batch.sketch, chunks.take(of_chunk)
        )
        result = Locations(fresh.segment_locations.containers.copy(), fresh.segment_locations.ordinals.copy())
        result.containers[new], result.ordinals[new] = located.containers, located.ordinals
        repeated = ~fresh.segment_known & ~introduced
        origin = first[repeated]
        result.containers[repeated], result.ordinals[repeated] = result.containers[origin], result.ordinals[origin]
        return result, ~introduced, segments.segment_ids[new], located


def _targets(batch: PairedBatch) -> Targets:
    rows, segments = batch.fresh.fresh, batch.fresh.batch
    return Targets(segments.payload, segments.offsets[rows], segments.lengths[rows])


def _best_bases(chosen: Chosen, bases: Contents) -> tuple[Locations, U8]:
    """Return (location, rank) of the best base of each chunk, zeros where it has none."""
    locations, ranks = Locations.empty(len(chosen.found)), np.zeros(len(chosen.found), np.uint8)
    mine = np.flatnonzero(chosen.found)
    first = chosen.rows[chosen.bounds[mine]]
    locations.containers[mine], locations.ordinals[mine] = (
        bases.locations.containers[first],
        bases.locations.ordinals[first],
    )
    ranks[mine] = chosen.ranks[mine]
    return locations, ranks


def _no_deltas() -> Deltas:
    return Deltas(np.zeros(0, np.uint8), np.zeros(0, np.uint64), np.zeros(0, np.uint32))
