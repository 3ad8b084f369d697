"""A user topic that lost acknowledged records: the records written instead are stored, and none is stored twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_ingest.consumer import IngestConsumer
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import Batch, End, decode
from nearkin_shared.kafka.clients import create_topics, topic
from nearkin_shared.kafka.consumer_loop import run_forever
from tests.support.checks.waiting import until
from tests.support.data.batches import take_apart
from tests.support.servers.kafka_server import users_producer
from tests.support.servers.servers import Kafka

USERS = "users"
RECORDS = 10


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Kafka]:
    """A broker of its own, whose logs are cut."""
    with Kafka(tmp_path / "kafka") as made:
        yield made


@pytest.fixture
def settings(kafka: Kafka) -> Settings:
    values = {"kafka": {"bootstrap_servers": kafka.bootstrap, "partitions": 1}, "ingest": {"topics": [USERS]}}
    found = load(None, values)[0]
    create_topics(found)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(USERS, 1, 1)])[USERS].result(30)
    return found


def produce(kafka: Kafka, keys: list[str]) -> None:
    """Write one batch per record, so that a cut log keeps the first ones."""
    producer = users_producer(kafka.bootstrap)
    for key in keys:
        producer.produce(USERS, b"value of " + key.encode(), key.encode())
        assert producer.flush(30) == 0


def read(settings: Settings, name: str, group: str = "reader") -> list[bytes]:
    """Return the values in a topic now."""
    consumer = Consumer({"bootstrap.servers": settings.kafka.bootstrap_servers, "group.id": group})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(name, 0), timeout=30)
        consumer.assign([TopicPartition(name, 0, low)])
        values: list[bytes] = []
        while len(values) < high - low:
            message = consumer.poll(10)
            assert message is not None
            assert message.error() is None
            values.append(message.value() or b"")
        return values
    finally:
        consumer.close()


def stored(settings: Settings) -> list[End]:
    """Return the ends of the attempts, in order."""
    messages = [decode(value, "frames") for value in read(settings, topic(settings, "frames"))]
    return [end for message in messages if isinstance(message, Batch) for _, end in take_apart(message)]


@contextmanager
def ingesting(settings: Settings) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(
        target=run_forever, args=(lambda: IngestConsumer(settings, None, "w", None), stop, lambda: False, "ingest")
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("new", [RECORDS, pytest.param(2, marks=pytest.mark.soak)], ids=["as long", "shorter"])
def test_records_rewritten_below_the_offset_are_stored_once(kafka: Kafka, settings: Settings, new: int) -> None:
    """F.32: After a truncation below the group's offset each new record is stored, and no other one again."""
    old_keys, new_keys = [f"old-{n}" for n in range(RECORDS)], [f"new-{n}" for n in range(new)]
    produce(kafka, old_keys)
    with ingesting(settings):
        until(lambda: len(stored(settings)) == RECORDS)
    kafka.kill()
    kafka.truncate(USERS, kafka.log_bytes(USERS) // 2)
    kafka.start()
    assert 0 < len(read(settings, USERS)) < RECORDS
    produce(kafka, new_keys)
    for later in ("later-1", "later-2"):  # a restarted consumer handles no record after the cut again
        produce(kafka, [later])
        with ingesting(settings):
            until(lambda later=later: stored(settings)[-1].envelope.key == later)  # type: ignore[misc]
    ends = stored(settings)
    assert [end.envelope.key for end in ends] == [*old_keys, *new_keys, "later-1", "later-2"]
    assert len({end.origin for end in ends}) == len(ends)
