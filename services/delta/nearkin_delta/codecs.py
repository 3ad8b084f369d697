"""Encode single chunks as deltas, by named codecs, where that stores less than raw.

Whether it does compares estimates: of the raw chunk by a fast LZ pass, less what neighbours in its block save; of the
delta by its length, since a VCDIFF of similar chunks is mostly literals and addresses that compress little.

Invariant (I7): a returned delta has been decoded and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.config.reduction import DeltaSettings
from nearkin_shared.errors import Corrupt, choose
from nearkin_shared.formats.container_layout import PATCH, XDELTA3
from nearkin_shared.kernels import xdelta3
from nearkin_shared.kernels.scatter_copy import gather_new
from nearkin_shared.kernels.size_estimate import compressed_bytes_estimate
from nearkin_shared.types import U8, U32, U64, Bools, Pieces, offsets_of
from nearkin_shared.utils.frozen import frozen

DELTA_SHRINKS = 0.55
"""Compressed share of a block of deltas, on average: 0.5 to 0.6 on botocore and the Redis dumps."""
RAW_CONTEXT = 0.6
"""Bytes of a raw chunk in a block of megabytes, relative to its estimate by itself: 0.55 to 0.7."""
CLEAR_GAIN = 48
"""A delta below 1/48 of its chunk is kept without an estimate: raw JSON, the most compressible corpus, takes 1/30."""


@frozen
class DeltaPairs:
    """Targets and bases as slices of one buffer each; row i of both is one pair."""

    targets: U8
    target_offsets: U64
    target_lengths: U32
    bases: U8
    base_offsets: U64
    base_lengths: U32

    def __len__(self) -> int:
        return len(self.target_lengths)


def pairs_with(targets: U8, target_offsets: U64, target_lengths: U32, bases: Pieces) -> DeltaPairs:
    """Return pairs of targets in one buffer with bases in several; each base is copied once."""
    places = bases.which.astype(np.uint64) << np.uint64(32) | bases.offsets  # a buffer is one block, or one batch
    _, first, again = np.unique(places, return_index=True, return_inverse=True)
    once = bases.take(first)
    payload = gather_new(once.buffers, once.which, once.offsets, once.lengths)
    offsets = offsets_of(once.lengths)[again]
    return DeltaPairs(targets, target_offsets, target_lengths, payload, offsets, once.lengths[again])


@frozen
class Deltas:
    """Encoded pairs, concatenated; length 0 where the delta would exceed its limit."""

    payload: U8
    offsets: U64
    lengths: U32


Encode = Callable[[DeltaPairs, U32], Deltas]
"""(pairs, limit of each in bytes) -> deltas."""


XDELTA3_LEVEL = 1
"""Compression level of xdelta3, the fastest: blocks of deltas are compressed once more, at `block.level`."""


def encode_xdelta3(pairs: DeltaPairs, limits: U32) -> Deltas:
    """Return VCDIFF deltas by xdelta3."""
    payload, lengths = xdelta3.encode_many(
        pairs.targets,
        pairs.target_offsets,
        pairs.target_lengths,
        pairs.bases,
        pairs.base_offsets,
        pairs.base_lengths,
        level=XDELTA3_LEVEL,
        limit_bytes=limits,
    )
    return Deltas(payload, offsets_of(lengths), lengths)


def _encode_none(pairs: DeltaPairs, limits: U32) -> Deltas:
    return Deltas(np.zeros(0, np.uint8), np.zeros(len(pairs), np.uint64), np.zeros(len(pairs), np.uint32))


CODECS: Mapping[str, tuple[int, Encode]] = {
    "xdelta3": (XDELTA3, encode_xdelta3),
    "patch": (PATCH, _encode_none),  # whole blocks are encoded: block_encoder.py
    "none": (XDELTA3, _encode_none),
}
NAMES = tuple(CODECS)


def codec(settings: DeltaSettings) -> tuple[int, Encode]:
    """Return (block kind, chunk encoder) of the named codec.

    Raises: ConfigError with the known names.
    """
    if settings.codec not in CODECS:
        raise choose("delta.codec", settings.codec, NAMES)
    return CODECS[settings.codec]


def check_round_trip(pairs: DeltaPairs, deltas: Deltas, kept: NDArray[np.intp]) -> None:
    """Decode the deltas of rows `kept` and compare.

    Raises: Corrupt if memory or the library failed.
    """
    if not len(kept):
        return
    decoded = xdelta3.decode_many(
        deltas.payload,
        deltas.offsets[kept],
        deltas.lengths[kept],
        pairs.bases,
        pairs.base_offsets[kept],
        pairs.base_lengths[kept],
        pairs.target_lengths[kept],
    )
    wanted = gather_new(
        [pairs.targets], np.zeros(len(kept), np.int32), pairs.target_offsets[kept], pairs.target_lengths[kept]
    )
    if not np.array_equal(decoded, wanted):
        raise Corrupt("a new delta does not decode to its chunk: memory or xdelta3 failed; test this machine's memory")


def keep_delta(payload: U8, offsets: U64, lengths: U32, delta_lengths: U32) -> Bools:
    """Return which chunks are better kept as their delta.

    A delta length of 0 means that there is none.
    """
    kept: Bools = (delta_lengths > 0) & (delta_lengths.astype(np.uint64) * CLEAR_GAIN < lengths)
    rows = np.flatnonzero(~kept & (delta_lengths > 0))
    raw = compressed_bytes_estimate(payload, offsets[rows], lengths[rows]).astype(np.float64) * RAW_CONTEXT
    kept[rows] = delta_lengths[rows] * DELTA_SHRINKS < raw
    return kept
