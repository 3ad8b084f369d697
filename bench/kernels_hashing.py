"""SHA-1 and super-features against OpenSSL's SHA-1. Invariant: a ratio is taken of two runs that follow each other.

    python bench/kernels_hashing.py --core 1 --against ../before/shared/nearkin/kernels --json out.json

Segments of up to 900 KiB in FastCDC chunks of 2 to 64 KiB, 8 KiB target. Each round runs every subject over all
segments three times, right after the peer: one stream of SHA-1 over blocks of 8 KiB, OpenSSL's code, called through
`hashlib`.
`--against` names a folder of kernels built from another state of the source, which then run in the same rounds.

    GB/s   10^9 bytes a second of this thread's processor time, median of the rounds; then the best round
    ratio  median of (speed / the peer's speed just before), and the middle half of the rounds
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shared"))

from nearkin.errors import BadInput, NearkinError, choose
from nearkin.kernels import _features, _fingerprint
from nearkin.kernels.chunking import fastcdc_cut
from nearkin.kernels.fingerprint import TagKey
from nearkin.lab.measuring import SHA1_BLOCK_BYTES, choose_core, pinned
from nearkin.testing.corpora import CORPORA, text_like

SEGMENT_BYTES_MAX = 900 * 1024
SEGMENTS = 4
PASSES = (
    3  # a turn: a core needs some 0.1 ms to wide registers' full speed after other code, and the pipeline stays longer
)
CORPUS_READ_AT = 1 << 20  # past the headers that begin a dump or an image

AIMS = {"sha1_many": 2.5, "finesse": 1.2, "odess": 0.8, "ntransform": 0.4}
"""Of the peer's speed, with AVX-512."""

Segment = tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Row:
    """One subject. Speeds in GB/s of processor time; ratios to the peer in the same round."""

    subject: str
    median_gbps: float
    best_gbps: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    aim: float | None


def segments_of(data: NDArray[np.uint8]) -> list[Segment]:
    """Return the data's segments, each with its chunks' offsets and lengths."""
    found: list[Segment] = []
    for start in range(0, len(data), SEGMENT_BYTES_MAX):
        payload = data[start : start + SEGMENT_BYTES_MAX].copy()
        lengths = fastcdc_cut(payload, 2048, 8192, 65536, True)
        found.append((payload, (np.cumsum(lengths, dtype=np.uint64) - lengths).astype(np.uint64), lengths))
    return found


def corpus_bytes(name: str) -> NDArray[np.uint8]:
    """Return what the segments are cut from: "text", "random", or the middle of a corpus's first version."""
    wanted = SEGMENTS * SEGMENT_BYTES_MAX
    if name == "random":
        return np.random.default_rng(1).integers(0, 256, wanted, dtype=np.uint8)
    if name == "text":
        return np.frombuffer(text_like(wanted, 1), np.uint8)
    if name not in CORPORA:
        raise choose("--corpus", name, ("text", "random", *CORPORA))
    with CORPORA[name](2, None)[0].open("rb") as file:
        file.seek(CORPUS_READ_AT)
        return np.frombuffer(file.read(wanted), np.uint8)


def kernels_in(folder: Path, name: str) -> ModuleType:
    """Load one built kernel from another source tree, beside this tree's own."""
    built = sorted(folder.glob(f"{name}.*.so"))
    if len(built) != 1:
        raise BadInput(f"--against {folder}: holds {len(built)} built files of {name}, needs one")
    spec = importlib.util.spec_from_file_location(f"against.{name}", built[0])
    if spec is None or spec.loader is None:
        raise BadInput(f"--against {built[0]}: is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def subjects(segments: list[Segment], against: Path | None) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; each call goes over all segments once."""
    key = TagKey(bytes(32), b"")

    def over(kernel: Callable[..., object], *more: object, **options: object) -> Callable[[], object]:
        return lambda: [kernel(*segment, *more, **options) for segment in segments]

    def one_by_one() -> None:
        for payload, offsets, lengths in segments:
            for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
                hashlib.sha1(payload[offset : offset + length], usedforsecurity=False).digest()

    found: dict[str, Callable[[], object]] = {"hashlib, chunk by chunk": one_by_one}
    found["sha1_many"] = over(_fingerprint.sha1_many)
    for engine in _fingerprint.sha1_engines():
        found[f"sha1_many, {engine} alone"] = over(_fingerprint.sha1_many, engine=engine)
    found["check_tags"] = over(_fingerprint.check_tags, key)
    for name in ("finesse", "odess", "ntransform", "finesse_scalar", "ntransform_scalar"):
        found[name] = over(getattr(_features, name))
    if against is not None:
        found["against: sha1_many"] = over(kernels_in(against, "_fingerprint").sha1_many)
        other = kernels_in(against, "_features")
        for name in ("finesse", "odess", "ntransform"):
            if any(
                (getattr(other, name)(*segment) != getattr(_features, name)(*segment)).any() for segment in segments
            ):
                raise BadInput(
                    f"--against {against}: {name} gives other super-features, so their speeds do not compare"
                )
            found[f"against: {name}"] = over(getattr(other, name))
    return found


def measured(segments: list[Segment], against: Path | None, rounds: int) -> tuple[float, list[Row]]:
    """Return the peer's median speed in GB/s and a row for every subject."""
    total_bytes = sum(len(payload) for payload, _, _ in segments)
    blocks = total_bytes // SHA1_BLOCK_BYTES
    block = bytes(SHA1_BLOCK_BYTES)

    def peer() -> None:
        for _ in range(blocks):
            hashlib.sha1(block, usedforsecurity=False).digest()

    def gbps(work: Callable[[], object], work_bytes: int) -> float:
        started = time.thread_time()
        for _ in range(PASSES):
            work()
        return PASSES * work_bytes / (time.thread_time() - started) / 1e9

    chosen = subjects(segments, against)
    peers: list[float] = []
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, work in chosen.items():
            peers.append(gbps(peer, blocks * SHA1_BLOCK_BYTES))
            pairs[name].append((gbps(work, total_bytes), peers[-1]))
    rows = []
    for name, speeds in pairs.items():
        quartiles = statistics.quantiles([own / other for own, other in speeds], n=4)
        own = [speed for speed, _ in speeds]
        aim = AIMS.get(name) if _features.cpu_path() == "avx512" else None
        rows.append(Row(name, statistics.median(own), max(own), quartiles[1], (quartiles[0], quartiles[2]), aim))
    return statistics.median(peers), rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="SHA-1 and super-features against OpenSSL's SHA-1 over 8 KiB blocks.")
    parser.add_argument("--corpus", default="text", help='"text", "random", botocore, rdb or vm')
    parser.add_argument("--against", type=Path, help="folder of kernels built from another state of the source")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.rounds < 3:
        parser.error("--rounds: needs 3 or more for a median and quartiles")
    try:
        with pinned(choose_core(chosen.core)):
            segments = segments_of(corpus_bytes(chosen.corpus))
            peer_gbps, rows = measured(segments, chosen.against, chosen.rounds)
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    lengths = np.concatenate([lengths for _, _, lengths in segments])
    few, many, few_max = _fingerprint.sha1_choice()
    print(
        f"{chosen.corpus}: {len(lengths)} chunks, {lengths.min()} to {lengths.max()} bytes, mean {lengths.mean():.0f};"
        f" path {_features.cpu_path()}; core {chosen.core}, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    print(f"SHA-1 engines: {many or few} for many chunks, {few} for up to {few_max}")
    print(f"peer: hashlib.sha1 over 8 KiB blocks, {peer_gbps:.2f} GB/s", "", sep="\n")
    print("| subject | GB/s | best | ratio | middle half | aim |", "|---|---|---|---|---|---|", sep="\n")
    for row in rows:
        low, high = row.ratio_quartiles
        aim = "" if row.aim is None else f">= {row.aim}"
        print(
            f"| {row.subject} | {row.median_gbps:.2f} | {row.best_gbps:.2f} | {row.ratio:.2f} |"
            f" {low:.2f} to {high:.2f} | {aim} |"
        )
    if chosen.json:
        record = {
            "machine": platform.machine(),
            "path": _features.cpu_path(),
            "corpus": chosen.corpus,
            "sha1_choice": [few, many, few_max],
            "sha1_block_nanoseconds": _fingerprint.sha1_engines(),
            "peer_gbps": peer_gbps,
            "rows": [asdict(row) for row in rows],
        }
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
