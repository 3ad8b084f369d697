"""Measure how lookups divide between index shards.

    python -m benchmarks.index_shards --chunks 262144 --json out.json

Starts 1, 2 and 4 shards, each a process with all containers in memory, and asks each group in turn for the same names:
all chunks in their order, all in random order, and as many new ones. The processor time of each shard is that of its
process, HTTP included; with a core for each shard, a group is as fast as its most loaded shard allows:

    times one = processor time of the single shard / that of the most loaded shard of the group

The processor time of the client is that of this process. `requests`: HTTP requests of the client for each of its calls.
Names that shards sent ahead are not kept from one pass to the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_by_object import cpu_clock
from benchmarks.redis_index import CHUNKS_A_CONTAINER, DOMAIN, claims_of, look_up
from nearkin_index.shard_index import ShardIndex
from nearkin_index.shard_server import ShardOptions, ShardServer, ShardStore
from nearkin_shared.formats.directory import Directory
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.shards.key_ranges import part_of
from nearkin_shared.index.shards.sharded_index import ShardedIndex
from nearkin_shared.limits import GIB
from nearkin_shared.types import U8, ContainerId
from tests.support.servers.server import LOOPBACK, free_port

COUNTS = (1, 2, 4)
STORE_ID, TOKEN = "0" * 32, "a token of the benchmark"
START_SECONDS_MAX = 300.0


class MadeContainers:
    """Containers with random names, the same in every process."""

    def __init__(self, chunks: int) -> None:
        numbers = range(1, chunks // CHUNKS_A_CONTAINER + 1)
        self.entries: dict[int, ContainerEntries] = {
            number << 20: claims_of(ContainerId(number << 20), CHUNKS_A_CONTAINER, np.random.default_rng(number))
            for number in numbers
        }

    def directory(self, container: ContainerId) -> Directory:
        """Return a container's directory."""
        return self.entries[int(container)].directory

    def names(self) -> U8:
        """Return the names of all chunks in their order."""
        return np.concatenate([one.directory.chunks.names for one in self.entries.values()])


def serve(number: int, count: int, chunks: int, folder: Path, port: int) -> None:
    """Run a shard until SIGTERM."""
    made = MadeContainers(chunks)

    def complete(index: ShardIndex, known: Collection[int]) -> None:
        index.add_parts([part_of(one, number, count) for one in made.entries.values()])

    store = ShardStore(STORE_ID, made, lambda: list(made.entries), lambda: 0, complete)
    ShardServer(ShardOptions(number, count, folder, port=port, token=TOKEN, map_bytes=GIB), store).run()


class CountedIndex(ShardedIndex):
    """Client that counts its requests."""

    requests = 0

    def _call_many(self, name: str, requests: Sequence[tuple[int, object]]) -> list[Any]:
        self.requests += len(requests)
        return super()._call_many(name, requests)


class Group:
    """Shards of one count, and their client."""

    def __init__(self, connect: Callable[[], CountedIndex], pids: Sequence[int]) -> None:
        self.connect = connect
        self._clocks = list(map(cpu_clock, pids))

    def cpu_seconds(self) -> list[float]:
        """Return the processor time of each shard, then that of the client."""
        return [*map(time.clock_gettime, self._clocks), time.process_time()]


@contextmanager
def group(folder: Path, count: int, chunks: int) -> Iterator[Group]:
    """Run `count` shards, and wait until all are complete."""
    ports = [free_port() for _ in range(count)]
    common = ["--chunks", str(chunks), "--folder", str(folder / f"{count}"), "--of", str(count)]
    shards = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.index_shards", *common, "--serve", str(number), "--port", str(port)]
        )
        for number, port in enumerate(ports)
    ]
    urls = [f"http://{LOOPBACK}:{port}" for port in ports]
    try:
        for port in ports:
            _await_ready(port)
        yield Group(lambda: CountedIndex(urls, STORE_ID, DOMAIN, TOKEN), [shard.pid for shard in shards])
    finally:
        for shard in shards:
            shard.terminate()
        for shard in shards:
            shard.wait()


def _await_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            if httpx.get(f"http://{LOOPBACK}:{port}/readyz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"the shard on port {port} is not ready after {START_SECONDS_MAX:.0f} s")
        time.sleep(0.1)


def measure_lookups(groups: dict[int, Group], names: U8, batch: int, *, is_known: bool) -> dict[int, list[float]]:
    """Return the processor time of each shard of each group, of the client, and the requests, for one pass."""
    found = {}
    for count, one in groups.items():
        with closing(one.connect()) as index:
            before = one.cpu_seconds()
            look_up(index.locate_chunks, names, batch, is_known)
            used = [after - start for after, start in zip(one.cpu_seconds(), before, strict=True)]
            found[count] = [*used, index.requests]
    return found


def row_of(what: str, batch: int, count: int, names: int, rounds: Sequence[dict[int, list[float]]]) -> dict[str, Any]:
    """Return medians over the repetitions of one group."""
    *of_shards, of_client, requests = zip(*(one[count] for one in rounds), strict=True)
    loads = list(zip(*of_shards, strict=True))
    times_one = [one[1][0] / max(load) for one, load in zip(rounds, loads, strict=True)]
    return {
        "what": what,
        "batch": batch,
        "shards": count,
        "cpu_us_a_name": round(statistics.median(map(sum, loads)) / names * 1e6, 3),
        "client_cpu_us_a_name": round(statistics.median(of_client) / names * 1e6, 3),
        "requests_a_call": round(statistics.median(requests) / -(-names // batch), 2),
        "most_loaded_share": round(statistics.median(max(load) / sum(load) for load in loads), 4),
        "times_one": round(statistics.median(times_one), 2),
        "times_one_least": round(min(times_one), 2),
        "times_one_most": round(max(times_one), 2),
    }


def measure(chunks: int, batches: Sequence[int], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each kind of names, batch and count."""
    random = np.random.default_rng(0)
    known = MadeContainers(chunks).names()
    fresh = random.integers(0, 256, known.shape, dtype=np.uint8)
    fresh[:, 28:] = known[:, 28:]
    kinds = (("known", known, True), ("random", known[random.permutation(len(known))], True), ("new", fresh, False))
    rows = []
    with group(folder, 1, chunks) as one, group(folder, 2, chunks) as two, group(folder, 4, chunks) as four:
        groups = dict(zip(COUNTS, (one, two, four), strict=True))
        for what, names, is_known in kinds:
            for batch in batches:
                measured = [measure_lookups(groups, names, batch, is_known=is_known) for _ in range(rounds)]
                rows += [row_of(what, batch, count, len(names), measured) for count in COUNTS]
    return rows


def main() -> None:
    """Measure and print a table; `--json` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=262_144)
    parser.add_argument("--batches", default="512,4096,32768", help="names of one call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    for name in ("serve", "of", "port"):  # of a shard's process
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.of, given.chunks, given.folder, given.port)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given.chunks, [int(one) for one in given.batches.split(",")], given.rounds, Path(folder))
    titles = f"{'CPU us a name':>14} {'client':>7} {'requests':>9} {'most loaded':>12} {'times one':>10}"
    print(f"{'names':8} {'batch':>6} {'shards':>6} {titles}")
    for row in rows:
        line = f"{row['what']:8} {row['batch']:6} {row['shards']:6} {row['cpu_us_a_name']:14.3f}"
        line = f"{line} {row['client_cpu_us_a_name']:7.3f} {row['requests_a_call']:9.2f}"
        times_one = f"{row['times_one']:5.2f} ({row['times_one_least']}, {row['times_one_most']})"
        print(f"{line} {row['most_loaded_share']:12.1%} {times_one}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
