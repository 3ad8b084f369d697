"""Measure memory and speed of the Redis index.

Invariant: this is the worst case, in which all chunks are unique and raw.

    python -m benchmarks.redis_index --chunks 1000000 --json out.json

Starts a server of its own. Each container brings 512 chunks with random names, 3 random super-features each, and 32
segments of 16 chunks; afterwards one version that holds all segments is committed, so that each has a count. Memory
is what the server reports (INFO memory) before the first container and after the last step.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nearkin_shared.config.services import RedisSettings
from nearkin_shared.formats.directory import BlockTable, ChunkTable, Directory, PrefixTable, SegmentTable
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.index.container_entries import ContainerEntries
from nearkin_shared.index.protocols import ContainerDirectories
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.index.redis.connection import Command, RedisServer
from nearkin_shared.results import Ledger
from nearkin_shared.types import U8, ContainerId, Locations
from tests.support.conformance.index_contract import of_rank
from tests.support.servers.redis_server import redis_server

CHUNKS_A_CONTAINER, CHUNKS_A_SEGMENT, RANKS = 512, 16, 3
SKETCH, DOMAIN = "finesse/12/3/48", bytes(range(16))


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of one kind of call: entries a second by the clock, and by the CPU time of this process."""

    what: str
    batch: int
    entries_per_second: int
    entries_per_client_cpu_second: int
    entries_per_server_cpu_second: int


def claims_of(container: ContainerId, count: int, random: np.random.Generator) -> ContainerEntries:
    """Return the entries of a container of `count` raw chunks with random names."""
    names = random.integers(0, 256, (count, 32), dtype=np.uint8)
    lengths = np.full(count, 8192, np.uint32)
    names[:, 28:] = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    none8, none32 = np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    starts = np.arange(count, dtype=np.uint32) * np.uint32(8192)
    chunks = ChunkTable(names, lengths, none32, starts, lengths, none8, Locations.empty(count), none8)
    segments = -(-count // CHUNKS_A_SEGMENT)
    bounds = np.minimum(np.arange(segments + 1, dtype=np.uint32) * CHUNKS_A_SEGMENT, count).astype(np.uint32)
    own = Locations(np.full(count, container, np.uint64), np.arange(count, dtype=np.uint32))
    block = np.array([count * 8192], np.uint32)
    blocks = BlockTable(np.array([56], np.uint64), block, block, *(np.zeros(1, np.uint8) for _ in range(3)))
    recipes = SegmentTable(bounds, np.zeros(segments, np.uint8), own)
    tables = blocks, chunks, recipes, PrefixTable.empty(1)
    directory = Directory(container, DOMAIN, 2, (SKETCH,), *tables, count * 8192, count * 40, 500)
    super_features = random.integers(1, 1 << 63, (count, RANKS), dtype=np.uint64)
    ids = random.integers(0, 256, (segments, 20), dtype=np.uint8)
    return ContainerEntries(directory, ids, {SKETCH: (np.arange(count, dtype=np.uint32), super_features)})


def memory(index: RedisIndex) -> dict[str, int]:
    """Return the memory figures that the server reports."""
    found = index.server.one(("INFO", "memory"))
    return {name: int(found[name]) for name in ("used_memory", "used_memory_dataset", "used_memory_rss")}


def server_cpu(index: RedisIndex) -> float:
    """Return the CPU seconds that the server has taken."""
    found = index.server.one(("INFO", "cpu"))
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


@contextmanager
def count_commands() -> Iterator[Counter[str]]:
    """Count the commands that are sent to the server."""
    found: Counter[str] = Counter()
    run = RedisServer.run

    def counted(self: RedisServer, commands: Sequence[Command]) -> list[Any]:
        found["commands"] += len(commands)
        return run(self, commands)

    with mock.patch.object(RedisServer, "run", counted):
        yield found


def publish_all(index: RedisIndex, containers: list[ContainerEntries]) -> None:
    """Publish containers, each by itself."""
    for entries in containers:
        index.publish(entries)


def timed(index: RedisIndex, what: str, batch: int, entries: int, work: Callable[[], Any]) -> Rate:
    """Return the rate of `work`, which handles `entries` entries."""
    server, wall, client = server_cpu(index), time.perf_counter(), time.process_time()
    work()
    wall, client = time.perf_counter() - wall, time.process_time() - client
    server = max(server_cpu(index) - server, 1e-6)
    return Rate(what, batch, round(entries / wall), round(entries / client), round(entries / server))


def look_up(find: Callable[[U8], tuple[Locations, Any]], rows: U8, batch: int, is_present: bool) -> None:
    """Look rows up in batches; either all or none must be present."""
    for start in range(0, len(rows), batch):
        _, found = find(rows[start : start + batch])
        if not (found.all() if is_present else not found.any()):
            raise SystemExit(
                f"{np.count_nonzero(found)} of {len(found)} found, wanted {'all' if is_present else 'none'}"
            )


def withdraw(index: RedisIndex, what: str, directory: Directory, looked_up: object) -> dict[str, Any]:
    """Withdraw a container and return what that took."""
    dead = int(directory.container)
    sent = index.server.one(("INFO", "stats"))["total_net_output_bytes"]
    with count_commands() as commands:
        server, wall, client = server_cpu(index), time.perf_counter(), time.process_time()
        index.withdraw({dead: None}, {}, [dead], looked_up)
        wall, client = time.perf_counter() - wall, time.process_time() - client
        server = server_cpu(index) - server
    return {
        "what": what,
        "commands": commands["commands"] - 2,  # two of INFO
        "server_cpu_seconds": round(server, 4),
        "client_cpu_seconds": round(client, 4),
        "seconds": round(wall, 4),
        "bytes_sent": index.server.one(("INFO", "stats"))["total_net_output_bytes"] - sent,
    }


def measure(chunks: int, lookups: int, url: str) -> dict[str, Any]:
    """Fill the index and measure it."""
    random = np.random.default_rng(7)
    index = RedisIndex(RedisSettings(url=url), DOMAIN)
    before = memory(index)
    names, features, locations, rates = [], [], [], []
    made = []
    for number in range(-(-chunks // CHUNKS_A_CONTAINER)):
        count = min(CHUNKS_A_CONTAINER, chunks - number * CHUNKS_A_CONTAINER)
        made.append(claims_of(ContainerId((1 << 60) + number * 1_000_003), count, random))
    for claims in made:
        names.append(claims.directory.chunks.names)
        features.append(claims.super_features[SKETCH][1][:, 0])
        held = len(claims.segment_ids)
        locations.append(
            Locations(np.full(held, claims.directory.container, np.uint64), np.arange(held, dtype=np.uint32))
        )
    rates.append(timed(index, "publish chunks", CHUNKS_A_CONTAINER, chunks, partial(publish_all, index, made)))
    segments = Locations.join(locations)
    manifest = Manifest(
        "default", "k", 1, 5, chunks * 8192, bytes(32), None, 1.0, Ledger(), segments, np.zeros(len(segments), np.bool_)
    )
    rates.append(timed(index, "commit", 1, 1, lambda: index.commit(manifest, 1000)))
    after = memory(index)
    rows, sketched = np.concatenate(names), np.concatenate(features)
    chosen = random.permutation(len(rows))[:lookups]
    absent = random.integers(0, 256, (len(chosen), 32), dtype=np.uint8)
    rank = partial(of_rank, index, SKETCH, 0)
    kinds: list[tuple[str, Any, Any, bool]] = [
        ("chunks present", index.locate_chunks, rows[chosen], True),
        ("chunks absent", index.locate_chunks, absent, False),
        ("features present", rank, sketched[chosen], True),
    ]
    for batch in (500, 5000):
        for what, find, keys, is_present in kinds:
            work = partial(look_up, find, keys, batch, is_present)
            rates.append(timed(index, what, batch, len(keys), work))
    last = {int(entries.directory.container): entries.directory for entries in made[-2:]}
    removals = [
        withdraw(index, what, directory, looked_up)
        for (what, looked_up), directory in zip(
            [("by walk", None), ("by name", ContainerDirectories(last.get))], last.values(), strict=True
        )
    ]
    version = index.server.one(("INFO", "server"))["redis_version"]
    index.close()
    return {
        "server": version,
        "chunks": chunks,
        "segments": len(segments),
        "containers": len(made),
        "bytes_per_chunk": {name: round((after[name] - before[name]) / chunks, 2) for name in after},
        "removals": removals,
        "rates": [asdict(rate) for rate in rates],
    }


def main() -> None:
    """Measure and print a table; `--json` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=200_000, help="of each kind")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as url:
        result = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            **measure(given.chunks, given.lookups, url),
        }
    print(f"{result['chunks']} unique chunks: bytes a chunk {result['bytes_per_chunk']}")
    for removal in result["removals"]:
        print(
            f"a container withdrawn {removal['what']}: {removal['commands']} commands, "
            f"{removal['server_cpu_seconds']} CPU s of the server, {removal['client_cpu_seconds']} of the client, "
            f"{removal['bytes_sent']} bytes read, {removal['seconds']} s"
        )
    print(f"{'what':20} {'batch':>7} {'a second':>10} {'a client CPU s':>15} {'a server CPU s':>15}")
    for rate in result["rates"]:
        print(
            f"{rate['what']:20} {rate['batch']:7} {rate['entries_per_second']:10} "
            f"{rate['entries_per_client_cpu_second']:15} {rate['entries_per_server_cpu_second']:15}"
        )
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
