"""Test a topic whose message limit is below Nearkin's.

An error names the remedy, no retry.
"""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_gateway.backends.ingest_backend import UploadRequest
from nearkin_gateway.backends.kafka_ingest import KafkaIngest
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import PermanentError
from nearkin_shared.kafka.clients import TOPIC_BYTES_MAX, Outbox, connection, topic
from nearkin_shared.kafka.consumer_loop import run_forever

LIMIT_BYTES = 10_000
MESSAGE_BYTES = 300_000
REFUSED = rf"frames: a message of 3\d{{5}} bytes was refused as too large: want max.message.bytes {TOPIC_BYTES_MAX}"
NOISE = bytes(range(256)) * (MESSAGE_BYTES // 256 + 1)


@pytest.fixture
def settings(kafka: object, topic_prefix: str) -> Settings:
    """Return settings over a topic `frames` that an operator has limited."""
    address = {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "compression": "none"}  # type: ignore[attr-defined]
    found = with_changes(Settings(), {"kafka": address})
    admin = AdminClient(connection(found, "test"))
    full = topic(found, "frames")
    limited = NewTopic(full, 1, replication_factor=1, config={"max.message.bytes": str(LIMIT_BYTES)})
    admin.create_topics([limited])[full].result(30)
    return found


def test_refused_message_is_a_permanent_error(settings: Settings) -> None:
    """Raise a permanent error for a message that a topic refuses as too large."""
    outbox = Outbox(settings, "test", None)
    outbox.send("frames", b"key", NOISE[:MESSAGE_BYTES], {})
    with pytest.raises(PermanentError, match=REFUSED):
        outbox.flush()
    with pytest.raises(PermanentError, match=REFUSED):
        outbox.send("frames", b"key", b"small", {})
    outbox.close()


def test_oversized_message_is_refused_unsent(settings: Settings) -> None:
    outbox = Outbox(settings, "test", None)
    with pytest.raises(
        PermanentError, match=re.escape(f"a message of {TOPIC_BYTES_MAX} bytes was refused as too large")
    ):
        outbox.send("frames", b"key", bytes(TOPIC_BYTES_MAX), {})
    outbox.send("frames", b"key", b"small", {})
    outbox.flush()
    outbox.close()


def test_worker_does_not_restart_in_a_loop(settings: Settings) -> None:
    """Do not start over again and again for a message that is too large."""
    stop, starts = threading.Event(), 0

    class Sending:
        def run(self, *_: object) -> None:
            nonlocal starts
            starts += 1
            if starts > 3:
                stop.set()
            outbox = Outbox(settings, "test", None)
            outbox.send("frames", b"key", NOISE[:MESSAGE_BYTES], {})
            outbox.flush()

    with pytest.raises(PermanentError, match=REFUSED):
        run_forever(Sending, stop, lambda: False, "test")
    assert starts == 1


def test_gateway_upload_names_the_limit(settings: Settings) -> None:
    """Report the limit to an upload through a gateway."""

    async def upload() -> None:
        ingest = KafkaIngest(settings, "test", None)
        await ingest.open()
        try:
            one = await ingest.begin(UploadRequest("t", "key", bytes(16), bytes(16), 1))
            await one.write(NOISE[:MESSAGE_BYTES])
            with pytest.raises(PermanentError, match=REFUSED):
                await one._tracker.wait_for_acks()
            await one.abort("its frames were refused")
        finally:
            await ingest.close()

    asyncio.run(upload())
