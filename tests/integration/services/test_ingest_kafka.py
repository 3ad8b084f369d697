"""The gateway's producer against real Kafka: one that failed for good is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from nearkin_gateway.backends.kafka_ingest import KafkaIngest
from nearkin_shared.config.services import KafkaSettings
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.clients import create_topics


class Failed:
    """A producer after a fatal error: each call raises it, which no client can cause at will."""

    def produce(self, *_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "the log was cut"))

    def poll(self, _: float) -> int:
        return 0

    def purge(self, **_: object) -> None:
        """Nothing is queued."""

    def flush(self, _: float) -> int:
        return 0


def test_fatally_failed_producer_is_replaced(kafka: Any, topic_prefix: str) -> None:
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka.bootstrap, topic_prefix=topic_prefix, partitions=1))
    create_topics(settings)
    ingest = KafkaIngest(settings, "gateway-test", None)

    async def publish() -> None:
        await ingest.open()
        ingest._producer = Failed()  # type: ignore[assignment]
        with pytest.raises(StoreUnavailable, match="the log was cut"):
            await ingest.publish("config", b"key", b"{}")
        await ingest.publish("config", b"key", b"{}")
        await ingest.close()

    asyncio.run(publish())
