"""Compare Reed-Solomon parity with the Cauchy code that the format page defines."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.reed_solomon import SHARDS_MAX, parity_of, rebuild_shards

FIELD = 0x11D


def times(a: int, b: int) -> int:
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = (a << 1) ^ (FIELD if a & 0x80 else 0), b >> 1
    return product


INVERSE = {a: next(b for b in range(1, 256) if times(a, b) == 1) for a in range(1, 256)}


def by_definition(data: np.ndarray, parity: int) -> np.ndarray:
    shards, found = len(data), np.zeros((parity, data.shape[1]), np.uint8)
    for i in range(parity):
        for j in range(shards):
            table = np.array([times(INVERSE[(shards + i) ^ j], byte) for byte in range(256)], np.uint8)
            found[i] ^= table[data[j]]
    return found


@pytest.mark.parametrize(("shards", "parity"), [(1, 1), (1, 4), (2, 3), (7, 2), (28, 4), (30, 2), (4, 28)])
def test_parity_equals_the_format_page(shards: int, parity: int) -> None:
    data = np.random.default_rng(shards).integers(0, 256, (shards, 333), np.uint8)
    assert np.array_equal(parity_of(data, parity), by_definition(data, parity))


@pytest.mark.parametrize(("shards", "parity"), [(1, 2), (5, 3), (28, 4)])
def test_lost_shards_up_to_the_parity_count_are_restored(shards: int, parity: int) -> None:
    draw = random.Random(1)
    data = np.random.default_rng(7).integers(0, 256, (shards, 100), np.uint8)
    whole = np.concatenate([data, parity_of(data, parity)])
    for _ in range(20):
        lost = draw.sample(range(shards + parity), draw.randrange(parity + 1))
        damaged = whole.copy()
        damaged[lost] = 0x5A
        assert np.array_equal(rebuild_shards(damaged, shards, lost), whole)
    with pytest.raises(BadInput):
        rebuild_shards(whole, shards, list(range(parity + 1)))


@pytest.mark.parametrize(("shards", "parity"), [(0, 1), (1, 0), (31, 2), (SHARDS_MAX, 1)])
def test_shard_counts_out_of_bounds_are_refused(shards: int, parity: int) -> None:
    with pytest.raises(BadInput):
        parity_of(np.zeros((shards, 4), np.uint8), parity)
