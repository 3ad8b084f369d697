"""Test which of the received records a worker takes in one step: few batches, and nothing of lost partitions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import Batch, Envelope, Frame, encode
from nearkin_shared.kafka import consumer_loop
from nearkin_shared.kafka.consumer_loop import BATCH_MESSAGES, Loop
from nearkin_shared.kafka.fetched_records import LARGE_MAX

NOTHING = np.zeros(0, np.uint8)
BATCH = encode(Batch(Envelope(bytes(16), "t", "k", blobs=1), (BatchedBlob("k", 0, bytes(32), bytes(16), 1),), NOTHING))
FRAME = encode(Frame(Envelope(bytes(16), "t", "k"), NOTHING))


@dataclass
class Received:
    """A message as the client gives it."""

    at: int
    content: bytes
    part: int = 0
    epoch: int = 0

    def topic(self) -> str:
        return "frames"

    def value(self) -> bytes:
        return self.content

    def error(self) -> None:
        return None

    def headers(self) -> None:
        return None

    def partition(self) -> int:
        return self.part

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes:
        return b""

    def leader_epoch(self) -> int:
        return self.epoch

    def timestamp(self) -> tuple[int, int]:
        return 0, 0


class Client:
    """A consumer that has `waiting` messages."""

    def __init__(self, waiting: list[Received]) -> None:
        self.waiting = waiting

        self.waits: list[float] = []

    def poll(self, seconds: float) -> Received | None:
        self.waits.append(seconds)
        return self.waiting.pop(0) if self.waiting else None

    def consume(self, count: int, seconds: float) -> list[Received]:
        found, self.waiting[:] = self.waiting[:count], self.waiting[count:]
        return found

    def incremental_unassign(self, parts: object) -> None:
        pass

    def commit(self, **_: object) -> None:
        pass


def loop_over(monkeypatch: Any, waiting: list[Received]) -> Loop:
    client = Client(waiting)
    monkeypatch.setattr(consumer_loop, "consumer", lambda *_, **__: client)
    handler: Any = SimpleNamespace(on_dropped=lambda partition: None)
    loop = Loop(Settings(), "chunker", "frames", "w", handler)
    loop._mine = {0, 1}
    return loop


def test_step_takes_few_batches_and_the_rest_later(monkeypatch: Any) -> None:
    """A PUT behind many batches must not wait until one step has processed all of them."""
    waiting = [Received(at, BATCH) for at in range(2 * LARGE_MAX)] + [Received(2 * LARGE_MAX, FRAME)]
    loop = loop_over(monkeypatch, waiting)
    assert [record.offset for record in loop._take()] == list(range(LARGE_MAX))
    assert [record.offset for record in loop._take()] == list(range(LARGE_MAX, 2 * LARGE_MAX + 1))
    assert loop._take() == []


def test_held_records_of_a_lost_partition_are_dropped(monkeypatch: Any) -> None:
    """Its next owner reads them: they are above the committed offset."""
    loop = loop_over(monkeypatch, [Received(at, BATCH, part=at % 2) for at in range(3 * LARGE_MAX)])
    loop._take()
    part: Any = Received(0, b"", part=1)
    part.partition = 1
    loop._forget([part])
    assert {record.partition for record in loop._take()} == {0}


def test_paused_loop_takes_no_held_records(monkeypatch: Any) -> None:
    loop = loop_over(monkeypatch, [Received(at, BATCH) for at in range(2 * LARGE_MAX)])
    loop._take()
    loop._paused = True
    assert loop._take() == []
    loop._paused = False
    assert len(loop._take()) == LARGE_MAX


def test_flood_waits_while_a_later_stage_is_behind(monkeypatch: Any) -> None:
    """Partitions with few records go on; the others do once the later stage has caught up."""
    loop = loop_over(monkeypatch, [*(Received(at, FRAME) for at in range(100)), Received(0, FRAME, part=1)])
    is_behind = [True]
    loop._is_held_back = lambda: is_behind[0]
    assert [record.partition for record in loop._take()] == [1]
    assert loop._take() == []
    is_behind[0] = False
    assert len(loop._take()) == BATCH_MESSAGES


def test_paused_loop_with_held_records_waits(monkeypatch: Any) -> None:
    """It asks the client with a timeout, or it would use a core until it is resumed."""
    loop = loop_over(monkeypatch, [Received(at, BATCH) for at in range(2 * LARGE_MAX)])
    loop._take()
    loop._paused, loop._idle_seconds = True, 0.1
    client: Any = loop._consumer
    client.waits.clear()
    loop._take()
    assert client.waits == [0.1]


def test_records_read_again_at_once_are_taken(monkeypatch: Any) -> None:
    """A truncated log is read from its beginning; its first records may be there in the same fetch."""
    loop = loop_over(monkeypatch, [Received(9, FRAME, epoch=2)])
    loop._topic = "frames"
    client: Any = loop._consumer
    client.seek = lambda _: client.waiting.extend(Received(at, FRAME, epoch=2) for at in range(3))
    part: Any = SimpleNamespace(topic="frames", partition=0, offset=10, leader_epoch=1)
    loop._epochs.resume(part)
    assert [record.offset for record in loop._take()] == [0, 1, 2]
