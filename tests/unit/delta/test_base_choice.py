"""Test the choice of bases: by bounds of depth, and by two policies together."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nearkin.lab.generated_data import mutate, text_like
from nearkin_delta.base_choice import BaseChoice, PolicyChoice, Targets, join_choices, try_bases, try_shallower
from nearkin_shared.pipeline.stage import Contents
from nearkin_shared.types import Locations, Pieces
from nearkin_shared.utils.thread_pool import ThreadPool


def test_chunk_gets_bases_below_its_own_depth_bound() -> None:
    content = text_like(8192, 1)
    bases = [mutate(content, seed, edits=3) for seed in (1, 2)]
    targets = [mutate(content, seed, edits=4) for seed in (3, 4, 5)]
    chosen = try_shallower(_targets(targets), _contents(bases, depths=[0, 2]), np.array([3, 1, 0], np.uint8))
    assert chosen.found.tolist() == [True, True, False]
    assert chosen.rows[chosen.bounds[1] : chosen.bounds[2]].tolist() == [0]
    assert chosen.depths[1] == 0


def test_base_above_depth_bound_takes_no_shared_bytes() -> None:
    content = text_like(8192, 1)
    target = mutate(content, 3, edits=4)
    # The nearer base shares more and would count all shared bytes if both were compared.
    chosen = try_shallower(_targets([target]), _contents([target, content], depths=[2, 1]), np.array([2], np.uint8))
    assert chosen.found.tolist() == [True]
    assert chosen.rows.tolist() == [1]


@pytest.mark.parametrize("per_group", [1, 3, 200])
def test_worker_pool_finds_the_bases_of_one_thread(per_group: int) -> None:
    count = 400  # of 8 KiB: three parts, and a group of 200 does not end where a part would
    contents = [text_like(8192, seed) for seed in range(40)]
    targets = _targets([mutate(contents[i % 40], i, edits=1 + i % 9) for i in range(count)])
    bases = _contents(
        [mutate(contents[i % 40], 1000 + i, edits=3) for i in range(count)], depths=[i % 4 for i in range(count)]
    )
    bounds = np.append(np.arange(0, count, per_group), count).astype(np.uint32)
    alone = try_bases(targets, bounds, bases, bounds)
    assert alone.found.sum() > count // 2
    with ThreadPoolExecutor(2) as threads:
        helped = try_bases(targets, bounds, bases, bounds, ThreadPool(threads, 2))
    for name in ("found", "bounds", "rows", "depths", "rest", "alone"):
        assert np.array_equal(getattr(helped, name), getattr(alone, name)), name


def test_bases_of_two_policies_are_joined() -> None:
    near, similar = [b"a" * 10, b"bb" * 10, b"c" * 10], [b"never chosen" * 9, b"d" * 30]
    one = _contents(near, [0, 1, 0])
    two = _contents(similar, [2, 3])
    two.locations.containers[:] = 8
    ranks = np.array([9, 9, 9, 9], np.uint8)
    parts = [
        PolicyChoice(np.arange(4), _chosen([[1, 2], [], [], [2]]), one, ranks),
        PolicyChoice(np.array([2]), _chosen([[1]]), two, np.array([3], np.uint8)),
    ]
    chosen, bases = join_choices(4, parts)
    assert chosen.found.tolist() == [True, False, True, True]
    assert chosen.ranks.tolist() == [9, 0, 3, 9]
    rows = [chosen.rows[first:last] for first, last in itertools.pairwise(chosen.bounds)]
    held = [[(int(bases.locations.containers[r]), int(bases.locations.ordinals[r])) for r in some] for some in rows]
    assert held == [[(7, 1), (7, 2)], [], [(8, 1)], [(7, 2)]]
    assert [bytes_of(bases.pieces.take(some)) for some in rows] == [[near[1], near[2]], [], [similar[1]], [near[2]]]
    assert [bytes_of(each.pieces) for each in (one, two)] == [near, similar]
    buffer_ids = {id(buffer) for buffer in (*one.pieces.buffers, *two.pieces.buffers)}
    assert {id(buffer) for buffer in bases.pieces.buffers} == buffer_ids, "bases must not be copied"


def test_bases_of_one_policy_are_not_copied() -> None:
    bases = _contents([b"a" * 10], [0])
    nothing = PolicyChoice(np.arange(2), _chosen([[], []]), bases, np.zeros(2, np.uint8))
    part = PolicyChoice(np.arange(2), _chosen([[], [0]]), bases, np.zeros(2, np.uint8))
    chosen, found = join_choices(2, [nothing, part])
    assert found is bases
    assert chosen.bounds.tolist() == [0, 0, 1]
    for parts in ([], [nothing], [nothing, nothing]):
        chosen, _ = join_choices(2, parts)
        assert not chosen.found.any()
        assert chosen.bounds.tolist() == [0, 0, 0]


def _chosen(rows: list[list[int]]) -> BaseChoice:
    bounds = np.cumsum([0, *map(len, rows)]).astype(np.uint32)
    found = np.diff(bounds) > 0
    depths, rest = np.zeros(len(rows), np.uint8), np.ones(len(rows), np.uint32)
    return BaseChoice(found, bounds, np.array([r for some in rows for r in some], np.intp), depths, rest)


def _targets(chunks: list[bytes]) -> Targets:
    payload, offsets, lengths = _concatenated(chunks)
    return Targets(payload, offsets, lengths)


def _contents(chunks: list[bytes], depths: list[int]) -> Contents:
    payload, offsets, lengths = _concatenated(chunks)
    count = len(chunks)
    locations = Locations(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint32))
    pieces = Pieces.of(payload, offsets, lengths)
    return Contents(locations, pieces, np.array(depths, np.uint8), np.ones(count, np.bool_))


def bytes_of(pieces: Pieces) -> list[bytes]:
    rows = zip(pieces.which, pieces.offsets.tolist(), pieces.lengths.tolist(), strict=True)
    return [bytes(pieces.buffers[buffer][first : first + length]) for buffer, first, length in rows]


def _concatenated(chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)
    return np.frombuffer(b"".join(chunks), np.uint8), offsets, lengths
