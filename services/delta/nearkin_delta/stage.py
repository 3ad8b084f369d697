"""Delta stage. Invariant: the index is asked again before a chunk is stored (I5); every kept delta was decoded (I7).

recheck -> encode -> arbitrate -> place in the open container -> recipes -> seal when it is full
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nearkin.claims import SealedContainer
from nearkin.config import Settings
from nearkin.kernels.nametable import first_occurrence
from nearkin.records import U8, U32, U64, ZERO, Bools, Locations, PairedBatch
from nearkin.stage import Contents, Facts, Reads
from nearkin_delta.arbiter import keep_delta
from nearkin_delta.builder import ContainerBuilder, Encodings, new_container_id
from nearkin_delta.codecs import Deltas, Pairs, check_round_trip, codec


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
    """The batch's effects: `segments` in stream order with their `blobs`; containers that are full, in order."""

    placed: Placed
    blobs: U32
    segments: Locations
    segment_known: Bools
    counts: ChunkCounts
    sealed: tuple[SealedContainer, ...] = field(default_factory=tuple)


class DeltaStage:
    """Encodes and places. Holds one open container: what is not yet sealed is forgotten with the process, by design."""

    name = "delta"

    def __init__(
        self, settings: Settings, domain: bytes, last_container: int, *, asks_bases_again: bool = False
    ) -> None:
        """`asks_bases_again`: the resemblance stage runs elsewhere, and may not have seen what this stage placed."""
        self._settings = settings
        self._asks_bases_again = asks_bases_again
        self._domain = domain
        self._last = last_container
        self._kind, self._encode = codec(settings.delta)
        self.builder = self._new_builder()

    def _new_builder(self) -> ContainerBuilder:
        container = new_container_id(self._last)
        self._last = container
        return ContainerBuilder(
            container, self._domain, self._settings.block, self._settings.delta.max_depth, self._kind
        )

    def reads(self, batch: PairedBatch, facts: Facts) -> Reads | None:
        """Ask for the fresh chunks once more, then for the bytes of the bases of those that are still unknown."""
        rows = batch.fresh.fresh
        if facts.chunks is None:
            names = batch.fresh.batch.names[rows]
            if self._asks_bases_again and len(rows):
                return Reads(names=names, sketch=batch.sketch, super_features=batch.super_features[~batch.base_found])
            return Reads(names=names)
        if facts.contents is None:
            paired = _with_bases(batch, facts)
            return Reads(contents=paired.bases.take(paired.base_found & ~facts.chunks.found))
        return None

    def decide(self, batch: PairedBatch, facts: Facts) -> DeltaOutcome:
        """Store what is still fresh; fold in the rest."""
        assert facts.chunks is not None
        assert facts.contents is not None
        batch = _with_bases(batch, facts)
        fresh, segments = batch.fresh, batch.fresh.batch
        still = ~facts.chunks.found
        rows = fresh.fresh[still]
        candidates = np.flatnonzero(batch.base_found[still])
        encodings = self._encodings(batch, rows, candidates, still, facts.contents)
        placed = self.builder.add(encodings)

        locations = Locations(fresh.chunk_locations.containers.copy(), fresh.chunk_locations.ordinals.copy())
        zero = segments.zero
        locations.containers[zero], locations.ordinals[zero] = ZERO, segments.lengths[zero]
        folded = fresh.fresh[~still]
        locations.containers[folded] = facts.chunks.locations.containers[~still]
        locations.ordinals[folded] = facts.chunks.locations.ordinals[~still]
        locations.containers[rows], locations.ordinals[rows] = placed.containers, placed.ordinals
        repeated = fresh.first != np.arange(len(fresh.first))
        first = fresh.first[repeated]
        locations.containers[repeated], locations.ordinals[repeated] = (
            locations.containers[first],
            locations.ordinals[first],
        )

        eligible = encodings.depths < self._settings.delta.max_depth
        super_features = batch.super_features[still][eligible]
        base_chunks = placed.take(eligible)
        self.builder.add_super_features(batch.sketch, base_chunks.ordinals, super_features)
        segment_locations, known, new_ids, new_segments = self._segments(batch, locations)
        stored = np.zeros(len(segments.lengths), np.bool_)
        stored[rows] = True
        delta, delta_bytes = np.zeros(len(stored), np.bool_), np.zeros(len(stored), np.uint32)
        delta[rows] = encodings.depths > 0
        delta_bytes[rows] = np.where(encodings.depths > 0, encodings.encoded, 0)
        sealed: tuple[SealedContainer, ...] = ()
        if self.builder.full or self.builder.stored_bytes_estimate >= self._settings.container.target_bytes:
            sealed = self.flush()
        return DeltaOutcome(
            Placed(encodings.names, placed, batch.sketch, base_chunks, super_features, new_ids, new_segments),
            segments.blobs,
            segment_locations,
            known,
            ChunkCounts(
                np.repeat(segments.blobs, np.diff(segments.chunk_bounds)),
                segments.lengths,
                ~stored,
                zero,
                delta,
                delta_bytes,
            ),
            sealed,
        )

    def flush(self) -> tuple[SealedContainer, ...]:
        """Seal what is open, if anything is."""
        if self.builder.empty:
            return ()
        sealed = self.builder.seal()
        self.builder = self._new_builder()
        return (sealed,)

    def _encodings(
        self, batch: PairedBatch, rows: NDArray[np.intp], candidates: NDArray[np.intp], still: Bools, bases: Contents
    ) -> Encodings:
        """Return the fresh chunks as they will be written. `candidates` are the rows (of `rows`) with a base to try."""
        segments = batch.fresh.batch
        usable = bases.available & (bases.depths < self._settings.delta.max_depth) & (bases.lengths > 0)
        tried = candidates[usable]
        pairs = Pairs(
            segments.payload,
            segments.offsets[rows[tried]],
            segments.lengths[rows[tried]],
            bases.payload,
            bases.offsets[usable],
            bases.lengths[usable],
        )
        deltas = self._encode(pairs, pairs.target_lengths) if len(pairs) else _no_deltas()
        kept = np.flatnonzero(keep_delta(pairs.targets, pairs.target_offsets, pairs.target_lengths, deltas.lengths))
        check_round_trip(pairs, deltas, kept)
        as_delta = tried[kept]
        lengths = segments.lengths[rows]
        depths, which = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.int32)
        offsets, encoded = segments.offsets[rows], lengths.copy()
        chosen, ranks = Locations.empty(len(rows)), np.zeros(len(rows), np.uint8)
        depths[as_delta] = bases.depths[usable][kept] + 1
        which[as_delta] = 1
        offsets[as_delta], encoded[as_delta] = deltas.offsets[kept], deltas.lengths[kept]
        found, found_rank = batch.bases.take(still), batch.base_rank[still]
        chosen.containers[as_delta], chosen.ordinals[as_delta] = found.containers[as_delta], found.ordinals[as_delta]
        ranks[as_delta] = found_rank[as_delta]
        return Encodings(
            segments.names[rows],
            lengths,
            depths,
            (segments.payload, deltas.payload),
            which,
            offsets,
            encoded,
            chosen,
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


def _with_bases(batch: PairedBatch, facts: Facts) -> PairedBatch:
    """Return `batch` with the bases that were found when they were asked for again."""
    if facts.bases is None:
        return batch
    asked = np.flatnonzero(~batch.base_found)
    found, bases, ranks = batch.base_found.copy(), batch.bases, batch.base_rank.copy()
    bases = Locations(bases.containers.copy(), bases.ordinals.copy())
    found[asked], ranks[asked] = facts.bases.found, facts.bases.ranks
    bases.containers[asked] = facts.bases.locations.containers
    bases.ordinals[asked] = facts.bases.locations.ordinals
    return replace(batch, base_found=found, bases=bases, base_rank=ranks)


def _no_deltas() -> Deltas:
    return Deltas(np.zeros(0, np.uint8), np.zeros(0, np.uint64), np.zeros(0, np.uint32))
