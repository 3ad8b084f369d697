"""Messages of one blob as one. Invariant: a merged message says what its parts said, and fits at every later stage.

    segments 0..6, payload | segments 7..13, payload | ...   ->   segments 0..13, fresh payload

After dedup most of a message's bytes are gone: what sixteen messages still say mostly fits into two, and every later
stage and the broker handle two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from nearkin.formats.message import CHUNKS_MAX, MESSAGE_BYTES_MAX, SEGMENTS_MAX, Fresh, Paired
from nearkin.kernels.gather import gather_new
from nearkin.kernels.nametable import first_occurrence
from nearkin.limits import KEY_BYTES_MAX, SEGMENT_BYTES_MAX, TENANT_BYTES_MAX
from nearkin.records import FreshBatch, Locations, PairedBatch, SegmentBatch

CHUNK_BYTES_SENT = 48
"""What a chunk takes in the largest message besides its bytes and its super-features."""
FRESH_CHUNK_BYTES_SENT = 16
"""What a fresh one takes besides: its base candidate."""
SEGMENT_BYTES_SENT = 40
ROOM_BYTES = MESSAGE_BYTES_MAX - KEY_BYTES_MAX - TENANT_BYTES_MAX - 1024
"""For payload and columns, whatever the names in front of them."""


@dataclass(frozen=True, slots=True)
class Size:
    """What counts against a message's bounds."""

    segments: int
    chunks: int
    payload_bytes: int
    sent_bytes: int

    def __add__(self, other: Size) -> Size:
        return Size(
            self.segments + other.segments,
            self.chunks + other.chunks,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
        )

    @property
    def fits(self) -> bool:
        """Return whether that much is one message."""
        return (
            self.segments <= SEGMENTS_MAX
            and self.chunks <= CHUNKS_MAX
            and self.payload_bytes <= SEGMENT_BYTES_MAX
            and self.sent_bytes <= ROOM_BYTES
        )


def size_of(message: Fresh, super_features: int) -> Size:
    """Return what a message will take once it has its super-features."""
    batch = message.batch
    segments, chunks, fresh = batch.batch.segments, len(batch.batch.lengths), len(batch.fresh)
    payload_bytes = int(batch.batch.lengths[batch.fresh].sum(dtype=np.uint64))
    columns_bytes = SEGMENT_BYTES_SENT * segments + CHUNK_BYTES_SENT * chunks
    columns_bytes += (FRESH_CHUNK_BYTES_SENT + 8 * super_features) * fresh
    return Size(segments, chunks, payload_bytes, payload_bytes + columns_bytes)


def follows(message: Fresh | Paired, last: Fresh | Paired) -> bool:
    """Return whether `message` begins in its blob where `last` ends."""
    one, before, batch = message.envelope, last.envelope, segments_of(last)
    return (
        one.blob == before.blob
        and one.tenant == before.tenant
        and one.sequence == before.sequence + batch.segments
        and one.position == before.position + batch.logical_bytes
    )


def segments_of(message: Fresh | Paired) -> SegmentBatch:
    """Return the segments that a message is about."""
    return message.batch.batch if isinstance(message, Fresh) else message.batch.fresh.batch


def merged(messages: Sequence[Fresh]) -> Fresh:
    """Return one message for several that follow one another; a chunk that two of them bring is fresh once."""
    if len(messages) == 1:
        return messages[0]
    return Fresh(messages[0].envelope, merged_fresh([message.batch for message in messages]))


def merged_pairs(parts: Sequence[PairedBatch]) -> PairedBatch:
    """Return one batch for several of one sketch that follow one another."""
    if len(parts) == 1:
        return parts[0]
    whole = merged_fresh([part.fresh for part in parts])
    starts = accumulate((len(part.fresh.batch.lengths) for part in parts), initial=0)
    before = np.concatenate([part.fresh.fresh + start for part, start in zip(parts, starts, strict=False)])
    rows = np.searchsorted(before, whole.fresh)  # both ascend, and what is fresh in all is fresh in its part
    return PairedBatch(
        fresh=whole,
        sketch=parts[0].sketch,
        super_features=np.concatenate([part.super_features for part in parts])[rows],
        base_found=np.concatenate([part.base_found for part in parts])[rows],
        bases=Locations.join([part.bases for part in parts]).take(rows),
        base_rank=np.concatenate([part.base_rank for part in parts])[rows],
    )


def merged_fresh(parts: Sequence[FreshBatch]) -> FreshBatch:
    """Return one batch for several; their fresh bytes are copied into one payload."""
    batches = [part.batch for part in parts]
    names, lengths = np.concatenate([b.names for b in batches]), np.concatenate([b.lengths for b in batches])
    known = np.concatenate([part.chunk_known for part in parts])
    counts = np.array([len(b.lengths) for b in batches])
    starts = np.cumsum(counts) - counts
    first = np.arange(len(lengths), dtype=np.int64)
    unknown = np.flatnonzero(~known)
    first[unknown] = unknown[first_occurrence(names[unknown])]
    fresh = unknown[first[unknown] == unknown]
    sizes, came_at = lengths[fresh], np.concatenate([b.offsets for b in batches])[fresh]
    source = np.repeat(np.arange(len(parts), dtype=np.int32), counts)[fresh]
    offsets = np.zeros(len(lengths), np.uint64)
    offsets[fresh] = np.cumsum(sizes, dtype=np.uint64) - sizes
    bounds = [np.zeros(1, np.uint32)]
    bounds += [b.chunk_bounds[1:] + np.uint32(start) for b, start in zip(batches, starts.tolist(), strict=True)]
    batch = SegmentBatch(
        payload=gather_new([b.payload for b in batches], source, came_at, sizes),
        offsets=offsets,
        lengths=lengths,
        names=names,
        zero=np.concatenate([b.zero for b in batches]),
        chunk_bounds=np.concatenate(bounds),
        blobs=np.concatenate([b.blobs for b in batches]),
        segment_ids=np.concatenate([b.segment_ids for b in batches]),
    )
    return FreshBatch(
        batch=batch,
        segment_known=np.concatenate([part.segment_known for part in parts]),
        segment_locations=Locations.join([part.segment_locations for part in parts]),
        chunk_known=known,
        chunk_locations=Locations.join([part.chunk_locations for part in parts]),
        first=first,
        fresh=fresh,
    )
