"""Test stages that share a process: their messages, acknowledgements and failures."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin.workers.pipeline import STAGES
from nearkin_shared.config.pipeline_stages import FUSED, stage_group, stage_groups
from nearkin_shared.errors import ConfigError, StoreUnavailable
from nearkin_shared.formats.message import (
    End,
    Envelope,
    Frame,
    MessageParts,
    Placed,
    Segments,
    StagedFrame,
    decode,
    encode,
    joined,
    staged_bytes,
)
from nearkin_shared.formats.message_layout import Pack
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.kafka.consumer_loop import Handler, Record, SupportsCommitted
from nearkin_shared.kafka.dead_letters import IN_MEMORY_HEADER
from nearkin_shared.kafka.earlier_messages import EarlierMessages
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.kafka.stage_chain import ChainLink, StageChain, chain
from nearkin_shared.kafka.stage_parts import parts_of
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.staged_packs import UploadAttempt, put_pack, read_pack, refer
from nearkin_shared.types import U8, U64, Bools, Locations
from tests.support.fakes.stage_fleet import SETTINGS, Fleet, KafkaFake, indexed_tenants

CONTENT = text_like(3_000_000, 4) + random_bytes(700_000, 5)
FRAME_BYTES = 900 * 1024
BLOB = b"b" * 16


def frames(blob: bytes = BLOB, content: bytes = CONTENT, first: int = 0) -> list[Record]:
    """Return the records of a blob in topic `frames`, numbered from `first`."""
    values = []
    for start in range(0, len(content), FRAME_BYTES):
        payload = np.frombuffer(content[start : start + FRAME_BYTES], np.uint8)
        values.append(encode(Frame(Envelope(blob, "t", "key", start), payload)))
    end = End(
        Envelope(blob, "t", "key", len(content)), began_us=1, origin=blob, size_bytes=len(content), blake3=b"3" * 32
    )
    values.append(encode(end))
    return [Record("frames", 0, first + at, blob, value, {}, ()) for at, value in enumerate(values)]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with indexed_tenants(tmp_path) as tenants:
        yield Fleet(tenants, monkeypatch)


def offset(handler: Handler) -> int:
    """Return the committable offset of partition 0, 0 if there is none yet."""
    return max((at for _, at, _ in handler.committable()), default=0)


def test_all_segments_are_placed_before_the_offset_moves(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    records = frames()
    worker.handle(records)
    assert offset(worker) == 0  # the last container is open
    worker.drain(0)
    assert offset(worker) == len(records)
    *runs, end = fleet.placed()
    assert isinstance(end, End)
    assert end.segments == sum(len(run.segments) for run in runs if isinstance(run, Placed))
    assert sum(int(run.lengths.sum()) for run in runs if isinstance(run, Placed)) == len(CONTENT)
    worker.close()


def test_offset_waits_until_kafka_has_placed(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    fleet.outboxes[1].is_away = True  # of `placed`: the delta stage's second outbox
    worker.handle(frames())
    with pytest.raises(StoreUnavailable):
        worker.drain(0)
    assert fleet.outboxes[1].sent
    assert offset(worker) == 0
    worker.close()


def test_no_stage_sends_to_kafka_but_the_last(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    worker.handle(frames())
    worker.drain(0)
    assert {name for outbox in fleet.outboxes for name, _ in outbox.sent} == {"placed"}
    worker.close()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_chains_of_any_length_give_the_same_result(fleet: Fleet, cut: int) -> None:
    """Two workers, connected by Kafka behind stage `cut`, send the same locations as one worker."""
    links = fleet.links()
    first, second = fleet.chained(links[:cut]), fleet.chained(links[cut:])
    first.handle(frames())
    first.drain(0)
    sent = [value for outbox in fleet.outboxes for name, value in outbox.sent if name == links[cut].topic]
    assert sent
    second.handle([Record(links[cut].topic, 0, at, BLOB, value, {}, ()) for at, value in enumerate(sent)])
    second.drain(0)
    assert offset(second) == len(sent)
    assert sum(int(run.lengths.sum()) for run in fleet.placed() if isinstance(run, Placed)) == len(CONTENT)
    first.close()
    second.close()


class Kept:
    """Last stage that keeps its records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_assigned(self, partition: int, metadata: str) -> None: ...

    def handle(self, records: list[Record]) -> None:
        self.records += records

    def idle(self) -> float:
        return 1.0

    def drain(self, partition: int) -> None: ...

    def on_dropped(self, partition: int) -> None: ...

    def committable(self) -> list[tuple[int, int, str]]:
        return []

    def close(self) -> None: ...


def chunked(fleet: Fleet, records: list[Record]) -> list[Record]:
    """Return what a chunker sends to a delta stage of the same process."""
    last = Kept()
    fleet.chained([fleet.links()[0], ChainLink("delta", "segments", lambda _: last)]).handle(records)
    return last.records


def test_payload_is_shared_between_stages(fleet: Fleet) -> None:
    """Pass the bytes of segments on as views of the pack: no stage of one process copies them to send them."""
    sent = chunked(fleet, staged(fleet, pack_bytes=len(CONTENT))[:1])
    payloads = [one.value.payload for one in sent if isinstance(one.value, MessageParts)]
    assert len(payloads) == len(sent) > 1
    for before, after in pairwise(payloads):
        assert after.ctypes.data == before.ctypes.data + len(before)


@pytest.mark.parametrize("bridge_bytes", [1000, 60_000])
def test_bridge_between_packs_changes_no_segment(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, bridge_bytes: int
) -> None:
    """Cut the same segments whether all, few or some bytes of a pack are joined to the uncut ones before it."""
    sent = []
    for size in (1 << 30, bridge_bytes):
        monkeypatch.setattr("nearkin_chunker.handler.BRIDGE_BYTES", size)
        messages = [decode(one.value, one.label) for one in chunked(fleet, staged(fleet))]
        assert isinstance(messages[-1], End)
        segments = [one.batch for one in messages if isinstance(one, Segments)]
        sent.append([np.concatenate([one.segment_ids for one in segments]), segments[-1].names])
    assert all(np.array_equal(*pair) for pair in zip(*sent, strict=True))


def test_pack_behind_uncut_bytes_is_not_copied(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Join a part of it to the bytes before it, and pass the rest on where it is."""
    read: list[U8] = []

    def read_and_keep(objects: ObjectStore, pack: Pack) -> U8:
        read.append(read_pack(objects, pack))
        return read[-1]

    monkeypatch.setattr("nearkin_chunker.handler.read_pack", read_and_keep)
    sent = chunked(fleet, staged(fleet)[:2])
    payloads = [one.value.payload for one in sent if isinstance(one.value, MessageParts)]
    in_pack_bytes = [sum(len(one) for one in payloads if np.shares_memory(one, pack)) for pack in read]
    copied_bytes = sum(map(len, payloads)) - sum(in_pack_bytes)
    assert in_pack_bytes[1] > 500_000
    assert 0 < copied_bytes < 1_000_000


class Counted(Kept):
    """Stage that counts the records of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def handle(self, records: list[Record]) -> None:
        self.calls.append(len(records))


@pytest.mark.parametrize(
    ("sizes_mib", "calls"),
    [
        ([8, 8, 8, 8, 8], [2, 2, 1]),
        ([64, 8, 8], [1, 2]),
        ([8, 64, 8], [1, 1, 1]),
        ([0, 8, 0, 8, 0, 8], [5, 1]),
        ([0] * 9, [9]),
    ],
)
def test_references_to_16_mib_are_processed_at_once(sizes_mib: list[int], calls: list[int]) -> None:
    """Bound the memory of a step by the packs that it refers to; 0: a frame."""
    frame = encode(Frame(Envelope(BLOB, "t", "key"), np.zeros(10, np.uint8)))
    values = [
        encode(StagedFrame(Envelope(BLOB, "t", "key"), b"o" * 16, 5, 5, size << 20, b"d" * 32)) if size else frame
        for size in sizes_mib
    ]
    first = Counted()
    StageChain(first, [], []).handle([Record("frames", 0, at, BLOB, one, {}, ()) for at, one in enumerate(values)])
    assert first.calls == calls


@pytest.mark.parametrize("value", [b"", b"NKS1\x03\x07", b"NKS1\x03\x07" + bytes(80)])
def test_damaged_reference_counts_no_bytes(value: bytes) -> None:
    assert staged_bytes(value) == 0


class Recorded(EarlierMessages):
    """Records for which partitions a chain waited."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait(self, partitions: Collection[int]) -> None:
        self.waited += partitions


def test_earlier_messages_go_first_after_an_assignment(fleet: Fleet) -> None:
    """A worker of single stages may have had the partition before: its messages must not be overtaken."""
    earlier = Recorded()
    worker = chain(SETTINGS, fleet.links(), fleet.outbox, earlier)
    worker.on_assigned(0, "")
    worker.on_assigned(1, "")
    assert not earlier.waited
    worker.handle(frames()[:1])
    worker.handle(frames()[1:2])
    assert earlier.waited == [0]
    worker.drain(0)
    worker.on_dropped(0)
    worker.on_assigned(0, "")
    worker.handle(frames()[2:3])
    assert earlier.waited == [0, 0]
    worker.close()


@pytest.mark.parametrize("is_chained", [True, False])
def test_super_features_are_looked_up_once_in_a_chain(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_chained: bool
) -> None:
    """In one process the delta stage alone looks up super-features; apart, it repeats the lookups without candidate."""
    asked, stored = list[int](), LmdbIndex.locate_ranks

    def counted(self: LmdbIndex, sketch: str, super_features: U64) -> tuple[Locations, Bools]:
        asked.append(len(super_features))
        return stored(self, sketch, super_features)

    monkeypatch.setattr(LmdbIndex, "locate_ranks", counted)
    links = fleet.links()
    if is_chained:
        worker = fleet.chained(links)
    else:
        worker, behind = fleet.chained(links[:3]), fleet.chained(links[3:])
    worker.handle(frames())
    worker.drain(0)
    if not is_chained:
        paired = [value for outbox in fleet.outboxes for name, value in outbox.sent if name == "paired"]
        behind.handle([Record("paired", 0, at, BLOB, value, {}, ()) for at, value in enumerate(paired)])
        behind.drain(0)
        behind.close()
    chunks = sum(one.ledger.chunks for one in fleet.placed() if isinstance(one, Placed))
    assert chunks > 300
    assert sum(asked) == chunks * (1 if is_chained else 2)
    worker.close()


def test_repeated_blob_is_placed_at_the_same_locations(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    records = frames()
    worker.handle(records)
    worker.drain(0)
    count = len(fleet.placed())
    worker.handle(frames(b"c" * 16, first=len(records)))
    worker.drain(0)
    again = [run for run in fleet.placed()[count:] if isinstance(run, Placed)]
    assert all(run.known.all() for run in again)
    assert sum(run.ledger.unique_bytes for run in again) == 0
    worker.close()


def test_failure_of_a_later_stage_fails_the_blob(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a message that dedup cannot process as a dead letter in Kafka, and report its blob as failed."""

    def broken(*_: object) -> None:
        raise TypeError("a planted fault")

    monkeypatch.setattr("nearkin_dedup.handler.read_segments", broken)
    worker = fleet.chained(fleet.links())
    records = frames()
    worker.handle(records)
    worker.drain(0)
    assert offset(worker) == len(records)  # the partition is not blocked
    dead = [letter for outbox in fleet.outboxes for letter in outbox.dead]
    assert dead
    assert {letter["__connect.errors.stage"] for letter in dead} == {b"dedup"}
    assert any(isinstance(one, End) and one.failure and "planted" in one.failure for one in fleet.placed())
    worker.close()


def test_letter_of_a_message_in_memory_can_be_replayed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign it, since the replay goes through Kafka, and mark that Kafka has no record at its offset."""

    def broken(*_: object) -> None:
        raise TypeError("a planted fault")

    monkeypatch.setattr("nearkin_dedup.handler.read_segments", broken)
    monkeypatch.setattr(KafkaFake, "authenticator", EnvelopeAuthenticator(b"s" * 32, required=False))
    worker = fleet.chained(fleet.links())
    worker.handle(frames())
    worker.handle([Record("nearkin.frames", 0, 9, BLOB, b"damaged", {}, ())])
    worker.drain(0)
    letters = [
        (record, headers)
        for outbox in fleet.outboxes
        for record, headers in zip(outbox.dead_records, outbox.dead, strict=True)
    ]
    in_memory = [(record, headers) for record, headers in letters if IN_MEMORY_HEADER in headers]
    refusing = EnvelopeAuthenticator(b"s" * 32)
    for (key, value), headers in in_memory:
        refusing.check("dedup", "nearkin.segments", key, value, headers[MAC_HEADER])
    assert in_memory
    (of_kafka,) = (headers for _, headers in letters if IN_MEMORY_HEADER not in headers)
    assert of_kafka["__connect.errors.topic"] == b"nearkin.frames"
    assert MAC_HEADER not in of_kafka, "signed by its sender, or not at all"
    worker.close()


def test_open_blob_of_a_lost_partition_starts_again(fleet: Fleet) -> None:
    """Cut the blob again from the committed offset after the partition was lost in the middle of it."""
    worker = fleet.chained(fleet.links())
    records = frames()
    worker.handle(records[:2])
    worker.on_dropped(0)
    worker.on_assigned(0, "")
    worker.handle(records)
    worker.drain(0)
    assert offset(worker) == len(records)
    found = {(run.envelope.sequence, len(run.segments)): run for run in fleet.placed() if isinstance(run, Placed)}
    assert max(sequence + count for sequence, count in found) == next(
        one.segments for one in fleet.placed() if isinstance(one, End)
    )
    worker.close()


def staged(fleet: Fleet, blob: bytes = BLOB, pack_bytes: int = 1_500_000) -> list[Record]:
    """Return the records of a blob whose bytes are in packs."""
    attempt, values = UploadAttempt(blob, "t", "key", b"o" * 16, 5), []
    for start in range(0, len(CONTENT), pack_bytes):
        pack = [CONTENT[start : start + pack_bytes]]
        reference = refer(attempt, start, pack)
        put_pack(fleet.objects, reference, pack)
        values.append(encode(reference))
    values.append(joined(frames(blob)[-1].value))
    return [Record("frames", 0, at, blob, value, {}, ()) for at, value in enumerate(values)]


def packs(fleet: Fleet) -> int:
    return sum(1 for _ in fleet.objects.names("staging"))


def test_references_give_the_locations_of_frames(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    worker.handle(staged(fleet))
    worker.drain(0)
    first = [run for run in fleet.placed() if isinstance(run, Placed)]
    assert sum(int(run.lengths.sum()) for run in first) == len(CONTENT)
    worker.handle(frames(b"c" * 16, first=10))
    worker.drain(0)
    again = [run for run in fleet.placed() if isinstance(run, Placed) and run.envelope.blob == b"c" * 16]
    assert all(run.known.all() for run in again)  # the same segments
    worker.close()


def test_packs_are_deleted_behind_the_committed_offset(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    assert isinstance(worker, SupportsCommitted)
    records = staged(fleet)
    worker.handle(records)
    worker.drain(0)
    assert packs(fleet) == len(records) - 1  # durable effects, but no committed offset
    worker.on_committed(0, 2)
    deadline = time.monotonic() + 10
    while packs(fleet) > len(records) - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert packs(fleet) == len(records) - 3
    worker.close()


def remaining_packs(fleet: Fleet, wanted: int) -> int:
    """Return the number of packs; wait until it is `wanted`."""
    deadline = time.monotonic() + 10
    while packs(fleet) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return packs(fleet)


@pytest.mark.parametrize("is_known", [True, False])
def test_restarted_worker_deletes_packs_of_ended_blobs(fleet: Fleet, is_known: bool) -> None:
    """Earlier messages have passed all stages; without states of open blobs no other blob is known to have ended."""
    ended, other = staged(fleet), staged(fleet, b"c" * 16)
    turns = [other[0], ended[0], other[1], *ended[1:], *other[2:]]
    records = [replace(record, offset=at) for at, record in enumerate(turns)]
    first = fleet.chained(fleet.links())
    assert isinstance(first, SupportsCommitted)
    first.handle(records[: 2 + len(ended)])
    first.drain(0)
    ((_, at, states),) = first.committable()
    assert at == 2, "the second pack of the other blob was cut in part"
    first.on_committed(0, at)
    assert remaining_packs(fleet, len(records) - 2 - at) == len(records) - 2 - at
    first.close()
    worker = chain(SETTINGS, fleet.links(), fleet.outbox, Recorded())
    assert isinstance(worker, SupportsCommitted)
    worker.on_assigned(0, states if is_known else "")
    worker.handle(records[at:])
    worker.drain(0)
    worker.on_committed(0, len(records))
    left = 0 if is_known else len(records) - 2 - at
    assert remaining_packs(fleet, left) == left
    time.sleep(0.2)  # no other deletion follows
    assert packs(fleet) == left
    worker.close()


def test_missing_pack_fails_the_blob_unless_committed(fleet: Fleet) -> None:
    """Name the origin, so that the committer finds a version that was committed before the pack was deleted."""
    worker = fleet.chained(fleet.links())
    records = staged(fleet)
    for name, _ in list(fleet.objects.names("staging")):
        fleet.objects.delete(name)
    worker.handle(records)
    worker.drain(0)
    assert offset(worker) == len(records)
    (end,) = fleet.placed()
    assert isinstance(end, End)
    assert (end.origin, end.began_us, end.segments) == (b"o" * 16, 5, 0)
    assert end.failure is not None
    assert "is missing; upload it again" in end.failure
    worker.close()


def test_damaged_pack_fails_the_blob(fleet: Fleet) -> None:
    worker = fleet.chained(fleet.links())
    records = staged(fleet)
    name = next(name for name, _ in fleet.objects.names("staging"))
    size = fleet.objects.size_bytes(name)
    fleet.objects.delete(name)
    fleet.objects.put_new(name, b"\0" * size)
    worker.handle(records)
    worker.drain(0)
    assert offset(worker) == len(records)
    assert any(isinstance(one, End) and one.failure and "of its reference" in one.failure for one in fleet.placed())
    assert [letter["__connect.errors.stage"] for outbox in fleet.outboxes for letter in outbox.dead] == [b"chunker"]
    worker.close()


def test_worker_reads_the_topics_of_all_its_stages() -> None:
    """Read also what other workers sent: a fleet changes its grouping while it runs."""
    parts = parts_of(STAGES, stage_group(FUSED))
    assert [(part.service, part.topic) for part in parts] == [
        ("chunker", "frames"),
        ("dedup", "segments"),
        ("resemblance", "fresh"),
        ("delta", "paired"),
        ("committer", "placed"),
    ]
    assert [part.service for part in parts_of(STAGES, stage_group("committer+dedup"))] == ["dedup", "committer"]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("fused", [("chunker", "dedup", "resemblance", "delta", "committer")]),
        ("split", [("chunker",), ("dedup",), ("resemblance",), ("delta", "committer")]),
        (
            "dedup+chunker, delta+resemblance, committer",
            [("chunker", "dedup"), ("resemblance", "delta"), ("committer",)],
        ),
    ],
)
def test_groups_are_read_from_text(text: str, groups: list[tuple[str, ...]]) -> None:
    assert stage_groups(text) == groups


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("chunker+dedup", "no group has resemblance, delta, committer"),
        ("fused,chunker", "'fused': no stage has this name; known are chunker, dedup"),
        (f"{FUSED},chunker", "a stage is in two groups"),
        ("chunker+chunker,dedup,resemblance,delta,committer", "contains a stage twice"),
        ("", "no stage has this name"),
    ],
)
def test_groups_that_lack_or_repeat_a_stage_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        stage_groups(text)
