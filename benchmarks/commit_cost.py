"""Measure the commit of a large version of which nothing is new.

    GB of a version -> segments -> encode, manifest written and synced, LMDB, Redis: CPU ms and ms

Invariant: the manifest names the segments of a store of that size in stream order, all of them known.

    python -m benchmarks.commit_cost --gigabytes 8.7 52

Segments have the mean length of those of random bytes with the default settings. Each step is the median of five, with
another version number each. A Redis server of its own is started.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.redis_index import DOMAIN
from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.formats.manifest import Manifest, encode_manifest
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results import Ledger
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import Locations
from tests.support.servers.redis_server import redis_server

SAMPLE_BYTES = 48_000_000
"""Random bytes that are put to find the mean length of a segment."""
CONTAINER_BYTES = 4 << 20
TRIES = 5


def find_segment_bytes(folder: Path) -> float:
    """Return the mean length of a segment."""
    with open_store(folder, create=True) as store:
        result = store.put("k", random_bytes(SAMPLE_BYTES, 1))
        return SAMPLE_BYTES / result.info.segments


def manifest_of(size_bytes: int, segment_bytes: float) -> Manifest:
    """Return the manifest of a version of known segments."""
    count = int(size_bytes / segment_bytes)
    per_container = max(1, int(CONTAINER_BYTES / segment_bytes))
    rows = np.arange(count, dtype=np.uint64)
    containers = np.uint64(1 << 60) + rows // np.uint64(per_container) * np.uint64(1_000_003)
    segments = Locations(containers, (rows % np.uint64(per_container)).astype(np.uint32))
    ledger = Ledger(logical_bytes=size_bytes)
    return Manifest("default", "k", 1, 5, size_bytes, bytes(32), None, 1.0, ledger, segments, np.ones(count, np.bool_))


def median_ms(work: Callable[[int], object]) -> str:
    """Return the medians of CPU ms of this process and of ms by the clock."""
    cpu, wall = [], []
    for number in range(1, TRIES + 1):
        began, started = time.process_time(), time.perf_counter()
        work(number)
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - started)
    return f"{median(cpu) * 1000:.1f} CPU, {median(wall) * 1000:.1f}"


def measure(gigabytes: float, segment_bytes: float, folder: Path, url: str) -> str:
    """Return one row of the table."""
    manifest = manifest_of(int(gigabytes * 1e9), segment_bytes)
    versions = [replace(manifest, version=number) for number in range(TRIES + 1)]
    encoded_bytes = len(encode_manifest(manifest))
    manifests = ManifestStore(LocalObjectStore(folder / "objects"))
    (folder / "objects").mkdir()
    lmdb_index, redis_index = LmdbIndex(folder / "index", DOMAIN, 1 << 30), RedisIndex(RedisSettings(url=url), DOMAIN)
    steps = [
        median_ms(lambda number: encode_manifest(versions[number])),
        median_ms(lambda number: manifests.put(versions[number])),
        median_ms(lambda number: lmdb_index.commit(versions[number], encoded_bytes)),
        median_ms(lambda number: redis_index.commit(versions[number], encoded_bytes)),
    ]
    lmdb_index.close()
    redis_index.close()
    return f"| {gigabytes:g} | {len(manifest.segments)} | {encoded_bytes} | {' | '.join(steps)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[8.7, 52])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as url:
        segment_bytes = find_segment_bytes(Path(folder, "sample"))
        print(f"segments of {segment_bytes:.0f} bytes; ms")
        print("| GB | segments | manifest, bytes | encode | encode and write | LMDB | Redis |")
        print("|---|---|---|---|---|---|---|")
        for number, gigabytes in enumerate(given.gigabytes):
            place = Path(folder, str(number))
            place.mkdir()
            print(measure(gigabytes, segment_bytes, place, url))


if __name__ == "__main__":
    main()
