"""Measure the broker's disk while random blobs pass the pipeline, and after the last commit.

    python -m benchmarks.broker_disk --gigabytes 20 [--split] [--inline]

Kafka, Redis and the workers run on this machine, the store is a folder. All chunks are new. A blob is put once the one
before it is committed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.servers.pipeline import FUSED, SPLIT, Pipeline, uploading
from tests.support.servers.servers import Kafka, Redis

MB = 1_000_000
PIECE_BYTES = 900 * 1024
AFTER_SECONDS = (0, 15, 30, 60)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--blob-megabytes", type=int, default=256)
    parser.add_argument("--split", action="store_true", help="a process for each stage in place of one for all")
    parser.add_argument("--inline", action="store_true", help="send all bytes through Kafka in place of references")
    chosen = parser.parse_args()
    count = max(1, round(chosen.gigabytes * 1000 / chosen.blob_megabytes))
    with tempfile.TemporaryDirectory(prefix="nearkin-broker-disk-") as folder:
        services = SPLIT if chosen.split else FUSED
        found = measured(Path(folder), count, chosen.blob_megabytes * MB, services, staged=not chosen.inline)
    print(json.dumps(found, indent=1))


def measured(folder: Path, count: int, blob_bytes: int, services: tuple[str, ...], *, staged: bool) -> dict[str, Any]:
    """Put random blobs one after another; return the broker's disk and its share of the CPU time."""
    with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
        config: dict[str, dict[str, object]] = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "bench.", "partitions": 2},
            "redis": {"url": redis.url},
            "object_store": {"url": str(folder / "objects")},
        }
        with (
            Pipeline(folder / "pipeline", config, services=services) as pipeline,
            uploading(pipeline.settings) as client,
        ):
            pids = {name: process.pid for name, process in pipeline.processes.items()}
            pids |= {"kafka": kafka.pid, "redis": redis.pid, "uploader": psutil.Process().pid}
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            started, largest = time.perf_counter(), 0
            for number in range(count):
                blob = client.put("random", random_pieces(number, blob_bytes), staged=staged)
                largest = max(largest, disk_bytes(folder / "kafka"))
                client.wait(blob, 600)
                largest = max(largest, disk_bytes(folder / "kafka"))
            seconds = time.perf_counter() - started
            used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
            after = after_the_last(folder / "kafka")
            staged_bytes = disk_bytes(folder / "objects" / "staging")
    return {
        "gigabytes": count * blob_bytes / 1e9,
        "mb_per_second": round(count * blob_bytes / MB / seconds, 1),
        "cpu_seconds_per_gb": {name: round(found / (count * blob_bytes) * 1e9, 2) for name, found in used.items()},
        "kafka_share": round(used["kafka"] / sum(used.values()), 3),
        "broker_mb_at_most": round(largest / MB, 1),
        "broker_mb_after_seconds": after,
        "staging_mb_after": round(staged_bytes / MB, 1),
    }


def after_the_last(kafka: Path) -> dict[int, float]:
    """Return the broker's disk, MB, by seconds after the last commit."""
    found, ended = {}, time.perf_counter()
    for seconds in AFTER_SECONDS:
        time.sleep(max(0.0, ended + seconds - time.perf_counter()))
        found[seconds] = round(disk_bytes(kafka) / MB, 1)
    return found


def random_pieces(seed: int, size_bytes: int) -> Iterator[bytes]:
    """Yield random bytes in pieces."""
    random = np.random.default_rng(seed)
    for start in range(0, size_bytes, PIECE_BYTES):
        yield random.bytes(min(PIECE_BYTES, size_bytes - start))


def disk_bytes(folder: Path) -> int:
    """Return the bytes on disk below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:  # deleted meanwhile
            continue
    return total


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
