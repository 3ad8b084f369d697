"""Measure a GC run after the deletion of a few small versions among many.

    mode, versions -> objects read, folders listed, objects looked up, seconds, price of the requests

Invariant: each mode runs on a copy of one store, with the same deletions and the same clock.

The store has three versions of each small file. A first run marks; the measured runs are one without any change, one
after `deleted` deletions, and one in which what that run marked for deletion is due.

    python -m benchmarks.gc_cost --versions 1000 10000 --deleted 1
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin import open_store
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.fakes.clock import DAY

VERSIONS_PER_FILE = 3
FIRST_SECONDS = time.time()
DOLLARS = {"get": 0.4e-6, "list": 5e-6, "size": 0.4e-6}
"""Price of a GET, LIST and HEAD request in S3 (us-east-1), dollars."""


@dataclass(frozen=True, slots=True)
class DeletionRun:
    """Figures of one GC run."""

    mode: str
    versions: int
    run: str
    reads: int
    folders: int
    looked_up: int
    seconds: float
    cpu_seconds: float

    @property
    def dollars(self) -> float:
        """Return the price of the requests, if the objects were in S3 and each folder took one request."""
        return self.reads * DOLLARS["get"] + self.folders * DOLLARS["list"] + self.looked_up * DOLLARS["size"]


@contextmanager
def count_requests() -> Iterator[Counter[str]]:
    """Count the reads, listed folders and size lookups of all local object stores."""
    found: Counter[str] = Counter()
    kinds = {"get": "get", "get_ranges": "get", "size_bytes": "size"}
    real = {name: getattr(LocalObjectStore, name) for name in kinds}
    scandir = os.scandir

    def counted(name: str) -> Any:
        def call(self: LocalObjectStore, *arguments: Any) -> Any:
            found[kinds[name]] += 1
            return real[name](self, *arguments)

        return call

    def listed(folder: Any = ".") -> Any:
        found["list"] += 1
        return scandir(folder)

    for name in kinds:
        setattr(LocalObjectStore, name, counted(name))
    vars(os)["scandir"] = listed
    try:
        yield found
    finally:
        vars(os)["scandir"] = scandir
        for name, method in real.items():
            setattr(LocalObjectStore, name, method)


def settings_of(mode: str) -> Settings:
    """Return the settings of a store in which a deletion is final at once."""
    gc = {"mode": mode, "grace_seconds": DAY // 2}
    return with_changes(Settings(), {"deletion": {"undelete_seconds": 0}, "gc": gc, "index": {"map_bytes": 1 << 30}})


def fill(root: Path, versions: int) -> None:
    """Put three versions of each small file, with new random bytes each."""
    draw, files = random.Random(1), -(-versions // VERSIONS_PER_FILE)
    with open_store(root, settings=settings_of("mark-sweep"), clock=lambda: FIRST_SECONDS, create=True) as store:
        for _ in range(VERSIONS_PER_FILE):
            for _ in store.put_many(
                (f"f{number:05d}.txt", draw.randbytes(draw.randrange(200, 1800))) for number in range(files)
            ):
                pass


def measure(mode: str, versions: int, deleted: int, full: Path) -> list[DeletionRun]:
    """Return the runs of one mode in a copy of the store `full`."""
    now, found = [FIRST_SECONDS], []
    with tempfile.TemporaryDirectory(dir=full.parent) as folder:
        root = Path(folder, "store")
        shutil.copytree(full, root)
        with open_store(root, settings=settings_of(mode), clock=lambda: now[0]) as store, count_requests() as counts:
            now[0] += DAY
            store.gc()
            for run in ("unchanged", f"{deleted} deleted", "due"):
                if run.endswith("deleted"):
                    for number in range(deleted):
                        store.delete(f"f{5 + number:05d}.txt", 1)
                now[0] += DAY
                before, began, cpu = Counter(counts), time.perf_counter(), time.process_time()
                store.gc()
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
                reads, folders, looked_up = (counts[kind] - before[kind] for kind in ("get", "list", "size"))
                found.append(DeletionRun(mode, versions, run, reads, folders, looked_up, seconds, cpu_seconds))
    return found


def deletion_table(runs: Sequence[DeletionRun]) -> str:
    """Return the runs as Markdown."""
    lines = [
        "| versions | `gc.mode` | run | objects read | folders listed | looked up | s | CPU s | requests in S3, USD |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.versions} | `{run.mode}` | {run.run} | {run.reads} | {run.folders} | {run.looked_up} | "
        f"{run.seconds:.2f} | {run.cpu_seconds:.2f} | {run.dollars:.5f} |"
        for run in runs
    ]
    return "\n".join(lines) + "\n"


def measure_deletions(modes: Sequence[str], versions: Sequence[int], deleted: int) -> list[DeletionRun]:
    """Return the runs of every mode and number of versions."""
    found = []
    for count in versions:
        with tempfile.TemporaryDirectory() as folder:
            full = Path(folder, "full")
            fill(full, count)
            for mode in modes:
                found += measure(mode, count, deleted, full)
    return found
