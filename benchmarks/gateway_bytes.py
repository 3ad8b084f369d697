"""Measure CPU seconds a GB of restores and puts through the HTTP gateway, of each process apart.

    python -m benchmarks.gateway_bytes --old /path/of/another/checkout/.venv/bin/python

Gateways of this checkout and of others (`--old`) serve the same store in turn, with the same requests, so that the
ratio of two columns holds on a busy machine too. The consumers are curl, which discards the bytes, and the Python
client. A restore in one process without HTTP (`in process`) shows what the store itself costs.

    local   a gateway with the store in its process; puts wait for the commit
    s3      a gateway of a fleet with Kafka and Redis, objects in versitygw; restores only
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.listings import fill_redis
from nearkin import open_store
from nearkin.lab.corpus_cache import botocore
from nearkin.lab.generated_data import random_bytes
from nearkin_shared.config.settings import Settings
from nearkin_shared.objectstore.factory import local_objects
from nearkin_shared.objectstore.s3 import S3ObjectStore
from tests.support.servers.gateways import process
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.servers import S3, shared_kafka

GB = 1e9
RANDOM_BYTES = 128 * 1024 * 1024
PREFIX = "gateway-bytes"
BUCKET = "nearkin-bench"
GET = """
import sys, time, nearkin
with nearkin.connect(sys.argv[1]) if sys.argv[1].startswith("http") else nearkin.open_store(sys.argv[1]) as store:
    for _ in range(1 if sys.argv[1].startswith("http") else 2):
        began = time.process_time()
        for name in sys.argv[2:]:
            key, version = name.rsplit(":", 1)
            with store.get(key, int(version)) as blob:
                sum(len(piece) for piece in blob.pieces())
print(time.process_time() - began)
"""
PUT = """
import pathlib, sys, time, nearkin
began = time.process_time()
with nearkin.connect(sys.argv[1]) as store:
    store.put(sys.argv[2], pathlib.Path(sys.argv[3]))
print(time.process_time() - began)
"""
"""Both print CPU seconds without those of the interpreter's start; in process those of the second restore, as
the caches of a gateway are warm, too."""


@dataclass(slots=True)
class Cost:
    """CPU seconds and bytes of one row, one entry a repetition."""

    server: list[float] = field(default_factory=list)
    client: list[float] = field(default_factory=list)
    objects: list[float] = field(default_factory=list)
    """Of the S3 server."""
    size_bytes: int = 0

    def a_gb(self, seconds: Sequence[float]) -> float:
        """Return the median of the repetitions, CPU seconds a GB."""
        return statistics.median(seconds) / self.size_bytes * GB if seconds else 0.0


@dataclass(slots=True)
class Running:
    """A gateway that serves, the interpreter that runs it, and the S3 server behind it."""

    name: str
    python: str
    pid: int
    url: str
    objects_pid: int | None = None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", action="append", default=[], metavar="PYTHON", help="interpreter of another checkout")
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stores", default="local,s3")
    parser.add_argument("--puts", action="store_true", help="measure puts too, of a known blob and of random bytes")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args()
    pythons = [*chosen.old, sys.executable]
    with tempfile.TemporaryDirectory(prefix="nearkin-gateway-bytes-") as name:
        folder, rows = Path(name), dict[str, Cost]()
        sources = sources_of(folder, chosen.versions)
        fill(folder / "store", sources)
        for store in chosen.stores.split(","):
            with ExitStack() as held:
                gateways = list(held.enter_context(_serving(store, folder, pythons)))
                measure_restores(rows, store, gateways, folder / "store", sources, chosen.repeats)
                if chosen.puts and store == "local":
                    measure_puts(rows, gateways, sources, chosen.repeats)
    print(table(rows))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({name: asdict(cost) for name, cost in rows.items()}, indent=1))


def sources_of(folder: Path, versions: int) -> dict[str, Path]:
    """Return the blobs by "KEY:VERSION": releases of botocore, and random bytes, which are stored as they are."""
    noise = folder / "random.bin"
    noise.write_bytes(random_bytes(RANDOM_BYTES, seed=43))
    named = {f"botocore:{number}": path for number, path in enumerate(botocore(versions), 1)}
    return {**named, "random:1": noise}


def fill(root: Path, sources: Mapping[str, Path]) -> None:
    """Store all blobs."""
    with open_store(root, create=True) as store:
        for name, path in sources.items():
            store.put(name.rsplit(":", 1)[0], path)


@contextmanager
def _serving(store: str, folder: Path, pythons: Sequence[str]) -> Iterator[Iterator[Running]]:
    """Start what a gateway needs; yield the gateways, of which each is started when it is asked for."""
    with ExitStack() as held:
        if store == "local":
            yield (_local(held, folder, number, python) for number, python in enumerate(pythons))
            return
        s3 = held.enter_context(S3(folder / "s3"))
        environment = _fleet(held, folder, s3)
        yield (
            _gateway(held, folder / f"s3-{number}", python, environment, s3.pid)
            for number, python in enumerate(pythons)
        )


def _local(held: ExitStack, folder: Path, number: int, python: str) -> Running:
    root = folder / f"local-{number}"
    subprocess.run(["cp", "-a", folder / "store", root], check=True)  # one writer a store
    environment = {"NEARKIN_STORE": str(root), "NEARKIN_GATEWAY__INGEST": "embedded", "NEARKIN_SCRUB__EVERY_DAYS": "0"}
    return _gateway(held, folder / f"log-{number}", python, environment, None)


def _gateway(
    held: ExitStack, log: Path, python: str, environment: Mapping[str, str], objects_pid: int | None
) -> Running:
    log.mkdir()
    child, url = held.enter_context(process(environment, log, python=python))
    name = "new" if python == sys.executable else Path(python).parents[2].name
    return Running(name, python, child.pid, url, objects_pid)


def _fleet(held: ExitStack, folder: Path, s3: S3) -> dict[str, str]:
    """Put the store's objects into a bucket and its index into Redis; return a gateway's variables."""
    s3.make_bucket(BUCKET)
    chosen = s3.settings(BUCKET)
    upload(folder / "store", s3)
    redis = held.enter_context(RedisServer(folder / "redis"))
    fill_redis(folder / "store", redis.url, PREFIX)
    bootstrap = held.enter_context(shared_kafka(folder / "kafka", os.getpid()))
    return {
        "NEARKIN_OBJECT_STORE__URL": str(chosen.url),
        "NEARKIN_OBJECT_STORE__ENDPOINT": s3.endpoint,
        "NEARKIN_OBJECT_STORE__REGION": str(chosen.region),
        "NEARKIN_OBJECT_STORE__ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": s3.access_key_id,
        "AWS_SECRET_ACCESS_KEY": s3.secret_access_key,
        "NEARKIN_REDIS__URL": redis.url,
        "NEARKIN_REDIS__PREFIX": PREFIX,
        "NEARKIN_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "NEARKIN_GATEWAY__INGEST": "kafka",
    }


def upload(root: Path, s3: S3) -> None:
    """Copy the objects of a local store into the bucket."""
    source, target = local_objects(root, Settings()), S3ObjectStore(s3.settings(BUCKET))
    for name, _ in source.names(""):
        target.put_new(name, source.get(name))


def measure_restores(
    rows: dict[str, Cost],
    store: str,
    gateways: Sequence[Running],
    root: Path,
    sources: Mapping[str, Path],
    repeats: int,
) -> None:
    """Restore every blob by each consumer, repeatedly; the gateways in turn."""
    groups = {kind: [name for name in sources if name.startswith(kind)] for kind in ("botocore", "random")}
    for number in range(-1, repeats):  # the first one warms up
        for kind, names in groups.items():
            size_bytes = sum(sources[name].stat().st_size for name in names)
            for gateway in gateways:
                for consumer, command in _consumers(gateway, names).items():
                    cost = rows.setdefault(f"{store} get {kind}, {consumer}, {gateway.name}", Cost())
                    _measure(cost, gateway, command, size_bytes, counts=number >= 0)
                if store == "local":
                    cost = rows.setdefault(f"{store} get {kind}, in process, {gateway.name}", Cost())
                    command = [gateway.python, "-c", GET, str(root), *names]
                    _measure(cost, None, command, size_bytes, counts=number >= 0)


def _consumers(gateway: Running, names: Sequence[str]) -> dict[str, list[str]]:
    urls = [f"{gateway.url}/v1/blobs/{key}?version={number}" for key, number in (name.split(":") for name in names)]
    curl = [*("curl", "-sS", "--fail"), *(part for url in urls for part in ("-o", "/dev/null", url))]
    return {"curl": curl, "client": [gateway.python, "-c", GET, gateway.url, *names]}


def measure_puts(rows: dict[str, Cost], gateways: Sequence[Running], sources: Mapping[str, Path], repeats: int) -> None:
    """Put a known blob by curl and by the client, repeatedly."""
    name, path = next(iter(sources.items()))
    for number in range(-1, repeats):
        for gateway in gateways:
            url = f"{gateway.url}/v1/blobs/again"
            commands = {
                "curl": ["curl", "-sS", "--fail", "-o", "/dev/null", "-T", str(path), url],
                "client": [gateway.python, "-c", PUT, gateway.url, "again", str(path)],
            }
            for consumer, command in commands.items():
                cost = rows.setdefault(f"local put {name}, known, {consumer}, {gateway.name}", Cost())
                _measure(cost, gateway, command, path.stat().st_size, counts=number >= 0)


def _measure(cost: Cost, gateway: Running | None, command: Sequence[str], size_bytes: int, *, counts: bool) -> None:
    pids = [] if gateway is None else [gateway.pid, *filter(None, [gateway.objects_pid])]
    before = [_cpu_seconds(pid) for pid in pids]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    if counts:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole_seconds = usage.ru_utime + usage.ru_stime - children.ru_utime - children.ru_stime
        used = [_cpu_seconds(pid) - one for pid, one in zip(pids, before, strict=True)]
        cost.size_bytes = size_bytes
        cost.client.append(float(printed or whole_seconds))
        cost.server.extend(used[:1])
        cost.objects.extend(used[1:])


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def table(rows: Mapping[str, Cost]) -> str:
    """Return Markdown: CPU seconds a GB."""
    lines = ["| CPU s a GB | gateway | client | S3 server |", "|---|---|---|---|"]
    for name, cost in sorted(rows.items()):
        figures = " | ".join(f"{cost.a_gb(part):.2f}" for part in (cost.server, cost.client, cost.objects))
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
