"""Searches. Invariant: which search writes a block is decided by real sizes, of its own or of blocks before it.

zstd's tables hold the last few MiB. Its long-distance matcher sees the whole block, but what it finds is taken before
anything closer is looked for, so that how much it may find decides:

    long     repeats of 256 bytes: takes 1.4 % off blocks of 30 MiB of botocore's first release
    dense    repeats of 32 bytes, most of them: takes 8 % off the Redis dumps, whose keys and values come again
             anywhere, and puts 7 % on botocore's JSON

    longer   `long` with matches of 6 bytes at least, where zstd takes 5: takes 2.1 % off the dumps and 0.5 %
             off botocore at level 9 and 30 MiB, where `dense` finds nothing more; Debian images want both

    plain    level 3 as it is, where samples come out larger when searched deeper: of words in any order, as a
             generated text has them, the deep search finds longer matches further away, and takes 2.5 % more

So these are tried, and then the better one alone for some blocks. None costs a reader anything.
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

FAR_BYTES_MIN = MIB
"""In a smaller block zstd's tables hold everything."""
TRIED_AGAIN_BLOCKS = 4
"""So many blocks go by what the last trial said, the block tried included."""
LONG: Mapping[int, int] = {
    CompressionParameter.enable_long_distance_matching: 1,
    CompressionParameter.ldm_min_match: 256,
    CompressionParameter.ldm_hash_rate_log: 6,
    CompressionParameter.ldm_hash_log: 20,
}
"""128 bytes cost 0.1 % of botocore, 64 (zstd's own) 1 %."""
DENSE: Mapping[int, int] = {
    CompressionParameter.enable_long_distance_matching: 1,
    CompressionParameter.ldm_min_match: 32,
    CompressionParameter.ldm_hash_rate_log: 3,
    CompressionParameter.ldm_hash_log: 22,
}
"""One position in 8, 2^22 of them: all of 32 MiB. One in 16 costs 1 % of the dumps, 48 bytes 3 %."""
SEARCH_LOG: Mapping[int, int] = {9: 6}
"""At level 9, the archive's, 64 candidates a place, not 16. The first doubling takes 2.8 % off raw blocks of botocore,
11 % off its patch blocks, 1.1 and 2 % of the dumps; the second 1.4 and 0.7 % off raw blocks."""
RAW_HASH_LOG: Mapping[int, int] = {9: 23}
"""And in raw blocks a table of 2^24 places, not 2^22: a block of 30 MiB fits. A table of half that takes 2.6 % off the
dumps already and 0.7 % off a Debian image. A patch block is too small to be worth clearing it."""
QUICK_FOR = 3
QUICK: Mapping[int, int] = {CompressionParameter.compression_level: 2}
"""Level 1 with the table of 2 finds 7 bytes where this finds 6: 6 to 9 % faster, and 1 to 3 % more is stored."""
SAMPLES = 4
SAMPLE_BYTES = 16 * KIB
PLAIN_SAMPLE_BYTES = 64 * KIB
"""Botocore, a dump and a Debian image are 4 to 42 % larger at level 3 from 32 to 512 KiB on: told by any sample."""
SAMPLED: Mapping[int, int] = {CompressionParameter.compression_level: 1}
SAMPLED_BYTES_MIN = MIB
"""A smaller block is not worth a sample, and goes at the level that was asked for."""
HARD_SHARE = 4
"""At level 3, the default, a block whose samples come out at more than 1/4 (itself at more than 1/5) is written at 2.
Of such data level 3 takes 6 to 7 % more off and is 1.4 times as slow (the first dump: 248 and 178 MB/s, decoded and
compared; a Debian image: 392 and 279); of botocore's, at 1/10, 14 % for the same speed.

The samples are right of 149 blocks in 150 (a Debian and a generated image, botocore, a dump). The block before was of
141, and had to be waited for."""
LAZY_LEVELS = range(6, 13)
LAZY_MIN_MATCH = 6
LAZY_BYTES_MIN = 3 * MIB
"""Matches of 5 bytes, zstd's own least at these levels, hide others: those of 6 are 5 to 20 % faster to find, and at
level 9 and 4 MiB take 0.9 % off botocore, 0.5 % off a dump and put 0.1 % on a Debian image (3 % less here, 0.4 % more
there). In smaller blocks they put up to 2 % on a dump."""
HARDER_SHARES = 0.5, 0.75
HARDER: Mapping[int, int] = {CompressionParameter.hash_log: 17}
"""Between these, as a dump's at 0.61, level 2 has a table of 2^17, not 2^16: 4.5 % fewer bytes at 0.85 of its speed.
Of a Debian image's blocks (0.3 % and 0.88) a tenth lie there; what lies above is packed already."""
WINDOW_LOG_MIN, WINDOW_LOG_MAX = 10, 27
"""The upper one is what any zstd decoder takes unasked."""


def log_of(reach_bytes: int) -> int:
    """Return the least power of two that a window of so many bytes fits in, as zstd counts windows and tables."""
    return min(WINDOW_LOG_MAX, max(WINDOW_LOG_MIN, (reach_bytes - 1).bit_length()))


def deepen(level: int) -> dict[int, int]:
    """Return what makes zstd search deeper than it does by itself at `level`."""
    return {CompressionParameter.search_log: SEARCH_LOG[level]} if level in SEARCH_LOG else {}


def gc_options(level: int, reach_bytes: int) -> dict[int, int]:
    """Return zstd's options for what a round writes: nobody waits for it, and all of it is seen."""
    return {
        CompressionParameter.compression_level: level,
        CompressionParameter.content_size_flag: 1,
        CompressionParameter.window_log: log_of(reach_bytes),
        **_longer(level, reach_bytes),
    }


def _longer(level: int, block_bytes: int) -> dict[int, int]:
    """Return what makes zstd pass over short matches that it takes by itself at `level`."""
    longer = level in LAZY_LEVELS and block_bytes >= LAZY_BYTES_MIN
    return {CompressionParameter.min_match: LAZY_MIN_MATCH} if longer else {}


def _wider(level: int) -> dict[int, int]:
    """Return what makes zstd remember more of a raw block than it does by itself at `level`."""
    return {CompressionParameter.hash_log: RAW_HASH_LOG[level]} if level in RAW_HASH_LOG else {}


def _seeing(block_bytes: int) -> dict[int, int]:
    """Return a window of all of a block: by itself zstd looks back 1 or 2 MiB of 4.

    That takes 1 % off botocore's blocks and 1 to 3 % off a Debian image's, and is no slower: less is to be written.
    """
    return {CompressionParameter.window_log: log_of(block_bytes)}


def _sample(raw: U8, sample_bytes: int) -> U8:
    """Return so many bytes of each of a block's quarters, joined."""
    starts = [(2 * number + 1) * len(raw) // (2 * SAMPLES) for number in range(SAMPLES)]
    return np.concatenate([raw[start : start + sample_bytes] for start in starts])


def _hardness(raw: U8, encoder: FrameEncoder) -> float:
    """Return what samples of a block come out at, 0 if it is small. By the block before, blocks wait for each other."""
    if len(raw) < SAMPLED_BYTES_MIN:
        return 0.0
    sample = _sample(raw, SAMPLE_BYTES)
    return encoder.encoded_bytes(sample, SAMPLED) / len(sample)


class AdaptiveSearch:
    """Writes raw blocks by the search that suits the stream."""

    def __init__(self, options: Mapping[int, int], far: bool) -> None:
        """`options`: zstd's, its level among them; `far`: whether far matches are looked for."""
        self._level = level = options[CompressionParameter.compression_level]
        self._options = options
        more = deepen(level) | _wider(level)
        self._long, self._dense = {**options, **LONG, **more}, {**options, **DENSE, **more}
        self._plain = {**options, CompressionParameter.compression_level: QUICK_FOR} if level in SEARCH_LOG else None
        self._far = far
        self._quick = {**options, **QUICK} if level == QUICK_FOR else None
        self.forget()

    def forget(self) -> None:
        """Go by no block before: what the next ones come to then depends on them alone."""
        self._won = 0
        self._until_trial = 0

    def encode(self, raw: U8, encoder: FrameEncoder) -> EncodedBlock:
        """Return a raw block, the smaller one where both searches are tried. Raises Corrupt as `encode_block` does."""
        longer = _longer(self._level, len(raw))
        if not self._far or len(raw) < FAR_BYTES_MIN:
            options = self._options if self._quick is None else self._as_hard(_hardness(raw, encoder), self._quick)
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
        for number, way in enumerate(ways[1:], 1):  # two at a time in memory, however many ways there are
            tried = encode_block(raw, container_layout.RAW, 0, encoder, way)
            if tried.stored_bytes < least.stored_bytes:
                least, self._won = tried, number
        self._until_trial = TRIED_AGAIN_BLOCKS - 1
        return least

    def _is_plain_smaller(self, raw: U8, encoder: FrameEncoder) -> bool:
        """Return whether samples come out smaller at level 3 than when more is searched deeper."""
        assert self._plain is not None
        sample = _sample(raw, PLAIN_SAMPLE_BYTES)
        deep = {**self._options, **deepen(self._level)}
        return encoder.encoded_bytes(sample, self._plain) < encoder.encoded_bytes(sample, deep)

    def _as_hard(self, hardness: float, quick: Mapping[int, int]) -> Mapping[int, int]:
        """Return the options for a block whose samples come out at such a share."""
        if hardness * HARD_SHARE <= 1:
            return self._options
        least, most = HARDER_SHARES
        return {**quick, **HARDER} if least < hardness <= most else quick
