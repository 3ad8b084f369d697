"""Test a gateway that deduplicates with a real pipeline over HTTP: Kafka, Redis, one worker with all stages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import redis as redis_client
from confluent_kafka import TopicPartition

from nearkin_shared.config.loader import load
from nearkin_shared.kafka.clients import consumer, topic
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.pipeline import FUSED, Pipeline
from tests.support.servers.servers import Redis

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A Redis that a test may empty."""
    with Redis(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="module")
def pipeline(kafka: Any, own_redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("pipeline")
    unique = os.urandom(6).hex()
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"e{unique}.", "partitions": 2},
        "redis": {"url": own_redis.url},
        "object_store": {"url": str(folder / "objects")},
        "gateway": {"port": 0, "edge": True},
    }
    with Pipeline(folder, config, services=FUSED) as made:
        yield made
        assert set(made.stop().values()) == {0}, made.logs()


@pytest.fixture(scope="module")
def gateway(pipeline: Pipeline) -> Iterator[RunningGateway]:
    with running(load(pipeline.config_file)[0]) as found:
        yield found


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found


def content(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 64, size, np.uint8).tobytes()


def put(client: httpx.Client, key: str, data: bytes) -> dict[str, Any]:
    answer = client.put(f"/v1/blobs/{key}", params={"wait": 60}, content=data)
    assert answer.status_code == 201, answer.text
    result: dict[str, Any] = answer.json()
    assert client.get(f"/v1/blobs/{key}").content == data
    return result


def sent_bytes(pipeline: Pipeline, blob_id: str) -> int:
    """Return the bytes of an upload in topic `frames`."""
    reader = consumer(pipeline.settings, "bytes-of-frames", "test")
    parts = range(pipeline.settings.kafka.partitions)
    reader.assign([TopicPartition(topic(pipeline.settings, "frames"), part, 0) for part in parts])
    count, blob = 0, bytes.fromhex(blob_id[:32])
    while (message := reader.poll(3.0)) is not None:
        if message.key() == blob:
            count += len(message.value() or b"")
    reader.close()
    return count


def test_known_content_passes_kafka_as_names(client: httpx.Client, pipeline: Pipeline) -> None:
    """Issue I, lead 4: a small part of the bytes is sent, and the version is the same."""
    data = content(6 * MIB, 1)
    first = put(client, "first", data)
    again = put(client, "again", data)
    assert first["ledger"]["unique_bytes"] > 0
    assert (again["ledger"]["unique_bytes"], again["ledger"]["logical_bytes"]) == (0, len(data))
    assert sent_bytes(pipeline, again["id"]) < len(data) / 50
    assert not list((pipeline.folder / "objects" / "staging").glob("*-*"))


def test_new_content_waits_in_packs(client: httpx.Client, pipeline: Pipeline) -> None:
    data = content(20 * MIB, 2)
    result = put(client, "large", data)
    assert 0 < sent_bytes(pipeline, result["id"]) < 2000
    until(lambda: not list((pipeline.folder / "objects" / "staging").glob("*-*")))


def test_changed_content_is_sent_by_its_changes(client: httpx.Client, pipeline: Pipeline) -> None:
    data = content(6 * MIB, 3)
    put(client, "changed", data)
    result = put(client, "changed", data[: 3 * MIB] + b"a change" + data[3 * MIB :])
    assert result["version"] == 2
    assert sent_bytes(pipeline, result["id"]) < len(data) / 20


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_small_upload_passes_the_gateway_stages(client: httpx.Client, size: int) -> None:
    assert put(client, f"small-{size}", content(size, 4))["size_bytes"] == size


def test_accepted_upload_survives_the_loss_of_the_index(
    client: httpx.Client, pipeline: Pipeline, own_redis: Redis
) -> None:
    """Commit known content whose bytes were left out, although Redis was emptied before a worker looked it up (I6)."""
    data = content(6 * MIB, 5)
    put(client, "kept", data)
    pipeline.kill("pipeline")
    answer = client.put("/v1/blobs/kept", content=data)
    assert answer.status_code == 202, answer.text
    assert sent_bytes(pipeline, answer.json()["id"]) < len(data) / 50
    with redis_client.Redis.from_url(own_redis.url) as server:
        server.flushall()
    pipeline.start("pipeline")
    until(lambda: client.get(answer.json()["status"]).json()["state"] != "pending")
    result = client.get(answer.json()["status"]).json()
    assert (result["state"], result["version"]) == ("committed", 2), result
    assert client.get("/v1/blobs/kept").content == data
