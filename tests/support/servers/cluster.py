"""Run a whole Nearkin on this machine.

Invariant: `down` ends exactly the processes that `up` started, and data outlive both.

    python -m tests.support.servers.cluster up        `make up`: prints how to use it; writes `.cluster/env`
    python -m tests.support.servers.cluster up --s3   `make up S3=1`: containers in an S3 server instead of a folder
    python -m tests.support.servers.cluster status    `make status`: 1 if a process has ended by itself
    python -m tests.support.servers.cluster down      `make down`

Servers start first, then workers, then the gateway; each is a process with its own log in `.cluster/`. A second `up`
starts the missing parts, on the same ports over the same data.

Objects are in a folder by default: no package registry has an S3 server with atomic conditional PUTs as a program, and
building one takes minutes. A cluster keeps the kind of object store that its first `up` chose.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import secrets
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from nearkin_shared.config.loader import load
from nearkin_shared.config.pipeline_stages import stage_groups
from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.utils.frozen import frozen
from tests.support.servers import processes
from tests.support.servers.processes import Member
from tests.support.servers.programs import kafka_jars
from tests.support.servers.server import LOOPBACK, Server, free_port, log_end
from tests.support.servers.servers import S3, Kafka, Redis

BUCKET = "nearkin"
INGEST_TOPIC = "blobs"
"""A user's topic: its records become blobs."""
READY_SECONDS_MAX = 90.0
PORTS = ("kafka", "kafka-controller", "redis", "s3", "gateway", "metrics")
SERVERS = ("redis", "s3", "kafka")
METRICS_OF = "maintenance"
"""The process whose metrics `.cluster/env` names; it measures lag, GC and the index."""


@frozen
class Service:
    """A process of Nearkin: its module, and the line of its log or the path of its URL that signals readiness."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    ready_line: str | None = None
    ready_path: str | None = None


PIPELINE = Service("pipeline", "nearkin.workers.pipeline", ("--worker", "local"), ready_line=": ready")
SERVICES = (
    PIPELINE,
    Service("maintenance", "nearkin.workers.maintenance", ("--worker", "local"), ready_line=": ready"),
    Service("ingest", "nearkin_ingest", ("--worker", "local"), ready_line=": ready"),
    Service("gateway", "nearkin.workers.gateway", ready_path="/readyz"),
)
"""Started in this order, stopped in reverse order."""


class NotUp(RetryableError):
    """A part did not start, or ended by itself; the text contains the end of its log."""


class Cluster:
    """Processes of one folder."""

    def __init__(self, folder: Path, services: Sequence[Service] = SERVICES, *, with_s3: bool = False) -> None:
        """`with_s3`: a first `up` chooses an S3 server for the objects, not a folder."""
        self.folder = folder.absolute()
        self._with_s3 = with_s3
        self.config_file = self.folder / "nearkin.toml"
        self._services = tuple(services)

    @property
    def services(self) -> tuple[Service, ...]:
        """Return the services, with a process for each group of `pipeline.stages` in place of `pipeline`."""
        if not self.config_file.exists():
            return self._services
        workers = _workers(load(self.config_file)[0].pipeline.stages)
        return tuple(one for service in self._services for one in (workers if service == PIPELINE else (service,)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all parts, in the order of their start."""
        return (*self.servers, *(service.name for service in self.services))

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the names of the servers, in the order of their start."""
        with_s3 = self._with_s3
        if self.config_file.exists():
            with_s3 = (load(self.config_file)[0].object_store.url or "").startswith("s3://")
        return tuple(name for name in SERVERS if name != "s3" or with_s3)

    @property
    def env_file(self) -> Path:
        """Return the path of the file to `source`."""
        return self.folder / "env"

    @property
    def url(self) -> str:
        """Return the gateway's URL."""
        return f"http://{LOOPBACK}:{self._ports()['gateway']}"

    @property
    def kafka(self) -> str:
        """Return Kafka's address."""
        return f"{LOOPBACK}:{self._ports()['kafka']}"

    @property
    def token(self) -> str:
        """Return the operator's token, "" before the first `up`."""
        kept = self.folder / "token"
        return kept.read_text().strip() if kept.exists() else ""

    def log(self, name: str) -> Path:
        """Return the path of a part's log."""
        return self.folder / name / f"{name}.log" if name in SERVERS else self.folder / f"{name}.log"

    def member(self, name: str) -> Member | None:
        """Return the note of a part that was started and not stopped."""
        return processes.read(self.folder, name)

    def alive(self, name: str) -> bool:
        """Return whether a part runs."""
        member = self.member(name)
        return member is not None and member.alive

    def up(self, report: Callable[[str], None] = lambda line: None) -> list[str]:
        """Start the parts that do not run, wait until all serve, and return the started ones.

        Raises NearkinError.
        """
        with self._locked():
            started: list[str] = []
            self._end(self._ungrouped(), report)
            with _step(report, "programs of the servers: downloaded or built where they are missing"):
                servers = self._servers()
            for name in self.servers:
                if not self.alive(name):
                    with _step(report, f"start {name}"):
                        servers[name].on_launch = partial(self._note, name)
                        servers[name].start().leave_to_owner()
                    started.append(name)
            with _step(report, "topics, token and settings"):
                self._configure(servers)
            fresh = [service for service in self.services if not self.alive(service.name)]
            began = {service.name: self._launch(service) for service in fresh}
            for service in fresh:
                with _step(report, f"start {service.name}"):
                    self._await(service, began[service.name])
                started.append(service.name)
            return started

    def down(self, report: Callable[[str], None] = lambda line: None) -> list[str]:
        """Stop the running parts, the gateway first and the servers last; return the stopped ones."""
        with self._locked():
            return self._end([*self._ungrouped(), *reversed(self.names)], report)

    def _ungrouped(self) -> list[str]:
        """Return the started parts that another grouping of the stages had."""
        return sorted({note.stem for note in self.folder.glob("*.pid")} - set(self.names))

    def _end(self, names: Iterable[str], report: Callable[[str], None]) -> list[str]:
        """Stop those of the parts that run; return them."""
        ended = []
        for name in names:
            member = self.member(name)
            if member is None:
                continue
            if member.alive:
                report(f"ending {name}")
                if not member.end():
                    report(f"{name} had to be killed; its log: {self.log(name)}")
                ended.append(name)
            member.forget(self.folder)
        return ended

    # --- how it is put together --------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as err:
                raise RetryableError(
                    f"{self.folder}: another `make up` or `make down` is at work; wait for it"
                ) from err
            yield

    def _note(self, name: str, pid: int) -> None:
        Member.of(name, pid).write(self.folder)

    def _ports(self) -> dict[str, int]:
        """Return the port of each part: chosen once, so that the URL stays."""
        kept = self.folder / "ports.json"
        ports: dict[str, int] = json.loads(kept.read_text()) if kept.exists() else {}
        if missing := [name for name in PORTS if name not in ports]:
            ports.update((name, free_port()) for name in missing)
            kept.write_text(json.dumps(ports))
        return ports

    def _servers(self) -> dict[str, Server]:
        ports = self._ports()
        kafka = Kafka(
            self.folder / "kafka", port=ports["kafka"], controller_port=ports["kafka-controller"], detached=True
        )
        found: dict[str, Server] = {"redis": Redis(self.folder / "redis", port=ports["redis"], detached=True)}
        if "s3" in self.servers:
            found["s3"] = S3(self.folder / "s3", port=ports["s3"], detached=True)
        kafka_jars()
        return {**found, "kafka": kafka}

    def _configure(self, servers: Mapping[str, Server]) -> None:
        """Make bucket, topics, token and the settings file that all parts read; an edited file stays unchanged."""
        s3, kafka, redis = servers.get("s3"), servers["kafka"], servers["redis"]
        assert isinstance(kafka, Kafka)
        assert isinstance(redis, Redis)
        objects: dict[str, object] = {"url": str(self.folder / "objects")}
        if isinstance(s3, S3):
            s3.make_bucket(BUCKET)
            objects = {
                "url": f"s3://{BUCKET}",
                "endpoint": s3.endpoint,
                "allow_http": True,
                "access_key_id": s3.access_key_id,
                "secret_access_key": s3.secret_access_key,
            }
        if not self.config_file.exists():
            sections: dict[str, dict[str, object]] = {
                "kafka": {"bootstrap_servers": kafka.bootstrap},
                "redis": {"url": redis.url},
                "storage": {"create": True},
                "object_store": objects,
            }
            if "ingest" in self.names:
                sections["ingest"] = {"topics": [INGEST_TOPIC], "dataref_prefix": "incoming/{tenant}/"}
            if any(service.name == "gateway" for service in self.services):
                sections["gateway"] = {"host": LOOPBACK, "port": self._ports()["gateway"]}
                sections["auth"] = {"tokens_file": str(self.folder / "tokens.json")}
            _write_privately(self.config_file, _toml(sections))
        if "gateway" in self.names and not self.token:
            # Imported by name: only this start needs a gateway.
            create = importlib.import_module("nearkin_gateway.auth.tokens").create
            scopes = ("read", "write", "delete", "admin", "operator")
            text, _ = create(self.folder / "tokens.json", "default", scopes, days=None, note="make up")
            _write_privately(self.folder / "token", text)
        if self.services:
            from nearkin_shared.kafka.clients import create_named, create_topics

            settings = load(self.config_file)[0]
            create_topics(settings)
            create_named(settings, [entry.partition("=")[0] for entry in settings.ingest.topics])
        _write_privately(self.env_file, self._environment(redis.url, s3))

    def _environment(self, redis_url: str, s3: Server | None) -> str:
        """Return the lines of `.cluster/env`.

        Kafka's address is not that of `NEARKIN_KAFKA__BOOTSTRAP_SERVERS`: `nearkin dlq` would ask Kafka, not the
        gateway.
        """
        found = {
            "URL": self.url,
            "NEARKIN_SERVER": self.url,
            "NEARKIN_TOKEN": self.token,
            "KAFKA": self.kafka,
            "REDIS": redis_url,
            "METRICS": f"http://{LOOPBACK}:{self._ports()['metrics']}/metrics",
        }
        if isinstance(s3, S3):
            found["S3"] = s3.endpoint
            found |= {"AWS_ACCESS_KEY_ID": s3.access_key_id, "AWS_SECRET_ACCESS_KEY": s3.secret_access_key}
        else:
            found["OBJECTS"] = str(self.folder / "objects")
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in found.items())

    def _launch(self, service: Service) -> int:
        """Start a service; return the offset of its output in the log."""
        log = self.log(service.name)
        start = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", service.module, "--config", str(self.config_file), *service.arguments]
        port = {"NEARKIN_MONITOR__PORT": str(self._ports()["metrics"])} if service.name == METRICS_OF else {}
        processes.launch(service.name, command, log, self.folder, port)
        return start

    def _await(self, service: Service, log_start: int) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self._ready(service, log_start):
            late = time.monotonic() > deadline
            if late or not self.alive(service.name):
                what = f"is not ready after {READY_SECONDS_MAX:.0f} s" if late else "ended while it started"
                log = self.log(service.name)
                raise NotUp(f"{service.name} {what}; the end of {log}:\n{log_end(log)}")
            time.sleep(0.1)

    def _ready(self, service: Service, log_start: int) -> bool:
        if service.ready_path is not None:
            try:
                with urllib.request.urlopen(self.url + service.ready_path, timeout=2) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False
        with self.log(service.name).open("rb") as log:
            log.seek(log_start)
            return (service.ready_line or "").encode() in log.read()


@contextmanager
def _step(report: Callable[[str], None], what: str) -> Iterator[None]:
    """Report a step when it begins, and how long it took."""
    report(f"{what} ...")
    began = time.monotonic()
    yield
    report(f"  {time.monotonic() - began:.1f} s")


def _workers(stages: str) -> tuple[Service, ...]:
    """Return the workers of the groups of stages."""
    groups = stage_groups(stages)
    if len(groups) == 1:
        return (PIPELINE,)
    return tuple(
        Service(
            "-".join(group), PIPELINE.module, ("--stages", "+".join(group), *PIPELINE.arguments), ready_line=": ready"
        )
        for group in groups
    )


def _write_privately(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return sections of plain values as TOML: its strings, numbers and booleans are written as JSON's are."""
    lines = ["# Made by `make up`; edited settings stay. Hot ones are taken at once."]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{field} = {json.dumps(value)}" for field, value in values.items())]
    return "\n".join(lines) + "\n"


# --- the command -----------------------------------------------------------------------------------------------------


@click.group()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".cluster"), show_default=True)
@click.pass_context
def main(context: click.Context, folder: Path) -> None:
    """Run Kafka, Redis and all of Nearkin on this machine, without Docker."""
    context.obj = Cluster(folder)


@main.command()
@click.option("--s3", is_flag=True, help="Keep objects in an S3 server, which Go builds once in minutes, if it is new.")
@click.pass_obj
def up(cluster: Cluster, s3: bool) -> None:
    """Start the parts that do not run, and print how to use them."""
    cluster = Cluster(cluster.folder, with_s3=s3)
    began = time.monotonic()
    try:
        started = cluster.up(click.echo)
    except NearkinError as err:
        raise click.ClickException(f"{err}\n`make down` ends what was started.") from err
    click.echo(f"up in {time.monotonic() - began:.0f} s" if started else "it is up already")
    click.echo(
        f"\n{cluster.url}\n\n"
        f"source {os.path.relpath(cluster.env_file)}    # URL, token, Kafka, Redis, objects, metrics\n"
        'curl -sS -H "Authorization: Bearer $NEARKIN_TOKEN" -T README.md "$URL/v1/blobs/README.md?wait=30"\n\n'
        f"a record of Kafka's topic {INGEST_TOPIC} becomes a blob too, with its key:\n"
        f"echo hello | kcat -P -b $KAFKA -t {INGEST_TOPIC} -k greeting\n\n"
        f"settings: {cluster.config_file}   logs: {cluster.folder}/*.log   end: make down"
    )


@main.command()
@click.pass_obj
def down(cluster: Cluster) -> None:
    """Stop exactly the parts that `up` started."""
    try:
        ended = cluster.down(click.echo)
    except NearkinError as err:
        raise click.ClickException(str(err)) from err
    click.echo(f"down; data stay in {cluster.folder}" if ended else "nothing was up")


@main.command()
@click.pass_obj
def status(cluster: Cluster) -> None:
    """Print which parts run.

    The exit code is 1 if a started part has ended by itself, 3 if none was started.
    """
    ended = []
    for name in cluster.names:
        member = cluster.member(name)
        if member is None:
            click.echo(f"{name:12} not started")
        elif member.alive:
            click.echo(f"{name:12} up, pid {member.pid}")
        else:
            ended.append(name)
            click.echo(f"{name:12} ENDED BY ITSELF; `make up` starts it again. The end of {cluster.log(name)}:")
            click.echo(log_end(cluster.log(name)))
    if ended:
        sys.exit(1)
    if not any(cluster.member(name) for name in cluster.names):
        sys.exit(3)


if __name__ == "__main__":
    main()
