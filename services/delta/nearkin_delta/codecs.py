"""Delta codecs by name. Invariant: a delta that leaves here has been decoded and compared (I7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.config.reduction import DeltaSettings
from nearkin_shared.errors import Corrupt, choose
from nearkin_shared.formats.container_layout import PATCH, XDELTA3
from nearkin_shared.kernels import xdelta3
from nearkin_shared.kernels.scatter_copy import gather_new
from nearkin_shared.types import U8, U32, U64, Pieces, offsets_of
from nearkin_shared.utils.frozen import frozen


@frozen
class Pairs:
    """Targets and bases, each cut out of one buffer by offsets and lengths; row i of both is one pair."""

    targets: U8
    target_offsets: U64
    target_lengths: U32
    bases: U8
    base_offsets: U64
    base_lengths: U32

    def __len__(self) -> int:
        return len(self.target_lengths)


def pairs_with(targets: U8, target_offsets: U64, target_lengths: U32, bases: Pieces) -> Pairs:
    """Return pairs of targets in one buffer with bases that lie in several: they are copied together, each once."""
    places = bases.which.astype(np.uint64) << np.uint64(32) | bases.offsets  # a buffer is one block, or one batch
    _, first, again = np.unique(places, return_index=True, return_inverse=True)
    once = bases.take(first)
    payload = gather_new(once.buffers, once.which, once.offsets, once.lengths)
    offsets = offsets_of(once.lengths)[again]
    return Pairs(targets, target_offsets, target_lengths, payload, offsets, once.lengths[again])


@frozen
class Deltas:
    """Encoded pairs, one after another; length 0 where the delta would exceed its limit."""

    payload: U8
    offsets: U64
    lengths: U32


Encode = Callable[[Pairs, U32], Deltas]
"""(pairs, limit of each in bytes) -> deltas."""


def xdelta3_encoder(level: int) -> Encode:
    """Return the encoder of VCDIFF deltas, by xdelta3 at `level`."""

    def encode(pairs: Pairs, limits: U32) -> Deltas:
        payload, lengths = xdelta3.encode_many(
            pairs.targets,
            pairs.target_offsets,
            pairs.target_lengths,
            pairs.bases,
            pairs.base_offsets,
            pairs.base_lengths,
            level=level,
            limit_bytes=limits,
        )
        return Deltas(payload, offsets_of(lengths), lengths)

    return encode


def _no_encoder(level: int) -> Encode:
    def encode(pairs: Pairs, limits: U32) -> Deltas:
        return Deltas(np.zeros(0, np.uint8), np.zeros(len(pairs), np.uint64), np.zeros(len(pairs), np.uint32))

    return encode


CODECS: Mapping[str, tuple[int, Callable[[int], Encode]]] = {
    "xdelta3": (XDELTA3, xdelta3_encoder),
    "patch": (PATCH, _no_encoder),  # whole blocks are encoded: block_encoder.py
    "none": (XDELTA3, _no_encoder),
}
NAMES = tuple(CODECS)


def codec(settings: DeltaSettings) -> tuple[int, Encode]:
    """Return (block kind, encoder of single chunks) of the codec named. Raises ConfigError listing the known names."""
    if settings.codec not in CODECS:
        raise choose("delta.codec", settings.codec, NAMES)
    kind, make = CODECS[settings.codec]
    return kind, make(settings.level)


def check_round_trip(pairs: Pairs, deltas: Deltas, kept: NDArray[np.intp]) -> None:
    """Decode the deltas of rows `kept` and compare with their targets. Raises Corrupt: memory or the library failed."""
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
        raise Corrupt("a delta just encoded does not decode to its chunk: check this machine's memory")
