"""Test what a gateway answers while the pipeline is behind: real Kafka and Redis, and no worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import TopicPartition

from nearkin_gateway.monitoring import pipeline_load, pipeline_state
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import consumer, group, topic
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.pipeline import Pipeline

BLOBS = 200


@pytest.fixture
def gateway(kafka: Any, redis: Any, tmp_path: Path) -> Iterator[RunningGateway]:
    """Run a gateway of a fleet without workers."""
    unique = os.urandom(6).hex()
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"l{unique}.", "partitions": 1},
        "redis": {"url": redis.url, "prefix": f"l{unique}"},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": 0},
    }
    with Pipeline(tmp_path, config, services=()) as made, running(load(made.config_file)[0]) as found:
        yield found


def commit_frames(settings: Settings, offset: int) -> None:
    """Record that the chunker has handled the records of `frames` before an offset."""
    client = consumer(settings, group(settings, "chunker"), "test")
    client.commit(offsets=[TopicPartition(topic(settings, "frames"), 0, offset)], asynchronous=False)
    client.close()


def test_retry_after_is_the_lag_by_the_rate(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer 202 with the time that the pipeline needs for what waits in it."""
    monkeypatch.setattr(pipeline_state, "READ_SECONDS", 0.5)
    monkeypatch.setattr(pipeline_load, "LOOK_SECONDS", 0.5)
    with gateway.client() as client:

        def put() -> httpx.Response:
            answer = client.put("/v1/blobs/k", content=b"bytes")
            assert answer.status_code == 202
            return answer

        assert put().headers["retry-after"] == "1"
        for _ in range(BLOBS - 1):
            put()
        commit_frames(gateway.gateway.settings, 1)
        until(lambda: int(put().headers["retry-after"]) == pipeline_load.RETRY_SECONDS_MAX, poll_seconds=0.2)
        commit_frames(gateway.gateway.settings, BLOBS)  # half of them, as each blob has a frame and an end
        until(lambda: 1 <= int(put().headers["retry-after"]) <= 30, poll_seconds=0.2)
        state = gateway.gateway.pipeline
        assert state is not None
        (stage,) = [stage for stage in state.stages() if stage.group.endswith("chunker")]
        assert stage.lag_records >= BLOBS
