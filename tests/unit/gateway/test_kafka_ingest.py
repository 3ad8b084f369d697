"""Test the gateway's upload into Kafka against librdkafka's mock broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from blake3 import blake3

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


def test_finish_returns_after_every_acknowledgement(ingest: KafkaIngest) -> None:
    """G.1 (I3): `finish` returns after Kafka acknowledged each frame and the end."""

    async def put() -> int:
        await ingest.open()
        upload = await ingest.begin(UploadRequest("t", "key", BLOB, BLOB, 0))
        for _ in range(3):
            await upload.write(b"frame")
        await upload.finish(UploadResult(15, blake3(b"frame" * 3).digest()))
        unacknowledged = len(ingest._producer)
        await ingest.close()
        return unacknowledged

    assert asyncio.run(put()) == 0
