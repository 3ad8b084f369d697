"""Test what a gateway answers while the pipeline is behind: real Kafka and Redis, and no worker."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import TopicPartition

from nearkin_gateway.auth import tokens
from nearkin_gateway.monitoring import pipeline_load, pipeline_state
from nearkin_gateway.uploads.partition_lanes import partition_of_blob
from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import consumer, group, topic
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.pipeline import Pipeline

BLOBS = 200


@contextmanager
def without_workers(kafka: Any, redis: Any, tmp_path: Path, partitions: int, **auth: str) -> Iterator[RunningGateway]:
    """Run a gateway of a fleet without workers."""
    unique = os.urandom(6).hex()
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"l{unique}.", "partitions": partitions},
        "redis": {"url": redis.url, "prefix": f"l{unique}"},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": 0},
        "auth": dict(auth),
    }
    with Pipeline(tmp_path, config, services=()) as made, running(load(made.config_file)[0]) as found:
        yield found


@pytest.fixture
def gateway(kafka: Any, redis: Any, tmp_path: Path) -> Iterator[RunningGateway]:
    with without_workers(kafka, redis, tmp_path, 1) as found:
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


def expecting(port: int, expectation: str) -> bytes:
    """Return the first answer to a put whose body is not sent."""
    head = f"PUT /v1/blobs/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nExpect: {expectation}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode())
        return connection.recv(65536)


def test_tenant_far_behind_is_slowed_and_told(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow the uploads of a tenant whose blobs wait long, and answer `Expect: 100-continue` with 503."""
    monkeypatch.setattr(pipeline_state, "READ_SECONDS", 0.5)
    monkeypatch.setattr(pipeline_load, "LOOK_SECONDS", 0.5)
    assert expecting(gateway.port, "100-continue").startswith(b"HTTP/1.1 100 ")
    assert expecting(gateway.port, "200-maybe").startswith(b"HTTP/1.1 417 ")
    with gateway.client() as client:

        def put(size_bytes: int = 5) -> httpx.Response:
            answer = client.put("/v1/blobs/k", content=bytes(size_bytes))
            assert answer.status_code == 202
            return answer

        for _ in range(BLOBS):
            put()
        commit_frames(gateway.gateway.settings, 1)
        until(lambda: int(put().headers["retry-after"]) >= 60, poll_seconds=0.2)
        refused = expecting(gateway.port, "100-continue")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"pipeline-behind" in refused
        assert b"retry-after: " in refused.lower()
        began = time.monotonic()
        put(512 * 1024)
        assert time.monotonic() - began >= 1.0  # eight reads or more, each with a pause of up to 0.25 s


def test_flood_leaves_a_partition_to_other_tenants(kafka: Any, redis: Any, tmp_path: Path) -> None:
    """Keep a tenant with much in flight out of one partition, and put a blob of another tenant there."""
    file = tmp_path / "tokens.json"
    flood, quiet = (tokens.create(file, tenant, ["write"])[0] for tenant in ("flood", "quiet"))
    with without_workers(kafka, redis, tmp_path, 3, tokens_file=str(file)) as gateway:

        def put(token: str, count: int) -> list[bytes]:
            with gateway.client(token) as client:
                answers = [client.put("/v1/blobs/k", content=b"bytes") for _ in range(count)]
            assert {answer.status_code for answer in answers} == {202}
            return [bytes.fromhex(answer.json()["id"][:32]) for answer in answers]

        put(flood, 40)
        assert {partition_of_blob(blob, 3) for blob in put(flood, 40)} == {0, 1}
        quiet_blobs = put(quiet, 5)
        assert {partition_of_blob(blob, 3) for blob in quiet_blobs} == {2}
        frames = topic(gateway.gateway.settings, "frames")
        reader = consumer(gateway.gateway.settings, "lanes", "test")
        reader.assign([TopicPartition(frames, 2, 0)])
        found = reader.consume(200, 10)
        reader.close()
        assert {str(message.key()) for message in found} >= {str(blob) for blob in quiet_blobs}
