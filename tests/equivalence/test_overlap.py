"""What chunks share with bases: the compiled count equals its definition, and what it counts is there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.errors import BadInput
from nearkin.kernels import _overlap as compiled
from nearkin.kernels import _overlap_reference as reference
from nearkin.testing.generated import mutated, random_bytes, records_like, text_like

KERNELS = pytest.mark.parametrize("kernel", [compiled, reference], ids=["compiled", "reference"])


def side(chunks: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    return b"".join(chunks), (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64), lengths


def bounds(*ends: int) -> np.ndarray:
    return np.array([0, *ends], np.uint32)


def shared(kernel: Any, targets: list[bytes], bases: list[bytes], groups: Any = None) -> list[list[int]]:
    target_bounds, base_bounds = groups or (bounds(len(targets)), bounds(len(bases)))
    found = kernel.shared_bytes(*side(targets), target_bounds, *side(bases), base_bounds)
    assert (found.dtype, found.shape[1]) == (np.uint32, 4)
    return found.tolist()


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[bytes], list[bytes], tuple[np.ndarray, np.ndarray]]:
    make = draw(st.sampled_from([text_like, records_like, random_bytes, lambda count, seed: bytes(count)]))
    base = make(draw(st.integers(0, 4000)), draw(st.integers(0, 3)))
    target = mutated(base, draw(st.integers(0, 99)), edits=draw(st.integers(0, 12)))

    def cut(data: bytes) -> list[bytes]:
        places = sorted(
            {0, len(data), *(p % (len(data) + 1) for p in draw(st.lists(st.integers(0, 5000), max_size=6)))}
        )
        return [data[a:b] for a, b in itertools.pairwise(places)]

    def grouped(count: int, inner: list[int]) -> np.ndarray:
        return bounds(*sorted(n % (count + 1) for n in inner), count)

    targets, bases = cut(target), cut(base)
    inner = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2))
    return (
        targets,
        bases,
        (grouped(len(targets), [a for a, _ in inner]), grouped(len(bases), [b for _, b in inner])),
    )


@settings(max_examples=120, deadline=None)
@given(sides())
def test_the_compiled_count_equals_the_definition(given_sides: Any) -> None:
    assert shared(compiled, *given_sides) == shared(reference, *given_sides)


@settings(max_examples=60, deadline=None)
@given(sides())
def test_no_more_is_shared_than_a_target_has_and_only_within_its_group(given_sides: Any) -> None:
    targets, bases, (target_bounds, base_bounds) = given_sides
    total = np.zeros(len(targets), np.int64)
    for target, base, shared_bytes, matches in shared(compiled, targets, bases, (target_bounds, base_bounds)):
        total[target] += shared_bytes
        assert 16 * matches <= shared_bytes
        group = int(np.searchsorted(target_bounds, target, side="right")) - 1
        while not base_bounds[group] <= base < base_bounds[group + 1]:
            group -= 1  # empty groups share a bound
            assert target_bounds[group] <= target < target_bounds[group + 1]
    assert (total <= [len(chunk) for chunk in targets]).all()


@KERNELS
def test_equal_chunks_share_everything_and_noise_nothing(kernel: Any) -> None:
    text, noise = text_like(3000, 1), random_bytes(3000, 2)
    assert shared(kernel, [text, noise], [random_bytes(500, 3), text]) == [[0, 1, 3000, 1]]


@KERNELS
def test_a_match_of_23_bytes_is_found_wherever_it_lies_and_one_of_15_is_none(kernel: Any) -> None:
    base = random_bytes(400, 1)
    found = 0
    for at in range(40):
        wide, narrow = (random_bytes(50, 2) + base[at : at + n] + random_bytes(9, 3) for n in (23, 15))
        rows = shared(kernel, [wide], [base])
        assert rows in ([], [[0, 0, 23, 1]])
        found += bool(rows)
        assert shared(kernel, [narrow], [base]) == []
    assert found > 30  # two positions with one hash: the earlier one is not known any more


@KERNELS
def test_nothing_is_shared_with_nothing(kernel: Any) -> None:
    assert shared(kernel, [], []) == []
    assert shared(kernel, [b"x" * 100], []) == []
    assert shared(kernel, [], [b"x" * 100]) == []
    assert shared(kernel, [b"", b"seven b"], [b"x" * 100, b""]) == []


@KERNELS
def test_wrong_arrays_are_refused_by_name(kernel: Any) -> None:
    payload, offsets, lengths = side([b"x" * 100])
    good = (payload, offsets, lengths, bounds(1))
    for wrong, message in (
        ((payload, offsets, lengths, bounds(2)), "bounds end at 2"),
        ((payload, offsets, lengths, np.array([1], np.uint32)), "bounds end at 1"),
        ((payload, offsets, lengths, np.array([0, 1])), "bounds are int64"),
        ((payload, offsets, lengths, np.zeros(0, np.uint32)), r"bounds are uint32\[0\]"),
        ((payload, offsets + np.uint64(1), lengths, bounds(1)), "reaches past"),
        ((payload, offsets.astype(np.uint32), lengths, bounds(1)), "offsets is uint32"),
        ((payload, offsets, lengths, bounds(0, 1)), "groups of"),
    ):
        for args in ((*wrong, *good), (*good, *wrong)):
            with pytest.raises(BadInput, match=message):
                kernel.shared_bytes(*args)


@KERNELS
def test_more_than_a_table_can_name_is_refused(kernel: Any) -> None:
    few = (*side([b"x" * 100]), bounds(1))
    many = (b"x", np.zeros(1 << 15, np.uint64), np.ones(1 << 15, np.uint32), bounds(1 << 15))
    with pytest.raises(BadInput, match="a group of 32768 bases: want at most 32767"):
        kernel.shared_bytes(*few, *many)
    long = (bytes((1 << 20) + 1), np.zeros(1, np.uint64), np.full(1, (1 << 20) + 1, np.uint32), bounds(1))
    with pytest.raises(BadInput, match="a base of 1048577 bytes: want at most 1048576"):
        kernel.shared_bytes(*few, *long)
