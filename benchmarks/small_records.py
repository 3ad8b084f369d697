"""Measure small records: records a second, CPU a record, and what a PUT waits under that load.

    python -m benchmarks.small_records --records 20000 --puts 100

Kafka, Redis, an ingest worker, one worker of all stages and a gateway run on the same machine as the producer; the
store is a folder. Records of `--bytes` with a key each go to a user's topic; the clock stops at the event of the last
one. The records are made before the clock starts: a service would make them elsewhere. Then PUTs of 4 KiB with
`?wait=30` are timed alone, and again while as many records arrive. WARM_RECORDS others are stored beforehand, so that
neither the start of the interpreters is measured nor the JVM's compiler: the rate is that of a pipeline in use. ext4
without a journal, on which many files were deleted in the last minutes, triples the CPU of new files: name another
folder by TMPDIR.
Figures: docs/benchmarks/history.md, ADR 76.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from nearkin_shared.kafka.clients import consumer, topic
from tests.support.checks.waiting import until
from tests.support.servers.pipeline import FUSED, GATEWAY, SPLIT, Pipeline
from tests.support.servers.server import LOOPBACK, free_port
from tests.support.servers.servers import Kafka, Redis

TOPIC = "records"
PARTITIONS = 2
PUT_BYTES = 4096
WARM_RECORDS = 20_000
"""The broker's JVM has compiled its methods by then: after 500 it took twice the CPU a record for 20,000 more."""
SILENCE_SECONDS_MAX = 60.0
"""A record without an event after that long ends the measurement: a service has stopped."""
WORDS = ("accepted", "rejected", "pending", "timeout", "checkout", "payment", "refund", "session", "inventory")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=WARM_RECORDS, help="records stored before the first measurement")
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--puts", type=int, default=100, help="PUTs alone; under load, as many as the load allows")
    parser.add_argument("--split", action="store_true", help="a process for each stage in place of one for all")
    parser.add_argument("--profile", metavar="PY-SPY", type=Path, help="this py-spy samples ingest and stages")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the profiles")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nearkin-records-") as folder:
        found = measured(Path(folder), chosen)
    print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1))


def measured(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all three measurements."""
    with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
        port = free_port()
        config: dict[str, dict[str, object]] = {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": "bench.", "partitions": PARTITIONS},
            "redis": {"url": redis.url},
            "object_store": {"url": str(folder / "objects")},
            "ingest": {"topics": [TOPIC]},
            "gateway": {"port": port},
        }
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
        services = (*(SPLIT if chosen.split else FUSED), "ingest", GATEWAY)
        with (
            Pipeline(folder / "pipeline", config, services=services, verbose=False) as pipeline,
            Records(pipeline) as records,
        ):
            url = f"http://{LOOPBACK}:{port}"
            until(lambda: _serves(url), seconds=90)
            records.send("warm", list(values("warm", chosen.warm_up, chosen.bytes)))
            records.await_all()
            pids = {name: process.pid for name, process in pipeline.processes.items() if name != "maintenance"}
            pids |= {"kafka": kafka.pid, "redis": redis.pid}
            found = load_figures(records, pids, chosen)
            alone, load = put_seconds(url, "alone", chosen.puts), list(values("load", chosen.records, chosen.bytes))
            records.send("load", load)
            loaded = put_seconds_under(url, records)
            objects, stored_bytes = _stored(folder / "objects")
            count = chosen.warm_up + 2 * chosen.records + len(alone) + len(loaded)
            return found | {
                "put_alone": spread(alone),
                "put_under_load": spread(loaded),
                "objects_a_version": objects / count,
                "stored_bytes_a_version": stored_bytes / count,
            }


class Records:
    """A producer of the user's topic, and a consumer of the events about its records."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._settings = pipeline.settings
        self._producer = Producer({"bootstrap.servers": self._settings.kafka.bootstrap_servers, "linger.ms": 5})
        self._consumer: Consumer = consumer(self._settings, f"bench-{os.getpid()}", "bench")
        full = topic(self._settings, "committed")
        self._consumer.assign([TopicPartition(full, part, 0) for part in range(PARTITIONS)])
        self.waiting: set[str] = set()
        self.failed = 0

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def send(self, name: str, given: Sequence[bytes]) -> None:
        """Send records with keys of their own, and wait until Kafka has them."""
        for number, value in enumerate(given):
            key = f"{name}/{number:06d}"
            self.waiting.add(key)
            self._producer.produce(TOPIC, value, key)
            if not number % 1000:
                self._producer.poll(0)
        self._producer.flush(60)

    def take(self) -> None:
        """Take the events that have arrived."""
        for message in self._consumer.consume(1000, 0.05):
            value = message.value()
            if message.error() is None and value is not None:
                event = json.loads(value)
                self.waiting.discard(event["key"])
                self.failed += event["state"] != "committed"

    def await_all(self) -> None:
        """Wait for the events of all records. Raises TimeoutError."""
        left, last = len(self.waiting), time.monotonic()
        while self.waiting:
            self.take()
            if len(self.waiting) != left:
                left, last = len(self.waiting), time.monotonic()
            elif time.monotonic() - last > SILENCE_SECONDS_MAX:
                raise TimeoutError(f"{left} records have no event: see the workers' logs")
        if self.failed:
            raise RuntimeError(f"{self.failed} records failed: see the workers' logs")


def values(name: str, count: int, value_bytes: int) -> Iterator[bytes]:
    """Yield records such as a service logs: JSON with common names and fields of their own, filled up with noise."""
    drawn = random.Random(name)
    for number in range(count):
        record = {
            "id": f"{drawn.getrandbits(128):032x}",
            "sequence": number,
            "service": drawn.choice(WORDS),
            "state": drawn.choice(WORDS),
            "amount": drawn.randrange(1_000_000) / 100,
            "items": [{"sku": f"{drawn.getrandbits(40):010x}", "name": drawn.choice(WORDS)} for _ in range(6)],
        }
        text = json.dumps(record).encode()
        room_bytes = max(0, value_bytes - len(text))
        yield text[:value_bytes] + drawn.randbytes(room_bytes // 2).hex().encode() + b" " * (room_bytes % 2)


def load_figures(records: Records, pids: Mapping[str, int], chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the rate of records and the CPU of each process a record."""
    given = list(values("first", chosen.records, chosen.bytes))
    pids = {**pids, "bench": os.getpid()}
    with profiles(pids, chosen.profile, chosen.out):
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        started = time.perf_counter()
        records.send("first", given)
        records.await_all()
        seconds = time.perf_counter() - started
        used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    return {
        "records": chosen.records,
        "record_bytes": chosen.bytes,
        "seconds": seconds,
        "records_a_second": chosen.records / seconds,
        "cpu_ms_a_record": {name: each / chosen.records * 1000 for name, each in used.items()},
    }


@contextmanager
def profiles(pids: Mapping[str, int], program: Path | None, folder: Path) -> Iterator[None]:
    """Sample all processes of Python while the block runs, if a py-spy is given."""
    others = ("kafka", "redis", "bench")
    sampled = {name: pid for name, pid in pids.items() if program is not None and name not in others}
    running = []
    for name, pid in sampled.items():
        command = [str(program), "record", "-r", "200", "-f", "raw", "-o", str(folder / f"{name}.raw"), "-p", str(pid)]
        running.append(subprocess.Popen([*command, "-d", "600"], stdout=subprocess.DEVNULL))
    try:
        yield
    finally:
        for process in running:
            process.send_signal(2)
            process.wait(30)


def put_seconds(url: str, name: str, count: int) -> list[float]:
    """Return the seconds that each PUT of a new key waited for its version."""
    drawn = random.Random(name)
    with httpx.Client(base_url=url, timeout=60) as client:
        return [_put(client, f"{name}-{number}", drawn.randbytes(PUT_BYTES)) for number in range(count)]


def put_seconds_under(url: str, records: Records) -> list[float]:
    """Return the same of PUTs that are sent until no record waits any more."""
    found: list[float] = []
    ended = threading.Event()

    def put() -> None:
        while not ended.is_set():
            found.extend(put_seconds(url, f"load-{len(found)}-{time.time_ns()}", 1))

    thread = threading.Thread(target=put)
    thread.start()
    try:
        records.await_all()
    finally:
        ended.set()
        thread.join()
    return found


def _put(client: httpx.Client, key: str, body: bytes) -> float:
    started = time.perf_counter()
    response = client.put(f"/v1/blobs/{key}", params={"wait": "30"}, content=body)
    if response.status_code not in (httpx.codes.CREATED, httpx.codes.ACCEPTED):  # 202: it waited for the 30 s
        raise RuntimeError(f"PUT {key}: {response.status_code} {response.text[:200]}")
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum in milliseconds."""
    found = sorted(seconds)
    rank = min(len(found) - 1, int(0.99 * len(found)))
    return {
        "count": len(found),
        "median_ms": found[len(found) // 2] * 1000,
        "p99_ms": found[rank] * 1000,
        "max_ms": found[-1] * 1000,
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process and its children have used."""
    process = psutil.Process(pid)
    children = [] if pid == os.getpid() else process.children(recursive=True)
    times = [one.cpu_times() for one in [process, *children]]
    return sum(one.user + one.system for one in times)


def table(found: Mapping[str, Any]) -> str:
    """Return Markdown."""
    each = found["cpu_ms_a_record"]
    lines = [
        f"| records of {found['record_bytes']} B | records/s | {' | '.join(each)} | CPU ms a record |",
        f"|{'---|' * (3 + len(each))}",
        f"| {found['records']} | {found['records_a_second']:.0f} | "
        f"{' | '.join(f'{ms:.3f}' for ms in each.values())} | {sum(each.values()):.3f} |",
        "",
        "| PUT 4 KiB | count | median ms | p99 ms | max ms |",
        "|---|---|---|---|---|",
    ]
    for name in ("put_alone", "put_under_load"):
        one = found[name]
        lines.append(
            f"| {name} | {one['count']} | {one['median_ms']:.0f} | {one['p99_ms']:.0f} | {one['max_ms']:.0f} |"
        )
    lines += ["", f"{found['objects_a_version']:.3f} objects and {found['stored_bytes_a_version']:.0f} B a version"]
    return "\n".join(lines)


def _stored(folder: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def _serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
