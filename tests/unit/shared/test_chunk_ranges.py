"""Whole chunks of ascending ranges of a version."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nearkin_shared.reading import chunk_ranges
from nearkin_shared.reading.chunk_ranges import ChunkRanges, PlacedChunks
from nearkin_shared.types import NAME_BYTES, Locations, StoredChunks

LENGTHS = [10, 20, 30, 40] * 25
ZEROS = frozenset((7, 8, 50))
"""Chunks of zeros, which have no location."""
ENDS = np.cumsum(LENGTHS).tolist()
STARTS = [0, *ENDS[:-1]]


def ranges_of(asked: list[tuple[int, int]]) -> ChunkRanges:
    """Return the chunks of a version of 2,500 bytes, and note in `asked` what is looked up."""

    def find(start: int, stop: int) -> Iterator[PlacedChunks]:
        asked.append((start, stop))
        rows = [row for row in range(len(LENGTHS)) if STARTS[row] < stop and ENDS[row] > start and row not in ZEROS]
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            ordinals = np.array(part, np.uint32)
            locations = Locations(np.ones(len(part), np.uint64), ordinals)
            names = np.repeat(ordinals.astype(np.uint8)[:, None], NAME_BYTES, axis=1)
            chunks = StoredChunks(names, np.array([LENGTHS[row] for row in part], np.uint32), locations)
            yield PlacedChunks(np.array([STARTS[row] for row in part], np.int64), chunks)

    return ChunkRanges(find, ENDS[-1])


@pytest.mark.parametrize("window_bytes", [0, 400, 10_000])
def test_ranges_give_the_chunks_that_lie_within_them(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    monkeypatch.setattr(chunk_ranges, "WINDOW_BYTES", window_bytes)
    random = np.random.default_rng(3)
    for most in (5, 60, 400):
        ranges, start = ranges_of([]), 0
        while start < ENDS[-1]:
            stop = min(ENDS[-1], start + int(random.integers(1, most + 1)))
            found = list(ranges.within(start, stop))
            rows = [row for _, _, chunks in found for row in chunks.locations.ordinals.tolist()]
            assert rows == [
                row for row in range(len(LENGTHS)) if STARTS[row] >= start and ENDS[row] <= stop and row not in ZEROS
            ]
            for begin, end, chunks in found:
                ordinals = chunks.locations.ordinals.tolist()
                assert ordinals == [*range(ordinals[0], ordinals[-1] + 1)]
                assert (begin, end) == (STARTS[ordinals[0]], ENDS[ordinals[-1]])
                assert chunks.names[:, 0].tolist() == ordinals
            start = stop + int(random.integers(0, most))


def test_near_ranges_are_looked_up_together() -> None:
    asked: list[tuple[int, int]] = []
    ranges = ranges_of(asked)
    for start in range(0, 2_000, 100):
        assert list(ranges.within(start, start + 90))
    assert asked == [(0, ENDS[-1])]


def test_range_without_chunks_gives_none() -> None:
    assert list(ranges_of([]).within(12, 28)) == []
