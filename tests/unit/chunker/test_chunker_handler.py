"""Test the chunker worker: with any crashes in between, a blob has the cuts of one piece."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearkin.lab.generated_data import text_like
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.handler import STATES_MAX, ChunkerHandler
from nearkin_chunker.segment_messages import check_messages_fit, split_segments
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, TenantErased
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import (
    Batch,
    BatchEnd,
    Encoded,
    End,
    Envelope,
    Frame,
    Segments,
    Sparse,
    decode,
    encode,
    joined,
)
from nearkin_shared.kafka.clients import Headers, Outbox
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.kafka.offset_tracker import PartitionOffsets
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import FreshBatch, Locations
from tests.support.data import content_samples as samples

SETTINGS = with_changes(Settings(), {"kafka": {"upload_idle_seconds": 1}})
NAMER = Fingerprinter(b"s" * 32, "t")


class Kept(Outbox):
    """An outbox that keeps messages instead of sending them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.sent_messages = 0
        self._unanswered = PartitionOffsets()
        self.dead: list[Sequence[tuple[str, bytes | None]]] = []

    def send(self, name: str, key: bytes, value: Encoded, headers: Headers) -> None:
        assert headers["ce_specversion"] == b"1.0"
        self.sent.append((name, joined(value)))

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        self.dead.append(headers)

    def flush(self) -> None:
        pass

    def poll_acks(self) -> None:
        pass

    def close(self) -> None:
        pass


OBJECTS = memory_objects()


class Waiting(Backlog):
    """Reports the backlog of the topic that a test sets."""

    def __init__(self, end: int = 0) -> None:
        self.end = end

    def unread(self, name: str, partition: int, offset: int) -> bool:
        assert (name, partition) == ("frames", 0)
        return self.end > offset

    def close(self) -> None:
        pass


def handler(outbox: Kept, chosen: Settings = SETTINGS, backlog: Backlog | None = None) -> ChunkerHandler:
    def stage_of(tenant: str) -> ChunkerStage:
        return ChunkerStage(chosen, Fingerprinter(b"s" * 32, tenant))

    return ChunkerHandler(chosen, stage_of, outbox, backlog or Waiting(), OBJECTS)


def record(offset: int, value: bytes) -> Record:
    return Record("frames", 0, offset, value[8:24], value, {}, ())


def frames(blob: bytes, data: bytes, sizes: Sequence[int], end: bool = True) -> list[bytes]:
    found, position = [], 0
    for size in sizes:
        piece = data[position : position + size]
        if piece:
            found.append(encode(Frame(Envelope(blob, "t", "key", position), np.frombuffer(piece, np.uint8))))
        position += len(piece)
    assert position == len(data)
    if end:
        last = End(Envelope(blob, "t", "key", len(data)), 1, blob, len(data), b"b" * 32)
        found.append(encode(last))
    return found


def in_one_piece(data: bytes, chosen: Settings = SETTINGS) -> list[bytes]:
    payload = np.frombuffer(data, np.uint8)
    stage = ChunkerStage(chosen, NAMER)
    batch = stage.decide(FrameRuns(payload, (BlobRun(0, 0, len(data), True),)), LookupResults()).segments
    return [row.tobytes() for row in batch.segment_ids]


def segments_and_ends(outbox: Kept) -> tuple[dict[bytes, dict[int, bytes]], dict[bytes, End]]:
    """Return ({blob: {sequence: segment id}}, {blob: end}).

    A segment sent twice must be equal both times.
    """
    segments: dict[bytes, dict[int, bytes]] = {}
    ends: dict[bytes, End] = {}
    for name, value in outbox.sent:
        assert name == "segments"
        message = decode(value, "test")
        blob = message.envelope.blob
        if isinstance(message, Segments):
            for row, segment in enumerate(message.batch.segment_ids):
                sequence = message.envelope.sequence + row
                assert segments.setdefault(blob, {}).setdefault(sequence, segment.tobytes()) == segment.tobytes()
        else:
            assert isinstance(message, End)
            ends[blob] = message
    return segments, ends


RULED = with_changes(SETTINGS, {"chunker": {"rules": "all"}})
KINDS_OF_CONTENT = {
    "media": samples.jpeg(2_000_000),
    "film": samples.mp4(2_500_000, 1_100_000),
    "tar": samples.tar_file(
        {f"{number}": samples.jpeg(1 + number**3, number) for number in range(70)} | {"text": text_like(300_000, 1)}
    ),
    "weights": samples.safetensors_file({f"{number}": samples.jpeg(200_000, number) for number in range(7)}),
    "pages": samples.postgres_file(200),
    "text": text_like(700_000, 2),
}
RANDOM = np.random.default_rng(5).integers(0, 256, 3_000_000, np.uint8).tobytes()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_blob_with_crashes_is_cut_as_one_piece(data: st.DataObject) -> None:
    blobs = {}
    for number in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, 1_000_000))
        size = data.draw(st.integers(0, 1_500_000))
        blobs[bytes([number]) * 16] = RANDOM[start : start + size]
    queues = []
    for blob, content in blobs.items():
        sizes = list[int]()
        while sum(sizes) < len(content):
            sizes.append(data.draw(st.sampled_from([1, 1000, 65_536, 300_000, 921_600])))
        queues.append(frames(blob, content, sizes))
    log: list[bytes] = []
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        log.append(queue.pop(0))
    outbox = Kept()
    committed, metadata = 0, ""
    worker = handler(outbox)
    worker.on_assigned(0, metadata)
    position = 0
    deaths = data.draw(st.integers(0, 4))
    while position < len(log):
        count = data.draw(st.integers(1, 6))
        batch = [record(offset, log[offset]) for offset in range(position, min(position + count, len(log)))]
        worker.handle(batch)
        position += len(batch)
        if data.draw(st.booleans()):
            ((_, committed, metadata),) = list(worker.committable()) or [(0, committed, metadata)]
        if deaths and data.draw(st.booleans()):
            deaths -= 1
            worker = handler(outbox)
            worker.on_assigned(0, metadata)
            position = committed
    segments, ends = segments_and_ends(outbox)
    assert set(ends) == set(blobs)
    for blob, content in blobs.items():
        assert ends[blob].failure is None
        expected = in_one_piece(content)
        assert ends[blob].segments == len(expected)
        assert [segments.get(blob, {})[sequence] for sequence in range(len(expected))] == expected
    assert all(final == len(log) for _, final, _ in worker.committable())


@pytest.mark.parametrize("seed", range(12))
def test_ruled_blobs_with_crashes_are_cut_as_one_piece(seed: int) -> None:
    """A worker that takes over goes on in the middle of a tar, a film or a database."""
    draw = random.Random(seed)
    names = draw.sample(sorted(KINDS_OF_CONTENT), 3)
    blobs = {bytes([number]) * 16: KINDS_OF_CONTENT[name] for number, name in enumerate(names)}
    log, queues = list[bytes](), []
    for blob, content in blobs.items():
        sizes = list[int]()
        while sum(sizes) < len(content):
            sizes.append(draw.choice([1000, 65_536, 300_000, 921_600]))
        queues.append(frames(blob, content, sizes))
    while any(queues):
        log.append(draw.choice([queue for queue in queues if queue]).pop(0))
    outbox, position, metadata = Kept(), 0, ""
    worker = handler(outbox, RULED)
    worker.on_assigned(0, metadata)
    deaths = 6
    while position < len(log):
        stop = min(position + draw.randint(1, 6), len(log))
        worker.handle([record(offset, log[offset]) for offset in range(position, stop)])
        position = stop
        if deaths and draw.random() < 0.4:
            deaths -= 1
            ((_, position, metadata),) = worker.committable()
            assert len(metadata) <= 4096
            worker = handler(outbox, RULED)
            worker.on_assigned(0, metadata)
    segments, ends = segments_and_ends(outbox)
    for blob, content in blobs.items():
        assert ends[blob].failure is None
        assert list(segments[blob].values()) == in_one_piece(content, RULED)


def test_ruled_open_blobs_beyond_commit_are_read_again() -> None:
    """States with cuts are longer: fewer fit, and states of a worker without rules keep their form."""
    blobs = [number.to_bytes(16, "big") for number in range(STATES_MAX)]
    halves = [frames(blob, RANDOM[:400_000], [200_000, 200_000]) for blob in blobs]
    for before in (SETTINGS, RULED):
        first, outbox = handler(Kept(), before), Kept()
        first.on_assigned(0, "")
        first.handle([record(offset, one[0]) for offset, one in enumerate(halves)])
        ((_, offset, metadata),) = first.committable()
        assert len(metadata) <= 4096
        log = [frame for one in zip(*halves, strict=True) for frame in one]
        for _ in range(2):  # the second worker dies before it has read anything new
            worker = handler(outbox, RULED)
            worker.on_assigned(0, metadata)
            worker.handle([record(number, log[number]) for number in range(offset, len(blobs))])
            ((_, offset, metadata),) = worker.committable()
            assert len(metadata) <= 4096
        worker.handle([record(number, log[number]) for number in range(len(blobs), len(log))])
        assert all(end.failure is None for end in segments_and_ends(outbox)[1].values())


@pytest.mark.parametrize("damaged", ["\x02", "\x02" + "a" * 57, "\x02" + "a" * 59, "\x02" + "\x80" * 58])
def test_damaged_states_are_ignored(damaged: str) -> None:
    worker = handler(Kept(), RULED)
    worker.on_assigned(0, base64.b64encode(damaged.encode("latin-1")).decode())
    assert worker._partitions[0].resumed == {}


def test_stopped_upload_ends_as_failed() -> None:
    """It frees its state, and offsets move past it."""
    outbox = Kept()
    worker = handler(outbox)
    worker.on_assigned(0, "")
    (first,) = frames(b"x" * 16, RANDOM[:500_000], [500_000], end=False)
    worker.handle([record(7, first)])
    assert [offset for _, offset, _ in worker.committable()] == [7]
    worker._partitions[0].open[b"x" * 16].last_seen -= 2
    worker.idle()
    _, ends = segments_and_ends(outbox)
    failure = ends[b"x" * 16].failure
    assert failure is not None
    assert "stopped" in failure
    assert [offset for _, offset, _ in worker.committable()] == [8]


def test_message_without_segments_keeps_an_upload_open() -> None:
    """A gateway that cuts sends one while its client is slow; nothing is sent on for it."""
    outbox, envelope = Kept(), Envelope(b"x" * 16, "t", "key")
    worker = handler(outbox)
    worker.on_assigned(0, "")
    data = RANDOM[:300_000]
    chunked = ChunkerStage(SETTINGS, NAMER).decide(
        FrameRuns(np.frombuffer(data, np.uint8), (BlobRun(0, 0, len(data), True),)), LookupResults()
    )
    count = len(chunked.segments.lengths)
    segments = FreshBatch(
        batch=chunked.segments,
        segment_known=np.zeros(chunked.segments.segments, np.bool_),
        segment_locations=Locations.empty(chunked.segments.segments),
        chunk_known=np.zeros(count, np.bool_),
        chunk_locations=Locations.empty(count),
        first=np.arange(count, dtype=np.int64),
        fresh=np.arange(count, dtype=np.intp),
    )
    worker.handle([record(0, encode(Sparse(envelope, segments)))])
    assert len(outbox.sent) == 1
    worker._partitions[0].open[b"x" * 16].last_seen -= 2
    behind = replace(envelope, position=len(data), sequence=chunked.segments.segments)
    worker.handle([record(1, encode(Sparse(behind, FreshBatch.empty())))])
    worker.idle()
    assert b"x" * 16 in worker._partitions[0].open
    assert len(outbox.sent) == 1


def test_upload_with_unread_frames_has_not_stopped() -> None:
    """The service was paused for longer than the idle limit of an upload.

    Frames were acknowledged meanwhile.
    """
    outbox, backlog = Kept(), Waiting(end=3)
    worker = handler(outbox, backlog=backlog)
    worker.on_assigned(0, "")
    log = frames(b"x" * 16, RANDOM[:500_000], [250_000, 250_000])
    worker.handle([record(0, log[0])])
    worker._partitions[0].open[b"x" * 16].last_seen -= 2
    worker.idle()
    worker.handle([record(1, log[1]), record(2, log[2])])
    _, ends = segments_and_ends(outbox)
    assert ends[b"x" * 16].failure is None


def test_gap_and_short_blob_end_as_failed() -> None:
    outbox = Kept()
    worker = handler(outbox)
    worker.on_assigned(0, "")
    gap = frames(b"g" * 16, RANDOM[:3000], [1000] * 3)
    short = frames(b"s" * 16, RANDOM[:3000], [1000] * 3)
    log = [gap[0], gap[2], gap[3], short[0], short[1], short[3]]
    worker.handle([record(offset, value) for offset, value in enumerate(log)])
    _, ends = segments_and_ends(outbox)
    assert "are missing" in (ends[b"g" * 16].failure or "")
    assert "2000 of 3000 bytes arrived" in (ends[b"s" * 16].failure or "")


def test_garbage_becomes_dead_letter_and_the_rest_is_cut() -> None:
    outbox = Kept()
    worker = handler(outbox)
    worker.on_assigned(0, "")
    log = [b"", b"{}", b"NKS1" + bytes(60), *frames(b"x" * 16, RANDOM[:100], [100])]
    worker.handle([record(offset, value) for offset, value in enumerate(log)])
    assert len(outbox.dead) == 3
    assert all(dict(headers)["__connect.errors.stage"] == b"chunker" for headers in outbox.dead)
    segments, ends = segments_and_ends(outbox)
    assert len(segments[b"x" * 16]) == 1
    assert ends[b"x" * 16].failure is None


def test_open_blobs_beyond_commit_are_read_again() -> None:
    """A commit describes a limited number of open blobs; others restart from their start."""
    outbox = Kept()
    worker = handler(outbox)
    worker.on_assigned(0, "")
    blobs = [number.to_bytes(16, "big") for number in range(300)]
    log = [value for blob in blobs for value in frames(blob, RANDOM[:200_000], [200_000], end=False)]
    worker.handle([record(offset, value) for offset, value in enumerate(log)])
    ((_, offset, metadata),) = worker.committable()
    assert len(metadata) <= 4096
    again = Kept()
    resumed = handler(again)
    resumed.on_assigned(0, metadata)
    ends = [frames(blob, RANDOM[:200_000], [200_000])[-1] for blob in blobs]
    whole = log + ends
    resumed.handle([record(number, whole[number]) for number in range(offset, len(whole))])
    outbox.sent += again.sent
    segments, found = segments_and_ends(outbox)
    assert all(found[blob].failure is None and len(segments[blob]) == found[blob].segments for blob in blobs)


def test_blob_with_late_frame_keeps_state_among_many() -> None:
    """Two owners die; the second one reads many other blobs first.

    It dropped the state of a blob whose next frame it had not read yet.
    """
    blobs = [number.to_bytes(16, "big") for number in range(STATES_MAX + 1)]
    halves = [frames(blob, RANDOM[:400_000], [200_000, 200_000]) for blob in blobs]
    last = halves[0]
    log = [one[0] for one in halves] + [last[1]]
    first = handler(Kept())
    first.on_assigned(0, "")
    first.handle([record(offset, value) for offset, value in enumerate(log)])
    ((_, offset, metadata),) = first.committable()
    assert offset > 0  # the start of the blob is not read again

    second = handler(Kept())
    second.on_assigned(0, metadata)
    second.handle([record(number, log[number]) for number in range(offset, len(blobs))])
    ((_, offset, metadata),) = second.committable()

    outbox = Kept()
    third = handler(outbox)
    third.on_assigned(0, metadata)
    log.append(last[2])
    third.handle([record(number, log[number]) for number in range(offset, len(log))])
    _, ends = segments_and_ends(outbox)
    assert ends[blobs[0]].failure is None


def test_segments_are_split_to_fit_messages() -> None:
    payload = np.frombuffer(RANDOM[:2_500_000] + bytes(2_000_000), np.uint8)
    batch = ChunkerStage(SETTINGS, NAMER).decide(
        FrameRuns(payload, (BlobRun(0, 0, len(payload), True),)), LookupResults()
    )
    parts = list(split_segments(batch.segments, 3))
    assert len(parts) > 2
    assert sum(part.segments for part in parts) == batch.segments.segments
    for part in parts:
        encode(Segments(Envelope(b"x" * 16, "t" * 128, "k" * 1024), part))


def test_settings_with_segments_above_a_message_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"want chunker\.min_bytes >= 1024"):
        check_messages_fit(with_changes(Settings(), {"chunker": {"min_bytes": 64}}))


def test_offsets_move_past_finished_frames_only() -> None:
    offsets = PartitionOffsets()
    assert offsets.committable is None
    for offset in (5, 6, 8):
        offsets.start(offset)
    offsets.finish(6)
    assert offsets.committable == 5
    offsets.finish(5)
    assert offsets.committable == 8
    offsets.finish(8)
    assert offsets.committable == 9
    offsets.start(7)  # read again after a rebalance
    assert offsets.committable == 7


def test_record_of_another_tenant_is_a_dead_letter() -> None:
    """An end would give the blob to that tenant, a frame would add its bytes (I9)."""
    data = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8).tobytes()
    messages = frames(b"a" * 16, data, [100_000] * 3)
    foreign = [decode(messages[number], "test") for number in (1, 3)]
    aside = [encode(replace(one, envelope=replace(one.envelope, tenant="other"))) for one in foreign]
    outbox = Kept()
    worker = handler(outbox)
    worker.on_assigned(0, "")
    worker.handle([record(offset, value) for offset, value in enumerate([messages[0], *aside, *messages[1:]])])
    segments, ends = segments_and_ends(outbox)
    assert [row for _, row in sorted(segments[b"a" * 16].items())] == in_one_piece(data)
    end = ends[b"a" * 16]
    assert (end.failure, end.envelope.tenant) == (None, "t")
    assert len(outbox.dead) == 2


def test_batch_that_cannot_be_cut_names_its_blobs() -> None:
    """Send the failure and an end, by which the committer reports each blob: the failure names the batch."""

    def stage_of(tenant: str) -> ChunkerStage:
        raise TenantErased(f"tenant {tenant!r}: its keys were erased")

    outbox = Kept()
    worker = ChunkerHandler(SETTINGS, stage_of, outbox, Waiting(), OBJECTS)
    worker.on_assigned(0, "")
    blobs = tuple(BatchedBlob(key, 5, bytes(32), key.encode() * 16, 1, {"n": key}, b"00-1") for key in "abc")
    envelope = Envelope(b"a" * 16, "t", "a", blobs=3)
    worker.handle([record(0, encode(Batch(envelope, blobs, np.zeros(15, np.uint8))))])
    failure, end = [decode(value, "segments") for _, value in outbox.sent]
    assert isinstance(failure, End)
    assert failure.failure is not None
    assert "its keys were erased" in failure.failure
    assert end == BatchEnd(envelope, tuple(replace(blob, segments=0) for blob in blobs))
    assert len(outbox.dead) == 1
    worker.drain(0)
    assert [offset for _, offset, _ in worker.committable()] == [1]
