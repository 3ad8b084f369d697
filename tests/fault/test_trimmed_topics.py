"""Trimmed topics: workers lose nothing that was deleted behind them, and truncations below it are noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.kafka.clients import consumer
from nearkin_shared.kafka.trimmer import Trimmer
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks.waiting import until
from tests.support.servers.pipeline import FUSED, Pipeline, uploading
from tests.support.servers.servers import Kafka, Redis

MIB = 1024 * 1024
FRAMES = "trim.frames"
WAIT_SECONDS = 90.0
QUICK = {"log.retention.check.interval.ms": 500, "log.flush.start.offset.checkpoint.interval.ms": 500}
"""The broker removes freed segments, and notes where logs start, without delay."""

StartPipeline = Callable[[int], Pipeline]


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Kafka]:
    """A broker of its own, whose logs are trimmed and cut."""
    with Kafka(tmp_path / "kafka", properties=QUICK) as made:
        yield made


@pytest.fixture
def start_pipeline(kafka: Kafka, tmp_path: Path) -> Iterator[StartPipeline]:
    """Return a function that starts all stages in one worker, and maintenance, given `kafka.trim_seconds`."""
    started: list[Pipeline] = []
    with Redis(tmp_path / "redis") as redis:

        def start(trim_seconds: int) -> Pipeline:
            section = {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "trim.", "partitions": 1}
            config: dict[str, dict[str, object]] = {
                "kafka": {**section, "session_timeout_ms": 6000, "trim_seconds": trim_seconds},
                "object_store": {"url": str(tmp_path / "objects")},
                "redis": {"url": redis.url},
            }
            started.append(Pipeline(tmp_path / "pipeline", config, services=FUSED).__enter__())
            return started[-1]

        yield start
        for pipeline in started:
            assert set(pipeline.stop().values()) <= {0, -9}, pipeline.logs()


def content(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def put(pipeline: Pipeline, key: str, data: bytes) -> str:
    with uploading(pipeline.settings) as uploader:
        return uploader.put(key, [data])


def outcome(pipeline: Pipeline, blob: str) -> str:
    with uploading(pipeline.settings) as uploader:
        return str(uploader.wait(blob, WAIT_SECONDS)["state"])


def restored(pipeline: Pipeline, key: str) -> bytes:
    objects, found = open_store_of(pipeline.settings)
    namer = Fingerprinter(bytes.fromhex(found.secret), "default")
    manifest = ManifestStore(objects).get("default", key, 1)
    containers = ContainerStore(objects, namer.domain, 64 * MIB)
    return b"".join(VersionReader(manifest.info, manifest, containers, namer, 0, manifest.size_bytes).pieces())


def first_offset(pipeline: Pipeline) -> int:
    asking = consumer(pipeline.settings, "test-reader", "test")
    try:
        return asking.get_watermark_offsets(TopicPartition(FRAMES, 0), timeout=20)[0]
    finally:
        asking.close()


def test_workers_continue_behind_trimmed_records(kafka: Kafka, start_pipeline: StartPipeline) -> None:
    """The broker frees what is committed; a killed worker takes the records that arrived meanwhile."""
    pipeline = start_pipeline(1)
    blobs = {"large": content(1, 40 * MIB), "meanwhile": content(2, 3 * MIB), "last": content(3, MIB)}
    assert outcome(pipeline, put(pipeline, "large", blobs["large"])) == "committed"
    until(lambda: first_offset(pipeline) > 40, pipeline.logs, WAIT_SECONDS)
    # 40 MiB are three segments of 16 MiB: the one that is written stays.
    until(lambda: kafka.log_bytes(FRAMES) <= 16 * MIB, lambda: kafka.log_bytes(FRAMES), WAIT_SECONDS)

    pipeline.kill("pipeline")
    meanwhile = put(pipeline, "meanwhile", blobs["meanwhile"])
    kafka.restart()
    pipeline.start("pipeline")
    assert outcome(pipeline, meanwhile) == "committed"
    assert outcome(pipeline, put(pipeline, "last", blobs["last"])) == "committed"
    assert {key: restored(pipeline, key) for key in blobs} == blobs
    assert "truncated below" not in pipeline.logs()


@pytest.mark.parametrize("trimmed", [True, False], ids=["trimmed", "whole"])
def test_log_written_again_is_not_trimmed(kafka: Kafka, start_pipeline: StartPipeline, trimmed: bool) -> None:
    """Below the committed offset of a log that lost records and was written again, new records are kept and read."""
    pipeline = start_pipeline(0)
    blobs = {"first": content(1, 2 * MIB), "later": content(5, 6 * MIB)}
    assert outcome(pipeline, put(pipeline, "first", blobs["first"])) == "committed"
    assert pipeline.end("pipeline") == 0
    trimmer = Trimmer(pipeline.settings)
    if trimmed:
        # The worker may have trimmed them, and a trimmer deletes nothing before it has read all dead letters.
        until(lambda: trimmer.trim().get(FRAMES, 0) or first_offset(pipeline) > 0, pipeline.logs)
        until(lambda: f"{FRAMES} 0 {first_offset(pipeline)}" in kafka.start_offsets(), kafka.start_offsets)
    kafka.kill()
    kafka.truncate(FRAMES, kafka.log_bytes(FRAMES) // 2)
    kafka.start()
    later = put(pipeline, "later", blobs["later"])
    assert trimmer.trim().get(FRAMES, 0) == 0
    trimmer.close()
    pipeline.start("pipeline")
    assert outcome(pipeline, later) == "committed"
    assert {key: restored(pipeline, key) for key in blobs} == blobs
    assert f"{FRAMES}[0]: truncated below" in pipeline.logs()
