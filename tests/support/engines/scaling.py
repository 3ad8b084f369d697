"""Change the number of workers while blobs are put, as an autoscaler does.

    replicas   1 -> 2 -> 3 -> 4 -> 3 -> 2 -> 1, a step after each seventh of the blobs

Several clients put blobs through a real gateway, each with an idempotency key. New workers join the consumer groups,
others end by SIGTERM, as a Deployment ends them. Afterwards: every 201 and every 202 restores byte for byte, no version
exists twice, and every partition advances.

Invariant: all random choices derive from one seed, which is printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.engines.durability import Promises, Report
from tests.support.servers.pipeline import ENDED, FUSED, GATEWAY, SPLIT, Pipeline, replicas_of
from tests.support.servers.server import free_port
from tests.support.servers.servers import Kafka, Redis

REPLICAS_MAX = 4
STEPS = (*range(2, REPLICAS_MAX + 1), *range(REPLICAS_MAX - 1, 0, -1))
"""Numbers of replicas, one after another."""
WAIT_SECONDS_MAX = 30.0
"""Longest wait for the blobs before a step: the replicas change even if puts are slow."""
SCALED: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {"fused": (FUSED, "pipeline"), "split": (SPLIT, "delta")}
)
"""By mode: the workers that run throughout, and the service whose replicas change."""


class Scaling:
    """One run."""

    def __init__(self, folder: Path, seed: int, blobs: int, mode: str, report_line: Callable[[str], None]) -> None:
        """`mode`: one of SCALED."""
        self._services, self._scaled = SCALED[mode]
        self._promises = Promises(seed, blobs, free_port())
        self.report = self._promises.report
        self._print, self._folder = report_line, folder
        self._kafka, self._redis = Kafka(folder / "kafka"), Redis(folder / "redis")

    def run(self) -> Report:
        """Run, settle, and check."""
        started = time.monotonic()
        self._print(f"seed {self.report.seed}: {self.report.blobs} blobs")
        with self._kafka, self._redis, self._pipeline() as pipeline:
            pipeline.start(GATEWAY)
            self._promises.ready()
            scaler = threading.Thread(target=self._scale, args=(pipeline,), name="scaling")
            scaler.start()
            puts = self._promises.put_all()
            scaler.join()
            self._promises.check(puts)
            self._promises.check_flow(pipeline)
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
                    "topic_prefix": "scaling.",
                    "partitions": REPLICAS_MAX,
                    "session_timeout_ms": 6000,
                },
                "redis": {"url": self._redis.url},
                "object_store": {"url": str(self._folder / "objects")},
                "gateway": {"port": self._promises.port},
            },
            services=self._services,
        )

    def _scale(self, pipeline: Pipeline) -> None:
        """Change the replicas, spread evenly over the puts; a worker that ends reports a failure by its exit code."""
        names = (self._scaled, *replicas_of(self._scaled, REPLICAS_MAX))
        running = 1
        for position, wanted in enumerate(STEPS, 1):
            next_puts = position * self.report.blobs // (len(STEPS) + 1)
            waited = time.monotonic()
            while self._promises.done < next_puts and time.monotonic() - waited < WAIT_SECONDS_MAX:
                time.sleep(0.05)
            self._print(f"{self._promises.done} blobs put: {running} -> {wanted} replicas")
            if wanted > running:
                pipeline.start(names[wanted - 1])
            elif (code := pipeline.end(names[running - 1])) not in ENDED:
                self.report.problems.append(f"{names[running - 1]} ended with {code}")
            running = wanted
