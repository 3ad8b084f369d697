"""Run the whole pipeline while its parts die.

Invariant: all random choices derive from one seed, which is printed.

Several clients put blobs through the gateway, each with an idempotency key and the retries of a real client.
Small records of a user's topic arrive through ingest between them, in batches. Meanwhile workers, ingest and gateway
are SIGKILLed, Kafka is restarted, Redis is emptied and killed, the S3 server is stopped; with index shards, each of
them is killed, stopped for a while, and loses its index. A reader checks meanwhile that what is committed is answered,
or not at all. Afterwards: every 201 and every 202 restores byte for byte, each record is one version, in order, no
version exists twice, and every partition advances.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import redis as redis_client

from tests.support.engines.chaos_reader import ChaosReader
from tests.support.engines.chaos_shards import OUTAGES, ShardFleet
from tests.support.engines.durability import Promises, Report
from tests.support.engines.record_stream import TOPIC, RecordStream
from tests.support.servers.pipeline import CONFIG_FILE, ENDED, GATEWAY, Pipeline
from tests.support.servers.server import free_port
from tests.support.servers.servers import S3, Kafka, Redis

S3_AWAY_SECONDS = 10.0
REDIS_AWAY_SECONDS = 2.0
FIRST_READ_SECONDS_MAX = 60.0
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
REDIS_OUTAGES = ("redis-flush", "redis-kill")
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


@dataclass(frozen=True, slots=True)
class ChaosFleet:
    """The fleet of a run.

    `mode`: one of MODES, the stages that share a process. `edge`: the gateway deduplicates. `gc_mode`: garbage is
    collected every second in this mode, with a grace of GRACE_SECONDS. `shards`: that many index shards, and no Redis.
    """

    mode: str = "split"
    edge: bool = False
    gc_mode: str | None = None
    shards: int = 0


class Chaos:
    """One run."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        blobs: int,
        kills: int,
        report_line: Callable[[str], None],
        fleet: ChaosFleet = ChaosFleet(),
    ) -> None:
        self._fleet = fleet
        self._before, self._after = MODES[fleet.mode]
        self._shards = ShardFleet(folder, fleet.shards, folder / "pipeline" / CONFIG_FILE)
        self._victims = (*self._before, *ALWAYS, *self._shards.names)
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
        with ExitStack() as stack:
            pipeline = self._start(stack)
            reader = stack.enter_context(closing(ChaosReader(self._promises, pipeline.settings, self.report.seed)))
            stop = threading.Event()
            threads = stack.enter_context(ThreadPoolExecutor(3, "chaos"))
            stack.callback(stop.set)
            kills = threads.submit(self._kill, pipeline, reader)
            kills.add_done_callback(self._end_after_failure)
            reads = threads.submit(reader.read_until, stop)
            records = threads.submit(self._records.send, self._kafka.bootstrap, self._share_of_puts)
            puts = self._promises.put_all()
            kills.result()
            records.result()
            stop.set()
            reads.result()
            self._print(f"all put after {time.monotonic() - started:.0f} s; settling")
            settling = time.monotonic()
            self._promises.ready()
            self._promises.check(puts)
            self._records.check(self._promises.url, pipeline.settings, self.report)
            self._promises.check_flow(pipeline)
            if self._fleet.shards:
                reader.check_duplicates()
            self.report.reads, self.report.lookups = reader.reads, reader.lookups
            self.report.refused = reader.refusals
            self.report.problems.extend(reader.problems)
            self.report.settle_seconds = time.monotonic() - settling
            codes = pipeline.stop()
            if any(code not in ENDED for code in codes.values()):
                self.report.problems.append(f"workers ended with {codes}")
        self.report.seconds = time.monotonic() - started
        return self.report

    def _end_after_failure(self, kills: Future[None]) -> None:
        """End the puts if a server did not start again: clients would try for minutes."""
        if problem := kills.exception():
            self._print(f"no further deaths: {problem}")
            self._promises.end_puts()

    def _start(self, stack: ExitStack) -> Pipeline:
        """Start all parts, which `stack` ends, and wait for the gateway."""
        for server in (self._kafka, self._s3, *(() if self._fleet.shards else (self._redis,))):
            stack.enter_context(server)
        pipeline = self._pipeline()
        stack.enter_context(self._shards)
        stack.enter_context(pipeline)
        RecordStream.make_topic(self._kafka.bootstrap)
        pipeline.start(GATEWAY)
        self._promises.ready()
        return pipeline

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
                "gateway": {"port": self._promises.port, "edge": self._fleet.edge},
                "ingest": {"topics": [TOPIC]},
                "gc": self._gc_config(),
                **self._shards.config(),
            },
            environments={"maintenance": {"TMPDIR": str(self._folder)}},
            services=(*self._before, INGEST, "maintenance"),
        )

    def _gc_config(self) -> dict[str, object]:
        mode = self._fleet.gc_mode
        return {} if mode is None else {"mode": mode, "interval_seconds": 1, "grace_seconds": GRACE_SECONDS}

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
        self._victims = (*self._after, *ALWAYS, *self._shards.names)

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _kill(self, pipeline: Pipeline, reader: ChaosReader) -> None:
        """Spread the kills evenly over the puts."""
        events: list[str] = ["worker"] * self._kills
        index = OUTAGES if self._fleet.shards else REDIS_OUTAGES
        for special in ("kafka", "kafka", *index, "s3", INGEST, INGEST, COMMITTER):
            events.insert(self._random.randrange(len(events) + 1), special)
        if self._after != self._before:
            events.insert(len(events) // 2, SWITCH)
        for position, event in enumerate(events):
            victim = self._victim(event)
            next_puts = position * self.report.blobs // (len(events) + 1)
            waited = time.monotonic()
            while self._promises.done < next_puts and time.monotonic() - waited < 10:
                time.sleep(0.05)
            while victim in OUTAGES and not reader.reads and time.monotonic() - waited < FIRST_READ_SECONDS_MAX:
                time.sleep(0.05)  # an index that has nothing has nothing to lose
            self.report.kills[victim] = self.report.kills.get(victim, 0) + 1
            self._make_fail(pipeline, victim)
        for victim in self._victims:
            if victim not in self._shards.names and pipeline.processes[victim].poll() is not None:
                self.report.problems.append(f"{victim} ended by itself: {pipeline.processes[victim].returncode}")
                pipeline.start(victim)
        self.report.problems.extend(f"{name} ended by itself" for name in self._shards.restart_ended())

    def _make_fail(self, pipeline: Pipeline, victim: str) -> None:
        if victim == SWITCH:
            self._switch(pipeline)
        elif victim in self._shards.names:
            self._shards.kill(victim, self._random.uniform(0, 0.5))
        elif victim in self._victims:
            pipeline.kill(victim)
            time.sleep(self._random.uniform(0, 0.5))
            pipeline.start(victim)
        else:
            self._run_outage(victim)

    def _run_outage(self, outage: str) -> None:
        """Make a server fail, and return when it is back."""
        self._print(f"{self._promises.done} blobs put: {outage}")
        if outage == "kafka":
            self._kafka.restart()
        elif outage == "redis-flush":
            with redis_client.Redis.from_url(self._redis.url) as client:
                client.flushall()
        elif outage == "redis-kill":
            self._redis.kill()
            time.sleep(REDIS_AWAY_SECONDS)
            self._redis.start()
        elif outage in OUTAGES:
            self._shards.fail(self._random.choice(self._shards.names), outage)
        else:
            self._s3.stop()
            time.sleep(S3_AWAY_SECONDS)
            self._s3.start()
