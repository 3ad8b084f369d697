"""The services on this machine: MB/s end to end, bytes a stage, who uses the CPU, and what Python costs a segment.

    python bench/pipeline.py --versions 4

Kafka, Redis and one worker of each service run beside the uploader; the store is a folder. Every blob is waited for;
the last is put twice: the second time everything is known.
Copies of payload count as Python here, since no kernel makes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from nearkin.config import Settings
from nearkin.fingerprints import Fingerprinter
from nearkin.formats.message import Envelope, Frame, encode
from nearkin.index.redis import RedisIndex
from nearkin.runners.kafka.chunking import ChunkHandler
from nearkin.runners.kafka.clients import STAGE_TOPICS, Outbox
from nearkin.runners.kafka.loop import Record
from nearkin.runners.kafka.placing import PlaceHandler
from nearkin.runners.kafka.relaying import RelayHandler, dedup_work, resemblance_work
from nearkin.runners.kafka.tenants import lanes
from nearkin.store.objects import memory_objects
from nearkin.testing.corpora import botocore
from nearkin.testing.pipeline import Pipeline, file_pieces, uploading
from nearkin.testing.servers import Kafka, Redis
from nearkin_chunker import ChunkerStage

MB = 1_000_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args()
    files = botocore(chosen.versions)
    with tempfile.TemporaryDirectory(prefix="nearkin-pipeline-") as folder:
        figures = {"end_to_end": end_to_end(Path(folder), files), "overhead": overhead(Path(folder), files)}
    print(tables(figures))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))


def end_to_end(folder: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row a put."""
    rows = []
    with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
        config = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "bench.", "partitions": 2},
            "redis": {"url": redis.url},
            "object_store": {"url": str(folder / "objects")},
        }
        with Pipeline(folder / "pipeline", config) as pipeline, uploading(pipeline.settings) as uploader:
            uploader.wait(uploader.put("warm", [bytes(100_000)]))
            processes = {name: psutil.Process(process.pid) for name, process in pipeline.processes.items()}
            processes |= {"kafka": psutil.Process(kafka.pid), "redis": psutil.Process(redis.pid)}
            processes["uploader"] = psutil.Process()
            for number, path in enumerate([*files, files[-1]]):
                before, sent = cpu_seconds(processes), topic_bytes(folder / "kafka")
                started = time.perf_counter()
                event = uploader.wait(uploader.put("b", file_pieces(path)), 600)
                seconds = time.perf_counter() - started
                after, received = cpu_seconds(processes), topic_bytes(folder / "kafka")
                ledger = event["ledger"]
                rows.append(
                    {
                        "put": "duplicate" if number == len(files) else "first" if number == 0 else "new version",
                        "blob": path.name,
                        "logical_bytes": ledger["logical_bytes"],
                        "stored_bytes": ledger["stored_bytes"],
                        "mb_per_second": ledger["logical_bytes"] / seconds / MB,
                        "cpu_seconds": {name: after[name] - before[name] for name in after},
                        "topic_bytes": {name: received[name] - sent[name] for name in received},
                    }
                )
    return rows


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Return the CPU that each has used."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def topic_bytes(kafka: Path) -> dict[str, int]:
    """Return the bytes that each stage's topic takes on the broker's disk."""
    return {name: sum(path.stat().st_size for path in kafka.rglob(f"bench.{name}-*/*.log")) for name in STAGE_TOPICS}


# --- what Python costs -----------------------------------------------------------------------------------------------


class Kept(Outbox):
    """Keeps messages for the next stage instead of sending them."""

    def __init__(self, *_: object) -> None:
        self.values: list[bytes] = []

    def send(self, name: str, key: bytes, value: bytes, headers: object) -> None:
        """Keep it."""
        self.values.append(value)

    def send_to(self, full: str, key: object, value: object, headers: object) -> None:
        """Fail: nothing here should be put aside."""
        raise RuntimeError(f"dead letter: {headers}")

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Clock:
    """CPU seconds of this thread inside the functions it wraps; the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - started

        return counted


@contextmanager
def counted_kernels(clock: Clock) -> Iterator[None]:
    """Count the kernels, wherever they were imported to, and the compressor."""
    from nearkin.formats import container

    kernels = {id(value): value for value in (container.encode_block, container.decode_block)}  # zstd and a checksum
    kernels |= {
        id(value): value
        for name, module in sys.modules.items()
        if name.startswith("nearkin.kernels._") and not name.endswith("_reference")
        for value in vars(module).values()
        if callable(value)
        and not isinstance(value, type)
        and type(value).__name__ in ("cython_function_or_method", "builtin_function_or_method")
    }
    changed = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0].startswith("nearkin") and not name.startswith("nearkin.kernels._"):
            for attribute, value in list(vars(module).items()):
                if id(value) in kernels:
                    changed.append((module, attribute, value))
                    setattr(module, attribute, clock.wrap(value))
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)


def overhead(folder: Path, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return, per stage, CPU per segment: in all, in kernels, in the index client, and what is left: Python's."""
    settings = Settings()
    rows: dict[str, dict[str, float]] = {}
    with Redis(folder / "redis-overhead") as redis:
        from nearkin.config import with_changes

        settings = with_changes(settings, {"redis": {"url": redis.url}})
        index = RedisIndex(settings.redis, b"")
        objects = memory_objects()
        tenants = lanes(settings, objects, b"s" * 32, 160, index.for_domain)
        kernels, client = Clock(), Clock()
        for name in ("locate_chunks", "locate_segments", "locate_rank", "publish"):
            setattr(RedisIndex, name, client.wrap(getattr(RedisIndex, name)))
        with counted_kernels(kernels):
            for number, path in enumerate(files[:2]):
                blob = bytes([number]) * 16
                messages = [
                    encode(Frame(Envelope(blob, "default", "k", start * 921_600), memoryview_array(piece)))
                    for start, piece in enumerate(file_pieces(path, 921_600))
                ]
                for stage in ("chunker", "dedup", "resemblance", "delta"):
                    outbox = Kept()
                    handler = make_handler(stage, settings, tenants, outbox)
                    handler.assigned(0, "")
                    records = [Record(stage, 0, at, value[8:24], value, {}, ()) for at, value in enumerate(messages)]
                    kernels.seconds = client.seconds = 0.0
                    started = time.thread_time()
                    for start in range(0, len(records), 16):
                        handler.handle(records[start : start + 16])
                    total = time.thread_time() - started
                    handler.drain(0)
                    rows[stage] = {"total": total, "kernels": kernels.seconds, "index_client": client.seconds}
                    messages = outbox.values if stage != "delta" else []
                    if stage == "chunker":
                        segments = sum(int.from_bytes(value[44:46], "little") for value in messages)
    return [
        {
            "stage": stage,
            "segments": segments,
            **{f"{name}_us": seconds / segments * 1e6 for name, seconds in row.items()},
            "python_us": (row["total"] - row["kernels"] - row["index_client"]) / segments * 1e6,
        }
        for stage, row in rows.items()
    ]


def memoryview_array(piece: bytes) -> Any:
    """Return bytes as an array."""
    import numpy as np

    return np.frombuffer(piece, np.uint8)


def make_handler(stage: str, settings: Settings, tenants: Any, outbox: Kept) -> Any:
    """Return the handler of a stage with `outbox` for its messages."""
    if stage == "chunker":
        return ChunkHandler(settings, lambda tenant: ChunkerStage(settings, Fingerprinter(b"s" * 32, tenant)), outbox)
    if stage == "dedup":
        return RelayHandler(settings, "dedup", "fresh", dedup_work(tenants), outbox)
    if stage == "resemblance":
        return RelayHandler(settings, "resemblance", "paired", resemblance_work(tenants, lambda: settings), outbox)
    import nearkin.runners.kafka.placing as placing

    placing.Outbox = Kept  # type: ignore[misc,assignment]
    return PlaceHandler(settings, lambda: settings, tenants, "bench")


def tables(figures: dict[str, Any]) -> str:
    """Return Markdown."""
    rows = figures["end_to_end"]
    names = list(rows[0]["cpu_seconds"])
    lines = [
        f"| put | MB | MB/s | {' | '.join(f'CPU {name} s' for name in names)} |",
        f"|{'---|' * (3 + len(names))}",
    ]
    for row in rows:
        shares = " | ".join(f"{row['cpu_seconds'][name]:.2f}" for name in names)
        lines.append(f"| {row['put']} | {row['logical_bytes'] / MB:.0f} | {row['mb_per_second']:.1f} | {shares} |")
    lines += ["", f"| put | {' | '.join(f'{name} MB' for name in STAGE_TOPICS)} | stored MB |", f"|{'---|' * 7}"]
    for row in rows:
        sizes = " | ".join(f"{row['topic_bytes'][name] / MB:.1f}" for name in STAGE_TOPICS)
        lines.append(f"| {row['put']} | {sizes} | {row['stored_bytes'] / MB:.2f} |")
    lines += [
        "",
        "| stage | CPU a segment, us | kernels | index client | Python | Python / kernels |",
        f"|{'---|' * 6}",
    ]
    for row in figures["overhead"]:
        share = f"{row['python_us'] / row['kernels_us']:.0%}" if row["kernels_us"] > 0.5 else "-"
        lines.append(
            f"| {row['stage']} | {row['total_us']:.0f} | {row['kernels_us']:.0f} | {row['index_client_us']:.0f} "
            f"| {row['python_us']:.0f} | {share} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
