"""Test the gateway's upload into Kafka against librdkafka's mock broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from blake3 import blake3
from confluent_kafka import KafkaError, Message, Producer

from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.kafka_ingest import KafkaIngest
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka import clients

BLOB = b"b" * 16


@pytest.fixture
def ingest(monkeypatch: pytest.MonkeyPatch) -> KafkaIngest:
    connection = clients.connection

    def with_broker(settings: Settings, client_id: str) -> dict[str, Any]:
        return connection(settings, client_id) | {"test.mock.num.brokers": 1}

    monkeypatch.setattr(clients, "connection", with_broker)
    return KafkaIngest(Settings(), "gateway-test", None)


class CountedProducer:
    """A producer that counts the messages sent and the messages acknowledged."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.sent = 0
        self.acknowledged = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(self, topic: str, value: bytes, key: bytes, **options: Any) -> None:
        """Send a message; its acknowledgement is counted before it is reported."""
        on_delivery: Callable[[KafkaError | None, Message], None] = options.pop("on_delivery")

        def delivered(err: KafkaError | None, message: Message) -> None:
            self.acknowledged += err is None
            on_delivery(err, message)

        self._producer.produce(topic, value, key, on_delivery=delivered, **options)
        self.sent += 1


def test_finish_returns_after_every_acknowledgement(ingest: KafkaIngest) -> None:
    """G.1 (I3): `finish` returns after Kafka acknowledged each frame and the end."""
    producer = CountedProducer(ingest._producer)
    ingest._producer = cast(Producer, producer)

    async def put() -> tuple[int, int]:
        await ingest.open()
        upload = await ingest.begin(UploadRequest("t", "key", BLOB, BLOB, 0))
        for _ in range(3):
            await upload.write(b"frame")
        await upload.finish(UploadResult(15, blake3(b"frame" * 3).digest()))
        counts = producer.sent, producer.acknowledged
        await ingest.close()
        return counts

    assert asyncio.run(put()) == (4, 4)
