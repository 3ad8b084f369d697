"""Choose zstd parameters of raw blocks by measuring.

zstd's tables hold the last few MiB. Its long-distance matcher covers the whole block, but its matches take precedence
over closer ones, so that its settings matter:

    long     repeats of 256 bytes: saves 1.4 % of 30 MiB blocks of botocore's first release
    dense    repeats of 32 bytes, most of them: saves 8 % of the Redis dumps, whose keys and values repeat
             anywhere, and costs 7 % on botocore's JSON

    longer   `long` with matches of at least 6 bytes, where zstd takes 5: saves 2.1 % of the dumps and 0.5 %
             of botocore at level 9 and 30 MiB, where `dense` finds nothing more; Debian images profit from both

    plain    level 3, if samples are larger at a deeper search: in words of random order, as in generated
             text, the deep search finds longer matches at larger distances, and stores 2.5 % more

All are tried, and then the best one alone for some blocks. None costs a reader anything.

Invariant: the parameters of a block depend on real sizes, of itself or of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from backports.zstd import CompressionParameter

from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, encode_block
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.types import U8
from nearkin_shared.utils.frozen import frozen

FAR_BYTES_MIN = MIB
"""In a smaller block zstd's tables cover everything."""
TRIED_AGAIN_BLOCKS = 4
"""Number of blocks that use the result of a trial, the tried block included."""
LONG: Mapping[int, int] = {
    CompressionParameter.enable_long_distance_matching: 1,
    CompressionParameter.ldm_min_match: 256,
    CompressionParameter.ldm_hash_rate_log: 6,
    CompressionParameter.ldm_hash_log: 20,
}
"""Compared with this, a minimum match of 128 bytes costs 0.1 % of botocore, and 64 (zstd's default) 1 %."""
DENSE: Mapping[int, int] = {
    CompressionParameter.enable_long_distance_matching: 1,
    CompressionParameter.ldm_min_match: 32,
    CompressionParameter.ldm_hash_rate_log: 3,
    CompressionParameter.ldm_hash_log: 22,
}
"""One position in 8, 2^22 of them: all of 32 MiB. One in 16 costs 1 % of the dumps, 48 bytes 3 %."""
SEARCH_LOG: Mapping[int, int] = {9: 6}
"""At level 9, used by the profile `archive`, 64 candidates per position in place of 16. The first doubling saves 2.8 %
of botocore's raw blocks and 11 % of its patch blocks, 1.1 and 2 % of the dumps; the second 1.4 and 0.7 % of raw
blocks."""
RAW_HASH_LOG: Mapping[int, int] = {9: 23}
"""And a table of 2^24 entries for raw blocks in place of 2^22: a block of 30 MiB fits. Half of that saves 2.6 % of the
dumps and 0.7 % of a Debian image. For a patch block, clearing such a table costs more than it saves."""
QUICK_FOR = 3
QUICK: Mapping[int, int] = {CompressionParameter.compression_level: 2}
"""Level 1 with the table of 2 finds 7 bytes where this finds 6: 6 to 9 % faster, and stores 1 to 3 % more."""
SAMPLES = 4
SAMPLE_BYTES = 16 * KIB
PLAIN_SAMPLE_BYTES = 64 * KIB
"""Botocore, a dump and a Debian image are 4 to 42 % larger at level 3 from 32 to 512 KiB on: any sample shows it."""
SAMPLED: Mapping[int, int] = {CompressionParameter.compression_level: 1}
SAMPLED_BYTES_MIN = MIB
"""A smaller block is not sampled: it takes the configured level."""
HARD_SHARE = 4
"""At level 3, the default, a block whose samples compress to more than 1/4 (itself to more than 1/5) takes level 2. On
such data, unless it is text, level 3 saves up to 7 % more and takes 1.4 times as long (the first dump: 248 and 178
MB/s, decoded and compared; a Debian image: 392 and 279); on botocore, at 1/10, it saves 14 % at the same speed.

The samples predict 149 blocks of 150 (a Debian and a generated image, botocore, a dump). The previous block predicted
141, and had to be waited for."""
LAZY_LEVELS = range(6, 13)
LAZY_MIN_MATCH = 6
LAZY_BYTES_MIN = 3 * MIB
"""At these levels zstd's minimum match of 5 bytes hides longer matches: with 6 the search is 5 to 20 % faster, and
level 9 with 4 MiB saves 0.9 % of botocore and 0.5 % of a dump, and costs 0.1 % on a Debian image. In smaller blocks it
costs up to 2 % on a dump."""
TEXT_GAIN, LONG_TEXT_GAIN = 0.96, 0.92
"""A block between HARD_SHARE and HARDER_SHARES whose samples at level 3 are below TEXT_GAIN of their size at level 1 is
text and keeps level 3: its blocks are 5 to 14 % smaller than at level 2 and take 1.2 to 1.5 times as long. Samples of a
Debian image's programs are 1.0 or more: level 3 stores 3 to 8 % more of them."""
LONG_TEXT: Mapping[int, int] = {CompressionParameter.hash_log: 18, CompressionParameter.chain_log: 17}
"""Below LONG_TEXT_GAIN tables of twice zstd's default save 3 % more: 10,000 text files of 1 to 8 KiB take 13.1 MB, 13.6
at level 3 and 15.8 at level 2, at 1.4, 1.2 and 1.0 times the time."""
HARDER_SHARES = 0.5, 0.75
HARDER: Mapping[int, int] = {CompressionParameter.hash_log: 17}
"""Between these shares, as for a dump at 0.61, level 2 has a table of 2^17 in place of 2^16: 4.5 % fewer bytes at 0.85
of its speed. A tenth of a Debian image's blocks are between (0.3 % and 0.88); blocks above are incompressible."""
WINDOW_LOG_MIN, WINDOW_LOG_MAX = 10, 27
"""The maximum is what every zstd decoder accepts by default."""


def log_of(reach_bytes: int) -> int:
    """Return the window log for `reach_bytes`: the least power of two, within zstd's bounds."""
    return min(WINDOW_LOG_MAX, max(WINDOW_LOG_MIN, (reach_bytes - 1).bit_length()))


def deepen(level: int) -> dict[int, int]:
    """Return options for a deeper search than zstd's default at `level`."""
    return {CompressionParameter.search_log: SEARCH_LOG[level]} if level in SEARCH_LOG else {}


def gc_options(level: int, reach_bytes: int) -> dict[int, int]:
    """Return zstd options for a GC run, where no caller waits, with a window over all bytes."""
    return {
        CompressionParameter.compression_level: level,
        CompressionParameter.content_size_flag: 1,
        CompressionParameter.window_log: log_of(reach_bytes),
        **_longer(level, reach_bytes),
    }


def _longer(level: int, block_bytes: int) -> dict[int, int]:
    """Return options to skip short matches that zstd takes by default at `level`."""
    longer = level in LAZY_LEVELS and block_bytes >= LAZY_BYTES_MIN
    return {CompressionParameter.min_match: LAZY_MIN_MATCH} if longer else {}


def _wider(level: int) -> dict[int, int]:
    """Return options for a larger table in raw blocks than zstd's default at `level`."""
    return {CompressionParameter.hash_log: RAW_HASH_LOG[level]} if level in RAW_HASH_LOG else {}


def _seeing(block_bytes: int) -> dict[int, int]:
    """Return a window over all of a block; zstd's default is 1 or 2 MiB of 4.

    It saves 1 % of botocore's blocks and 1 to 3 % of a Debian image's at the same speed.
    """
    return {CompressionParameter.window_log: log_of(block_bytes)}


def _sample(raw: U8, sample_bytes: int) -> U8:
    """Return `sample_bytes` from the middle of each quarter of a block, joined."""
    starts = [(2 * number + 1) * len(raw) // (2 * SAMPLES) for number in range(SAMPLES)]
    return np.concatenate([raw[start : start + sample_bytes] for start in starts])


@frozen
class SampledBlock:
    """The results of compressing samples of a block.

    Samples, since a prediction by the previous block would make blocks wait for each other.
    """

    hardness: float
    """Their compressed share at level 1; 0 for a small block."""
    gain: float
    """Their size at level 3 by that at level 1, where HARD_SHARE and HARDER_SHARES ask for it; otherwise 1."""


def _sampled(raw: U8, encoder: FrameEncoder, options: Mapping[int, int]) -> SampledBlock:
    """Compress samples of a block; `options`: those of level 3."""
    if len(raw) < SAMPLED_BYTES_MIN:
        return SampledBlock(0.0, 1.0)
    sample = _sample(raw, SAMPLE_BYTES)
    quick_bytes = encoder.encoded_bytes(sample, SAMPLED)
    hardness = quick_bytes / len(sample)
    if hardness * HARD_SHARE <= 1 or hardness > HARDER_SHARES[0]:
        return SampledBlock(hardness, 1.0)
    return SampledBlock(hardness, encoder.encoded_bytes(sample, options) / quick_bytes)


class AdaptiveSearch:
    """Encodes raw blocks with the parameters that suit the stream."""

    def __init__(self, options: Mapping[int, int], far: bool) -> None:
        """`options`: zstd's, with the level; `far`: whether long-distance matching is tried."""
        self._level = level = options[CompressionParameter.compression_level]
        self._options = options
        more = deepen(level) | _wider(level)
        self._long, self._dense = {**options, **LONG, **more}, {**options, **DENSE, **more}
        self._plain = {**options, CompressionParameter.compression_level: QUICK_FOR} if level in SEARCH_LOG else None
        self._far = far
        self._quick = {**options, **QUICK} if level == QUICK_FOR else None
        self.forget()

    def forget(self) -> None:
        """Forget previous blocks, so that the next results depend on the next blocks only."""
        self._won = 0
        self._until_trial = 0

    def encode(self, raw: U8, encoder: FrameEncoder) -> EncodedBlock:
        """Return a raw block, the smallest one if several searches are tried.

        Raises as `encode_block`.
        """
        longer = _longer(self._level, len(raw))
        if not self._far or len(raw) < FAR_BYTES_MIN:
            options = self._options
            if self._quick is not None:
                options = self._as_hard(_sampled(raw, encoder, options), self._quick)
            return encode_block(raw, container_layout.RAW, 0, encoder, {**options, **_seeing(len(raw)), **longer})
        ways = [self._long, {**self._long, **longer} if longer else self._dense]
        if self._plain is not None:
            ways.append({**self._plain, **_seeing(len(raw))})
        if self._until_trial:
            self._until_trial -= 1
            return encode_block(raw, container_layout.RAW, 0, encoder, ways[self._won])
        least = encode_block(raw, container_layout.RAW, 0, encoder, ways[0])
        self._won = 0
        if self._plain is not None and not self._is_plain_smaller(raw, encoder):
            ways.pop()
        for number, way in enumerate(ways[1:], 1):  # at most two results in memory, whatever the number of ways
            tried = encode_block(raw, container_layout.RAW, 0, encoder, way)
            if tried.stored_bytes < least.stored_bytes:
                least, self._won = tried, number
        self._until_trial = TRIED_AGAIN_BLOCKS - 1
        return least

    def _is_plain_smaller(self, raw: U8, encoder: FrameEncoder) -> bool:
        """Return whether samples are smaller at level 3 than with the deeper search."""
        assert self._plain is not None
        sample = _sample(raw, PLAIN_SAMPLE_BYTES)
        deep = {**self._options, **deepen(self._level)}
        return encoder.encoded_bytes(sample, self._plain) < encoder.encoded_bytes(sample, deep)

    def _as_hard(self, sampled: SampledBlock, quick: Mapping[int, int]) -> Mapping[int, int]:
        """Return the options for a block whose samples compress so."""
        if sampled.hardness * HARD_SHARE <= 1:
            return self._options
        if sampled.gain < TEXT_GAIN:
            return {**self._options, **LONG_TEXT} if sampled.gain < LONG_TEXT_GAIN else self._options
        least, most = HARDER_SHARES
        return {**quick, **HARDER} if least < sampled.hardness <= most else quick
