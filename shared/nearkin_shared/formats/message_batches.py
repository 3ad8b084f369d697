"""Decode columns of several messages together.

    names of message 1 | names of message 2 | ...    one array, validated at once; rows of a message are a slice

Array operations cost the same for one message as for thirty (benchmarks/pipeline.py: reading messages one by one took
most of the Python time of the dedup worker). If one message is damaged, all are refused; read them one by one then.

Invariant: the result is that of reading each message alone, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.container_layout import ROWS_MAX
from nearkin_shared.formats.message_layout import (
    MessageKind,
    UndecodedMessage,
    describe_messages,
    join_column,
    join_flags,
)
from nearkin_shared.limits import SEGMENT_BYTES_MAX
from nearkin_shared.types import (
    CONTAINER_ID_MIN,
    NAME_BYTES,
    SEGMENT_ID_BYTES,
    U8,
    U32,
    U64,
    Bools,
    FreshBatch,
    Locations,
    PairedBatch,
    SegmentBatch,
)
from nearkin_shared.utils.frozen import frozen

LENGTH_WORD = 7
"""Index of the 4-byte word of a name that is the length: after fingerprint and check tag."""

_I64 = NDArray[np.int64]


@frozen
class JoinedSegments:
    """Segments of several messages: message m has segments segment_starts[m] to [m + 1].

    Likewise its chunks. `batch` has no payload: chunk i is at batch.offsets[i] of its message's payload. The payload of
    a message with references is empty.
    """

    messages: Sequence[UndecodedMessage]
    batch: SegmentBatch
    segment_starts: _I64
    chunk_starts: _I64

    @property
    def payloads(self) -> list[U8]:
        """The messages' payloads."""
        return [_bytes_of(message) for message in self.messages]

    def part(self, number: int) -> SegmentBatch:
        """Return one message's segments, with its payload."""
        segments = slice(int(self.segment_starts[number]), int(self.segment_starts[number + 1]))
        chunks = slice(int(self.chunk_starts[number]), int(self.chunk_starts[number + 1]))
        return self.batch.cut(segments, chunks, _bytes_of(self.messages[number]))


@frozen
class JoinedFresh:
    """Segments of several messages, with what their sender knew of them.

    Columns as in FreshBatch, rows as in `joined`. `first` int64[n]: rows of the joined batch; `carried` bool[n]: chunks
    whose bytes are in their message.
    """

    joined: JoinedSegments
    segment_known: Bools
    segment_locations: Locations
    chunk_known: Bools
    chunk_locations: Locations
    first: _I64
    carried: Bools

    def part(self, number: int) -> FreshBatch:
        """Return one message's segments, with its payload."""
        joined = self.joined
        segments = slice(int(joined.segment_starts[number]), int(joined.segment_starts[number + 1]))
        chunks = slice(int(joined.chunk_starts[number]), int(joined.chunk_starts[number + 1]))
        return FreshBatch(
            batch=joined.part(number),
            segment_known=self.segment_known[segments],
            segment_locations=self.segment_locations.take(segments),
            chunk_known=self.chunk_known[chunks],
            chunk_locations=self.chunk_locations.take(chunks),
            first=self.first[chunks] - chunks.start,
            fresh=np.flatnonzero(self.carried[chunks]),
        )


def _bytes_of(message: UndecodedMessage) -> U8:
    return np.zeros(0, np.uint8) if message.is_referenced else message.payload


def read_segments(messages: Sequence[UndecodedMessage]) -> JoinedSegments:
    """Decode one or more messages of kind SEGMENTS. Raises Corrupt."""
    _check_kind(messages, MessageKind.SEGMENTS)
    zero = join_flags(messages, "zero")
    return _join(messages, zero, ~zero, *_starts(messages))


def read_fresh(messages: Sequence[UndecodedMessage]) -> list[FreshBatch]:
    """Decode one or more messages of kind FRESH. Raises Corrupt."""
    _check_kind(messages, MessageKind.FRESH)
    return _fresh_parts(messages)


def read_sparse(messages: Sequence[UndecodedMessage]) -> JoinedFresh:
    """Decode one or more messages of kind SPARSE; their claims are not checked.

    Raises: Corrupt.
    """
    _check_kind(messages, MessageKind.SPARSE)
    return _join_fresh(messages)


def read_paired(messages: Sequence[UndecodedMessage]) -> list[PairedBatch]:
    """Decode one or more messages of kind PAIRED. Raises Corrupt."""
    _check_kind(messages, MessageKind.PAIRED)
    fresh = _fresh_parts(messages)
    found, ranks = join_flags(messages, "base_found"), join_column(messages, "base_rank")
    bases = Locations(join_column(messages, "base_containers"), join_column(messages, "base_ordinals"))
    _check_locations(messages, bases.take(np.flatnonzero(found)))
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


def _check_kind(messages: Sequence[UndecodedMessage], kind: MessageKind) -> None:
    if any(message.kind is not kind for message in messages):
        found = ", ".join(sorted({message.kind.name.lower() for message in messages}))
        raise TypeError(f"{describe_messages(messages)}: {found}, want {kind.name.lower()}: an unexpected kind")


def _starts(messages: Sequence[UndecodedMessage]) -> tuple[_I64, _I64]:
    """Return the first segment and chunk of each message, and the end of the last one."""
    counts = np.zeros((len(messages) + 1, 2), np.int64)
    counts[1:] = [(message.counts.segments, message.counts.chunks) for message in messages]
    starts = np.cumsum(counts, axis=0)
    return starts[:, 0], starts[:, 1]


def _join(
    messages: Sequence[UndecodedMessage], zero: Bools, carried: Bools, segment_starts: _I64, chunk_starts: _I64
) -> JoinedSegments:
    """Join the segments; only the `carried` chunks have bytes, the offsets of others are 0."""
    names = join_column(messages, "names").reshape(-1, NAME_BYTES)
    lengths: U32 = names.view("<u4")[:, LENGTH_WORD].astype(np.uint32)
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= SEGMENT_BYTES_MAX:
        raise Corrupt(
            f"{describe_messages(messages)}: a chunk of {int(lengths.max())} bytes: want 1 to {SEGMENT_BYTES_MAX}"
        )
    payload_ends = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum(np.where(carried, lengths, np.uint32(0)), out=payload_ends[1:])
    payload_starts = payload_ends[chunk_starts]
    _check_payloads(messages, payload_starts[1:] - payload_starts[:-1])
    chunks = chunk_starts[1:] - chunk_starts[:-1]
    offsets = payload_ends[:-1] - np.repeat(payload_starts[:-1], chunks)
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


def _check_payloads(messages: Sequence[UndecodedMessage], carried_bytes: U64) -> None:
    """Refuse a message whose payload is not as large as its chunks, `carried_bytes` uint64[m].

    The chunks of a message with references have the bound that the payload of others has.
    """
    is_referenced = np.array([message.is_referenced for message in messages])
    announced = np.array([message.payload_bytes for message in messages], np.uint64)
    is_wrong = np.where(is_referenced, carried_bytes > SEGMENT_BYTES_MAX, carried_bytes != announced)
    if is_wrong.any():
        raise Corrupt(
            f"{describe_messages(messages)}: chunks of {int(carried_bytes.sum())} bytes, "
            f"payloads of {int(announced.sum())}"
        )


def _bounds(messages: Sequence[UndecodedMessage], segment_starts: _I64, chunk_starts: _I64) -> U32:
    """Return the bounds of all segments: a message begins where the previous one ends."""
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


def _check_locations(messages: Sequence[UndecodedMessage], locations: Locations) -> None:
    """Refuse locations outside of containers; readers would refuse a container with them."""
    if len(locations) and (
        int(locations.containers.min()) < CONTAINER_ID_MIN or int(locations.ordinals.max()) >= ROWS_MAX
    ):
        raise Corrupt(f"{describe_messages(messages)}: names a location that no container has")


def _fresh_parts(messages: Sequence[UndecodedMessage]) -> list[FreshBatch]:
    found = _join_fresh(messages)
    return [found.part(number) for number in range(len(messages))]


def _join_fresh(messages: Sequence[UndecodedMessage]) -> JoinedFresh:
    segment_starts, chunk_starts = _starts(messages)
    known = join_flags(messages, "chunk_known")
    message_starts = np.repeat(chunk_starts[:-1], chunk_starts[1:] - chunk_starts[:-1])
    joined_first = join_column(messages, "first").astype(np.int64) + message_starts
    own = np.arange(len(known), dtype=np.int64)
    is_first = joined_first == own
    if (
        np.any(joined_first > own)
        or np.any(known[joined_first] & ~is_first)
        or np.any(joined_first[joined_first] != joined_first)
    ):
        raise Corrupt(f"{describe_messages(messages)}: a chunk repeats one that is not fresh before it")
    carried = is_first & ~known
    announced = np.array([message.counts.fresh for message in messages])
    ends = np.searchsorted(np.flatnonzero(carried), chunk_starts)
    if np.any(ends[1:] - ends[:-1] != announced):
        raise Corrupt(
            f"{describe_messages(messages)}: {np.count_nonzero(carried)} fresh chunks, {int(announced.sum())} announced"
        )
    joined = _join(messages, join_flags(messages, "zero"), carried, segment_starts, chunk_starts)
    segment_known = join_flags(messages, "segment_known")
    segments = Locations(join_column(messages, "segment_containers"), join_column(messages, "segment_ordinals"))
    chunks = Locations(join_column(messages, "chunk_containers"), join_column(messages, "chunk_ordinals"))
    _check_locations(messages, segments.take(np.flatnonzero(segment_known)))
    located = np.flatnonzero(known & (chunks.containers != 0))  # chunks of known segments are known without a location
    _check_locations(messages, chunks.take(located))
    return JoinedFresh(joined, segment_known, segments, known, chunks, joined_first, carried)
