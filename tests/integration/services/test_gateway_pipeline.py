"""Test the gateway with a real pipeline over HTTP: Kafka, Redis, one worker with all stages."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from confluent_kafka import TopicPartition

from nearkin.cli import main
from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import Outbox, consumer, topic
from nearkin_shared.kafka.lag import WAITS
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, process, running
from tests.support.servers.pipeline import FUSED, Pipeline, store_authenticator
from tests.support.servers.servers import Kafka

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def pipeline(kafka: Any, redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("pipeline")
    unique = os.urandom(6).hex()
    tokens_file = folder / "tokens.json"
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"g{unique}.", "partitions": 2},
        "redis": {"url": redis.url, "prefix": f"g{unique}"},
        "object_store": {"url": str(folder / "objects")},
        "gateway": {"port": 0},
        "auth": {"tokens_file": str(tokens_file)},
    }
    tokens.create(tokens_file, "other-tenant", ["read"])
    with Pipeline(folder, config, services=FUSED) as made:
        yield made
        assert set(made.stop().values()) == {0}, made.logs()


@pytest.fixture(scope="module")
def gateway(pipeline: Pipeline) -> Iterator[RunningGateway]:
    with running(load(pipeline.config_file)[0]) as found:
        yield found


@pytest.fixture(scope="module")
def all_scopes(pipeline: Pipeline) -> str:
    return tokens.create(pipeline.folder / "tokens.json", "default", tokens.SCOPES)[0]


@pytest.fixture(scope="module")
def client(gateway: RunningGateway, all_scopes: str) -> Iterator[httpx.Client]:
    with gateway.client(all_scopes) as found:
        until(lambda: found.get("/v1/status/x").status_code != 401)
        yield found


def content(size: int, seed: int) -> bytes:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 64, size, np.uint8).tobytes()


def settled(client: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    """Return what became of an upload."""
    assert answer.status_code in (201, 202), answer.text
    result: dict[str, Any] = answer.json()
    deadline = time.monotonic() + 60
    while result["state"] == "pending":
        assert time.monotonic() < deadline
        result = client.get(result["status"], params={"wait": 20}).json()
    return result


def test_waiting_put_is_201_and_restored(client: httpx.Client) -> None:
    data = content(3 * MIB, 1)
    answer = client.put("/v1/blobs/a/waited", params={"wait": 60}, content=data)
    assert answer.status_code == 201, answer.text
    result = answer.json()
    assert (result["version"], result["size_bytes"], result["ledger"]["logical_bytes"]) == (1, len(data), len(data))
    assert result["ledger"]["unique_bytes"] > 0
    assert client.get(answer.headers["location"]).content == data
    assert client.get("/v1/blobs/a/waited", headers={"Range": "bytes=1000000-1000099"}).content == data[1000000:1000100]


def test_put_without_wait_is_202_then_committed(client: httpx.Client) -> None:
    answer = client.put("/v1/blobs/a/later", content=content(MIB, 2), headers={"X-Nearkin-Meta-Host": "db1"})
    assert answer.status_code == 202
    assert answer.json()["state"] == "pending"
    result = settled(client, answer)
    assert (result["state"], result["key"], result["metadata"]) == ("committed", "a/later", {"host": "db1"})
    assert answer.headers["location"] == result["status"]
    assert client.get("/v1/blobs/a/later").content == content(MIB, 2)


def test_large_upload_waits_in_the_object_store(client: httpx.Client, pipeline: Pipeline) -> None:
    """Issue I, lead 3: Kafka carries references, and the packs are deleted behind the commit."""
    folder, data = pipeline.folder / "objects" / "staging", content(20 * MIB, 9)
    answer = client.put("/v1/blobs/a/large", params={"wait": 60}, content=data)
    assert answer.status_code == 201, answer.text
    assert client.get("/v1/blobs/a/large").content == data
    until(lambda: not list(folder.glob("*-*")))
    reader = consumer(pipeline.settings, "bytes-of-frames", "test")
    parts = range(pipeline.settings.kafka.partitions)
    reader.assign([TopicPartition(topic(pipeline.settings, "frames"), part, 0) for part in parts])
    sizes, blob = [], bytes.fromhex(answer.json()["id"][:32])
    while (message := reader.poll(3.0)) is not None:
        if message.key() == blob:
            sizes.append(len(message.value() or b""))
    reader.close()
    assert 0 < sum(sizes) < 2000


def test_empty_blob_is_stored(client: httpx.Client) -> None:
    assert client.put("/v1/blobs/a/empty", params={"wait": 60}).json()["size_bytes"] == 0
    assert client.get("/v1/blobs/a/empty").content == b""


def test_second_gateway_knows_accepted_uploads(client: httpx.Client, pipeline: Pipeline) -> None:
    token = client.headers["authorization"].removeprefix("Bearer ")
    result = settled(client, client.put("/v1/blobs/a/shared", content=b"shared"))
    with running(load(pipeline.config_file)[0]) as other, other.client(token) as second:
        assert second.get(result["status"]).json()["version"] == result["version"]
        later = client.put("/v1/blobs/a/shared", content=b"shared again")
        assert settled(second, later)["version"] == result["version"] + 1


def test_wrong_digest_is_a_visible_failure(client: httpx.Client) -> None:
    """Fail an upload with a wrong digest visibly; make no version."""
    answer = client.put("/v1/blobs/a/wrong", content=content(2 * MIB, 3), headers={"X-Content-SHA256": "0" * 64})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:nearkin:problem:digest-mismatch")
    time.sleep(1)
    assert client.get("/v1/blobs/a/wrong").status_code == 404


def test_idempotency_key_holds_at_all_gateways(client: httpx.Client, pipeline: Pipeline) -> None:
    """Store repeats with one Idempotency-Key once, at whichever gateway they arrive."""
    token = client.headers["authorization"].removeprefix("Bearer ")
    data, headers = content(2 * MIB, 4), {"Idempotency-Key": "one"}
    first = client.put("/v1/blobs/a/idem", content=data, headers=headers)
    with running(load(pipeline.config_file)[0]) as other, other.client(token) as second:
        again = second.put("/v1/blobs/a/idem", content=data, headers=headers)
        result = settled(second, again)
        assert result["version"] == settled(client, first)["version"] == 1
        changed = second.put("/v1/blobs/a/idem", content=data[1:], headers=headers, params={"wait": 60})
        assert (changed.status_code, changed.json()["type"]) == (422, "urn:nearkin:problem:idempotency-key-reused")
    replay = client.put("/v1/blobs/a/idem", content=data, headers=headers, params={"wait": 60})
    assert (replay.status_code, replay.headers["idempotent-replayed"]) == (201, "true")
    assert len(client.get("/v1/blobs/a/idem/versions").json()["versions"]) == 1


def test_tenants_write_apart_and_read_apart(client: httpx.Client, gateway: RunningGateway, pipeline: Pipeline) -> None:
    token = tokens.create(pipeline.folder / "tokens.json", "other", tokens.SCOPES)[0]
    data = content(MIB, 5)
    with gateway.client(token) as other:
        until(lambda: other.get("/v1/status/x").status_code != 401)
        theirs = other.put("/v1/blobs/apart", params={"wait": 60}, content=data).json()
        assert theirs["ledger"]["unique_bytes"] > 0
        mine = client.put("/v1/blobs/apart/mine", params={"wait": 60}, content=data).json()
        assert mine["ledger"]["unique_bytes"] == theirs["ledger"]["unique_bytes"]  # no dedup across tenants
        assert client.get("/v1/blobs/apart").status_code == 404
        assert client.get(theirs["status"]).status_code == 404
        assert [entry["key"] for entry in other.get("/v1/blobs").json()["blobs"]] == ["apart"]


def test_listings_and_stats_use_workers_index(client: httpx.Client) -> None:
    for number in range(7):
        assert client.put(f"/v1/blobs/list/{number}", params={"wait": 60}, content=b"%d" % number).status_code == 201
    client.put("/v1/blobs/list/3", params={"wait": 60}, content=b"again")
    found, url = [], "/v1/blobs?prefix=list/&limit=3&versions=all"
    while url:
        page = client.get(url)
        assert page.status_code == 200, page.text
        found += [(entry["key"], entry["version"]) for entry in page.json()["blobs"]]
        url = page.links["next"]["url"] if "next" in page.links else ""
    assert found == sorted([(f"list/{number}", 1) for number in range(7)] + [("list/3", 2)])
    stats = client.get("/v1/stats").json()
    assert stats["versions"] >= 8
    assert sum(stats["parts"].values()) == stats["stored_bytes"]
    assert client.get("/v1/explain/list/3").json()["version"] == 2


def test_workers_run_the_revision_that_was_patched(client: httpx.Client) -> None:
    changed = client.patch("/v1/config", json={"features": {"algorithm": "ntransform"}}).json()
    workers: list[dict[str, Any]] = []

    def all_run_it() -> bool:
        workers[:] = client.get("/v1/workers").json()["workers"]
        services = {worker["service"] for worker in workers}
        revisions = {worker["revision"] for worker in workers}
        return services >= {"pipeline", "maintenance"} and revisions == {changed["revision"]}

    until(all_run_it, lambda: workers)
    assert all(worker["silent_seconds"] < 30 for worker in workers)
    client.put("/v1/blobs/toggled", params={"wait": 60}, content=content(MIB, 77))

    def sketches() -> list[str]:
        return list(client.get("/v1/stats").json()["sketches"])

    until(lambda: any(name.startswith("ntransform") for name in sketches()), sketches)
    client.patch("/v1/config", json={"features": {"algorithm": None}})


def test_cut_upload_is_reported_failed(client: httpx.Client, gateway: RunningGateway, pipeline: Pipeline) -> None:
    outcomes = gateway.gateway.outcomes
    before = len(outcomes)

    def body() -> Iterator[bytes]:
        yield content(20 * MIB, 6)
        time.sleep(2)  # until the first packs have references
        raise RuntimeError("the client fell over")

    with pytest.raises(RuntimeError):
        client.put("/v1/blobs/a/cut", content=body())
    until(lambda: len(outcomes) > before)
    until(lambda: not list((pipeline.folder / "objects" / "staging").glob("*-*")))
    assert client.get("/v1/blobs/a/cut").status_code == 404


def test_concurrent_uploads_all_commit(gateway: RunningGateway, client: httpx.Client, all_scopes: str) -> None:
    ended: list[dict[str, Any]] = []

    def put(start: int) -> None:
        with gateway.client(all_scopes) as mine:
            answers = [mine.put(f"/v1/blobs/many/{number}", content=b"%d" % number) for number in range(start, 200, 8)]
            ended.extend(settled(mine, answer) for answer in answers)

    threads = [threading.Thread(target=put, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 200
    assert {result["state"] for result in ended} == {"committed"}
    until(lambda: gateway.gateway.uploads.taken_count == 0)  # its slot is free once its response was sent
    until(lambda: gateway.gateway.ingest.budget.used_bytes == 0)  # type: ignore[attr-defined]


def test_streaming_160_megabytes_to_kafka_takes_bounded_memory(
    pipeline: Pipeline, all_scopes: str, tmp_path: Path
) -> None:
    total, piece = 160 * MIB, os.urandom(MIB)

    def body() -> Iterator[bytes]:
        for number in range(total // MIB):
            yield number.to_bytes(8, "big") + piece[8:]

    with process({}, tmp_path, "--config", str(pipeline.config_file)) as (child, url):
        headers = {"Authorization": f"Bearer {all_scopes}"}
        with httpx.Client(base_url=url, timeout=120, headers=headers) as client:
            assert client.put("/v1/blobs/warm", content=piece, params={"wait": 60}).status_code == 201
            memory = psutil.Process(child.pid)
            before, peak, done = memory.memory_info().rss, 0, threading.Event()

            def watch() -> None:
                nonlocal peak
                while not done.wait(0.01):
                    peak = max(peak, memory.memory_info().rss)

            watcher = threading.Thread(target=watch)
            watcher.start()
            answer = client.put("/v1/blobs/large", content=body())
            done.set()
            watcher.join()
            assert answer.status_code == 202
            assert settled(client, answer)["size_bytes"] == total
            with client.stream("GET", "/v1/blobs/large") as got:
                assert sum(len(part) for part in got.iter_raw()) == total
    # 8 MiB may be unacknowledged; the client library adds the frames that it compresses and sends.
    assert peak - before < 80 * MIB, f"{(peak - before) / MIB:.0f} MiB more than at rest"


def test_gateway_without_kafka_is_not_ready(need: Any, redis: Any, tmp_path: Path) -> None:
    kafka = need(lambda: Kafka(tmp_path / "kafka"))
    with kafka:
        unique = os.urandom(6).hex()
        changes = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"g{unique}."},
            "redis": {"url": redis.url, "prefix": f"g{unique}"},
            "object_store": {"url": str(tmp_path / "objects")},
            "storage": {"create": True},
            "gateway": {"port": 0},
        }
        with running(with_changes(Settings(), changes)) as gateway, gateway.client() as client:
            assert client.get("/readyz").status_code == 200
            kafka.stop()
            until(lambda: client.get("/readyz").status_code != 200)
            refused = client.get("/readyz")
            assert (refused.status_code, "kafka" in refused.json()["detail"]) == (503, True)
            assert client.get("/livez").status_code == 200


def test_trace_context_is_sent_with_frames(client: httpx.Client, pipeline: Pipeline) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    result = client.put(
        "/v1/blobs/traced", content=b"traced", params={"wait": 60}, headers={"traceparent": trace}
    ).json()
    bad = client.put(
        "/v1/blobs/untraced", content=b"untraced", params={"wait": 60}, headers={"traceparent": "x" * 9000}
    ).json()
    wanted = {result["id"].partition("-")[0]: [trace.encode()] * 2, bad["id"].partition("-")[0]: []}
    reader = consumer(pipeline.settings, f"trace-{os.urandom(4).hex()}", "trace")
    full = topic(pipeline.settings, "frames")
    reader.assign([TopicPartition(full, part, 0) for part in range(pipeline.settings.kafka.partitions)])
    found: dict[str, list[str | bytes | None]] = {number: [] for number in wanted}
    seen, deadline = 0, time.monotonic() + 30
    while seen < 4 and time.monotonic() < deadline:
        message = reader.poll(0.2)
        key = message.key() if message is not None else None
        if message is not None and isinstance(key, bytes) and key.hex() in found:
            seen += 1
            headers = dict(message.headers() or [])
            assert headers["ce_type"] in (b"io.nearkin.frame.v1", b"io.nearkin.end.v1")
            found[key.hex()] += [headers["traceparent"]] if "traceparent" in headers else []
    reader.close()
    assert found == wanted


def test_deletion_is_visible_at_other_gateways(
    gateway: RunningGateway, pipeline: Pipeline, client: httpx.Client, all_scopes: str
) -> None:
    for seed in (50, 51):
        result = settled(client, client.put("/v1/blobs/deleted/k", content=content(50_000, seed), params={"wait": 20}))
        assert result["state"] == "committed"
    with running(load(pipeline.config_file)[0]) as second, second.client(all_scopes) as other:
        until(lambda: other.get("/v1/blobs/deleted/k").status_code != 401)
        for _ in range(3):
            assert other.get("/v1/blobs", params={"prefix": "deleted/"}).json()["blobs"][0]["version"] == 2
            assert client.delete("/v1/blobs/deleted/k").headers["x-nearkin-versions"] == "2"
            assert other.get("/v1/blobs/deleted/k").status_code == 404
            assert other.get("/v1/blobs/deleted/k?version=1").status_code == 404
            assert other.get("/v1/blobs", params={"prefix": "deleted/", "versions": "all"}).json()["blobs"] == []
            assert other.delete("/v1/blobs/deleted/k").status_code == 404
            deleted = other.get("/v1/deleted", params={"prefix": "deleted/"}).json()["deleted"]
            assert [(entry["key"], entry["version"]) for entry in deleted] == [("deleted/k", 1), ("deleted/k", 2)]
            assert client.get("/v1/stats").json()["deleted_versions"] == 2
            assert other.post("/v1/undelete/deleted/k").status_code == 204
            assert client.get("/v1/blobs/deleted/k").content == content(50_000, 51)
    assert client.delete("/v1/blobs/deleted/k").status_code == 204
    result = settled(client, client.put("/v1/blobs/deleted/k", content=b"x" * 10_000, params={"wait": 20}))
    assert result["version"] == 3  # the committer never gives a deleted number again
    assert [v["version"] for v in client.get("/v1/blobs/deleted/k/versions").json()["versions"]] == [3]


# --- what an operator looks at ---------------------------------------------------------------------------------------


def test_lag_and_speed_are_shown_to_admins(client: httpx.Client) -> None:
    before = client.get("/v1/pipeline").json()
    assert {stage["group"].partition(".")[2] for stage in before["stages"]} == set(WAITS)
    settled(client, client.put("/v1/blobs/looked/at", content=content(MIB, 77), params={"wait": 60}))
    result: dict[str, Any] = {}
    moved: set[str] = set()  # on a busy machine the first may be at rest again by the time that the last moves

    def all_stages_idle() -> bool:
        result.update(client.get("/v1/pipeline").json())
        fast = (stage["group"] for stage in result["stages"] if (stage["records_per_second"] or 0) > 0)
        moved.update(group.rpartition(".")[2] for group in fast)
        return moved == {"chunker", "committer"} and all(stage["lag_records"] == 0 for stage in result["stages"])

    until(all_stages_idle, lambda: result["stages"], poll_seconds=0.5)
    assert result["embedded"] is False
    assert sum(minute["logical_bytes"] for minute in result["minutes"]) >= MIB


def test_garbage_outcomes_are_ignored(client: httpx.Client, pipeline: Pipeline) -> None:
    """Keep consuming outcomes after garbage: else every status would stay pending."""
    settings = load(pipeline.config_file)[0]
    outbox = Outbox(settings, "test", store_authenticator(settings))
    event = {"id": "00" * 16, "origin": "00" * 16, "state": "committed", "tenant": "t", "key": "k"}
    outbox.send("workers", b"a worker", b"[" * 100_000, {})
    for wrong in (
        b"[" * 100_000,
        b"null",
        *(json.dumps({**event, **more}).encode() for more in ({"ledger": [1]}, {"id": "no id"}, {"origin": 5})),
        json.dumps({**event, "created": "0001-01-01"}).encode(),
    ):
        for part in range(4):
            outbox.send("committed", b"%d" % part, wrong, {})
    outbox.flush()
    outbox.close()
    answer = client.put("/v1/blobs/a/heard", params={"wait": 60}, content=b"heard")
    assert answer.status_code == 201, answer.text
    assert client.get("/v1/workers").json()["workers"]
    assert client.get("/v1/pipeline").status_code == 200


def test_dead_letter_is_replayed_once_and_marked(
    client: httpx.Client, gateway: RunningGateway, pipeline: Pipeline, all_scopes: str
) -> None:
    settings = load(pipeline.config_file)[0]
    outbox = Outbox(settings, "test", store_authenticator(settings))
    outbox.send("frames", os.urandom(16), b"<script>not a message</script>", {})
    outbox.flush()
    outbox.close()
    (letter,) = until(lambda: client.get("/v1/dead").json()["letters"])
    assert (letter["stage"], letter["topic"], letter["replayed"]) == ("chunker", topic(settings, "frames"), False)
    with httpx.Client(base_url=gateway.url, headers={"Origin": gateway.url}, timeout=60) as browser:
        assert browser.post("/login", data={"token": all_scopes}).status_code == 303
        page = browser.get("/ui/pipeline").text
        assert f'data-replay="{letter["letter"]}"' in page
        assert "Not applicable" not in page
        assert "pipeline/" in page  # a worker with heartbeats
    assert client.post("/v1/dead/replay", json={"letters": [letter["letter"]]}).json() == {
        "replayed": [letter["letter"]]
    }
    found = next(entry for entry in client.get("/v1/dead").json()["letters"] if entry["letter"] == letter["letter"])
    assert found["replayed"]
    again = client.post("/v1/dead/replay", json={"letters": [letter["letter"]]})
    assert (again.status_code, "sent back already" in again.json()["detail"]) == (400, True)
    for wrong, status in (
        ({"letters": ["x"]}, 400),
        ({"letters": ["0:999999"]}, 404),
        ({"letters": []}, 400),
        ({}, 400),
    ):
        assert client.post("/v1/dead/replay", json=wrong).status_code == status


def _outsider(gateway: RunningGateway, pipeline: Pipeline, scopes: list[str]) -> str:
    """Return a token with these scopes once the gateway accepts it."""
    token = tokens.create(pipeline.folder / "tokens.json", "default", scopes)[0]
    with gateway.client(token) as client:
        until(lambda: client.get("/v1/status/x").status_code != 401)
    return token


def test_dead_letters_are_shown_and_dropped_by_operators(
    client: httpx.Client,
    gateway: RunningGateway,
    pipeline: Pipeline,
    all_scopes: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Show a dead letter within a bound and drop it, for operators, as does `dlq --server`."""

    def waiting() -> list[dict[str, Any]]:
        return [entry for entry in client.get("/v1/dead").json()["letters"] if not entry["replayed"]]

    if others := [entry["letter"] for entry in waiting()]:  # of other tests
        assert client.post("/v1/dead/drop", json={"letters": others}).json() == {"dropped": others}
    settings = load(pipeline.config_file)[0]
    outbox = Outbox(settings, "test", store_authenticator(settings))
    for _ in range(2):
        outbox.send("frames", os.urandom(16), b"\xff" * 10_000, {})
    outbox.flush()
    outbox.close()
    until(lambda: len(waiting()) == 2, waiting)
    second, first = (entry["letter"] for entry in waiting())
    shown = client.get(f"/v1/dead/letters/{first}", params={"bytes": 6}).json()
    assert shown["value"] == {"encoding": "base64", "data": "////////", "cut": True}
    assert (shown["value_bytes"], shown["dropped"], shown["stage"]) == (10_000, False, "chunker")
    assert "__connect.errors.exception.message" in {header["name"] for header in shown["headers"]}
    assert client.get(f"/v1/dead/letters/{first.replace(':', '%3A')}").json()["letter"] == first
    for path, status in (("x", 400), ("0:999999", 404), (f"{first}?bytes=1048577", 422)):
        assert client.get(f"/v1/dead/letters/{path}").status_code == status, path

    with gateway.client(_outsider(gateway, pipeline, ["read", "write", "delete", "admin"])) as outsider:
        assert outsider.get(f"/v1/dead/letters/{first}").status_code == 403
        assert outsider.post("/v1/dead/drop", json={"letters": [first]}).status_code == 403

    assert client.post("/v1/dead/drop", json={"letters": [first]}).json() == {"dropped": [first]}
    assert [entry["letter"] for entry in waiting()] == [second]
    for action in ("drop", "replay"):
        again = client.post(f"/v1/dead/{action}", json={"letters": [first]})
        assert (again.status_code, "was dropped already" in again.json()["detail"]) == (400, True)

    monkeypatch.setenv("NEARKIN_TOKEN", all_scopes)

    def command(*arguments: str) -> Any:
        capsys.readouterr()
        assert main(["--server", gateway.url, "--json", "dlq", *arguments]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    assert [entry["letter"] for entry in command("list")] == [second]
    assert command("show", second, "--bytes", "3")["value"]["data"] == "////"
    assert [entry["letter"] for entry in command("drop", second)["dropped"]] == [second]
    assert command("list") == []
    assert command("drop", "--all") == {"dropped": []}


def test_settings_change_is_audited_once(client: httpx.Client, pipeline: Pipeline, all_scopes: str) -> None:
    """Audit a change of settings once, and apply it at every gateway."""
    mark = {"block": {"level": 4}}
    assert client.patch("/v1/config", json=mark).status_code == 200
    assert client.patch("/v1/config", json={"block": {"level": None}}).status_code == 200
    time.sleep(2)  # a gateway reads its own change back from the topic
    result = client.get("/v1/audit").json()["changes"]
    assert [entry["changes"].get("block") for entry in result[:2]] == [None, mark["block"]]
    assert sum(entry["changes"].get("block") == mark["block"] for entry in result) == 1
    with running(load(pipeline.config_file)[0]) as other, other.client(all_scopes) as second:
        assert second.get("/v1/audit").json()["changes"][0] == result[0]


def test_pipeline_overview_adds_up(client: httpx.Client, gateway: RunningGateway, all_scopes: str) -> None:
    time.sleep(2.1)  # sums are kept for 2 s
    stats, reduction = client.get("/v1/stats").json(), client.get("/v1/reduction").json()["tenants"][0]
    assert reduction["logical_bytes"] == stats["logical_bytes"]
    growth = client.get("/v1/growth").json()
    assert growth["points"][-1]["logical_bytes"] == stats["logical_bytes"]
    names = {row["tenant"] for row in client.get("/v1/tenants").json()["tenants"]}
    assert {"default", "other-tenant"} <= names
    with httpx.Client(base_url=gateway.url, headers={"Origin": gateway.url}, timeout=60) as browser:
        assert browser.post("/login", data={"token": all_scopes}).status_code == 303
        for page in ("/", "/ui/blobs", "/ui/upkeep", "/ui/settings", "/ui/deleted"):
            assert browser.get(page).status_code == 200, page


def test_of_concurrent_first_puts_one_commits(client: httpx.Client) -> None:
    """Check the condition in the committer; 412 within `wait`, else a status with the reason."""
    answers: list[httpx.Response] = []

    def one(number: int) -> None:
        query = {"wait": 60} if number % 2 else {}
        body, headers = content(2000, 100 + number), {"If-None-Match": "*"}
        answers.append(client.put("/v1/blobs/only-one", content=body, headers=headers, params=query))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    refused = [answer for answer in answers if answer.status_code == 412]
    outcomes = [settled(client, answer) for answer in answers if answer.status_code != 412]
    assert len(refused) + len(outcomes) == 6
    assert sorted(outcome["state"] for outcome in outcomes) == ["committed"] + ["failed"] * (len(outcomes) - 1)
    assert {outcome["reason"] for outcome in outcomes if outcome["state"] == "failed"} <= {"precondition-failed"}
    assert len(client.get("/v1/blobs/only-one/versions").json()["versions"]) == 1


def test_pipeline_checks_conditions_of_resumable_uploads(client: httpx.Client) -> None:
    """The condition of a tus upload travels to the committer, which refuses the one that lost."""
    tus = {"Tus-Resumable": "1.0.0", "Content-Type": "application/offset+octet-stream"}
    described = {"Upload-Metadata": f"key {base64.b64encode(b'tus-first').decode()}", "If-None-Match": "*"}
    urls = [
        client.post("/v1/uploads", headers={**tus, **described, "Upload-Length": "3"}).headers["location"]
        for _ in range(2)
    ]
    answers = [client.patch(url, headers={**tus, "Upload-Offset": "0"}, content=b"abc") for url in urls]
    outcomes = [settled_upload(client, url) for url in urls]
    assert [outcome["state"] for outcome in outcomes] == ["committed", "failed"]
    assert outcomes[1]["reason"] == "precondition-failed"
    assert (answers[0].status_code, answers[1].status_code in (204, 412)) == (204, True)
    assert client.head(urls[0], headers=tus).status_code == 200
    assert client.head(urls[1], headers=tus).status_code == 412
    assert len(client.get("/v1/blobs/tus-first/versions").json()["versions"]) == 1


def settled_upload(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return the outcome of a resumable upload that was handed over."""
    result: dict[str, Any] = client.get(url).json()
    assert result["state"] == "handed-over", result
    outcome: dict[str, Any] = client.get(result["status"], params={"wait": 60}).json()
    return outcome


def test_ended_pipeline_gateway_leaves_no_thread(pipeline: Pipeline, all_scopes: str) -> None:
    """The threads that asked Kafka for a page end with the gateway."""
    before = set(threading.enumerate())
    with running(load(pipeline.config_file)[0]) as found, found.client(all_scopes) as client:
        assert client.get("/v1/pipeline").status_code == 200
        own = [thread for thread in threading.enumerate() if thread not in before]
    asked = [thread for thread in own if thread.name.startswith("nearkin-gateway-control")]
    assert asked
    assert not [thread for thread in asked if thread.is_alive()]
