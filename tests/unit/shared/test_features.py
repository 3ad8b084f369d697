"""Test what super-features promise.

Similar chunks share them, others do not, and their mathematics.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels import features
from nearkin_shared.kernels.reference import features_reference as definition

ALGORITHMS = ("ntransform", "finesse", "odess")
CHUNK_BYTES = 8192


def random_bytes(seed: int, length: int = CHUNK_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def sketch(algorithm: str, *chunks: bytes, **parameters: int) -> NDArray[np.uint64]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    offsets = (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64)
    found: NDArray[np.uint64] = getattr(features, algorithm)(b"".join(chunks), offsets, lengths, **parameters)
    return found


def product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo P."""
    total = 0
    while other:
        total ^= one if other & 1 else 0
        one = definition.remainder(one << 1)
        other >>= 1
    return total


def greatest_common_divisor(one: int, other: int) -> int:
    while other:
        while one.bit_length() >= other.bit_length():
            one ^= other << (one.bit_length() - other.bit_length())
        one, other = other, one
    return one


def test_rabin_polynomial_is_irreducible_of_degree_32() -> None:
    assert definition.POLYNOMIAL.bit_length() == 33
    power = 2  # x
    for degree in range(1, 17):  # a factor of degree d divides x^(2^d) - x
        power = product(power, power)
        assert greatest_common_divisor(definition.POLYNOMIAL, power ^ 2) == 1, degree


@given(st.binary(min_size=60, max_size=100), st.integers(4, 60))
def test_fingerprint_is_its_window_modulo_the_polynomial(data: bytes, window: int) -> None:
    found = definition.rabin_fingerprints(np.frombuffer(data, np.uint8), window).tolist()
    windows = [data[at : at + window] for at in range(len(data) - window + 1)]
    assert found == [definition.remainder(int.from_bytes(content, "big")) for content in windows]


@given(st.binary(min_size=64, max_size=100), st.integers(32, 64))
def test_gear_hash_depends_on_its_window_only(data: bytes, window: int) -> None:
    found = definition.gear_hashes(np.frombuffer(data, np.uint8), window).tolist()
    for end, value in zip(range(window, len(data) + 1), found, strict=True):
        rolled = 0
        for byte in data[:end]:
            rolled = (2 * rolled + definition.GEAR[byte]) % 2**64
        assert value == rolled % 2**window


def test_finesse_groups_by_rank_as_in_figure_3() -> None:
    chunk = random_bytes(5)
    sub_bytes = CHUNK_BYTES // 12
    maxima = [
        int(
            definition.rabin_fingerprints(np.frombuffer(chunk[i * sub_bytes : (i + 1) * sub_bytes], np.uint8), 48).max()
        )
        for i in range(12)
    ]
    sets = [sorted(maxima[i : i + 3]) for i in (0, 3, 6, 9)]
    largest, second, third = ([ordered[index] for ordered in sets] for index in (2, 1, 0))
    expected = [definition.super_feature(x, group) for x, group in enumerate((largest, second, third))]
    assert sketch("finesse", chunk).tolist() == [expected]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_edit_keeps_a_super_feature(algorithm: str) -> None:
    kept = 0
    for seed in range(50):
        chunk = random_bytes(seed)
        edited = bytearray(chunk)
        edited[100 * seed + 1000] ^= 0xFF
        one, other = sketch(algorithm, chunk, bytes(edited))
        kept += bool((one == other).any())
    assert kept >= 48


@pytest.mark.parametrize("algorithm", ["ntransform", "odess"])
def test_insertion_at_the_front_keeps_a_super_feature(algorithm: str) -> None:
    kept = 0
    for seed in range(50):
        chunk = random_bytes(seed)
        one, other = sketch(algorithm, chunk, b"seven b" + chunk)
        kept += bool((one == other).any())
    assert kept >= 48


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_unrelated_chunks_share_no_super_feature(algorithm: str) -> None:
    values = sketch(algorithm, *(random_bytes(seed) for seed in range(300)))
    assert values.all()
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("algorithm", ["ntransform", "finesse"])
def test_constant_chunk_has_distinct_nonzero_super_features(algorithm: str) -> None:
    for byte in (b"\0", b"a", b"\xff"):
        row = sketch(algorithm, byte * CHUNK_BYTES)[0].tolist()
        assert 0 not in row
        assert len(set(row)) == 3


def test_odess_chunk_without_samples_has_zeros() -> None:
    assert not sketch("odess", b"a" * CHUNK_BYTES).any()
    assert sketch("odess", b"a" * CHUNK_BYTES, sampling_bits=0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunk_below_the_bound_has_zeros_and_at_it_features(algorithm: str) -> None:
    plan = {"features": 12, "super_features": 3, "window_bytes": 48}
    below, at = sketch(algorithm, random_bytes(1, 575), random_bytes(1, 576), **plan)
    assert not below.any()
    assert at.all() or (algorithm == "odess" and not at.any())  # of 529 positions about four are sampled


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_features_are_independent_of_the_offset(algorithm: str) -> None:
    chunk = random_bytes(9)
    alone = sketch(algorithm, chunk).tolist()
    assert sketch(algorithm, b"x" * 13, chunk, random_bytes(10)).tolist()[1:2] == alone


def test_finesse_ignores_the_remainder_of_sub_chunks() -> None:
    chunk = random_bytes(2)  # 8192 = 12 * 682 + 8
    assert sketch("finesse", chunk).tolist() == sketch("finesse", chunk[:-8] + b"\xff" * 8).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), st.data())
def test_super_feature_changes_with_each_feature_and_rank(group: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(group) - 1))
    changed = list(group)
    changed[at] ^= data.draw(st.integers(1, 2**32 - 1))
    value = definition.super_feature(0, group)
    assert 1 <= value < 2**64
    assert value != definition.super_feature(0, changed)
    assert value != definition.super_feature(1, group)


def test_multipliers_are_odd_and_distinct() -> None:
    assert all(value % 2 for value in (*definition.MULTIPLIERS, *definition.MIX))
    assert len(set(definition.MULTIPLIERS)) == len(set(definition.ADDENDS)) == 64
    assert len(set(definition.GEAR)) == 256


@pytest.mark.parametrize(("window", "sampling"), [(38, 7), (65, 7), (48, 17), (64, -1)])
def test_odess_refuses_a_window_too_small_for_its_sampling(window: int, sampling: int) -> None:
    with pytest.raises(BadInput, match="out of range"):
        sketch("odess", b"", window_bytes=window, sampling_bits=sampling)
