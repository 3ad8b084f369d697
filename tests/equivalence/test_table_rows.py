"""Compare both implementations that copy rows of several tables.

Equal numbers, equal rows, equal stop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _table_rows
from nearkin_shared.kernels.reference import table_rows_reference

BOTH = [_table_rows, table_rows_reference]
ROW = np.dtype([("name", "u1", 3), ("wide", "<u8"), ("small", "u1")])


@pytest.fixture(params=BOTH, ids=["cython", "python"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


def table(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, rows * ROW.itemsize, np.uint8).view(ROW)


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=300), st.integers(1, 4))
def test_values_are_numbered_by_first_occurrence(values: list[int], step: int) -> None:
    array = np.array(values, np.uint64)[::step]
    expected = list(dict.fromkeys(array.tolist()))
    for kernel in BOTH:
        numbers, distinct = kernel.numbered(array)
        assert (numbers.dtype, distinct.dtype) == (np.int32, np.uint64)
        assert distinct.tolist() == expected
        assert [expected[number] for number in numbers.tolist()] == array.tolist()


def test_many_values_are_numbered_alike(kernel: Any) -> None:
    values = np.arange(100_000, dtype=np.uint64) << np.uint64(32)
    numbers, distinct = kernel.numbered(np.concatenate([values, values[::-1]]))
    assert np.array_equal(distinct, values)
    assert np.array_equal(numbers, np.concatenate([np.arange(100_000), np.arange(100_000)[::-1]]))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.data())
def test_rows_are_copied_until_the_limit(sizes: list[int], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=60))
    room_bytes = data.draw(st.integers(-5, 3000))
    expected = next((n for n in range(1, len(rows)) if sum(sizes[row] for row in rows[:n]) >= room_bytes), len(rows))
    for kernel in BOTH:
        assert kernel.rows_to_fill(np.array(rows, np.intp), np.array(sizes, np.uint32), room_bytes) == expected


@pytest.mark.parametrize(
    ("rows", "sizes", "named"),
    [
        (np.array([0, 3], np.intp), np.ones(3, np.uint32), "row 3: there are 3"),
        (np.array([-1], np.intp), np.ones(3, np.uint32), "row -1: there are 3"),
        (np.array([0], np.int32), np.ones(3, np.uint32), "rows int32"),
        (np.array([0], np.intp), np.ones(3, np.uint64), "sizes uint64"),
        (np.array([[0]], np.intp), np.ones(3, np.uint32), "rows int64"),
    ],
)
def test_rows_out_of_range_are_refused(kernel: Any, rows: np.ndarray, sizes: np.ndarray, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        kernel.rows_to_fill(rows, sizes, 100)


@given(st.data())
def test_rows_are_copied_from_their_own_tables(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=4))
    tables = [None if size is None else table(size, seed) for seed, size in enumerate(sizes)]
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 22)), max_size=40))
    which, ordinals = np.array([a for a, _ in pairs], np.int32), np.array([b for _, b in pairs], np.uint32)
    beyond = [i for i, (a, b) in enumerate(pairs) if (size := sizes[a]) is not None and b >= size]
    expected = beyond[0] if beyond else len(pairs)
    for kernel in BOTH:
        out = table(len(pairs), 99)
        assert kernel.take_rows(tables, which, ordinals, out) == expected
        for row, (a, b) in zip(out[:expected], pairs, strict=False):
            rows = tables[a]
            assert row.tobytes() == (bytes(ROW.itemsize) if rows is None else rows[b].tobytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"which": np.array([0, 1], np.int32)}, "which 0 to 1: there are 1 tables"),
        ({"which": np.array([-1, 0], np.int32)}, "which -1 to 0"),
        ({"which": np.array([0], np.int32)}, "which has 1 entries"),
        ({"which": np.zeros(2, np.int64)}, "int32"),
        ({"ordinals": np.zeros(2, np.uint64)}, "uint32"),
        ({"out": table(3, 0)}, "out 3"),
        ({"out": np.zeros(2, np.uint8)}, "want contiguous rows"),
        ({"out": table(4, 0)[::2]}, "want contiguous rows"),
        ({"tables": [table(4, 0)[::2]]}, "tables.0. .*want contiguous rows"),
    ],
)
def test_arrays_that_do_not_agree_are_refused(kernel: Any, change: dict[str, Any], message: str) -> None:
    given = {"tables": [table(4, 1)], "which": np.zeros(2, np.int32), "ordinals": np.zeros(2, np.uint32)}
    given["out"] = table(2, 2)
    assert kernel.take_rows(**given) == 2
    with pytest.raises(BadInput, match=message):
        kernel.take_rows(**(given | change))


def test_values_of_another_dtype_are_refused(kernel: Any) -> None:
    for values in (np.zeros(2, np.int64), np.zeros((2, 2), np.uint64), [1, 2]):
        with pytest.raises(BadInput, match="values"):
            kernel.numbered(values)
