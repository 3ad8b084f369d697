"""Explain. Invariant: what it says is read from containers and the manifest, never guessed."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.catalog import finder_name
from nearkin_shared.reading.chunk_reader import ChunkReader
from nearkin_shared.reading.read_plan import Plan
from nearkin_shared.reading.restore import segment_chunks
from nearkin_shared.results import ChunkExplained, Explanation, SegmentExplained, VersionInfo
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import ZERO, ContainerId, Locations, group_by_container


def explain(info: VersionInfo, manifest: Manifest, source: ContainerSource) -> Explanation:
    """Return how each chunk of a version is kept. Only directories are read."""
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
        locations, _ = segment_chunks(location, source)  # first: it looks whether there is such a segment
        sketch = directory.sketch_names[directory.segments.sketches[ordinal]]
        fresh_from = _first_own(directory.segments.chunks, directory.segments.bounds, ordinal, holder)
        plan, bases = reader.plan_with_bases(locations)
        base = iter(bases.names)
        shares = _with_merged(_shares(plan, source), plan, bases, source).tolist()
        known = bool(manifest.known[sequence])
        chunks: list[ChunkExplained] = []
        for row in range(len(locations)):
            place = int(locations.containers[row]), int(locations.ordinals[row])
            is_delta = bool(plan.depths[row])
            base_name = next(base) if is_delta else None
            fresh = not known and place[0] == holder and place[1] >= fresh_from and place not in introduced
            kind = "zero" if place[0] == ZERO else "duplicate" if not fresh else "delta" if is_delta else "raw"
            if fresh:
                introduced.add(place)
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
                    fingerprint=plan.names[row, :20].tobytes().hex() if place[0] != ZERO else "",
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


def _with_merged(shares: NDArray[np.int64], plan: Plan, bases: Plan, source: ContainerSource) -> NDArray[np.int64]:
    """Return the rows' shares, of those that refer to what was gathered with their part of that."""
    deltas = np.flatnonzero(plan.depths > 0)
    refer = plan.ranks[deltas] == container_layout.REFERENCE_RANK
    rows, joined = deltas[refer], bases.take(refer)
    shares[rows] += _shares(joined, source) * plan.lengths[rows].astype(np.int64) // np.maximum(joined.lengths, 1)
    return shares


def _shares(plan: Plan, source: ContainerSource) -> NDArray[np.int64]:
    """Return each row's share of its block as stored, bytes, by its encoding's part of what the block decodes to."""
    shares = plan.encoded.astype(np.int64)
    stored = np.flatnonzero(plan.locations.containers != np.uint64(ZERO))
    for container, rows in group_by_container(plan.locations.containers[stored]):
        mine, blocks = stored[rows], source.directory(ContainerId(container)).blocks
        numbers = plan.blocks[mine]
        shares[mine] = shares[mine] * blocks.stored[numbers] // np.maximum(blocks.raw[numbers], 1)
    return shares


def _first_own(
    chunks: Locations, bounds: np.ndarray[tuple[int], np.dtype[np.uint32]], ordinal: int, holder: int
) -> int:
    """Return how many chunks of the holder earlier recipes have introduced: they come in stream order, from 0."""
    before = slice(0, int(bounds[ordinal]))
    own = chunks.ordinals[before][chunks.containers[before] == np.uint64(holder)]
    return int(own.max()) + 1 if len(own) else 0
