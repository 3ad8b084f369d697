"""Gateways for tests. Invariant: real ones on a real socket of loopback, in a thread or in a process of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from nearkin.config import Settings
from nearkin.config_layers import with_changes
from nearkin_gateway.server import make_gateway, make_server
from nearkin_gateway.state import Gateway

START_SECONDS = 30.0


@dataclass
class Running:
    """A gateway in a thread of this process."""

    port: int
    gateway: Gateway
    store: Path

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str | None = None, **more: Any) -> httpx.Client:
        """Return a client of it."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **more)

    def raw(self, data: bytes, *, timeout: float = 10.0) -> bytes:
        """Return what the server says to bytes on a socket, until it closes or says nothing for `timeout`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(data)
            return drained(connection)


def drained(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes, or until the socket's timeout."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except (TimeoutError, ConnectionResetError):
        pass
    return b"".join(parts)


def embedded(store: Path, changes: Mapping[str, Any] | None = None) -> Settings:
    """Return settings of an embedded gateway on any free port."""
    base = {"store": str(store), "gateway": {"ingest": "embedded", "port": 0}}
    return with_changes(with_changes(Settings(), base), changes or {})


@contextmanager
def running(settings: Settings) -> Iterator[Running]:
    """Run a gateway in a thread."""
    gateway = make_gateway(settings)
    server = make_server(settings, gateway)
    thread = threading.Thread(target=server.run, name="gateway", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        assert thread.is_alive(), "the gateway did not start"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(port, gateway, Path(settings.store or "."))
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the gateway did not stop"


@contextmanager
def process(
    environment: Mapping[str, str], folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `python -m nearkin_gateway` in a process of its own; yield it and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder / "gateway.log").open("wb")
    child = subprocess.Popen(
        [sys.executable, "-m", "nearkin_gateway", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NEARKIN_GATEWAY__PORT": str(port), **environment},
        stderr=log,
        stdout=log,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(f"{url}/livez", timeout=1).raise_for_status()
                break
            except httpx.HTTPError:
                assert child.poll() is None, (folder / "gateway.log").read_text()
                assert time.monotonic() < deadline, (folder / "gateway.log").read_text()
                time.sleep(0.05)
        yield child, url
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(60)
        log.close()
