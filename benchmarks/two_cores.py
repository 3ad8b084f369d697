"""Measure the speed that a second core adds to a put.

Invariant: runs on one core and on two alternate, each with a store of its own.

    python -m benchmarks.two_cores --corpus botocore rdb vm-debian --versions 3 --runs 3 --json out.json

`fresh` puts the versions of a corpus into an empty store, oldest first; `known` puts the last of them once more.
Speeds are by the clock, until the put is durable. `two puts`: the work of two processes, a core each, in the time
that one of them takes alone on the machine. Where two "cores" are threads of one, or share their memory with others,
that is less than 2, and it is the upper bound for any program. The last column does not need an idle machine: all CPU
time of the put divided by that of its busiest thread is the largest gain that more cores can give.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nearkin import open_store
from nearkin.lab.corpora import find_corpora
from nearkin.lab.measure import read_through, write_out
from nearkin_delta.block_encoder import BlockEncoder, ClosedBlock, OpenBlock
from nearkin_shared.errors import NearkinError
from nearkin_shared.pipeline.worker_thread import Worker

START_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of put.

    Speeds in MB/s, medians of the runs; thread seconds are of the last run.
    """

    corpus: str
    what: str
    one_core_mbps: float
    two_cores_mbps: float
    ratio: float
    two_puts: float
    ceiling: float
    thread_seconds: dict[str, float]


class ThreadClocks:
    """CPU seconds of a writer's threads by name, summed over its puts; on one core the caller's chunking, too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        plain: Callable[[Worker[Any]], None] = Worker._run

        def timed(worker: Worker[Any]) -> None:
            try:
                plain(worker)
            finally:
                self.add(threading.current_thread().name.removeprefix("nearkin-"), time.thread_time())

        Worker._run = timed  # type: ignore[assignment,method-assign]  # a thread's clock can only be read on it, as it ends
        clocks, close = self, BlockEncoder.close

        def timed_close(self: BlockEncoder, open_block: OpenBlock) -> ClosedBlock:
            started = time.thread_time()
            try:
                return close(self, open_block)
            finally:
                clocks.add(threading.current_thread().name.removeprefix("nearkin-"), time.thread_time() - started)

        BlockEncoder.close = timed_close  # type: ignore[method-assign]

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a thread's total."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def timed_put(root: Path, paths: list[Path], clocks: ThreadClocks) -> float:
    """Return the seconds by the clock of putting the files, synced; add the threads' seconds to `clocks`."""
    clocks.seconds.clear()
    with open_store(root, create=True) as store:
        started, own = time.perf_counter(), time.thread_time()
        for path in paths:
            store.put("blob", path)
        clocks.add("caller", time.thread_time() - own)
        write_out(root)
        return time.perf_counter() - started


def puts_on_a_core(core: int, paths: list[Path], together: Barrier) -> list[float]:
    """Return the seconds of the fresh puts and of the known put of one process.

    The put of each kind starts when all processes are ready, and no process starts the next kind before all have
    finished.
    """
    os.sched_setaffinity(0, [core])
    clocks, seconds = ThreadClocks(), []
    with tempfile.TemporaryDirectory(prefix="nearkin-cores-") as folder:
        for some in (paths, paths[-1:]):
            together.wait(START_SECONDS_MAX)
            seconds.append(timed_put(Path(folder), some, clocks))
    return seconds


def batch_rebase(paths: list[Path], cores: list[int]) -> list[list[float]]:
    """Return the seconds of the fresh puts and of the known put, for one process per core, all at the same time."""
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(len(cores), context) as processes:
        together = manager.Barrier(len(cores))
        running = [processes.submit(puts_on_a_core, core, paths, together) for core in cores]
        return [one.result() for one in running]


def measured(corpus: str, paths: list[Path], cores: list[int], runs: int, clocks: ThreadClocks) -> list[Row]:
    """Return the corpus's rows."""
    total_bytes = read_through(paths)
    jobs = (("fresh", paths, total_bytes), ("known", paths[-1:], paths[-1].stat().st_size))
    speeds: dict[tuple[str, int], list[float]] = {}
    both: dict[str, list[float]] = {}
    threads: dict[str, dict[str, float]] = {}
    for _ in range(runs):
        for count in (1, 2):
            os.sched_setaffinity(0, cores[:count])
            with tempfile.TemporaryDirectory(prefix="nearkin-cores-") as folder:
                for what, some, size_bytes in jobs:
                    seconds = timed_put(Path(folder), some, clocks)
                    speeds.setdefault((what, count), []).append(size_bytes / seconds / 1e6)
                    threads[what] = dict(clocks.seconds)
        apart = [batch_rebase(paths, cores[:1]), batch_rebase(paths, cores[:2])]
        for row, (what, _, _) in enumerate(jobs):
            alone, *_ = (seconds[row] for seconds in apart[0])
            both.setdefault(what, []).append(sum(alone / seconds[row] for seconds in apart[1]))
    rows = []
    for what, seconds_of in threads.items():
        one, two = (statistics.median(speeds[what, count]) for count in (1, 2))
        ratio = statistics.median(b / a for a, b in zip(speeds[what, 1], speeds[what, 2], strict=True))
        ceiling = sum(seconds_of.values()) / max(seconds_of.values())
        rows.append(Row(corpus, what, one, two, ratio, statistics.median(both[what]), ceiling, seconds_of))
    return rows


def at_least_one(text: str) -> int:
    """Return a number of versions or runs. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}": want a whole number from 1 on')
    return int(text)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Put on one core and on two.")
    parser.add_argument(
        "--corpus",
        nargs="+",
        default=["botocore,rdb"],
        help="those of `nearkin bench`, or folders with a file a version",
    )
    parser.add_argument("--versions", type=at_least_one, help="of each; else as many as it has by default")
    parser.add_argument("--runs", type=at_least_one, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("two_cores: this process may run on one core alone; give it two", file=sys.stderr)
        return 1
    clocks = ThreadClocks()
    rows: list[Row] = []
    try:
        corpora = find_corpora(chosen.corpus, chosen.versions)
        for corpus in corpora:
            rows += measured(corpus.name, list(corpus.paths), cores, chosen.runs, clocks)
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    versions = ", ".join(f"{len(corpus.paths)} versions of {corpus.name}" for corpus in corpora)
    print(f"{versions}; {chosen.runs} runs, load {os.getloadavg()[0]:.1f}", "", sep="\n")
    print(
        "| put | 1 core, MB/s | 2 cores, MB/s | ratio | two puts | seconds by thread | at most |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for row in rows:
        threads = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(row.thread_seconds.items()))
        print(
            f"| {row.corpus}, {row.what} | {row.one_core_mbps:.0f} | {row.two_cores_mbps:.0f} | {row.ratio:.2f} |"
            f" {row.two_puts:.2f} | {threads} | {row.ceiling:.2f} |"
        )
    if chosen.json:
        record = {"machine": platform.machine(), "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
