"""Provide servers for tests and for the local cluster.

Invariant: they are real, on loopback, without Docker, and none is left running.

    with Kafka(folder) as kafka: kafka.bootstrap
    with Redis(folder) as redis: redis.url
    with S3(folder) as s3: s3.endpoint, s3.make_bucket("name")

Each has start, stop, kill and restart. Data stay over a restart and a SIGKILL (except moto's, which are in memory).
Raises: MissingTool if a program is not installed; ServerFailed with the end of its log if one does not start.
"""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nearkin.lab.corpus_cache import MissingTool
from tests.support.servers import programs
from tests.support.servers.kafka_server import Kafka
from tests.support.servers.s3_server import S3
from tests.support.servers.server import LOOPBACK, Server, ServerFailed, accepts, free_port

__all__ = ["S3", "Kafka", "MissingTool", "Redis", "Server", "ServerFailed", "shared_kafka"]


class Redis(Server):
    """A Redis or Valkey server with an append-only file, so that a SIGKILL loses no acknowledged write."""

    name = "redis"

    @property
    def url(self) -> str:
        """Return the server's address, as clients need it."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    def command(self) -> list[str]:
        """Return the command of the server itself."""
        return [
            *(programs.redis_server(), "--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder)),
            *("--daemonize", "no", "--save", "", "--maxmemory-policy", "noeviction"),
            # `everysec` delays writes in memory while an fsync runs; `no` writes before each answer.
            *("--appendonly", "yes", "--appendfsync", "no"),
        ]

    def ready(self) -> bool:
        """Return whether the server answers PING, which it does not while it loads its file."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def shared_kafka(folder: Path, owner_pid: int) -> Iterator[str]:
    """Yield the bootstrap address of one Kafka for all processes that name the same folder; the first starts it.

    When process `owner_pid` ends, it is stopped and its data are deleted. No test may stop it, as others use it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "kafka.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        port = int(json.loads(note.read_text())["port"]) if note.exists() else 0
        if not port or not accepts(port):
            # Named by its port, so that the removal of a dead server never affects the data of its successor.
            port = free_port()
            started = Kafka(folder / f"kafka-{port}", port=port, owner_pid=owner_pid).start()
            note.write_text(json.dumps({"port": port}))
            started.leave_to_owner()
    yield f"{LOOPBACK}:{port}"
