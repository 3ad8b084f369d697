"""Divide segments among messages that every later stage can send on.

    segments of a blob -> runs of whole segments: bytes, columns and what later stages add fit into one message

Invariant: each segment is in one message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.formats.message import CHUNKS_MAX, SEGMENTS_MAX
from nearkin_shared.kafka.coalesce import CHUNK_BYTES_SENT, FRESH_CHUNK_BYTES_SENT, ROOM_BYTES, SEGMENT_BYTES_SENT
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.types import Bools, SegmentBatch


def check_messages_fit(settings: Settings) -> None:
    """Raise ConfigError for settings with which a segment could exceed a message."""
    smallest = max(1, settings.chunker.min_bytes)
    chunks = -(-SEGMENT_BYTES_MAX // smallest) + 1
    each = CHUNK_BYTES_SENT + FRESH_CHUNK_BYTES_SENT + 8 * settings.features.super_features
    needed = SEGMENT_BYTES_MAX + chunks * each + SEGMENT_BYTES_SENT
    if needed > ROOM_BYTES or chunks > CHUNKS_MAX:
        raise ConfigError(
            f'chunker.min_bytes "{smallest}": a segment of {SEGMENT_BYTES_MAX} bytes may have {chunks} chunks '
            f"and take {needed} bytes as a message, more than {ROOM_BYTES}: want chunker.min_bytes >= 1024"
        )


def split_segments(batch: SegmentBatch, super_features: int) -> Iterator[SegmentBatch]:
    """Yield runs of segments that each fit into a message of every later stage."""
    for start, stop in message_bounds(batch, ~batch.zero, super_features):
        yield _segments(batch, start, stop)


def message_bounds(batch: SegmentBatch, carried: Bools, super_features: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of segments that fit into a message of every later stage.

    `carried` bool[n]: chunks whose bytes are sent.
    """
    counts = np.diff(batch.chunk_bounds)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(carried, batch.lengths, 0), dtype=np.int64)])
    bytes_at = sums[batch.chunk_bounds]
    each = CHUNK_BYTES_SENT + FRESH_CHUNK_BYTES_SENT + 8 * super_features
    cost_at = bytes_at + batch.chunk_bounds.astype(np.int64) * each
    cost_at += np.arange(len(cost_at), dtype=np.int64) * SEGMENT_BYTES_SENT
    start = 0
    while start < len(counts):
        stop = min(
            int(np.searchsorted(cost_at, cost_at[start] + ROOM_BYTES, side="right")) - 1,
            int(np.searchsorted(bytes_at, bytes_at[start] + SEGMENT_BYTES_MAX, side="right")) - 1,
            int(np.searchsorted(batch.chunk_bounds, batch.chunk_bounds[start] + CHUNKS_MAX, side="right")) - 1,
            start + SEGMENTS_MAX,
        )
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def _segments(batch: SegmentBatch, start: int, stop: int) -> SegmentBatch:
    first, last = int(batch.chunk_bounds[start]), int(batch.chunk_bounds[stop])
    return SegmentBatch(
        payload=batch.payload,
        offsets=batch.offsets[first:last],
        lengths=batch.lengths[first:last],
        names=batch.names[first:last],
        zero=batch.zero[first:last],
        chunk_bounds=batch.chunk_bounds[start : stop + 1] - np.uint32(first),
        blobs=batch.blobs[start:stop],
        segment_ids=batch.segment_ids[start:stop],
    )
