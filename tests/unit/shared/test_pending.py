"""Test pending index entries.

Of a super-feature the durable chunk is found first, of a chunk the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.types import NAME_BYTES, SEGMENT_ID_BYTES, ContainerId, Locations
from tests.support.data import samples

WAITING = ContainerId(77 << 20)
DURABLE = samples.read_all(samples.small_container())[0]


def features(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.uint64)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PendingIndex]:
    """Return an index with a durable chunk 0 and pending chunks 5 and 6."""
    below = LmdbIndex(tmp_path, samples.DOMAIN, 1 << 26)
    ids = np.zeros((len(DURABLE.segments), SEGMENT_ID_BYTES), np.uint8)
    of_chunk = np.zeros(1, np.uint32), features([10, 20, 30])
    below.publish(ContainerEntries(DURABLE, ids, {"finesse": of_chunk}))
    found = PendingIndex(below, samples.DOMAIN)
    where = Locations(np.full(2, WAITING, np.uint64), np.array([5, 6], np.uint32))
    found.add(
        samples.names_of([1, 2]),
        where,
        "finesse",
        where,
        features([10, 21, 0], [11, 20, 31]),
        np.full((1, SEGMENT_ID_BYTES), 9, np.uint8),
        Locations(np.full(1, WAITING, np.uint64), np.array([3], np.uint32)),
    )
    yield found
    below.close()


ASKED = {
    (10, 99, 99): (DURABLE.container, 0, 0),
    (11, 20, 99): (WAITING, 6, 0),  # the first rank with a match, in either container
    (0, 20, 99): (DURABLE.container, 0, 1),  # the chunk stored first
    (0, 21, 31): (WAITING, 5, 1),
    (0, 0, 31): (WAITING, 6, 2),
    (98, 97, 30): (DURABLE.container, 0, 2),
    (0, 0, 0): None,
    (7, 8, 9): None,
}


def located(index: PendingIndex, sketch: str = "finesse") -> list[tuple[int, int, int] | None]:
    locations, ranks, found = index.locate_bases(sketch, features(*map(list, ASKED)))
    rows = zip(locations.containers.tolist(), locations.ordinals.tolist(), ranks.tolist(), strict=True)
    return [row if is_found else None for row, is_found in zip(rows, found.tolist(), strict=True)]


def test_bases_are_found_by_rank_and_durable_first(index: PendingIndex) -> None:
    assert located(index) == list(ASKED.values())


def test_another_sketch_or_no_query_finds_nothing(index: PendingIndex) -> None:
    assert located(index, "odess") == [None] * len(ASKED)
    locations, ranks, found = index.locate_bases("finesse", np.zeros((4, 3), np.uint64))
    assert (len(locations), ranks.tolist(), found.tolist()) == (4, [0] * 4, [False] * 4)
    assert len(index.locate_bases("finesse", np.zeros((0, 3), np.uint64))[2]) == 0


def test_pending_chunks_and_segments_are_found_with_durable(index: PendingIndex) -> None:
    names = np.concatenate([samples.names_of([1, 2]), DURABLE.chunks.names[:1], np.full((1, NAME_BYTES), 3, np.uint8)])
    locations, found = index.locate_chunks(names)
    assert found.tolist() == [True, True, True, False]
    assert locations.containers[:3].tolist() == [WAITING, WAITING, DURABLE.container]
    assert locations.ordinals[:3].tolist() == [5, 6, 0]
    locations, found = index.locate_segments(np.full((1, SEGMENT_ID_BYTES), 9, np.uint8))
    assert (found.tolist(), locations.ordinals.tolist()) == ([True], [3])


def test_durable_entries_are_left_to_the_index_below(index: PendingIndex) -> None:
    index.on_published([WAITING])
    here = [row if row is None or row[0] == DURABLE.container else None for row in ASKED.values()]
    here[1] = (DURABLE.container, 0, 1)
    assert located(index) == here
    assert not index.locate_chunks(samples.names_of([1, 2]))[1].any()
