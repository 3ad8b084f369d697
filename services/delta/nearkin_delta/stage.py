"""Delta stage. Invariant: the index is asked again before a chunk is stored (I5); every kept delta was decoded (I7).

recheck -> bases -> encode -> arbitrate -> place in the open container -> recipes -> finish it when it is full
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Executor
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from nearkin_delta.base_choice import BaseChoice, only
from nearkin_delta.base_search import AsksBases, BaseFinder
from nearkin_delta.block_encoder import BlockCloser, DecodedBlockCache, SparePrefixes
from nearkin_delta.codecs import Deltas, check_round_trip, codec, pairs_with
from nearkin_delta.container_builder import ContainerBuilder, Encodings, Prefixes, new_container_id
from nearkin_delta.delta_or_raw import keep_delta
from nearkin_delta.finished_container import FinishedContainer
from nearkin_delta.gap_alignment import StreamMark
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.container_layout import PATCH
from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.limits import MIB
from nearkin_shared.pipeline.stage import Contents, FoundLocations, LookupRequest, LookupResults
from nearkin_shared.types import (
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
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.thread_pool import SERIAL, ThreadPool


@frozen
class PendingContainer:
    """What may be found from now on by this process alone; the index hears of it when the container is durable."""

    names: U8
    chunks: Locations
    sketch: str
    base_chunks: Locations
    super_features: U64
    segment_ids: U8
    segments: Locations


@frozen
class ChunkCounts:
    """Per chunk of the batch: what became of it. `blobs` uint32[n]; bytes as the ledger wants them."""

    blobs: U32
    lengths: U32
    duplicate: Bools
    zero: Bools
    delta: Bools
    delta_bytes: U32


@frozen
class DeltaOutcome:
    """The batch's effects: `segments` in stream order with their `blobs`; containers that are finished, in order."""

    placed: PendingContainer
    blobs: U32
    segments: Locations
    segment_known: Bools
    counts: ChunkCounts
    finished: tuple[FinishedContainer, ...] = field(default_factory=tuple)


PENDING_BYTES_MAX = 16 * MIB
"""A container of more is finished at once: it would be held twice in memory for an encoder that is busy anyway."""
NOTHING_FRESH = FoundLocations(Locations.empty(), np.zeros(0, np.bool_))


class DeltaStage:
    """Encodes and places. Holds one open container: what is not yet put is forgotten with the process, by design."""

    name = "delta"

    def __init__(
        self,
        settings: Settings,
        domain: bytes,
        last_container: int,
        *,
        asks_bases: AsksBases = "never",
        encoding: Executor | None = None,
        sets_aside: bool = False,
        keeper: DecodedBlockCache | None = None,
        prefixes: SparePrefixes | None = None,
        helpers: ThreadPool = SERIAL,
    ) -> None:
        """`encoding`: threads that encode the blocks of one batch while the next is read and looked up.

        `sets_aside`: a full container is finished a batch later, so that such threads need not be waited for.
        `keeper`: keeps the bytes of blocks for batches to come. `prefixes`: memory of the stage before this one.
        `helpers` try bases beside the caller.
        """
        self._settings = settings
        self._domain = domain
        self._last = last_container
        self._kind, self._encode = codec(settings.delta)
        self._finder = BaseFinder(settings, self._kind, asks_bases, helpers)
        self.stream: Hashable = None
        """Whose batches these are, where one stage serves several: each blob of each stream is followed by itself."""
        chunk_bytes = int(settings.chunker.max_bytes)
        self._closer = BlockCloser(settings.block, settings.delta, encoding, keeper, prefixes, chunk_bytes)
        self.builder = self._new_builder((1, 2))
        self._sets_aside = sets_aside and int(settings.container.target_bytes) <= PENDING_BYTES_MAX
        self._full: ContainerBuilder | None = None
        """A container that takes no more, and whose last blocks are being encoded while the next batch is placed."""

    def _new_builder(self, ratio: tuple[int, int]) -> ContainerBuilder:
        container = new_container_id(self._last)
        self._last = container
        chosen = self._settings
        return ContainerBuilder(
            container,
            self._domain,
            chosen.block,
            chosen.delta,
            self._kind,
            self._finder.depth_bound,
            self._closer,
            ratio,
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
    def _here(self) -> StreamMark:
        return StreamMark(self.builder.container, self.builder.chunks, self.builder.segments)

    def reads(self, batch: PairedBatch, facts: LookupResults) -> LookupRequest | None:
        """Ask until the bases of the fresh chunks are known."""
        return self._finder.reads(batch, facts, self.stream, self._here)

    def decide(self, batch: PairedBatch, facts: LookupResults) -> DeltaOutcome:
        """Store what is still fresh; fold in the rest."""
        known = facts.chunks or NOTHING_FRESH
        self.builder.next_batch()
        batch = self._finder.with_bases(batch, facts)
        fresh, segments = batch.fresh, batch.fresh.batch
        still = ~known.found
        rows = fresh.fresh[still]
        chosen, bases = self._finder.choose(batch, facts, self.stream)
        chosen = only(chosen, still)
        encode = self._patches if self._kind == PATCH else self._deltas
        encodings = encode(batch, rows, chosen, bases)
        placed = self.builder.add(encodings)
        self.builder.advance_stream(segments.logical_bytes)

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

        eligible = encodings.depths < self._finder.depth_bound
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
        finished = self._finish_batch()
        return DeltaOutcome(
            PendingContainer(encodings.names, placed, batch.sketch, base_chunks, super_features, new_ids, new_segments),
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
        self.builder.next_batch()
        self._finder.pass_known(fresh, self.stream, self._here)
        self.builder.advance_stream(segments.logical_bytes)
        none, nowhere = np.zeros(len(segments.lengths), np.bool_), Locations.empty()
        return DeltaOutcome(
            PendingContainer(
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

    def _finish_batch(self) -> tuple[FinishedContainer, ...]:
        """Finish the container that was full before this batch, and set aside the one that it has filled.

        What is read of a container, and how deep it lies, is the same until then.
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

    def _patches(self, batch: PairedBatch, rows: NDArray[np.intp], chosen: BaseChoice, bases: Contents) -> Encodings:
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
            Prefixes(chosen.bounds, bases.locations.take(used), bases.pieces.take(used)),
            chosen.rest,
        )

    def _deltas(self, batch: PairedBatch, rows: NDArray[np.intp], chosen: BaseChoice, bases: Contents) -> Encodings:
        """Return the fresh chunks as they will be written: each with a base as a delta, where that is smaller."""
        segments = batch.fresh.batch
        tried = np.flatnonzero(chosen.found)
        first = chosen.rows[chosen.bounds[tried]]
        pairs = pairs_with(
            segments.payload, segments.offsets[rows[tried]], segments.lengths[rows[tried]], bases.pieces.take(first)
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


def _best_bases(chosen: BaseChoice, bases: Contents) -> tuple[Locations, U8]:
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
