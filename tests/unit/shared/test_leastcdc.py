"""Test the chunker `leastcdc` against its definition."""

import hashlib

import numpy as np
import pytest

from nearkin_shared.kernels import chunking
from nearkin_shared.kernels.reference import leastcdc_reference as reference

MIN, TARGET, MAX = 2048, 8192, 65536


def random_bytes(seed: int, total_bytes: int) -> bytes:
    return np.random.Generator(np.random.PCG64(seed)).bytes(total_bytes)


@pytest.mark.parametrize("bounds", [(2048, 8192, 65536), (2048, 11_000, 65536), (5000, 6000, 10_000), (64, 1024, 8192)])
def test_mean_chunk_of_random_data_is_slightly_over_target(bounds: tuple[int, int, int]) -> None:
    lengths = chunking.leastcdc_cut(random_bytes(1, 16 << 20), *bounds, True)[:-1]
    # Where a range overlaps the previous one, its ends there are no minimum already: 2 % longer chunks. The
    # mean of 1,500 or more chunks has a standard error of 0.8 %.
    assert 0.98 < lengths.mean() / bounds[1] < 1.045


def test_random_chunks_are_half_to_one_and_a_half_targets() -> None:
    lengths = chunking.leastcdc_cut(random_bytes(2, 8 << 20), MIN, TARGET, MAX, True)[:-1]
    assert lengths.min() > TARGET // 2
    assert lengths.max() <= TARGET * 3 // 2
    assert np.histogram(lengths, 4, (TARGET // 2, TARGET * 3 // 2))[0].min() > 0.2 * len(lengths)


def test_chunk_ends_at_the_least_rank_of_its_range() -> None:
    data = random_bytes(3, 200_000)
    candidates = (np.flatnonzero(reference.hashes(memoryview(data)) >= 65536 - 128) + 32).tolist()
    start = 0
    for length in chunking.leastcdc_cut(data, MIN, TARGET, MAX, True)[:-1].tolist():
        ranks = {
            end: reference.rank(data[end - 48 : end])
            for end in candidates
            if start + TARGET // 2 < end <= start + TARGET * 3 // 2
        }
        assert start + length == min(ranks, key=lambda end: ranks[end])
        start += length


def test_chunk_without_candidate_in_range_ends_at_first_above() -> None:
    hole = bytes(3 * TARGET)
    tail = random_bytes(4, 100_000)
    first = chunking.leastcdc_cut(hole + tail, MIN, TARGET, MAX, True)[0]
    hashes = reference.hashes(memoryview(hole + tail))
    assert first == np.flatnonzero(hashes >= 65536 - 128)[0] + 32
    assert first > len(hole)


@pytest.mark.parametrize("target_bytes", [2048, 8192, 65536, 921600])
def test_run_of_one_byte_value_has_no_candidate(target_bytes: int) -> None:
    runs = np.array([reference.hashes(memoryview(bytes([value]) * 32))[0] for value in range(256)])
    assert (runs < reference.least_hash(target_bytes)).all()
    assert chunking.leastcdc_cut(b"\xff" * 921600, 2048, target_bytes, 921600, True).tolist() == [921600]


def test_hash_is_the_doubling_that_kernels_compute() -> None:
    data = random_bytes(5, 500)
    a, b, c, d = reference.SPREAD

    def word(end: int) -> int:
        return int.from_bytes(data[end - 2 : end], "little")

    def h4(end: int) -> int:
        return word(end - 2) * a + word(end)

    def h8(end: int) -> int:
        return h4(end - 4) * b + h4(end)

    def h16(end: int) -> int:
        return h8(end - 8) * c + h8(end)

    expected = [(h16(end - 16) * d + h16(end)) % 65536 for end in range(32, 501)]
    assert reference.hashes(memoryview(data)).tolist() == expected


def test_rank_folds_three_products_of_128_bits() -> None:
    window = bytes(range(48))
    words = [int.from_bytes(window[at : at + 8], "little") ^ reference.KEYS[at // 8] for at in range(0, 48, 8)]
    products = [words[0] * words[1], words[2] * words[3], words[4] * words[5]]
    expected = 0
    for product in products:
        expected ^= product % 2**64 ^ product // 2**64
    assert reference.rank(window) == expected


def test_constants_are_frozen() -> None:
    raw = hashlib.blake2b(b"\x08\x00", digest_size=56, person=b"nearkin least").digest()
    assert reference.SPREAD == (0xD633, 0x3705, 0x8313, 0xF41F)
    assert reference.SPREAD[0] == int.from_bytes(raw[:2], "little") | 1
    assert reference.KEYS[5] == int.from_bytes(raw[-8:], "little")


def test_two_streams_synchronize_from_any_start() -> None:
    data = random_bytes(6, 2_000_000)
    shifts = range(1, 200_000, 9973)
    met = []
    for shift in shifts:
        one = set(np.cumsum(chunking.leastcdc_cut(data, MIN, TARGET, MAX, True)).tolist())
        other = (np.cumsum(chunking.leastcdc_cut(data[shift:], MIN, TARGET, MAX, True)) + shift).tolist()
        met.append(next(number for number, end in enumerate(other) if end in one))
    assert np.mean(met) < 4  # chunks until the first common end
    assert max(met) < 20
