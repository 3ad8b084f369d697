"""Measure a maintenance worker's GC run over S3 after one deletion among many small versions.

    gc.mode, run -> GET, LIST, PUT and DELETE requests, seconds, price

Invariant: each mode collects a copy of one store, with the same deletion and the same clock.

    python -m benchmarks.gc_fleet --versions 3000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gc_deletion import fill, settings_of
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.fleet.fleet_key_locks import FleetKeyLocks
from nearkin_shared.objectstore.factory import with_parity
from nearkin_shared.objectstore.s3 import S3ObjectStore
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from tests.support.fakes.clock import DAY
from tests.support.servers.maintenance_workers import Fleet, copy_objects
from tests.support.servers.servers import S3, Redis

NAMES_A_REQUEST = 1000
KINDS = {"get": "GET", "get_ranges": "GET", "size_bytes": "GET", "put_new": "PUT", "delete": "DELETE"}
"""Request of each call; HEAD costs what GET does."""
DOLLARS = {"GET": 0.4e-6, "LIST": 5e-6, "PUT": 5e-6, "DELETE": 0.0}
"""Price of a request in S3 (us-east-1)."""


@contextmanager
def count_requests() -> Iterator[Counter[str]]:
    """Count the requests of all S3 object stores."""
    found: Counter[str] = Counter()
    real: dict[str, Callable[..., Any]] = {name: getattr(S3ObjectStore, name) for name in (*KINDS, "names")}

    def counted(name: str) -> Callable[..., Any]:
        def call(self: S3ObjectStore, *arguments: Any) -> Any:
            found[KINDS[name]] += 1
            return real[name](self, *arguments)

        return call

    def listed(self: S3ObjectStore, folder: str) -> Iterator[tuple[str, int]]:
        found["LIST"] += 1
        for number, entry in enumerate(real["names"](self, folder), 1):
            found["LIST"] += number % NAMES_A_REQUEST == 0
            yield entry

    for name in KINDS:
        setattr(S3ObjectStore, name, counted(name))
    vars_of: Any = S3ObjectStore
    vars_of.names = listed
    try:
        yield found
    finally:
        for name, method in real.items():
            setattr(S3ObjectStore, name, method)


def measure(mode: str, versions: int, full: Path, s3: S3, redis: Redis) -> list[str]:
    """Return the rows of one mode."""
    objects = with_parity(S3ObjectStore(s3.settings(s3.make_bucket(f"gc-{mode}"), "store")), settings_of(mode))
    copy_objects(full, objects)
    fleet = Fleet(objects, redis.url, f"gc-{mode}", time.time() + 2 * DAY, settings_of(mode))
    fleet.fill_index()
    gc = GcSettings(mode=mode, grace_seconds=DAY // 2, interval_seconds=60)
    rows = []
    with tempfile.TemporaryDirectory() as folder, closing(fleet.index):
        worker = fleet.make_gc_worker(gc=gc, tables=Path(folder, "gc", "tables"))
        for run in ("first", "unchanged", "1 deleted", "due"):
            if run.endswith("deleted"):
                manifests = ManifestStore(objects, FleetKeyLocks(fleet.index.state))
                Deletions(manifests, fleet.index.mark_many).delete("default", "f00005.txt", 1, undelete_seconds=0)
            fleet.now += DAY
            with count_requests() as counts:
                began, cpu = time.perf_counter(), time.process_time()
                assert worker.run_once() is not None
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            dollars = sum(counts[kind] * price for kind, price in DOLLARS.items())
            cells = [versions, f"`{mode}`", run, *(counts[kind] for kind in DOLLARS)]
            cells += [f"{seconds:.2f}", f"{cpu_seconds:.2f}", f"{dollars:.5f}"]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=3000)
    chosen = parser.parse_args()
    print("| versions | `gc.mode` | run | GET, HEAD | LIST | PUT | DELETE | s | CPU s | requests in S3, USD |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        fill(work / "full", chosen.versions)
        with S3(work / "s3", program="versitygw") as s3, Redis(work / "redis") as redis:
            for mode in ("mark-sweep", "hybrid"):
                print("\n".join(measure(mode, chosen.versions, work / "full", s3, redis)), flush=True)


if __name__ == "__main__":
    main()
