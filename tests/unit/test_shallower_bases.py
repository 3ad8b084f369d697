"""Bases for chunks that may not get deeper: each has its own bound, and what is beyond it takes nothing away."""

from __future__ import annotations

import numpy as np

from nearkin.records import Locations
from nearkin.stage import Contents
from nearkin.testing.generated import mutated, text_like
from nearkin_delta.bases import Targets, try_shallower


def test_each_chunk_finds_the_bases_that_are_less_deep_than_its_own_bound() -> None:
    content = text_like(8192, 1)
    bases = [mutated(content, seed, edits=3) for seed in (1, 2)]
    targets = [mutated(content, seed, edits=4) for seed in (3, 4, 5)]
    chosen = try_shallower(_targets(targets), _contents(bases, depths=[0, 2]), np.array([3, 1, 0], np.uint8))
    assert chosen.found.tolist() == [True, True, False]
    assert chosen.rows[chosen.bounds[1] : chosen.bounds[2]].tolist() == [0]
    assert chosen.depths[1] == 0


def test_a_base_that_is_too_deep_takes_no_bytes_from_one_that_is_not() -> None:
    content = text_like(8192, 1)
    target = mutated(content, 3, edits=4)
    # The nearer one, which shares more, comes first: compared with both, it is the one that all is counted for.
    chosen = try_shallower(_targets([target]), _contents([target, content], depths=[2, 1]), np.array([2], np.uint8))
    assert chosen.found.tolist() == [True]
    assert chosen.rows.tolist() == [1]


def _targets(chunks: list[bytes]) -> Targets:
    payload, offsets, lengths = _laid(chunks)
    return Targets(payload, offsets, lengths)


def _contents(chunks: list[bytes], depths: list[int]) -> Contents:
    payload, offsets, lengths = _laid(chunks)
    count = len(chunks)
    locations = Locations(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint32))
    return Contents(locations, payload, offsets, lengths, np.array(depths, np.uint8), np.ones(count, np.bool_))


def _laid(chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(chunk) for chunk in chunks], np.uint32)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)
    return np.frombuffer(b"".join(chunks), np.uint8), offsets, lengths
