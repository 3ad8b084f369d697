"""Chaos: the whole pipeline while its parts die. Invariant: what is random comes from one seed, which is printed.

Blobs are put through the gateway by several clients, each with an idempotency key, tried again as a client would.
Meanwhile workers and gateway are SIGKILLed, Kafka is restarted, Redis emptied and killed, the S3 server stopped.
Afterwards: every 201 and every 202 restores byte for byte, nothing is there twice, and every partition moves.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis as redis_client
from confluent_kafka import Consumer, TopicPartition

from nearkin.runners.kafka.clients import consumer, group, topic
from nearkin.testing.pipeline import GATEWAY, Pipeline
from nearkin.testing.server import free_port
from nearkin.testing.servers import S3, Kafka, Redis

CLIENTS = 4
TRY_SECONDS_MAX = 120.0
"""On a busy machine a gateway that was killed is back after some 10 s."""
SETTLE_SECONDS_MAX = 240.0
S3_AWAY_SECONDS = 10.0
REDIS_AWAY_SECONDS = 2.0
VICTIMS = ("chunker", "dedup", "resemblance", "delta", GATEWAY)
GROUPS = (
    ("chunker", "frames"),
    ("dedup", "segments"),
    ("resemblance", "fresh"),
    ("delta", "paired"),
    ("committer", "placed"),
)


@dataclass(slots=True)
class Put:
    """What one client was told about one blob."""

    key: str
    digest: str
    size_bytes: int
    created: int | None = None
    """The version of a 201."""
    accepted: list[str] = field(default_factory=list)
    """The ids of 202s."""
    cut: int = 0
    """Tries without an answer."""


@dataclass(slots=True)
class Report:
    """What came of a run; `problems` is empty when all that was promised was kept."""

    seed: int
    blobs: int
    kills: dict[str, int] = field(default_factory=dict)
    created: int = 0
    accepted: int = 0
    cut: int = 0
    seconds: float = 0.0
    settle_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def content(generator: np.random.Generator, pool: list[bytes]) -> bytes:
    """Return a blob: empty, tiny, or up to a few MiB; often an edited copy of an earlier one."""
    size = int(min(6_000_000, generator.lognormal(11.5, 2.0))) if generator.random() > 0.05 else 0
    if pool and generator.random() < 0.6:
        data = bytearray(pool[int(generator.integers(len(pool)))])
        for _ in range(max(1, len(data) // 200_000)):
            at = int(generator.integers(max(1, len(data))))
            data[at : at + 5] = generator.integers(0, 256, int(generator.integers(0, 300)), np.uint8).tobytes()
        return bytes(data)
    return generator.integers(0, 256, size, np.uint8).tobytes()


class Chaos:
    """One run."""

    def __init__(self, folder: Path, seed: int, blobs: int, kills: int, say: Callable[[str], None]) -> None:
        self.report = Report(seed, blobs)
        self._say = say
        self._kills = kills
        self._random = random.Random(seed)
        generator = np.random.default_rng(seed)
        self._blobs: list[bytes] = []
        for _ in range(blobs):
            self._blobs.append(content(generator, self._blobs[-20:]))
        self._folder = folder
        self._done = 0
        self._lock = threading.Lock()
        self._port = free_port()
        self._kafka, self._redis, self._s3 = Kafka(folder / "kafka"), Redis(folder / "redis"), S3(folder / "s3")

    def run(self) -> Report:
        """Run, settle, check."""
        started = time.monotonic()
        self._say(f"seed {self.report.seed}: {self.report.blobs} blobs, {self._kills} kills")
        with self._kafka, self._redis, self._s3, self._pipeline() as pipeline:
            pipeline.start(GATEWAY)
            self._ready()
            stop = threading.Event()
            killer = threading.Thread(target=self._kill, args=(pipeline, stop), name="chaos")
            killer.start()
            with ThreadPoolExecutor(CLIENTS) as clients:
                puts = list(clients.map(self._put, range(len(self._blobs))))
            killer.join()
            self._say(f"all put after {time.monotonic() - started:.0f} s; settling")
            settling = time.monotonic()
            self._ready()
            self._check(puts)
            self._check_flow(pipeline)
            self.report.settle_seconds = time.monotonic() - settling
            codes = pipeline.stop()
            if any(code not in (0, -15) for code in codes.values()):
                self.report.problems.append(f"workers ended with {codes}")
        self.report.seconds = time.monotonic() - started
        return self.report

    def _pipeline(self) -> Pipeline:
        bucket = self._s3.make_bucket("chaos")
        return Pipeline(
            self._folder / "pipeline",
            {
                "kafka": {
                    "bootstrap_servers": self._kafka.bootstrap,
                    "topic_prefix": "chaos.",
                    "partitions": 2,
                    "upload_idle_seconds": 20,
                    "session_timeout_ms": 6000,
                },
                "redis": {"url": self._redis.url},
                "object_store": {
                    "url": f"s3://{bucket}/store",
                    "endpoint": self._s3.endpoint,
                    "access_key_id": self._s3.access_key_id,
                    "secret_access_key": self._s3.secret_access_key,
                    "allow_http": True,
                },
                "gateway": {"port": self._port},
            },
        )

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _ready(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{self._url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("the gateway was not ready within 60 s")
            time.sleep(0.1)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _put(self, number: int) -> Put:
        data = self._blobs[number]
        put = Put(f"chaos/{number}", hashlib.sha256(data).hexdigest(), len(data))
        draw = random.Random(self.report.seed * 100_003 + number)
        url = f"{self._url}/v1/blobs/{put.key}"
        headers = {"Idempotency-Key": f"{self.report.seed}-{number}", "X-Content-SHA256": put.digest}
        deadline = time.monotonic() + TRY_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                answer = httpx.put(
                    url,
                    content=_pieces(data),
                    params={"wait": draw.choice((0, 5))},
                    headers=headers,
                    timeout=httpx.Timeout(60, connect=2),
                )
            except httpx.HTTPError:
                put.cut += 1
                time.sleep(draw.uniform(0.1, 0.6))
                continue
            if answer.status_code == 201:
                put.created = answer.json()["version"]
                break
            if answer.status_code == 202:
                put.accepted.append(answer.json()["id"])
                break
            put.cut += 1
            time.sleep(draw.uniform(0.1, 0.6))
        with self._lock:
            self._done += 1
        return put

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _kill(self, pipeline: Pipeline, stop: threading.Event) -> None:
        """Spread the deaths over the puts: each has a share of them as its time."""
        events: list[str] = [self._random.choice(VICTIMS) for _ in range(self._kills)]
        for special in ("kafka", "kafka", "redis-flush", "redis-kill", "s3"):
            events.insert(self._random.randrange(len(events) + 1), special)
        for position, victim in enumerate(events):
            wanted = position * len(self._blobs) // (len(events) + 1)
            waited = time.monotonic()
            while self._done < wanted and time.monotonic() - waited < 10:
                time.sleep(0.05)
            self.report.kills[victim] = self.report.kills.get(victim, 0) + 1
            if victim in VICTIMS:
                pipeline.kill(victim)
                time.sleep(self._random.uniform(0, 0.5))
                pipeline.start(victim)
            elif victim == "kafka":
                self._say(f"{self._done} blobs put: kafka restarts")
                self._kafka.restart()
            elif victim == "redis-flush":
                self._say(f"{self._done} blobs put: redis is emptied")
                with redis_client.Redis.from_url(self._redis.url) as client:
                    client.flushall()
            elif victim == "redis-kill":
                self._say(f"{self._done} blobs put: redis is killed")
                self._redis.kill()
                time.sleep(REDIS_AWAY_SECONDS)
                self._redis.start()
            else:
                self._say(f"{self._done} blobs put: the S3 server is away")
                self._s3.stop()
                time.sleep(S3_AWAY_SECONDS)
                self._s3.start()
        for victim in VICTIMS:
            if pipeline.processes[victim].poll() is not None:
                self.report.problems.append(f"{victim} ended by itself: {pipeline.processes[victim].returncode}")
                pipeline.start(victim)

    # --- what was promised -------------------------------------------------------------------------------------------

    def _check(self, puts: list[Put]) -> None:
        problems = self.report.problems
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        with httpx.Client(base_url=self._url, timeout=60) as client:
            for put in puts:
                self.report.cut += put.cut
                self.report.created += put.created is not None
                self.report.accepted += bool(put.accepted)
                version = put.created
                for accepted in put.accepted:
                    outcome = _outcome(client, accepted, deadline)
                    if outcome.get("state") != "committed":
                        problems.append(f"{put.key}: 202 for {accepted} ended as {outcome}")
                    else:
                        version = outcome["version"]
                if version is None:
                    problems.append(f"{put.key}: neither 201 nor 202 in {TRY_SECONDS_MAX:.0f} s")
                    continue
                answer = client.get(f"/v1/blobs/{put.key}", params={"version": version})
                if answer.status_code != 200 or hashlib.sha256(answer.content).hexdigest() != put.digest:
                    problems.append(f"{put.key} version {version}: {answer.status_code}, other bytes than were put")
                if client.get(f"/v1/blobs/{put.key}", params={"version": version + 1}).status_code != 404:
                    problems.append(f"{put.key}: committed twice")

    def _check_flow(self, pipeline: Pipeline) -> None:
        """Every partition takes new blobs, and no worker is behind."""
        problems = self.report.problems
        with httpx.Client(base_url=self._url, timeout=60) as client:
            for number in range(16):
                answer = client.put(f"/v1/blobs/after/{number}", content=b"x" * number, params={"wait": 30})
                if answer.status_code != 201:
                    problems.append(f"after the chaos: {answer.status_code} {answer.text[:200]}")
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        for service, name in GROUPS:
            reader = consumer(pipeline.settings, group(pipeline.settings, service), "chaos-lag")
            while (lag := _lag(reader, topic(pipeline.settings, name), 2)) and time.monotonic() < deadline:
                time.sleep(0.5)
            reader.close()
            if lag:
                problems.append(f"{service} is {lag} messages behind on {name}")


def _pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 65_536):
        yield data[start : start + 65_536]


def _outcome(client: httpx.Client, accepted: str, deadline: float) -> dict[str, Any]:
    while True:
        try:
            outcome: dict[str, Any] = client.get(f"/v1/status/{accepted}").json()
        except httpx.HTTPError as err:
            outcome = {"state": f"no answer: {err}"}
        if outcome.get("state") in ("committed", "failed") or time.monotonic() > deadline:
            return outcome
        time.sleep(0.2)


def _lag(reader: Consumer, full: str, partitions: int) -> int:
    """Return how many messages a group has not yet done."""
    parts = reader.committed([TopicPartition(full, number) for number in range(partitions)], timeout=10)
    behind = 0
    for part in parts:
        low, high = reader.get_watermark_offsets(TopicPartition(full, part.partition), timeout=10)
        behind += high - (part.offset if part.offset >= 0 else low)
    return behind
