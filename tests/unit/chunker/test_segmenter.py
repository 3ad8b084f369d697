"""Test the segmenter.

Bounds hold, cuts depend on content, and pieces give the segments of the whole.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_chunker.stage import segment_bounds
from nearkin_shared.types import U8, U32, Bools
from tests.support.data.samples import noise

BYTES_MAX = 64 * 1024


def stream(count: int, seed: str = "s", largest: int = 9000) -> tuple[U8, U32, Bools]:
    """Return names, lengths and zero flags of `count` chunks, derived from content alone."""
    names = noise(count * 32, seed).reshape(count, 32)
    lengths = (names[:, 30].astype(np.uint32) * 256 + names[:, 31]) % np.uint32(largest) + np.uint32(1)
    return names, lengths.astype(np.uint32), np.zeros(count, np.bool_)


def bounds_of(chunks: tuple[U8, U32, Bools], target: int = 16, *, final: bool = True) -> list[int]:
    return [int(bound) for bound in segment_bounds(*chunks, target, BYTES_MAX, final)]


def test_segments_are_bounded_and_cover_each_chunk_once() -> None:
    chunks = stream(3000)
    bounds = bounds_of(chunks)
    assert (bounds[0], bounds[-1]) == (0, 3000)
    sizes = [int(chunks[1][a:b].sum()) for a, b in pairwise(bounds)]
    assert max(sizes) <= BYTES_MAX
    assert min(b - a for a, b in pairwise(bounds)) > 0


def test_segment_has_about_the_target_chunks() -> None:
    for target in (4, 16, 64):
        bounds = bounds_of(stream(8000, largest=200), target)
        assert 0.75 * target < 8000 / (len(bounds) - 1) < 1.3 * target


def test_chunk_of_segment_size_is_a_segment() -> None:
    names, lengths, zero = stream(3)
    lengths[:] = BYTES_MAX
    assert bounds_of((names, lengths, zero)) == [0, 1, 2, 3]


def test_no_chunks_are_no_segments() -> None:
    assert bounds_of(stream(0)) == [0]
    assert bounds_of(stream(0), final=False) == [0]


def test_zero_chunks_never_end_a_segment_by_their_name() -> None:
    names, lengths, _ = stream(100, largest=10)
    names = names.copy()
    names[:, :2] = 0  # each would end one
    assert len(bounds_of((names, lengths, np.zeros(100, np.bool_)))) == 101
    assert bounds_of((names, lengths, np.ones(100, np.bool_))) == [0, 100]


@pytest.mark.parametrize("at", [1, 700, 1500])
def test_insertion_moves_only_nearby_boundaries(at: int) -> None:
    old, new = stream(2000), stream(3, "new")
    names, lengths, zero = (np.concatenate([old[column][:at], new[column], old[column][at:]]) for column in range(3))
    before = {bound if bound <= at else bound + 3 for bound in bounds_of(old)}
    after = set(bounds_of((names, lengths, zero)))
    differing = before ^ after
    assert all(at - 20 <= bound <= at + 150 for bound in differing)
    assert len(differing) <= 12


@given(st.integers(0, 300), st.lists(st.integers(0, 300), max_size=4), st.sampled_from([1, 4, 16]), st.integers(0, 9))
def test_pieces_give_segments_of_the_whole(count: int, cuts: list[int], target: int, seed: int) -> None:
    names, lengths, zero = stream(count, str(seed))
    whole = bounds_of((names, lengths, zero), target)
    found, start = [0], 0
    for end in sorted({min(cut, count) for cut in cuts}):
        part = bounds_of((names[start:end], lengths[start:end], zero[start:end]), target, final=False)
        found += [start + bound for bound in part[1:]]
        start = found[-1]
    rest = bounds_of((names[start:], lengths[start:], zero[start:]), target)
    assert found + [start + bound for bound in rest[1:]] == whole


@given(
    count=st.integers(0, 60),
    target=st.sampled_from([1, 2, 8, 64]),
    bytes_max=st.integers(9_001, 120_000),
    final=st.booleans(),
    seed=st.integers(0, 50),
)
def test_whole_and_single_steps_end_segments_alike(
    count: int, target: int, bytes_max: int, final: bool, seed: int
) -> None:
    names, lengths, zero = stream(count, str(seed))
    expected, held, start = [0], 0, 0
    for row in range(count):
        if row > start and held + int(lengths[row]) > bytes_max:
            expected.append(row)
            start, held = row, 0
        held += int(lengths[row])
        if (int(names[row, 0]) | int(names[row, 1]) << 8) % target == 0 and not zero[row]:
            expected.append(row + 1)
            start, held = row + 1, 0
    if final and expected[-1] < count:
        expected.append(count)
    assert segment_bounds(names, lengths, zero, target, bytes_max, final).tolist() == expected
