"""Measure how long a tenant's PUT takes while another tenant floods the fleet.

    python -m benchmarks.fairness --seconds 30

Kafka, Redis, a gateway and workers run on this machine; the store is a folder. Tenant `quiet` puts blobs of 4 KiB one
after another with `?wait=30`: alone first, then while `flood` puts blobs from many connections of another process,
without waiting for their outcome. Run it on an idle machine; a p99 ratio of 3 at most is the aim.

Each result is printed as a line of JSON once it is known. A measurement ends at most PUT_SECONDS_MAX late: a PUT
without an answer by then counts with the time that it has waited.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from nearkin_gateway.auth import tokens
from tests.support.servers.gateways import process
from tests.support.servers.pipeline import FUSED, SPLIT, Pipeline
from tests.support.servers.servers import Kafka, Redis

BLOB_BYTES = 4096
PAUSE_SECONDS = 0.05
RAMP_SECONDS = 3.0
PUT_SECONDS_MAX = 35.0
"""The gateway answers after 30 s at the latest, unless it is overloaded."""
END_SECONDS_MAX = 15.0
"""How long the flood's process may take to end."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two measurements")
    parser.add_argument("--connections", type=int, default=32, help="of the flood")
    parser.add_argument("--flood-bytes", type=int, default=BLOB_BYTES, help="of each blob of the flood")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--split", action="store_true", help="a process for each stage in place of one for all")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="nearkin-fairness-") as folder,
        fleet(Path(folder), chosen.partitions, SPLIT if chosen.split else FUSED) as (url, flood, quiet),
    ):
        for found in measured(url, flood, quiet, chosen):
            print(json.dumps(found), flush=True)


@contextmanager
def fleet(folder: Path, partitions: int, services: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Run all processes; yield the gateway's URL and the tokens of two tenants."""
    with ExitStack() as held:
        kafka, redis = held.enter_context(Kafka(folder / "kafka")), held.enter_context(Redis(folder / "redis"))
        file = folder / "tokens.json"
        made = [tokens.create(file, tenant, ["read", "write"])[0] for tenant in ("flood", "quiet")]
        config: dict[str, dict[str, object]] = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "bench.", "partitions": partitions},
            "redis": {"url": redis.url},
            "object_store": {"url": str(folder / "objects")},
            "auth": {"tokens_file": str(file)},
            "gateway": {"requests_per_second": 0, "access_log": False},
            "audit": {"records": "none"},
        }
        pipeline = held.enter_context(Pipeline(folder / "pipeline", config, services=services))
        _, url = held.enter_context(process({}, folder, "--config", str(pipeline.config_file)))
        yield url, made[0], made[1]


def measured(url: str, flood: str, quiet: str, chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the quiet tenant's latencies alone and under the flood, and what became of the flood."""
    asyncio.run(quiet_puts(url, quiet, 5.0))  # the start of interpreters and of a JVM is not measured
    alone = asyncio.run(quiet_puts(url, quiet, chosen.seconds))
    yield {"alone": quantiles(alone)}
    spawning = multiprocessing.get_context("spawn")
    stop, found = spawning.Event(), spawning.Queue()
    arguments = (url, flood, chosen.flood_bytes, chosen.connections, stop, found)
    flooding = spawning.Process(target=flood_process, args=arguments)
    flooding.start()
    try:
        found.get()  # it has begun
        time.sleep(RAMP_SECONDS)
        during = asyncio.run(quiet_puts(url, quiet, chosen.seconds))
        yield {"during the flood": quantiles(during)}
        yield {"p99 ratio": round(quantile(during, 0.99) / quantile(alone, 0.99), 2)}
        stop.set()
        statuses, seconds = found.get(timeout=END_SECONDS_MAX)
        flooding.join(END_SECONDS_MAX)
    finally:
        flooding.kill()
    yield {"flood requests/s": round(len(statuses) / seconds, 1)}
    yield {"flood statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))}}
    left = httpx.get(f"{url}/v1/stats", headers=bearer(flood), timeout=PUT_SECONDS_MAX)
    yield {"flood versions committed at the end": left.json()["versions"]}


def bearer(token: str) -> dict[str, str]:
    """Return the header of a token."""
    return {"Authorization": f"Bearer {token}"}


async def quiet_puts(url: str, token: str, seconds: float) -> list[float]:
    """Put blobs one after another; return the seconds of each."""
    found, began = list[float](), time.monotonic()
    until = began + seconds
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        try:
            async with asyncio.timeout(seconds + PUT_SECONDS_MAX):
                while time.monotonic() < until:
                    began = time.monotonic()
                    answer = await client.put(
                        "/v1/blobs/quiet", params={"wait": 30}, content=os.urandom(BLOB_BYTES), headers=bearer(token)
                    )
                    found.append(time.monotonic() - began)
                    if answer.status_code not in (201, 202):
                        raise SystemExit(f"{answer.status_code}: {answer.text}")
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            found.append(time.monotonic() - began)
    return found


def flood_process(
    url: str, token: str, size_bytes: int, connections: int, stop: Event, found: Queue[tuple[list[int], float] | None]
) -> None:
    """Flood until `stop`; a process of its own, so that its work does not delay the measured client."""
    found.put(None)
    began = time.monotonic()
    found.put((asyncio.run(flooded(url, token, size_bytes, connections, stop)), time.monotonic() - began))


async def flooded(url: str, token: str, size_bytes: int, connections: int, stop: Event) -> list[int]:
    """Put blobs from many connections until `stop`; return the statuses, 0 for a lost connection."""
    statuses = list[int]()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        floods = [
            asyncio.create_task(flood_puts(client, token, size_bytes, number, statuses))
            for number in range(connections)
        ]
        await asyncio.to_thread(stop.wait)
        for task in floods:  # a request may take longer than END_SECONDS_MAX
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    return statuses


async def flood_puts(client: httpx.AsyncClient, token: str, size_bytes: int, number: int, statuses: list[int]) -> None:
    """Put blobs as fast as the gateway accepts them; a refusal is tried again after `Retry-After`."""
    for counted in itertools.count(1):
        try:
            answer = await client.put(
                f"/v1/blobs/f/{number}/{counted}", content=os.urandom(size_bytes), headers=bearer(token)
            )
        except httpx.HTTPError:
            statuses.append(0)
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        statuses.append(answer.status_code)
        if answer.status_code in (429, 503):
            await asyncio.sleep(min(5.0, float(answer.headers.get("retry-after", "1"))))


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of some values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the number of values, and quantiles in milliseconds."""
    shares = {"p50 ms": 0.5, "p90 ms": 0.9, "p99 ms": 0.99, "max ms": 1.0}
    return {"puts": len(values), **{name: round(quantile(values, share) * 1000, 1) for name, share in shares.items()}}


if __name__ == "__main__":
    main()
