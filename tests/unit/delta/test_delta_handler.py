"""Test the delta worker's commit.

No message is sent, and no offset moves, before its data are durable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_chunker.segment_messages import split_segments
from nearkin_dedup.handler import dedup_work
from nearkin_delta import handler as delta_handler
from nearkin_delta.handler import DeltaHandler
from nearkin_resemblance.handler import resemblance_work
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotFound, RetryableError, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import BatchEnd, Encoded, End, Envelope, Paired, Placed, Segments, decode, encode
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.pending import PendingIndex
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.relay_handler import StatelessStageHandler
from nearkin_shared.kafka.tenant_context import TenantContexts
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.types import U8, U64, Bools, Locations
from tests.support.fakes.stage_fleet import KafkaFake, indexed_tenants

SETTINGS = Settings()
CONTENT = random_bytes(1 << 20, 7)


class Memory(KafkaFake):
    """An outbox that also notes each step."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps

    @property
    def values(self) -> list[bytes]:
        return [value for _, value in self.sent]

    def send(self, name: str, key: bytes, value: Encoded, headers: Mapping[str, bytes]) -> None:
        super().send(name, key, value, headers)
        self.steps.append(name)


class World:
    """A delta worker over objects in memory and a real index."""

    def __init__(self, found: TenantContexts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.outboxes: list[Memory] = []
        self.lanes = found
        monkeypatch.setattr(delta_handler, "Outbox", self._outbox)
        self.handler = DeltaHandler(SETTINGS, lambda: SETTINGS, found, "w", None, memory_objects())
        self.handler.on_assigned(0, "")

    def _outbox(self, *_: object) -> Memory:
        self.outboxes.append(Memory(self.steps))
        return self.outboxes[-1]

    @property
    def committable(self) -> int:
        return next(offset for _, offset, _ in self.handler.committable())

    @property
    def dead(self) -> list[Mapping[str, bytes | None]]:
        return [letter for outbox in self.outboxes for letter in outbox.dead]

    def paired(
        self, content: bytes = CONTENT, tenant: str = "t", blob: bytes = b"b" * 16, *, looks_up: bool = True
    ) -> list[bytes]:
        """Return the messages that the earlier stages make of a content."""
        stage = ChunkerStage(SETTINGS, Fingerprinter(b"s" * 32, tenant))
        payload = np.frombuffer(content, np.uint8)
        batch = stage.decide(FrameRuns(payload, (BlobRun(0, 0, len(payload), True),)), LookupResults()).segments
        values, position, sequence = [], 0, 0
        for part in split_segments(batch, 3):
            values.append(encode(Segments(Envelope(blob, tenant, "key", position, sequence), part)))
            position, sequence = position + part.logical_bytes, sequence + part.segments
        for work in (
            dedup_work(SETTINGS, self.lanes),
            resemblance_work(self.lanes, lambda: SETTINGS, memory_objects(), looks_up=looks_up),
        ):
            outbox = Memory([])
            relay = StatelessStageHandler(SETTINGS, "dedup", "fresh", work, outbox)
            relay.on_assigned(0, "")
            relay.handle(records(values))
            values = outbox.values
        return values


def records(values: list[bytes]) -> list[Record]:
    return [Record("paired", 0, at, value[8:24], value, {}, ()) for at, value in enumerate(values)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with indexed_tenants(tmp_path) as tenants:
        made = World(tenants, monkeypatch)
        yield made
        made.handler.close()


def test_offsets_wait_until_placed_is_acknowledged(world: World) -> None:
    """F.32: offsets move only after Kafka acknowledged the `placed` messages."""
    values = world.paired()
    world.outboxes[1].is_away = True  # of `placed`
    world.handler.handle(records(values))
    with pytest.raises(StoreUnavailable):
        world.handler.drain(0)
    assert world.outboxes[1].values
    assert world.committable == 0


def test_container_is_durable_then_published_then_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.32: a container is readable, then published, then announced."""
    publish = LmdbIndex.publish

    def noted(index: LmdbIndex, claims: Any) -> Any:
        try:
            world.lanes["t"].containers.raw(claims.directory.container)
            world.steps.append("durable")
        except NotFound:
            world.steps.append("missing")
        world.steps.append("published")
        return publish(index, claims)

    monkeypatch.setattr(LmdbIndex, "publish", noted)
    values = world.paired()
    world.handler.handle(records(values))
    world.handler.drain(0)
    assert world.steps == ["durable", "published"] + ["placed"] * len(values)
    assert world.committable == len(values)


def test_chunk_with_another_fingerprint_is_a_dead_letter(world: World) -> None:
    """F.32: a chunk that does not match its fingerprint is not stored."""
    values = world.paired()
    message = decode(values[0], "paired")
    assert isinstance(message, Paired)
    batch = message.batch.fresh.batch
    payload = batch.payload.copy()
    payload[int(batch.offsets[0])] ^= 1
    object.__setattr__(batch, "payload", payload)
    world.handler.handle(records([encode(message)]))
    world.handler.drain(0)
    assert len(world.dead) == 1
    output = [decode(value, "output") for outbox in world.outboxes for value in outbox.values]
    assert not any(isinstance(one, Placed) for one in output)


@pytest.mark.parametrize(("source", "is_looked_up"), [(None, True), ("chunker", False), ("resemblance", False)])
def test_chunk_with_neighbour_base_asks_no_features(
    world: World, monkeypatch: pytest.MonkeyPatch, source: str | None, is_looked_up: bool
) -> None:
    """Behind stages of the same worker, super-features are looked up for chunks without a locality base alone."""
    if source is not None:
        world.handler.on_source(source)
    world.handler.handle(records(world.paired()))
    world.handler.drain(0)
    looked_up: list[int] = []
    locate = PendingIndex.locate_bases

    def count(self: PendingIndex, sketch: str, super_features: U64) -> tuple[Locations, U8, Bools]:
        looked_up.append(int(np.count_nonzero(super_features.any(axis=1))))
        return locate(self, sketch, super_features)

    monkeypatch.setattr(PendingIndex, "locate_bases", count)
    edited = bytearray(CONTENT)
    edited[400_000:400_004] = b"edit"
    world.handler.handle(records(world.paired(bytes(edited), blob=b"c" * 16, looks_up=source is None)))
    world.handler.drain(0)
    assert any(looked_up) == is_looked_up
    assert world.dead == []


def test_container_id_of_other_bytes_starts_over(world: World) -> None:
    """F.32: a container id that another writer took is not the worker's own."""
    lane = world.lanes["t"]
    container: Any = SimpleNamespace(container=5 << 40, parts=[b"mine"], data=b"mine")
    delta_handler._put(lane, container)
    delta_handler._put(lane, container)  # as an earlier attempt did
    container.parts, container.data = [b"other"], b"other"
    with pytest.raises(RetryableError, match="another writer has this id"):
        delta_handler._put(lane, container)


def test_segments_of_pending_delete_chunks_stay_unpublished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.32: a container publishes all segments but those of chunks pending deletion."""
    lane = world.lanes["t"]
    claims: list[Any] = []
    monkeypatch.setattr(type(lane.index), "publish", lambda _, made: claims.append(made))

    def lost(chunks: Any, _: object) -> np.ndarray:
        return np.arange(len(chunks)) == 0

    monkeypatch.setattr(lane.collected, "lost", lost)
    world.handler.handle(records(world.paired()))
    world.handler.drain(0)
    assert len(claims) == 1
    assert not claims[0].segment_ids[0].any()
    assert claims[0].segment_ids[1:].any(axis=1).all()


def test_stream_of_records_does_not_hold_back_a_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While messages stream in, an end for which a client may wait closes the container; that of a batch does not."""
    now = [1000.0]
    monkeypatch.setattr(delta_handler, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    values = world.paired()
    batch = Envelope(b"c" * 16, "t", "key", blobs=1)
    blob = BatchedBlob("key", 1, bytes(32), bytes(16), 1, segments=0)
    world.handler.handle(records([*values, encode(BatchEnd(batch, (blob,)))]))
    now[0] += 2 * delta_handler.WAIT_SECONDS
    world.handler.idle()
    world.handler._committer.drain()
    assert not world.steps, "a batch closed the container although messages stream in"
    end = End(Envelope(b"b" * 16, "t", "key"), 1, bytes(16), 0, bytes(32), segments=0)
    world.handler.handle([Record("paired", 0, len(values) + 1, b"", encode(end), {}, ())])
    now[0] += delta_handler.WAIT_SECONDS / 2
    world.handler.idle()
    world.handler.handle([])
    world.handler._committer.drain()
    assert not world.steps
    now[0] += delta_handler.WAIT_SECONDS
    world.handler.idle()
    world.handler._committer.drain()
    assert world.steps == ["placed"] * (len(values) + 2)


def test_tenant_with_few_messages_waits_for_no_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob of a tenant with few messages among many of another one is stored when its end has come."""
    monkeypatch.setattr(delta_handler, "time", SimpleNamespace(monotonic=lambda: 1000.0, time=time.time))
    ends = [
        encode(End(Envelope(bytes([at] * 16), "t", "key"), 1, bytes(16), 0, bytes(32), segments=0)) for at in range(20)
    ]
    world.handler.handle(records([*world.paired(), *ends]))
    world.handler.idle()
    world.handler._committer.drain()
    assert not world.steps
    end = encode(End(Envelope(b"b" * 16, "quiet", "key"), 1, bytes(16), 4096, bytes(32), segments=1))
    world.handler.handle(records([*world.paired(CONTENT[:4096], "quiet"), end]))
    world.handler.idle()
    world.handler._committer.drain()
    sent = [decode(value, "placed").envelope.tenant for outbox in world.outboxes for value in outbox.values]
    assert sent == ["quiet", "quiet"]
