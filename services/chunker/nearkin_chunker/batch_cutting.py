# size: one function
"""Cut the blobs of a batch.

Invariant: each blob has the segments that it would have by itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from nearkin_chunker.stage import BlobRun, ChunkerStage, FrameRuns
from nearkin_shared.formats.message import Batch, BatchEnd
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import SegmentBatch


def cut_blobs(stage: ChunkerStage, batch: Batch) -> tuple[SegmentBatch, BatchEnd]:
    """Return the segments of all blobs, and the end with the number of segments of each."""
    bounds = accumulate((blob.size_bytes for blob in batch.blobs), initial=0)
    runs = tuple(BlobRun(number, start, stop, True) for number, (start, stop) in enumerate(pairwise(bounds)))
    segments = stage.decide(FrameRuns(batch.payload, runs), LookupResults()).segments
    counts = np.bincount(segments.blobs, minlength=len(runs)).tolist()
    blobs = tuple(replace(blob, segments=count) for blob, count in zip(batch.blobs, counts, strict=True))
    return segments, BatchEnd(replace(batch.envelope, sequence=segments.segments), blobs)
