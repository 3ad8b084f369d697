"""Test the servers that the other tests use: their durability and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from redis import Redis as RedisClient

from tests.support.checks.waiting import until
from tests.support.servers import programs
from tests.support.servers.kafka_server import users_producer
from tests.support.servers.s3_server import REGION
from tests.support.servers.server import ServerFailed, accepts
from tests.support.servers.servers import S3, Kafka, MissingTool, Redis, Server

GONE_SECONDS = 60.0


def make_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for made in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        made.result(20)


def produce(bootstrap: str, topic: str, values: list[bytes]) -> None:
    producer = users_producer(bootstrap)
    failed: list[Any] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda err, _: failed.append(err) if err else None)
    assert producer.flush(20) == 0
    assert failed == []


def consume(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "smoke", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        messages = consumer.consume(count, timeout=20)
        return [message.value() or b"" for message in messages]
    finally:
        consumer.close()


def s3_client(server: S3) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
    )


# --- round trips and restarts -----------------------------------------------------------------------------------------


def test_kafka_returns_produced_records(kafka: Any, topic_prefix: str) -> None:
    make_topic(kafka.bootstrap, topic_prefix + "smoke")
    produce(kafka.bootstrap, topic_prefix + "smoke", [b"a", b"b", b"c"])
    assert consume(kafka.bootstrap, topic_prefix + "smoke", 3) == [b"a", b"b", b"c"]


def test_topic_is_not_made_by_its_first_use(kafka: Any, topic_prefix: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.list_topics(topic_prefix + "none", timeout=10)
    time.sleep(0.5)
    assert topic_prefix + "none" not in admin.list_topics(timeout=10).topics


@pytest.mark.soak
def test_killed_kafka_keeps_acknowledged_records(tmp_path: Path, need: Any) -> None:
    with need(lambda: Kafka(tmp_path / "kafka")) as server:
        make_topic(server.bootstrap, "kept")
        produce(server.bootstrap, "kept", [b"%d" % number for number in range(1000)])
        port, pid = server.port, server.pid
        server.kill()
        assert not psutil.pid_exists(pid)
        assert not accepts(port)
        server.start()
        assert (server.port, server.pid) != (port, pid)
        assert server.port == port
        assert consume(server.bootstrap, "kept", 1000) == [b"%d" % number for number in range(1000)]
        server.restart()
        assert consume(server.bootstrap, "kept", 1000)[-1] == b"999"


SLOW_FSYNC = """
#include <unistd.h>
int fsync(int fd) { (void)fd; return usleep(300000); }
int fdatasync(int fd) { (void)fd; return usleep(300000); }
"""


@pytest.fixture(params=["disk", "slow disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the disk as it is, or one whose fsync takes 300 ms, as under load."""
    if request.param == "slow disk":
        library = tmp_path / "slow_fsync.so"
        compile_ = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compile_, input=SLOW_FSYNC, text=True, check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))


@pytest.mark.usefixtures("disk")
def test_killed_redis_keeps_acknowledged_writes(tmp_path: Path, need: Any) -> None:
    with need(lambda: Redis(tmp_path / "redis")) as server:
        with RedisClient.from_url(server.url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            for number in range(100):
                client.set(f"k{number}", number)
        server.kill()
        server.start()
        with RedisClient.from_url(server.url) as client:
            assert [client.get(f"k{number}") for number in range(100)] == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("program", ["versitygw", "moto"])
def test_s3_returns_objects_and_creates_once(tmp_path: Path, need: Any, program: str) -> None:
    """Return stored objects, and create a name once."""
    with need(lambda: S3(tmp_path / "s3", program=program)) as server:
        assert server.program == program
        assert server.make_bucket("smoke") == server.make_bucket("smoke")
        client = s3_client(server)
        client.put_object(Bucket="smoke", Key="a/b", Body=b"content", IfNoneMatch="*")
        with pytest.raises(client.exceptions.ClientError, match="PreconditionFailed"):
            client.put_object(Bucket="smoke", Key="a/b", Body=b"other", IfNoneMatch="*")
        server.kill()
        server.start()
        if program == "versitygw":
            with client.get_object(Bucket="smoke", Key="a/b")["Body"] as body:
                assert body.read() == b"content"
        client.close()


# --- how they end -----------------------------------------------------------------------------------------------------

OWNER = """
import sys, time
from pathlib import Path
from tests.support.servers import servers
server = getattr(servers, sys.argv[1])(Path(sys.argv[2])).start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["Kafka", "Redis", "S3"])
def test_server_ends_with_its_killed_owner(tmp_path: Path, need: Any, kind: str) -> None:
    need(lambda: {"Kafka": Kafka, "Redis": Redis, "S3": S3}[kind](tmp_path / "looked-for").command())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind, str(tmp_path / "kept")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert owner.stdout is not None
    with owner.stdout:
        server = psutil.Process(int(owner.stdout.readline()))
        assert server.is_running()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    server.wait(GONE_SECONDS)
    assert not server.is_running()


def test_server_ends_with_its_supervisor(tmp_path: Path, need: Any) -> None:
    with need(lambda: Redis(tmp_path / "redis")) as server:
        process = psutil.Process(server.pid)
        parent = process.parent()
        assert parent is not None
        assert parent.pid != os.getpid()
        parent.kill()
        process.wait(GONE_SECONDS)
        assert not server.running
        server.start()
        assert server.running


def test_folder_of_a_dead_owner_is_removed(tmp_path: Path, need: Any) -> None:
    """Remove the server's folder with its killed owner."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        server = need(lambda: Redis(tmp_path / "redis", owner_pid=owner.pid)).start()
        process = psutil.Process(server.pid)
        server.leave_to_owner()
        assert process.is_running()
        owner.kill()
    process.wait(GONE_SECONDS)
    until(lambda: not (tmp_path / "redis").exists())


class Broken(Server):
    """Ends at once, saying why; or never serves."""

    name = "broken"
    start_seconds = 1.0
    script = "print('no such device'); raise SystemExit(3)"

    def command(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", self.script]

    def ready(self) -> bool:
        return False


class Absent(Broken):
    def command(self) -> list[str]:
        return ["/nowhere/server"]


class Slow(Broken):
    script = "print('thinking', flush=True); import time; time.sleep(600)"

    def ready(self) -> bool:
        until(lambda: "thinking" in self.log.read_text())  # however long an interpreter takes to start
        return False


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Broken, "ended.*no such device"),
        (Absent, "did not start.*No such file"),
        (Slow, "not ready after 1 s.*thinking"),
    ],
)
def test_server_failing_to_start_names_reason(tmp_path: Path, kind: type[Server], reason: str) -> None:
    """Name the reason if a server does not start, and leave nothing behind."""
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServerFailed, match=f"(?s){reason}"):
        kind(tmp_path).start()
    assert set(psutil.Process().children(recursive=True)) <= children


def test_absent_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingTool, match=r"java is not installed.*default-jre-headless"):
        programs.java()
    assert programs.versitygw() is None


@pytest.fixture
def fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    return []


def test_failed_fetch_leaves_nothing(fetches: list[int]) -> None:
    """Leave nothing after a failed fetch; the next one is complete."""

    def fetch(folder: Path) -> None:
        (folder / "half").write_text("x")
        fetches.append(1)
        if len(fetches) == 1:
            raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        programs.fetch_once("thing", fetch)
    assert [path.name for path in programs.cache().iterdir()] == [".thing.lock"]
    found = programs.fetch_once("thing", fetch)
    assert [path.name for path in found.iterdir()] == ["half"]
    assert programs.fetch_once("thing", fetch) == found
    assert len(fetches) == 2
