"""Chunker stage: cut, fingerprint, group into segments.

payload   | blob 3: start .. stop | blob 4 ... |          runs of frames, several blobs if they are small
cut -> fingerprint | cut -> fingerprint | ... -> group    a few MiB at a time, while they are in the CPU cache

Invariants: unconsumed bytes start at a segment's start, so that only bytes are carried. A segment ends where the
fingerprints decide, never above its bound in bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nearkin_chunker.chunking_algorithms import chunker
from nearkin_chunker.content_cutter import ContentCutter
from nearkin_chunker.cut_state import CutState
from nearkin_shared.config.reduction import NO_RULES
from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.limits import MIB, SEGMENT_BYTES_MAX
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.types import (
    NAME_BYTES,
    U8,
    U32,
    Bools,
    ClaimedRows,
    Locations,
    SegmentBatch,
    StoredChunks,
    offsets_of,
)
from nearkin_shared.utils.frozen import frozen

SEGMENT_CHUNKS_TARGET = 16
"""Mean number of chunks of a segment, a power of two: of 16 and 64, 16 find more known data by segment."""
STEP_BYTES = 4 * MIB
"""Bytes cut before they are fingerprinted: of 16 MiB, the first have left the cache by then (3.3 GB/s, here 3.9)."""


@frozen
class BlobRun:
    """Bytes [start, stop) of the payload, of one blob.

    A chunk and a segment end with a final run. A run of `stored` chunks is final, and its bytes are undefined.

    The last run of a blob is final. A caller may end chunks or segments within a blob, such as at the border of a file.
    """

    blob: int
    start: int
    stop: int
    final: bool
    ends_segment: bool = True
    """False: with a final run only the chunk ends, and the blob goes on with the next run."""
    stored: StoredChunks | None = None
    """Chunks that the blob takes over here from a stored version."""

    def clipped(self, start: int) -> BlobRun:
        """Return the run without what is before `start`, with offsets from there.

        Of stored chunks `start` is a border.
        """
        stored, first = self.stored, max(self.start, start)
        if stored is not None and first > self.start:
            skipped = int(np.searchsorted(np.cumsum(stored.lengths, dtype=np.int64), first - self.start)) + 1
            stored = stored.take(slice(skipped, None))
        return BlobRun(self.blob, first - start, self.stop - start, self.final, self.ends_segment, stored)

    def moved(self, offset: int) -> BlobRun:
        """Return the run at offsets larger by `offset`."""
        return replace(self, start=self.start + offset, stop=self.stop + offset)


@frozen
class FrameRuns:
    """Frames as received, concatenated: at most one run, the last, is not final."""

    payload: U8
    runs: tuple[BlobRun, ...]
    state: CutState | None = None
    """State at the start of the first run, if it goes on within an item."""


@frozen
class ChunkedRuns:
    """The complete segments, and the offset up to which the payload was consumed."""

    segments: SegmentBatch
    consumed: int
    state: CutState | None = None
    """State at `consumed`; None without `chunker.rules`."""


class ChunkerStage:
    """Cuts, fingerprints and groups the bytes of blobs."""

    name = "chunker"

    def __init__(self, settings: Settings, fingerprinter: Fingerprinter) -> None:
        self.cut = chunker(settings.chunker, SEGMENT_BYTES_MAX)
        rules = settings.chunker.rules
        self.rules = frozenset(rules.split(",")) if rules != NO_RULES else None
        self.fingerprinter = fingerprinter

    def reads(self, batch: FrameRuns, facts: LookupResults) -> LookupRequest | None:
        """Return None: cut points depend on the bytes alone."""
        return None

    def content_cutter(self, offset: int, state: CutState | None) -> ContentCutter | None:
        """Return a cutter by kinds of content; None without `chunker.rules`."""
        return None if self.rules is None else ContentCutter(self.rules, self.cut, offset, state)

    def decide(self, batch: FrameRuns, facts: LookupResults) -> ChunkedRuns:
        """Return all segments that no later byte can change."""
        cutting = SegmentCutter(self, batch.runs[0].start if batch.runs else 0, batch.state)
        cutting.extend(batch)
        return cutting.finish()


class SegmentCutter:
    """Cuts and fingerprints a growing payload, as if it were complete."""

    def __init__(self, stage: ChunkerStage, start: int, state: CutState | None = None) -> None:
        """`start`: offset of the first run; `state`: there, from `state_at` of the cutter before."""
        self._stage = stage
        self._content = stage.content_cutter(start, state)
        self._start = start
        self._batch = FrameRuns(np.zeros(0, np.uint8), ())
        self._counts = list[int]()
        self._parts = [_NO_CHUNKS]
        self._unnamed = [_NO_CHUNKS[0]]
        self._claimed: list[tuple[int, Locations]] = []
        """First row of stored chunks, and their locations."""
        self._named = self._cut = start
        """Offsets up to which the payload is fingerprinted, and cut."""

    def extend(self, batch: FrameRuns) -> None:
        """Cut the grown payload: the last run before may have grown or ended, and more may follow."""
        self._batch = batch
        for number in range(max(0, len(self._counts) - 1), len(batch.runs)):
            if number == len(self._counts):
                self._counts.append(0)
            run = batch.runs[number]
            if run.stored is not None:
                if self._cut < run.stop:
                    self._add_stored(run.stored)
                    self._counts[number] = len(run.stored)
                continue
            stop, reach = self._cut, STEP_BYTES
            while stop < run.stop:
                stop = min(self._cut + reach, run.stop)
                lengths = self._cut_item(batch.payload[self._cut : stop], run.final and stop == run.stop)
                cut_bytes = int(lengths.sum(dtype=np.uint64))
                reach = STEP_BYTES if cut_bytes else 2 * reach
                self._counts[number] += len(lengths)
                self._unnamed.append(lengths)
                self._cut += cut_bytes
                if self._cut - self._named > STEP_BYTES // 2:
                    self._name()
            if run.final and self._content is not None:
                self._content.end_item()

    def _cut_item(self, data: U8, final: bool) -> U32:
        """Return the lengths of the certain chunks at the start of `data`."""
        return self._stage.cut(data, final) if self._content is None else self._content.cut(data, final)[0]

    def _add_stored(self, stored: StoredChunks) -> None:
        """Append chunks that are named already."""
        self._name()
        self._claimed.append((sum([len(lengths) for lengths, _, _ in self._parts]), stored.locations))
        self._parts.append((stored.lengths, stored.names, np.zeros(len(stored), np.bool_)))
        self._cut += int(stored.lengths.sum(dtype=np.int64))
        self._named = self._cut
        if self._content is not None:
            self._content.skip_to(self._cut)

    def state_at(self, offset: int) -> CutState | None:
        """Return the state at the start of a chunk; None without `chunker.rules`."""
        return None if self._content is None else self._content.state_at(offset)

    def finish(self) -> ChunkedRuns:
        """Return the complete segments of the payload."""
        self._name()
        lengths, names, zero = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        payload, fingerprinter = self._batch.payload, self._stage.fingerprinter
        offsets = offsets_of(lengths) + np.uint64(self._start)
        parts, blobs, chunk = [], [], 0
        count = 0
        for number, run in enumerate(self._batch.runs):
            count += self._counts[number]
            if run.final and not run.ends_segment and number + 1 < len(self._batch.runs):
                continue  # the segments of the blob go on
            rows = slice(chunk, chunk + count)
            bounds = (
                _ONE_CHUNK
                if count == 1 and run.final and run.ends_segment
                else segment_bounds(
                    names[rows],
                    lengths[rows],
                    zero[rows],
                    SEGMENT_CHUNKS_TARGET,
                    SEGMENT_BYTES_MAX,
                    run.final and run.ends_segment,
                )
            )
            count = 0
            parts.append(bounds[1:] + np.uint32(chunk))
            blobs.append(np.full(len(bounds) - 1, run.blob, np.uint32))
            chunk += int(bounds[-1])
        chunk_bounds = np.concatenate([np.zeros(1, np.uint32), *parts]).astype(np.uint32)
        kept = int(chunk_bounds[-1])
        consumed = int(offsets[kept - 1]) + int(lengths[kept - 1]) if kept else self._start
        return ChunkedRuns(
            SegmentBatch(
                payload,
                offsets[:kept],
                lengths[:kept],
                names[:kept],
                zero[:kept],
                chunk_bounds,
                np.concatenate(blobs) if blobs else np.zeros(0, np.uint32),
                fingerprinter.name_segments(names[:kept], chunk_bounds),
                self._claimed_rows(kept),
            ),
            consumed,
            self.state_at(consumed),
        )

    def _claimed_rows(self, kept: int) -> ClaimedRows | None:
        """Return which of the first `kept` chunks are stored."""
        if not self._claimed:
            return None
        rows = [np.arange(first, first + len(locations), dtype=np.intp) for first, locations in self._claimed]
        locations = Locations.join([locations for _, locations in self._claimed])
        return ClaimedRows(np.concatenate(rows), locations).within(slice(0, kept))

    def _name(self) -> None:
        """Fingerprint the chunks cut since the last call."""
        lengths = np.concatenate(self._unnamed)
        offsets = offsets_of(lengths) + np.uint64(self._named)
        names, zero = self._stage.fingerprinter.name_stream(self._batch.payload, offsets, lengths)
        self._parts.append((lengths, names, zero))
        self._unnamed, self._named = [_NO_CHUNKS[0]], self._cut


def segment_bounds(names: U8, lengths: U32, zero: Bools, target_chunks: int, bytes_max: int, final: bool) -> U32:
    """Return uint32[s + 1] chunk bounds, from 0.

    A segment ends after a chunk whose fingerprint's first two bytes, read little-endian, have their low bits zero (1 in
    `target_chunks`, at most 1024), so that an insertion moves only the boundaries near it. Chunks of zeros never end
    one, or a hole would become one-chunk segments. Without `final`, chunks after the last bound are not yet decided.
    """
    count = len(lengths)
    low = names[:, 0].astype(np.uint32) | (names[:, 1].astype(np.uint32) << 8)
    ends = np.flatnonzero(((low & np.uint32(target_chunks - 1)) == 0) & ~zero) + 1
    reached = np.cumsum(lengths, dtype=np.int64)
    if count:  # usually no segment meets its bound, and the ends are those of the fingerprints
        last = [count] if not len(ends) or ends[-1] < count else []
        all_ends = np.append(ends, last).astype(np.intp)
        if np.diff(reached[all_ends - 1], prepend=0).max() <= bytes_max:
            return np.append(np.uint32(0), all_ends if final else ends).astype(np.uint32)
    bounds = [0]
    candidate = 0
    while bounds[-1] < count:
        start = bounds[-1]
        base = int(reached[start - 1]) if start else 0
        # The first chunk that does not fit: one step per segment, not per chunk.
        full = int(np.searchsorted(reached, base + bytes_max, side="right"))
        candidate = int(np.searchsorted(ends, start, side="right"))
        natural = int(ends[candidate]) if candidate < len(ends) else count + 1
        if natural <= full:
            bounds.append(natural)
        elif full < count:
            bounds.append(full)
        elif final:
            bounds.append(count)
        else:
            break
    return np.array(bounds, np.uint32)


_ONE_CHUNK = np.array([0, 1], np.uint32)
"""Bounds of a blob of one chunk, as most blobs of a batch are: computed for each, they took 20 us."""
_NO_CHUNKS: tuple[U32, U8, Bools] = (
    np.zeros(0, np.uint32),
    np.zeros((0, NAME_BYTES), np.uint8),
    np.zeros(0, np.bool_),
)
