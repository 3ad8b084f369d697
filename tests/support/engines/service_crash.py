"""Kill services at failpoints.

Invariant: all promises are kept, whichever step each service died at.

    python -m tests.support.engines.service_crash --kills 200 --seed 7

Kafka, Redis and a folder of objects are real, workers and gateway are separate processes. Clients put and delete
throughout. A worker is started with an armed failpoint, dies there, and is restarted with the next one: two of them
at a time, so that the others continue.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import click
import redis as redis_client

from tests.support.engines.durability import Promises, Report
from tests.support.servers.pipeline import ENDED, GATEWAY, SPLIT, Pipeline
from tests.support.servers.server import free_port
from tests.support.servers.servers import Kafka, Redis

AT_A_TIME = 2
DIES_SECONDS_MAX = 25.0
"""Time to reach a failpoint: a worker starts in 3 s, on a busy machine in 10; afterwards it is killed anywhere."""
BLOBS_A_KILL = 12
LOOP = ("worker.received", "worker.handled", "worker.committed")
OBJECT = ("object.written", "object.synced", "object.linked", "object.durable")
DYING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        GATEWAY: ("upload.begun", "upload.sent", "upload.durable", "delete.noted", "delete.marked"),
        "chunker": (*LOOP, "cut.sent", "cut.batch-sent", "sparse.sent"),
        "dedup": (*LOOP, "relay.sent"),
        "resemblance": (*LOOP, "relay.sent"),
        "delta": (
            *LOOP,
            *OBJECT,
            "place.container",
            "place.published",
            "place.sent",
            "place.flushed",
            "version.manifest",
            "version.catalogued",
            "version.sent",
            "batch.manifest",
            "batch.catalogued",
            "batch.sent",
        ),
        "pipeline": (
            *LOOP,
            "cut.sent",
            "relay.sent",
            "place.container",
            "place.published",
            "place.sent",
            "place.flushed",
            "version.manifest",
        ),
        "maintenance": (
            "lease.taken",
            "lease.released",
            "fence.passed",
            "gc.reported",
            "gc.marked",
            "gc.pending-withdrawn",
            "gc.generation",
            "gc.recorded",
            "gc.done",
            "rebuild.begun",
            "rebuild.container",
            "rebuild.versions",
            "rebuild.complete",
        ),
    }
)
"""Failpoints that each service passes while blobs are put and deleted; a rebuild follows when Redis was emptied."""


class Deaths:
    """One run."""

    def __init__(self, folder: Path, seed: int, kills: int, report_line: Callable[[str], None]) -> None:
        self._promises = Promises(seed, BLOBS_A_KILL * kills + 24, free_port())
        self.report = self._promises.report
        self._print = report_line
        self._folder = folder
        draw = random.Random(seed)
        every = [(service, point) for service, points in DYING.items() for point in points]
        self._planned: list[tuple[str, str, int]] = []
        while len(self._planned) < kills:
            draw.shuffle(every)  # each of them once, before any is repeated
            self._planned += [(service, point, draw.choice((1, 1, 2, 3))) for service, point in every]
        del self._planned[kills:]
        self._busy: set[str] = set()
        self._free = threading.Condition()
        self._kafka, self._redis = Kafka(folder / "kafka"), Redis(folder / "redis")

    def run(self) -> Report:
        """Run, settle, and check."""
        started = time.monotonic()
        self._print(f"seed {self.report.seed}: {len(self._planned)} deaths, up to {self.report.blobs} blobs")
        with self._kafka, self._redis, self._pipeline() as pipeline:
            pipeline.start(GATEWAY)
            self._promises.ready()
            killers = [threading.Thread(target=self._kill, args=(pipeline,), name="deaths") for _ in range(AT_A_TIME)]
            for killer in killers:
                killer.start()
            puts = self._promises.put_all(lambda: not any(killer.is_alive() for killer in killers))
            for killer in killers:
                killer.join()
            self._print(f"{len(puts)} blobs put, all deaths died after {time.monotonic() - started:.0f} s; settling")
            settling = time.monotonic()
            self._promises.ready()
            self._promises.check(puts)
            self._promises.check_flow(pipeline)
            self.report.blobs = len(puts)
            self.report.settle_seconds = time.monotonic() - settling
            codes = pipeline.stop()
            if any(code not in ENDED for code in codes.values()):
                self.report.problems.append(f"workers ended with {codes}")
        self.report.seconds = time.monotonic() - started
        return self.report

    def _pipeline(self) -> Pipeline:
        return Pipeline(
            self._folder / "pipeline",
            {
                "kafka": {
                    "bootstrap_servers": self._kafka.bootstrap,
                    "topic_prefix": "deaths.",
                    "partitions": 2,
                    "upload_idle_seconds": 60,
                    "session_timeout_ms": 6000,
                },
                "redis": {"url": self._redis.url},
                "object_store": {"url": str(self._folder / "objects")},
                "gateway": {"port": self._promises.port},
                "gc": {"interval_seconds": 1},
            },
            services=(*SPLIT, "pipeline"),
        )

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _kill(self, pipeline: Pipeline) -> None:
        """Do the next kill of a service that no other thread is killing, until none is left."""
        while True:
            with self._free:
                while True:
                    if not self._planned:
                        return
                    at = next((n for n, planned in enumerate(self._planned) if planned[0] not in self._busy), None)
                    if at is not None:
                        break
                    self._free.wait()
                service, point, count = self._planned.pop(at)
                self._busy.add(service)
            try:
                died = self._die(pipeline, service, f"{point}:{count}:kill")
                kind = f"{service} {point}" if died else "elsewhere"
                with self._free:
                    self.report.kills[kind] = self.report.kills.get(kind, 0) + 1
            finally:
                with self._free:
                    self._busy.discard(service)
                    self._free.notify_all()

    def _die(self, pipeline: Pipeline, service: str, armed: str) -> bool:
        """Restart a service with a failpoint that kills it; return whether it died.

        It runs when this returns.
        """
        pipeline.kill(service)
        if armed.startswith("rebuild."):
            with redis_client.Redis.from_url(self._redis.url) as client:
                client.flushall()
        pipeline.start(service, armed)
        process = pipeline.processes[service]
        try:
            died = process.wait(DIES_SECONDS_MAX) == -signal.SIGKILL
            if not died:
                self.report.problems.append(f"{service}, {armed}: ended by itself with {process.returncode}")
        except subprocess.TimeoutExpired:
            pipeline.kill(service)
            died = False
        pipeline.start(service)
        return died


@click.command()
@click.option("--kills", default=200, show_default=True)
@click.option("--seed", type=int, help="of an earlier run: the same blobs and deaths; by lot")
@click.option("--folder", type=click.Path(path_type=Path), help="where all is kept; a temporary folder")
def main(kills: int, seed: int | None, folder: Path | None) -> None:
    """Kill services at failpoints, and check that all acknowledged versions exist, once, and no others."""
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    work_folder = Path(tempfile.mkdtemp(prefix="nearkin-deaths-", dir=folder))
    report = Deaths(work_folder, seed, kills, click.echo).run()
    click.echo(json.dumps(asdict(report), indent=1, ensure_ascii=False))
    met = sum(kind != "elsewhere" for kind in report.kills)
    click.echo(f"{sum(report.kills.values())} deaths at {met} points; {len(report.problems)} problems")
    if report.problems:  # keep the data for inspection
        click.echo(f"seed {seed}, {work_folder}: {report.problems[0]}", err=True)
        sys.exit(1)
    shutil.rmtree(work_folder)


if __name__ == "__main__":
    main()
