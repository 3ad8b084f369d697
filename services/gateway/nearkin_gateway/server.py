"""Run a gateway.

Invariant: without tokens it listens on loopback only; a stop completes the running requests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.app import create_app, with_middleware
from nearkin_gateway.backends.source_dedup import ConnectEdge
from nearkin_gateway.http.connection_protocol import bounded_protocol
from nearkin_gateway.state import Gateway
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.observability import log_setup, tracing
from nearkin_shared.observability.health import Monitor
from nearkin_shared.observability.readiness import Check
from nearkin_shared.utils.garbage_collection import exempt_started_objects

EmbeddedFactory = Callable[[Settings, float], Gateway]
"""(settings, seconds to wait for the store's lock) -> the parts of a gateway whose store is in this process."""

KEEP_ALIVE_SECONDS = 30
BACKLOG = 1024
LINGER_SECONDS = 2.0
"""A connection that is closed with unread bytes of a body is reset, and its answer lost: they are read for so long."""
OTHER_FILES = 1024
"""Open files besides connections: spooled bodies, files of 64 threads, the index, Kafka, Redis, S3."""
_log = logging.getLogger("nearkin.gateway")


def check_address(settings: Settings) -> None:
    """Refuse to serve strangers without knowing them. Raises ConfigError."""
    if settings.auth.tokens_file is not None:
        return
    host = settings.gateway.host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f'gateway.host "{host}": without auth.tokens_file only loopback is served; `nearkin token create` makes a '
            "file of tokens"
        )


def make_gateway(
    settings: Settings,
    config_file: Path | None = None,
    lock_wait_seconds: float = 0.0,
    embedded: EmbeddedFactory | None = None,
    connect_edge: ConnectEdge | None = None,
) -> Gateway:
    """Return the parts of a gateway; `lock_wait_seconds` is for a local store.

    `connect_edge`: for `gateway.edge`. Raises NearkinError.
    """
    check_address(settings)
    if settings.gateway.ingest == "embedded":
        if embedded is None:
            raise ConfigError('gateway.ingest "embedded": `nearkin serve` runs a gateway with a store in its process')
        return embedded(settings, lock_wait_seconds)
    from nearkin_gateway.backends.pipeline_backend import pipeline_gateway

    return pipeline_gateway(settings, config_file, connect_edge)


class GatewayServer(uvicorn.Server):
    """A uvicorn server that calls `ready` with its URL and notifies the gateway of a stop."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, ready: Callable[[str], None] | None = None) -> None:
        super().__init__(config)
        self._gateway, self._ready = gateway, ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; clients whose request was cut get some time to read the answer."""
        self._gateway.stopping = True
        await super().shutdown(sockets)
        deadline = time.monotonic() + LINGER_SECONDS
        while self.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        exempt_started_objects()
        if self._ready is not None and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


class Plain:
    """Wrap the application: an error at start is printed as its message, without traceback."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass all on."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_observed(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and self._gateway.failure is not None:
                message = {**message, "message": "not started"}
            await send(message)

        await self._app(scope, receive, send_observed)


def make_server(settings: Settings, gateway: Gateway, ready: Callable[[str], None] | None = None) -> GatewayServer:
    """Return the server; `run` runs it until SIGTERM or SIGINT."""
    bounds = settings.gateway
    return GatewayServer(
        uvicorn.Config(
            Plain(with_middleware(create_app(gateway)), gateway),
            host=bounds.host,
            port=bounds.port,
            loop="uvloop",
            http=bounded_protocol(),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=None,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=bounds.shutdown_seconds,
        ),
        gateway,
        ready,
    )


def make_room_for_files() -> None:
    """Raise the soft limit of open files to CONNECTIONS_MAX and those that requests open.

    With the usual limit of 1024, a client without a token that held 1000 idle connections kept every put and get from
    opening a file.
    """
    wanted = limits.CONNECTIONS_MAX + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    if room < wanted:
        _log.warning(
            "%d connections need %d open files, the system lets this process have %d; raise its limit (ulimit -Hn)",
            limits.CONNECTIONS_MAX, wanted, room,
        )  # fmt: skip


def serve(
    settings: Settings,
    config_file: Path | None = None,
    ready: Callable[[str], None] | None = None,
    lock_wait_seconds: float = 0.0,
    embedded: EmbeddedFactory | None = None,
    connect_edge: ConnectEdge | None = None,
) -> None:
    """Serve until a stop is requested; call `ready` with the URL. Raises NearkinError."""
    monitor = Monitor(settings.monitor)
    monitor.start()
    tracing.start(settings, "gateway", socket.gethostname())
    make_room_for_files()
    try:
        with log_setup.audit_file(settings):
            gateway = make_gateway(settings, config_file, lock_wait_seconds, embedded, connect_edge)
            _run(settings, gateway, ready, monitor)
    finally:
        tracing.stop()
        monitor.stop()


def _run(settings: Settings, gateway: Gateway, ready: Callable[[str], None] | None, monitor: Monitor) -> None:
    server = make_server(settings, gateway, ready)
    monitor.on_connect(_checks(settings))
    # uvicorn stops by it, then raises it again: a stop is no failure. Not sooner, or a start could not be stopped.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run()
    except SystemExit as end:  # uvicorn's, for a start that failed
        if gateway.failure is not None:
            raise gateway.failure from end
        host, port = settings.gateway.host, settings.gateway.port
        raise ConfigError(
            f'gateway.port "{port}" on {host}: cannot be listened on: another program does, or {host} is not here'
        ) from end


def _checks(settings: Settings) -> dict[str, Check]:
    if settings.gateway.ingest == "embedded":
        return {}
    from nearkin_shared.kafka.readiness_checks import checks_of

    return checks_of(settings)
