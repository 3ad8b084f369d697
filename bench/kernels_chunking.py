"""Chunkers against the Rust crate `fastcdc`. Invariant: a ratio is taken of two runs that follow each other.

    python bench/kernels_chunking.py --corpus botocore --core 1 --json out.json
    python bench/kernels_chunking.py --dedup botocore,rdb,vm

Chunks of 2 to 64 KiB, 8 KiB target. Each round runs every chunker over the same bytes (a corpus's first version, 64 MiB
of it at most) right after the peer: v2020 of the crate, in a process of its own on the same core, built from
`fastcdc-crate/` with cargo into `$NEARKIN_CACHE/fastcdc-crate`. Without cargo there is no ratio.

    GB/s   10^9 bytes a second of processor time, median of the rounds; then the best round
    ratio  median of (speed / the peer's speed just before), and the middle half of the rounds

`--dedup` prints all versions' bytes by the bytes of their distinct chunks: for `fastcdc`, for `leastcdc` at the same
target, and for `leastcdc` at the target that gives it `fastcdc`'s mean chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shared"))

from nearkin.errors import NearkinError, choose
from nearkin.kernels import _chunking, _leastcdc
from nearkin.kernels.fingerprint import sha1_many
from nearkin.lab.measuring import pinned
from nearkin.testing.corpora import CORPORA, cache_dir, text_like

MIN_BYTES, TARGET_BYTES, MAX_BYTES = 2048, 8192, 65536
DATA_BYTES_MAX = 64 << 20
MEAN_TOLERANCE = 0.004
SEARCH_STEPS_MAX = 12
CRATE = Path(__file__).resolve().parent / "fastcdc-crate"
VERSIONS = {"botocore": 10, "rdb": 5, "vm": 3}
AIMS = {"leastcdc": 2.5}
"""Of the peer's speed, with AVX-512."""

Bytes = NDArray[np.uint8]
Cut = Callable[[Bytes], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Row:
    """One chunker. Speeds in GB/s of processor time; ratios to the peer in the same round, None without it."""

    chunker: str
    median_gbps: float
    best_gbps: float
    mean_chunk_bytes: float
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    aim: float | None


@dataclass(frozen=True, slots=True)
class Dedup:
    """One chunker over all versions of a corpus."""

    corpus: str
    chunker: str
    target_bytes: int
    mean_chunk_bytes: float
    ratio: float


def chunkers() -> dict[str, Cut]:
    """Return what is measured, by name: every kernel, and `leastcdc` on each path of this processor."""
    bounds = MIN_BYTES, TARGET_BYTES, MAX_BYTES
    found: dict[str, Cut] = {
        "leastcdc": lambda data: _leastcdc.leastcdc_cut(data, *bounds, True),
        "fastcdc": lambda data: _chunking.fastcdc_cut(data, *bounds, True),
        "rabin": lambda data: _chunking.rabin_cut(data, *bounds, True),
        "inck": lambda data: _chunking.inck_cut(data, *bounds, True),
    }
    for path in _leastcdc.cpu_paths():
        found[f"leastcdc, {path}"] = lambda data, path=path: _leastcdc.leastcdc_cut(data, *bounds, True, path=path)
    return found


def first_version(name: str) -> Bytes:
    """Return the bytes to cut: "text", "random", or a corpus's first version."""
    if name == "random":
        return np.random.default_rng(1).integers(0, 256, DATA_BYTES_MAX, dtype=np.uint8)
    if name == "text":
        return np.frombuffer(text_like(DATA_BYTES_MAX, 1), np.uint8)
    if name not in CORPORA:
        raise choose("--corpus", name, ("text", "random", *CORPORA))
    return np.fromfile(CORPORA[name](VERSIONS[name], None)[0], np.uint8, count=DATA_BYTES_MAX)


class Peer:
    """The crate's process. Ends with the `with` block."""

    name = "fastcdc 3.2.1 (Rust), v2020"

    def __init__(self, command: Path, data: Bytes) -> None:
        self._data_bytes = len(data)
        with tempfile.NamedTemporaryFile(suffix=".data") as file:
            data.tofile(file.name)
            bounds = [str(bound) for bound in (MIN_BYTES, TARGET_BYTES, MAX_BYTES)]
            self._process = subprocess.Popen(
                [command, file.name, *bounds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.gbps()  # it has read the file when it answers

    def gbps(self) -> float:
        """Cut all bytes once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        nanoseconds, chunks, _ = self._process.stdout.readline().split()
        self.mean_chunk_bytes = self._data_bytes / int(chunks)
        return self._data_bytes / int(nanoseconds)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()


def built_crate() -> Path | None:
    """Return the peer's command, built by cargo; None, with a line on stderr, where that cannot be."""
    folder = cache_dir() / "fastcdc-crate"
    cargo = shutil.which("cargo")
    if cargo is None:
        print("no peer: cargo is not installed (rustup.rs, or the package cargo)", file=sys.stderr)
        return None
    shutil.copytree(CRATE, folder, dirs_exist_ok=True)
    done = subprocess.run(
        [cargo, "build", "--release", "--quiet"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"no peer: cargo build: {(done.stderr.strip() or 'failed').splitlines()[-1]}", file=sys.stderr)
        return None
    return folder / "target" / "release" / "fastcdc-crate"


def measured(data: Bytes, peer: Peer | None, rounds: int) -> tuple[float | None, list[Row]]:
    """Return the peer's median speed in GB/s and a row for every chunker."""
    chosen = chunkers()
    means = {name: len(data) / len(cut(data)) for name, cut in chosen.items()}
    peers: list[float] = []
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, cut in chosen.items():
            if peer is not None:
                peers.append(peer.gbps())
            started = time.thread_time()
            cut(data)
            speeds[name].append(len(data) / (time.thread_time() - started) / 1e9)
            if peer is not None:
                ratios[name].append(speeds[name][-1] / peers[-1])
    rows = []
    for name, own in speeds.items():
        low, middle, high = statistics.quantiles(ratios[name], n=4) if peers else (0.0, None, 0.0)
        aim = AIMS.get(name) if _leastcdc.cpu_path() == "avx512" else None
        quartiles = (low, high) if peers else None
        rows.append(Row(name, statistics.median(own), max(own), means[name], middle, quartiles, aim))
    return statistics.median(peers) if peers else None, rows


def dedup_of(corpus: str, chunker: str, target_bytes: int, versions: list[Bytes], cut: Cut) -> Dedup:
    """Return all versions' bytes by the bytes of their distinct chunks (by SHA-1)."""
    names, lengths = [], []
    for data in versions:
        found = cut(data)
        starts = (np.cumsum(found, dtype=np.uint64) - found).astype(np.uint64)
        names.append(sha1_many(data, starts, found))
        lengths.append(found)
    length = np.concatenate(lengths).astype(np.int64)
    _, first = np.unique(np.concatenate(names).view("V20").ravel(), return_index=True)
    return Dedup(corpus, chunker, target_bytes, float(length.mean()), float(length.sum() / length[first].sum()))


def dedup(corpus: str) -> list[Dedup]:
    """Return `fastcdc` and `leastcdc` at the same target, and `leastcdc` at the same mean chunk."""
    if corpus not in CORPORA:
        raise choose("--dedup", corpus, tuple(CORPORA))
    versions = [np.memmap(path, np.uint8, "r") for path in CORPORA[corpus](VERSIONS[corpus], None)]
    total_bytes = sum(len(data) for data in versions)

    def least(target_bytes: int) -> Cut:
        return lambda data: _leastcdc.leastcdc_cut(data, MIN_BYTES, target_bytes, MAX_BYTES, True)

    fast = dedup_of(corpus, "fastcdc", TARGET_BYTES, versions, chunkers()["fastcdc"])
    low, high = TARGET_BYTES // 2, TARGET_BYTES * 2
    for _ in range(SEARCH_STEPS_MAX):
        target_bytes = (low + high) // 2
        mean = total_bytes / sum(len(least(target_bytes)(data)) for data in versions)
        if abs(mean / fast.mean_chunk_bytes - 1) < MEAN_TOLERANCE:
            break
        low, high = (low, target_bytes) if mean > fast.mean_chunk_bytes else (target_bytes, high)
    return [
        fast,
        dedup_of(corpus, "leastcdc", TARGET_BYTES, versions, least(TARGET_BYTES)),
        dedup_of(corpus, "leastcdc", target_bytes, versions, least(target_bytes)),
    ]


def print_dedup(rows: list[Dedup]) -> None:
    """Print the table of dedup ratios."""
    print("| corpus | chunker | target | mean chunk | dedup ratio |", "|---|---|---|---|---|", sep="\n")
    for row in rows:
        print(
            f"| {row.corpus} | {row.chunker} | {row.target_bytes} | {row.mean_chunk_bytes:.0f} | {row.ratio:.3f} |",
            flush=True,
        )


def print_speeds(rows: list[Row]) -> None:
    """Print the table of speeds."""
    print(
        "| chunker | GB/s | best | mean chunk | ratio | middle half | aim |", "|---|---|---|---|---|---|---|", sep="\n"
    )
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        half = "" if row.ratio_quartiles is None else "{:.2f} to {:.2f}".format(*row.ratio_quartiles)
        aim = "" if row.aim is None else f">= {row.aim}"
        print(
            f"| {row.chunker} | {row.median_gbps:.2f} | {row.best_gbps:.2f} | {row.mean_chunk_bytes:.0f} | {ratio} |"
            f" {half} | {aim} |"
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Chunkers against the Rust crate fastcdc, v2020.")
    parser.add_argument("--corpus", default="botocore", help='"text", "random", botocore, rdb or vm')
    parser.add_argument("--dedup", metavar="CORPUS,...", help="dedup ratios over all versions instead of speeds")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.rounds < 3:
        parser.error("--rounds: needs 3 or more for a median and quartiles")
    try:
        if chosen.dedup:
            ratios = [row for corpus in chosen.dedup.split(",") for row in dedup(corpus)]
            print_dedup(ratios)
            record: dict[str, object] = {"dedup": [asdict(row) for row in ratios]}
        else:
            data = first_version(chosen.corpus)
            with ExitStack() as stack:
                stack.enter_context(pinned(chosen.core))
                command = built_crate()
                peer = None if command is None else stack.enter_context(Peer(command, data))
                peer_gbps, rows = measured(data, peer, chosen.rounds)
                print(
                    f"{chosen.corpus}: {len(data)} bytes; path {_leastcdc.cpu_path()}; core {chosen.core},"
                    f" {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}"
                )
                if peer is not None:
                    print(f"peer: {peer.name}, {peer_gbps:.2f} GB/s, mean chunk {peer.mean_chunk_bytes:.0f}")
            print()
            print_speeds(rows)
            record = {"corpus": chosen.corpus, "peer_gbps": peer_gbps, "rows": [asdict(row) for row in rows]}
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.json:
        machine = {"machine": platform.machine(), "path": _leastcdc.cpu_path()}
        chosen.json.write_text(json.dumps({**machine, **record}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
