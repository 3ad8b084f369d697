"""Batches out of messages. Invariant: what is read of many messages is what would be read of each alone, or nothing.

    names of message 1 | names of message 2 | ...    one array, checked at once; each message's rows are a slice of it

A handful of array operations cost the same for one message as for thirty (benchmarks/pipeline.py: reading them one by
one took most of what Python cost the dedup worker). Where one of several is damaged all are refused: read them alone
then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.message_layout import Kind, UndecodedMessage, describe_messages, join_column, join_flags
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.types import (
    CONTAINER_ID_MIN,
    NAME_BYTES,
    SEGMENT_ID_BYTES,
    U8,
    U32,
    Bools,
    FreshBatch,
    Locations,
    PairedBatch,
    SegmentBatch,
)
from nearkin_shared.utils.frozen import frozen

LENGTH_WORD = 7
"""Which 4 bytes of a name are the length: after fingerprint and check tag."""

_I64 = NDArray[np.int64]


@frozen
class JoinedSegments:
    """Segments of several messages. Message m has segments segment_starts[m] to [m + 1], and chunks likewise.

    `batch` has no payload: chunk i lies at batch.offsets[i] of its message's payload.
    """

    messages: Sequence[UndecodedMessage]
    batch: SegmentBatch
    segment_starts: _I64
    chunk_starts: _I64

    @property
    def payloads(self) -> list[U8]:
        """Return the messages' payloads."""
        return [message.payload for message in self.messages]

    def part(self, number: int) -> SegmentBatch:
        """Return one message's segments, with its payload."""
        segments = slice(int(self.segment_starts[number]), int(self.segment_starts[number + 1]))
        chunks = slice(int(self.chunk_starts[number]), int(self.chunk_starts[number + 1]))
        return self.batch.cut(segments, chunks, self.messages[number].payload)


def read_segments(messages: Sequence[UndecodedMessage]) -> JoinedSegments:
    """Return what at least one message of kind SEGMENTS says. Raises Corrupt."""
    _check_kind(messages, Kind.SEGMENTS)
    zero = join_flags(messages, "zero")
    return _join(messages, zero, ~zero, *_starts(messages))


def read_fresh(messages: Sequence[UndecodedMessage]) -> list[FreshBatch]:
    """Return what each of at least one message of kind FRESH says. Raises Corrupt."""
    _check_kind(messages, Kind.FRESH)
    return _fresh(messages)


def read_paired(messages: Sequence[UndecodedMessage]) -> list[PairedBatch]:
    """Return what each of at least one message of kind PAIRED says. Raises Corrupt."""
    _check_kind(messages, Kind.PAIRED)
    fresh = _fresh(messages)
    found, ranks = join_flags(messages, "base_found"), join_column(messages, "base_rank")
    bases = Locations(join_column(messages, "base_containers"), join_column(messages, "base_ordinals"))
    _check_places(messages, bases.take(np.flatnonzero(found)))
    result, start = [], 0
    for message, batch in zip(messages, fresh, strict=True):
        rows = slice(start, start + message.counts.fresh)
        result.append(
            PairedBatch(
                fresh=batch,
                sketch=message.sketch,
                super_features=message.column("super_features").reshape(
                    message.counts.fresh, message.counts.super_features
                ),
                base_found=found[rows],
                bases=bases.take(rows),
                base_rank=ranks[rows],
            )
        )
        start = rows.stop
    return result


def _check_kind(messages: Sequence[UndecodedMessage], kind: Kind) -> None:
    if any(message.kind is not kind for message in messages):
        found = ", ".join(sorted({message.kind.name.lower() for message in messages}))
        raise TypeError(
            f"{describe_messages(messages)}: {found}, want {kind.name.lower()}: a kind that does not belong here"
        )


def _starts(messages: Sequence[UndecodedMessage]) -> tuple[_I64, _I64]:
    """Return where each message's segments and chunks start, and where the last one's end."""
    counts = np.zeros((len(messages) + 1, 2), np.int64)
    counts[1:] = [(message.counts.segments, message.counts.chunks) for message in messages]
    starts = np.cumsum(counts, axis=0)
    return starts[:, 0], starts[:, 1]


def _join(
    messages: Sequence[UndecodedMessage], zero: Bools, carried: Bools, segment_starts: _I64, chunk_starts: _I64
) -> JoinedSegments:
    """Return the segments; only the `carried` chunks have bytes, the offsets of the others are 0."""
    names = join_column(messages, "names").reshape(-1, NAME_BYTES)
    lengths: U32 = names.view("<u4")[:, LENGTH_WORD].astype(np.uint32)
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= SEGMENT_BYTES_MAX:
        raise Corrupt(
            f"{describe_messages(messages)}: a chunk of {int(lengths.max())} bytes: want 1 to {SEGMENT_BYTES_MAX}"
        )
    reached = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum(np.where(carried, lengths, np.uint32(0)), out=reached[1:])
    payload_starts = reached[chunk_starts]
    announced = np.array([message.payload_bytes for message in messages], np.uint64)
    if np.any(payload_starts[1:] - payload_starts[:-1] != announced):
        raise Corrupt(
            f"{describe_messages(messages)}: chunks of {int(reached[-1])} bytes, payloads of {int(announced.sum())}"
        )
    chunks = chunk_starts[1:] - chunk_starts[:-1]
    offsets = reached[:-1] - np.repeat(payload_starts[:-1], chunks)
    offsets[~carried] = 0
    segments = int(segment_starts[-1])
    batch = SegmentBatch(
        payload=np.zeros(0, np.uint8),
        offsets=offsets,
        lengths=lengths,
        names=names,
        zero=zero,
        chunk_bounds=_bounds(messages, segment_starts, chunk_starts),
        blobs=np.zeros(segments, np.uint32),
        segment_ids=join_column(messages, "segment_ids").reshape(segments, SEGMENT_ID_BYTES),
    )
    return JoinedSegments(messages, batch, segment_starts, chunk_starts)


def _bounds(messages: Sequence[UndecodedMessage], segment_starts: _I64, chunk_starts: _I64) -> U32:
    """Return the bounds of all segments: where a message ends the next one begins."""
    found = join_column(messages, "chunk_bounds").astype(np.int64)
    numbers = np.arange(len(messages))
    firsts, lasts = segment_starts[:-1] + numbers, segment_starts[1:] + numbers
    chunks = chunk_starts[1:] - chunk_starts[:-1]
    if np.any(found[firsts]) or np.any(found[lasts] != chunks):
        raise Corrupt(
            f"{describe_messages(messages)}: segments that do not begin with the first chunk or end with the last"
        )
    found += np.repeat(chunk_starts[:-1], segment_starts[1:] - segment_starts[:-1] + 1)
    inner = np.ones(len(found), np.bool_)
    inner[firsts[1:]] = False
    bounds = found[inner]
    if np.any(bounds[1:] <= bounds[:-1]):
        raise Corrupt(f"{describe_messages(messages)}: a segment without chunks")
    return bounds.astype(np.uint32)


def _check_places(messages: Sequence[UndecodedMessage], places: Locations) -> None:
    """Refuse places that no container has: one in what is built would make all of that what no reader takes."""
    if len(places) and (int(places.containers.min()) < CONTAINER_ID_MIN or int(places.ordinals.max()) >= ROWS_MAX):
        raise Corrupt(f"{describe_messages(messages)}: names a place that no container has")


def _fresh(messages: Sequence[UndecodedMessage]) -> list[FreshBatch]:
    segment_starts, chunk_starts = _starts(messages)
    known = join_flags(messages, "chunk_known")
    before = np.repeat(chunk_starts[:-1], chunk_starts[1:] - chunk_starts[:-1])
    first = join_column(messages, "first").astype(np.int64)
    whole_first = first + before
    own = np.arange(len(known), dtype=np.int64)
    itself = whole_first == own
    if (
        np.any(whole_first > own)
        or np.any(known[whole_first] & ~itself)
        or np.any(whole_first[whole_first] != whole_first)
    ):
        raise Corrupt(f"{describe_messages(messages)}: a chunk repeats one that is not fresh before it")
    carried = itself & ~known
    rows = np.flatnonzero(carried)
    ends = np.searchsorted(rows, chunk_starts)
    announced = np.array([message.counts.fresh for message in messages])
    if np.any(ends[1:] - ends[:-1] != announced):
        raise Corrupt(f"{describe_messages(messages)}: {len(rows)} fresh chunks, {int(announced.sum())} announced")
    joined = _join(messages, join_flags(messages, "zero"), carried, segment_starts, chunk_starts)
    segment_known = join_flags(messages, "segment_known")
    segments = Locations(join_column(messages, "segment_containers"), join_column(messages, "segment_ordinals"))
    chunks = Locations(join_column(messages, "chunk_containers"), join_column(messages, "chunk_ordinals"))
    _check_places(messages, segments.take(np.flatnonzero(segment_known)))
    placed = np.flatnonzero(known & (chunks.containers != 0))  # those of known segments are known without a place
    _check_places(messages, chunks.take(placed))
    rows -= before[rows]
    result = []
    for number in range(len(messages)):
        of_segments = slice(int(segment_starts[number]), int(segment_starts[number + 1]))
        of_chunks = slice(int(chunk_starts[number]), int(chunk_starts[number + 1]))
        result.append(
            FreshBatch(
                batch=joined.part(number),
                segment_known=segment_known[of_segments],
                segment_locations=segments.take(of_segments),
                chunk_known=known[of_chunks],
                chunk_locations=chunks.take(of_chunks),
                first=first[of_chunks],
                fresh=rows[int(ends[number]) : int(ends[number + 1])],
            )
        )
    return result
