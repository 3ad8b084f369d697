"""Delta stage: recheck fresh chunks, choose bases, encode, and add to the open container.

recheck -> bases -> encode -> delta or raw -> add to the open container -> recipes -> finish it when it is full

Invariant: the index is asked again before a chunk is stored (I5); every kept delta was decoded (I7).
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
from nearkin_delta.codecs import Deltas, check_round_trip, codec, keep_delta, pairs_with
from nearkin_delta.container_builder import ContainerBuilder, Encodings, Prefixes, new_container_id
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
    """Entries that only this process may use until the container is durable and published."""

    names: U8
    chunks: Locations
    sketch: str
    base_chunks: Locations
    super_features: U64
    segment_ids: U8
    segments: Locations


@frozen
class ChunkCounts:
    """Outcome of each chunk of the batch, in bytes as the ledger needs them.

    `blobs` uint32[n].
    """

    blobs: U32
    lengths: U32
    duplicate: Bools
    zero: Bools
    delta: Bools
    delta_bytes: U32


@frozen
class DeltaOutcome:
    """Effects of a batch: `segments` in stream order, and finished containers."""

    placed: PendingContainer
    blobs: U32
    segments: Locations
    segment_known: Bools
    counts: ChunkCounts
    finished: tuple[FinishedContainer, ...] = field(default_factory=tuple)


PENDING_BYTES_MAX = 16 * MIB
"""A larger container is finished at once: else it would be in memory twice, for an encoder that is busy anyway."""
NOTHING_FRESH = FoundLocations(Locations.empty(), np.zeros(0, np.bool_))


@frozen
class StageResources:
    """Threads and memory that a delta stage may use.

    `encoding`: threads that encode the blocks of one batch while the next is read and looked up. `finishes_later`: a
    full container is finished a batch later, so that these threads need not be waited for. `cache`: keeps decoded
    blocks for later batches. `prefixes`: memory of an earlier stage. `helpers` try bases concurrently with the caller.
    """

    encoding: Executor | None = None
    finishes_later: bool = False
    cache: DecodedBlockCache | None = None
    prefixes: SparePrefixes | None = None
    helpers: ThreadPool = SERIAL


class DeltaStage:
    """Encodes chunks into one open container, which is lost with the process, by design."""

    name = "delta"

    def __init__(
        self,
        settings: Settings,
        domain: bytes,
        last_container: int,
        *,
        asks_bases: AsksBases = "never",
        resources: StageResources | None = None,
    ) -> None:
        """`last_container`: new container ids are above it; `asks_bases`: see AsksBases."""
        resources = StageResources() if resources is None else resources
        self._settings = settings
        self._domain = domain
        self._last = last_container
        self._kind, self._encode = codec(settings.delta)
        self._finder = BaseFinder(settings, self._kind, asks_bases, resources.helpers)
        self.stream: Hashable = None
        """Stream of the batches, if one stage serves several; each blob of each stream is tracked separately."""
        chunk_bytes = int(settings.chunker.max_bytes)
        self._closer = BlockCloser(settings.block, resources.encoding, resources.cache, resources.prefixes, chunk_bytes)
        self.builder = self._new_builder((1, 2))
        self._finishes_later = resources.finishes_later and int(settings.container.target_bytes) <= PENDING_BYTES_MAX
        self._full: ContainerBuilder | None = None
        """A full container whose last blocks are encoded during the next batch."""

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

    def seek_bases(self, *, is_on: bool) -> None:
        """Seek bases for the chunks of the next batches, or store these as they are."""
        self._finder.is_on = is_on

    def begin(self) -> None:
        """Renew the id of an empty open container, since the id determines its age."""
        if self.builder.empty:
            self.builder = self._new_builder(self.builder.ratio)

    @property
    def open(self) -> tuple[ContainerBuilder, ...]:
        """Return the unfinished containers."""
        return (self.builder,) if self._full is None else (self._full, self.builder)

    @property
    def _here(self) -> StreamMark:
        return StreamMark(self.builder.container, self.builder.chunks, self.builder.segments)

    def reads(self, batch: PairedBatch, facts: LookupResults) -> LookupRequest | None:
        """Return the next request until the bases of the fresh chunks are known."""
        return self._finder.reads(batch, facts, self.stream, self._here)

    def decide(self, batch: PairedBatch, facts: LookupResults) -> DeltaOutcome:
        """Store the chunks that are still fresh and return the locations of all."""
        known = facts.chunks or NOTHING_FRESH
        self.builder.next_batch()
        batch = self._finder.with_bases(batch, facts)
        fresh, segments = batch.fresh, batch.fresh.batch
        is_fresh = ~known.found
        rows = fresh.fresh[is_fresh]
        chosen, bases = self._finder.choose(batch, facts, self.stream)
        chosen = only(chosen, is_fresh)
        encode = self._patch_encodings if self._kind == PATCH else self._delta_encodings
        encodings = encode(batch, rows, chosen, bases)
        placed = self.builder.add(encodings)
        self.builder.advance_stream(segments.logical_bytes)

        locations = Locations(fresh.chunk_locations.containers.copy(), fresh.chunk_locations.ordinals.copy())
        zero = segments.zero
        locations.containers[zero], locations.ordinals[zero] = ZERO, segments.lengths[zero]
        folded = fresh.fresh[~is_fresh]
        locations.containers[folded] = known.locations.containers[~is_fresh]
        locations.ordinals[folded] = known.locations.ordinals[~is_fresh]
        locations.containers[rows], locations.ordinals[rows] = placed.containers, placed.ordinals
        repeated = fresh.first != np.arange(len(fresh.first))
        first = fresh.first[repeated]
        locations.containers[repeated], locations.ordinals[repeated] = (
            locations.containers[first],
            locations.ordinals[first],
        )

        eligible = encodings.depths < self._finder.depth_bound
        super_features = batch.super_features[is_fresh][eligible]
        base_chunks = placed.take(eligible)
        self.builder.add_super_features(batch.sketch, base_chunks.ordinals, super_features)
        segment_locations, segment_known, new_ids, new_segments = self._add_recipes(batch, locations)
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
        """Return the outcome of a batch of known segments only, without lookups and encoding."""
        segments = fresh.batch
        self.builder.next_batch()
        self._finder.pass_known(fresh, self.stream, self._here)
        self.builder.advance_stream(segments.logical_bytes)
        no_chunk, no_locations = np.zeros(len(segments.lengths), np.bool_), Locations.empty()
        return DeltaOutcome(
            PendingContainer(
                np.zeros((0, NAME_BYTES), np.uint8),
                no_locations,
                sketch,
                no_locations,
                np.zeros((0, 0), np.uint64),
                np.zeros((0, SEGMENT_ID_BYTES), np.uint8),
                no_locations,
            ),
            segments.blobs,
            fresh.segment_locations,
            fresh.segment_known,
            ChunkCounts(
                np.repeat(segments.blobs, np.diff(segments.chunk_bounds)),
                segments.lengths,
                ~no_chunk,
                segments.zero,
                no_chunk,
                np.zeros(len(no_chunk), np.uint32),
            ),
            self._finish_full(),
        )

    def _finish_batch(self) -> tuple[FinishedContainer, ...]:
        """Finish the container that was full before this batch; close one that it has filled.

        Contents and depths of the latter are unchanged until it is finished.
        """
        finished = self._finish_full()
        if self.builder.full or self.builder.stored_bytes_estimate >= self._settings.container.target_bytes:
            if not self._finishes_later:
                return self.flush()
            self._full = self.builder
            self._full.close()
            self.builder = self._new_builder(self._full.ratio)
        return finished

    def _finish_full(self) -> tuple[FinishedContainer, ...]:
        full, self._full = self._full, None
        return () if full is None else (full.finish(),)

    def flush(self) -> tuple[FinishedContainer, ...]:
        """Finish all open containers that hold anything."""
        finished = self._finish_full()
        if self.builder.empty:
            return finished
        finished = (*finished, self.builder.finish())
        self.builder = self._new_builder(self.builder.ratio)
        return finished

    def _patch_encodings(
        self, batch: PairedBatch, rows: NDArray[np.intp], chosen: BaseChoice, bases: Contents
    ) -> Encodings:
        """Return the fresh chunks for patch blocks, with all their bases."""
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

    def _delta_encodings(
        self, batch: PairedBatch, rows: NDArray[np.intp], chosen: BaseChoice, bases: Contents
    ) -> Encodings:
        """Return the fresh chunks, each as a delta where that is smaller."""
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

    def _add_recipes(self, batch: PairedBatch, chunks: Locations) -> tuple[Locations, Bools, U8, Locations]:
        """Add the recipes of new segments.

        Return (locations of all, known, new ids, new locations).
        """
        fresh, segments = batch.fresh, batch.fresh.batch
        first = first_occurrence(segments.segment_ids)
        is_new = ~fresh.segment_known & (first == np.arange(len(first)))
        counts = np.diff(segments.chunk_bounds)
        is_new_row = np.repeat(is_new, counts)
        new_rows = np.flatnonzero(is_new)
        located = self.builder.add_segments(
            segments.segment_ids[new_rows], counts[new_rows].astype(np.uint32), batch.sketch, chunks.take(is_new_row)
        )
        result = Locations(fresh.segment_locations.containers.copy(), fresh.segment_locations.ordinals.copy())
        result.containers[new_rows], result.ordinals[new_rows] = located.containers, located.ordinals
        repeated = ~fresh.segment_known & ~is_new
        origin = first[repeated]
        result.containers[repeated], result.ordinals[repeated] = result.containers[origin], result.ordinals[origin]
        return result, ~is_new, segments.segment_ids[new_rows], located


def _best_bases(chosen: BaseChoice, bases: Contents) -> tuple[Locations, U8]:
    """Return (location, rank) of the best base of each chunk, zeros for none."""
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
