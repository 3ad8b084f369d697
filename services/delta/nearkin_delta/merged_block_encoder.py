"""Blocks of several versions. Invariant: one search sees all of a block, and what is written has been decoded again.

Written by the maintenance service beside everything else, and once for many versions: so a level deeper than at a put.
"""

from __future__ import annotations

from backports.zstd import CompressionParameter

from nearkin_delta.compression_params import log_of
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, encode_block, encode_patch
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.types import U8

LEVEL_MIN = 5
"""Whatever the settings say: of many versions a shallow search finds little."""
TABLE_LOG_MAX = 22
"""Tables of as many entries as a block has bytes, up to 4 million: 16 MiB each."""


def encode_merged(raw: U8, prefix: U8 | None, depth: int, level: int, encoder: FrameEncoder) -> EncodedBlock:
    """Return a block, a patch of `prefix` where there is one. Raises Corrupt where it does not decode again.

    An `encoder` keeps its tables for the next block: to touch 40 MB of new ones takes 5 to 20 ms.
    """
    reach = len(raw) + (0 if prefix is None else len(prefix))
    log = log_of(reach)
    options: dict[int, int] = {
        CompressionParameter.compression_level: max(level, LEVEL_MIN),
        CompressionParameter.content_size_flag: 1,
        CompressionParameter.window_log: log,
        CompressionParameter.hash_log: min(log, TABLE_LOG_MAX),
        CompressionParameter.chain_log: min(log, TABLE_LOG_MAX),
    }
    if prefix is None:
        return encode_block(raw, container_layout.RAW, 0, encoder, options)
    return encode_patch(raw, prefix, depth, encoder, options)
