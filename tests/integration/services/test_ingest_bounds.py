"""Test that ingest sends no more into the pipeline than it stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_ingest import blobs_in_flight
from nearkin_ingest import consumer as ingest_consumer
from nearkin_ingest.consumer import IngestConsumer
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.blob_table import blob_id
from nearkin_shared.formats.message import Batch, decode
from nearkin_shared.kafka.clients import create_topics, topic
from tests.support.checks.waiting import until
from tests.support.servers.kafka_server import users_producer

RECORDS = 300
STEP_RECORDS = 20
IN_FLIGHT_MAX = 50


class Pipeline:
    """The topics of a pipeline without workers: a test reads `frames` and sends the events."""

    def __init__(self, settings: Settings) -> None:
        self._frames, self._committed = topic(settings, "frames"), topic(settings, "committed")
        self._consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": "reader"})
        self._consumer.assign([TopicPartition(self._frames, part, 0) for part in range(settings.kafka.partitions)])
        self._producer = users_producer(settings.kafka.bootstrap_servers)
        self.blobs: list[bytes] = []
        self._ended = 0

    def read(self) -> int:
        """Read the blobs that have been sent; return their number."""
        for message in self._consumer.consume(1000, 0.2):
            decoded = decode(message.value() or b"", "frames")
            if isinstance(decoded, Batch):
                self.blobs += [blob_id(decoded.envelope.blob, number) for number in range(len(decoded.blobs))]
        return len(self.blobs)

    def end_all(self) -> None:
        """Send the events of all blobs that were read."""
        for blob in self.blobs[self._ended :]:
            self._producer.produce(self._committed, b"{}", blob)
        self._ended = len(self.blobs)
        self._producer.flush()

    def close(self) -> None:
        self._consumer.close()


@contextmanager
def ingesting(kafka: Any, topic_prefix: str) -> Iterator[Pipeline]:
    """Run a consumer of a topic with RECORDS records."""
    users = f"users-{topic_prefix.rstrip('.')}"
    values = {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2}
    settings = with_changes(Settings(), {"kafka": values, "ingest": {"topics": [users]}})
    create_topics(settings)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(users, 2, 1)])[users].result(30)
    producer = users_producer(kafka.bootstrap)
    for number in range(RECORDS):
        producer.produce(users, b"value", b"%d" % number)
    producer.flush()
    stop, pipeline = threading.Event(), Pipeline(settings)
    worker = IngestConsumer(settings, None, "w", None)
    thread = threading.Thread(target=worker.run, args=(stop, lambda: False))
    thread.start()
    try:
        yield pipeline
    finally:
        stop.set()
        thread.join(60)
        pipeline.close()


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_consumer, "BATCH_RECORDS", STEP_RECORDS)
    monkeypatch.setattr(blobs_in_flight, "BLOBS_MAX", IN_FLIGHT_MAX)


def test_records_wait_in_their_topic_for_events(kafka: Any, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more blobs are in flight than the bound and a step, and each event makes room; also after a pause."""
    monkeypatch.setattr(ingest_consumer, "PAUSE_AFTER_SECONDS", 0.5)
    with ingesting(kafka, topic_prefix) as pipeline:
        ended = 0
        while ended < RECORDS:
            until(lambda: pipeline.read() >= min(RECORDS, ended + IN_FLIGHT_MAX))  # noqa: B023
            time.sleep(1.0)
            assert pipeline.read() <= ended + IN_FLIGHT_MAX + STEP_RECORDS
            pipeline.end_all()
            ended = len(pipeline.blobs)
    assert len(set(pipeline.blobs)) == RECORDS


def test_lost_events_stop_no_records(kafka: Any, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs without an event are forgotten after a while."""
    monkeypatch.setattr(blobs_in_flight, "FORGOTTEN_SECONDS", 0.5)
    with ingesting(kafka, topic_prefix) as pipeline:
        until(lambda: pipeline.read() == RECORDS)
