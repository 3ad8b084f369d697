"""Measure listings through the HTTP gateway: seconds for all keys, page by page, by number of keys.

    taskset -c 1 python -m benchmarks.listings --keys 1000,10000,20000 [--index lmdb|redis] [--runs 5]

The store has one small blob a key. Prints for each number of keys: the first listing after the gateway (and, with
`--index redis`, the Redis server) was restarted, and the median of later ones. `--index redis` starts Kafka, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from nearkin import open_store
from nearkin.local.index_recovery import super_features_of
from nearkin_maintenance import DomainOwners, rebuild_index
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.background_rebuild import Rebuilder
from tests.support.servers.gateways import process
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.servers import shared_kafka

PAGE_KEYS = 1000
PREFIX = "listings"


def main() -> None:
    """Measure each number of keys and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", default="1000,10000,20000")
    parser.add_argument("--index", choices=("lmdb", "redis"), default="lmdb")
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    for keys in map(int, chosen.keys.split(",")):
        with tempfile.TemporaryDirectory(prefix="nearkin-listings-") as folder:
            first, later = measure(Path(folder), keys, chosen.index, chosen.runs)
        print(
            f"{chosen.index} {keys:>6} keys: first after the restart {first:.3f} s, "
            f"then median of {chosen.runs}: {statistics.median(later):.3f} s",
            flush=True,
        )


def measure(folder: Path, keys: int, index: str, runs: int) -> tuple[float, list[float]]:
    """Return (seconds of the first listing after a restart, seconds of each later one)."""
    fill(folder / "store", keys)
    with ExitStack() as held:
        environment = {"NEARKIN_STORE": str(folder / "store"), "NEARKIN_GATEWAY__INGEST": "embedded"}
        if index == "redis":
            environment = held.enter_context(_services(folder))
        with process(environment, folder) as (_, url), httpx.Client(base_url=url, timeout=120) as client:
            seconds = [list_all(client, keys) for _ in range(1 + runs)]
    return seconds[0], seconds[1:]


def fill(root: Path, keys: int) -> None:
    """Store one blob of 64 bytes a key."""
    with open_store(root, create=True) as store:
        for _ in store.put_many((f"folder/{number % 100:02}/{number:08}", os.urandom(64)) for number in range(keys)):
            pass


def list_all(client: httpx.Client, keys: int) -> float:
    """List every key by pages of PAGE_KEYS; return the seconds.

    Raises: AssertionError if a key is missing.
    """
    began, listed, following = time.perf_counter(), 0, f"/v1/blobs?limit={PAGE_KEYS}"
    while following:
        answer = client.get(following).raise_for_status()
        listed += len(answer.json()["blobs"])
        following = answer.links.get("next", {}).get("url", "")
    seconds = time.perf_counter() - began
    assert listed == keys, f"{listed} of {keys} keys"
    return seconds


@contextmanager
def _services(folder: Path) -> Iterator[dict[str, str]]:
    """Fill Redis from the store's objects and restart it; yield the variables of a gateway that uses it."""
    with RedisServer(folder / "redis", "--appendonly", "yes") as server:
        fill_redis(folder / "store", server.url, PREFIX)
        server.stop()
        server.start()
        fill_redis(
            folder / "store", server.url, PREFIX
        )  # as the maintenance service does after a restart: it checks what Redis kept
        with shared_kafka(folder / "kafka", os.getpid()) as bootstrap:
            yield {
                "NEARKIN_OBJECT_STORE__URL": str(folder / "store"),
                "NEARKIN_REDIS__URL": server.url,
                "NEARKIN_REDIS__PREFIX": PREFIX,
                "NEARKIN_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
                "NEARKIN_GATEWAY__INGEST": "kafka",
            }


def fill_redis(root: Path, url: str, prefix: str) -> None:
    """Build the index of a local store in Redis."""
    with open_store(root) as store:
        index = RedisIndex(RedisSettings(url=url, prefix=prefix), store._fingerprinter.domain)
        try:
            tenants = DomainOwners(store._fingerprinters, [store.settings.tenant], store._manifests)
            Rebuilder(
                index,
                lambda target: rebuild_index(store._containers, store._manifests, target, tenants, super_features_of),
            ).run_once()
        finally:
            index.close()


if __name__ == "__main__":
    main()
