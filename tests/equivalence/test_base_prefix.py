"""The compiled prefix does what the plain definition does."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.base_prefix import BasePrefix, BaseRows
from nearkin_shared.kernels.reference import base_prefix_reference as reference

PAYLOAD = np.random.default_rng(7).integers(0, 256, 4096, np.uint8)
SHIFTED = np.append(np.zeros(1, np.uint8), PAYLOAD)
BASES = st.tuples(st.sampled_from([1, 2, 1 << 63]), st.integers(0, 40), st.integers(0, 3000), st.integers(0, 1000))
CHUNKS = st.lists(st.lists(BASES, max_size=5), max_size=30)


def columns(chunks: list[list[tuple[int, int, int, int]]]) -> tuple[Any, ...]:
    bounds = np.cumsum([0, *(len(bases) for bases in chunks)]).astype(np.uint32)
    flat = np.array([base for bases in chunks for base in bases], np.uint64).reshape(-1, 4)
    narrow = flat.astype(np.uint32)
    which = (flat[:, 2] % 2).astype(np.int32)  # each base in the one buffer or the other, a byte further back there
    offsets = flat[:, 2] + which.astype(np.uint64)
    return bounds, flat[:, 0].copy(), narrow[:, 1].copy(), (PAYLOAD, SHIFTED), which, offsets, narrow[:, 3].copy()


def bases_of(kind: Any, chunks: list[list[tuple[int, int, int, int]]]) -> Any:
    return (reference.BaseRows if kind is reference.BasePrefix else BaseRows)(*columns(chunks))


def filled(kind: Any, batches: list[list[list[tuple[int, int, int, int]]]], bounds: tuple[int, int]) -> list[Any]:
    prefix, seen = kind(*bounds), list[Any]()
    for chunks in batches:
        taken = prefix.add(np.arange(len(chunks)), bases_of(kind, chunks))
        bases = [column.tolist() for column in prefix.bases()]
        seen.append((taken, len(prefix), bytes(prefix.content), bases))
    prefix.clear()
    seen.append((len(prefix), bytes(prefix.content), [column.tolist() for column in prefix.bases()]))
    prefix.add(np.arange(len(batches[0])), bases_of(kind, batches[0]))
    return [*seen, bytes(prefix.content)]


@settings(max_examples=200, deadline=None)
@given(st.lists(CHUNKS, min_size=1, max_size=4), st.tuples(st.integers(1, 8000), st.integers(1, 30)))
def test_add_takes_equal_bases_in_equal_order(batches: list[Any], bounds: tuple[int, int]) -> None:
    assert filled(BasePrefix, batches, bounds) == filled(reference.BasePrefix, batches, bounds)


@pytest.mark.parametrize("kind", [BasePrefix, reference.BasePrefix])
def test_add_thousands_of_bases_keeps_positions(kind: Any) -> None:
    prefix = kind(1 << 20, 4096)
    chunks = [[(container, ordinal, ordinal, 7)] for container in (3, 9) for ordinal in range(3000)]
    assert prefix.add(np.arange(len(chunks)), bases_of(kind, chunks)) == 4096
    containers, ordinals, starts = prefix.bases()
    assert ordinals.tolist() == [*range(3000), *range(1096)]
    assert containers.tolist() == [3] * 3000 + [9] * 1096
    content = bytes(prefix.content)
    assert all(content[start : start + 7] == bytes(PAYLOAD[i : i + 7]) for i, start in enumerate(starts[:3000]))


@pytest.mark.parametrize("kind", [BasePrefix, reference.BasePrefix])
def test_add_first_chunk_takes_all_its_bases(kind: Any) -> None:
    prefix = kind(10, 1)
    assert prefix.add(np.arange(2), bases_of(kind, [[(1, 1, 0, 50), (1, 2, 50, 50)], [(1, 3, 0, 1)]])) == 1
    assert bytes(prefix.content) == bytes(PAYLOAD[:100])
    assert prefix.add(np.arange(1), bases_of(kind, [[(1, 2, 50, 50)]])) == 0


@pytest.mark.parametrize("kind", [BaseRows, reference.BaseRows])
@pytest.mark.parametrize(
    ("index", "value", "named"),
    [
        (0, np.array([0, 2], np.uint32), "bounds up to 2"),
        (0, np.array([1, 0], np.uint32), "ascend"),
        (1, np.zeros(2, np.uint64), "2 containers"),
        (1, [1], "containers list"),
        (4, np.array([2], np.int32), "names buffer 2: there are 2"),
        (4, np.array([-1], np.int32), "names buffer -1"),
        (4, np.zeros(2, np.int32), "2 of which"),
        (5, np.array([4090], np.uint64), "offset 4090, 50 bytes: leaves buffer 0 of 4096"),
        (5, np.array([2**64 - 10], np.uint64), "leaves buffer 0"),
        (6, np.array([5000], np.uint32), "5000 bytes: leaves buffer 0"),
    ],
)
def test_add_refuses_bases_outside_their_arrays(kind: Any, index: int, value: Any, named: str) -> None:
    given_ = [*columns([[(1, 1, 0, 50)]])]
    assert len(kind(*given_)) == 1
    given_[index] = value
    with pytest.raises(BadInput, match=named):
        kind(*given_)


@pytest.mark.parametrize("kind", [BasePrefix, reference.BasePrefix])
@pytest.mark.parametrize(
    ("rows", "named"),
    [(np.array([1]), "rows up to 1"), (np.array([-1]), "from -1"), (np.array([0], np.int32), "rows int32")],
)
def test_add_refuses_rows_out_of_range(kind: Any, rows: Any, named: str) -> None:
    prefix = kind(100, 10)
    with pytest.raises(BadInput, match=named):
        prefix.add(rows, bases_of(kind, [[(1, 1, 0, 50)]]))
    assert len(prefix) == 0


def test_add_refuses_values_that_are_no_bases() -> None:
    with pytest.raises(TypeError):
        BasePrefix(100, 10).add(np.arange(1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [BasePrefix, reference.BasePrefix])
def test_prefix_refuses_bounds_without_room(kind: Any) -> None:
    with pytest.raises(BadInput, match="bytes_max 0"):
        kind(0, 1)


@pytest.mark.parametrize("kind", [BasePrefix, reference.BasePrefix])
def test_content_with_open_view_is_not_moved(kind: Any) -> None:
    """A prefix refuses changes while a view of its content is open."""
    prefix = kind(100, 10)
    prefix.add(np.arange(1), bases_of(kind, [[(1, 1, 0, 50)]]))
    with prefix.content as seen:
        with pytest.raises(BufferError):
            prefix.add(np.arange(1), bases_of(kind, [[(1, 2, 50, 30)]]))
        with pytest.raises(BufferError):
            prefix.clear()
        assert bytes(seen) == bytes(PAYLOAD[:50])
    assert prefix.add(np.arange(1), bases_of(kind, [[(1, 2, 50, 30)]])) == 1
    assert bytes(prefix.content) == bytes(PAYLOAD[:80])
    prefix.clear()
    assert len(prefix) == 0


def test_prefix_refuses_writes_by_callers() -> None:
    prefix = BasePrefix(1 << 20, 4096)
    prefix.add(np.zeros(1, np.intp), bases_of(BasePrefix, [[(1, 2, 3, 1000)]]))
    before = bytes(prefix.content)
    with pytest.raises((TypeError, BufferError)):
        io.BytesIO(b"other bytes").readinto(prefix)  # type: ignore[arg-type]
    with prefix.content as content, pytest.raises((TypeError, BufferError)):
        io.BytesIO(b"other bytes").readinto(content)
    assert bytes(prefix.content) == before
    prefix.clear()  # no view is open any more
