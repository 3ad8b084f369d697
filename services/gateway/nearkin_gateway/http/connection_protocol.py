"""Parse HTTP/1.1 connections.

Invariant: resources of a connection without a request are bounded.

headers above HEADER_BYTES_MAX -> 431    no complete head within SLOW_SECONDS -> closed
as much in chunk framing of a body -> 431  a body under `Upgrade` -> 400: the parser would take it for requests
garbage -> 400                             an unread body: DISCARD_BYTES_MAX or DISCARD_SECONDS, then closed
a body of HTTP/1.0 without length -> 411   more than PIPELINED_MAX requests wait: closed once these are answered
half a head, or idle: the oldest of an address beyond IDLE_PER_ADDRESS_MAX, or of all at CONNECTIONS_MAX -> closed
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from asyncio.events import TimerHandle
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.http.idle_connections import IdleConnections
from nearkin_gateway.http.problems import MEDIA_TYPE, Problem, problem_body

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

DISCARD_BYTES_MAX = 16 * 1024 * 1024
DISCARD_SECONDS = 5.0
"""After an early answer: closing at once would reset the connection before the client has read why."""
PIPELINED_MAX = 8
"""Requests of a connection that may wait for the one before them; one read can hold thousands of heads."""
BODY_METHODS = frozenset({b"PATCH", b"POST", b"PUT"})
LENGTH_REQUIRED = "a request of HTTP/1.0 with a body needs Content-Length: send it, or use HTTP/1.1"
UPGRADE = "only HTTP/1.1 is spoken: send bodies without Upgrade (curl --http1.1, Java HttpClient.Version.HTTP_1_1)"


class _HeadRefused(Exception):
    pass


def _unsent_bytes(transport: asyncio.Transport) -> int:
    """Return the unacknowledged bytes: the system's buffer hides a slow client's progress."""
    queued = transport.get_write_buffer_size()
    with suppress(OSError, AttributeError):  # a closed socket, or a system without this option
        waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        queued += int.from_bytes(waiting, sys.byteorder)
    return queued


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The bounds of all connections of one gateway."""

    connections_max: int
    head_bytes_max: int
    head_seconds: float
    idle: IdleConnections

    @property
    def head_too_large(self) -> str:
        """The error for a head above the bound."""
        return f"a request's head, metadata and all, takes at most {self.head_bytes_max} bytes"


class _BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds for untrusted clients; `bounded_protocol` sets `bounds`."""

    bounds: ClassVar[ConnectionBounds]

    _in_head = True
    _head_bytes = 0
    _framing_bytes = 0
    _discarded_bytes = 0
    _refused = False
    _timer: TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that was read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.bounds.head_seconds)
        self._note_idle()
        if len(self.connections) > self.bounds.connections_max and not self.bounds.idle.close_oldest(self):
            self._refuse(
                503, "busy", f"{self.bounds.connections_max} connections are open, which is the most; try again"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.bounds.idle.discard(self)
        if self._running is not None and self._running is not self.cycle and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn marks the last request only: others may wait behind this
            self._running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:
                self._arm(self.bounds.head_seconds)
        else:
            self._framing_bytes += len(data)
        super().data_received(data)
        if self._refused:
            return
        if self._in_head and self._head_bytes > self.bounds.head_bytes_max:
            self._refuse(431, "header-too-large", self.bounds.head_too_large)
        elif not self._in_head and self._framing_bytes > self.bounds.head_bytes_max:
            self._refuse(
                431, "header-too-large", f"trailers and extensions take at most {self.bounds.head_bytes_max} bytes"
            )

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, "bad-request", "not an HTTP/1.1 request")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {
            "nearkin.connection": {
                "unsent_bytes": partial(_unsent_bytes, self.transport),
                "abort": self.transport.abort,
            }
        }
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._discarded_bytes = False, 0, 0
        self._framing_bytes = 0
        self._disarm()
        self.bounds.idle.discard(self)
        size_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size_bytes > self.bounds.head_bytes_max:
            self._refuse(431, "header-too-large", self.bounds.head_too_large)
            raise _HeadRefused
        if b"#" in self.url:  # the parser would cut the rest off, and the request would name another key
            self._refuse(400, "bad-request", "a request's target has no fragment: write # as %23")
            raise _HeadRefused
        if self.parser.should_upgrade() and any(_announces_body(name, value) for name, value in self.headers):
            # httptools ends such a request with its head: an empty blob, and its bytes the next request.
            self._refuse(400, "upgrade-with-body", UPGRADE)
            raise _HeadRefused
        if self._lacks_length():  # httptools ends such a request with its head: an empty blob
            self._refuse(411, "length-required", LENGTH_REQUIRED)
            raise _HeadRefused
        if len(self.pipeline) >= PIPELINED_MAX:
            self.cycle.keep_alive = False  # of the last one that waits; the client may send the others again
            self._refused = True
            raise _HeadRefused
        super().on_headers_complete()

    def _lacks_length(self) -> bool:
        """Return whether only the end of the connection could end the request's body."""
        return (
            self.parser.get_http_version() < "1.1"
            and self.parser.get_method() in BODY_METHODS
            and not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header, and was not counted as one
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARD_BYTES_MAX:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0
        self._disarm()
        if self.cycle.response_complete and not self.transport.is_closing():  # its rest was discarded
            self._arm(self.timeout_keep_alive)
        self._note_idle()

    def on_response_complete(self) -> None:
        unread = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._arm(DISCARD_SECONDS)
        self._note_idle()

    def close_idle(self) -> None:
        """Make room for another connection."""
        self._refused = True
        self._disarm()
        self._unset_keepalive_if_required()
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the end of an answer: a peer that reads still gets it
            self.loop.call_later(DISCARD_SECONDS, self.transport.abort)

    def _note_idle(self) -> None:
        """Count the connection among the idle ones if it has no request under way."""
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            address = "unknown" if self.client is None else self.client[0]
            if not self.transport.is_closing():
                self.bounds.idle.add(self, address)

    def shutdown(self) -> None:
        self._disarm()
        super().shutdown()

    def _refuse(self, status: int, name: str, detail: str) -> None:
        self._refused = True
        self._disarm()
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = problem_body(Problem(status, name, detail), None)
            head = b"content-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % (MEDIA_TYPE.encode(), len(body)) + body)
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        self._timer = None
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._arm(seconds)  # half a pipelined request: the response before it is sent first
        else:
            self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_protocol() -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with the gateway's bounds.

    uvicorn's options bound connections and tasks together (`limit_concurrency`) and the idle time after a response;
    with httptools none bounds the size or time of a head, chunk framing, pipelined requests or one address, and h11
    bounds only the size of a head.
    """
    bounds = ConnectionBounds(
        limits.CONNECTIONS_MAX,
        limits.HEADER_BYTES_MAX,
        limits.SLOW_SECONDS,
        IdleConnections(limits.IDLE_PER_ADDRESS_MAX),
    )
    return type("BoundedProtocol", (_BoundedProtocol,), {"bounds": bounds})


def _announces_body(name: bytes, value: bytes) -> bool:
    name = name.lower()
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t") != b"")
