"""Test the whole pipeline on index shards, without any Redis: gateway, fused worker, committer and maintenance."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nearkin.lab.generated_data import mutate
from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import load
from nearkin_shared.kafka.readiness_checks import INDEX_SHARDS
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.pipeline import FUSED, Pipeline
from tests.support.servers.server import free_port
from tests.support.servers.servers import Kafka
from tests.support.servers.shard_process import ShardProcess

SHARDS = 2
MIB = 1024 * 1024
NO_REDIS = "redis://127.0.0.1:1/0"
"""No server: a process that connects to it fails."""


class Fleet:
    """A pipeline and its shards."""

    def __init__(self, folder: Path, pipeline: Pipeline, shards: list[ShardProcess], monitor_port: int) -> None:
        self.folder, self.pipeline, self.shards = folder, pipeline, shards
        self.monitor_url = f"http://127.0.0.1:{monitor_port}"
        self.token = tokens.create(folder / "tokens.json", "default", tokens.SCOPES)[0]

    def readiness(self) -> httpx.Response:
        """Return whether the maintenance worker is ready, and why not."""
        return httpx.get(f"{self.monitor_url}/readyz", timeout=30)


@pytest.fixture
def fleet(kafka: Kafka, topic_prefix: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    config_file = tmp_path / "pipeline" / "nearkin.toml"
    folders = [tmp_path / f"shard-{number}" for number in range(SHARDS)]
    shards = [ShardProcess(folder, number, SHARDS, config=config_file) for number, folder in enumerate(folders)]
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix, "partitions": 2},
        "redis": {"url": NO_REDIS},
        "index": {"backend": "shards", "shards": [shard.url for shard in shards], "map_bytes": 64 * MIB},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": 0},
        "auth": {"tokens_file": str(tmp_path / "tokens.json")},
        "deletion": {"undelete_seconds": 0},
        "gc": {"grace_seconds": 3, "interval_seconds": 0, **getattr(request, "param", {})},
    }
    shards[0].give_new_lease()
    monitor_port = free_port()
    monitored = {"maintenance": {"NEARKIN_MONITOR__PORT": str(monitor_port)}}
    with ExitStack() as stack:
        pipeline = Pipeline(tmp_path / "pipeline", config, monitored, FUSED)
        stack.enter_context(pipeline)
        for shard in shards:
            stack.enter_context(shard)
        yield Fleet(tmp_path, pipeline, shards, monitor_port)
        assert set(pipeline.stop().values()) == {0}, pipeline.logs()


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[RunningGateway]:
    with running(load(fleet.pipeline.config_file)[0]) as found:
        yield found


@pytest.fixture
def client(fleet: Fleet, gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client(fleet.token) as found:
        until(lambda: found.get("/v1/status/x").status_code != 401)
        yield found


def content(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def put(client: httpx.Client, key: str, data: bytes, **headers: str) -> dict[str, Any]:
    """Put a blob, and return its outcome once it is committed or failed."""
    answer = client.put(f"/v1/blobs/{key}", params={"wait": 60}, content=data, headers=headers, timeout=90)
    assert answer.status_code in (201, 202), answer.text
    result: dict[str, Any] = answer.json()
    deadline = time.monotonic() + 180
    while result["state"] == "pending":
        assert time.monotonic() < deadline, result
        result = client.get(result["status"], params={"wait": 20}, timeout=60).json()
    return result


def run_gc(client: httpx.Client) -> dict[str, Any]:
    """Request a GC run, and return its report."""
    before = client.get("/v1/gc").json()["last"]
    assert client.post("/v1/gc", json={"action": "run"}).status_code == 202
    last: dict[str, Any] = {}

    def ended() -> bool:
        last.clear()
        last.update(client.get("/v1/gc").json()["last"] or {})
        return last != (before or {})

    until(ended)
    assert last["failure"] is None, last
    return last


def objects_bytes(fleet: Fleet) -> int:
    return sum(path.stat().st_size for path in (fleet.folder / "objects" / "containers").rglob("*") if path.is_file())


def test_pipeline_on_shards_runs_without_redis(fleet: Fleet, client: httpx.Client) -> None:
    """Put, duplicate, new version, conditional put, listing, get, delete and GC."""
    data = content(4 * MIB, 1)
    changed = mutate(data, 2, edits=40)
    first = put(client, "a", data)
    assert (first["state"], first["version"]) == ("committed", 1)
    assert first["ledger"]["unique_bytes"] == len(data)
    assert put(client, "copy", data)["ledger"]["unique_bytes"] == 0
    newer = put(client, "a", changed)
    assert newer["version"] == 2
    assert 0 < newer["ledger"]["unique_bytes"] < len(data) // 4
    assert newer["ledger"]["stored_bytes"] < newer["ledger"]["unique_bytes"] // 2, "no base was found"
    refused = client.put("/v1/blobs/a", params={"wait": 60}, content=b"x", headers={"If-None-Match": "*"}, timeout=90)
    assert refused.status_code == 412, refused.text
    assert put(client, "new", b"small", **{"If-None-Match": "*"})["state"] == "committed"
    for key, version, expected in (("a", 1, data), ("a", 2, changed), ("copy", 1, data), ("new", 1, b"small")):
        assert client.get(f"/v1/blobs/{key}", params={"version": version}).content == expected
    listed = client.get("/v1/blobs").json()
    assert {entry["key"] for entry in listed["blobs"]} == {"a", "copy", "new"}, listed
    for key in ("a", "copy"):
        client.delete(f"/v1/blobs/{key}").raise_for_status()
    stored = objects_bytes(fleet)

    def is_freed() -> bool:
        run_gc(client)
        return objects_bytes(fleet) < stored // 10

    until(is_freed, fleet.pipeline.logs, poll_seconds=1.0)
    assert client.get("/v1/blobs/new").content == b"small"
    again = put(client, "again", data)
    assert again["ledger"]["unique_bytes"] == len(data), "an entry of deleted data was found"
    assert client.get("/v1/blobs/again").content == data
    assert fleet.readiness().status_code == 200
    fleet.shards[1].kill()
    until(lambda: INDEX_SHARDS in fleet.readiness().text)
    fleet.shards[1].start()
    until(lambda: fleet.readiness().status_code == 200)


def test_killed_shards_lose_no_upload(fleet: Fleet, client: httpx.Client) -> None:
    """Each shard is killed while blobs are published: all uploads are committed, and every blob is restored."""
    base = content(2 * MIB, 7)
    blobs: dict[str, bytes] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    stop = threading.Event()

    def upload(number: int) -> None:
        count = 0
        while not stop.is_set():
            seed = 1000 * number + count
            key, data = f"{number}/{count}", mutate(base, seed, edits=60) + content(MIB, seed)
            blobs[key] = data
            outcomes[key] = put(client, key, data)
            count += 1

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for shard in (*fleet.shards, *fleet.shards):
        count = len(outcomes)
        until(lambda count=count: len(outcomes) > count + 1, fleet.pipeline.logs)  # type: ignore[misc]
        shard.kill()
        time.sleep(1.0)
        shard.start()
    stop.set()
    for thread in threads:
        thread.join()
    assert outcomes.keys() == blobs.keys()
    assert {outcome["state"] for outcome in outcomes.values()} == {"committed"}, outcomes
    for key, data in blobs.items():
        assert client.get(f"/v1/blobs/{key}").content == data
    listed = client.get("/v1/blobs", params={"limit": 1000}).json()
    assert {entry["key"] for entry in listed["blobs"]} == blobs.keys()
    assert put(client, "copy", blobs["0/0"])["ledger"]["unique_bytes"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("fleet", [{"mode": "hybrid", "interval_seconds": 1}], indirect=True)
def test_killed_shards_leave_no_entry_of_freed_data(fleet: Fleet, client: httpx.Client) -> None:
    """GC runs by change go on after each kill; freed data are new again, and the rest is restored."""
    blobs = {f"k{number}": content(2 * MIB, number) for number in range(6)}
    for key, data in blobs.items():
        assert put(client, key, data)["state"] == "committed"
    stored = objects_bytes(fleet)
    deleted = list(blobs)[::2]
    for number, key in enumerate(deleted):
        client.delete(f"/v1/blobs/{key}").raise_for_status()
        shard = fleet.shards[number % SHARDS]
        shard.kill()
        time.sleep(1.0)
        shard.start()
    until(lambda: objects_bytes(fleet) < 0.7 * stored, fleet.pipeline.logs, seconds=150)
    for key in deleted:
        again = put(client, key, blobs[key])
        assert again["state"] == "committed"
        assert again["ledger"]["unique_bytes"] == len(blobs[key]), "an entry of deleted data was found"
    for key, data in blobs.items():
        assert client.get(f"/v1/blobs/{key}").content == data
