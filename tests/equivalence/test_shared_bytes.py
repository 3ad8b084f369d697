"""Compare the compiled count of shared bytes with its definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.lab.generated_data import mutate, random_bytes, records_like, text_like
from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.native import _shared_bytes as compiled
from nearkin_shared.kernels.reference import shared_bytes_reference as reference

KERNELS = pytest.mark.parametrize("kernel", [compiled, reference], ids=["compiled", "reference"])


def side(chunks: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    return b"".join(chunks), (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64), lengths


def scattered(chunks: list[bytes], buffers: int = 1) -> tuple[list[bytes], np.ndarray, np.ndarray, np.ndarray]:
    """Return the chunks spread over buffers, with other bytes between them."""
    content, which, offsets = [bytearray() for _ in range(buffers)], [], []
    for number, chunk in enumerate(chunks):
        mine = content[number % buffers]
        mine += random_bytes(number % 3, number)
        which.append(number % buffers)
        offsets.append(len(mine))
        mine += chunk
    for mine in content:
        mine += b"behind"
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    return [bytes(mine) for mine in content], np.array(which, np.int32), np.array(offsets, np.uint64), lengths


def bounds(*ends: int) -> np.ndarray:
    return np.array([0, *ends], np.uint32)


def shared(
    kernel: Any, targets: list[bytes], bases: list[bytes], groups: Any = None, buffers: int = 1
) -> list[list[int]]:
    target_bounds, base_bounds = groups or (bounds(len(targets)), bounds(len(bases)))
    found = kernel.shared_bytes(*side(targets), target_bounds, *scattered(bases, buffers), base_bounds)
    assert (found.dtype, found.shape[1]) == (np.uint32, 4)
    return found.tolist()


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[bytes], list[bytes], tuple[np.ndarray, np.ndarray]]:
    make = draw(st.sampled_from([text_like, records_like, random_bytes, lambda count, seed: bytes(count)]))
    base = make(draw(st.integers(0, 4000)), draw(st.integers(0, 3)))
    target = mutate(base, draw(st.integers(0, 99)), edits=draw(st.integers(0, 12)))

    def cut(data: bytes) -> list[bytes]:
        cuts = sorted({0, len(data), *(p % (len(data) + 1) for p in draw(st.lists(st.integers(0, 5000), max_size=6)))})
        return [data[a:b] for a, b in itertools.pairwise(cuts)]

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
@given(sides(), st.integers(1, 4))
def test_compiled_count_equals_definition(given_sides: Any, buffers: int) -> None:
    """The bases may be anywhere in any buffer."""
    targets, bases, groups = given_sides
    assert shared(compiled, targets, bases, groups, buffers) == shared(reference, targets, bases, groups)


@settings(max_examples=60, deadline=None)
@given(sides())
def test_shared_bytes_are_bounded_by_target_and_group(given_sides: Any) -> None:
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
def test_equal_chunks_share_all_and_noise_nothing(kernel: Any) -> None:
    text, noise = text_like(3000, 1), random_bytes(3000, 2)
    assert shared(kernel, [text, noise], [random_bytes(500, 3), text]) == [[0, 1, 3000, 1]]


@KERNELS
def test_match_of_23_bytes_is_found_and_one_of_15_is_not(kernel: Any) -> None:
    base = random_bytes(400, 1)
    found = 0
    for at in range(40):
        wide, narrow = (random_bytes(50, 2) + base[at : at + n] + random_bytes(9, 3) for n in (23, 15))
        rows = shared(kernel, [wide], [base])
        assert rows in ([], [[0, 0, 23, 1]])
        found += bool(rows)
        assert shared(kernel, [narrow], [base]) == []
    assert found > 30  # two positions with one hash: the table has replaced the earlier one


@KERNELS
def test_no_chunks_share_nothing(kernel: Any) -> None:
    assert shared(kernel, [], []) == []
    assert shared(kernel, [b"x" * 100], []) == []
    assert shared(kernel, [], [b"x" * 100]) == []
    assert shared(kernel, [b"", b"seven b"], [b"x" * 100, b""]) == []


@KERNELS
def test_wrong_arrays_are_refused_by_name(kernel: Any) -> None:
    payload, offsets, lengths = side([b"x" * 100])
    wrong: Any
    sides = {
        "target": (payload, offsets, lengths, bounds(1)),
        "base": ([b"y", payload], np.array([1], np.int32), offsets, lengths, bounds(1)),
    }
    for wrong, message in (
        ({-1: bounds(2)}, "{} bounds end at 2"),
        ({-1: np.array([1], np.uint32)}, "{} bounds end at 1"),
        ({-1: np.array([0, 1])}, "{} bounds are int64"),
        ({-1: np.zeros(0, np.uint32)}, r"{} bounds are uint32\[0\]"),
        ({-1: bounds(0, 1)}, "groups of"),
        ({-3: offsets + np.uint64(1)}, "reaches past|leaves buffer 1"),
        ({-2: np.array([2**32 - 1], np.uint32)}, "reaches past|leaves buffer 1"),
        ({-3: offsets.astype(np.uint32)}, "offsets"),
        ({-2: lengths.astype(np.int64)}, "lengths"),
    ):
        for name in sides:
            with pytest.raises(BadInput, match=message.format(name)):
                kernel.shared_bytes(*(part for of in sides for part in changed(sides[of], wrong if of == name else {})))
    for wrong, message in (
        ({1: np.array([2], np.int32)}, "names buffer 2: there are 2"),
        ({1: np.array([-1], np.int32)}, "names buffer -1"),
        ({1: np.array([1])}, "which int64"),
        ({1: np.array([1, 1], np.int32)}, "has 1 entries: which has 2"),
        ({0: [b"y", 5]}, r"buffers\[1\] int"),
    ):
        with pytest.raises(BadInput, match=message):
            kernel.shared_bytes(*sides["target"], *changed(sides["base"], wrong))


def changed(side: tuple[Any, ...], by_index: dict[int, Any]) -> list[Any]:
    result = list(side)
    for index, value in by_index.items():
        result[index] = value
    return result


@KERNELS
def test_more_bytes_than_the_table_names_are_refused(kernel: Any) -> None:
    few = (*side([b"x" * 100]), bounds(1))
    count = (1 << 13) + 1  # of 1 MiB each, all at the same offset
    lengths = np.full(count, 1 << 20, np.uint32)
    many = ([bytes(1 << 20)], np.zeros(count, np.int32), np.zeros(count, np.uint64), lengths, bounds(count))
    with pytest.raises(BadInput, match=f"a group of {count << 20} bytes of bases: want at most {1 << 33}"):
        kernel.shared_bytes(*few, *many)


@KERNELS
def test_bases_of_all_sizes_are_kept_apart(kernel: Any) -> None:
    """Most of 40,000 bases are too short for the table, and one is longer than any chunk."""
    large = np.random.default_rng(1).integers(0, 256, (1 << 20) + 5000, np.uint8).tobytes()
    small = np.random.default_rng(2).integers(0, 256, 3 * 1000, np.uint8).tobytes()
    buffers, count = [large, small, b"1234567"], 40_000
    which, offsets, lengths = np.full(count, 2, np.int32), np.zeros(count, np.uint64), np.full(count, 7, np.uint32)
    for row, (buffer, offset, length) in {
        70: (1, 0, 1000),
        71: (1, 1000, 1000),
        33_000: (0, 0, len(large)),
        39_999: (1, 2000, 1000),
    }.items():
        which[row], offsets[row], lengths[row] = buffer, offset, length
    targets = [small[1000:2000], large[-400:], small[2500:] + small[:500]]
    found = kernel.shared_bytes(*side(targets), bounds(3), buffers, which, offsets, lengths, bounds(count))
    assert found.tolist() == [[0, 71, 1000, 1], [1, 33_000, 400, 1], [2, 39_999, 500, 1], [2, 70, 500, 1]]
