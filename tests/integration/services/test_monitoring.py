"""Test workers' health and metrics, and settings files swapped as Kubernetes swaps them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.setting_changes import ConfigChanges
from nearkin_shared.config.loader import load
from nearkin_shared.errors import BadInput, ConfigError
from nearkin_shared.kafka import clients
from nearkin_shared.kafka import live_config as hot_module
from nearkin_shared.kafka.clients import connection, consumer, group, producer, topic
from nearkin_shared.kafka.lag import WAITS, LagWatch
from nearkin_shared.kafka.live_config import LiveConfig, check_changes, config_message, merge_changes
from nearkin_shared.kafka.topics import prepare_topics
from nearkin_shared.observability import metrics
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.pipeline import SPLIT, Pipeline, uploading
from tests.support.servers.servers import Redis

FRESH = 'nearkin_dedup_chunks_total{level="fresh"}'
LINE = re.compile(r"http://127\.0\.0\.1:(\d+)/metrics")


@pytest.fixture
def sections(kafka: Any, topic_prefix: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},
        "object_store": {"url": str(tmp_path / "objects")},
        "monitor": {"port": 0},
    }


@pytest.fixture
def private_redis(tmp_path: Path, need: Any) -> Iterator[Redis]:
    server = Redis(tmp_path / "redis")
    need(server.start)
    yield server
    server.stop()


@pytest.mark.soak
def test_workers_report_redis_outage_and_counts(
    sections: dict[str, dict[str, Any]], private_redis: Redis, tmp_path: Path
) -> None:
    """Report an unreachable Redis and the work done."""
    sections["redis"] = {"url": private_redis.url}
    data = noise(300_000, "monitoring").tobytes()
    with Pipeline(tmp_path / "pipeline", sections) as pipeline:

        def fetch(service: str, path: str) -> httpx.Response:
            log = pipeline.folder / f"{service}.log"
            match = until(lambda: LINE.search(log.read_text()))
            assert match is not None
            port = match[1]
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=15)

        def metric(service: str, line: str) -> float:
            found = re.search(rf"^{re.escape(line)} (\S+)$", fetch(service, "/metrics").text, re.MULTILINE)
            return float(found[1]) if found else -1.0

        began = time.monotonic()
        for service in SPLIT:
            until(lambda: fetch(service, "/readyz").status_code == 200)  # noqa: B023
        with uploading(pipeline.settings) as uploader:
            for _ in range(2):
                assert uploader.wait(uploader.put("a", [data]))["state"] == "committed"
        assert metric("delta", 'nearkin_blobs_total{state="committed"}') == 2
        assert metric("delta", 'nearkin_bytes_total{after="in"}') == 2 * len(data)
        assert metric("delta", 'nearkin_bytes_total{after="dedup"}') == len(data)
        assert len(data) < metric("delta", 'nearkin_bytes_total{after="stored"}') < len(data) + 20_000
        assert metric("dedup", 'nearkin_dedup_bytes_total{level="fresh"}') == len(data)
        assert metric("dedup", 'nearkin_dedup_bytes_total{level="segment"}') == len(data)
        stored = metric("delta", 'nearkin_base_chunks_total{policy="none"}')
        assert stored == metric("delta", "nearkin_chunk_depth_count") == metric("dedup", FRESH)
        for service in ("dedup", "resemblance", "delta"):
            assert metric(service, f'nearkin_stage_seconds_count{{stage="{service}"}}') > 0
        assert metric("dedup", 'nearkin_index_lookups_total{found="yes",table="segments"}') > 0
        assert metric("resemblance", 'nearkin_index_lookups_total{found="no",table="features"}') > 0
        assert metric("delta", 'nearkin_queue_items{queue="delta-commit"}') == 0
        assert metric("delta", 'nearkin_cache_bytes{cache="blocks"}') >= 0
        assert metric("maintenance", "nearkin_redis_bytes") > 100_000
        for stage in WAITS:  # by these names NearkinStuck compares what waits with what is taken
            service = "delta" if stage == "committer" else stage
            assert metric(service, f'nearkin_records_total{{stage="{stage}"}}') > 0
            assert metric(service, f'nearkin_restarts_total{{stage="{stage}"}}') == 0
        group = f"{pipeline.settings.kafka.topic_prefix}committer"
        until(lambda: f'nearkin_lag_records{{group="{group}"' in fetch("maintenance", "/metrics").text)
        assert metric("maintenance", 'nearkin_index_complete{index="redis"}') == 1

        private_redis.stop()
        for service in SPLIT:
            problems = until(lambda: (answer := fetch(service, "/readyz")).status_code == 503 and answer.json())  # noqa: B023
            assert problems
            assert "redis" in problems["redis"]
            assert fetch(service, "/livez").status_code == 200
        private_redis.start()
        for service in SPLIT:
            until(lambda: fetch(service, "/readyz").status_code == 200)  # noqa: B023
        until(lambda: time.monotonic() - began > 11)  # longer than a loop may do nothing
        assert {service: fetch(service, "/livez").status_code for service in SPLIT} == dict.fromkeys(SPLIT, 200)


def test_lag_over_half_the_retention_is_old(
    sections: dict[str, dict[str, Any]],
) -> None:
    """Read lag from outside; a record of half the retention's age is old."""
    settings = load(None, {"kafka": sections["kafka"] | {"retention_hours": 1}})[0]
    prepare_topics(settings)
    frames, name = topic(settings, "frames"), group(settings, "chunker")
    sender = producer(settings, "test")
    now_ms = time.time_ns() // 1_000_000
    for age_minutes in (40, 35, 31, 29, 0):
        sender.produce(frames, b"x" * 1000, timestamp=now_ms - age_minutes * 60_000, partition=1)
    assert sender.flush(60) == 0

    def lag() -> tuple[float, float, float]:
        LagWatch(settings).look()
        parts = (metrics.LAG.labels(name, frames, part)._value.get() for part in "01")
        return (*parts, metrics.OLD_LAG.labels(name)._value.get())

    def oldest_minutes() -> float:
        return float(metrics.LAG_SECONDS.labels(name)._value.get()) / 60

    def waiting_bytes() -> float:
        return float(metrics.LAG_BYTES.labels(name)._value.get())

    def is_answered() -> bool:
        try:
            lag()
        except KafkaException:  # a coordinator that has just been made
            return False
        return True

    until(is_answered)
    assert lag() == (0, 5, 3)
    assert 40 <= oldest_minutes() < 42.5
    assert waiting_bytes() == 5000
    reader = consumer(settings, name, "test")
    reader.commit(offsets=[TopicPartition(frames, 1, 2)], asynchronous=False)
    assert lag() == (0, 3, 1)
    assert 31 <= oldest_minutes() < 33
    assert waiting_bytes() == 3000
    reader.commit(offsets=[TopicPartition(frames, 1, 5)], asynchronous=False)
    reader.close()
    assert lag() == (0, 0, 0)
    assert oldest_minutes() == waiting_bytes() == 0


def test_swapped_config_map_is_noticed(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Notice the kubelet's swap.

    Nearkin.toml -> ..data/nearkin.toml, and ..data is renamed over.
    """
    folder = tmp_path / "config"
    folder.mkdir()

    def swap(name: str, algorithm: str) -> None:
        (folder / name).mkdir()
        kafka = "\n".join(f"{field} = {value!r}" for field, value in sections["kafka"].items())
        (folder / name / "nearkin.toml").write_text(f'[kafka]\n{kafka}\n[features]\nalgorithm = "{algorithm}"\n')
        before = folder / "..data"
        old = before.readlink() if before.is_symlink() else None
        (folder / "..data_tmp").symlink_to(name)
        (folder / "..data_tmp").rename(before)
        if old is not None:
            (folder / old / "nearkin.toml").unlink()
            (folder / old).rmdir()

    swap("..2026_01_01", "finesse")
    file = folder / "nearkin.toml"
    file.symlink_to(Path("..data", "nearkin.toml"))
    settings = load(file)[0]
    prepare_topics(settings)
    hot = LiveConfig(settings, file, None)
    hot.start()
    try:
        first = hot.revision
        for name, algorithm in (("..2026_01_02", "ntransform"), ("..2026_01_03", "odess"), ("..2026_01_04", "finesse")):
            time.sleep(0.2)
            swap(name, algorithm)
            until(lambda: hot.settings.features.algorithm == algorithm)  # noqa: B023
        assert hot.revision == first
    finally:
        hot.stop()
    assert os.readlink(file) == "..data/nearkin.toml"


def test_edit_during_worker_start_is_applied(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Its settings were read from the file seconds before anything watched that."""
    file = tmp_path / "nearkin.toml"
    kafka = "\n".join(f"{field} = {value!r}" for field, value in sections["kafka"].items())
    file.write_text(f"[kafka]\n{kafka}\n")
    settings = load(file)[0]
    prepare_topics(settings)
    file.write_text(f"[kafka]\n{kafka}\n[service]\npaused = true\n")
    hot = LiveConfig(settings, file, None)
    hot.start()
    try:
        until(lambda: hot.settings.service.paused)
    finally:
        hot.stop()


@pytest.mark.parametrize("fails", ["made", "polled", "delivered"])
def test_changes_apply_after_topic_outage(
    sections: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """Apply the last reported change after the topic ended twice, not all changes again."""
    settings = load(None, {"kafka": sections["kafka"]})[0]
    prepare_topics(settings)
    failing = threading.Event()
    failures: list[str] = []
    fatal = KafkaError(KafkaError._FATAL, "fenced off", True)

    class Failing(Consumer):
        def poll(self, timeout: float = -1) -> Any:
            if fails == "polled" and failing.is_set() and len(failures) < 2:
                failures.append("polled")
                raise KafkaException(KafkaError(KafkaError._STATE))
            found = super().poll(timeout)
            if fails == "delivered" and failing.is_set() and len(failures) < 2:
                failures.append("delivered")
                return FatalMessage()
            return found

    class FatalMessage:
        def error(self) -> KafkaError:
            return fatal

    def make_consumer(*args: Any, **extra: Any) -> Consumer:
        if fails == "made" and len(failures) < 2:
            failures.append("made")
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG))
        with monkeypatch.context() as patched:
            patched.setattr(clients, "Consumer", Failing)
            return consumer(*args, **extra)

    def publish_change(algorithm: str) -> None:
        client = producer(settings, "test")
        changes = {"features": {"algorithm": algorithm}}
        message = config_message(changes, "me", "now", changes, algorithm, "")
        client.produce(topic(settings, "config"), message, b"hot")
        assert client.flush(60) == 0

    monkeypatch.setattr(hot_module, "consumer", make_consumer)
    publish_change("ntransform")
    publish_change("odess")
    hot = LiveConfig(settings, None, None)
    hot.start()
    try:
        assert hot.settings.features.algorithm == "odess"
        failing.set()
        until(lambda: len(failures) == 2)
        publish_change("finesse")
        until(lambda: hot.settings.features.algorithm == "finesse")
        assert caplog.text.count("the topic is not watched") == 2
    finally:
        hot.stop()
    assert not [thread for thread in hot._threads if thread.is_alive()]
    changed = [record.message for record in caplog.records if " -> ntransform" in record.message]
    assert len(changed) == 1, "changes read before it ended are not reported again"


def test_file_in_a_missing_folder_is_noticed(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Notice a file whose folder was missing for a while."""
    file = tmp_path / "config" / "nearkin.toml"
    kafka = "\n".join(f"{field} = {value!r}" for field, value in sections["kafka"].items())
    file.parent.mkdir()
    file.write_text(f"[kafka]\n{kafka}\n")
    settings = load(file)[0]
    prepare_topics(settings)
    shutil.rmtree(file.parent)
    hot = LiveConfig(settings, file, None)
    hot.start()
    try:
        time.sleep(1.0)
        file.parent.mkdir()
        file.write_text(f"[kafka]\n{kafka}\n[service]\npaused = true\n")
        until(lambda: hot.settings.service.paused)
    finally:
        hot.stop()


def test_topics_are_made_once_and_kept(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Make topics once with their retention; keep their partitions."""

    def prepared(**kafka: Any) -> tuple[list[str], list[str]]:
        return prepare_topics(load(None, {"kafka": sections["kafka"] | kafka})[0])

    frames = f"{sections['kafka']['topic_prefix']}frames"
    make_consumer, changed = prepared(retention_hours=48)
    assert frames in make_consumer
    assert (len(make_consumer), changed) == (9, [])
    assert prepared(retention_hours=48) == ([], [])
    assert frames in prepared(retention_hours=72)[1]
    until(lambda: prepared(retention_hours=72) == ([], []))  # a busy broker still reports the former value
    with pytest.raises(ConfigError, match=r'kafka.partitions "3": topic .* has 2'):
        prepared(partitions=3)
    settings = load(None, {"kafka": sections["kafka"]})[0]
    topics = AdminClient(connection(settings, "test")).list_topics(timeout=10).topics
    assert (len(topics[frames].partitions), len(topics[topic(settings, "config")].partitions)) == (2, 1)


def test_concurrent_changes_all_apply(
    sections: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep both changes although each gateway merges over what it has read.

    A message that another one overtook must not revert that one.
    """
    settings = load(None, {"kafka": sections["kafka"]})[0]
    prepare_topics(settings)
    sender = producer(settings, "test-config")
    full, newest = topic(settings, "config"), [b""]

    async def publish(message: bytes) -> None:
        newest[0] = message
        sender.produce(full, message, b"settings")
        await asyncio.to_thread(sender.flush, 60.0)

    patches: list[dict[str, dict[str, Any]]] = [
        {"block": {"level": 7}}, {"features": {"algorithm": "odess"}}, {"service": {"paused": True}},
        {"base": {"policy": "first-fit"}}, {"delta": {"max_depth": 2}}, {"service": {"read_only": True}},
    ]  # fmt: skip
    both = [LiveConfig(settings, None, None) for _ in range(2)]
    late = LiveConfig(settings, None, None)

    async def patched() -> None:
        gateways = [ConfigChanges(settings, hot, publish) for hot in both]
        await asyncio.gather(*(gateways[number % 2].patch(patch, "x") for number, patch in enumerate(patches)))
        until(lambda: both[0].known == both[1].known)

    try:
        for hot in both:
            hot.start()
        asyncio.run(patched())
        wanted: dict[str, dict[str, Any]] = {}
        for patch in patches:
            wanted = merge_changes(wanted, patch)
        assert both[0].changes == both[1].changes == wanted
        assert both[0].is_self_contained
        late.on_message(newest[0], "what compaction leaves")
        assert late.changes == wanted

        async def overtaken(message: bytes) -> None:
            if json.loads(message)["patch"]:
                await ConfigChanges(settings, both[1], publish).patch({"delta": {"max_depth": 3}}, "first")
            await publish(message)

        def disagree(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            """Refuse level 4 at depth 3, as no two hot settings exclude each other."""
            if changes.get("block") == {"level": 4} and both[0].changes["delta"] == {"max_depth": 3}:
                raise BadInput("block.level 4 at delta.max_depth 3")
            return check_changes(changes)

        monkeypatch.setattr(hot_module, "check_changes", disagree)
        with pytest.raises(Problem, match=r"another change came first.*GET /v1/config") as refused:
            asyncio.run(ConfigChanges(settings, both[0], overtaken).patch({"block": {"level": 4}}, "second"))
        assert refused.value.status == 409
        assert (both[0].changes["delta"], both[0].changes["block"]) == ({"max_depth": 3}, {"level": 7})
        assert both[0].is_self_contained
        asyncio.run(publish(b'{"changes": {"block": {"level": 5}}, "by": "by hand", "at": ""}'))
        until(lambda: both[0].changes == both[1].changes == {"block": {"level": 5}})
    finally:
        for hot in both:
            hot.stop()
