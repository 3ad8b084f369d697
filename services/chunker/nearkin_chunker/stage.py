"""Chunker stage. Invariant: what it leaves unconsumed starts at a segment's start, so nothing is carried but bytes.

payload   | blob 3: start .. stop | blob 4 ... |          runs of frames, several blobs where they are small
cut -> name | cut -> name | ... -> group      some MiB at a time, as they come: what was cut is at hand to name
"""

from __future__ import annotations

import numpy as np

from nearkin_chunker.chunking_algorithms import chunker
from nearkin_chunker.segmenter import segment_bounds
from nearkin_shared.config.settings import Settings
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.limits import MIB
from nearkin_shared.pipeline.stage import LookupRequest, LookupResults
from nearkin_shared.types import NAME_BYTES, U8, U32, Bools, SegmentBatch, offsets_of
from nearkin_shared.utils.frozen import frozen

STEP_BYTES = 4 * MIB
"""So much is cut, then named: of 16 MiB the beginning has left the core's cache by then (3.3 GB/s; in steps 3.9)."""


@frozen
class BlobRun:
    """Bytes [start, stop) of the payload belong to `blob`; `final` says that it ends with them."""

    blob: int
    start: int
    stop: int
    final: bool


@frozen
class FrameRuns:
    """Frames as received, laid one after another: at most one run, the last, is not final."""

    payload: U8
    runs: tuple[BlobRun, ...]


@frozen
class ChunkedRuns:
    """The segments that are certain, and up to where the payload was consumed."""

    segments: SegmentBatch
    consumed: int


class ChunkerStage:
    """Cuts, fingerprints, groups."""

    name = "chunker"

    def __init__(self, settings: Settings, fingerprinter: Fingerprinter) -> None:
        self.segment = settings.segment
        self.cut = chunker(settings.chunker, int(settings.segment.max_bytes))
        self.fingerprinter = fingerprinter

    def reads(self, batch: FrameRuns, facts: LookupResults) -> LookupRequest | None:
        """Ask nothing: cut points depend on the bytes alone."""
        return None

    def decide(self, batch: FrameRuns, facts: LookupResults) -> ChunkedRuns:
        """Return all segments that no later byte can change."""
        cutting = SegmentCutter(self, batch.runs[0].start if batch.runs else 0)
        cutting.extend(batch)
        return cutting.finish()


class SegmentCutter:
    """A payload that grows, cut and named as it does. It gives just what it would give all at once."""

    def __init__(self, stage: ChunkerStage, start: int) -> None:
        """`start`: where the first run begins."""
        self._stage = stage
        self._start = start
        self._batch = FrameRuns(np.zeros(0, np.uint8), ())
        self._counts = list[int]()
        self._parts = [_NO_CHUNKS]
        self._unnamed = [_NO_CHUNKS[0]]
        self._named = self._cut = start
        """Up to where the payload is named, and cut."""

    def extend(self, batch: FrameRuns) -> None:
        """Take the payload as it is now: of the runs before, the last may have grown or ended, and more may follow."""
        self._batch = batch
        for number in range(max(0, len(self._counts) - 1), len(batch.runs)):
            if number == len(self._counts):
                self._counts.append(0)
            run = batch.runs[number]
            stop, reach = self._cut, STEP_BYTES
            while stop < run.stop:
                stop = min(self._cut + reach, run.stop)
                lengths = self._stage.cut(batch.payload[self._cut : stop], run.final and stop == run.stop)
                cut_bytes = int(lengths.sum(dtype=np.uint64))
                reach = STEP_BYTES if cut_bytes else 2 * reach
                self._counts[number] += len(lengths)
                self._unnamed.append(lengths)
                self._cut += cut_bytes
                if self._cut - self._named > STEP_BYTES // 2:
                    self._name()

    def finish(self) -> ChunkedRuns:
        """Return the segments that are certain, the payload being all there is."""
        self._name()
        lengths, names, zero = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        payload, fingerprinter, segment = self._batch.payload, self._stage.fingerprinter, self._stage.segment
        offsets = offsets_of(lengths) + np.uint64(self._start)
        parts, blobs, chunk = [], [], 0
        for run, count in zip(self._batch.runs, self._counts, strict=True):
            rows = slice(chunk, chunk + count)
            bounds = segment_bounds(
                names[rows], lengths[rows], zero[rows], segment.target_chunks, int(segment.max_bytes), run.final
            )
            parts.append(bounds[1:] + np.uint32(chunk))
            blobs.append(np.full(len(bounds) - 1, run.blob, np.uint32))
            chunk += int(bounds[-1])
        chunk_bounds = np.concatenate([np.zeros(1, np.uint32), *parts]).astype(np.uint32)
        kept = int(chunk_bounds[-1])
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
            ),
            int(offsets[kept - 1]) + int(lengths[kept - 1]) if kept else self._start,
        )

    def _name(self) -> None:
        """Name what was cut since the last time."""
        lengths = np.concatenate(self._unnamed)
        offsets = offsets_of(lengths) + np.uint64(self._named)
        names, zero = self._stage.fingerprinter.name_stream(self._batch.payload, offsets, lengths)
        self._parts.append((lengths, names, zero))
        self._unnamed, self._named = [_NO_CHUNKS[0]], self._cut


_NO_CHUNKS: tuple[U32, U8, Bools] = (
    np.zeros(0, np.uint32),
    np.zeros((0, NAME_BYTES), np.uint8),
    np.zeros(0, np.bool_),
)
