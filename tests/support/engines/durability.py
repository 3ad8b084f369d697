"""Check the promises of a pipeline.

Invariant: each 201 and each 202 restores byte for byte, once, and no other version is listed.

Clients put blobs through the gateway, each with an idempotency key and the retries of a real client, and delete some
of them. Whichever parts died meanwhile, `check` requests all of it afterwards.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from confluent_kafka import Consumer, TopicPartition

from nearkin_shared.kafka.clients import consumer, group, topic
from tests.support.servers.pipeline import Pipeline

CLIENTS = 4
TRY_SECONDS_MAX = 600.0
"""Bound for the restart of a killed gateway: 10 s on a busy machine, 120 s with eight processes per core."""
READY_SECONDS_MAX = 180.0
SETTLE_SECONDS_MAX = 240.0
DELETED_SHARE = 0.2
PAGE = 100
GROUPS = (
    ("chunker", "frames"),
    ("dedup", "segments"),
    ("resemblance", "fresh"),
    ("delta", "paired"),
    ("committer", "placed"),
)


@dataclass(slots=True)
class Put:
    """The gateway's answers to one client about one blob."""

    key: str
    digest: str
    size_bytes: int
    created: int | None = None
    """Version of a 201."""
    accepted: list[str] = field(default_factory=list)
    """Ids of the 202s."""
    cut: int = 0
    """Number of tries without an answer."""
    deleted: bool = False


@dataclass(slots=True)
class Report:
    """Result of a run; `problems` is empty if all promises were kept."""

    seed: int
    blobs: int
    kills: dict[str, int] = field(default_factory=dict)
    created: int = 0
    accepted: int = 0
    deleted: int = 0
    records: int = 0
    """Records of the user's topic that have to be stored."""
    cut: int = 0
    reads: int = 0
    """Committed blobs that were read meanwhile."""
    lookups: int = 0
    """Answers of index shards to the reader, meanwhile."""
    refused: int = 0
    """Reads and lookups that were not answered."""
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


class Promises:
    """Clients of one gateway on `port`, and the answers they received."""

    def __init__(self, seed: int, blobs: int, port: int) -> None:
        self.report = Report(seed, blobs)
        self.port = port
        generator = np.random.default_rng(seed)
        self.blobs: list[bytes] = []
        for _ in range(blobs):
            self.blobs.append(content(generator, self.blobs[-20:]))
        self.done = 0
        self._kept: list[Put] = []
        self._end = threading.Event()
        self._lock = threading.Lock()

    def put_all(self, enough: Callable[[], bool] = lambda: False) -> list[Put]:
        """Put all blobs, or only those begun before `enough`."""
        numbers = iter(range(len(self.blobs)))

        def some(_: int) -> list[Put]:
            puts = []
            while not enough() and not self._end.is_set():
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    break
                puts.append(self._put(number))
            return puts

        with ThreadPoolExecutor(CLIENTS) as clients:
            return [put for puts in clients.map(some, range(CLIENTS)) for put in puts]

    def end_puts(self) -> None:
        """End all puts without further tries."""
        self._end.set()

    def kept(self) -> list[Put]:
        """Return the blobs of a 201 or 202 that stay, so far."""
        with self._lock:
            return list(self._kept)

    @property
    def url(self) -> str:
        """Return the URL of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> None:
        """Wait for the gateway. Raises TimeoutError."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        while True:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway was not ready within {READY_SECONDS_MAX:.0f} s")
            time.sleep(0.1)

    # --- clients -----------------------------------------------------------------------------------------------------

    def _put(self, number: int) -> Put:
        data = self.blobs[number]
        put = Put(f"chaos/{number}", hashlib.sha256(data).hexdigest(), len(data))
        draw = random.Random(self.report.seed * 100_003 + number)
        url = f"{self.url}/v1/blobs/{put.key}"
        headers = {"Idempotency-Key": f"{self.report.seed}-{number}", "X-Content-SHA256": put.digest}
        deadline = time.monotonic() + TRY_SECONDS_MAX
        while time.monotonic() < deadline and not self._end.is_set():
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
        if put.created is not None and draw.random() < DELETED_SHARE:
            put.deleted = self._delete(url, deadline, draw)
        with self._lock:
            self.done += 1
            if (put.created is not None or put.accepted) and not put.deleted:
                self._kept.append(put)
        return put

    def _delete(self, url: str, deadline: float, draw: random.Random) -> bool:
        """Delete a key, repeatedly until the gateway confirms the deletion."""
        while True:
            try:
                answer = httpx.delete(url, timeout=httpx.Timeout(60, connect=2))
                if answer.status_code < 300 or answer.status_code == 404:
                    return True
            except httpx.HTTPError:
                pass
            if self._end.is_set():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"DELETE {url}: no answer in {TRY_SECONDS_MAX:.0f} s")
            time.sleep(draw.uniform(0.1, 0.6))

    # --- what was promised -------------------------------------------------------------------------------------------

    def check(self, puts: list[Put]) -> None:
        """Request every blob and the listing; add each broken promise to the problems."""
        problems = self.report.problems
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        expected = set()
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for put in puts:
                self.report.cut += put.cut
                self.report.created += put.created is not None
                self.report.accepted += bool(put.accepted)
                self.report.deleted += put.deleted
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
                if put.deleted:
                    if answer.status_code != 404:
                        problems.append(f"{put.key} version {version}: deleted, and answered with {answer.status_code}")
                    continue
                expected.add((put.key, version))
                if answer.status_code != 200 or hashlib.sha256(answer.content).hexdigest() != put.digest:
                    problems.append(f"{put.key} version {version}: {answer.status_code}, other bytes than were put")
                if client.get(f"/v1/blobs/{put.key}", params={"version": version + 1}).status_code != 404:
                    problems.append(f"{put.key}: committed twice")
            listed = list_versions(client, "chaos/")
            if listed != expected:
                problems.append(
                    f"listed: lost {sorted(expected - listed)[:5]}, from nowhere {sorted(listed - expected)[:5]}"
                )

    def check_flow(self, pipeline: Pipeline) -> None:
        """Check that every partition accepts new blobs, and that no worker has a backlog."""
        problems = self.report.problems
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for number in range(16):
                answer = client.put(f"/v1/blobs/after/{number}", content=b"x" * number, params={"wait": 30})
                if answer.status_code != 201:
                    problems.append(f"after the chaos: {answer.status_code} {answer.text[:200]}")
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        for service, name in GROUPS:
            reader = consumer(pipeline.settings, group(pipeline.settings, service), "chaos-lag")
            while (
                lag := group_lag(reader, topic(pipeline.settings, name), pipeline.settings.kafka.partitions)
            ) and time.monotonic() < deadline:
                time.sleep(0.5)
            reader.close()
            if lag:
                problems.append(f"{service} is {lag} messages behind on {name}")


def list_versions(client: httpx.Client, prefix: str) -> set[tuple[str, int]]:
    """Return (key, version) of all listed versions, page by page."""
    found: set[tuple[str, int]] = set()
    after = ""
    while True:
        page = client.get("/v1/blobs", params={"prefix": prefix, "versions": "all", "limit": PAGE, "after": after})
        page.raise_for_status()
        listing = page.json()
        found |= {(blob["key"], blob["version"]) for blob in listing["blobs"]}
        if listing["next"] is None:
            return found
        after = listing["next"]


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


def group_lag(reader: Consumer, full: str, partitions: int) -> int:
    """Return the number of messages that a group has not processed."""
    parts = reader.committed([TopicPartition(full, number) for number in range(partitions)], timeout=10)
    behind = 0
    for part in parts:
        low, high = reader.get_watermark_offsets(TopicPartition(full, part.partition), timeout=10)
        behind += high - (part.offset if part.offset >= 0 else low)
    return behind
