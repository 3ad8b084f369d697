"""Chunker stage. Invariant: what it leaves unconsumed starts at a segment's start, so nothing is carried but bytes.

payload   | blob 3: start .. stop | blob 4 ... |          runs of frames, several blobs where they are small
cut -> name -> group                          one kernel call a run, one a batch, one a batch
"""

from __future__ import annotations

import numpy as np

from nearkin.config import Settings
from nearkin.fingerprints import Fingerprinter
from nearkin.frozen import frozen
from nearkin.records import U8, U32, SegmentBatch, offsets_of
from nearkin.stage import Facts, Reads
from nearkin_chunker.algorithms import chunker
from nearkin_chunker.segmenter import segment_bounds


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
        self._segment = settings.segment
        self._cut = chunker(settings.chunker, int(settings.segment.max_bytes))
        self._fingerprinter = fingerprinter

    def reads(self, batch: FrameRuns, facts: Facts) -> Reads | None:
        """Ask nothing: cut points depend on the bytes alone."""
        return None

    def decide(self, batch: FrameRuns, facts: Facts) -> ChunkedRuns:
        """Return all segments that no later byte can change."""
        payload, runs = batch.payload, batch.runs
        cuts = [self._cut(payload[run.start : run.stop], run.final) for run in runs]
        lengths: U32 = np.concatenate(cuts) if cuts else np.zeros(0, np.uint32)
        first = runs[0].start if runs else 0
        offsets = offsets_of(lengths) + np.uint64(first)
        names, zero = self._fingerprinter.name_stream(payload, offsets, lengths)
        parts, blobs, chunk = [], [], 0
        for run, cut in zip(runs, cuts, strict=True):
            rows = slice(chunk, chunk + len(cut))
            bounds = segment_bounds(
                names[rows],
                lengths[rows],
                zero[rows],
                self._segment.target_chunks,
                int(self._segment.max_bytes),
                run.final,
            )
            parts.append(bounds[1:] + np.uint32(chunk))
            blobs.append(np.full(len(bounds) - 1, run.blob, np.uint32))
            chunk += int(bounds[-1])
        chunk_bounds = np.concatenate([np.zeros(1, np.uint32), *parts]).astype(np.uint32)
        kept = int(chunk_bounds[-1])
        consumed = int(offsets[kept - 1]) + int(lengths[kept - 1]) if kept else first
        return ChunkedRuns(
            SegmentBatch(
                payload,
                offsets[:kept],
                lengths[:kept],
                names[:kept],
                zero[:kept],
                chunk_bounds,
                np.concatenate(blobs) if blobs else np.zeros(0, np.uint32),
                self._fingerprinter.name_segments(names[:kept], chunk_bounds),
            ),
            consumed,
        )
