"""Gaps: where fresh chunks stand among known ones. Invariant: gaps partition the fresh chunks, in stream order.

known known | fresh fresh | known | fresh ...    each run between known chunks is a gap; what is all zero or repeated in
            `--- gap 0 ---'       `-- gap 1      the batch itself does not end one
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from nearkin.frozen import frozen
from nearkin.records import CONTAINER_ID_MIN, U8, U32, FreshBatch, Locations, PairedBatch, SegmentBatch, distinct
from nearkin.stage import Anchor, Gaps, Neighbours

GAP_CHUNKS_MAX = 32
"""A longer run is several gaps, each going on where the one before ended: what is tried for a chunk stays in L2."""
STREAMS_MAX = 256

Place = tuple[int, int, int]
"""(Anchor, container, ordinal)."""


@frozen
class Mark:
    """A place in the stream of containers: the open one, and how many chunks and segments it holds."""

    container: int
    chunks: int = 0
    segments: int = 0


EVERYTHING_BEFORE = Mark((1 << 64) - 1)


@frozen
class _Anchors:
    """Per chunk of a batch: its anchor, kind NONE where it has none, and its blob."""

    kinds: U8
    locations: Locations
    blobs: U32


class Alignment:
    """Where each stream stands among what was stored before: a hint, bounded, and lost without harm.

    What a blob has stored itself is no anchor: what followed it is what comes now, or a copy within the version, which
    super-features find as well and without a depth for the next version to stand on. (First version of botocore: 9.68
    in place of 9.72, in 0.8 of the time.)
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, Place] = OrderedDict()
        self._began: OrderedDict[Hashable, Mark] = OrderedDict()

    def gaps(self, batch: PairedBatch, stream: Hashable, here: Mark = EVERYTHING_BEFORE) -> Gaps:
        """Return the gaps of a batch; those at its start go on where its blob's last batch ended.

        `here` is where the next chunk will be stored: for a blob that is new to this, where it began.
        """
        self.begin(batch.fresh.batch, stream, here)
        anchors, rows = self._anchors(batch, stream), batch.fresh.fresh
        if not len(rows):
            none8, none = np.zeros(0, np.uint8), Locations.empty()
            return Gaps(none, none8, none, none8, np.zeros(0, np.uint32))
        before, after = _nearest(anchors)
        left, right, blobs = before[rows], after[rows], anchors.blobs[rows]
        run = np.concatenate([np.zeros(1, np.intp), np.cumsum((left[1:] != left[:-1]) | (blobs[1:] != blobs[:-1]))])
        within = np.arange(len(rows)) - np.searchsorted(run, run)
        part = within // GAP_CHUNKS_MAX
        starts = np.flatnonzero(within % GAP_CHUNKS_MAX == 0)
        ends = np.append(starts[1:], len(rows)) - 1
        left_kinds, lefts = _taken(anchors, left[starts])
        right_kinds, rights = _taken(anchors, right[ends])
        left_kinds[part[starts] > 0] = Anchor.CONTINUED
        right_kinds[np.append(run[starts[1:]] == run[ends[:-1]], False)] = Anchor.NONE
        for gap in np.flatnonzero(left_kinds == Anchor.NONE).tolist():
            place = self._places.get((stream, int(blobs[starts[gap]])))
            if place is not None:
                left_kinds[gap], lefts.containers[gap], lefts.ordinals[gap] = place
        return Gaps(lefts, left_kinds, rights, right_kinds, np.diff(np.append(starts, len(rows))).astype(np.uint32))

    def begin(self, segments: SegmentBatch, stream: Hashable, here: Mark) -> None:
        """Remember where the batch's blobs began, those that are new to this."""
        for number in distinct(segments.blobs).tolist():
            self._began.setdefault((stream, number), here)
        while len(self._began) > STREAMS_MAX:
            self._began.popitem(last=False)

    def follow(self, batch: PairedBatch, stream: Hashable, neighbours: Neighbours | None) -> None:
        """Remember where the batch's last blob stands now."""
        anchors, rows = self._anchors(batch, stream), batch.fresh.fresh
        if not len(anchors.kinds):
            return
        blob = int(anchors.blobs[-1])
        known = np.flatnonzero((anchors.kinds != Anchor.NONE) & (anchors.blobs == blob))
        place: Place | None = None
        if len(rows) and int(anchors.blobs[rows[-1]]) == blob and (not len(known) or rows[-1] > known[-1]):
            if neighbours is not None and neighbours.ends.containers[-1]:
                place = Anchor.ROW, int(neighbours.ends.containers[-1]), int(neighbours.ends.ordinals[-1])
        elif len(known):
            last = known[-1]
            locations = anchors.locations
            place = int(anchors.kinds[last]), int(locations.containers[last]), int(locations.ordinals[last])
        else:
            return  # zeros or repeats alone
        self._stand((stream, blob), place)

    def pass_known(self, fresh: FreshBatch, stream: Hashable, here: Mark) -> None:
        """Do what `begin` and `follow` do, for a batch of known segments alone."""
        segments = fresh.batch
        self.begin(segments, stream, here)
        if not segments.segments:
            return
        blob = int(segments.blobs[-1])
        began = self._began.get((stream, blob), EVERYTHING_BEFORE)
        mine = np.flatnonzero(segments.blobs == blob)
        at = fresh.segment_locations.take(mine)
        own = at.containers > np.uint64(began.container)
        own |= (at.containers == np.uint64(began.container)) & (at.ordinals >= began.segments)
        older = np.flatnonzero(~own)
        if len(older):
            last = older[-1]
            self._stand((stream, blob), (Anchor.SEGMENT, int(at.containers[last]), int(at.ordinals[last])))

    def _stand(self, key: tuple[Hashable, int], place: Place | None) -> None:
        self._places.pop(key, None)
        if place is not None:
            self._places[key] = place
        while len(self._places) > STREAMS_MAX:
            self._places.popitem(last=False)

    def _anchors(self, batch: PairedBatch, stream: Hashable) -> _Anchors:
        anchors = _anchors(batch)
        numbers, of = np.unique(anchors.blobs, return_inverse=True)
        began = [self._began.get((stream, number), EVERYTHING_BEFORE) for number in numbers.tolist()]
        containers = np.array([mark.container for mark in began], np.uint64)[of]
        chunks = np.array([mark.chunks for mark in began], np.int64)[of]
        segments = np.array([mark.segments for mark in began], np.int64)[of]
        limit = np.where(anchors.kinds == Anchor.SEGMENT, segments, chunks)
        own = anchors.locations.containers > containers
        own |= (anchors.locations.containers == containers) & (anchors.locations.ordinals >= limit)
        anchors.kinds[own] = Anchor.NONE
        return anchors


def _anchors(batch: PairedBatch) -> _Anchors:
    fresh, segments = batch.fresh, batch.fresh.batch
    of_segment = np.repeat(np.arange(segments.segments), np.diff(segments.chunk_bounds))
    in_known = fresh.segment_known[of_segment]
    alone = ~in_known & fresh.chunk_known & (fresh.chunk_locations.containers >= np.uint64(CONTAINER_ID_MIN))
    kinds = np.where(in_known, np.uint8(Anchor.SEGMENT), np.where(alone, np.uint8(Anchor.CHUNK), np.uint8(0)))
    places, chunks = fresh.segment_locations.take(of_segment), fresh.chunk_locations
    locations = Locations(
        np.where(in_known, places.containers, chunks.containers), np.where(in_known, places.ordinals, chunks.ordinals)
    )
    return _Anchors(kinds.astype(np.uint8), locations, segments.blobs[of_segment])


def _nearest(anchors: _Anchors) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return for each chunk the row of the anchor before and after it in its blob, -1 where there is none."""
    rows = np.arange(len(anchors.kinds))
    known = anchors.kinds != Anchor.NONE
    before = np.maximum.accumulate(np.where(known, rows, -1))
    after = np.minimum.accumulate(np.where(known, rows, len(rows))[::-1])[::-1]
    after = np.where(after == len(rows), -1, after)
    for nearest in (before, after):
        nearest[(nearest >= 0) & (anchors.blobs[nearest] != anchors.blobs)] = -1
    return before, after


def _taken(anchors: _Anchors, rows: NDArray[np.intp]) -> tuple[U8, Locations]:
    """Return (kinds, locations) of the anchors in `rows`; kind NONE for row -1."""
    kinds = np.where(rows >= 0, anchors.kinds[rows], np.uint8(Anchor.NONE)).astype(np.uint8)
    return kinds, anchors.locations.take(rows)
