"""Kafka logs that lost acknowledged messages: earlier puts fail visibly, and later ones are committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.servers.pipeline import Pipeline, uploading
from tests.support.servers.servers import Kafka, Redis

MIB = 1024 * 1024
PREFIX = "cut."
WAIT_SECONDS = 40.0


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Kafka]:
    """A broker of its own, whose logs are cut."""
    with Kafka(tmp_path / "kafka") as made:
        yield made


@pytest.fixture
def pipeline(kafka: Kafka, tmp_path: Path) -> Iterator[Pipeline]:
    config: dict[str, dict[str, object]] = {
        "kafka": {
            "bootstrap_servers": kafka.bootstrap,
            "topic_prefix": PREFIX,
            "partitions": 1,
            "upload_idle_seconds": 2,
            "session_timeout_ms": 6000,
        },
        "object_store": {"url": str(tmp_path / "objects")},
    }
    with (
        Redis(tmp_path / "redis") as redis,
        Pipeline(tmp_path / "pipeline", {**config, "redis": {"url": redis.url}}) as made,
    ):
        yield made
        codes = made.stop()
        assert set(codes.values()) <= {0, -9}, made.logs()


def content(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def restored(pipeline: Pipeline, key: str, version: int = 1) -> bytes:
    objects, found = open_store_of(pipeline.settings)
    namer = Fingerprinter(bytes.fromhex(found.secret), "default")
    manifest = ManifestStore(objects).get("default", key, version)
    containers = ContainerStore(objects, namer.domain, 64 * MIB)
    return b"".join(VersionReader(manifest.info, manifest, containers, namer, 0, manifest.size_bytes).pieces())


def cut_frames(kafka: Kafka, size_bytes: int) -> None:
    """Lose the end of the log of frames, as a power cut of a broker without replicas does."""
    kafka.kill()
    kafka.truncate(f"{PREFIX}frames", size_bytes)
    kafka.start()


def put(pipeline: Pipeline, key: str, data: bytes) -> str:
    """Put a blob by a new producer, as a gateway does whose producer has lost its position in a log; return its id."""
    with uploading(pipeline.settings) as uploader:
        return uploader.put(key, [data])


def outcome(pipeline: Pipeline, blob: str) -> str:
    """Wait for the event about a blob."""
    with uploading(pipeline.settings) as uploader:
        return str(uploader.wait(blob, WAIT_SECONDS)["state"])


@pytest.mark.soak
def test_truncated_log_fails_uploads_visibly(kafka: Kafka, pipeline: Pipeline) -> None:
    """F.32: After a truncated log an upload ends failed or unknown, later ones are committed, and no worker stalls."""
    blobs = {"first": content(1, 2 * MIB), "after": content(4, 3 * MIB)}
    assert outcome(pipeline, put(pipeline, "first", blobs["first"])) == "committed"
    read_bytes = kafka.log_bytes(f"{PREFIX}frames")

    pipeline.kill("chunker")
    cut = put(pipeline, "cut", content(2, 4 * MIB))
    lost = put(pipeline, "lost", content(3, MIB))
    cut_frames(kafka, read_bytes + 2 * MIB)
    pipeline.start("chunker")
    assert outcome(pipeline, cut) == "failed"
    assert outcome(pipeline, put(pipeline, "after", blobs["after"])) == "committed"

    with uploading(pipeline.settings) as uploader:
        assert lost not in uploader.events(1.0)
    assert {key: restored(pipeline, key) for key in blobs} == blobs


@pytest.mark.parametrize("stops", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["stopped", "running"])
def test_log_truncated_below_the_offset_is_read_again(kafka: Kafka, pipeline: Pipeline, stops: bool) -> None:
    """F.32: Blobs put into a log that lost read messages are committed, though the group's offset is beyond its end."""
    blobs = {"first": content(1, 2 * MIB), "later": content(5, 6 * MIB)}
    assert outcome(pipeline, put(pipeline, "first", blobs["first"])) == "committed"
    if stops:
        pipeline.kill("chunker")
    cut_frames(kafka, kafka.log_bytes(f"{PREFIX}frames") // 2)
    later = put(pipeline, "later", blobs["later"])
    if stops:
        pipeline.start("chunker")
    assert outcome(pipeline, later) == "committed"
    assert {key: restored(pipeline, key) for key in blobs} == blobs
