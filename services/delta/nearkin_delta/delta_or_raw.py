"""Arbiter. Invariant: a chunk is kept as a delta only where that is estimated to store fewer bytes than raw.

The estimate compares what the block compressor would make of each: of the raw chunk by a quick LZ pass, less what its
neighbours in the block give away; of the delta by its length, since VCDIFF of similar chunks is mostly literals and
addresses that compress little.
"""

from __future__ import annotations

import numpy as np

from nearkin_shared.kernels.size_estimate import compressed_bytes_estimate
from nearkin_shared.types import U8, U32, U64, Bools

DELTA_SHRINKS = 0.55
"""What zstd makes of a block of deltas, on average: 0.5 to 0.6 on botocore and the Redis dumps."""
RAW_CONTEXT = 0.6
"""What a raw chunk takes in a block of megabytes, against its estimate alone: 0.55 to 0.7."""


CLEAR_GAIN = 48
"""A delta below 1/48 of its chunk is kept unseen: raw JSON, the most compressible of the corpora, stops at 1/30."""


def keep_delta(payload: U8, offsets: U64, lengths: U32, delta_lengths: U32) -> Bools:
    """Return which chunks are better kept as their delta; a delta length of 0 means that there is none."""
    kept: Bools = (delta_lengths > 0) & (delta_lengths.astype(np.uint64) * CLEAR_GAIN < lengths)
    rows = np.flatnonzero(~kept & (delta_lengths > 0))
    raw = compressed_bytes_estimate(payload, offsets[rows], lengths[rows]).astype(np.float64) * RAW_CONTEXT
    kept[rows] = delta_lengths[rows] * DELTA_SHRINKS < raw
    return kept
