"""Inject faults between an HTTP client and a server, by script.

Invariant: the n-th request of a method meets the n-th letter.

    .   pass it on
    E   cut the connection: the server never sees the request
    L   pass it on, then cut the connection: done, but the reply is lost
    5   answer 503: the server never sees the request
    F   pass it on, then answer 503 all the same
    C   answer 409 ConditionalRequestConflict, as S3 does while another request for the name is in progress
    D   pass it on, answer only once the client has given up: done, and the client never learns it
    W   wait until the client has given up, and for `held`, then pass it on
    H   pass it on, answer with half of the body, then cut the connection

Requests of other methods, and those after the script, pass. Bodies have a Content-Length, as S3's clients send them.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

LETTERS = ".EL5FCDWH"
HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
SOCKET_SECONDS = 30.0

_CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>Try again.</Message></Error>"


class FaultyHttp:
    """A proxy on loopback in front of the server at `port`; clients use its `url`."""

    def __init__(self, port: int, script: str = "", *, method: str = "PUT", held: Callable[[], object] = bool) -> None:
        """Listen. Raises ValueError for unknown letters."""
        if unknown := set(script) - set(LETTERS):
            raise ValueError(f"script {script!r}: {''.join(sorted(unknown))!r} unknown; want letters of {LETTERS!r}")
        self._held = held
        self.met: list[str] = []
        """Letters met so far, in order."""
        self._server_port = port
        self._script = script
        self._method = method.encode()
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request)

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self._listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Return the URL of the proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Return the port it listens on, so that proxies can be chained."""
        return int(self._listener.server_address[1])

    @property
    def spent(self) -> bool:
        """Return whether every letter was met: otherwise the test did not reach the end of its script."""
        return len(self.met) >= len(self._script)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, and wait for active requests."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    def _serve(self, client: socket.socket) -> None:
        """Serve one request; the connection is closed after the answer, so that each request meets its own letter."""
        client.settimeout(SOCKET_SECONDS)
        try:
            request = _read(client)
        except OSError:
            return
        if request:
            try:
                self._answer(client, request, self._letter(request))
            except OSError:
                return  # the peer that closed first is the subject of the test

    def _letter(self, request: bytes) -> str:
        if not request.startswith(self._method + b" "):
            return "."
        with self._lock:
            letter = self._script[len(self.met)] if len(self.met) < len(self._script) else "."
            self.met.append(letter)
        return letter

    def _answer(self, client: socket.socket, request: bytes, letter: str) -> None:
        match letter:
            case "E":
                return
            case "5":
                client.sendall(_reply(b"503 Service Unavailable"))
            case "C":
                client.sendall(_reply(b"409 Conflict", _CONFLICT))
            case "L":
                self._pass_on(request)
            case "F":
                self._pass_on(request)
                client.sendall(_reply(b"503 Service Unavailable"))
            case "D":
                reply = self._pass_on(request)
                _until_given_up(client)
                client.sendall(reply)
            case "W":
                _until_given_up(client)
                self._held()
                client.sendall(self._pass_on(request))
            case "H":
                reply = self._pass_on(request)
                head, end, body = reply.partition(b"\r\n\r\n")
                client.sendall(head + end + body[: len(body) // 2])
            case _:
                client.sendall(self._pass_on(request))

    def _pass_on(self, request: bytes) -> bytes:
        line, _, rest = request.partition(b"\r\n")
        with socket.create_connection(("127.0.0.1", self._server_port), SOCKET_SECONDS) as server:
            server.sendall(line + b"\r\nConnection: close\r\n" + rest)
            parts = []
            while part := server.recv(1 << 20):
                parts.append(part)
        return b"".join(parts)


def _read(client: socket.socket) -> bytes:
    """Return one request whole, b"" if the client closed the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part or len(data) > HEAD_BYTES_MAX:
            return b""
        data += part
    head, end, body = data.partition(b"\r\n\r\n")
    names = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    length = int(names.get(b"content-length", b"0"))
    if length > BODY_BYTES_MAX:
        return b""
    parts = [body]
    missing = length - len(body)
    while missing > 0:
        part = client.recv(min(missing, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        missing -= len(part)
    kept = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:"))
    return kept + end + b"".join(parts)


def _until_given_up(client: socket.socket) -> None:
    """Wait until the client has closed the connection. Raises TimeoutError."""
    with suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass


def _reply(status: bytes, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)
