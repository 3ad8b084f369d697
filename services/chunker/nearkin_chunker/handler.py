"""Cut the frames of Kafka messages into segments.

The state of a blob is (blob id, position, next sequence): bytes before `position` were sent as `sequence` segments;
with `chunker.rules` also how to go on at `position`. The states of open blobs are stored with the committed offset,
which is that of the first frame that any of them needs.

    without chunker.rules   state ...        32 bytes each
    with                    2 | state ...    58 bytes each

Invariant: after a crash, cutting resumes at a segment's start, so that the same segments result.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from struct import Struct

import numpy as np

from nearkin_chunker import BlobRun, ChunkerStage, CutState, FrameRuns
from nearkin_chunker.batch_cutting import cut_blobs
from nearkin_chunker.cut_state import ENCODED_BYTES, START, decode_state
from nearkin_chunker.referred_packs import ReferredPacks
from nearkin_chunker.segment_messages import check_messages_fit, split_segments
from nearkin_shared.config.reduction import NO_RULES
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.message import (
    Batch,
    BatchEnd,
    Encoded,
    End,
    Envelope,
    Frame,
    Segments,
    Sparse,
    StagedFrame,
    decode,
    encode,
    encode_parts,
    split_messages,
)
from nearkin_shared.formats.message_layout import Pack
from nearkin_shared.formats.payload_references import encode_referenced
from nearkin_shared.kafka.ack_tracker import AckTracker
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS, Record
from nearkin_shared.kafka.lag import BACKLOG_SECONDS, Backlog
from nearkin_shared.kafka.outbox_port import StageOutbox
from nearkin_shared.kafka.record_guard import BoundedCache, RecordGuard, headers_of, trace_of
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.observability.log_setup import about
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.storage.staged_packs import PackRemover, pack_name, read_pack
from nearkin_shared.types import U8
from nearkin_shared.utils.failpoints import failpoint

_log = logging.getLogger("nearkin.chunker")

_STATE = Struct("<16sQQ")
STATES_MAX = 90
"""Open blobs whose state fits into a commit's 4096 bytes of metadata; all others are read again from their start."""
_WITH_CUT_STATE = b"\x02"
_LONG_STATE = Struct(f"<16sQQ{ENCODED_BYTES}s")
assert _LONG_STATE.size == 58
LONG_STATES_MAX = 52
"""The same with `chunker.rules`."""
JOIN_BYTES_MAX = 8 * 1024 * 1024
"""Frames of one blob cut together: fewer calls, and the uncut tail is cut again less often."""
BRIDGE_BYTES = 512 * 1024
"""Bytes of a slice that are joined to the uncut bytes before it: several segments as they are by default."""
OPEN_BLOBS_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Resumed:
    """State of a blob that another worker has begun."""

    position: int
    sequence: int
    cut_state: CutState | None = None


@dataclass(slots=True)
class _Open:
    """A blob whose end has not arrived."""

    envelope: Envelope
    position: int
    """Byte offset in the blob at which `carry` starts."""
    sequence: int
    first_offset: int | None
    """Offset of the frame at position 0; None if it is before the first frame that this worker has read."""
    carry: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    waiting: list[U8] = field(default_factory=list)
    waiting_bytes: int = 0
    frames: deque[tuple[int, int]] = field(default_factory=deque)
    """(offset, end position) of the frames that are not sent completely, and always of the last one."""
    packs: ReferredPacks = field(default_factory=ReferredPacks)
    """Packs that have bytes from `position` on, if segments refer to them."""
    resumed_at: int = 0
    """Position up to which another worker has cut the blob."""
    last_seen: float = field(default_factory=time.monotonic)
    cut_state: CutState | None = None
    """How to go on at `position`, with `chunker.rules`."""

    @property
    def has_large_state(self) -> bool:
        """Return whether the state is too large to be stored with an offset."""
        return self.cut_state is not None and self.cut_state.encode() is None

    @property
    def end(self) -> int:
        """Return the position up to which frames have arrived."""
        return self.position + len(self.carry) + self.waiting_bytes


@dataclass(slots=True)
class _Partition:
    """Open blobs of one partition, and the packs that it needs."""

    resumed: dict[bytes, _Resumed]
    is_taken_over: bool = False
    """Segments of earlier owners have passed all stages, and blobs without a state have ended."""
    open: dict[bytes, _Open] = field(default_factory=dict)
    next_offset: int | None = None
    packs: deque[tuple[int, str]] = field(default_factory=deque)
    """(offset, name) of packs that no later stage needs, once that offset is committed."""
    ended: BoundedCache[bytes, None] = field(default_factory=lambda: BoundedCache(lambda _: None, OPEN_BLOBS_MAX))
    """Blobs that this worker has ended."""

    def end(self, blob: bytes) -> None:
        """Forget the state of a blob that has ended."""
        found = self.open.pop(blob, None)
        if found is not None:
            self.release(found.packs.pop_all())
        self.ended[blob]

    def release(self, packs: Iterable[Pack]) -> None:
        """Delete unreferred packs, once the offset of the newest record is committed."""
        self.packs.extend(((self.next_offset or 0) - 1, pack_name(pack)) for pack in packs)

    def forget_sent(self, blob: _Open) -> None:
        """Forget the frames that are sent completely, but for the last one, and the packs."""
        while len(blob.frames) > 1 and blob.frames[0][1] <= blob.position:
            blob.frames.popleft()
        self.release(blob.packs.pop_sent(blob.position))

    def cuts(self, frame: StagedFrame, *, refers: bool) -> bool:
        """Return whether only this worker cuts a slice; else a later stage may need its pack.

        `refers`: the segments of open blobs refer to their packs.
        """
        blob, position = frame.envelope.blob, frame.envelope.position
        if refers and (position == 0 or blob in self.open or blob in self.resumed):
            return False
        if not refers and self.is_taken_over:
            return True
        if blob in self.open:
            return position >= self.open[blob].resumed_at
        if blob in self.resumed:
            return position >= self.resumed[blob].position
        return position == 0 or blob in self.ended


class ChunkerHandler:
    """Cuts frames and sends segments."""

    def __init__(
        self,
        settings: Settings,
        stage_of: Callable[[str], ChunkerStage],
        outbox: StageOutbox,
        backlog: Backlog,
        objects: ObjectStore,
    ) -> None:
        """`backlog`: checked before an upload fails for lack of frames.

        `objects` have the packs of references.
        """
        check_messages_fit(settings)
        self._backlog = backlog
        self._settings = settings
        self._ruled = settings.chunker.rules != NO_RULES
        self._stages: BoundedCache[str, ChunkerStage] = BoundedCache(stage_of, 256)
        self._outbox = outbox
        self._guard = RecordGuard(settings, "chunker", outbox, "segments")
        self._partitions: dict[int, _Partition] = {}
        self._awaiting = AckTracker(outbox)
        self._objects = objects
        self._remover = PackRemover(objects)
        self._refers = "delta" not in outbox.stages_in_memory
        """Segments go on with references to packs, which the delta stage deletes."""

    def on_assigned(self, partition: int, metadata: str) -> None:  # noqa: D102
        self._awaiting.forget(partition)
        self._partitions[partition] = _Partition(_resume_states(metadata))

    def on_taken_over(self, partitions: Collection[int]) -> None:
        """Note that the messages of earlier owners have passed all stages.

        Without states no earlier owner left a blob open, or the states are lost: then the packs may be all of a blob.
        """
        for part in map(self._partitions.__getitem__, partitions):
            part.is_taken_over = bool(part.resumed)

    def handle(self, records: list[Record]) -> None:
        """Cut the frames of records and send the segments."""
        touched: dict[bytes, tuple[_Partition, _Open, Record]] = {}
        for record in records:
            part = self._partitions[record.partition]
            part.next_offset = record.offset + 1
            message = self._guard.decode(record)
            if message is None:
                continue
            if isinstance(message, Sparse) or (isinstance(message, StagedFrame) and message.is_sparse):
                touched.pop(message.envelope.blob, None)
                self._take_sparse(part, record, message)
            elif isinstance(message, Frame | StagedFrame):
                found = self._take(part, record, message)
                if found is None:
                    touched.pop(message.envelope.blob, None)
                else:
                    touched[message.envelope.blob] = (part, found, record)
                    if isinstance(message, StagedFrame) or found.waiting_bytes >= JOIN_BYTES_MAX:
                        self._cut_guarded(*touched.pop(message.envelope.blob))
            elif isinstance(message, End):
                touched.pop(message.envelope.blob, None)
                self._end(part, record, message)
            elif isinstance(message, Batch):
                self._cut_batch(record, message)
            else:
                _log.warning("%s: unexpected %s on this topic, ignored", record.label, type(message).__name__)
        for part, blob, record in touched.values():
            self._cut_guarded(part, blob, record)
        self._reached({record.partition for record in records})

    def idle(self) -> float:
        """Fail uploads that receive no more frames, unless frames wait unread in Kafka."""
        seconds = self._settings.kafka.upload_idle_seconds
        oldest = time.monotonic() - seconds
        for number, part in self._partitions.items():
            late = [blob for blob in part.open.values() if blob.last_seen < oldest]
            # After a pause or an outage of Kafka: those frames were acknowledged, and their senders received a 202.
            if late and part.next_offset is not None and self._backlog.unread("frames", number, part.next_offset):
                for blob in late:
                    blob.last_seen = oldest + BACKLOG_SECONDS
                continue
            for blob in late:
                self._fail(part, blob, f"the upload stopped: no frame arrived for {seconds} s; upload it again", None)
                self._reached([number])
        self._awaiting.poll_acks()
        return IDLE_SECONDS

    def drain(self, partition: int) -> None:
        """Wait until Kafka has acknowledged all segments."""
        self._awaiting.drain()

    def on_dropped(self, partition: int) -> None:  # noqa: D102
        self._partitions.pop(partition, None)
        self._awaiting.forget(partition)

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield the first needed offset and the states of open blobs, as of the last batch."""
        return self._awaiting.committable()

    def _reached(self, numbers: Iterable[int]) -> None:
        """Record the resume points of partitions, effective once all segments are acknowledged."""
        parts = {number: self._partitions[number] for number in numbers}
        self._awaiting.batch(
            {n: _resume_point(part, self._ruled) for n, part in parts.items() if part.next_offset is not None}
        )

    def on_committed(self, partition: int, offset: int) -> None:
        """Delete the packs of references before the offset: nothing needs them any more."""
        packs = self._partitions[partition].packs if partition in self._partitions else deque()
        while packs and packs[0][0] < offset:
            self._remover.remove(packs.popleft()[1])

    def close(self) -> None:  # noqa: D102
        self._outbox.close()
        self._backlog.close()
        self._remover.close()

    def _take(self, part: _Partition, record: Record, frame: Frame | StagedFrame) -> _Open | None:
        """Append a frame to its blob; return the blob, or None if nothing is to be done."""
        envelope = frame.envelope
        blob = self._blob_of(part, record, frame)
        if blob is None:
            return None
        size_bytes = frame.size_bytes if isinstance(frame, StagedFrame) else len(frame.payload)
        start, stop = envelope.position, envelope.position + size_bytes
        if start > blob.end:
            self._fail(part, blob, f"bytes {blob.end} to {start} are missing; upload it again", trace_of(record))
        elif stop <= blob.end:
            blob.frames.append((record.offset, stop))
            return blob
        elif (payload := self._payload(part, record, blob, frame)) is not None:
            blob.frames.append((record.offset, stop))
            if isinstance(frame, StagedFrame) and self._refers:
                blob.packs.add(frame.pack, is_referred=start < blob.resumed_at)
            fresh = payload[blob.end - start :]
            blob.waiting.append(fresh)
            blob.waiting_bytes += len(fresh)
            return blob
        if isinstance(frame, StagedFrame) and self._refers:
            part.release([frame.pack])  # its blob has failed, and no segment refers to it
        return None

    def _blob_of(self, part: _Partition, record: Record, message: Frame | StagedFrame | Sparse) -> _Open | None:
        """Return the open blob of a message, or None if nothing is to be done."""
        envelope = message.envelope
        if isinstance(message, StagedFrame) and (message.is_sparse or part.cuts(message, refers=self._refers)):
            part.packs.append((record.offset, pack_name(message.pack)))
        blob = part.open.get(envelope.blob)
        if blob is None:
            state = part.resumed.pop(envelope.blob, None)
            if state is not None:
                first = record.offset if envelope.position == 0 else None
                blob = _Open(envelope, state.position, state.sequence, first, cut_state=state.cut_state)
                blob.resumed_at = state.position
            elif envelope.position == 0:
                blob = _Open(envelope, 0, 0, record.offset)
            else:
                return None  # of a blob that has ended: read again since another blob needs an earlier frame
            part.open[envelope.blob] = blob
            if len(part.open) > OPEN_BLOBS_MAX:
                oldest = min(part.open.values(), key=lambda other: other.last_seen)
                self._fail(part, oldest, f"more than {OPEN_BLOBS_MAX} uploads at once", None)
        elif not self._guard.belongs(record, envelope, blob.envelope):
            return None
        blob.last_seen = time.monotonic()
        return blob

    def _take_sparse(self, part: _Partition, record: Record, message: Sparse | StagedFrame) -> None:
        """Send segments on that a gateway has cut."""
        blob = self._blob_of(part, record, message)
        if blob is None:
            return
        if blob.end > blob.position:
            failure = "frames and sparse segments in one upload; upload it again"
            self._fail(part, blob, failure, trace_of(record))
            return
        values: list[Encoded] = [record.value]
        if isinstance(message, StagedFrame):
            pack = self._payload(part, record, blob, message)
            if pack is None:
                return
            staged = pack

        def send() -> None:
            if isinstance(message, StagedFrame):
                values[:] = split_messages(staged.data, pack_name(message.pack))
            for value in values:
                self._send_sparse(blob, value, record)

        if not self._guard.carry_out(record, blob.envelope, send):
            part.end(blob.envelope.blob)
        blob.frames.append((record.offset, blob.position))
        part.forget_sent(blob)

    def _send_sparse(self, blob: _Open, value: Encoded, record: Record) -> None:
        """Send one message on, unless it was sent before. Raises Corrupt, FormatTooNew."""
        message = decode(value, record.label)
        one = message.envelope
        if not isinstance(message, Sparse) or (one.blob, one.tenant, one.key) != (
            *(blob.envelope.blob, blob.envelope.tenant, blob.envelope.key),
        ):
            raise Corrupt(
                f"{record.label}: its pack has a message that is not a part of blob {blob.envelope.blob.hex()}"
            )
        segments = message.batch.batch
        stop = one.position + segments.logical_bytes
        if stop <= blob.position:
            return
        if (one.position, one.sequence) != (blob.position, blob.sequence):
            raise Corrupt(
                f"{record.label}: segment {one.sequence} at byte {one.position}, want segment {blob.sequence} "
                f"at {blob.position}; upload it again"
            )
        headers = headers_of("chunker", "sparse", one, trace_of(record))
        self._outbox.send("segments", one.blob, value, headers)
        failpoint("sparse.sent")
        blob.position, blob.sequence = stop, one.sequence + segments.segments

    def _payload(self, part: _Partition, record: Record, blob: _Open, frame: Frame | StagedFrame) -> U8 | None:
        """Return the bytes of a frame, or None after failing its blob. Raises RetryableError."""
        if isinstance(frame, Frame):
            return frame.payload
        found: list[U8 | None] = []

        def read() -> None:
            try:
                found.append(read_pack(self._objects, frame.pack))
            except NotFound:
                found.append(None)

        if not self._guard.carry_out(record, blob.envelope, read):
            part.end(blob.envelope.blob)
            return None
        if found[0] is None:  # deleted after the blob ended, if Kafka lost the offsets behind it
            self._fail(part, blob, f"{pack_name(frame.pack)} is missing; upload it again", trace_of(record), frame)
        return found[0]

    def _end(self, part: _Partition, record: Record, end: End) -> None:
        blob = part.open.get(end.envelope.blob)
        if blob is None:
            state = part.resumed.pop(end.envelope.blob, None)
            if state is None and end.envelope.position:
                return  # read again; the blob has ended before
            state = state or _Resumed(0, 0)
            blob = _Open(end.envelope, state.position, state.sequence, record.offset, cut_state=state.cut_state)
        elif not self._guard.belongs(record, end.envelope, blob.envelope):
            return
        if end.failure is None and end.size_bytes != blob.end:
            self._fail(part, blob, f"{blob.end} of {end.size_bytes} bytes arrived; upload it again", trace_of(record))
            return
        envelope = replace(end.envelope, sequence=blob.sequence)

        def finish() -> None:
            if end.failure is None:
                self._cut(blob, trace_of(record), final=True)
            last = replace(end, envelope=replace(envelope, sequence=blob.sequence), segments=blob.sequence)
            headers = headers_of("chunker", "end", last.envelope, trace_of(record))
            self._outbox.send("segments", end.envelope.blob, encode(last), headers)

        self._guard.carry_out(record, envelope, finish)
        part.end(end.envelope.blob)

    def _cut_batch(self, record: Record, batch: Batch) -> None:
        """Cut the blobs of a batch in one pass, and send their segments as those of one blob.

        If that fails, each blob of the batch fails: the failure names the batch alone, its end names the blobs.
        """

        def cut() -> None:
            segments, last = cut_blobs(self._stages[batch.envelope.tenant], batch)
            position, sequence = 0, 0
            for some in split_segments(segments, self._settings.features.super_features):
                envelope = replace(batch.envelope, position=position, sequence=sequence)
                headers = headers_of("chunker", "segments", envelope, None)
                self._outbox.send("segments", envelope.blob, encode_parts(Segments(envelope, some)), headers)
                position, sequence = position + some.logical_bytes, sequence + some.segments
            failpoint("cut.batch-sent")
            self._send_batch_end(last)

        if not self._guard.carry_out(record, batch.envelope, cut):
            # Without segments, so that the committer searches for versions of an earlier attempt.
            uncut = tuple(replace(blob, segments=0) for blob in batch.blobs)
            self._send_batch_end(BatchEnd(batch.envelope, uncut))

    def _send_batch_end(self, end: BatchEnd) -> None:
        headers = headers_of("chunker", "batch_end", end.envelope, None)
        self._outbox.send("segments", end.envelope.blob, encode(end), headers)

    def _cut_guarded(self, part: _Partition, blob: _Open, record: Record) -> None:
        if self._guard.carry_out(record, blob.envelope, lambda: self._cut(blob, trace_of(record), final=False)):
            part.forget_sent(blob)
        else:
            part.end(blob.envelope.blob)

    def _cut(self, blob: _Open, traceparent: bytes | None, *, final: bool) -> None:
        """Send all segments that no later byte can change."""
        self._bridge(blob, traceparent)
        parts = [blob.carry, *blob.waiting] if len(blob.carry) else blob.waiting
        payload = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts])
        consumed = self._send_segments(blob, payload, traceparent, final=final)
        blob.carry = payload[consumed:].copy()  # a view would keep the whole frame in memory
        blob.waiting, blob.waiting_bytes = [], 0

    def _bridge(self, blob: _Open, traceparent: bytes | None) -> None:
        """Send the segments up to one that ends inside a large slice.

        Its first bytes are copied for that, and the others are cut where they are: joined to the uncut bytes before
        the slice, all of it would be copied.
        """
        carry_bytes = len(blob.carry)
        if not carry_bytes or len(blob.waiting) != 1 or len(blob.waiting[0]) < 2 * BRIDGE_BYTES:
            return
        (following,) = blob.waiting
        joined = np.concatenate([blob.carry, following[:BRIDGE_BYTES]])
        consumed = self._send_segments(blob, joined, traceparent, final=False)
        taken = max(0, consumed - carry_bytes)
        blob.carry = blob.carry[consumed:]
        blob.waiting, blob.waiting_bytes = [following[taken:]], len(following) - taken

    def _send_segments(self, blob: _Open, payload: U8, traceparent: bytes | None, *, final: bool) -> int:
        """Send the complete segments of the bytes from the blob's position on; return their bytes."""
        frames = FrameRuns(payload, (BlobRun(0, 0, len(payload), final),), blob.cut_state)
        chunked = self._stages[blob.envelope.tenant].decide(frames, LookupResults())
        position, sequence = blob.position, blob.sequence
        for batch in split_segments(chunked.segments, self._settings.features.super_features):
            envelope = replace(blob.envelope, position=position, sequence=sequence)
            headers = headers_of("chunker", "segments", envelope, traceparent)
            stop = position + batch.logical_bytes
            packs = blob.packs.refer(position, stop)
            message = Segments(envelope, batch)
            value = encode_referenced(message, packs) if packs else encode_parts(message)
            self._outbox.send("segments", envelope.blob, value, headers)
            failpoint("cut.sent")
            position, sequence = stop, sequence + batch.segments
        consumed = position - blob.position
        blob.position, blob.sequence, blob.cut_state = position, sequence, chunked.state
        return consumed

    def _fail(
        self,
        part: _Partition,
        blob: _Open,
        failure: str,
        traceparent: bytes | None,
        committed_as: StagedFrame | None = None,
    ) -> None:
        with about(blob.envelope.blob, blob.envelope.tenant, traceparent):
            _log.warning("blob %s: %s", blob.envelope.blob.hex(), failure)
        self._guard.fail(replace(blob.envelope, sequence=blob.sequence), failure, traceparent, committed_as)
        part.end(blob.envelope.blob)


def _resume_point(part: _Partition, ruled: bool) -> tuple[int, str]:
    """Return (offset, metadata): where to resume after a crash, and the open blobs' states."""
    assert part.next_offset is not None
    # Blobs whose first frame is out of reach need their state: open ones, and those of the previous owner whose next
    # frame has not arrived; together no more than it left. All others can be cut again from their start, as must those
    # whose cut state is too large.
    lost = [blob for blob in part.open.values() if blob.first_offset is None]
    within = sorted(
        ((blob.first_offset, blob.envelope.blob) for blob in part.open.values() if blob.first_offset is not None),
        key=lambda entry: (part.open[entry[1]].has_large_state, entry),
    )
    room = max(0, (LONG_STATES_MAX if ruled else STATES_MAX) - len(lost) - len(part.resumed))
    room = min(room, sum(not part.open[blob].has_large_state for _, blob in within))
    listed = [*lost, *(part.open[blob] for _, blob in within[:room])]
    needed = [blob.frames[0][0] for blob in listed if blob.frames]
    needed += [offset for offset, _ in within[room:]]
    states = {blob.envelope.blob: _Resumed(blob.position, blob.sequence, blob.cut_state) for blob in listed}
    return min([part.next_offset, *needed]), _encode_states({**states, **part.resumed}, ruled)


def _encode_states(states: Mapping[bytes, _Resumed], ruled: bool) -> str:
    """Return states as the metadata of a commit.

    More states than fit with their cuts were written by a worker without `chunker.rules`: they keep their form.
    """
    if not ruled or len(states) > LONG_STATES_MAX:
        assert len(states) <= STATES_MAX, len(states)
        packed = [_STATE.pack(blob, state.position, state.sequence) for blob, state in states.items()]
        return base64.b64encode(b"".join(packed)).decode()
    packed = [_WITH_CUT_STATE]
    for blob, state in states.items():
        cut_state = (state.cut_state or START).encode()
        assert cut_state is not None  # a blob with a large state is cut again from its start
        packed.append(_LONG_STATE.pack(blob, state.position, state.sequence, cut_state))
    return base64.b64encode(b"".join(packed)).decode()


def _resume_states(metadata: str) -> dict[bytes, _Resumed]:
    """Return the states in a commit's metadata; none if it does not parse."""
    try:
        data = base64.b64decode(metadata, validate=True)
        if data[:1] == _WITH_CUT_STATE and len(data) % _LONG_STATE.size == 1:
            entries = list(_LONG_STATE.iter_unpack(data[1:]))
            if len(entries) > LONG_STATES_MAX:
                return {}
            return {blob: _Resumed(at, sequence, decode_state(state)) for blob, at, sequence, state in entries}
    except (binascii.Error, ValueError):
        return {}
    if len(data) % _STATE.size or len(data) > STATES_MAX * _STATE.size:
        return {}
    return {blob: _Resumed(at, sequence) for blob, at, sequence in _STATE.iter_unpack(data)}
