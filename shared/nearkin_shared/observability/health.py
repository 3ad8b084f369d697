"""Report the health of a process over HTTP.

    /livez     503 once a loop did no step for `stall_seconds`: the supervisor restarts the process
    /readyz    503 until connected, while a dependency is unavailable, and while it stops
    /metrics   Prometheus text format

Invariant: a probe costs a bounded time, and never waits for the work.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nearkin_shared.config.services import MonitorSettings
from nearkin_shared.errors import ConfigError
from nearkin_shared.observability.readiness import Check, Readiness

_log = logging.getLogger("nearkin.monitor")

CONNECTIONS_MAX = 32
KEEP_ALIVE_SECONDS = 75
STOP_SECONDS = 5.0


class Pulse:
    """One loop's signs of life."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def beat(self) -> None:
        """Say that a step was done; any thread, any number of times."""
        self._last = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Return how long no step was done."""
        return time.monotonic() - self._last


class Monitor:
    """Answers for a process, on a thread of its own where `settings.port` is set."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._pulses: dict[str, Pulse] = {}
        self._readiness: Readiness | None = None
        self._stopping = False
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port: int | None = settings.port
        """Where it listens, once it does."""

    def pulse(self, name: str) -> Pulse:
        """Return the pulse of a loop that begins; one by the same name is followed."""
        self._pulses[name] = Pulse()
        return self._pulses[name]

    def on_connect(self, checks: Mapping[str, Check]) -> None:
        """Record the start of work; from now on `checks` determine readiness."""
        self._readiness = Readiness(checks)

    def stopping(self) -> None:
        """Say that it takes no more."""
        self._stopping = True

    def stalled_loops(self) -> dict[str, float]:
        """Return the loops that have done nothing for too long, with how long."""
        found = {name: pulse.silent_seconds for name, pulse in list(self._pulses.items())}
        return {name: seconds for name, seconds in found.items() if seconds > self._settings.stall_seconds}

    def missing(self) -> dict[str, str]:
        """Return the unavailable dependencies with reasons; blocks for some seconds at most.

        See nearkin_shared.observability.readiness.
        """
        if self._readiness is None or self._stopping:
            return self._unready()
        return self._readiness.missing()

    def _unready(self) -> dict[str, str]:
        return {"work": "stopping"} if self._readiness is not None else {"servers": "still connecting"}

    # --- serving -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, where there is a port. Raises ConfigError where that cannot be had."""
        if self._settings.port is None:
            return
        host = self._settings.host
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, self._settings.port), family=family)
        except OSError as err:
            raise ConfigError(f'monitor.port "{self._settings.port}" on {host}: {err.strerror or err}') from err
        self.port = listening.getsockname()[1]
        app = Starlette(
            routes=[Route(f"/{name.__name__}", name) for name in (self.livez, self.readyz, self.metrics)]  # plain GETs
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                loop="asyncio",
                ws="none",
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="nearkin-monitor", daemon=True
        )
        self._thread.start()
        _log.info("http://%s:%d/metrics", host, self.port)

    def stop(self) -> None:
        """End listening."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(STOP_SECONDS)

    def livez(self, _request: Request) -> Response:
        """Say whether every loop goes on."""
        stalled = self.stalled_loops()
        details = {name: f"no step for {seconds:.0f} s" for name, seconds in stalled.items()}
        return _health("stalled", details)

    async def readyz(self, _request: Request) -> Response:
        """Report readiness; waiting callers hold no thread that other responses need."""
        if self._readiness is None or self._stopping:
            return _health("not ready", self._unready())
        return _health("not ready", await self._readiness.missing_soon())

    def metrics(self, _request: Request) -> Response:
        """Return what was counted."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _health(bad: str, details: Mapping[str, str]) -> Response:
    if details:
        return JSONResponse({"status": bad, **details}, 503)
    return JSONResponse({"status": "ok"})
