"""Test location arrays: unique rows and membership, in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.types import Locations

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12)


def located(pairs: list[tuple[int, int]]) -> Locations:
    return Locations(np.array([c for c, _ in pairs], np.uint64), np.array([o for _, o in pairs], np.uint32))


def pairs_of(locations: Locations) -> list[tuple[int, int]]:
    return list(zip(locations.containers.tolist(), locations.ordinals.tolist(), strict=True))


@given(PAIRS)
def test_unique_locations_are_sorted(pairs: list[tuple[int, int]]) -> None:
    assert pairs_of(located(pairs).distinct()) == sorted(set(pairs))


@given(PAIRS, PAIRS)
def test_membership_of_locations_is_exact(pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert located(pairs).is_in(located(others)).tolist() == [pair in others for pair in pairs]


@given(PAIRS)
def test_unique_locations_by_first_occurrence(pairs: list[tuple[int, int]]) -> None:
    firsts, which = located(pairs).mentions()
    assert pairs_of(located(pairs).take(firsts)) == list(dict.fromkeys(pairs))
    assert pairs_of(located(pairs).take(firsts[which])) == pairs
