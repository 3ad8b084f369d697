"""Measure bytes and speed of the LMDB index.

Invariant: this is the worst case, in which all chunks are unique and raw.

    python -m benchmarks.lmdb_index --chunks 1000000 --chunks 4000000 --json out.json

The entries are those of benchmarks/redis_index.py, published a container at a time into a folder; the size of the
environment is the file's size on disk (st_blocks) after each number of chunks. Lookups are of random entries with
pages in memory; a lookup whose pages are on disk adds one seek, which is not measured here.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.redis_index import CHUNKS_A_CONTAINER, DOMAIN, RANKS, SKETCH, claims_of, look_up

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
from nearkin_shared.results import Ledger
from nearkin_shared.types import ContainerId, Locations

MAP_BYTES = 64 * 1024**3
KEPT_CONTAINERS = 400
"""Containers whose names are looked up."""


def measure(folder: Path, steps: list[int], lookups: int) -> list[dict[str, Any]]:
    """Fill the index; return the figures after each of `steps` chunks, in ascending order."""
    random = np.random.default_rng(7)
    index = LmdbIndex(folder, DOMAIN, MAP_BYTES)
    rows, published, number, cpu = [], 0, 0, 0.0
    kept: list[Any] = []
    for step in steps:
        segments: list[Locations] = []
        while published < step:
            claims = claims_of(ContainerId((1 << 60) + number * 1_000_003), CHUNKS_A_CONTAINER, random)
            began = time.process_time()
            index.publish(claims)
            cpu += time.process_time() - began
            held = len(claims.segment_ids)
            segments.append(
                Locations(np.full(held, claims.directory.container, np.uint64), np.arange(held, dtype=np.uint32))
            )
            kept = [*kept[-KEPT_CONTAINERS + 1 :], claims]
            published, number = published + CHUNKS_A_CONTAINER, number + 1
        whole = Locations.join(segments)
        known = np.zeros(len(whole), np.bool_)
        index.commit(
            Manifest("default", f"k{step}", 1, 5, step * 8192, bytes(32), None, 1.0, Ledger(), whole, known), 1000
        )
        names = np.concatenate([claims.directory.chunks.names for claims in kept])
        names = names[random.permutation(len(names))[:lookups]]
        absent = random.integers(0, 256, names.shape, dtype=np.uint8)
        seconds = []
        for keys, is_present in ((names, True), (absent, False)):
            began = time.process_time()
            look_up(index.locate_chunks, keys, 500, is_present)
            seconds.append((time.process_time() - began) / len(keys))
        stored_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        rows.append(
            {
                "chunks": published,
                "bytes": stored_bytes,
                "bytes_per_chunk": round(stored_bytes / published, 1),
                "publish_us_a_chunk": round(cpu / published * 1e6, 1),
                "present_us": round(seconds[0] * 1e6, 2),
                "absent_us": round(seconds[1] * 1e6, 2),
            }
        )
    index.close()
    return rows


def main() -> None:
    """Measure and print a table; `--json` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, action="append", help="one or several, ascending")
    parser.add_argument("--lookups", type=int, default=100_000, help="of each kind")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), sorted(given.chunks or [1_000_000]), given.lookups)
    print(f"LMDB, {platform.machine()}, {RANKS} super-features a chunk in {SKETCH}; processor time")
    for row in rows:
        print(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
