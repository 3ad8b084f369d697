"""What stands beside the ancestors of chunks: all of it, once in a group, and nothing that the group has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nearkin.records import Locations, bounds_of
from nearkin.store.beside import beside_replaced

PLACES = st.tuples(st.sampled_from([7, 8, 1 << 62]), st.integers(0, 6))
GROUPS = st.lists(st.lists(st.tuples(PLACES, PLACES), max_size=6), max_size=5)


def locations(rows: list[tuple[int, int]]) -> Locations:
    return Locations(np.array([c for c, _ in rows], np.uint64), np.array([o for _, o in rows], np.uint32))


@given(GROUPS)
def test_it_is_what_stands_next_to_what_was_replaced_and_is_not_in_the_group(
    groups: list[list[tuple[tuple[int, int], tuple[int, int]]]],
) -> None:
    rows = [row for group in groups for row in group]
    bounds = bounds_of([len(group) for group in groups])
    beside, of = beside_replaced(locations([a for a, _ in rows]), locations([b for _, b in rows]), bounds)
    found = sorted(zip(of.tolist(), beside.containers.tolist(), beside.ordinals.tolist(), strict=True))
    wanted = {
        (number, container, near)
        for number, group in enumerate(groups)
        for asked, (container, ordinal) in group
        for near in (ordinal - 1, ordinal + 1)
        if asked != (container, ordinal) and near >= 0 and (container, near) not in [there for _, there in group]
    }
    assert found == sorted(wanted)
