"""Measure the pipeline on this machine: MB/s end to end, bytes per stage, CPU per process, Python time per segment.

    python -m benchmarks.pipeline --versions 4

Kafka, Redis and one worker of each service run on the same machine as the uploader; the store is a folder. The
uploader waits for every blob; the last is put again, when all its chunks are known. Each pass is a tenant of its
own, so that it begins with a first version again; the tables have the pass of the median CPU time. Unmeasured passes
come first, so that the start of a JVM and the compilation of its code are not measured. Figures:
docs/benchmarks/history.md, ADR 8.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu_by_object import CLASSES, Sampled, Timed
from nearkin.lab.corpus_cache import botocore
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import STAGE_TOPICS
from tests.support.servers.edge_uploader import EdgeUploader
from tests.support.servers.pipeline import FUSED, SPLIT, Pipeline, Uploader, file_pieces
from tests.support.servers.servers import Kafka, Redis

MB = 1_000_000
WORKERS = ("chunker", "dedup", "resemblance", "delta", "pipeline")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--duplicates", type=int, default=2, help="how often the last one is put again")
    parser.add_argument("--passes", type=int, default=3, help="measured passes, each of a tenant of its own")
    parser.add_argument("--warm", type=int, default=2, help="passes before the measured ones")
    parser.add_argument("--inline", action="store_true", help="send all bytes through Kafka in place of references")
    parser.add_argument("--edge", action="store_true", help="deduplicate in the uploader, as with gateway.edge")
    parser.add_argument("--split", action="store_true", help="a process for each stage in place of one for all")
    parser.add_argument("--kafka", action="append", default=[], metavar="FIELD=VALUE", help="a setting of [kafka]")
    parser.add_argument("--sample", action="store_true", help="sample with perf, whose own cost is then in the figures")
    parser.add_argument("--objects", action="store_true", help="as --sample, and print the shared objects, too")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args()
    changed = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in chosen.kafka)}
    files = botocore(chosen.versions)
    with tempfile.TemporaryDirectory(prefix="nearkin-pipeline-") as folder:
        rows = measured(
            Path(folder),
            Passes(files, chosen.duplicates, chosen.warm, chosen.passes),
            changed,
            SPLIT if chosen.split else FUSED,
            staged=not chosen.inline,
            edge=chosen.edge,
            is_sampled=chosen.sample or chosen.objects,
        )
    print(tables(rows))
    if chosen.objects:
        for row in rows:
            print(row["put"], json.dumps({name: _most(found) for name, found in row["objects"].items()}, indent=1))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1))


@dataclass(frozen=True)
class Passes:
    """Blobs of a pass, and the number of passes."""

    files: Sequence[Path]
    duplicates: int
    warm: int
    measured: int

    def kinds(self) -> dict[str, Sequence[Path]]:
        """Return the blobs of a pass by kind of put."""
        kinds = {
            "first version": self.files[:1],
            "new version": self.files[1:],
            "duplicate": [self.files[-1]] * self.duplicates,
        }
        return {name: paths for name, paths in kinds.items() if len(paths)}


def measured(
    folder: Path,
    passes: Passes,
    changed: dict[str, Any],
    services: Sequence[str],
    *,
    staged: bool,
    edge: bool = False,
    is_sampled: bool = False,
) -> list[dict[str, Any]]:
    """Return one row a kind of put, the median of its passes by CPU time."""
    with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
        config = {
            "kafka": {
                "bootstrap_servers": kafka.bootstrap,
                "topic_prefix": "bench.",
                "partitions": 2,
                "trim_seconds": 0,  # the tables have what the topics take
                **changed,
            },
            "redis": {"url": redis.url},
            "object_store": {"url": str(folder / "objects")},
        }
        with Pipeline(folder / "pipeline", config, services=services) as pipeline:
            pids = {name: process.pid for name, process in pipeline.processes.items() if name in WORKERS}
            pids |= {"kafka": kafka.pid, "redis": redis.pid, "uploader": psutil.Process().pid}
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in passes.kinds()}
            for number in range(-passes.warm, passes.measured):
                tenant = f"pass-{number}" if number >= 0 else f"warm{number}"
                with closing(_client(pipeline.settings, tenant, staged=staged, edge=edge)) as uploader:
                    for name, paths in passes.kinds().items():
                        timed = (Sampled if is_sampled else Timed)(pids)
                        row = row_of(name, uploader, paths, timed, folder / "kafka", staged=staged)
                        if number >= 0:
                            found[name].append(row)
            return [sorted(rows, key=_cpu_seconds)[len(rows) // 2] for rows in found.values()]


def _cpu_seconds(row: dict[str, Any]) -> float:
    return float(sum(row["cpu"].values()))


def _client(settings: Settings, tenant: str, *, staged: bool, edge: bool) -> Uploader:
    return EdgeUploader(settings, tenant, staged=staged) if edge else Uploader(settings, tenant)


def row_of(
    kind: str, uploader: Uploader, paths: Sequence[Path], timed: Timed, kafka: Path, *, staged: bool
) -> dict[str, Any]:
    """Put blobs one after another; return the figures of all together."""
    sent, events, seconds = topic_bytes(kafka), [], 0.0
    with timed:
        for path in paths:
            started = time.perf_counter()
            events.append(uploader.wait(uploader.put("b", file_pieces(path), staged=staged), 600))
            seconds += time.perf_counter() - started
    received = topic_bytes(kafka)
    logical_bytes = sum(event["ledger"]["logical_bytes"] for event in events)
    return {
        "put": kind,
        "logical_bytes": logical_bytes,
        "stored_bytes": sum(event["ledger"]["stored_bytes"] for event in events),
        "segments": sum(event["segments"] for event in events),
        "mb_per_second": logical_bytes / seconds / MB,
        "cpu": timed.seconds,
        "classes": timed.classes,
        "objects": timed.objects,
        "topic_bytes": {name: received[name] - sent[name] for name in received},
    }


def topic_bytes(kafka: Path) -> dict[str, int]:
    """Return the bytes that each stage's topic takes on the broker's disk."""
    return {name: sum(path.stat().st_size for path in kafka.rglob(f"bench.{name}-*/*.log")) for name in STAGE_TOPICS}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown."""
    names = list(rows[0]["cpu"])
    lines = [f"| CPU s/GB of | MB | MB/s | {' | '.join(names)} | sum |", f"|{'---|' * (4 + len(names))}"]
    for row in rows:
        each = [row["cpu"][name] / row["logical_bytes"] * 1e9 for name in names]
        shares = " | ".join(f"{found:.1f}" for found in [*each, sum(each)])
        lines.append(f"| {row['put']} | {row['logical_bytes'] / MB:.0f} | {row['mb_per_second']:.1f} | {shares} |")
    lines += ["", f"| MB a 100 MB put | {' | '.join(STAGE_TOPICS)} | stored |", f"|{'---|' * 7}"]
    for row in rows:
        sizes = [*(row["topic_bytes"][name] for name in STAGE_TOPICS), row["stored_bytes"]]
        shares = " | ".join(f"{size / row['logical_bytes'] * 100:.2f}" for size in sizes)
        lines.append(f"| {row['put']} | {shares} |")
    if rows[0]["classes"]:
        lines += _class_table(rows)
    return "\n".join(lines)


def _class_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", f"| us a segment | worker | {' | '.join(CLASSES)} | / kernels | / all native |", f"|{'---|' * 9}"]
    for row in rows:
        for name in filter(row["classes"].__contains__, WORKERS):
            each_us = {kind: seconds / row["segments"] * 1e6 for kind, seconds in row["classes"][name].items()}
            python_us = each_us["interpreter"]
            native_us = sum(each_us.values()) - python_us
            figures = " | ".join(f"{each_us[kind]:.1f}" for kind in CLASSES)
            share = f"{python_us / each_us['kernels']:.0%}" if each_us["kernels"] > 1 else "-"
            lines.append(f"| {row['put']} | {name} | {figures} | {share} | {python_us / native_us:.0%} |")
    return lines


def _most(found: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in sorted(found.items(), key=lambda item: -item[1])[:8]}


if __name__ == "__main__":
    main()
