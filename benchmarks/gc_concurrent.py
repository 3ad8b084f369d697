"""Measure how long a put waits for a concurrent GC run, and the cost of the run.

    python -m benchmarks.gc_concurrent [--megabytes 500] [--versions 60] [--folder F]

The store has many versions of one key, of which all but the last ten are deleted. One process does GC runs without a
grace until a run deletes nothing more; another opens the store, puts 100 KB and closes it, repeatedly. The first
measurement is without that other process (`alone`), the second with it (`concurrent`), on a copy of the same store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreLocked
from tests.support.data.stores import settings

KEPT = 10
PUT_BYTES = 100_000
GC_RUNS_MAX = 8
CHOSEN = settings(
    Settings(), {"deletion": {"undelete_seconds": 0}, "gc": {"grace_seconds": 0, "bytes_per_second": "1GiB"}}
)
GC_RUNS = """
import json, sys, time
sys.path[:0] = [sys.argv[2]]
from benchmarks.gc_concurrent import CHOSEN, GC_RUNS_MAX
from nearkin import open_store
from nearkin_shared.errors import StoreLocked
with open_store(sys.argv[1], settings=CHOSEN, create=True) as store:
    done = 0
    while done < GC_RUNS_MAX:
        cpu, began = time.process_time(), time.perf_counter()
        try:
            report = store.gc()
        except StoreLocked:
            time.sleep(0.002)
            continue
        done += 1
        print(json.dumps({
            "seconds": round(time.perf_counter() - began, 2), "cpu_seconds": round(time.process_time() - cpu, 2),
            "freed_bytes": report.freed_bytes, "deleted": report.containers_deleted,
            "rewritten": report.containers_rewritten, "pending_delete": report.pending_delete_containers,
        }), flush=True)
        if not report.freed_bytes and not report.pending_delete_containers:
            break
"""


def make(root: Path, megabytes: int, versions: int) -> None:
    """Put the versions, each with some edits more, and delete all but the last."""
    size_bytes = megabytes * 1_000_000 // versions
    content = random_bytes(size_bytes, 1)
    with open_store(root, settings=CHOSEN, create=True) as store:
        for number in range(versions):
            store.put("k", content)
            content = mutate(content, number, edits=size_bytes // 40_000)
        for number in range(1, versions - KEPT + 1):
            store.delete("k", number)


def do_gc_runs(root: Path, *, puts: bool) -> dict[str, object]:
    """Do GC runs in a child process; return their figures, and how long puts of this process waited."""
    words = [sys.executable, "-c", GC_RUNS, str(root), str(Path(__file__).parent)]
    waits, refused, number, held = [], 0, 0, b""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while puts and child.poll() is None:
            held, began = random_bytes(PUT_BYTES, 1000 + number), time.perf_counter()
            while True:
                try:
                    with open_store(root, settings=CHOSEN, create=True) as store:
                        store.put(f"concurrent-{number % 5}", held)
                except StoreLocked:
                    refused += 1
                    time.sleep(0.002)
                else:
                    break
            waits.append(time.perf_counter() - began)
            number += 1
            time.sleep(0.02)
        figures = [json.loads(line) for line in child.stdout.read().splitlines()]
    if child.returncode:
        raise SystemExit(f"the child process of the GC runs exited with status {child.returncode}")
    waits.sort()
    return {
        "rounds": figures,
        "puts": len(waits),
        "refused": refused,
        "put_seconds_median": round(waits[len(waits) // 2], 3) if waits else None,
        "put_seconds_max": round(waits[-1], 3) if waits else None,
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="where the store is made, and left for the next time")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nearkin-concurrent-") as made:
        folder = chosen.folder or Path(made)
        first = folder / f"{chosen.megabytes}-{chosen.versions}"
        if not first.is_dir():
            make(first, chosen.megabytes, chosen.versions)
        for puts in (False, True):
            copy = Path(made) / ("concurrent" if puts else "alone")
            shutil.copytree(first, copy)
            print(json.dumps({copy.name: do_gc_runs(copy, puts=puts)}, indent=1), flush=True)
            shutil.rmtree(copy)


if __name__ == "__main__":
    os.environ.setdefault("NEARKIN_LOG", "error")
    main()
