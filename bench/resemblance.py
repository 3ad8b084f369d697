"""The Finesse paper's Table 3 and Figure 4 over our corpora. Invariant: every approach sees the same fresh chunks.

    python bench/resemblance.py --corpus botocore,rdb,vm --core 1

As in section 5.1 of the paper (FAST '19): Rabin chunking at 8 KiB, SHA-1 dedup, 3 super-features of 4 features,
FirstFit, Xdelta. A chunk that found a base is not offered as a base itself, so every delta is one step deep.

    DCR  bytes of fresh chunks / (bytes of chunks kept whole + bytes of deltas)
    DCE  1 - bytes of deltas / bytes of the chunks they stand for
    speed  bytes of fresh chunks / seconds to compute their super-features (10^6 bytes a second)
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "shared"))

from nearkin.errors import NearkinError, choose
from nearkin.kernels import features
from nearkin.kernels.chunking import rabin_cut
from nearkin.kernels.fingerprint import sha1_many
from nearkin.kernels.xdelta3 import encode_many
from nearkin.testing.corpora import CORPORA

CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX = 2048, 8192, 65536
SPEED_BYTES_MAX = 64 << 20  # of fresh chunks; far beyond any cache, and a run of all five takes seconds

Offsets = NDArray[np.uint64]
Lengths = NDArray[np.uint32]
Sketch = Callable[[memoryview, Offsets, Lengths], NDArray[np.uint64]]

APPROACHES: dict[str, Sketch] = {
    "ntransform": features.ntransform,
    "finesse": features.finesse,
    "odess": features.odess,
}
SPEEDS: dict[str, Sketch] = {
    "ntransform, scalar": features.ntransform_scalar,
    "finesse, scalar": features.finesse_scalar,
    "ntransform, vector": features.ntransform,
    "finesse, vector": features.finesse,
    "odess, vector": features.odess,
}


@dataclass(frozen=True, slots=True)
class Fresh:
    """The chunks of a corpus that dedup kept, in the order they came, as slices of one buffer."""

    payload: memoryview
    offsets: Offsets
    lengths: Lengths
    logical_bytes: int


@dataclass(frozen=True, slots=True)
class Efficiency:
    """One row of Table 3, and what it is made of."""

    corpus: str
    approach: str
    dcr: float
    dce: float
    paired_chunks: int
    refused_chunks: int
    """Of them, those whose delta was no smaller than the chunk: kept whole."""


def fresh_chunks(paths: list[Path]) -> Fresh:
    """Cut every file, and keep the first of each chunk that is the same."""
    # only the pages that chunks are copied to take memory
    payload = np.empty(sum(path.stat().st_size for path in paths), dtype=np.uint8)
    seen: set[bytes] = set()
    kept_lengths: list[int] = []
    used_bytes = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, dtype=np.uint8)
            lengths = rabin_cut(data, CHUNK_BYTES_MIN, CHUNK_BYTES_TARGET, CHUNK_BYTES_MAX, True)
            offsets = np.zeros(len(lengths), dtype=np.uint64)
            np.cumsum(lengths[:-1], out=offsets[1:])
            names = sha1_many(data, offsets, lengths).tobytes()
            places = zip(offsets.tolist(), lengths.tolist(), strict=True)
            for number, (offset, length) in enumerate(places):
                name = names[20 * number : 20 * number + 20]
                if name not in seen:
                    seen.add(name)
                    payload[used_bytes : used_bytes + length] = data[offset : offset + length]
                    kept_lengths.append(length)
                    used_bytes += length
            del data  # a mapping with a view on it does not close
    kept = np.array(kept_lengths, dtype=np.uint32)
    starts = np.zeros(len(kept), dtype=np.uint64)
    np.cumsum(kept[:-1], out=starts[1:])
    return Fresh(payload[:used_bytes].data, starts, kept, len(payload))


def first_fit(sketches: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return every chunk's base, or -1: the first earlier chunk without a base that shares a super-feature.

    sketches: uint64[n, super_features]; a row of zeros shares nothing. Super-features are tried in order.
    """
    bases = np.full(len(sketches), -1, dtype=np.int64)
    owners: list[dict[int, int]] = [{} for _ in range(sketches.shape[1])]
    for number, row in enumerate(sketches.tolist()):
        if not any(row):
            continue
        for owner, super_feature in zip(owners, row, strict=True):
            base = owner.get(super_feature)
            if base is not None:
                bases[number] = base
                break
        else:
            for owner, super_feature in zip(owners, row, strict=True):
                owner.setdefault(super_feature, number)
    return bases


def efficiency(corpus: str, approach: str, fresh: Fresh) -> Efficiency:
    """Return one row of Table 3."""
    bases = first_fit(APPROACHES[approach](fresh.payload, fresh.offsets, fresh.lengths))
    targets = np.flatnonzero(bases >= 0)
    chosen = bases[targets]
    target_lengths = fresh.lengths[targets]
    _, delta_lengths = encode_many(
        fresh.payload,
        fresh.offsets[targets],
        target_lengths,
        fresh.payload,
        fresh.offsets[chosen],
        fresh.lengths[chosen],
        level=1,
        limit_bytes=target_lengths - np.uint32(1),
    )
    made = delta_lengths > 0
    before_bytes = int(target_lengths[made].sum(dtype=np.int64))
    delta_bytes = int(delta_lengths.sum(dtype=np.int64))
    fresh_bytes = len(fresh.payload)
    return Efficiency(
        corpus=corpus,
        approach=approach,
        dcr=fresh_bytes / max(1, fresh_bytes - before_bytes + delta_bytes),
        dce=1 - delta_bytes / before_bytes if before_bytes else 0.0,
        paired_chunks=len(targets),
        refused_chunks=int(len(targets) - made.sum()),
    )


def speed_mbps(sketch: Sketch, fresh: Fresh, runs: int) -> float:
    """Return the median speed over the first `SPEED_BYTES_MAX` bytes of fresh chunks."""
    count = int(np.searchsorted(fresh.offsets + fresh.lengths, SPEED_BYTES_MAX, side="right")) or 1
    offsets, lengths = fresh.offsets[:count], fresh.lengths[:count]
    total_bytes = int(lengths.sum(dtype=np.int64))
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        sketch(fresh.payload, offsets, lengths)
        seconds.append(time.perf_counter() - started)
    return total_bytes / statistics.median(seconds) / 1e6


def _table_3(rows: list[Efficiency]) -> list[str]:
    lines = [
        "| corpus | approach | DCR | DCE | chunks with a base | of them refused |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        yard = next(one for one in rows if one.corpus == row.corpus)  # N-transform, as in the paper
        dcr, dce = f"{row.dcr:.2f}", f"{row.dce:.4f}"
        if row is not yard:
            dcr += f" ({row.dcr / yard.dcr - 1:+.2%})" if yard.dcr else ""
            dce += f" ({row.dce / yard.dce - 1:+.2%})" if yard.dce else ""
        lines.append(f"| {row.corpus} | {row.approach} | {dcr} | {dce} | {row.paired_chunks} | {row.refused_chunks} |")
    return lines


def _figure_4(speeds: dict[str, dict[str, float]]) -> list[str]:
    corpora = list(speeds)
    lines = [f"| approach | {' | '.join(corpora)} |", f"|---|{'---|' * len(corpora)}"]
    lines += [
        f"| {name} | " + " | ".join(f"{speeds[corpus][name]:.0f}" for corpus in corpora) + " |" for name in SPEEDS
    ]
    for code in ("scalar", "vector"):
        ratios = [speeds[corpus][f"finesse, {code}"] / speeds[corpus][f"ntransform, {code}"] for corpus in corpora]
        lines.append(f"| finesse / ntransform, {code} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return lines


def main() -> int:
    """Print the table and the figure."""
    parser = argparse.ArgumentParser(
        description="Resemblance detection: efficiency and speed, as in the Finesse paper."
    )
    parser.add_argument("--corpus", default="botocore,rdb,vm", help="comma-separated names, or folders of files")
    parser.add_argument("--versions", type=int, help="of each corpus; default: 5 (2 of vm), all of a folder")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="of each speed; the median is printed")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {chosen.core})

    rows: list[Efficiency] = []
    speeds: dict[str, dict[str, float]] = {}
    sizes = []
    try:
        for corpus in chosen.corpus.split(","):
            if Path(corpus).is_dir():
                paths = sorted(path for path in Path(corpus).iterdir() if path.is_file())[: chosen.versions]
            elif corpus in CORPORA:
                paths = CORPORA[corpus](chosen.versions or (2 if corpus == "vm" else 5), None)
            else:
                raise choose("--corpus", corpus, CORPORA)
            fresh = fresh_chunks(paths)
            sizes.append(
                f"- {corpus}: {len(paths)} versions, {fresh.logical_bytes / 1e6:.0f} MB, of them"
                f" {len(fresh.payload) / 1e6:.0f} MB fresh in {len(fresh.lengths)} chunks"
            )
            rows += [efficiency(corpus, approach, fresh) for approach in APPROACHES]
            speeds[corpus] = {name: speed_mbps(sketch, fresh, chosen.runs) for name, sketch in SPEEDS.items()}
    except NearkinError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(sizes), "", "Table 3: delta compression of the fresh chunks", "", sep="\n")
    print("\n".join(_table_3(rows)))
    title = f"Figure 4: speed of super-features, MB/s, core {chosen.core}, median of {chosen.runs};"
    print("", f"{title} vector code is {features.cpu_path()}", "", sep="\n")
    print("\n".join(_figure_4(speeds)))
    if chosen.json:
        record = {"machine": platform.machine(), "table_3": [asdict(row) for row in rows], "figure_4_mbps": speeds}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
