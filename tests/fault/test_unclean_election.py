"""Three brokers of which only a replica that lacks acknowledged messages is left: it does not lead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from nearkin_shared.config.loader import load
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import Frame, decode
from nearkin_shared.kafka.clients import check_durability, consumer, create_topics, topic
from nearkin_shared.kafka.consumer_loop import patiently
from tests.support.checks.waiting import until
from tests.support.servers.kafka_cluster import KafkaCluster
from tests.support.servers.pipeline import uploading

LEADERLESS_SECONDS = 3.0
READ_SECONDS = 30.0
DATA = bytes(range(256)) * 10_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path / "kafka", 3) as made:
        yield made


@pytest.fixture
def settings(cluster: KafkaCluster, tmp_path: Path) -> Settings:
    found = load(
        None,
        {
            "kafka": {"bootstrap_servers": cluster.bootstrap, "partitions": 1, "replication": 3},
            "object_store": {"url": str(tmp_path / "objects")},
            "storage": {"create": True},
        },
    )[0]
    create_topics(found)
    patiently(lambda: check_durability(found))
    return found


def placement(settings: Settings) -> tuple[int, set[int]]:
    """Return (leader, in-sync replicas) of the topic of frames; the leader is -1 if there is none."""
    admin = AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers, "log_level": 0})
    full = topic(settings, "frames")
    try:
        found = admin.list_topics(full, timeout=2).topics[full].partitions[0]
    except KafkaException:
        return -2, set()
    return found.leader, set(found.isrs)


def put(settings: Settings, key: str) -> str:
    """Put a blob; return its id once every frame was acknowledged."""
    with uploading(settings) as uploader:
        return uploader.put(key, [DATA])


def is_acknowledged(settings: Settings, seconds: float) -> bool:
    """Return whether Kafka acknowledges a message within some seconds."""
    producer = Producer({"bootstrap.servers": settings.kafka.bootstrap_servers, "acks": "all", "log_level": 0})
    producer.produce(topic(settings, "frames"), b"")
    left = producer.flush(seconds)
    producer.purge()
    return not left


def frames_of(settings: Settings, blobs: set[str]) -> dict[str, bytes]:
    """Return the bytes of each blob in the topic."""
    client = consumer(settings, "reader", "reader")
    client.assign([TopicPartition(topic(settings, "frames"), 0, 0)])
    found, deadline = dict.fromkeys(blobs, b""), time.monotonic() + READ_SECONDS
    while time.monotonic() < deadline and any(len(data) < len(DATA) for data in found.values()):
        message = client.poll(0.2)
        value = None if message is None or message.error() is not None else message.value()
        decoded = decode(value, "a frame") if value else None
        if isinstance(decoded, Frame) and decoded.envelope.blob.hex() in found:
            found[decoded.envelope.blob.hex()] += decoded.payload.tobytes()
    client.close()
    return found


@pytest.mark.soak
def test_stale_replica_does_not_lead(cluster: KafkaCluster, settings: Settings) -> None:
    """F.32: With two in-sync replicas acknowledged messages survive both, though a third one returns first."""
    first = put(settings, "first")
    leader, _ = placement(settings)
    stale, other = [number for number in cluster.brokers if number != leader]
    cluster.brokers[stale].kill()
    until(lambda: stale not in placement(settings)[1])
    acknowledged = put(settings, "acknowledged")

    for number in (leader, other):
        cluster.brokers[number].kill()
    cluster.brokers[stale].start()
    until(lambda: placement(settings)[0] == -1)
    assert not is_acknowledged(settings, LEADERLESS_SECONDS)
    assert placement(settings)[0] == -1

    cluster.brokers[other].start()
    cluster.brokers[leader].start()
    until(lambda: placement(settings)[0] in (leader, other))
    after = put(settings, "after")
    assert frames_of(settings, {first, acknowledged, after}) == dict.fromkeys((first, acknowledged, after), DATA)
