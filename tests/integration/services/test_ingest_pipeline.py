"""Test the way from a user's topic to the client with real Kafka, Redis and processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import nearkin
from nearkin.client.aio import AsyncRemoteStore
from nearkin.client.sync import RemoteStore
from nearkin.store import open_store
from nearkin_gateway.auth import tokens
from nearkin_shared.config.loader import load
from nearkin_shared.errors import AccessDenied, BadInput, NotFound
from tests.support.checks.commands import new_store
from tests.support.checks.waiting import until
from tests.support.data.samples import noise
from tests.support.servers.gateways import RunningGateway, running
from tests.support.servers.kafka_server import users_producer
from tests.support.servers.pipeline import Pipeline

USERS = f"users-{os.urandom(6).hex()}"


@pytest.fixture(scope="module")
def pipeline(kafka: Any, redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("ingest")
    unique = os.urandom(6).hex()
    tokens_file = folder / "tokens.json"
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"i{unique}.", "partitions": 2},
        "redis": {"url": redis.url, "prefix": f"i{unique}"},
        "object_store": {"url": str(folder / "objects")},
        "ingest": {"topics": [f"{USERS}=team"], "dataref_prefix": "incoming/"},
        "gateway": {"port": 0},
        "auth": {"tokens_file": str(tokens_file)},
    }
    tokens.create(tokens_file, "other-tenant", ["read"])
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(USERS, 2, 1, config={"max.message.bytes": "9000000"})])[USERS].result(30)
    (folder / "objects" / "incoming").mkdir(parents=True)
    with Pipeline(folder, config) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(pipeline: Pipeline) -> Iterator[RunningGateway]:
    with running(load(pipeline.config_file)[0]) as found:
        yield found


@pytest.fixture(scope="module")
def token(pipeline: Pipeline) -> str:
    return tokens.create(pipeline.folder / "tokens.json", "team", tokens.SCOPES)[0]


@pytest.fixture(scope="module")
def store(gateway: RunningGateway, token: str) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url, token, commit_seconds=90) as opened:
        until(lambda: allowed(opened))  # the gateway looks at its tokens once a second
        yield opened


@pytest.fixture(scope="module")
def ingest(pipeline: Pipeline) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the ingest worker; it runs until the end, or until it is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nearkin_ingest", "--config", str(pipeline.config_file)]
        with (pipeline.folder / "ingest.log").open("ab") as log:
            started.append(subprocess.Popen([*command, "--worker", "w1", "--verbose"], stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (pipeline.folder / "ingest.log").read_text()


def allowed(store: RemoteStore) -> bool:
    try:
        store.versions("nothing")
    except AccessDenied:
        return False
    return True


def produce(
    pipeline: Pipeline, records: Sequence[tuple[bytes | None, bytes | None, list[tuple[str, str | bytes | None]]]]
) -> None:
    bootstrap = pipeline.settings.kafka.bootstrap_servers
    producer = users_producer(bootstrap, message_max_bytes=10**7)
    for key, value, headers in records:
        producer.produce(USERS, value, key, headers=headers)
    assert producer.flush(30) == 0


def test_records_are_restored_in_written_order(
    pipeline: Pipeline, store: RemoteStore, ingest: Callable[[], subprocess.Popen[bytes]]
) -> None:
    ingest()
    large, object_bytes = noise(4_000_000, "record").tobytes(), noise(3_000_000, "object").tobytes()
    (pipeline.folder / "objects" / "incoming" / "dump").write_bytes(object_bytes)
    versions = [large[:600_000] + b"%04d" % number + large[600_000:700_000] for number in range(12)]
    produce(
        pipeline,
        [
            *((b"many", value, []) for value in versions),
            (b"large", large, [("ce_id", b"7"), ("ce_source", "/quelle/ä".encode()), ("content-type", b"a/b")]),
            (b"claimed", None, [("dataref", b"incoming/dump")]),
            (b"empty", b"", []),
        ],
    )
    until(lambda: len(store.versions(all_versions=True)) >= 15)
    assert store.get("large").read() == large
    assert store.get("claimed").read() == object_bytes
    assert store.get("empty").read() == b""
    metadata = store.info("large").metadata
    assert {"ce_id": "7", "ce_source": "/quelle/ä", "content-type": "a/b"}.items() <= metadata.items()
    assert [store.get("many", number + 1).read() for number in range(12)] == versions
    with nearkin.connect(store.url, tokens.create(pipeline.folder / "tokens.json", "other", ["read"])[0]) as foreign:
        until(lambda: allowed(foreign))
        assert foreign.versions() == []
        with pytest.raises(NotFound):
            foreign.get("large")


def test_killed_worker_commits_each_record_once(
    pipeline: Pipeline, store: RemoteStore, ingest: Callable[[], subprocess.Popen[bytes]]
) -> None:
    values = {f"kill/{number:03}": noise(50_000, f"kill{number}").tobytes() for number in range(120)}
    process = ingest()
    for start in range(0, 120, 30):
        produce(pipeline, [(key.encode(), values[key], []) for key in list(values)[start : start + 30]])
        time.sleep(0.3 + start / 100)
        process.kill()
        process.wait()
        process = ingest()
    until(lambda: len(store.versions("kill/")) == 120, seconds=90)
    time.sleep(3)  # for a second commit of any of them
    found = store.versions("kill/", all_versions=True)
    assert [(info.key, info.version) for info in found] == [(key, 1) for key in sorted(values)]
    assert all(store.get(key).read() == value for key, value in values.items())


def test_dead_letter_is_replayed_once_storable(
    pipeline: Pipeline, store: RemoteStore, ingest: Callable[[], subprocess.Popen[bytes]]
) -> None:
    produce(pipeline, [(b"late", None, [("dataref", b"incoming/late")])])

    def dlq(*arguments: str) -> Any:
        command = [sys.executable, "-m", "nearkin.cli", "--config", str(pipeline.config_file), "dlq", *arguments]
        done = subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=True, env=bare())
        return json.loads(done.stdout)

    until(lambda: any("incoming/late" in letter["message"] for letter in dlq("list")))
    # The first of them: a consumer that loses its partition before the commit leaves a second letter.
    letter, *_ = (letter for letter in dlq("list", "--topic", USERS) if "incoming/late" in letter["message"])
    (pipeline.folder / "objects" / "incoming" / "late").write_bytes(b"there now")
    assert [found["letter"] for found in dlq("replay", letter["letter"])["replayed"]] == [letter["letter"]]
    until(lambda: bool(store.versions("late")))
    assert store.get("late").read() == b"there now"
    assert letter["letter"] not in [found["letter"] for found in dlq("list")]


def bare() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEARKIN_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


# --- the client and the real gateway ---------------------------------------------------------------------------------


def test_client_puts_gets_and_queries(store: RemoteStore, tmp_path: Path) -> None:
    data = noise(2_500_000, "put").tobytes()
    (tmp_path / "file").write_bytes(data)
    result = store.put("c/one", tmp_path / "file", metadata={"Grüße A%": "wert\n", "b": " x "})
    assert (result.info.version, result.info.size_bytes) == (1, len(data))
    assert result.info.metadata == {"Grüße A%": "wert\n", "b": " x "}
    second = store.put("c/one", data[:1_000_000] + b"between" + data[1_000_000:])
    assert second.info.version == 2
    assert second.ledger.unique_bytes < len(data) // 5
    assert store.get("c/one", 1).read() == data
    assert store.get("c/one", 1, start=999_999, stop=1_000_005).read() == data[999_999:1_000_005]
    assert [info.version for info in store.versions("c/", all_versions=True)] == [1, 2]
    assert store.explain("c/one", 2).delta_chunks + store.explain("c/one", 2).duplicate_chunks > 0
    assert store.stats().versions >= 2
    with pytest.raises(BadInput, match="SHA-256"):
        store.put("c/one", data, sha256=bytes(32))
    with pytest.raises(NotFound, match=r"c/one.*9"):
        store.info("c/one", 9)
    many = [(f"c/many/{number}", b"%d" % number) for number in range(20)]
    assert [found.info.key for found in store.put_many(many)] == [key for key, _ in many]
    for key in ("..", "a//b/", "versions", "x/versions", "ä ö%2F?#&=+"):
        assert store.put(key, key.encode()).info.key == key
        assert store.get(key).read() == key.encode()


def test_hot_settings_are_changed_by_the_client(store: RemoteStore) -> None:
    assert store.config()["settings"]["features"]["algorithm"] == "finesse"
    assert store.change_config({"features": {"algorithm": "ntransform"}})["settings"]["features"]["algorithm"] == (
        "ntransform"
    )
    with pytest.raises(BadInput, match="fineese"):
        store.change_config({"features": {"algorithm": "fineese"}})
    store.change_config({"features": {"algorithm": "finesse"}})


def test_asyncio_talks_to_the_same_gateway(gateway: RunningGateway, store: RemoteStore, token: str) -> None:
    async def work(opened: AsyncRemoteStore) -> None:
        results = await asyncio.gather(*(opened.put(f"async/{number}", b"%d" % number * 1000) for number in range(8)))
        assert [result.info.version for result in results] == [1] * 8
        assert await (await opened.get("async/7")).read() == b"7" * 1000

    async def run() -> None:
        async with nearkin.connect_async(gateway.url, token, commit_seconds=60) as opened:
            await work(opened)

    asyncio.run(run())


def test_commands_print_the_same_of_a_server_as_of_a_store(
    gateway: RunningGateway, store: RemoteStore, token: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(noise(400_000, "cli").tobytes())
    new_store(tmp_path / "store")

    def command(*arguments: str | Path, local: bool) -> Any:
        where = {"NEARKIN_STORE": str(tmp_path / "store")}
        env = bare() | (where if local else {"NEARKIN_SERVER": gateway.url, "NEARKIN_TOKEN": token})
        run = [sys.executable, "-m", "nearkin.cli", "--json", *arguments]
        done = subprocess.run(run, capture_output=True, timeout=90, check=False, env=env)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    calls: list[tuple[str | Path, ...]] = [
        ("put", "cli/a", tmp_path / "file", "--meta", "x=y"),
        ("get", "cli/a", "-o", tmp_path / "out"),
        ("ls", "cli/"),
        ("info", "cli/a"),
        ("explain", "cli/a"),
        ("stats",),
        ("config",),
    ]
    for call in calls:
        found, expected = command(*call, local=False), command(*call, local=True)
        if call[0] == "config":  # by name, each with value and source
            assert {"features.algorithm", "block.level"} <= set(found) & set(expected)
            assert token not in json.dumps(found)
        elif isinstance(found, list):
            assert [list(entry) for entry in found] == [list(entry) for entry in expected]
        else:
            assert list(found) == list(expected), call
    assert (tmp_path / "out").read_bytes() == (tmp_path / "file").read_bytes()
    with open_store(tmp_path / "store") as local_store:
        assert local_store.info("cli/a").digest == store.info("cli/a").digest
