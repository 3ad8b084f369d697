"""Run the whole pipeline while its parts die.

Invariant: all random choices derive from one seed, which is printed.

Several clients put blobs through the gateway, each with an idempotency key and the retries of a real client.
Small records of a user's topic arrive through ingest between them, in batches. Meanwhile workers, ingest and gateway
are SIGKILLed, Kafka is restarted, Redis is emptied and killed, the S3 server is stopped. Afterwards: every 201 and
every 202 restores byte for byte, each record is one version, in order, no version exists twice, and every partition
advances.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import redis as redis_client

from tests.support.engines.durability import Promises, Report
from tests.support.engines.record_stream import TOPIC, RecordStream
from tests.support.servers.pipeline import ENDED, GATEWAY, Pipeline
from tests.support.servers.server import free_port
from tests.support.servers.servers import S3, Kafka, Redis

S3_AWAY_SECONDS = 10.0
REDIS_AWAY_SECONDS = 2.0
RECORDS_A_BLOB = 40
"""Records of the user's topic for each blob that is put: bursts of them fill several batches."""
INGEST = "ingest"
ALWAYS = (GATEWAY, INGEST)
"""Parts that run, and die, whichever stages share a process."""
SPLIT_WORKERS = ("chunker", "dedup", "resemblance", "delta")
FUSED_WORKERS = ("pipeline",)
SWITCH = "switch"
COMMITTER = "committer"
WITH_COMMITTER = ("delta", "pipeline")
MODES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "split": (SPLIT_WORKERS, SPLIT_WORKERS),
        "fused": (FUSED_WORKERS, FUSED_WORKERS),
        "mixed": ((*SPLIT_WORKERS, *FUSED_WORKERS), (*SPLIT_WORKERS, *FUSED_WORKERS)),
        "to-fused": (SPLIT_WORKERS, FUSED_WORKERS),
        "to-split": (FUSED_WORKERS, SPLIT_WORKERS),
    }
)
"""Workers that run in the first half of the deaths, and in the second."""


GRACE_SECONDS = 600
"""A blob that is in flight for longer than half of it may fail, visibly; records of a topic are not put again then."""


class Chaos:
    """One run."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        blobs: int,
        kills: int,
        report_line: Callable[[str], None],
        mode: str = "split",
        *,
        edge: bool = False,
        gc_mode: str | None = None,
    ) -> None:
        """`mode`: one of MODES, the stages that share a process. `edge`: the gateway deduplicates.

        `gc_mode`: garbage is collected every second in this mode, with a grace of GRACE_SECONDS.
        """
        self._edge = edge
        self._gc = {} if gc_mode is None else {"mode": gc_mode, "interval_seconds": 1, "grace_seconds": GRACE_SECONDS}
        self._before, self._after = MODES[mode]
        self._victims = (*self._before, *ALWAYS)
        self._promises = Promises(seed, blobs, free_port())
        self._records = RecordStream(seed, RECORDS_A_BLOB * blobs)
        self.report = self._promises.report
        self._print = report_line
        self._kills = kills
        self._random = random.Random(seed)
        self._folder = folder
        self._kafka, self._redis, self._s3 = Kafka(folder / "kafka"), Redis(folder / "redis"), S3(folder / "s3")

    def run(self) -> Report:
        """Run, settle, and check."""
        started = time.monotonic()
        self._print(f"seed {self.report.seed}: {self.report.blobs} blobs, {self._kills} kills")
        with self._kafka, self._redis, self._s3, self._pipeline() as pipeline, ThreadPoolExecutor(1, "records") as more:
            RecordStream.make_topic(self._kafka.bootstrap)
            pipeline.start(GATEWAY)
            self._promises.ready()
            stop = threading.Event()
            killer = threading.Thread(target=self._kill, args=(pipeline, stop), name="chaos")
            killer.start()
            records = more.submit(self._records.send, self._kafka.bootstrap, self._share_of_puts)
            puts = self._promises.put_all()
            killer.join()
            records.result()
            self._print(f"all put after {time.monotonic() - started:.0f} s; settling")
            settling = time.monotonic()
            self._promises.ready()
            self._promises.check(puts)
            self._records.check(self._promises.url, pipeline.settings, self.report)
            self._promises.check_flow(pipeline)
            self.report.settle_seconds = time.monotonic() - settling
            codes = pipeline.stop()
            if any(code not in ENDED for code in codes.values()):
                self.report.problems.append(f"workers ended with {codes}")
        self.report.seconds = time.monotonic() - started
        return self.report

    def _share_of_puts(self) -> float:
        return self._promises.done / self.report.blobs

    def _pipeline(self) -> Pipeline:
        bucket = self._s3.make_bucket("chaos")
        return Pipeline(
            self._folder / "pipeline",
            {
                "kafka": {
                    "bootstrap_servers": self._kafka.bootstrap,
                    "topic_prefix": "chaos.",
                    "partitions": 2,
                    "upload_idle_seconds": 20,
                    "session_timeout_ms": 6000,
                },
                "redis": {"url": self._redis.url},
                "object_store": {
                    "url": f"s3://{bucket}/store",
                    "endpoint": self._s3.endpoint,
                    "access_key_id": self._s3.access_key_id,
                    "secret_access_key": self._s3.secret_access_key,
                    "allow_http": True,
                },
                "gateway": {"port": self._promises.port, "edge": self._edge},
                "ingest": {"topics": [TOPIC]},
                "gc": self._gc,
            },
            environments={"maintenance": {"TMPDIR": str(self._folder)}},
            services=(*self._before, INGEST, "maintenance"),
        )

    def _victim(self, event: str) -> str:
        """Return which part dies: any one, or the worker that has the committer, or the one that is named."""
        if event == COMMITTER:
            return self._random.choice([name for name in self._victims if name in WITH_COMMITTER])
        return self._random.choice(self._victims) if event == "worker" else event

    def _switch(self, pipeline: Pipeline) -> None:
        """Start the workers of the other grouping, then end the earlier ones, as a rollout does."""
        self._print(f"{self._promises.done} blobs put: the stages move from {self._before} to {self._after}")
        for name in self._after:
            pipeline.start(name)
        for name in self._before:
            code = pipeline.end(name)
            if code not in ENDED:  # it may have been started again just before
                self.report.problems.append(f"{name} ended with {code}")
        self._victims = (*self._after, *ALWAYS)

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _kill(self, pipeline: Pipeline, stop: threading.Event) -> None:
        """Spread the kills evenly over the puts."""
        events: list[str] = ["worker"] * self._kills
        for special in ("kafka", "kafka", "redis-flush", "redis-kill", "s3", INGEST, INGEST, COMMITTER):
            events.insert(self._random.randrange(len(events) + 1), special)
        if self._after != self._before:
            events.insert(len(events) // 2, SWITCH)
        for position, event in enumerate(events):
            victim = self._victim(event)
            next_puts = position * self.report.blobs // (len(events) + 1)
            waited = time.monotonic()
            while self._promises.done < next_puts and time.monotonic() - waited < 10:
                time.sleep(0.05)
            self.report.kills[victim] = self.report.kills.get(victim, 0) + 1
            if victim == SWITCH:
                self._switch(pipeline)
            elif victim in self._victims:
                pipeline.kill(victim)
                time.sleep(self._random.uniform(0, 0.5))
                pipeline.start(victim)
            elif victim == "kafka":
                self._print(f"{self._promises.done} blobs put: kafka restarts")
                self._kafka.restart()
            elif victim == "redis-flush":
                self._print(f"{self._promises.done} blobs put: redis is emptied")
                with redis_client.Redis.from_url(self._redis.url) as client:
                    client.flushall()
            elif victim == "redis-kill":
                self._print(f"{self._promises.done} blobs put: redis is killed")
                self._redis.kill()
                time.sleep(REDIS_AWAY_SECONDS)
                self._redis.start()
            else:
                self._print(f"{self._promises.done} blobs put: the S3 server is away")
                self._s3.stop()
                time.sleep(S3_AWAY_SECONDS)
                self._s3.start()
        for victim in self._victims:
            if pipeline.processes[victim].poll() is not None:
                self.report.problems.append(f"{victim} ended by itself: {pipeline.processes[victim].returncode}")
                pipeline.start(victim)
