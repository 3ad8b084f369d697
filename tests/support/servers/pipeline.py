"""Run the workers as processes and upload without a gateway, for tests and benchmarks of the pipeline itself."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from blake3 import blake3
from confluent_kafka import TopicPartition

from nearkin_gateway.uploads.upload_status import new_id
from nearkin_shared.config.loader import load, with_changes
from nearkin_shared.config.pipeline_stages import FUSED as FUSED_STAGES
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.message import End, Envelope, Frame, encode
from nearkin_shared.kafka.clients import SELDOM_FILLED, Outbox, consumer, create_topics, topic
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator, authenticator_of
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.factory import open_objects, open_store_of
from nearkin_shared.storage.staged_packs import PACK_BYTES, UploadAttempt, put_pack, refer
from nearkin_shared.utils.failpoints import VARIABLE
from tests.support.servers import changed_constants
from tests.support.servers.changed_constants import split_constants
from tests.support.servers.termination import exit_on_sigterm

SPLIT = ("chunker", "dedup", "resemblance", "delta", "maintenance")
"""A process for each stage; `delta` carries the committer, too."""
FUSED = ("pipeline", "maintenance")
"""All stages in one process."""
GATEWAY = "gateway"
CONFIG_FILE = "nearkin.toml"
ENDED = (0, -signal.SIGTERM)
"""Exit codes of a worker that was asked to end; the second one if its interpreter was still starting."""
STOP_SECONDS_MAX = 90.0
ABORT_SECONDS_MAX = 30.0
POLL_SECONDS = 0.05


MODULES = {
    "gateway": "nearkin.workers.gateway",
    "delta": "nearkin.workers.pipeline",
    "pipeline": "nearkin.workers.pipeline",
    "maintenance": "nearkin.workers.maintenance",
}
"""Modules of services that differ from the service's own name."""
ARGUMENTS = {
    "delta": ("--stages", "delta+committer"),
    "pipeline": ("--stages", FUSED_STAGES, "--worker", "w2"),
}
"""Two workers of one name in one group end each other, and `pipeline` may run next to workers of single stages."""


REPLICA = "-replica-"
"""Between the name of a service and the number of a further worker of it."""


def replicas_of(service: str, count: int) -> list[str]:
    """Return the names of all workers of a service but the first one."""
    return [f"{service}{REPLICA}{number}" for number in range(2, count + 1)]


class Pipeline:
    """One worker of each service, as processes of their own, under one config file."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Mapping[str, object]],
        environments: Mapping[str, Mapping[str, str]] | None = None,
        services: Sequence[str] = SPLIT,
        *,
        verbose: bool = True,
    ) -> None:
        """`config` may have constants, too. `environments`: additional environment variables by service.

        `verbose`: workers log a line of each blob.
        """
        self.services = tuple(services)
        self._verbose = verbose
        self.folder = folder
        self._environments = dict(environments or {})
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file = folder / CONFIG_FILE
        self.config, self._constants = split_constants(config)
        self.config.setdefault("storage", {})["create"] = True
        self.write_config()
        self.settings: Settings = with_changes(load(self.config_file)[0], self._constants)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def write_config(self, **sections: Mapping[str, object]) -> None:
        """Write the config file with `sections` merged in; replaced whole, as an editor does."""
        for name, values in sections.items():
            self.config.setdefault(name, {}).update(values)
        lines = []
        for name, values in self.config.items():
            lines += [f"[{name}]", *(f"{field} = {_toml(value)}" for field, value in values.items())]
        fresh = self.config_file.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.config_file)

    def __enter__(self) -> Self:
        exit_on_sigterm()
        create_topics(self.settings)
        for service in self.services:
            self.start(service)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, service: str, failpoint: str | None = None) -> None:
        """Start a service's worker, with a failpoint armed; its log goes to a file of its own."""
        base, _, number = service.partition(REPLICA)
        module = MODULES.get(base, f"nearkin_{base}")
        changed = [changed_constants.__name__, json.dumps(self._constants)] if self._constants else []
        command = [sys.executable, "-m", *changed, module, "--config", str(self.config_file)]
        if service != GATEWAY:
            command += ["--worker", "w1", *(["--verbose"] if self._verbose else []), *ARGUMENTS.get(base, ())]
            command += ["--worker", f"r{number}"] if number else []
        with (self.folder / f"{service}.log").open("ab") as log:
            more = {"PYTHONFAULTHANDLER": "1"} | ({} if failpoint is None else {VARIABLE: failpoint})
            environment = {**os.environ, **more, **self._environments.get(service, {})}
            self.processes[service] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self, service: str) -> None:
        """End a worker as a power cut would."""
        process = self.processes[service]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end(self, service: str) -> int:
        """End a worker cleanly, and forget it; return its exit code."""
        process = self.processes.pop(service)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return _abort(process)

    def stop(self) -> dict[str, int]:
        """End all workers cleanly; return their exit codes.

        A worker that does not end in time logs its stacks.
        """
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        codes = {}
        for service, process in self.processes.items():
            try:
                codes[service] = process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                codes[service] = _abort(process)
        return codes

    def logs(self) -> str:
        """Return the logs of the workers."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))


def _abort(process: subprocess.Popen[bytes]) -> int:
    """End a process after Python's fault handler has written the stacks of its threads; return its exit code."""
    process.send_signal(signal.SIGABRT)
    try:
        return process.wait(ABORT_SECONDS_MAX)
    except subprocess.TimeoutExpired:  # for example, a stopped process
        process.kill()
        return process.wait()


def store_authenticator(settings: Settings) -> EnvelopeAuthenticator:
    """Return the authenticator of messages for a store's pipeline; a missing store is created."""
    return authenticator_of(settings, open_store_of(settings)[1])


class Uploader:
    """Client that writes blobs to the topic `frames` and receives the events about them."""

    def __init__(self, settings: Settings, tenant: str = "default") -> None:
        self._settings = settings
        self._tenant = tenant
        self.outbox = Outbox(settings, f"uploader-{os.getpid()}", store_authenticator(settings))
        self._packs = open_objects(settings)
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._consumer = consumer(settings, f"uploader-{secrets.token_hex(4)}", "uploader", **SELDOM_FILLED)
        full = topic(settings, "committed")
        self._consumer.assign([TopicPartition(full, part, 0) for part in range(settings.kafka.partitions)])

    def put(
        self,
        key: str,
        pieces: Iterable[bytes],
        *,
        origin: bytes | None = None,
        cut: bool = False,
        metadata: Mapping[str, str] | None = None,
        staged: bool = False,
    ) -> str:
        """Send a blob; return its id once Kafka has all of it.

        `cut`: omit the end message. `staged`: Kafka carries references to packs in the object store.
        """
        blob, hasher, position = new_id(), blake3(), 0
        began_us = time.time_ns() // 1000
        if staged:
            attempt = UploadAttempt(blob, self._tenant, key, origin or blob, began_us)
            for pack in _packs(pieces):
                for part in pack:
                    hasher.update(part)
                reference = refer(attempt, position, pack)
                put_pack(self._packs, reference, pack)
                self.outbox.send("frames", blob, encode(reference), {})
                position += reference.size_bytes
            pieces = ()
        for piece in pieces:
            for start in range(0, len(piece), FRAME_BYTES_MAX):
                part = piece[start : start + FRAME_BYTES_MAX]
                hasher.update(part)
                frame = Frame(Envelope(blob, self._tenant, key, position), np.frombuffer(part, np.uint8))
                self.outbox.send("frames", blob, encode(frame), {})
                position += len(part)
        if not cut:
            end = End(
                Envelope(blob, self._tenant, key, position),
                began_us,
                origin or blob,
                position,
                hasher.digest(),
                metadata=dict(metadata or {}),
            )
            self.outbox.send("frames", blob, encode(end), {})
        self.outbox.flush()
        return blob.hex()

    def events(self, seconds: float = 0.0) -> dict[str, list[dict[str, Any]]]:
        """Return all events by blob id, after listening for `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            message = self._consumer.poll(POLL_SECONDS)
            if message is not None and message.error() is None:
                value = message.value()
                assert value is not None
                event = json.loads(value)
                self._events.setdefault(event["id"], []).append(event)
            elif time.monotonic() >= deadline:
                return self._events

    def wait(self, blob: str, seconds: float = 180.0) -> dict[str, Any]:
        """Return the event about a blob. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while blob not in self._events:
            if time.monotonic() > deadline:
                raise TimeoutError(f"blob {blob}: no event in {seconds:.0f} s")
            self.events()
        return self._events[blob][0]

    def close(self) -> None:
        """Release all connections."""
        self._consumer.close()
        self.outbox.close()


def _packs(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    held: list[bytes] = []
    for piece in pieces:
        held.append(piece)
        if sum(map(len, held)) + len(piece) > PACK_BYTES:
            yield held
            held = []
    if held:
        yield held


@contextmanager
def uploading(settings: Settings, tenant: str = "default") -> Iterator[Uploader]:
    """Yield an uploader for a tenant."""
    uploader = Uploader(settings, tenant)
    try:
        yield uploader
    finally:
        uploader.close()


def file_pieces(path: Path, piece_bytes: int = FRAME_BYTES_MAX) -> Iterator[bytes]:
    """Yield a file's bytes."""
    with path.open("rb") as file:
        while piece := file.read(piece_bytes):
            yield piece


def _toml(value: object) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
