"""Test gap alignment.

Positions of fresh chunks, and the stored chunks that were between the same neighbours.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from nearkin_delta.gap_alignment import (
    GAP_CHUNKS_MAX,
    MARK_BYTES,
    OWN_BYTES,
    OWN_SHARE,
    STREAMS_MAX,
    Alignment,
    StreamMark,
)
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.directory import ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.pipeline.stage import Anchor, Gaps
from nearkin_shared.reading.stream_neighbours import ROWS_BEHIND, Neighbourhood
from nearkin_shared.storage.containers import ContainerSource
from nearkin_shared.types import ContainerId, FreshBatch, Locations, PairedBatch, SegmentBatch

OLD, NEW = 50, 60


def locations(rows: list[tuple[int, int]]) -> Locations:
    return Locations(np.array([c for c, _ in rows], np.uint64), np.array([o for _, o in rows], np.uint32))


def batch(text: str, blobs: str | None = None) -> PairedBatch:
    """Return a batch of one-chunk segments.

    `f` fresh, `z` zero, `r` repeated, `s` a known segment, `k` a known chunk.

    A known chunk in row i is chunk (or segment) 10 i of OLD.
    """
    count = len(text)
    rows = np.arange(count)
    is_fresh = np.array([c == "f" for c in text], np.bool_)
    in_segment = np.array([c == "s" for c in text], np.bool_)
    alone = np.array([c == "k" for c in text], np.bool_)
    first = rows.astype(np.int64)
    first[[c == "r" for c in text]] = int(np.argmax(is_fresh))
    where = (10 * rows).astype(np.uint32)
    segments = SegmentBatch(
        np.zeros(count, np.uint8),
        rows.astype(np.uint64),
        np.ones(count, np.uint32),
        np.zeros((count, 32), np.uint8),
        np.array([c == "z" for c in text], np.bool_),
        np.arange(count + 1, dtype=np.uint32),
        np.array([ord(c) for c in blobs] if blobs else [0] * count, np.uint32),
        np.zeros((count, 20), np.uint8),
    )
    fresh = FreshBatch(
        segments,
        in_segment,
        Locations(np.where(in_segment, np.uint64(OLD), np.uint64(0)), np.where(in_segment, where, np.uint32(0))),
        ~is_fresh,
        Locations(np.where(alone, np.uint64(OLD), np.uint64(0)), np.where(alone, where, np.uint32(0))),
        first,
        np.flatnonzero(is_fresh),
    )
    none = len(fresh.fresh)
    return PairedBatch(
        fresh, "none", np.zeros((none, 1), np.uint64), np.zeros(none, np.bool_), Locations.empty(none),
        np.zeros(none, np.uint8),
    )  # fmt: skip


def gap_rows(gaps: Gaps) -> list[tuple[int, int, int, int, int]]:
    """Return (left kind, left ordinal, right kind, right ordinal, fresh) of each gap."""
    rows = zip(gaps.left_kinds, gaps.left.ordinals, gaps.right_kinds, gaps.right.ordinals, gaps.fresh, strict=True)
    return [
        (int(lk), int(lo) if lk in (1, 2, 3) else 0, int(rk), int(ro) if rk in (1, 2) else 0, int(n))
        for lk, lo, rk, ro, n in rows
    ]


def test_gaps_end_at_known_chunks_not_at_zeros_or_repeats() -> None:
    found = gap_rows(Alignment().gaps(batch("kffzfrfskkf"), "s"))
    assert found == [(Anchor.CHUNK, 0, Anchor.SEGMENT, 70, 4), (Anchor.CHUNK, 90, Anchor.NONE, 0, 1)]


def test_gap_never_spans_blobs() -> None:
    found = gap_rows(Alignment().gaps(batch("kffkf", "aabbb"), "s"))
    assert found == [
        (Anchor.CHUNK, 0, Anchor.NONE, 0, 1),
        (Anchor.NONE, 0, Anchor.CHUNK, 30, 1),
        (Anchor.CHUNK, 30, Anchor.NONE, 0, 1),
    ]


def test_long_gap_is_split_into_continued_ones() -> None:
    found = gap_rows(Alignment().gaps(batch("k" + "f" * (2 * GAP_CHUNKS_MAX + 1) + "k"), "s"))
    last = 10 * (2 * GAP_CHUNKS_MAX + 2)
    assert found == [
        (Anchor.CHUNK, 0, Anchor.NONE, 0, GAP_CHUNKS_MAX),
        (Anchor.CONTINUED, 0, Anchor.NONE, 0, GAP_CHUNKS_MAX),
        (Anchor.CONTINUED, 0, Anchor.CHUNK, last, 1),
    ]


def test_stream_continues_at_the_end_of_its_last_batch() -> None:
    alignment = Alignment()
    alignment.follow(batch("ffk"), "s", None)
    assert gap_rows(alignment.gaps(batch("ff"), "s"))[0][:2] == (Anchor.CHUNK, 20)
    assert gap_rows(alignment.gaps(batch("ff"), "other"))[0][0] == Anchor.NONE
    assert gap_rows(alignment.gaps(batch("ff", "bb"), "s"))[0][0] == Anchor.NONE


def test_chunk_stored_by_the_blob_itself_is_no_anchor() -> None:
    alignment = Alignment()
    assert gap_rows(alignment.gaps(batch("f"), "s", StreamMark(OLD, 15, 25))) == [(Anchor.NONE, 0, Anchor.NONE, 0, 1)]
    # Chunk 10 was stored before the blob began; segments 30 and 70 and chunk 50 belong to the blob.
    found = gap_rows(alignment.gaps(batch("fkfsfkfs"), "s", StreamMark(OLD, 45, 45)))
    assert [gap[:1] + gap[2:3] for gap in found] == [
        (Anchor.NONE, Anchor.CHUNK),
        (Anchor.CHUNK, Anchor.NONE),
    ]
    assert gap_rows(alignment.gaps(batch("kf"), "next", StreamMark(OLD - 1)))[0][0] == Anchor.NONE
    assert gap_rows(alignment.gaps(batch("kf"), "later", StreamMark(OLD + 1)))[0][0] == Anchor.CHUNK


def test_chunk_stored_long_ago_by_the_blob_is_an_anchor() -> None:
    def skip_bytes(alignment: Alignment, here: StreamMark, size_bytes: int, text: str = "s") -> None:
        passing = batch(text)
        passing.fresh.batch.lengths[:] = size_bytes // len(text)
        if text == "s":
            alignment.pass_known(passing.fresh, "s", here)
        else:
            alignment.gaps(passing, "s", here)
            alignment.follow(passing, "s", None)

    for text in ("s", "kf"):
        alignment = Alignment()
        skip_bytes(alignment, StreamMark(OLD), MARK_BYTES, text)
        skip_bytes(alignment, StreamMark(OLD, 20, 30), OWN_BYTES - MARK_BYTES, text)
        own = gap_rows(alignment.gaps(batch("fkf"), "s", StreamMark(OLD, 100, 100)))
        assert own[0][2] == Anchor.NONE  # chunk 10 was stored since the blob began, too recently
        skip_bytes(alignment, StreamMark(OLD, 100, 100), MARK_BYTES, text)
        older = gap_rows(alignment.gaps(batch("fkfkf"), "s", StreamMark(OLD, 100, 100)))
        assert [gap[2:4] for gap in older] == [(Anchor.CHUNK, 10), (Anchor.NONE, 0)]  # chunk 30 still counts as its own
        for fresh, found in (OWN_SHARE - 1, Anchor.CHUNK), (OWN_SHARE, Anchor.NONE):
            few = gap_rows(alignment.gaps(batch("rk" + "z" * 99 + "f" * (fresh - 1)), "s", StreamMark(OLD, 100, 100)))
            assert few[0][0] == found  # a batch with few old chunks predicts nothing


def test_remembered_streams_are_bounded() -> None:
    alignment = Alignment()
    for stream in range(STREAMS_MAX + 5):
        alignment.follow(batch("k"), stream, None)
    assert gap_rows(alignment.gaps(batch("f"), 4))[0][0] == Anchor.NONE
    assert gap_rows(alignment.gaps(batch("f"), 5))[0][0] == Anchor.CHUNK


# --- stored neighbours -----------------------------------------------------------------------------------------------


class Directories:
    """Directories that a test defines.

    Container -> its recipes, one list a segment, of (container, ordinal).
    """

    def __init__(self, recipes: dict[int, list[list[tuple[int, int]]]]) -> None:
        self.recipes = recipes

    def directory(self, container: ContainerId) -> Directory:
        if container not in self.recipes:
            raise Corrupt("gone")
        segments = self.recipes[container]
        count = 1 + max((o for rows in segments for c, o in rows if c == container), default=-1)
        rows = [row for segment in segments for row in segment]
        none8, none32 = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        chunks = ChunkTable(
            np.zeros((count, 32), np.uint8), np.ones(count, np.uint32), none32, none32, none32, none8,
            Locations.empty(count), none8,
        )  # fmt: skip
        bounds = np.cumsum([0, *map(len, segments)]).astype(np.uint32)
        table = SegmentTable(bounds, np.zeros(len(segments), np.uint8), locations(rows))
        return Directory(container, b"", 1, (), None, chunks, table, PrefixTable.empty(0), 100, 0, 0)  # type: ignore[arg-type]


def own(container: int, *ordinals: int) -> list[tuple[int, int]]:
    return [(container, ordinal) for ordinal in ordinals]


def asked(*rows: tuple[Anchor, tuple[int, int], Anchor, tuple[int, int], int]) -> Gaps:
    return Gaps(
        locations([left for _, left, _, _, _ in rows]),
        np.array([kind for kind, _, _, _, _ in rows], np.uint8),
        locations([right for _, _, _, right, _ in rows]),
        np.array([kind for _, _, kind, _, _ in rows], np.uint8),
        np.array([n for _, _, _, _, n in rows], np.uint32),
    )


def between(recipes: dict[int, list[list[tuple[int, int]]]], *rows: object) -> list[list[int]]:
    """Return the ordinals of the chunks in each gap."""
    found = Neighbourhood(Directories(recipes)).between(asked(*rows))  # type: ignore[arg-type]
    ordinals = found.chunks.ordinals.tolist()
    return [ordinals[a:b] for a, b in zip(found.bounds[:-1], found.bounds[1:], strict=True)]


NONE = (0, 0)
RECIPES = {OLD: [own(OLD, *range(8)), own(OLD, *range(8, 20))]}


def test_chunks_between_two_anchors_are_all_returned() -> None:
    assert between(RECIPES, (Anchor.CHUNK, (OLD, 3), Anchor.CHUNK, (OLD, 6), 1)) == [[4, 5]]
    assert between(RECIPES, (Anchor.CHUNK, (OLD, 3), Anchor.CHUNK, (OLD, 4), 5)) == [[]]


def test_segments_are_anchors_and_gaps_cross_recipes() -> None:
    assert between(RECIPES, (Anchor.SEGMENT, (OLD, 0), Anchor.CHUNK, (OLD, 10), 2)) == [[8, 9]]
    assert between(RECIPES, (Anchor.CHUNK, (OLD, 5), Anchor.SEGMENT, (OLD, 1), 2)) == [[6, 7]]


def test_gap_with_one_anchor_takes_some_more_than_fresh() -> None:
    assert between(RECIPES, (Anchor.CHUNK, (OLD, 3), Anchor.NONE, NONE, 2)) == [[4, 5, 6, 7, 8]]
    assert between(RECIPES, (Anchor.NONE, NONE, Anchor.CHUNK, (OLD, 10), 2)) == [[5, 6, 7, 8, 9]]
    assert between(RECIPES, (Anchor.NONE, NONE, Anchor.NONE, NONE, 2)) == [[]]


def test_distant_anchors_are_both_tried() -> None:
    found = between(RECIPES, (Anchor.CHUNK, (OLD, 1), Anchor.CHUNK, (OLD, 18), 2))
    assert found == [[2, 3, 4, 5, 6, 15, 16, 17]]


def test_gap_continues_where_the_last_one_ended() -> None:
    found = between(
        RECIPES,
        (Anchor.CHUNK, (OLD, 1), Anchor.NONE, NONE, 4),
        (Anchor.CONTINUED, NONE, Anchor.NONE, NONE, 4),
        (Anchor.CONTINUED, NONE, Anchor.CHUNK, (OLD, 12), 2),
    )
    assert ROWS_BEHIND == 2  # the old version may have had fewer chunks up to here
    assert found == [[2, 3, 4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [8, 9, 10, 11]]


def test_stream_continues_some_rows_before_its_last_end() -> None:
    assert between(RECIPES, (Anchor.ROW, (OLD, 5), Anchor.CHUNK, (OLD, 7), 1)) == [[3, 4, 5, 6]]
    assert between(RECIPES, (Anchor.ROW, (OLD, 1), Anchor.NONE, NONE, 1)) == [[0, 1, 2, 3]]


def test_repeated_chunk_is_at_its_first_row_without_holes() -> None:
    """Holes are never bases."""
    recipes = {OLD: [[*own(OLD, 0, 1), (1, 4096), *own(OLD, 2, 1, 3)]]}
    assert between(recipes, (Anchor.CHUNK, (OLD, 1), Anchor.NONE, NONE, 2)) == [[2, 1, 3]]


def test_recipe_that_names_older_chunks_returns_them() -> None:
    recipes = {**RECIPES, NEW: [[(OLD, 2), (NEW, 0), (OLD, 4)]]}
    source = cast("ContainerSource", Directories(recipes))
    found = Neighbourhood(source).between(asked((Anchor.CHUNK, (NEW, 0), Anchor.NONE, NONE, 1)))
    assert list(zip(found.chunks.containers.tolist(), found.chunks.ordinals.tolist(), strict=True)) == [(OLD, 4)]
    assert (found.ends.containers.tolist(), found.ends.ordinals.tolist()) == ([NEW], [3])


def test_unchanged_chunk_has_neighbours_of_newest_version() -> None:
    """The chunk is stored in the first container; the second, which the other anchor is in, names it too."""
    recipes = {**RECIPES, NEW: [[*own(NEW, 0, 1), (OLD, 7), *own(NEW, 2, 3), (OLD, 9), *own(NEW, 4, 5)]]}
    known = Anchor.CHUNK, (NEW, 0), Anchor.CHUNK, (NEW, 1), 0
    assert between(recipes, known, (Anchor.CHUNK, (OLD, 7), Anchor.CHUNK, (OLD, 9), 1)) == [[], [2, 3]]
    assert between(recipes, (Anchor.CHUNK, (OLD, 7), Anchor.CHUNK, (NEW, 4), 1)) == [[2, 3, 9]]
    assert between(recipes, (Anchor.CHUNK, (OLD, 7), Anchor.CHUNK, (OLD, 9), 1)) == [[8]]  # the other one is not read


def test_chunk_named_twice_keeps_the_neighbours_of_its_own() -> None:
    recipes = {**RECIPES, NEW: [[*own(NEW, 0), (OLD, 7), *own(NEW, 1), (OLD, 7), *own(NEW, 2)]]}
    assert between(recipes, (Anchor.CHUNK, (OLD, 7), Anchor.CHUNK, (NEW, 2), 1)) == [[8, 9, 10, 1, 7]]


@pytest.mark.parametrize("kind", [Anchor.CHUNK, Anchor.SEGMENT, Anchor.ROW])
def test_lost_or_missing_container_has_no_neighbours(kind: Anchor) -> None:
    assert between(RECIPES, (kind, (NEW, 3), kind, (NEW, 5), 1)) == [[]]
    behind_all = [[18, 19]] if kind == Anchor.ROW else [[]]  # a stream behind the end gets the last rows
    assert between(RECIPES, (kind, (OLD, 999), Anchor.NONE, NONE, 1)) == behind_all


def test_rewritten_container_without_recipe_has_neighbours() -> None:
    """The neighbours are the chunks that the rewrite kept."""
    source = Directories(RECIPES)
    near = Neighbourhood(source)  # type: ignore[arg-type]
    question = asked((Anchor.NONE, NONE, Anchor.CHUNK, (OLD, 18), 2))
    assert near.between(question).chunks.ordinals.tolist() == [13, 14, 15, 16, 17]
    source.recipes = {OLD: [[], own(OLD, *range(8, 20))]}
    assert near.between(question).chunks.ordinals.tolist() == [13, 14, 15, 16, 17]
    request = asked((Anchor.CHUNK, (OLD, 3), Anchor.CHUNK, (OLD, 6), 1))
    assert near.between(request).chunks.ordinals.tolist() == []


def test_neighbours_are_of_one_generation() -> None:
    """The container is rewritten or deleted while it is read."""

    class Rewriting(Directories):
        """Directories that change after the first read."""

        later: dict[int, list[list[tuple[int, int]]]]

        def directory(self, container: ContainerId) -> Directory:
            try:
                return super().directory(container)
            finally:
                self.recipes = self.later

    for later in ({OLD: [[], own(OLD, 8)]}, {}):
        source = Rewriting(RECIPES)
        source.later = later
        question = asked((Anchor.CHUNK, (OLD, 3), Anchor.CHUNK, (OLD, 6), 1))
        assert Neighbourhood(source).between(question).chunks.ordinals.tolist() == [4, 5]  # type: ignore[arg-type]
