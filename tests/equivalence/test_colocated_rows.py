"""Compare both implementations of colocated rows.

Each row once in a group, and none that the group has already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.directory import CHUNK_ROW
from nearkin_shared.kernels.native import _colocated_rows
from nearkin_shared.kernels.reference import colocated_rows_reference
from nearkin_shared.types import bounds_of

BOTH = [_colocated_rows, colocated_rows_reference]
LENGTHS, DEPTHS, KINDS, BLOCKS = st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)
ROWS = st.lists(st.tuples(LENGTHS, DEPTHS, KINDS, BLOCKS), max_size=8)
PLACES = st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans())
GROUPS = st.lists(st.lists(PLACES, max_size=7), max_size=5)


@pytest.fixture(params=BOTH, ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def table(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    made = np.zeros(len(rows), CHUNK_ROW)
    for name, column in zip(("lengths", "depths", "kinds", "blocks"), zip(*rows, strict=True), strict=False):
        made[name] = column
    return made


@given(
    st.lists(st.one_of(st.none(), ROWS), min_size=3, max_size=3),
    GROUPS,
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1]),
)
def test_colocated_rows_are_neighbours_of_moved_rows(
    tables: list[list[tuple[int, int, int, int]] | None],
    groups: list[list[tuple[int, int, bool]]],
    depth_below: int,
    bytes_max: int,
    left_out: int | None,
) -> None:
    """Only neighbours in blocks that are read anyway are returned."""

    def row(of: int, ordinal: int) -> tuple[int, int, int, int] | None:
        mine = tables[of] or []
        return mine[ordinal] if 0 <= ordinal < len(mine) else None

    rows = [each for group in groups for each in group]
    read = {(of, found[3]) for of, ordinal, _ in rows if (found := row(of, ordinal))}
    expected = []
    for number, group in enumerate(groups):
        near = {(of, ordinal + side) for of, ordinal, moved in group if moved for side in (-1, 1)}
        for of, ordinal in sorted(near - {(of, ordinal) for of, ordinal, _ in group}):
            found = row(of, ordinal)
            if found and 0 < found[0] <= bytes_max and found[1] < depth_below and found[2] != left_out:
                expected += [(of, ordinal, number)] * ((of, found[3]) in read)
    for kernel in BOTH:
        columns = kernel.rows_beside(
            [None if some is None else table(some) for some in tables],
            np.array([of for of, _, _ in rows], np.int32),
            np.array([ordinal for _, ordinal, _ in rows], np.uint32),
            np.array([moved for _, _, moved in rows], np.bool_),
            bounds_of(np.array([len(group) for group in groups], np.int64)),
            depth_below,
            bytes_max,
            left_out,
        )
        assert [column.dtype for column in columns] == [np.int32, np.uint32, np.intp]
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_colocated_rows_of_many_groups_are_found_once(kernel: Any) -> None:
    """Each row between the rows of a group has two neighbours there."""
    rows = table([(1, 0, 0, number // 64) for number in range(4001)])
    ordinals = np.tile(np.arange(0, 4001, 2, dtype=np.uint32), 2)
    of, found, groups = kernel.rows_beside(
        [rows],
        np.zeros(len(ordinals), np.int32),
        ordinals,
        np.ones(len(ordinals), np.bool_),
        np.array([0, 2001, 4002], np.uint32),
        1,
        1,
    )
    assert found.tolist() == [*range(1, 4001, 2)] * 2
    assert groups.tolist() == [0] * 2000 + [1] * 2000
    assert not of.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"which": np.zeros(1, np.int64)}, "which int64"),
        ({"ordinals": np.zeros(1, np.int32)}, "ordinals int32"),
        ({"moved": np.zeros(1, np.uint8)}, "moved uint8"),
        ({"bounds": np.zeros(2, np.int64)}, "bounds int64"),
        ({"ordinals": np.zeros(2, np.uint32)}, "which has 1 entries, ordinals 2, moved 1"),
        ({"bounds": np.array([0, 2], np.uint32)}, "ascending from 0 to 1"),
        ({"bounds": np.array([0, 1, 0, 1], np.uint32)}, "ascending from 0 to 1"),
        ({"bounds": np.zeros(0, np.uint32)}, "ascending from 0 to 1"),
        ({"which": np.array([1], np.int32)}, "which 1 to 1: there are 1 tables"),
        ({"which": np.array([-1], np.int32)}, "which -1 to -1"),
        ({"tables": [np.zeros(4, [("lengths", "<u4")])]}, "of which blocks, depths, kinds are not so"),
        ({"tables": [np.zeros(4, CHUNK_ROW)[::2]]}, "tables.0. .* want contiguous rows"),
        ({"tables": [np.zeros(2, CHUNK_ROW), np.zeros(2, np.uint8)]}, "tables.1. uint8"),
    ],
)
def test_colocated_rows_refuse_arrays_that_do_not_agree(kernel: Any, change: dict[str, Any], message: str) -> None:
    given_ = {
        "tables": [np.zeros(3, CHUNK_ROW)],
        "which": np.zeros(1, np.int32),
        "ordinals": np.zeros(1, np.uint32),
        "moved": np.ones(1, np.bool_),
        "bounds": np.array([0, 1], np.uint32),
        "depth_below": 4,
        "bytes_max": 9,
    }
    assert not len(kernel.rows_beside(**given_)[0])
    with pytest.raises(BadInput, match=message):
        kernel.rows_beside(**(given_ | change))
