"""One kept HTTP/1.1 connection: a request is sent, and its answer is received later.

    send to each of several servers -> receive from each: they work at once, and no thread waits for one of them

Invariant: an answer is complete, or receiving it raises; a connection with an unread answer is not used again.
"""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

import httptools

from nearkin_shared.limits import MIB

ANSWER_BYTES_MAX = 256 * MIB
"""Bound on an answer with its headers."""
_READ_BYTES = 1 << 18
_PORTS = {"http": 80, "https": 443}


class HttpFailure(Exception):
    """No complete answer arrived: the server is away, or it is another kind of server."""


class _Answers:
    """Collect the answer that the parser of a connection reads."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self.is_complete = self.is_last = False

    def begin(self) -> None:
        """Expect another answer."""
        self._parts.clear()
        self._size_bytes, self.is_complete = 0, False

    def add(self, data: bytes) -> None:
        """Parse some of the answer. Raises HttpFailure, HttpParserError."""
        self._size_bytes += len(data)
        if not data:
            raise HttpFailure("the connection ended before the answer")
        if self._size_bytes > ANSWER_BYTES_MAX:
            raise HttpFailure(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note the end, and whether the connection ends with it; the parser forgets that."""
        self.is_complete, self.is_last = True, not self._parser.should_keep_alive()

    @property
    def result(self) -> tuple[int, bytes]:
        """Return the status and the body of a complete answer."""
        return self._parser.get_status_code(), b"".join(self._parts)


class HttpConnection:
    """Connection to one server. Used by one thread at a time."""

    def __init__(self, url: str, headers: dict[str, str], timeout_seconds: float) -> None:
        """Connect. Raises HttpFailure."""
        parts = urlsplit(url)
        self._path = parts.path.rstrip("/")
        fixed = {"host": parts.netloc.rpartition("@")[2], **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._answers = _Answers()
        self._is_kept = False
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        try:
            self._socket = socket.create_connection((host, port), timeout_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
        except OSError as err:
            raise HttpFailure(type(err).__name__) from err

    @property
    def is_idle(self) -> bool:
        """Return whether the connection may take a request.

        So it is once the last answer was read, while the server keeps the connection.
        """
        if not self._is_kept:
            return False
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def send(self, path: str, body: bytes) -> None:
        """Send a POST request. Raises HttpFailure."""
        self._is_kept = False
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        try:
            self._socket.sendall(head.encode("latin-1") + body)
        except OSError as err:
            raise HttpFailure(type(err).__name__) from err

    def receive(self) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Raises HttpFailure."""
        self._answers.begin()
        try:
            while not self._answers.is_complete:
                self._answers.add(self._socket.recv(_READ_BYTES))
        except (OSError, httptools.HttpParserError) as err:
            raise HttpFailure(type(err).__name__) from err
        self._is_kept = not self._answers.is_last
        return self._answers.result

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with suppress(OSError):
            self._socket.close()
