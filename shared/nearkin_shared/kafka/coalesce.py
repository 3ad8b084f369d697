"""Merge consecutive messages of one blob.

    segments 0..6, payload | segments 7..13, payload | ...   ->   segments 0..13, fresh payload

Dedup removes most bytes of a message: the rest of sixteen messages usually fits into two, so that later stages and the
broker handle two.

Invariant: a merged message has the contents of its parts, and is within the bounds of every later stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.formats.message import CHUNKS_MAX, MESSAGE_BYTES_MAX, SEGMENTS_MAX, Fresh, Paired
from nearkin_shared.formats.message_batches import JoinedSegments
from nearkin_shared.kernels.fingerprint_table import first_occurrence
from nearkin_shared.kernels.scatter_copy import gather_new
from nearkin_shared.limits import KEY_BYTES_MAX, SEGMENT_BYTES_MAX, TENANT_BYTES_MAX
from nearkin_shared.types import U8, Bools, FreshBatch, Locations, PairedBatch, SegmentBatch, offsets_of
from nearkin_shared.utils.frozen import frozen

CHUNK_BYTES_SENT = 48
"""Bytes of a chunk in the largest message besides its payload and super-features."""
FRESH_CHUNK_BYTES_SENT = 16
"""Further bytes of a fresh chunk: its base candidate."""
SEGMENT_BYTES_SENT = 40
ROOM_BYTES = MESSAGE_BYTES_MAX - KEY_BYTES_MAX - TENANT_BYTES_MAX - 1024
"""For payload and columns, whatever the names in front of them."""


@frozen
class MessageSize:
    """The values of a message that have bounds."""

    segments: int
    chunks: int
    payload_bytes: int
    sent_bytes: int

    def __add__(self, other: MessageSize) -> MessageSize:
        return MessageSize(
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


def runs_of(joined: JoinedSegments, fresh: FreshBatch, super_features: int) -> list[slice]:
    """Return the runs of messages to merge: consecutive in one blob, and within the bounds.

    `fresh` is the result of dedup for `joined.batch`, each message decided separately.
    """
    starts = joined.chunk_starts
    logical = np.concatenate([np.zeros(1, np.int64), np.cumsum(joined.batch.lengths, dtype=np.int64)])[starts]
    rows = np.searchsorted(fresh.fresh, starts)
    carried = np.zeros(len(fresh.fresh) + 1, np.int64)
    np.cumsum(joined.batch.lengths[fresh.fresh], out=carried[1:])
    payloads, counts = np.diff(carried[rows]).tolist(), np.diff(rows).tolist()
    runs: list[slice] = []
    size, ends = MessageSize(0, 0, 0, 0), None
    for number, message in enumerate(joined.messages):
        one, segments, chunks = message.envelope, message.counts.segments, message.counts.chunks
        columns_bytes = SEGMENT_BYTES_SENT * segments + CHUNK_BYTES_SENT * chunks
        columns_bytes += (FRESH_CHUNK_BYTES_SENT + 8 * super_features) * counts[number]
        own = MessageSize(segments, chunks, payloads[number], payloads[number] + columns_bytes)
        if ends == (one.blob, one.sequence, one.position) and (whole := size + own).fits:
            size = whole
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            size = own
            runs.append(slice(number, number + 1))
        ends = one.blob, one.sequence + segments, one.position + int(logical[number + 1] - logical[number])
    return runs


def fresh_of_run(joined: JoinedSegments, fresh: FreshBatch, run: slice) -> FreshBatch:
    """Return the messages of a run as one batch; a chunk in two of them is fresh once."""
    segments = slice(int(joined.segment_starts[run.start]), int(joined.segment_starts[run.stop]))
    chunks = slice(int(joined.chunk_starts[run.start]), int(joined.chunk_starts[run.stop]))
    known = fresh.chunk_known[chunks]
    if run.stop == run.start + 1:
        batch = joined.part(run.start)
        first = fresh.first[chunks] - chunks.start
        found = fresh.fresh[slice(*np.searchsorted(fresh.fresh, (chunks.start, chunks.stop)))] - chunks.start
    else:
        whole = joined.batch
        source = np.repeat(
            np.arange(run.stop - run.start, dtype=np.int32), np.diff(joined.chunk_starts[run.start : run.stop + 1])
        )
        apart = whole.cut(segments, chunks, whole.payload)
        is_referenced = joined.messages[run.start].is_referenced
        batch, first, found = _merge(apart, None if is_referenced else joined.payloads[run], source, known)
    return FreshBatch(
        batch=batch,
        segment_known=fresh.segment_known[segments],
        segment_locations=fresh.segment_locations.take(segments),
        chunk_known=known,
        chunk_locations=fresh.chunk_locations.take(chunks),
        first=first,
        fresh=found,
    )


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
    counts = [len(b.lengths) for b in batches]
    starts = accumulate(counts[:-1], initial=0)
    bounds = [np.zeros(1, np.uint32)]
    bounds += [b.chunk_bounds[1:] + np.uint32(start) for b, start in zip(batches, starts, strict=True)]
    apart = SegmentBatch(
        payload=np.zeros(0, np.uint8),
        offsets=np.concatenate([b.offsets for b in batches]),
        lengths=np.concatenate([b.lengths for b in batches]),
        names=np.concatenate([b.names for b in batches]),
        zero=np.concatenate([b.zero for b in batches]),
        chunk_bounds=np.concatenate(bounds),
        blobs=np.concatenate([b.blobs for b in batches]),
        segment_ids=np.concatenate([b.segment_ids for b in batches]),
    )
    known = np.concatenate([part.chunk_known for part in parts])
    source = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    batch, first, fresh = _merge(apart, [b.payload for b in batches], source, known)
    return FreshBatch(
        batch=batch,
        segment_known=np.concatenate([part.segment_known for part in parts]),
        segment_locations=Locations.join([part.segment_locations for part in parts]),
        chunk_known=known,
        chunk_locations=Locations.join([part.chunk_locations for part in parts]),
        first=first,
        fresh=fresh,
    )


def _merge(
    apart: SegmentBatch, payloads: Sequence[U8] | None, source: NDArray[np.int32], known: Bools
) -> tuple[SegmentBatch, NDArray[np.int64], NDArray[np.intp]]:
    """Return (batch, first, fresh): chunk i of `apart` is in payloads[source[i]].

    Fresh chunks are copied into one payload. `payloads` None: the bytes are elsewhere, and stay there.
    """
    first = np.arange(len(apart.lengths), dtype=np.int64)
    unknown = np.flatnonzero(~known)
    first[unknown] = unknown[first_occurrence(apart.names[unknown])]
    fresh = unknown[first[unknown] == unknown]
    sizes = apart.lengths[fresh]
    offsets = np.zeros(len(apart.lengths), np.uint64)
    offsets[fresh] = offsets_of(sizes)
    if payloads is None:
        return replace(apart, offsets=offsets), first, fresh
    payload = gather_new(payloads, source[fresh], apart.offsets[fresh], sizes)
    return replace(apart, payload=payload, offsets=offsets), first, fresh
