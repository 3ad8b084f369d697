"""Test listing after write: a listing that begins after an acknowledged put shows it."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearkin.store import open_store
from nearkin_shared.config.loader import load
from tests.support.data.stores import process
from tests.support.servers.gateways import RunningGateway, embedded, running
from tests.support.servers.pipeline import Pipeline
from tests.support.servers.redis_server import RedisServer

Version = tuple[str, int]
KEYS = tuple(f"{folder}/{name}" for folder in ("a", "b/c", "ключ") for name in ("x", "x.y", "z"))
WRITERS, LISTERS, PUTS = 3, 2, 12

_LISTER = """
import json, sys
from nearkin.store import open_store
for line in sys.stdin:
    with open_store(sys.argv[1], read_only=True) as store:
        print(json.dumps([(info.key, info.version) for info in store.versions(all_versions=True)]), flush=True)
"""


class Acknowledged:
    """Versions that were acknowledged. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: set[Version] = set()

    def add(self, version: Version) -> None:
        with self._lock:
            self._versions.add(version)

    def snapshot(self) -> set[Version]:
        with self._lock:
            return set(self._versions)


def put(client: httpx.Client, key: str, body: bytes, acknowledged: Acknowledged) -> None:
    answer = client.put(f"/v1/blobs/{key}", content=body, params={"wait": 60})
    assert answer.status_code == 201, answer.text
    acknowledged.add((key, answer.json()["version"]))


def listed(client: httpx.Client, limit: int, prefix: str = "", versions: str = "all") -> set[Version]:
    """Return all pages of a listing."""
    found: set[Version] = set()
    parameters: dict[str, Any] = {"prefix": prefix, "limit": limit, "versions": versions}
    while True:
        answer = client.get("/v1/blobs", params=parameters)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found |= {(info["key"], info["version"]) for info in page["blobs"]}
        if page["next"] is None:
            return found
        parameters["after"] = page["next"]


def check_pages(client: httpx.Client, acknowledged: Acknowledged, draw: random.Random) -> None:
    """List every version, one prefix, and the newest: each shows all acknowledged before."""
    before = acknowledged.snapshot()
    assert before <= listed(client, draw.randint(1, 7))
    before, prefix = acknowledged.snapshot(), draw.choice(("a/", "b/", "ключ/x", ""))
    assert {one for one in before if one[0].startswith(prefix)} <= listed(client, draw.randint(1, 7), prefix)
    before = acknowledged.snapshot()
    newest = dict(listed(client, draw.randint(1, 7), versions="newest"))
    assert all(newest[key] >= version for key, version in before)


def write_and_list(
    clients: Callable[[], httpx.Client], acknowledged: Acknowledged, checks: list[Callable[[random.Random], None]]
) -> None:
    """Put from several threads; meanwhile list from others until all is put."""
    over = threading.Event()

    def write(number: int) -> None:
        draw = random.Random(number)
        with clients() as client:
            for _ in range(PUTS):
                put(client, draw.choice(KEYS), draw.randbytes(draw.choice((0, 100, 40_000))), acknowledged)

    def check(number: int) -> int:
        draw, count = random.Random(100 + number), 0
        while not over.is_set() or not count:
            checks[number % len(checks)](draw)
            count += 1
        return count

    with ThreadPoolExecutor(WRITERS + LISTERS * len(checks)) as threads:
        checking = [threads.submit(check, number) for number in range(LISTERS * len(checks))]
        try:
            for writing in [threads.submit(write, number) for number in range(WRITERS)]:
                writing.result(120)
        finally:
            over.set()
        assert all(one.result(60) > 0 for one in checking)


@contextmanager
def listing_process(root: Path) -> Iterator[Callable[[], set[Version]]]:
    """Yield what lists a store in a process of its own."""
    with process(_LISTER, root) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        lock = threading.Lock()

        def listing() -> set[Version]:
            with lock:
                print("list", file=child.stdin, flush=True)
                line = child.stdout.readline()  # type: ignore[union-attr]
            return {(key, version) for key, version in json.loads(line)}

        yield listing
        child.stdin.close()
        assert child.wait(30) == 0


def test_embedded_listing_shows_acknowledged_puts(tmp_path: Path) -> None:
    """List every acknowledged put in pages of an embedded gateway and in another process."""
    acknowledged = Acknowledged()
    with running(embedded(tmp_path / "s")) as gateway, listing_process(tmp_path / "s") as listing:

        def check_other_process(_: random.Random) -> None:
            before = acknowledged.snapshot()
            assert before <= listing()

        with gateway.client() as client:
            put(client, KEYS[0], b"first", acknowledged)
            checks = [lambda draw: check_pages(client, acknowledged, draw), check_other_process]
            write_and_list(gateway.client, acknowledged, checks)
            assert listed(client, 5) == acknowledged.snapshot() == listing()
    assert len(acknowledged.snapshot()) == WRITERS * PUTS + 1


def test_command_listing_shows_acknowledged_puts(tmp_path: Path) -> None:
    """List a version in another process once `put` returned, before the store is closed."""
    with open_store(tmp_path / "s", create=True) as store, listing_process(tmp_path / "s") as listing:
        put_before: set[Version] = set()
        for number, key in enumerate((*KEYS, *KEYS)):
            put_before.add((key, store.put(key, bytes([number]) * 100).info.version))
            assert listing() == put_before


@pytest.fixture
def redis_of_test(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test restarts; it keeps an append-only file."""
    with RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def pipeline(kafka: Any, redis_of_test: RedisServer, tmp_path: Path) -> Iterator[Pipeline]:
    config: dict[str, dict[str, object]] = {
        "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": f"l{os.urandom(6).hex()}.", "partitions": 2},
        "redis": {"url": redis_of_test.url},
        "object_store": {"url": str(tmp_path / "objects")},
        "gateway": {"port": 0},
    }
    with Pipeline(tmp_path / "pipeline", config) as made:
        yield made
        assert set(made.stop().values()) == {0}, made.logs()


def test_pipeline_listing_shows_acknowledged_puts(pipeline: Pipeline, redis_of_test: RedisServer) -> None:
    """List every put at both gateways after its 201, also after a restart of Redis."""
    settings, acknowledged = load(pipeline.config_file)[0], Acknowledged()
    with running(settings) as one, running(settings) as other, one.client() as here, other.client() as there:
        put(here, KEYS[0], b"first", acknowledged)
        gateways: list[RunningGateway] = [one, other]
        checks = [
            lambda draw: check_pages(here, acknowledged, draw),
            lambda draw: check_pages(there, acknowledged, draw),
        ]
        write_and_list(lambda: random.choice(gateways).client(), acknowledged, checks)
        redis_of_test.kill()
        redis_of_test.start()
        for client in (here, there):
            assert listed(client, 5) == acknowledged.snapshot()
    assert len(acknowledged.snapshot()) == WRITERS * PUTS + 1
