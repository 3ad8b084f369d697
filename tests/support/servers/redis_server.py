"""Run a Redis server with custom options.

Invariant: as `servers.Redis`, but nothing is kept on disk unless an option requires it.

with redis_server(folder) as url: ...
server = RedisServer(folder, "--cluster-enabled", "yes").start(); server.kill(); server.start(); server.stop()
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import programs
from tests.support.servers.server import LOOPBACK, free_port
from tests.support.servers.servers import Redis

CLUSTER_BUS_ABOVE = 10_000
"""Redis' own distance: a Cluster's servers talk to each other on a port this far above the clients' port."""


class RedisServer(Redis):
    """A server that may be killed and restarted, on the same port and in the same folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` follow those that keep the server on loopback and off the disk."""
        super().__init__(folder, port=free_port(CLUSTER_BUS_ABOVE) if "--cluster-enabled" in options else None)
        self._options = options

    def command(self) -> list[str]:
        """Return the command of the server itself."""
        return [
            *(programs.redis_server(), "--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder)),
            *("--daemonize", "no", "--save", "", "--appendonly", "no", *self._options),
        ]

    def ready(self) -> bool:
        """Return whether the server answers, if only to request a password."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[str]:
    """Run a server in a folder and yield its URL."""
    with RedisServer(folder, *options) as server:
        yield server.url
