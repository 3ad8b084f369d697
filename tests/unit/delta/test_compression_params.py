"""Test adaptive compression.

Repeats are found across a whole block, and parameters are sampled again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backports.zstd import CompressionParameter

from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin_delta import compression_params as module
from nearkin_delta.compression_params import AdaptiveSearch, gc_options
from nearkin_shared.formats import container_layout
from nearkin_shared.formats.block import EncodedBlock, decode_block, encode_block
from nearkin_shared.kernels.zstd_frames import FrameEncoder
from nearkin_shared.types import U8

OPTIONS: dict[int, int] = {CompressionParameter.compression_level: 3, CompressionParameter.content_size_flag: 1}
KEYS = [random_bytes(40, seed) for seed in range(40_000)]
"""Short strings that repeat anywhere, far apart, as the keys and values of a dump do."""


class CountingEncoder(FrameEncoder):
    """Encoder that counts its frames."""

    frames = 0

    def encode(self, raw: Any, prefix: Any = None, options: Any = None) -> bytes | memoryview:
        self.frames += 1
        return super().encode(raw, prefix, options)


def as_array(content: bytes) -> U8:
    return np.frombuffer(content, np.uint8)


def scattered(seed: int) -> U8:
    """Return 3.2 MB: 40,000 keys, and again in another order."""
    order = np.random.default_rng(seed).permutation(len(KEYS)).tolist()
    return as_array(b"".join(KEYS) + b"".join(KEYS[i] for i in order))


def decoded(block: EncodedBlock) -> bytes:
    return decode_block(block.header + bytes(block.payload), "b").tobytes()


def test_far_search_finds_short_distant_repeats() -> None:
    """A reader needs no option of the writer."""
    raw = scattered(1)
    usual = AdaptiveSearch(OPTIONS, far=False).encode(raw, FrameEncoder(OPTIONS))
    far = AdaptiveSearch(OPTIONS, far=True).encode(raw, FrameEncoder(OPTIONS))
    assert far.stored_bytes < 0.75 * usual.stored_bytes
    assert decoded(far) == raw.tobytes()  # by a decoder without options


def test_smaller_encoding_is_kept_until_both_are_sampled() -> None:
    encoder, searches = CountingEncoder(OPTIONS), AdaptiveSearch(OPTIONS, far=True)
    raw = scattered(2)
    sizes = [searches.encode(raw, encoder).stored_bytes for _ in range(module.TRIED_AGAIN_BLOCKS)]
    assert encoder.frames == module.TRIED_AGAIN_BLOCKS + 1
    assert len(set(sizes)) == 1
    searches.encode(raw, encoder)
    assert encoder.frames == module.TRIED_AGAIN_BLOCKS + 3


def test_choice_for_one_stream_is_dropped_for_another() -> None:
    text = as_array(text_like(2_000_000, 1))
    encoder, searches = FrameEncoder(OPTIONS), AdaptiveSearch(OPTIONS, far=True)
    alone = [len(encoder.encode(text, None, {**OPTIONS, **way})) for way in (module.LONG, module.DENSE)]
    assert alone[0] != alone[1]
    searches.encode(scattered(3), encoder)
    after = [searches.encode(text, encoder).stored_bytes for _ in range(module.TRIED_AGAIN_BLOCKS)]
    assert after[0] == alone[1]
    assert after[-1] == min(alone)


@pytest.mark.parametrize(("size_bytes", "far"), [(module.FAR_BYTES_MIN - 1, True), (2 * module.FAR_BYTES_MIN, False)])
def test_small_and_other_blocks_are_written_with_defaults(size_bytes: int, far: bool) -> None:
    raw = as_array(text_like(size_bytes // 8, 4) * 8)
    plain = encode_block(raw, container_layout.RAW, 0, FrameEncoder(OPTIONS))
    assert AdaptiveSearch(OPTIONS, far).encode(raw, FrameEncoder(OPTIONS)).payload == plain.payload


def test_archive_level_searches_deeper_than_others() -> None:
    assert module.deepen(9) == {CompressionParameter.search_log: 6}
    assert module.deepen(3) == module.deepen(12) == {}


def words_in_any_order(size_bytes: int) -> U8:
    """Return words drawn uniformly from a few thousand, as generated text has them."""
    rng = np.random.default_rng(8)
    letters = rng.integers(97, 123, (3000, 8), np.uint8)
    words = [letters[number, : 3 + number % 6].tobytes() + b" " for number in range(3000)]
    text = b"".join(words[number] for number in rng.integers(0, len(words), size_bytes // 4).tolist())
    return as_array(text[:size_bytes])


def test_default_level_is_used_where_deep_search_is_larger() -> None:
    """The deep search alone takes more bytes for such text.

    The archive profile stored 2.5 % more of it than the default profile.
    """
    raw = words_in_any_order(2 * module.FAR_BYTES_MIN)
    default = AdaptiveSearch(OPTIONS, far=False).encode(raw, FrameEncoder(OPTIONS))
    options = {**OPTIONS, CompressionParameter.compression_level: 9}
    searches, encoder = AdaptiveSearch(options, far=True), CountingEncoder(options)
    sizes = [searches.encode(raw, encoder).stored_bytes for _ in range(module.TRIED_AGAIN_BLOCKS)]
    assert max(sizes) <= default.stored_bytes
    assert encoder.frames == module.TRIED_AGAIN_BLOCKS + 2


def test_default_level_costs_samples_where_deep_is_smaller() -> None:
    options = {**OPTIONS, CompressionParameter.compression_level: 9}
    encoder = CountingEncoder(options)
    AdaptiveSearch(options, far=True).encode(as_array(text_like(2_000_000, 1)), encoder)
    assert encoder.frames == 2


def noise(size_bytes: int, bits: int = 3) -> U8:
    """Return noise of so many bits a byte: it compresses to an eighth for each bit."""
    return np.random.default_rng(1).integers(0, 1 << bits, size_bytes, np.uint8)


def test_level_3_writes_incompressible_blocks_at_level_2() -> None:
    encoder, searches = FrameEncoder(OPTIONS), AdaptiveSearch(OPTIONS, far=False)
    hard = noise(module.SAMPLED_BYTES_MIN)
    easy = as_array(b"".join(mutate(text_like(4096, 6), number, edits=3) for number in range(300)))

    def at(level: int, raw: U8) -> bytes:
        window: dict[int, int] = {CompressionParameter.window_log: (len(raw) - 1).bit_length()}
        return bytes(encoder.encode(raw, None, {**OPTIONS, **window, CompressionParameter.compression_level: level}))

    assert at(2, hard) != at(3, hard)
    assert at(2, easy) != at(3, easy)
    for raw, level in ((hard, 2), (easy, 3), (easy, 3), (hard, 2), (hard, 2)):
        assert bytes(searches.encode(raw, encoder).payload) == at(level, raw)


@pytest.mark.parametrize(("bits", "table_log"), [(3, 0), (5, 17), (7, 0)])
def test_block_of_rare_repeats_gets_a_wider_table(bits: int, table_log: int) -> None:
    """4 MiB of words that repeat some six times each, and seldom within a sample."""
    words = noise(30_000 * 24, bits).reshape(-1, 24)
    raw = words[np.random.default_rng(2).integers(0, len(words), 170_000)].ravel()
    encoder = FrameEncoder(OPTIONS)
    options = {**OPTIONS, CompressionParameter.compression_level: 2, CompressionParameter.window_log: 22}
    by_log = {log: bytes(encoder.encode(raw, None, {**options, CompressionParameter.hash_log: log})) for log in (0, 17)}
    assert by_log[0] != by_log[17]
    assert bytes(AdaptiveSearch(OPTIONS, far=False).encode(raw, encoder).payload) == by_log[table_log]


def test_block_is_judged_by_all_its_quarters() -> None:
    encoder, searches = FrameEncoder(OPTIONS), AdaptiveSearch(OPTIONS, far=False)
    size_bytes = 4 * module.SAMPLED_BYTES_MIN
    for quarter in range(module.SAMPLES):
        raw = np.zeros(size_bytes, np.uint8)
        raw[quarter * size_bytes // 4 :][: size_bytes // 4] = as_array(random_bytes(size_bytes // 4, 7))
        level: dict[int, int] = {CompressionParameter.compression_level: 2, CompressionParameter.window_log: 22}
        assert searches.encode(raw, encoder).payload == encoder.encode(raw, None, {**OPTIONS, **level}), quarter


def test_small_block_is_written_at_the_configured_level() -> None:
    encoder, searches = CountingEncoder(OPTIONS), AdaptiveSearch(OPTIONS, far=False)
    raw = noise(module.SAMPLED_BYTES_MIN - 1)
    plain = len(FrameEncoder(OPTIONS).encode(raw))
    assert searches.encode(raw, encoder).stored_bytes == plain
    assert encoder.frames == 1


def test_other_levels_write_each_block_at_that_level() -> None:
    options = {**OPTIONS, CompressionParameter.compression_level: 4}
    encoder, searches = FrameEncoder(options), AdaptiveSearch(options, far=False)
    raw = noise(module.SAMPLED_BYTES_MIN)
    assert {len(searches.encode(raw, encoder).payload) for _ in range(3)} == {len(encoder.encode(raw))}


@pytest.mark.parametrize(("level", "size_bytes", "least"), [(9, 3 << 20, 6), (9, (3 << 20) - 1, 0), (5, 3 << 20, 0)])
def test_large_blocks_at_lazy_levels_skip_matches_of_5(level: int, size_bytes: int, least: int) -> None:
    """A put and a GC run write such levels alike."""
    raw = scattered(3)[:size_bytes]
    options = {**OPTIONS, CompressionParameter.compression_level: level}
    seen = {**options, CompressionParameter.window_log: 22, CompressionParameter.min_match: least}
    encoder = FrameEncoder(options)
    expected = bytes(encoder.encode(raw, None, seen))
    assert expected != bytes(encoder.encode(raw, None, {**seen, CompressionParameter.min_match: 6 - least}))
    assert bytes(AdaptiveSearch(options, far=False).encode(raw, encoder).payload) == expected
    assert bytes(encoder.encode(raw, None, gc_options(level, len(raw)))) == expected


def test_archive_level_also_tries_longer_matches() -> None:
    """In 3 MB of words some bytes long, far apart, matches of 5 bytes hide longer ones."""
    options = {**OPTIONS, CompressionParameter.compression_level: 9}
    encoder = CountingEncoder(options)
    raw = as_array(text_like(3_200_000, 5))
    more = {CompressionParameter.search_log: 6, CompressionParameter.hash_log: 23}
    ways = [{**options, **module.LONG, **more, CompressionParameter.min_match: least} for least in (0, 6)]
    alone = [len(encoder.encode(raw, None, way)) for way in ways]
    assert alone[0] != alone[1]
    encoder.frames = 0
    assert AdaptiveSearch(options, far=True).encode(raw, encoder).stored_bytes == min(alone)
    assert encoder.frames == 2


def test_level_3_keeps_its_level_for_text() -> None:
    """Text compresses to a third, as programs do, but a deeper search saves a sixth of it."""
    text, encoder = as_array(text_like(4_000_000, 7)), FrameEncoder(OPTIONS)
    options = {**OPTIONS, CompressionParameter.window_log: 22}
    quick = encoder.encode(text, None, {**options, CompressionParameter.compression_level: 2})
    deep = bytes(encoder.encode(text, None, {**options, **module.LONG_TEXT}))
    assert len(deep) < 0.86 * len(quick)
    assert bytes(AdaptiveSearch(OPTIONS, far=False).encode(text, encoder).payload) == deep
