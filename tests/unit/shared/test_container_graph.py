"""Test the order of containers: bases first, whatever the order of ids."""

from __future__ import annotations

import random

import pytest

from nearkin_shared.storage.container_graph import topological_order


@pytest.mark.parametrize(
    ("bases_of", "expected"),
    [
        ({1: [], 2: [1], 3: [1, 2]}, [1, 2, 3]),
        ({1: [3], 2: [], 3: []}, [3, 1, 2]),  # the older one was open for longer
        ({1: [2], 2: [3], 3: [4], 4: []}, [4, 3, 2, 1]),
        ({1: [9], 2: [1, 9]}, [1, 2]),  # 9 is lost
        ({}, []),
    ],
)
def test_order_has_each_container_once_after_its_bases(bases_of: dict[int, list[int]], expected: list[int]) -> None:
    assert list(topological_order(bases_of, bases_of.__getitem__)) == expected


def test_order_of_cycle_or_chain_of_100000_ends() -> None:
    assert sorted(topological_order([1, 2, 3], {1: [2], 2: [3], 3: [1]}.__getitem__)) == [1, 2, 3]
    count = 100_000
    assert list(topological_order(range(count), lambda c: [c + 1])) == list(range(count))[::-1]


def test_order_of_any_acyclic_graph_is_topological() -> None:
    draw = random.Random(7)
    for _ in range(50):
        ids = list(range(30))
        rank = draw.sample(ids, 30)  # the order in which they were finished
        bases_of = {c: [o for o in ids if rank[o] < rank[c] and draw.random() < 0.1] for c in ids}
        order = list(topological_order(ids, bases_of.__getitem__))
        assert sorted(order) == ids
        assert all(order.index(base) < order.index(c) for c in ids for base in bases_of[c])
