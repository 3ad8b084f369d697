"""Measure puts into a store whose index is many times the memory that is free for it.

    first half of the filling -> version 1 -> second half -> for each repetition: put warm, put with limited memory

Invariant: both puts of a repetition have equally many new and known chunks, and every put is of content not put before.

    python -m benchmarks.limited_memory --gigabytes 4 --work FOLDER --json out.json

Chunks are small, so that a small store has a large index. A limited put runs in a memory cgroup (needs root) of which
the page cache is part: its limit is the peak of the same puts into a small store, and a share of the size of the
`exact` index. The store's files leave the page cache before it. A put is a command of its own: wall and CPU
seconds with the start of the program, and page faults that read from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO

import numpy as np

from nearkin import open_store
from nearkin.lab.generated_data import mutate, random_bytes
from nearkin.lab.suites.index_suite import drop_pages
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput
from nearkin_shared.limits import MIB

CHUNKING = {"min_bytes": 128, "target_bytes": 512, "max_bytes": 4096}
VERSION_BYTES = 64 * MIB
FILL_BYTES = 64 * MIB
EDITS = 400
GROUPS = Path("/sys/fs/cgroup")
SPARE_BYTES = 16 * MIB
"""Memory of a limited put beyond its own peak and the share of the index."""


@dataclass(slots=True)
class PutFigures:
    """Figures of one put: seconds, and page faults that read from disk."""

    kind: str
    content: str
    memory: str
    wall_seconds: float
    cpu_seconds: float
    major_faults: int
    peak_bytes: int


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the file that takes the ids of processes whose memory is limited. Raises BadInput."""
    old = (GROUPS / "memory").is_dir()
    group = GROUPS / ("memory" if old else "") / f"nearkin-benchmark-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_bytes))
    except OSError as err:
        raise BadInput(f"{group}: {err.strerror}: run as root, where cgroups have the memory controller") from err
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def settings_of(kind: str) -> dict[str, dict[str, object]]:
    """Return the settings of a store; without features, which are the same work for each kind."""
    return {"chunker": {**CHUNKING}, "index": {"kind": kind}, "features": {"algorithm": "none"}}


def put(store: Path, kind: str, key: str, content: bytes, group: Path | None, label: tuple[str, str]) -> PutFigures:
    """Put by a command of its own, within a memory cgroup if one is given. Raises BadInput where it fails."""
    environment = {
        f"NEARKIN_{section.upper()}__{name.upper()}": str(value)
        for section, values in settings_of(kind).items()
        for name, value in values.items()
    }
    file = store.with_name("input")
    file.write_bytes(content)

    join_group = [] if group is None else ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]
    began = time.perf_counter()
    with subprocess.Popen(
        [*join_group, sys.executable, "-m", "nearkin.cli", "--store", str(store), "put", "--quiet", key, str(file)],
        env={**os.environ, **environment},
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise BadInput(f"put {key}: exit code {process.returncode}; the limit of memory may be too low")
    memory = "warm" if group is None else "limited"
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return PutFigures(*label, memory, seconds, cpu_seconds, usage.ru_majflt, usage.ru_maxrss * 1024)


def fill(store: Path, kind: str, gigabytes: float, version: bytes) -> None:
    """Fill a store; version 1 is put in the middle."""
    settings = with_changes(Settings(), settings_of(kind))
    count = max(2, round(gigabytes * 1e9 / FILL_BYTES))
    with open_store(store, settings=settings, create=True) as opened:
        for number in range(count):
            if number == count // 2:
                opened.put("versions", version)
            opened.put(f"filling-{number}", random_bytes(FILL_BYTES, 1000 + number))


def index_bytes(store: Path) -> int:
    """Return the bytes of the files of a store's index."""
    return sum(path.stat().st_blocks * 512 for path in (store / "index").rglob("*") if path.is_file())


def read_all(store: Path) -> None:
    """Read the files of a store, so that they are in the page cache."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(MIB):
                    pass


def measure(args: argparse.Namespace, progress: IO[str]) -> tuple[list[PutFigures], dict[str, int]]:
    """Return the figures of all puts, and the bytes of each kind's index."""
    version = random_bytes(VERSION_BYTES, 1)
    kinds = args.kinds.split(",")
    sizes: dict[str, int] = {}
    own: dict[str, int] = {}
    for kind in kinds:
        print(f"filling {kind}", file=progress, flush=True)
        small, large = args.work / f"small-{kind}" / "store", args.work / kind / "store"
        for store, gigabytes in ((small, 0.0), (large, args.gigabytes)):
            store.parent.mkdir(parents=True)
            fill(store, kind, gigabytes, version)
        contents = {"versions": mutate(version, 1, EDITS), "new": random_bytes(VERSION_BYTES, 2)}
        own[kind] = max(put(small, kind, key, data, None, (kind, "")).peak_bytes for key, data in contents.items())
        sizes[kind] = index_bytes(large)
    figures: list[PutFigures] = []
    seed = 10
    for number in range(args.repetitions):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            store = args.work / kind / "store"
            limit_bytes = own[kind] + sizes["exact"] // args.share + SPARE_BYTES
            for limited in (False, True):
                for content in ("version", "new"):
                    seed += 1
                    data = mutate(version, seed, EDITS) if content == "version" else random_bytes(VERSION_BYTES, seed)
                    key = "versions" if content == "version" else f"new-{seed}"
                    if limited:
                        for path in store.rglob("*"):
                            if path.is_file():
                                drop_pages(path)
                        with memory_group(limit_bytes) as group:
                            found = put(store, kind, key, data, group, (kind, content))
                    else:
                        read_all(store)
                        found = put(store, kind, key, data, None, (kind, content))
                    print(found, file=progress, flush=True)
                    figures.append(found)
    return figures, sizes


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the filling; some 2 million chunks each")
    parser.add_argument("--kinds", default="exact,tablets", help="exact must be among them [exact,tablets]")
    parser.add_argument("--share", type=int, default=20, help="the exact index is so many times its memory [20]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--work", type=Path, required=True, help="a new folder on the file system to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        figures, sizes = measure(args, sys.stderr)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    print("index:", ", ".join(f"{kind} {size / 1e6:,.0f} MB" for kind, size in sizes.items()))
    print("| kind | content | memory | MB/s | wall s | CPU s | page faults from disk |\n|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((one.kind, one.content, one.memory) for one in figures):
        rows = [one for one in figures if (one.kind, one.content, one.memory) == key]
        wall, cpu = (median(getattr(one, name) for one in rows) for name in ("wall_seconds", "cpu_seconds"))
        faults = int(np.median([one.major_faults for one in rows]))
        print(f"| {' | '.join(key)} | {VERSION_BYTES / wall / 1e6:.1f} | {wall:.2f} | {cpu:.2f} | {faults} |")
    if args.json:
        args.json.write_text(json.dumps({"index_bytes": sizes, "puts": [asdict(one) for one in figures]}, indent=1))


if __name__ == "__main__":
    main()
