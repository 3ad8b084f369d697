"""Test stages between topics.

Messages are processed together, with the results of each alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.segment_messages import split_segments
from nearkin_dedup import DedupStage
from nearkin_dedup.handler import dedup_work
from nearkin_delta import handler as delta_handler
from nearkin_delta.handler import DeltaHandler
from nearkin_resemblance import ResemblanceStage
from nearkin_resemblance.handler import resemblance_work
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError, Corrupt, RetryableError, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats import message as fmt
from nearkin_shared.formats.message import (
    Encoded,
    End,
    Envelope,
    Fresh,
    Message,
    Paired,
    Segments,
    UndecodedMessage,
    decode,
    encode,
    joined,
)
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.kafka import consumer_loop
from nearkin_shared.kafka.ack_tracker import AckTracker
from nearkin_shared.kafka.clients import Outbox
from nearkin_shared.kafka.coalesce import merged_fresh, merged_pairs
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.offset_tracker import PartitionOffsets
from nearkin_shared.kafka.record_guard import RecordGuard
from nearkin_shared.kafka.relay_handler import OutgoingMessage, StatelessStageHandler, Work
from nearkin_shared.kafka.tenant_context import TenantContexts
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.pipeline.batched import run_stage_batched
from nearkin_shared.pipeline.stage import LookupResults, run_stage
from nearkin_shared.types import ContainerId, Locations, SegmentBatch
from tests.support.fakes.stage_fleet import indexed_tenants

SETTINGS = Settings()
MIB = 1 << 20
BLOB = b"0123456789abcdef"


class Scripted(Outbox):
    """Keeps messages; acknowledges them when a test says so."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.dead: list[Mapping[str, bytes | None]] = []
        self.sent_messages = 0
        self._unanswered = PartitionOffsets()
        self.failing = False

    def send(self, name: str, key: bytes, value: Encoded, headers: Mapping[str, bytes]) -> None:
        assert headers["ce_specversion"] == b"1.0"
        self.values.append(joined(value))
        self._unanswered.start(self.sent_messages)
        self.sent_messages += 1

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        self.dead.append(dict(headers))

    def acknowledge(self, *numbers: int) -> None:
        for number in numbers:
            self._unanswered.finish(number)

    def poll_acks(self) -> None:
        if self.failing:
            raise StoreUnavailable("kafka: a message was not delivered")

    def flush(self) -> None:
        self.poll_acks()
        self.acknowledge(*range(self.acknowledged_messages, self.sent_messages))

    def close(self) -> None:
        pass

    @property
    def decoded_messages(self) -> list[Message]:
        return [decode(value, "sent") for value in self.values]


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[TenantContexts]:
    with indexed_tenants(tmp_path) as found:
        yield found


def chunked(data: bytes, tenant: str = "t") -> SegmentBatch:
    stage = ChunkerStage(SETTINGS, Fingerprinter(b"s" * 32, tenant))
    payload = np.frombuffer(data, np.uint8)
    return stage.decide(FrameRuns(payload, (BlobRun(0, 0, len(data), True),)), LookupResults()).segments


def messages(data: bytes, tenant: str = "t", blob: bytes = BLOB) -> list[Segments]:
    found, position, sequence = [], 0, 0
    for batch in split_segments(chunked(data, tenant), 3):
        found.append(Segments(Envelope(blob, tenant, "key", position, sequence), batch))
        position, sequence = position + batch.logical_bytes, sequence + batch.segments
    return found


def records(values: Sequence[bytes]) -> list[Record]:
    return [Record("segments", 0, at, value[8:24], value, {}, ()) for at, value in enumerate(values)]


def relay(work: Work, outbox: Scripted) -> StatelessStageHandler:
    handler = StatelessStageHandler(SETTINGS, "dedup", "fresh", work, outbox)
    handler.on_assigned(0, "")
    return handler


def handled(work: Work, values: Sequence[bytes]) -> Scripted:
    outbox = Scripted()
    relay(work, outbox).handle(records(values))
    return outbox


def end(blob: bytes = BLOB, tenant: str = "t") -> bytes:
    return encode(End(Envelope(blob, tenant, "key", 5), 1, blob, 5, b"b" * 32, segments=1))


def test_joint_lookups_equal_single_lookups(tenants: TenantContexts) -> None:
    facts, batches = tenants["t"].facts, [m.batch for m in messages(random_bytes(3 * MIB, 1))]
    assert len(batches) > 2
    fresh = run_stage_batched(DedupStage(), batches, facts)
    for one, batch in zip(fresh, batches, strict=True):
        alone = run_stage(DedupStage(), batch, facts)
        assert np.array_equal(one.fresh, alone.fresh)
        assert np.array_equal(one.first, alone.first)
    paired = run_stage_batched(ResemblanceStage(SETTINGS), fresh, facts)
    for pair, known in zip(paired, fresh, strict=True):
        assert np.array_equal(pair.super_features, run_stage(ResemblanceStage(SETTINGS), known, facts).super_features)
    assert run_stage_batched(DedupStage(), [], facts) == []


def test_rest_of_many_messages_is_sent_as_few(tenants: TenantContexts) -> None:
    known = chunked(random_bytes(MIB, 2))
    count = len(known.names)
    known_locations = Locations(np.full(count, 9, np.uint64), np.arange(count, dtype=np.uint32))
    nothing = np.zeros((0, 3), np.uint64), np.zeros((0, 20), np.uint8)
    tenants["t"].pending.add(
        known.names, known_locations, "s", Locations.empty(), nothing[0], nothing[1], Locations.empty()
    )
    sent = messages((random_bytes(MIB, 2) + random_bytes(50_000, 9)) * 6)
    found = handled(dedup_work(SETTINGS, tenants), [*map(encode, sent), end()]).decoded_messages
    assert len(sent) > 6
    assert len(found) == 2
    assert isinstance(found[0], Fresh)
    assert isinstance(found[1], End)
    whole = found[0].batch
    assert whole.batch.logical_bytes == 6 * (MIB + 50_000)
    assert np.array_equal(whole.batch.segment_ids, np.concatenate([m.batch.segment_ids for m in sent]))
    namer = Fingerprinter(b"s" * 32, "t")
    rows = whole.fresh
    named = namer.name_chunks(whole.batch.payload, whole.batch.offsets[rows], whole.batch.lengths[rows])
    assert np.array_equal(named, whole.batch.names[rows])
    assert len(np.unique(named, axis=0)) == len(rows) < 60  # the 50,000 bytes, and their edges with known bytes


def test_messages_of_fresh_bytes_are_merged_up_to_the_limit(tenants: TenantContexts) -> None:
    sent = messages(random_bytes(4 * MIB, 3))
    outbox = handled(dedup_work(SETTINGS, tenants), [encode(m) for m in sent])
    found = [message for message in outbox.decoded_messages if isinstance(message, Fresh)]
    assert sum(m.batch.batch.segments for m in found) == sum(m.batch.segments for m in sent)
    paired = handled(resemblance_work(tenants, lambda: SETTINGS, memory_objects()), outbox.values)
    assert not paired.dead
    assert all(isinstance(message, Paired) for message in paired.decoded_messages)


def test_blobs_and_tenants_of_a_batch_stay_separate(tenants: TenantContexts) -> None:
    other = b"fedcba9876543210"
    data = random_bytes(2 * MIB, 4)
    ours, theirs = messages(data), messages(data, "u", other)
    mixed = [encode(m) for pair in zip(ours, theirs, strict=False) for m in pair]
    decoded_messages = handled(dedup_work(SETTINGS, tenants), [*mixed, end(), end(other, "u")]).decoded_messages
    for blob in (BLOB, other):
        mine = [m for m in decoded_messages if m.envelope.blob == blob]
        assert isinstance(mine[-1], End)
        fresh = [m for m in mine if isinstance(m, Fresh)]
        assert [m.envelope.sequence for m in fresh] == sorted(m.envelope.sequence for m in fresh)
        assert sum(len(m.batch.batch.payload) for m in fresh) > 0  # another tenant's chunks are not ours


def test_repeated_message_is_not_merged_with_the_original(tenants: TenantContexts) -> None:
    sent = [encode(m) for m in messages(random_bytes(2 * MIB, 5))]
    decoded_messages = handled(dedup_work(SETTINGS, tenants), [*sent, *sent]).decoded_messages
    fresh = [m for m in decoded_messages if isinstance(m, Fresh)]
    sequences = [m.envelope.sequence for m in fresh]
    assert sequences.count(0) == 2
    assert not any(m.envelope.sequence == 0 and m.batch.batch.segments > len(sent) * 64 for m in fresh)


def test_merged_messages_equal_the_single_ones(tenants: TenantContexts) -> None:
    known = chunked(random_bytes(MIB, 11))
    count = len(known.names)
    known_locations = Locations(np.full(count, 9, np.uint64), np.arange(count, dtype=np.uint32))
    nothing = np.zeros((0, 3), np.uint64), np.zeros((0, 20), np.uint8)
    tenants["t"].pending.add(
        known.names, known_locations, "s", Locations.empty(), nothing[0], nothing[1], Locations.empty()
    )
    again, other = random_bytes(300_000, 12), b"fedcba9876543210"
    ours = messages((random_bytes(MIB, 11) + again) * 2 + random_bytes(2 * MIB, 13) + again + bytes(MIB))
    theirs = messages(again + random_bytes(MIB, 11) + again, blob=other)
    mixed = [*ours[:2], theirs[0], *ours[2:], *theirs[1:]]
    decoded_messages = handled(dedup_work(SETTINGS, tenants), [encode(m) for m in mixed]).decoded_messages
    alone = {
        (m.envelope.blob, m.envelope.sequence): Fresh(m.envelope, run_stage(DedupStage(), m.batch, tenants["t"].facts))
        for m in mixed
    }
    seen = 0
    for found in decoded_messages:
        assert isinstance(found, Fresh)
        blob, first = found.envelope.blob, found.envelope.sequence
        reached = range(first, first + found.batch.batch.segments)
        parts = [part for (of, sequence), part in alone.items() if of == blob and sequence in reached]
        seen += len(parts)
        expected = decode(encode(Fresh(found.envelope, merged_fresh([part.batch for part in parts]))), "expected")
        assert encode(found) == encode(expected)
    assert seen == len(mixed) > len(decoded_messages) > 2


def test_messages_repeated_after_an_end_stay_after_it(tenants: TenantContexts) -> None:
    sent = [encode(m) for m in messages(random_bytes(MIB, 14))]
    decoded_messages = handled(dedup_work(SETTINGS, tenants), [*sent, end(), *sent, end()]).decoded_messages
    kinds = [type(message).__name__ for message in decoded_messages]
    assert kinds.count("End") == 2
    assert kinds[len(kinds) // 2 - 1] == kinds[-1] == "End"


def test_joint_pairs_keep_sketches_and_send_a_chunk_once(tenants: TenantContexts) -> None:
    again = random_bytes(MIB, 10)
    fresh = run_stage_batched(DedupStage(), [m.batch for m in messages(again + again)], tenants["t"].facts)
    stage, facts = ResemblanceStage(SETTINGS), tenants["t"].facts
    whole = merged_pairs(run_stage_batched(stage, fresh, facts))
    alone = run_stage(stage, merged_fresh(fresh), facts)
    assert len(fresh) > 1
    assert len(whole.fresh.fresh) < sum(len(part.fresh) for part in fresh)
    assert np.array_equal(whole.super_features, alone.super_features)
    assert np.array_equal(whole.fresh.batch.payload, alone.fresh.batch.payload)
    assert len(whole.base_found) == len(whole.bases) == len(whole.base_rank) == len(whole.fresh.fresh)


def test_failing_message_of_a_batch_alone_is_a_dead_letter(tenants: TenantContexts) -> None:
    poison = b"poison-poison-po"
    good = [encode(m) for m in messages(random_bytes(2 * MIB, 6))]
    bad = encode(Segments(Envelope(poison, "t", "key"), chunked(random_bytes(9000, 7))))
    plain = dedup_work(SETTINGS, tenants)

    def work(tenant: str, some: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        if any(m.envelope.blob == poison for m in some):
            raise ValueError("it cannot be processed")
        return plain(tenant, some)

    outbox = handled(work, [good[0], bad, b"garbage", *good[1:], end()])
    assert len(outbox.dead) == 2
    decoded_messages = outbox.decoded_messages
    failed = [m for m in decoded_messages if isinstance(m, End) and m.failure is not None]
    assert [m.envelope.blob for m in failed] == [poison]
    sent = [cast("Segments", decode(value, "good")) for value in good]
    processed = sum(m.batch.batch.segments for m in decoded_messages if isinstance(m, Fresh))
    assert processed == sum(m.batch.segments for m in sent)
    assert isinstance(decoded_messages[-1], End)


def test_message_of_an_unexpected_kind_is_a_dead_letter(tenants: TenantContexts) -> None:
    outbox = handled(resemblance_work(tenants, lambda: SETTINGS, memory_objects()), [encode(messages(b"x" * 9000)[0])])
    assert len(outbox.dead) == 1


def test_damaged_message_of_a_batch_alone_is_a_dead_letter(tenants: TenantContexts) -> None:
    fresh = handled(dedup_work(SETTINGS, tenants), [encode(m) for m in messages(random_bytes(3 * MIB, 15))]).values
    pairs = handled(resemblance_work(tenants, lambda: SETTINGS, memory_objects()), fresh).values
    assert len(pairs) > 2
    opened = fmt.read_header(pairs[1], "a pair")
    damaged = bytearray(pairs[1])
    damaged[len(pairs[1]) - opened.payload_bytes - 2 * opened.counts.fresh] = 7  # base_found of the first
    outbox = Scripted()
    guard = RecordGuard(SETTINGS, "delta", outbox, None)
    found = guard.decode_many(records([pairs[0], bytes(damaged), b"garbage", *pairs[2:], end()]))
    assert [type(message).__name__ for message in found[:3]] == ["Paired", "NoneType", "NoneType"]
    assert all(isinstance(message, Paired) for message in found[3:-1])
    assert isinstance(found[-1], End)
    assert len(outbox.dead) == 2
    together = RecordGuard(SETTINGS, "delta", outbox, None).decode_many(records(pairs))
    assert [encode(message) for message in together if message is not None] == pairs


def test_unavailable_dependency_makes_no_dead_letter(tenants: TenantContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_loop, "RETRY_SECONDS_MAX", 0.2)

    def fail(tenant: str, some: Sequence[UndecodedMessage]) -> Sequence[OutgoingMessage | None]:
        raise StoreUnavailable("redis: unavailable")

    outbox = Scripted()
    handler = relay(fail, outbox)
    with pytest.raises(StoreUnavailable):
        handler.handle(records([encode(messages(b"x" * 9000)[0])]))
    assert not outbox.dead
    assert not list(handler.committable())


def test_offsets_wait_for_acknowledged_output(tenants: TenantContexts) -> None:
    outbox = Scripted()
    handler = relay(dedup_work(SETTINGS, tenants), outbox)
    first, second = (records([encode(m)])[0] for m in messages(random_bytes(2 * MIB, 8))[:2])
    handler.handle([first])
    handler.handle([replace(second, offset=1)])
    assert not list(handler.committable())
    outbox.acknowledge(1)  # the later one alone: nothing may be committed yet
    assert not list(handler.committable())
    outbox.acknowledge(0)
    assert list(handler.committable()) == [(0, 2, "")]
    handler.handle([replace(first, offset=2)])
    handler.drain(0)
    assert list(handler.committable()) == [(0, 3, "")]


def test_messages_refused_by_kafka_are_never_committed(tenants: TenantContexts) -> None:
    outbox = Scripted()
    awaiting = AckTracker(outbox)
    outbox.send("fresh", b"k", b"v", {"ce_specversion": b"1.0"})
    awaiting.batch({0: (1, "")})
    outbox.failing = True
    steps: list[Callable[[], object]] = [awaiting.poll_acks, awaiting.drain, awaiting.committable]
    for step in steps:
        with pytest.raises(StoreUnavailable):
            step()


def test_open_container_does_not_keep_message_bytes(tenants: TenantContexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_handler, "Outbox", lambda *_: Scripted())
    fresh = handled(dedup_work(SETTINGS, tenants), [encode(message) for message in messages(random_bytes(MIB, 7))])
    values = handled(resemblance_work(tenants, lambda: SETTINGS, memory_objects()), fresh.values).values
    before = [sys.getrefcount(value) for value in values]
    worker = DeltaHandler(SETTINGS, lambda: SETTINGS, tenants, "w", None, memory_objects())
    worker.on_assigned(0, "")
    worker.handle(records(values))
    held = worker._open["t"].held
    assert [one.record.offset for one in held] == list(range(len(values)))
    assert [sys.getrefcount(value) for value in values] == before
    worker.close()


def test_caches_of_all_tenants_share_one_bound(tenants: TenantContexts) -> None:
    bound = int(SETTINGS.base.cache_bytes)
    block = np.zeros(bound // 8, np.uint8)
    stores = [tenants[f"tenant {number}"].containers for number in range(3)]
    for number, store in enumerate(stores):
        for row in range(8):
            store.cache_blocks([(ContainerId(number + 1), row)], [block])
    assert sum({id(store.blocks): store.blocks.used_bytes for store in stores}.values()) <= bound


def test_revoked_partition_takes_its_offsets_along() -> None:
    outbox = Scripted()
    awaiting = AckTracker(outbox)
    outbox.send("fresh", b"k", b"v", {"ce_specversion": b"1.0"})
    awaiting.batch({0: (7, ""), 1: (9, "")})
    awaiting.forget(0)
    awaiting.drain()
    assert list(awaiting.committable()) == [(1, 9, "")]


@pytest.mark.parametrize(
    ("wall", "steady", "in_time"), [(0, 0, True), (0, 60, False), (60, 0, False), (-9999, 60, False)]
)
def test_container_is_too_old_by_either_clock(
    monkeypatch: pytest.MonkeyPatch, wall: int, steady: int, in_time: bool
) -> None:
    """A clock that stops or is set back must not make a container recent again."""
    lane: Any = SimpleNamespace(collected=SimpleNamespace(grace_seconds=100))
    container: Any = SimpleNamespace(container=1_700_000_000_000 << 20)
    clocks = SimpleNamespace(time=lambda: 1_700_000_000 + wall, monotonic=lambda: 500.0 + steady)
    monkeypatch.setattr(delta_handler, "time", clocks)
    if in_time:
        delta_handler._check_age(lane, container, 500.0)
    else:
        with pytest.raises(RetryableError, match="60 s old"):
            delta_handler._check_age(lane, container, 500.0)


@pytest.mark.parametrize(("grace_seconds", "refused"), [(0, True), (2, True), (3, False)])
def test_grace_below_container_age_is_refused_at_start(
    tenants: TenantContexts, monkeypatch: pytest.MonkeyPatch, grace_seconds: int, refused: bool
) -> None:
    monkeypatch.setattr(delta_handler, "Outbox", lambda *_: Scripted())
    chosen = with_changes(Settings(), {"gc": {"grace_seconds": grace_seconds}})
    if refused:
        with pytest.raises(ConfigError, match=r'gc\.grace_seconds "\d".*want >= 3'):
            DeltaHandler(chosen, lambda: chosen, tenants, "w", None, memory_objects())
    else:
        DeltaHandler(chosen, lambda: chosen, tenants, "w", None, memory_objects()).close()


def test_error_of_the_commit_thread_is_no_record_s_fault(
    tenants: TenantContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    outboxes: list[Scripted] = []

    def outbox_of(*_: object) -> Scripted:
        outboxes.append(Scripted())
        return outboxes[-1]

    def refuse(*_: object) -> None:
        raise Corrupt("redis: a key holds something else than was written")

    monkeypatch.setattr(delta_handler, "Outbox", outbox_of)
    chosen = with_changes(Settings(), {"container": {"target_bytes": "1 MiB"}})

    def paired(seed: int, blob: bytes) -> list[bytes]:
        sent = [encode(message) for message in messages(random_bytes(2 * MIB, seed), blob=blob)]
        fresh = handled(dedup_work(chosen, tenants), sent).values
        return handled(resemblance_work(tenants, lambda: chosen, memory_objects()), fresh).values

    first, second = paired(7, b"a" * 16), paired(8, b"b" * 16)
    worker = DeltaHandler(chosen, lambda: chosen, tenants, "w", None, memory_objects())
    worker.on_assigned(0, "")
    monkeypatch.setattr(LmdbIndex, "publish", refuse)
    worker.handle(records(first))
    with pytest.raises(RetryableError, match="something else than was written: starting over"):
        worker._committer.drain()
    for step in (lambda: worker.handle(records(second)[:1]), worker.idle):
        with pytest.raises(RetryableError, match="starting over"):
            step()
    worker.close()
    assert [one for outbox in outboxes for one in outbox.dead + outbox.values] == []
    assert list(worker.committable()) == [(0, 0, "")]
