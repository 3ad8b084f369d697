"""Test Redis as operators run it: Cluster, TLS, a restricted user, many processes at once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.errors import ConfigError, StoreUnavailable
from nearkin_shared.index.protocols import ContainerDirectories
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.background_rebuild import Rebuilder
from nearkin_shared.types import ContainerId
from tests.support.checks.waiting import until
from tests.support.conformance import IndexContract
from tests.support.conformance.index_contract import (
    FIRST,
    SECOND,
    SKETCH,
    chunk_names,
    claims,
    first_claims,
    ids,
    manifest,
    of_rank,
    rows,
    second_claims,
)
from tests.support.data import samples
from tests.support.servers.certificates import self_signed
from tests.support.servers.redis_server import RedisServer

RIGHTS = (
    "~nearkin:* +@connection +evalsha +script|load +info +scan +get +set +exists +unlink +del +incr +pexpire +time "
    "+rename +hget +hset +hdel +hmget +hgetall +zrangebylex +zadd +zrem +lrange +rpush"
)
"""As docs/how-to/operate-services.md lists them."""


def assert_works(index: RedisIndex) -> None:
    index.publish(first_claims())
    index.publish(second_claims())
    index.commit(manifest("k", 1, [(FIRST, 0), (SECOND, 1)]), 100)
    assert rows(index.locate_chunks(chunk_names("a", "dddd", "zz"))) == [(FIRST, 0), (SECOND, 1), None]
    assert rows(index.locate_segments(ids("s1", "s3"))) == [(FIRST, 0), (SECOND, 1)]
    assert rows(of_rank(index, SKETCH, 0, np.array([70, 82], np.uint64))) == [(FIRST, 0), (SECOND, 2)]
    assert index.versions_of("default", "k") == [1]
    assert [summary.container for summary in index.containers()] == [FIRST, SECOND]
    assert Rebuilder(index, lambda _: None).run_once()
    assert not index.check()
    index.close()


# --- a Cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """Three servers that share the slots."""
    options = "--cluster-enabled", "yes", "--cluster-node-timeout", "2000"
    servers = [RedisServer(tmp_path_factory.mktemp(f"node{n}"), *options) for n in range(3)]
    started = []
    try:
        for server in servers:
            started.append(server.start())
        command = ["redis-cli", "--cluster", "create", *(f"127.0.0.1:{server.port}" for server in servers)]
        made = subprocess.run([*command, "--cluster-yes"], capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == 0, made.stdout[-500:]
        until(lambda: all(settled(server) for server in servers))
        yield servers
    finally:
        for server in started:
            server.kill()


def settled(server: RedisServer) -> bool:
    with redis.Redis.from_url(server.url) as client:
        found = client.execute_command("CLUSTER INFO")
        return found["cluster_state"] == "ok" and found["cluster_slots_ok"] == str(1 << 14)


def flush(servers: list[RedisServer]) -> None:
    for server in servers:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()


class TestClusterIndex(IndexContract):
    @pytest.fixture
    def index(self, cluster: list[RedisServer]) -> Iterator[RedisIndex]:
        flush(cluster)
        index = RedisIndex(cluster_settings(cluster), samples.DOMAIN)
        yield index
        index.close()


def cluster_settings(cluster: list[RedisServer]) -> RedisSettings:
    return RedisSettings(url=cluster[0].url.replace("redis://", "redis+cluster://").removesuffix("/0"))


def test_entries_are_spread_over_a_cluster(cluster: list[RedisServer]) -> None:
    flush(cluster)
    assert_works(RedisIndex(cluster_settings(cluster), samples.DOMAIN))
    connections = []
    for server in cluster:
        with redis.Redis.from_url(server.url) as client:
            connections.append(client.dbsize())
    assert min(connections) > sum(connections) / 10


def test_entries_are_withdrawn_from_all_cluster_nodes(cluster: list[RedisServer]) -> None:
    """Chunks by name, super-features and segments by search; the other container's stay."""
    flush(cluster)
    index = RedisIndex(cluster_settings(cluster), samples.DOMAIN)
    one, other = (
        claims(
            ContainerId((1 << 40) + n),
            [f"{n} {i}" for i in range(200)],
            [f"s{n}", f"t{n}"],
            [[n, i + 1] for i in range(200)],
        )
        for n in (1, 2)
    )
    index.publish(other)
    before = index.entries()
    index.publish(one)
    dead = int(one.directory.container)
    index.withdraw({dead: None}, {}, [dead], ContainerDirectories({dead: one.directory}.get))
    assert index.entries() == before
    index.close()


def test_emptied_cluster_node_is_noticed(cluster: list[RedisServer]) -> None:
    """Keep the entries of the servers that were not emptied."""
    answers = []
    flush(cluster)
    one = RedisIndex(cluster_settings(cluster), samples.DOMAIN)
    other = RedisIndex(cluster_settings(cluster), samples.DOMAIN)
    for number in range(3):
        one.publish(first_claims())
        assert Rebuilder(one, lambda _: None).run_once()
        published = rows(one.locate_chunks(chunk_names("a")))
        with redis.Redis.from_url(cluster[number].url) as client:
            client.flushall()
        names = np.concatenate([samples.names_of([1], f"n{n}") for n in range(200)])  # some in every partition
        assert not other.locate_chunks(names)[1].any()
        assert other.needs_rebuild
        answers.append(rows(one.locate_chunks(chunk_names("a"))))
    assert sorted(answers, key=str) == sorted([[None], [None], published], key=str), "its server, or the epoch's"
    one.close()
    other.close()


# --- TLS, rights, sockets -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls_is_checked_both_ways(certificates: Path, tmp_path: Path) -> None:
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    files = "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert
    plain = RedisServer(tmp_path)
    port = plain.port
    server = RedisServer(tmp_path, "--port", "0", "--tls-port", str(port), *files)
    server.port = port
    server.ready = lambda: b"+PONG" in tls_ping(port, cert, key)  # type: ignore[method-assign]
    with server:
        url = f"rediss://127.0.0.1:{port}/0"
        assert_works(RedisIndex(RedisSettings(url=url, ca_file=cert, cert_file=cert, key_file=key), samples.DOMAIN))
        halves: list[dict[str, Any]] = [{"cert_file": cert, "key_file": key}, {"ca_file": cert}]
        for lacking in halves:  # neither proves itself
            with pytest.raises(Exception, match=r"(?i)certificate|ssl|closed"):
                RedisIndex(replace(RedisSettings(url=url), **lacking), samples.DOMAIN, retries=0)


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_missing_tls_file_names_the_setting(name: str, certificates: Path, tmp_path: Path) -> None:
    """Name the setting: the library's `Error 2 connecting to ...` looks like an outage."""
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    files: dict[str, Any] = {"ca_file": cert, "cert_file": cert, "key_file": key, name: str(tmp_path / "none.pem")}
    with pytest.raises(ConfigError, match=rf'^redis\.{name} ".*none\.pem": No such file'):
        RedisIndex(replace(RedisSettings(url="rediss://127.0.0.1:1/0"), **files), samples.DOMAIN)
    (tmp_path / "none.pem").write_text("no certificate")
    if name != "key_file":
        with pytest.raises(ConfigError, match=rf"^redis\.{name} .*: contains no certificates in PEM"):
            RedisIndex(replace(RedisSettings(url="rediss://127.0.0.1:1/0"), **files), samples.DOMAIN)


def tls_ping(port: int, cert: str, key: str) -> bytes:
    command = ["redis-cli", "-p", str(port), "--tls", "--cacert", cert, "--cert", cert, "--key", key, "PING"]
    return b"+" + subprocess.run(command, capture_output=True, timeout=5, check=False).stdout


def test_restricted_user_suffices(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "nearkin", "on", ">s3same", *RIGHTS.split())
        login = RedisSettings(url=server.url, username="nearkin", password="s3same")
        assert_works(RedisIndex(login, samples.DOMAIN))
        with pytest.raises(ConfigError, match="lists the rights"):
            RedisIndex(replace(login, prefix="other"), samples.DOMAIN)


def test_two_stores_share_a_server_by_prefix(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        one = RedisIndex(RedisSettings(url=server.url, prefix="one"), samples.DOMAIN)
        two = RedisIndex(RedisSettings(url=server.url, prefix="two*"), samples.DOMAIN)
        one.publish(first_claims())
        assert rows(two.locate_chunks(chunk_names("a"))) == [None]
        assert_works(two)  # sweeps
        assert rows(one.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
        one.close()


def test_index_without_domain_locates_nothing(tmp_path: Path) -> None:
    """Locate nothing without a domain; tenants get views."""
    with RedisServer(tmp_path) as server:
        index = RedisIndex(RedisSettings(url=server.url))
        tenant = index.for_domain(samples.DOMAIN)
        tenant.publish(first_claims())
        assert rows(tenant.locate_chunks(chunk_names("a"))) == [(FIRST, 0)]
        assert rows(index.locate_chunks(chunk_names("a"))) == [None]
        assert list(index.containers()) == []
        assert index.container_ids().tolist() == [FIRST]
        assert [summary.container for summary in tenant.containers()] == [FIRST]
        index.close()


def test_unix_socket_works(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--unixsocket", str(tmp_path / "s")):
        assert_works(RedisIndex(RedisSettings(url=f"unix://{tmp_path / 's'}?db=1"), samples.DOMAIN))


# --- many processes -------------------------------------------------------------------------------------------------

PUBLISH = """
import json, random, sys
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.types import ContainerId
from tests.support.data import samples
from tests.support.conformance.index_contract import claims, manifest
url, number = sys.argv[1], int(sys.argv[2])
index = RedisIndex(RedisSettings(url=url), samples.DOMAIN)
print("ready", flush=True)
sys.stdin.readline()
order = list(range(24))
random.Random(number).shuffle(order)
for n in order + order[:6]:
    chunks = [f"shared{i}" for i in range(40)] + [f"own{n}-{i}" for i in range(40)]
    found = [[i + 1, n * 100 + i + 1] for i in range(80)]
    index.publish(claims(ContainerId((1 << 40) + n), chunks, ["same", f"s{n}"], found))
    index.commit(manifest("k", n + 1, [(ContainerId((1 << 40) + n), 0), (ContainerId(1 << 40), 1)]), 10)
spans = [(ContainerId((1 << 40) + n), 80, samples.DOMAIN) for n in range(24)]
print(json.dumps(index.epochs.first_numbers(index.epochs.current, spans)), flush=True)
"""


@pytest.mark.soak
def test_eight_processes_that_publish_the_same_containers_agree(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        command = [sys.executable, "-c", PUBLISH, server.url]
        workers = [
            subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for n in range(8)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        numbers = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
        assert all(worker.returncode == 0 for worker in workers)
        assert all(found == numbers[0] for found in numbers)
        spans = sorted(numbers[0])
        assert all(b - a >= 80 for a, b in pairwise(spans))
        index = RedisIndex(RedisSettings(url=server.url), samples.DOMAIN)
        shared = rows(index.locate_chunks(chunk_names(*[f"shared{i}" for i in range(40)])))
        assert [place[1] for place in shared if place] == list(range(40))
        for n in range(24):
            own = rows(index.locate_chunks(chunk_names(*[f"own{n}-{i}" for i in range(40)])))
            assert own == [((1 << 40) + n, 40 + i) for i in range(40)]
        entries = index.entries()
        assert {name: len(entries[name]) for name in ("chunks", "segments", "features")} == {
            "chunks": 40 + 24 * 40,
            "segments": 1 + 24,
            "features": 80 + 24 * 80,
        }
        assert index.versions_of("default", "k") == list(range(1, 25))
        index.close()


# --- a failover -----------------------------------------------------------------------------------------------------


class Address:
    """A port that leads to the current primary; open connections keep their server."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listening, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.server.port))
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


def test_failover_closes_replica_connections(tmp_path: Path) -> None:
    """Close connections to a former primary.

    It answers reads and refuses writes as long as the connection is open.
    """
    with RedisServer(tmp_path / "a") as before, RedisServer(tmp_path / "b") as after:
        address = Address(before)
        index = RedisIndex(RedisSettings(url=address.url), samples.DOMAIN, retries=0)
        try:
            index.publish(first_claims())
            with redis.Redis.from_url(after.url) as new, redis.Redis.from_url(before.url) as old:
                new.execute_command("REPLICAOF", "127.0.0.1", str(before.port))
                until(lambda: new.info("replication")["master_link_status"] == "up")
                new.execute_command("REPLICAOF", "NO", "ONE")
                old.execute_command("REPLICAOF", "127.0.0.1", str(after.port))
            address.server = after
            with pytest.raises(StoreUnavailable, match=r"read only replica.*repeated"):
                index.publish(second_claims())
            index.publish(second_claims())
            assert_works(index)
        finally:
            index.close()
            address.close()
