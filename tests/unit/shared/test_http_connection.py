"""Kept HTTP connection: answers cut short, closed, unread or too long."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from nearkin_shared.index.shards import http_connection
from nearkin_shared.index.shards.http_connection import HttpConnection, HttpFailure

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
SECONDS = 10.0


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Answer each request of one connection in turn, then close it; yield the URL, and what reads the requests."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            listener.settimeout(SECONDS)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(SECONDS)
                for answer in answers:
                    received.append(connection.recv(1 << 16))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()

        def requests() -> bytes:
            thread.join(SECONDS)
            return b"".join(received)

        yield f"http://127.0.0.1:{listener.getsockname()[1]}/base", requests
        thread.join(SECONDS)


def connect(url: str) -> HttpConnection:
    return HttpConnection(url, {"nearkin-shard": "0/1/s"}, SECONDS)


def test_connection_is_used_again_until_it_is_closed() -> None:
    """Two requests share a connection; once the server has closed it, it takes no other."""
    with (
        answering(OK, b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n") as (url, requests),
        closing(connect(url)) as one,
    ):
        assert not one.is_idle
        one.send("/v1/locate", b"keys")
        assert not one.is_idle, "its answer was not read"
        assert one.receive() == (200, b"ok")
        assert one.is_idle
        one.send("/v1/locate", b"")
        assert one.receive() == (503, b"")
        sent = requests()
        assert not one.is_idle, "the server closed it"
    assert sent.startswith(b"POST /base/v1/locate HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nnearkin-shard: 0/1/s\r\ncontent-length: 4\r\n\r\nkeysPOST" in sent


def test_answer_that_ends_the_connection_is_the_last() -> None:
    """A connection whose server announces its end gets no other request."""
    with (
        answering(OK.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n")) as (url, _),
        closing(connect(url)) as one,
    ):
        one.send("/", b"")
        assert one.receive() == (200, b"ok")
        assert not one.is_idle


@pytest.mark.parametrize("answer", [b"", OK[:20], OK[:-1], b"no HTTP\r\n\r\n"])
def test_answer_cut_short_or_of_another_kind_fails(answer: bytes) -> None:
    """It is never taken for a shorter answer."""
    with answering(answer) as (url, _), closing(connect(url)) as one:
        one.send("/", b"")
        with pytest.raises(HttpFailure):
            one.receive()
        assert not one.is_idle


def test_answer_above_the_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server cannot fill the memory of its client."""
    monkeypatch.setattr(http_connection, "ANSWER_BYTES_MAX", 100)
    long = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + bytes(100)
    with answering(long) as (url, _), closing(connect(url)) as one:
        one.send("/", b"")
        with pytest.raises(HttpFailure, match="more than 100 bytes"):
            one.receive()


def test_server_that_does_not_listen_fails() -> None:
    """The failure names its kind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(HttpFailure, match="ConnectionRefusedError"):
        connect(url)
