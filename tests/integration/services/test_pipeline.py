"""Test the stages with real Kafka, Redis and an object store, under repeats and toggles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_client

import nearkin
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.message import End, Envelope, Frame, encode
from nearkin_shared.kafka.clients import consumer, group, topic
from nearkin_shared.kafka.consumer_loop import IDLE_SECONDS
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.checks.waiting import until
from tests.support.servers.pipeline import Pipeline, Uploader, uploading
from tests.support.servers.servers import Redis

MIB = 1024 * 1024


@pytest.fixture
def pipeline(kafka: object, redis: object, topic_prefix: str, key_prefix: str, tmp_path: Path) -> Iterator[Pipeline]:
    config = {
        "kafka": {
            "bootstrap_servers": kafka.bootstrap,  # type: ignore[attr-defined]
            "topic_prefix": topic_prefix,
            "partitions": 2,
            "upload_idle_seconds": 4,
        },
        "redis": {"url": redis.url, "prefix": key_prefix},  # type: ignore[attr-defined]
        "object_store": {"url": str(tmp_path / "objects")},
    }
    with Pipeline(tmp_path / "pipeline", config) as made:
        yield made
        codes = made.stop()
        assert set(codes.values()) == {0}, made.logs()


@pytest.fixture
def uploader(pipeline: Pipeline) -> Iterator[Uploader]:
    with uploading(pipeline.settings) as made:
        yield made


def restored(pipeline: Pipeline, key: str, version: int, tenant: str = "default") -> bytes:
    objects, found = open_store_of(pipeline.settings)
    namer = Fingerprinter(bytes.fromhex(found.secret), tenant)
    manifest = ManifestStore(objects).get(tenant, key, version)
    containers = ContainerStore(objects, namer.domain, 64 * MIB)
    return b"".join(VersionReader(manifest.info, manifest, containers, namer, 0, manifest.size_bytes).pieces())


def content(seed: int, size: int) -> bytes:
    """Return bytes that are half noise, half text-like repetition."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 256, size // 2, np.uint8).tobytes()
    words = generator.integers(97, 123, 5000, np.uint8).tobytes()
    return (noise + words * (size // 5000 + 1))[:size]


def test_blobs_restore_and_second_is_deltas(pipeline: Pipeline, uploader: Uploader) -> None:
    """Restore blobs; the second version is stored as deltas."""
    first = content(1, 6 * MIB)
    edited = bytearray(first)
    for place in range(1000, len(edited), 50_000):
        edited[place : place + 8] = b"changed!"
    events = [uploader.wait(uploader.put("backups/a", [bytes(data)])) for data in (first, edited, first)]
    assert [event["state"] for event in events] == ["committed"] * 3, events
    assert [event["version"] for event in events] == [1, 2, 3]
    assert events[1]["ledger"]["delta_chunks"] > 50
    assert events[2]["ledger"]["unique_bytes"] == 0
    for version, data in ((1, first), (2, bytes(edited)), (3, first)):
        assert restored(pipeline, "backups/a", version) == data


def test_empty_tiny_and_zero_blobs_restore(pipeline: Pipeline, uploader: Uploader) -> None:
    blobs = {"empty": b"", "one": b"x", "zeros": bytes(5 * MIB), "frame": content(3, 900 * 1024)}
    ids = {key: uploader.put(key, [data]) for key, data in blobs.items()}
    for key, data in blobs.items():
        event = uploader.wait(ids[key])
        assert event["state"] == "committed", event
        assert restored(pipeline, key, 1) == data


def test_origin_commits_once_and_keys_in_order(pipeline: Pipeline, uploader: Uploader) -> None:
    """Commit one origin once, and puts of a key in order."""
    data = content(4, 100_000)
    ids = [uploader.put("k", [data], origin=b"o" * 16) for _ in range(3)]
    assert [uploader.wait(blob)["version"] for blob in ids] == [1, 1, 1]
    others = [uploader.put("k", [content(seed, 50_000)]) for seed in range(10, 16)]
    assert sorted(uploader.wait(blob)["version"] for blob in others) == [2, 3, 4, 5, 6, 7]


def test_cut_upload_fails_and_garbage_stalls_none(pipeline: Pipeline, uploader: Uploader) -> None:
    """Fail a truncated upload visibly; garbage records stall nothing."""
    cut = uploader.put("cut", [content(5, 300_000)], cut=True)
    for name in ("frames", "segments", "fresh", "paired", "placed"):
        full = topic(pipeline.settings, name)
        for value in (b"", b"garbage", encode(Frame(Envelope(b"q" * 16, "t", "k", 5), np.zeros(9, np.uint8)))[:-1]):
            for _ in range(4):
                uploader.outbox.send_to(full, None, value, [])
    good = uploader.put("good", [content(6, 300_000)])
    assert uploader.wait(good)["state"] == "committed"
    event = uploader.wait(cut)
    assert event["state"] == "failed"
    assert "stopped" in event["failure"]


@pytest.mark.soak
def test_end_with_an_invalid_time_stalls_nothing(pipeline: Pipeline, uploader: Uploader) -> None:
    """Survive an end whose time is no date.

    The committer failed on the date, restarted, and met the same record again.
    """
    for name in ("frames", "placed"):
        end = End(Envelope(b"q" * 16, "default", "late"), 1 << 62, b"o" * 16, 0, bytes(32), segments=0)
        for partition in range(8):
            uploader.outbox.send_to(topic(pipeline.settings, name), b"%d" % partition, encode(end), [])
    uploader.outbox.flush()
    assert uploader.wait(uploader.put("good", [content(6, 300_000)]))["state"] == "committed"


@pytest.mark.soak
def test_long_pause_fails_no_upload(pipeline: Pipeline, uploader: Uploader) -> None:
    """The rest of its frames is in Kafka, acknowledged: it is not the upload that has stopped."""
    data = content(12, 6 * MIB)

    def all_logged(text: str) -> bool:
        return pipeline.logs().count(text) >= len(pipeline.processes)

    def pieces() -> Iterator[bytes]:
        assert uploader.wait(uploader.put("warm", [content(13, 100_000)]))["state"] == "committed"
        until(lambda: all_logged("ready, revision"), pipeline.logs)
        yield data[: 4 * MIB]
        uploader.outbox.flush()
        time.sleep(1.0)
        pipeline.write_config(service={"paused": True})
        sent = 4 * MIB
        # The upload itself never stops, however long this machine takes to notify all workers.
        while not all_logged("service.paused False -> True"):
            yield data[sent : sent + 1000]
            uploader.outbox.flush()
            sent += 1000
            assert sent < len(data), pipeline.logs()  # 3 minutes
            time.sleep(0.1)
        time.sleep(2 * IDLE_SECONDS)  # a paused worker takes what arrived before it checks again
        yield data[sent:]

    blob = uploader.put("paused", pieces())
    time.sleep(1.5 * pipeline.settings.kafka.upload_idle_seconds)
    pipeline.write_config(service={"paused": False})
    event = uploader.wait(blob)
    assert (event["state"], event.get("failure")) == ("committed", None)
    assert restored(pipeline, "paused", 1) == data


def test_workers_that_die_lose_and_repeat_nothing(pipeline: Pipeline, uploader: Uploader) -> None:
    blobs = {f"blob-{number}": content(number, 2 * MIB) for number in range(12)}
    ids = {}
    for number, (key, data) in enumerate(blobs.items()):
        ids[key] = uploader.put(key, [data])
        service = ("chunker", "delta", "dedup", "resemblance")[number % 4]
        pipeline.kill(service)
        pipeline.start(service)
    for key, data in blobs.items():
        event = uploader.wait(ids[key])
        assert event["state"] == "committed", (event, pipeline.logs())
        assert event["version"] == 1
        assert restored(pipeline, key, 1) == data
    objects, _ = open_store_of(pipeline.settings)
    assert all(ManifestStore(objects).versions("default", key) == [1] for key in blobs)


def test_emptied_redis_is_rebuilt(
    pipeline: Pipeline, uploader: Uploader, tmp_path: Path, need: Callable[[Callable[[], Any]], Any]
) -> None:
    """Lose deduplication for a moment when Redis is emptied, then rebuild the index."""
    data = content(8, 3 * MIB)
    server = need(lambda: Redis(tmp_path / "own-redis"))
    with server:
        for service in list(pipeline.processes):
            pipeline.kill(service)
        pipeline.write_config(redis={"url": server.url})
        for service in list(pipeline.processes):
            pipeline.start(service)
        assert uploader.wait(uploader.put("k", [data]))["state"] == "committed"
        with redis_client.Redis.from_url(server.url) as client:
            client.flushall()
        assert uploader.wait(uploader.put("k", [data]))["state"] == "committed"
        until(lambda: "index rebuilt" in (pipeline.folder / "maintenance.log").read_text(), pipeline.logs)
        event = uploader.wait(uploader.put("k", [data]))
        assert event["ledger"]["unique_bytes"] == 0
        assert [restored(pipeline, "k", version) == data for version in (1, 2, 3)] == [True] * 3
        pipeline.stop()


def test_algorithm_is_toggled_during_puts(pipeline: Pipeline, uploader: Uploader, tmp_path: Path) -> None:
    """Change the algorithm by editing the file while blobs arrive."""
    before = uploader.wait(uploader.put("a", [content(7, MIB)]))
    pipeline.write_config(features={"algorithm": "ntransform"})
    ids: list[str] = []

    def put_until_toggled() -> bool:
        number = len(ids)
        ids.append(uploader.put(f"b{number}", [content(100 + number, 300_000)]))
        uploader.events(0.2)
        return number > 20 and "finesse -> ntransform" in (pipeline.folder / "resemblance.log").read_text()

    until(put_until_toggled, pipeline.logs)
    put_until_toggled()
    pipeline.write_config(features={"algorithm": "fineese"})
    ids.append(uploader.put("last", [content(99, 300_000)]))
    assert before["state"] == "committed"
    assert all(uploader.wait(blob)["state"] == "committed" for blob in ids)
    with nearkin.open_store(pipeline.settings.object_store.url or "", create=True) as store:
        store.rebuild_index()
        sketches = store.stats().sketches
    by_algorithm = {kind: sum(n for name, n in sketches.items() if kind in name) for kind in ("finesse", "ntransform")}
    assert all(by_algorithm.values()), sketches
    until(
        lambda: "fineese" in (pipeline.folder / "delta.log").read_text(), lambda: "the refused value was not reported"
    )


@pytest.mark.parametrize(("service", "reads"), [("chunker", "frames"), ("resemblance", "fresh")])
def test_fenced_worker_starts_over(pipeline: Pipeline, uploader: Uploader, service: str, reads: str) -> None:
    settings = pipeline.settings
    assert uploader.wait(uploader.put("before", [b"x" * 10]))["state"] == "committed"
    # As after a broker's restart that forgot who had joined: another member under the worker's own static name.
    other = consumer(settings, group(settings, service), "other", **{"group.instance.id": f"{service}-w1"})
    taken: list[object] = []
    other.subscribe([topic(settings, reads)], on_assign=lambda _client, parts: taken.extend(parts))
    until(lambda: other.poll(0.1) is None and taken)
    other.close()
    event = uploader.wait(uploader.put("after", [content(3, MIB)]))
    assert event["state"] == "committed", event
    # It learns it by its next heartbeat, which the blob need not wait for.
    until(lambda: "a --worker of its own" in pipeline.logs(), pipeline.logs)


def test_maintenance_with_bad_settings_ends(pipeline: Pipeline, uploader: Uploader) -> None:
    """Report settings that prevent GC, and end."""
    assert uploader.wait(uploader.put("before", [b"x" * 10]))["state"] == "committed"
    pipeline.kill("maintenance")
    pipeline.write_config(gc={"mode": "refcount"})
    log = pipeline.folder / "maintenance.log"
    log.unlink()
    pipeline.start("maintenance")
    assert pipeline.processes.pop("maintenance").wait(60) == 2
    assert "set gc.mode to 'mark-sweep'" in log.read_text()
    assert "Traceback" not in log.read_text()
