"""Measure the rebuild of a lost index in chunks a minute.

Invariant: the rebuilt store was made by `put`, and all its chunks are unique.

    taskset -c 1 python -m benchmarks.rebuild --chunks 200000 [--index lmdb|redis] [--rounds 3]

Half of the content is random, half is a text of which each version is edited, so that there are deltas with their
sketches. Chunks are of 1 KiB, as the cost of a rebuild depends on the number of chunks. Prints the median by the
clock and by CPU time; the latter is what one idle core achieves. Redis runs on a server of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes, text_like
from nearkin.local.index_recovery import super_features_of
from nearkin.store import Store
from nearkin_maintenance import DomainOwners, rebuild_index
from nearkin_shared.config.services import RedisSettings
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.results import RebuildReport
from tests.support.data.stores import settings
from tests.support.servers.redis_server import redis_server

CHUNK_BYTES = 1024
PIECE_BYTES = 4_000_000
CHOSEN = settings({"chunker": {"min_bytes": 512, "target_bytes": CHUNK_BYTES, "max_bytes": 8192}})


def main() -> None:
    """Make a store, rebuild its index, print how fast."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=200_000)
    parser.add_argument("--index", choices=("lmdb", "redis"), default="lmdb")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="nearkin-rebuild-")))
        store = held.enter_context(open_store(folder / "s", settings=CHOSEN, create=True))
        text = text_like(PIECE_BYTES, 1)
        for number in range(max(1, chosen.chunks * CHUNK_BYTES // (2 * PIECE_BYTES))):
            text = mutate(text, number, edits=2_000)
            store.put("random", random_bytes(PIECE_BYTES, number))
            store.put("text", text)
        rebuild: Callable[[], RebuildReport] = store.rebuild_index
        if chosen.index == "redis":
            url = held.enter_context(redis_server(folder / "redis"))
            rebuild = _redis(store, url)
        by_clock, by_cpu = [], []
        for _ in range(chosen.rounds):
            started, cpu = time.perf_counter(), time.process_time()
            report = rebuild()
            by_clock.append(report.chunks * 60 / (time.perf_counter() - started))
            by_cpu.append(report.chunks * 60 / (time.process_time() - cpu))
        print(
            f"{chosen.index}: {report.chunks:,} chunks in {report.containers:,} containers; "
            f"{statistics.median(by_clock):,.0f} chunks a minute by the clock, "
            f"{statistics.median(by_cpu):,.0f} by this process's CPU time"
        )


def _redis(store: Store, url: str) -> Callable[[], RebuildReport]:
    """Return a function that fills an empty Redis index from a store's objects."""
    numbers = iter(range(1 << 30))

    def rebuild() -> RebuildReport:
        settings_of = RedisSettings(url=url, prefix=f"bench{next(numbers)}")
        index = RedisIndex(settings_of, store._fingerprinter.domain)
        try:
            tenants = DomainOwners(store._fingerprinters, [store.settings.tenant], store._manifests)
            return rebuild_index(store._containers, store._manifests, index, tenants, super_features_of)
        finally:
            index.close()

    return rebuild


if __name__ == "__main__":
    main()
