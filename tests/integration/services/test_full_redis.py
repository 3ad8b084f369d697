"""Test the stages with a Redis that has no room for index entries: uploads are committed all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.servers.pipeline import Pipeline, uploading
from tests.support.servers.servers import Kafka, Redis

MIB = 1024 * 1024


def restored(pipeline: Pipeline, key: str, version: int) -> bytes:
    objects, found = open_store_of(pipeline.settings)
    namer = Fingerprinter(bytes.fromhex(found.secret), "default")
    manifest = ManifestStore(objects).get("default", key, version)
    containers = ContainerStore(objects, namer.domain, 64 * MIB)
    return b"".join(VersionReader(manifest.info, manifest, containers, namer, 0, manifest.size_bytes).pieces())


def test_uploads_are_committed_without_index_entries(
    kafka: Kafka, redis: Redis, topic_prefix: str, key_prefix: str, tmp_path: Path
) -> None:
    """Beyond `redis.bytes_max` an equal upload is stored again, committed and restored byte for byte."""
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},
        "redis": {"url": redis.url, "prefix": key_prefix, "bytes_max": 1},
        "object_store": {"url": str(tmp_path / "objects")},
    }
    content = np.random.default_rng(1).integers(0, 256, 6 * MIB, np.uint8).tobytes()
    with Pipeline(tmp_path / "pipeline", config) as pipeline:
        with uploading(pipeline.settings) as uploader:
            events = [uploader.wait(uploader.put("k", [content])) for _ in range(2)]
        assert [event["state"] for event in events] == ["committed"] * 2, events
        assert [event["ledger"]["unique_bytes"] for event in events] == [len(content)] * 2
        for version in (1, 2):
            assert restored(pipeline, "k", version) == content
        codes = pipeline.stop()
        assert set(codes.values()) == {0}, pipeline.logs()
    assert "copies of new chunks are stored again" in pipeline.logs()
