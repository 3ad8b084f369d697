"""Start gateways for tests.

Invariant: they are real ones on a loopback socket, in a thread or in a process of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn import Server

from nearkin.embedded.gateway_backend import embedded_gateway
from nearkin.workers.edge_dedup import connect_edge
from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.server import make_gateway, make_server
from nearkin_gateway.state import Gateway
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from tests.support.checks.waiting import until
from tests.support.servers.termination import exit_on_sigterm

ANSWER_SECONDS_MAX = 60.0


@dataclass
class RunningGateway:
    """A gateway in a thread of this process."""

    port: int
    gateway: Gateway
    store: Path
    server: Server

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self.server.server_state.connections)

    @property
    def url(self) -> str:
        """Return the gateway's URL."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str | None = None, **more: Any) -> httpx.Client:
        """Return a client of the gateway."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **more)

    def raw(self, data: bytes, *, timeout: float = 10.0) -> bytes:
        """Return the server's answer to bytes on a socket, until it closes.

        Once the answer has begun, a silence of `timeout` ends it. Raises: TimeoutError if there is no answer.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS_MAX) as connection:
            connection.sendall(data)
            try:
                first = connection.recv(65536)
            except ConnectionResetError:
                return b""
            connection.settimeout(timeout)
            return first + drain(connection) if first else b""


def drain(connection: socket.socket) -> bytes:
    """Return the received bytes until the peer closes, or until the socket's timeout."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except (TimeoutError, ConnectionResetError):
        pass
    return b"".join(parts)


def embedded(store: Path, changes: Mapping[str, Any] | None = None) -> Settings:
    """Return settings of an embedded gateway on any free port."""
    base = {"store": str(store), "gateway": {"ingest": "embedded", "port": 0}, "storage": {"create": True}}
    return with_changes(with_changes(Settings(), base), changes or {})


_LIMITS = {name: value for name, value in vars(limits).items() if name.isupper()}


@contextmanager
def running(settings: Settings, **bounds: float) -> Iterator[RunningGateway]:
    """Run a gateway in a thread, with `bounds` in place of constants of nearkin_gateway.gateway_limits."""
    assert bounds.keys() <= _LIMITS.keys(), bounds
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_LIMITS, **bounds}.items():
            patch.setattr(limits, name, value)
        with _running(settings) as found:
            yield found


@contextmanager
def _running(settings: Settings) -> Iterator[RunningGateway]:
    gateway = make_gateway(settings, embedded=embedded_gateway, connect_edge=connect_edge)
    server = make_server(settings, gateway)
    thread = threading.Thread(target=server.run, name="gateway", daemon=True)
    thread.start()

    def started() -> bool:
        assert thread.is_alive(), "the gateway did not start"
        return server.started

    until(started, poll_seconds=0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningGateway(port, gateway, Path(settings.store or "."), server)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the gateway did not stop"


@contextmanager
def process(
    environment: Mapping[str, str], folder: Path, *arguments: str, python: str = sys.executable
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `python -m nearkin.workers.gateway` in a process of its own; yield it and its URL.

    `python`: another interpreter runs the code of its own environment.
    """
    exit_on_sigterm()
    path = {"PYTHONPATH": os.pathsep.join(sys.path)} if python == sys.executable else {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder / "gateway.log").open("wb")
    child = subprocess.Popen(
        [python, "-m", "nearkin.workers.gateway", *arguments],
        env={
            **os.environ,
            **path,
            "NEARKIN_GATEWAY__PORT": str(port),
            "NEARKIN_STORAGE__CREATE": "true",
            **environment,
        },
        stderr=log,
        stdout=log,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _lives(child, url, folder / "gateway.log"), (folder / "gateway.log").read_text)
        yield child, url
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(60)
        log.close()


def _lives(child: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert child.poll() is None, log.read_text()
    try:
        return httpx.get(f"{url}/livez").status_code == 200
    except httpx.HTTPError:
        return False
