"""Find gaps: runs of fresh chunks between known ones.

known known | fresh fresh | known | fresh ...    each run between known chunks is a gap; chunks of zeros and repeats
            `--- gap 0 ---'       `-- gap 1      within the batch do not end one

Invariant: gaps partition the fresh chunks, in stream order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.limits import MIB
from nearkin_shared.pipeline.stage import Anchor, Gaps, Neighbours
from nearkin_shared.types import (
    CONTAINER_ID_MIN,
    U8,
    U32,
    Bools,
    FreshBatch,
    Locations,
    PairedBatch,
    SegmentBatch,
    distinct,
)
from nearkin_shared.utils.frozen import frozen

GAP_CHUNKS_MAX = 32
"""A longer run becomes several gaps, each continuing the one before: the candidates of one chunk fit into L2 cache."""
STREAMS_MAX = 256
OWN_BYTES = 32 * MIB
"""Chunks that a blob stored itself within this many bytes are no anchors."""
OWN_SHARE = 8
"""Older ones are anchors in a batch with at least 1/8 such chunks: then the blob is a history itself, such as a tar of
dumps. (Botocore's first version, 1 % in two batches, takes a tenth longer with such anchors, and saves nothing.)"""
MARK_BYTES = MIB
"""Minimum distance between two marks of a blob's trail."""

Place = tuple[int, int, int]
"""(Anchor, container, ordinal) of a neighbour."""


@frozen
class StreamMark:
    """Stream position: the open container and its numbers of chunks and segments."""

    container: int
    chunks: int = 0
    segments: int = 0


EVERYTHING_BEFORE = StreamMark((1 << 64) - 1)


class _StreamTrail:
    """The open containers at points of a blob's stream, OWN_BYTES back: about 30 marks."""

    def __init__(self, began: StreamMark) -> None:
        self.began = began
        self._marks: deque[tuple[int, StreamMark]] = deque()
        self._passed_bytes = 0

    def record(self, here: StreamMark) -> None:
        """Record that the blob continues at `here`."""
        if not self._marks or self._passed_bytes - self._marks[-1][0] >= MARK_BYTES:
            self._marks.append((self._passed_bytes, here))
        while len(self._marks) > 1 and self._passed_bytes - self._marks[1][0] >= OWN_BYTES:
            self._marks.popleft()

    def advance(self, size_bytes: int) -> None:
        """Advance the blob's stream position."""
        self._passed_bytes += size_bytes

    @property
    def recent_start(self) -> StreamMark:
        """Return the mark after which containers hold what the blob stored within OWN_BYTES."""
        return self._marks[0][1]


@frozen
class _Anchors:
    """The anchor of each chunk of a batch, kind NONE for none, and its blob."""

    kinds: U8
    locations: Locations
    blobs: U32


class Alignment:
    """Position of each stream among stored versions: a bounded, expendable hint.

    Chunks that a blob has just stored itself are no anchors: chunks after them are either the current ones or a copy
    within the version, which super-features find as well, at no cost in depth for the next version. (First version of
    botocore: 9.68 in place of 9.72, in 0.8 of the time.) Older ones are, or a blob that is a history itself, such as a
    tar of dumps, would be reduced as if it had none.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, Place] = OrderedDict()
        self._ways: OrderedDict[Hashable, _StreamTrail] = OrderedDict()

    def gaps(self, batch: PairedBatch, stream: Hashable, here: StreamMark = EVERYTHING_BEFORE) -> Gaps:
        """Return the gaps of a batch.

        Those at its start continue where its blob's last batch ended.

        `here`: where the next chunk will be stored; for a new blob, its start.
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
        left_kinds, lefts = _select(anchors, left[starts])
        right_kinds, rights = _select(anchors, right[ends])
        left_kinds[part[starts] > 0] = Anchor.CONTINUED
        right_kinds[np.append(run[starts[1:]] == run[ends[:-1]], False)] = Anchor.NONE
        for gap in np.flatnonzero(left_kinds == Anchor.NONE).tolist():
            place = self._places.get((stream, int(blobs[starts[gap]])))
            if place is not None:
                left_kinds[gap], lefts.containers[gap], lefts.ordinals[gap] = place
        return Gaps(lefts, left_kinds, rights, right_kinds, np.diff(np.append(starts, len(rows))).astype(np.uint32))

    def begin(self, segments: SegmentBatch, stream: Hashable, here: StreamMark) -> None:
        """Record where the blobs of a batch continue."""
        for number in distinct(segments.blobs).tolist():
            self._ways.setdefault((stream, number), _StreamTrail(here)).record(here)
        while len(self._ways) > STREAMS_MAX:
            self._ways.popitem(last=False)

    def follow(self, batch: PairedBatch, stream: Hashable, neighbours: Neighbours | None) -> None:
        """Record the position of the batch's last blob."""
        anchors, rows = self._anchors(batch, stream), batch.fresh.fresh
        if not len(anchors.kinds):
            return
        blob = self._pass_last(batch.fresh.batch, stream)
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
            return  # only zeros or repeats
        self._record_mark((stream, blob), place)

    def pass_known(self, fresh: FreshBatch, stream: Hashable, here: StreamMark) -> None:
        """Do the work of `begin` and `follow` for a batch of known segments only."""
        segments = fresh.batch
        self.begin(segments, stream, here)
        if not segments.segments:
            return
        mine = np.flatnonzero(segments.blobs == segments.blobs[-1])
        at = fresh.segment_locations.take(mine)
        known = _Anchors(np.full(len(mine), Anchor.SEGMENT, np.uint8), at, segments.blobs[mine])
        older = np.flatnonzero(~self._are_stored_since(known, _blobs(known), stream, _recent_start_of))
        blob = self._pass_last(segments, stream)
        if len(older):
            last = older[-1]
            self._record_mark((stream, blob), (Anchor.SEGMENT, int(at.containers[last]), int(at.ordinals[last])))

    def _pass_last(self, segments: SegmentBatch, stream: Hashable) -> int:
        """Advance the trail of the batch's last blob and return its number.

        Earlier blobs have mostly ended.
        """
        blob = int(segments.blobs[-1])
        way = self._ways.get((stream, blob))
        if way is not None:
            first = int(np.argmax(segments.blobs == blob))
            way.advance(int(segments.lengths[segments.chunk_bounds[first] :].sum(dtype=np.uint64)))
        return blob

    def _record_mark(self, key: tuple[Hashable, int], place: Place | None) -> None:
        self._places.pop(key, None)
        if place is not None:
            self._places[key] = place
        while len(self._places) > STREAMS_MAX:
            self._places.popitem(last=False)

    def _anchors(self, batch: PairedBatch, stream: Hashable) -> _Anchors:
        anchors = _anchors(batch)
        blobs = _blobs(anchors)
        own, lately = (self._are_stored_since(anchors, blobs, stream, since) for since in (_start_of, _recent_start_of))
        is_history = OWN_SHARE * np.count_nonzero(own & ~lately) >= np.count_nonzero(~batch.fresh.batch.zero)
        anchors.kinds[lately if is_history else own] = Anchor.NONE
        return anchors

    def _are_stored_since(
        self,
        places: _Anchors,
        blobs: tuple[U32, NDArray[np.intp]],
        stream: Hashable,
        since: Callable[[_StreamTrail], StreamMark],
    ) -> Bools:
        """Return a mask of the anchors stored after the mark that `since` returns for their blob."""
        numbers, of = blobs
        ways = [self._ways.get((stream, number)) for number in numbers.tolist()]
        marks = [EVERYTHING_BEFORE if way is None else since(way) for way in ways]
        containers = np.array([mark.container for mark in marks], np.uint64)[of]
        chunks = np.array([mark.chunks for mark in marks], np.int64)[of]
        segments = np.array([mark.segments for mark in marks], np.int64)[of]
        limit = np.where(places.kinds == Anchor.SEGMENT, segments, chunks)
        at = places.locations
        later: Bools = (at.containers > containers) | ((at.containers == containers) & (at.ordinals >= limit))
        return later


def _blobs(places: _Anchors) -> tuple[U32, NDArray[np.intp]]:
    """Return (uint32[b], intp[n]): the distinct blobs, and the blob index of each anchor."""
    return np.unique(places.blobs, return_inverse=True)


def _start_of(way: _StreamTrail) -> StreamMark:
    return way.began


def _recent_start_of(way: _StreamTrail) -> StreamMark:
    return way.recent_start


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
    """Return the rows of the anchors before and after each chunk in its blob, -1 for none."""
    rows = np.arange(len(anchors.kinds))
    known = anchors.kinds != Anchor.NONE
    before = np.maximum.accumulate(np.where(known, rows, -1))
    after = np.minimum.accumulate(np.where(known, rows, len(rows))[::-1])[::-1]
    after = np.where(after == len(rows), -1, after)
    for nearest in (before, after):
        nearest[(nearest >= 0) & (anchors.blobs[nearest] != anchors.blobs)] = -1
    return before, after


def _select(anchors: _Anchors, rows: NDArray[np.intp]) -> tuple[U8, Locations]:
    """Return (kinds, locations) of the anchors in `rows`; kind NONE for row -1."""
    kinds = np.where(rows >= 0, anchors.kinds[rows], np.uint8(Anchor.NONE)).astype(np.uint8)
    return kinds, anchors.locations.take(rows)
