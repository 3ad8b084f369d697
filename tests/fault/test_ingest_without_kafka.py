"""The ingest consumer when Kafka accepts connections and never answers: no record is at fault."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaException, TopicPartition

from nearkin_ingest import __main__ as ingest_main
from nearkin_ingest import consumer as ingest_consumer
from nearkin_ingest.consumer import IngestConsumer
from nearkin_ingest.records import UserRecord
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.observability import log_setup


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield listening.getsockname()[1]


def test_record_waits_for_kafka_to_describe_its_topic(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record waits while Kafka does not describe its topic."""
    monkeypatch.setattr(ingest_consumer, "ADMIN_SECONDS_MAX", 1.0)
    changes = {"kafka": {"bootstrap_servers": f"127.0.0.1:{silent_port}"}, "ingest": {"topics": ["t"]}}
    worker = IngestConsumer(with_changes(Settings(), changes), None, "w", None)
    worker._mine = {("t", 0)}
    with pytest.raises((StoreUnavailable, KafkaException)):
        worker._one(UserRecord("t", 0, 7, b"k", b"value"))
    assert worker._done == {}
    assert worker._outbox.acknowledged_messages == 0


def test_batch_of_a_lost_partition_is_sent_at_once(silent_port: int) -> None:
    """Sent with the records of hours later, a version that was deleted meanwhile would come back."""
    changes = {"kafka": {"bootstrap_servers": f"127.0.0.1:{silent_port}"}, "ingest": {"topics": ["t"]}}
    worker = IngestConsumer(with_changes(Settings(), changes), None, "w", None)
    worker._mine, worker._topic_ids = {("t", 0)}, {"t": "id"}
    assert worker._one(UserRecord("t", 0, 7, b"k", b"value"))
    client: Any = SimpleNamespace(incremental_unassign=lambda _: None)
    worker._lost(client, [TopicPartition("t", 0)])
    assert worker._outbox.sent_messages == 0
    worker._settle()
    assert worker._outbox.sent_messages == 1
    assert worker._done == {}


@pytest.mark.parametrize(("is_stopped", "code"), [(True, 0), (False, 1)])
def test_worker_stopped_while_waiting_for_kafka_ends_cleanly(
    is_stopped: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is stopped while it waits for Kafka ends cleanly."""

    def unreachable(_settings: Settings) -> None:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        raise StoreUnavailable("kafka 127.0.0.1:1: Local: Broker transport failure")

    monkeypatch.setattr(ingest_main, "create_topics", unreachable)
    monkeypatch.setattr(ingest_main, "CONNECT_SECONDS_MAX", 0.0)
    monkeypatch.setattr(log_setup, "start", lambda *_: None)
    monkeypatch.setenv("NEARKIN_INGEST__TOPICS", "blobs")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert CliRunner().invoke(ingest_main.main, ["--worker", "w"]).exit_code == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
