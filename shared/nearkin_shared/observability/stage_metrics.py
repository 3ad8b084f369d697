# size: the metrics that two stages share
"""Count the decisions of stages.

Invariant: each chunk of a batch counts once, by the reason why it was not stored.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.formats.container_layout import LOCALITY_RANK
from nearkin_shared.formats.directory import Directory
from nearkin_shared.observability import counters
from nearkin_shared.types import FreshBatch

LEVELS = ("fresh", "segment", "chunk", "batch", "zero")
"""fresh: must be stored. segment: its segment is known. chunk: it is. batch: a copy is in the same batch. zero: all."""
POLICIES = ("none", "first-fit", "locality")


def count_fresh(found: FreshBatch) -> None:
    """Count a batch that dedup has decided."""
    batch = found.batch
    per_segment = np.diff(batch.chunk_bounds)
    level = np.full(len(batch.lengths), LEVELS.index("batch"), np.uint8)
    level[found.fresh] = LEVELS.index("fresh")
    level[found.chunk_known & (found.chunk_locations.containers != 0)] = LEVELS.index("chunk")
    level[batch.zero] = LEVELS.index("zero")
    level[np.repeat(found.segment_known, per_segment)] = LEVELS.index("segment")
    chunks = np.bincount(level, minlength=len(LEVELS))
    sizes = np.bincount(level, batch.lengths, len(LEVELS))
    for number, name in enumerate(LEVELS):
        counters.DEDUP_CHUNKS.add(int(chunks[number]), name)
        counters.DEDUP_BYTES.add(int(sizes[number]), name)
    known = int(np.count_nonzero(found.segment_known))
    counters.DEDUP_SEGMENTS.add(known, "segment")
    counters.DEDUP_SEGMENTS.add(batch.segments - known, "fresh")


def count_sealed(directory: Directory) -> None:
    """Count the chunks of a container that was stored."""
    chunks = directory.chunks
    policy = np.where(chunks.ranks == LOCALITY_RANK, POLICIES.index("locality"), POLICIES.index("first-fit"))
    policy[chunks.depths == 0] = POLICIES.index("none")
    counts = np.bincount(policy, minlength=len(POLICIES))
    sizes = np.bincount(policy, chunks.lengths, len(POLICIES))
    for number, name in enumerate(POLICIES):
        counters.BASE_CHUNKS.add(int(counts[number]), name)
        counters.BASE_BYTES.add(int(sizes[number]), name)
    for depth, times in enumerate(np.bincount(chunks.depths).tolist()):
        if times:
            counters.DEPTH.add(depth, times=times)
