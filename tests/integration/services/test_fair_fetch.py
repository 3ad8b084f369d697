"""Test that records of one partition do not wait behind a flood of another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import create_topics, topic
from nearkin_shared.kafka.consumer_loop import Loop, Record
from nearkin_shared.kafka.fetched_records import PARTITION_RECORDS_MAX
from tests.support.checks.waiting import until
from tests.support.servers.kafka_server import users_producer

FLOOD = 6000
STEPS_MAX = 3
"""Until a record is handled: one may be in work, one have been begun before it was fetched."""


class StepHandler:
    """Records what it receives; each step takes some time."""

    def __init__(self, step_seconds: float) -> None:
        self._seconds = step_seconds
        self.steps: list[list[tuple[int, int]]] = []

    def on_assigned(self, partition: int, metadata: str) -> None:
        """Begin a partition."""

    def handle(self, records: list[Record]) -> None:
        """Note the partitions and offsets of records."""
        self.steps.append([(record.partition, record.offset) for record in records])
        time.sleep(self._seconds)  # a step of a real stage takes as long, and the next records are fetched meanwhile

    def idle(self) -> float:
        """Do nothing."""
        return 0.01

    def drain(self, partition: int) -> None:
        """Do nothing."""

    def on_dropped(self, partition: int) -> None:
        """Do nothing."""

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Commit nothing."""
        return ()

    def close(self) -> None:
        """Do nothing."""

    def offsets(self, partition: int) -> list[int]:
        """Return the handled offsets of a partition, in their order."""
        return [offset for step in self.steps.copy() for part, offset in step if part == partition]


@contextmanager
def flooded(kafka: Any, topic_prefix: str, handler: StepHandler) -> Iterator[tuple[Any, str]]:
    """Run a loop over two partitions, of which the first one has FLOOD records; yield a producer and the topic."""
    values = {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2}
    settings = with_changes(Settings(), {"kafka": values})
    create_topics(settings)
    frames = topic(settings, "frames")
    producer = users_producer(kafka.bootstrap)
    for _ in range(FLOOD):
        producer.produce(frames, bytes(4096), partition=0)
    producer.flush()
    stop = threading.Event()
    loop = Loop(settings, "chunker", "frames", "w", handler)
    thread = threading.Thread(target=loop.run, args=(stop, lambda: False))
    thread.start()
    try:
        yield producer, frames
    finally:
        stop.set()
        thread.join(60)


def test_record_does_not_wait_for_a_flood_elsewhere(kafka: Any, topic_prefix: str) -> None:
    """A record of a quiet partition is in one of the next steps, though thousands of another one came first."""
    handler = StepHandler(0.05)
    with flooded(kafka, topic_prefix, handler) as (producer, frames):
        until(lambda: len(handler.offsets(0)) > 2 * PARTITION_RECORDS_MAX, seconds=60)
        producer.produce(frames, b"quiet", partition=1)
        producer.flush()
        before = len(handler.steps)
        until(lambda: handler.offsets(1))
        after = next(number for number, step in enumerate(handler.steps) if (1, 0) in step)
    assert after - before <= STEPS_MAX


def test_full_partition_is_handled_to_its_end_in_order(kafka: Any, topic_prefix: str) -> None:
    """A partition that is not fetched while its queue is full loses no record, and repeats none."""
    handler = StepHandler(0.0)
    with flooded(kafka, topic_prefix, handler):
        until(lambda: len(handler.offsets(0)) >= FLOOD, seconds=60)
    assert handler.offsets(0) == list(range(FLOOD))
