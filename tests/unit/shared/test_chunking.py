"""Test what callers of the chunkers rely on, with the kernels that NEARKIN_KERNELS chose."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels import chunking
from nearkin_shared.kernels.reference import chunking_reference as reference

Cut = Callable[[bytes, bool], NDArray[np.uint32]]
MIN, TARGET, MAX = 256, 1024, 4096

CUTS: dict[str, Cut] = {
    "fastcdc": lambda data, final: chunking.fastcdc_cut(data, MIN, TARGET, MAX, final),
    "leastcdc": lambda data, final: chunking.leastcdc_cut(data, MIN, TARGET, MAX, final),
    "rabin": lambda data, final: chunking.rabin_cut(data, MIN, TARGET, MAX, final),
    "inck": lambda data, final: chunking.inck_cut(data, MIN, TARGET, MAX, final),
    "fixed": lambda data, final: chunking.fixed_cut(data, TARGET, final),
    "whole": lambda data, final: chunking.whole_cut(data, MAX, final),
}
CONTENT_DEFINED = {
    "fastcdc": chunking.fastcdc_cut,
    "leastcdc": chunking.leastcdc_cut,
    "rabin": chunking.rabin_cut,
    "inck": chunking.inck_cut,
}


def random_bytes(seed: int, total_bytes: int) -> bytes:
    return np.random.Generator(np.random.PCG64(seed)).bytes(total_bytes)


def stream(cut: Cut, data: bytes, piece_bytes: int) -> list[int]:
    """Cut `data` as it would arrive in pieces: keep the uncut tail, add a piece, cut again."""
    lengths: list[int] = []
    tail = b""  # bytes that may not end a chunk yet
    for start in range(0, len(data), piece_bytes):
        tail += data[start : start + piece_bytes]
        certain = cut(tail, False)
        lengths += certain.tolist()
        tail = tail[int(certain.sum()) :]
    lengths += cut(tail, True).tolist()
    return lengths


@pytest.fixture(params=sorted(CUTS))
def cut(request: pytest.FixtureRequest) -> Cut:
    return CUTS[request.param]


@pytest.mark.parametrize("piece_bytes", [1, 63, 64, 1000, 4095, 4096, 4097, 20_000, 10**6])
def test_each_piece_size_gives_equal_chunks(cut: Cut, piece_bytes: int) -> None:
    data = random_bytes(1, 2_500 if piece_bytes == 1 else 60_000)
    assert stream(cut, data, piece_bytes) == cut(data, True).tolist()


def test_open_stream_leaves_less_than_one_maximum(cut: Cut) -> None:
    data = random_bytes(2, 50_000)
    certain = cut(data, False)
    assert len(data) - MAX < certain.sum() <= len(data)
    assert certain.tolist() == cut(data, True)[: len(certain)].tolist()


@pytest.mark.parametrize("total_bytes", [0, 1, 63, 64, 255, 256, 257, 1023, 1024, 4095, 4096, 4097, 8192, 30_000])
def test_final_lengths_add_up_and_stay_within_bounds(cut: Cut, total_bytes: int) -> None:
    for data in (random_bytes(3, total_bytes), bytes(total_bytes)):
        lengths = cut(data, True)
        assert lengths.dtype == np.uint32
        assert lengths.sum() == total_bytes
        assert (lengths > 0).all()
        assert (lengths <= MAX).all()
        assert (lengths[:-1] >= MIN).all()


def test_no_data_is_no_chunks(cut: Cut) -> None:
    assert cut(b"", True).tolist() == []
    assert cut(b"", False).tolist() == []


def test_zero_bytes_are_cut_at_the_maximum_only(cut: Cut) -> None:
    if cut is CUTS["fixed"]:
        assert set(cut(bytes(10 * TARGET), True).tolist()) == {TARGET}
    else:
        assert cut(bytes(10 * MAX), True).tolist() == [MAX] * 10


def test_open_stream_of_the_maximum_is_cut() -> None:
    assert chunking.whole_cut(bytes(MAX), MAX, False).tolist() == [MAX]
    assert chunking.whole_cut(bytes(MAX - 1), MAX, False).tolist() == []
    assert chunking.fixed_cut(bytes(MAX), MAX, False).tolist() == [MAX]
    assert chunking.fastcdc_cut(bytes(MAX), MIN, TARGET, MAX, False).tolist() == [MAX]


def test_blob_up_to_the_maximum_is_one_chunk() -> None:
    assert chunking.whole_cut(bytes(MAX), MAX, True).tolist() == [MAX]
    assert chunking.whole_cut(bytes(7), MAX, True).tolist() == [7]
    assert chunking.whole_cut(bytes(2 * MAX + 7), MAX, True).tolist() == [MAX, MAX, 7]


@pytest.mark.parametrize("name", sorted(CONTENT_DEFINED))
def test_insertion_changes_nearby_chunks_only(name: str) -> None:
    data = random_bytes(4, 200_000)
    changed = data[:50_000] + b"inserted" + data[50_000:]

    def ends_from_the_end(blob: bytes) -> set[int]:
        lengths = CONTENT_DEFINED[name](blob, MIN, TARGET, MAX, True)
        return set((len(blob) - np.cumsum(lengths)).tolist())

    before = {end for end in ends_from_the_end(data) if end <= 150_000}
    assert len(before - ends_from_the_end(changed)) <= 0.15 * len(before)


@pytest.mark.parametrize("name", sorted(CONTENT_DEFINED))
def test_equal_minimum_and_maximum_cut_at_that_length(name: str) -> None:
    assert CONTENT_DEFINED[name](random_bytes(5, 700), 256, 256, 256, True).tolist() == [256, 256, 188]


@pytest.mark.parametrize("name", sorted(CONTENT_DEFINED))
@pytest.mark.parametrize(
    ("least", "target", "most", "named"),
    [
        (63, 1024, 4096, "min_bytes 63"),
        (-1, 1024, 4096, "min_bytes -1"),
        (256, 8192, 4096, "target_bytes 8192"),
        (256, 1024, 900 * 1024 + 1, "max_bytes 921601"),
        (256, 128, 128, "min_bytes 256"),
        (256, 32, 4096, "target_bytes 32"),
        (2**70, 2**70, 2**70, "max_bytes"),
        (256.0, 1024, 4096, "min_bytes 256.0"),
        (256, 1024, None, "max_bytes None"),
    ],
)
def test_bounds_out_of_range_are_refused_by_name(name: str, least: Any, target: Any, most: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        CONTENT_DEFINED[name](b"", least, target, most, True)


@pytest.mark.parametrize("cut_within", [chunking.fastcdc_cut, chunking.leastcdc_cut])
def test_fastcdc_and_leastcdc_refuse_target_below_minimum(cut_within: Any) -> None:
    with pytest.raises(BadInput, match="target_bytes 1024"):
        cut_within(b"", 2048, 1024, 4096, True)


@pytest.mark.parametrize("cut_within", [chunking.fastcdc_cut, chunking.leastcdc_cut])
@pytest.mark.parametrize("bounds", [(64, 64, 64), (64, 64, 900 * 1024), (900 * 1024, 900 * 1024, 900 * 1024)])
def test_extreme_bounds_are_accepted(cut_within: Any, bounds: tuple[int, int, int]) -> None:
    data = random_bytes(6, 1_000_000)
    assert cut_within(data, *bounds, True).sum() == len(data)


@pytest.mark.parametrize("name", ["rabin", "inck"])
def test_pattern_chunkers_accept_target_below_minimum(name: str) -> None:
    lengths = CONTENT_DEFINED[name](random_bytes(9, 400_000), 2048, 64, MAX, True)
    assert lengths[:-1].mean() == pytest.approx(2048 + 64, rel=0.02)


@pytest.mark.parametrize("name", ["rabin", "inck"])
def test_pattern_chunkers_refuse_target_not_power_of_two(name: str) -> None:
    with pytest.raises(BadInput, match="target_bytes 1000"):
        CONTENT_DEFINED[name](b"", MIN, 1000, MAX, True)


@pytest.mark.parametrize("window_bytes", [15, 0, -48, 257, 300])
def test_window_out_of_range_is_refused_by_name(window_bytes: int) -> None:
    for cut_with_window in (chunking.rabin_cut, chunking.inck_cut):
        with pytest.raises(BadInput, match=f"window_bytes {window_bytes}"):
            cut_with_window(b"", MIN, TARGET, MAX, True, window_bytes)
    with pytest.raises(BadInput, match="window_bytes 65"):
        chunking.rabin_cut(b"", 64, TARGET, MAX, True, window_bytes=65)


@pytest.mark.parametrize("size", [63, 900 * 1024 + 1, -5])
def test_fixed_and_whole_refuse_sizes_out_of_range_by_name(size: int) -> None:
    with pytest.raises(BadInput, match=f"chunk_bytes {size}"):
        chunking.fixed_cut(b"", size, True)
    with pytest.raises(BadInput, match=f"max_bytes {size}"):
        chunking.whole_cut(b"", size, True)


def test_any_contiguous_bytes_like_is_cut_alike(cut: Cut) -> None:
    data = random_bytes(7, 40_000)
    read_only = np.frombuffer(data, dtype=np.uint8)
    assert not read_only.flags.writeable
    likes: list[Any] = [bytearray(data), memoryview(data), read_only, read_only.view("<u4").reshape(100, 100)]
    for like in likes:
        assert cut(like, True).tolist() == cut(data, True).tolist()


@pytest.mark.parametrize("data", ["text", 5, None, memoryview(bytes(100))[::2], np.zeros((4, 4), np.uint8).T[:2]])
def test_input_that_is_not_contiguous_bytes_is_refused(cut: Cut, data: Any) -> None:
    with pytest.raises(BadInput, match="data of"):
        cut(data, True)


def test_gear_table_is_frozen_and_read_only() -> None:
    digest = hashlib.sha256(chunking.GEAR.astype("<u8").tobytes()).hexdigest()
    assert digest == "a6796932db02618617d30d05625f863a1f29c7051106ec93ea5416567ac9ee3b"
    assert chunking.GEAR.shape == (256,)
    assert len(set(chunking.GEAR.tolist())) == 256
    with pytest.raises(ValueError, match="read-only"):
        chunking.GEAR[0] = 0


def test_gear_masks_are_nested_and_leave_the_top_bit_free() -> None:
    for bits in range(49):
        mask = reference.gear_mask(bits)
        assert mask.bit_count() == bits
        assert mask >> 63 == 0
        assert mask & 0x7FFF == 0
        assert mask & reference.gear_mask(48) == mask
        assert bits == 0 or mask & reference.gear_mask(bits - 1) == reference.gear_mask(bits - 1)


def test_gear_mask_bits_follow_the_nearest_power_of_two() -> None:
    assert reference.gear_mask_bits(8192) == (15, 11)
    assert reference.gear_mask_bits(11_585) == (15, 11)  # 8192 * sqrt(2) = 11585.2
    assert reference.gear_mask_bits(11_586) == (16, 12)
    assert reference.gear_mask_bits(900 * 1024) == (22, 18)


def test_pattern_lets_inck_skip_the_last_subtraction() -> None:
    for bits in range(6, 20):
        mask = (1 << bits) - 1
        assert reference.TARGET_PATTERN & mask not in {0, mask}
        assert bits < 9 or reference.TARGET_PATTERN & mask > 257


def remainder(dividend: int, divisor: int) -> int:
    """Return the remainder of polynomials over GF(2)."""
    while dividend.bit_length() >= divisor.bit_length():
        dividend ^= divisor << (dividend.bit_length() - divisor.bit_length())
    return dividend


def squared(polynomial: int, modulus: int) -> int:
    # over GF(2) a square only spreads the bits
    return remainder(int(format(polynomial, "b"), 4) if polynomial else 0, modulus)


def is_irreducible(polynomial: int) -> bool:
    """Return Rabin's test for a prime degree n.

    X^(2^n) = x, and x^2 - x shares no factor (no root in GF(2)).
    """
    degree = polynomial.bit_length() - 1
    assert degree == 53  # prime, so 1 is its only proper divisor that matters
    power = 2
    for _ in range(degree):
        power = squared(power, polynomial)
    has_root = polynomial & 1 == 0 or polynomial.bit_count() % 2 == 0
    return power == 2 and not has_root


def test_rabin_polynomial_is_first_irreducible_of_sequence() -> None:
    def candidate(number: int) -> int:
        raw = hashlib.blake2b(number.to_bytes(2, "little"), digest_size=8, person=b"nearkin rabin").digest()
        return 1 << 53 | int.from_bytes(raw, "little") & ((1 << 53) - 1)

    first = next(number for number in range(1000) if is_irreducible(candidate(number)))
    assert candidate(first) == reference.RABIN_POLYNOMIAL


def test_reference_hashes_are_remainders_of_the_window() -> None:
    data = random_bytes(8, 300)
    view = memoryview(data)
    rabin = reference._rabin_hashes(view, 48)
    inck = reference._inck_hashes(view, 48)
    gear = reference._gear_hashes(view)
    for start in range(237):
        window = int.from_bytes(data[start : start + 48], "big")
        assert int(rabin[start]) == remainder(window, reference.RABIN_POLYNOMIAL)
        assert int(inck[start]) == window % (2**31 - 1)
        rolled = 0
        for byte in data[start : start + 64]:
            rolled = (2 * rolled + int(chunking.GEAR[byte])) % 2**64
        assert int(gear[start]) == rolled


def test_expected_chunk_bytes_equals_its_sum() -> None:
    for least, most, bits in [(2048, 4096, 10), (64, 1064, 6), (2048, 65536, 13), (100, 300, 0), (500, 500, 9)]:
        chance = 2.0**-bits
        trials = np.arange(1, most - least + 1)
        misses = (1 - chance) ** (trials - 1)
        mean = least + (trials * chance * misses).sum() + (most - least) * (1 - (chance * misses).sum())
        assert chunking.expected_chunk_bytes(least, most, bits) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize(("bits", "table_kib"), [(10, 3.0), (11, 4.0), (12, 6.0), (13, 10.0), (14, 17.7), (15, 29.4)])
def test_expected_chunk_bytes_agrees_with_prune_table_2(bits: int, table_kib: float) -> None:
    assert chunking.expected_chunk_bytes(2048, 65536, bits) / 1024 == pytest.approx(table_kib, abs=0.06)


def test_expected_chunk_bytes_refuses_out_of_range_bits() -> None:
    for bits in (-1, 63):
        with pytest.raises(BadInput, match=f"mask_bits {bits}"):
            chunking.expected_chunk_bytes(2048, 65536, bits)
