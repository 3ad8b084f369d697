"""Explain how each chunk of a version is stored.

Invariant: every statement is read from containers and the manifest; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import finder_name
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import ReadPlan
from nearkin_shared.reading.restore import segment_chunks
from nearkin_shared.results import ChunkExplained, Explanation, SegmentExplained, VersionInfo
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import ZERO, ContainerId, Locations, group_by_container


def explain(info: VersionInfo, manifest: Manifest, source: ContainerSource) -> Explanation:
    """Return how each chunk of a version is stored. Reads directories only."""
    reader = ChunkReader(source)
    segments: list[SegmentExplained] = []
    kinds: Counter[str] = Counter()
    found_by: Counter[str] = Counter()
    introduced: set[tuple[int, int]] = set()
    offset = 0
    for sequence in range(len(manifest.segments)):
        location = manifest.segments.take(slice(sequence, sequence + 1))
        holder = ContainerId(int(location.containers[0]))
        directory = source.directory(holder)
        ordinal = int(location.ordinals[0])
        locations, _ = segment_chunks(location, source)  # first, because it checks that the segment exists
        sketch = directory.sketch_names[directory.segments.sketches[ordinal]]
        first_fresh = _count_introduced(directory.segments.chunks, directory.segments.bounds, ordinal, holder)
        plan, bases = reader.plan_with_bases(locations)
        base = iter(bases.names)
        shares = _add_merged_shares(_shares(plan, source), plan, bases, source).tolist()
        known = bool(manifest.known[sequence])
        chunks: list[ChunkExplained] = []
        for row in range(len(locations)):
            location_key = int(locations.containers[row]), int(locations.ordinals[row])
            is_delta = bool(plan.depths[row])
            base_name = next(base) if is_delta else None
            fresh = (
                not known
                and location_key[0] == holder
                and location_key[1] >= first_fresh
                and location_key not in introduced
            )
            kind = "zero" if location_key[0] == ZERO else "duplicate" if not fresh else "delta" if is_delta else "raw"
            if fresh:
                introduced.add(location_key)
            finder = finder_name(int(plan.ranks[row])) if is_delta and fresh else None
            kinds[kind] += 1
            if finder:
                found_by[finder] += 1
            length = int(plan.lengths[row])
            chunks.append(
                ChunkExplained(
                    offset=offset,
                    length_bytes=length,
                    kind=kind,
                    fingerprint=plan.names[row, :20].tobytes().hex() if location_key[0] != ZERO else "",
                    depth=int(plan.depths[row]),
                    stored_estimate_bytes=shares[row] if fresh else 0,
                    base_fingerprint=base_name[:20].tobytes().hex() if base_name is not None else None,
                    found_by=finder,
                )
            )
            offset += length
        length_bytes = sum(chunk.length_bytes for chunk in chunks)
        segments.append(SegmentExplained(sequence, offset - length_bytes, length_bytes, known, tuple(chunks), sketch))
    return Explanation(
        info,
        tuple(segments),
        duplicate_chunks=kinds["duplicate"] + kinds["zero"],
        zero_chunks=kinds["zero"],
        delta_chunks=kinds["delta"],
        raw_chunks=kinds["raw"],
        found_by=dict(sorted(found_by.items())),
    )


def _add_merged_shares(
    shares: NDArray[np.int64], plan: ReadPlan, bases: ReadPlan, source: ContainerSource
) -> NDArray[np.int64]:
    """Return the shares of rows, with the parts of merged blocks that reference rows take."""
    deltas = np.flatnonzero(plan.depths > 0)
    is_reference = plan.ranks[deltas] == container_layout.REFERENCE_RANK
    rows, slices = deltas[is_reference], bases.take(is_reference)
    shares[rows] += _shares(slices, source) * plan.lengths[rows].astype(np.int64) // np.maximum(slices.lengths, 1)
    return shares


def _shares(plan: ReadPlan, source: ContainerSource) -> NDArray[np.int64]:
    """Return the share of each row in its block's stored bytes, int64[n].

    A row's share is the part of its encoding in the bytes that the block decodes to.
    """
    shares = plan.encoded.astype(np.int64)
    stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
    for container, rows in group_by_container(plan.locations.containers[stored]):
        container_rows, blocks = stored[rows], source.directory(ContainerId(container)).blocks
        numbers = plan.blocks[container_rows]
        shares[container_rows] = shares[container_rows] * blocks.stored[numbers] // np.maximum(blocks.raw[numbers], 1)
    return shares


def _count_introduced(
    chunks: Locations, bounds: np.ndarray[tuple[int], np.dtype[np.uint32]], ordinal: int, holder: int
) -> int:
    """Return how many chunks of the holder earlier recipes have introduced.

    Ordinals are assigned in stream order from 0.
    """
    earlier_rows = slice(0, int(bounds[ordinal]))
    own = chunks.ordinals[earlier_rows][chunks.containers[earlier_rows] == np.uint64(holder)]
    return int(own.max()) + 1 if len(own) else 0
