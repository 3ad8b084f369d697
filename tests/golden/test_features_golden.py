"""Check frozen super-features.

If one changes, no new chunk matches the sketches of stored chunks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from nearkin_shared.kernels import features

LENGTHS = (0, 575, 576, 2048, 4096, 8192, 12_345, 65_536)


def corpus() -> bytes:
    """Return bytes that no library's random generator decides."""
    noise = hashlib.shake_256(b"nearkin golden features").digest(100_000)
    text = b"".join(b"line %d of %d: all work and no play\n" % (i, i * i) for i in range(2000))
    return noise + text[:50_000] + bytes(10_000) + noise[:30_000][::-1]


def digest(algorithm: str, **parameters: Any) -> str:
    payload = corpus()
    ranges = [(start, length) for start in range(0, len(payload), 9_973) for length in LENGTHS]
    ranges = [(start, length) for start, length in ranges if start + length <= len(payload)]
    offsets = np.array([start for start, _ in ranges], np.uint64)
    lengths = np.array([length for _, length in ranges], np.uint32)
    found = getattr(features, algorithm)(payload, offsets, lengths, **parameters)
    return hashlib.sha256(found.astype("<u8").tobytes()).hexdigest()[:32]


GOLDEN = {
    ("ntransform", 12, 3, 48): "979b42a4327284dc593de6bb3fc73641",
    ("ntransform", 8, 2, 32): "74313b63f388072318ffc6ae6915329c",
    ("finesse", 12, 3, 48): "6c96520011a8ecdd3b9c2b78d71cdadc",
    ("finesse", 16, 4, 48): "14bca97b5d9b57f9e5334c952ae1459f",
    ("finesse", 12, 3, 64): "926fc71f909d69699f87d0fec3121376",
    ("odess", 12, 3, 48): "7f2a623cbd5e5cc3b4301e7b002bed1f",
    ("odess", 12, 2, 64): "811650dc79f212a39663d939168400f3",
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "-".join(map(str, case)))
def test_super_features_are_frozen(case: tuple[str, int, int, int]) -> None:
    """The values are those with which stored chunks were sketched."""
    algorithm, features_count, super_features, window = case
    found = digest(algorithm, features=features_count, super_features=super_features, window_bytes=window)
    assert found == GOLDEN[case]


@pytest.mark.parametrize("algorithm", ["ntransform", "finesse"])
def test_scalar_variants_have_equal_digest(algorithm: str) -> None:
    assert digest(f"{algorithm}_scalar") == GOLDEN[algorithm, 12, 3, 48]


def test_rows_of_one_chunk_are_frozen() -> None:
    chunk = corpus()[:8192]
    whole = np.zeros(1, np.uint64), np.array([8192], np.uint32)
    rows = {name: [f"{value:016x}" for value in getattr(features, name)(chunk, *whole)[0]] for name in SPELLED_OUT}
    assert rows == SPELLED_OUT


SPELLED_OUT = {
    "ntransform": ["4cbd310561d9fe6c", "d85615bc3560924e", "7ba9db569a174122"],
    "finesse": ["124dea1a2c9ff4e3", "3479ae98efdc1e09", "110cda540d49b5e6"],
    "odess": ["256c9802797776e3", "905256b926eef170", "7a98bbb0f25896ae"],
}
