"""Test clients that lie, stall or flood.

Status, bounded memory, and a gateway that survives.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from nearkin_shared.utils.prefetch import PrefetchIterator
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, drain, embedded, process, running

MIB = 1024 * 1024
SLOW_SECONDS = 1


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    changes = {"body_bytes_max": 4 * MIB, "address_share": 1}
    bounds = {
        "UPLOADS_MAX": 4,
        "CONNECTIONS_MAX": 40,
        "HEADER_BYTES_MAX": 8192,
        "SLOW_SECONDS": SLOW_SECONDS,
        "SLOW_BYTES_PER_SECOND": 1000,
    }
    settings = embedded(tmp_path_factory.mktemp("store"), {"gateway": changes})
    with running(settings, **bounds, TENANT_SHARE=1) as found:  # one caller fills all of it
        yield found


@pytest.fixture(autouse=True)
def _lives_on(gateway: RunningGateway) -> Iterator[None]:
    yield
    with gateway.client() as client:
        assert client.get("/readyz").status_code == 200
        assert client.put("/v1/blobs/alive", content=b"x").status_code == 201
    until(
        lambda: not gateway.gateway.uploads.taken_count and not gateway.gateway.downloads.taken_count
    )  # everything was freed


def head(path: str, *headers: str, method: str = "PUT") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode("latin-1")


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


def test_body_shorter_than_announced_is_refused(gateway: RunningGateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(head("/v1/blobs/short", "Content-Length: 1000") + b"x" * 999)
        connection.shutdown(socket.SHUT_WR)
        drain(connection)
    with gateway.client() as client:
        assert client.get("/v1/blobs/short").status_code == 404


def test_body_that_stops_is_408(gateway: RunningGateway) -> None:
    started = time.monotonic()
    answer = gateway.raw(head("/v1/blobs/stops", "Content-Length: 1000000") + b"x" * 500)
    assert status_of(answer) == 408
    assert time.monotonic() - started > SLOW_SECONDS * 0.9  # and it arrived, though nothing more was sent
    assert b"too-slow" in answer


def test_body_that_trickles_is_408(gateway: RunningGateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(head("/v1/blobs/trickle", "Transfer-Encoding: chunked"))
        stop = threading.Event()

        def trickle() -> None:
            try:
                while not stop.wait(0.02):
                    connection.sendall(b"1\r\nx\r\n")
            except OSError:
                pass

        sender = threading.Thread(target=trickle)
        sender.start()
        answer = connection.recv(65536)
        stop.set()
        sender.join()
    assert status_of(answer) == 408


def test_slow_body_above_least_rate_is_accepted(tmp_path: Path) -> None:
    def steadily() -> Iterator[bytes]:
        for _ in range(50):
            time.sleep(0.1)
            yield b"x" * 2000  # 20,000 bytes a second for 5 s: below the least rate only where 2 s go by without any

    slow = {"SLOW_SECONDS": 2, "SLOW_BYTES_PER_SECOND": 1000}
    with running(embedded(tmp_path), **slow) as gateway, gateway.client() as client:
        assert client.put("/v1/blobs/steady", content=steadily()).json()["size_bytes"] == 100_000


def test_endless_request_line_is_closed(gateway: RunningGateway) -> None:
    for beginning in (b"", b"G", b"\r\n\r\n", b"GET /v1/blobs HTTP/1.1\r\nHost: [::1]\r\n"):
        assert gateway.raw(beginning) == b""


def test_oversized_body_is_413(gateway: RunningGateway) -> None:
    """Return 413 for a body over the limit, announced or not."""
    assert status_of(gateway.raw(head("/v1/blobs/big", f"Content-Length: {5 * MIB}"), timeout=1)) == 413
    assert status_of(gateway.raw(head("/v1/blobs/big", "Content-Length: " + "9" * 18), timeout=1)) == 413

    def endless() -> Iterator[bytes]:
        for _ in range(5 * 16):
            yield b"x" * 65536

    with gateway.client() as client:
        assert client.put("/v1/blobs/big", content=endless()).status_code == 413
        assert client.get("/v1/blobs/big").status_code == 404


def test_early_refusal_discards_up_to_a_bound(gateway: RunningGateway) -> None:
    """Discard a refused body of 1 GiB up to a bound, then close the connection."""
    sent = 0
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(head("/v1/nothing", f"Content-Length: {1024 * MIB}"))
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 1024 * MIB:
                connection.sendall(b"x" * MIB)
                sent += MIB
    assert sent < 64 * MIB


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: [::1]\r\n\r\n",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nContent-Length: -1\r\n\r\n",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n" + b"F" * 40 + b"\r\nabc\r\n",
        b"PUT /v1/blobs/x HTTP/1.1\r\nHost: [::1]\r\nX\x00Y: 1\r\n\r\n",
        b"* / HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: [::1]\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: [::1]\r\n\r\n",
    ],
)  # fmt: skip
def test_garbage_is_a_client_error_or_a_closed_door(gateway: RunningGateway, sent: bytes) -> None:
    answer = gateway.raw(sent, timeout=3)
    if answer:
        assert 400 <= status_of(answer) < 500
        assert b"application/problem+json" in answer
    with gateway.client() as client:
        assert client.get("/v1/blobs/x").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Big: " + "a" * 9000],
        [f"X-{number}: {'a' * 50}" for number in range(300)],
        ["X-Nearkin-Meta-A: " + "b" * 8200],
        ["Cookie: " + "c" * 300_000],
    ],
)
def test_oversized_headers_are_431(gateway: RunningGateway, headers: list[str]) -> None:
    answer = gateway.raw(head("/v1/blobs/x", *headers, "Content-Length: 0"), timeout=3)
    assert status_of(answer) == 431


def test_oversized_url_is_refused(gateway: RunningGateway) -> None:
    assert status_of(gateway.raw(head("/v1/blobs/" + "k" * 20_000, method="GET"), timeout=3)) == 431
    assert status_of(gateway.raw(head("/v1/blobs/" + "k" * 2_000, method="GET"), timeout=3)) == 414


def test_endless_header_is_refused_early(gateway: RunningGateway) -> None:
    """Count a header while it arrives: the parser keeps it until it ends, in memory."""
    sent = 0
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 256 * MIB:
                connection.sendall(b"x" * 65536)
                sent += 65536
    assert sent < 32 * MIB


def test_one_upload_too_many_is_503(gateway: RunningGateway) -> None:
    """Return 503 to one upload too many; accept one once a slot is free."""
    holders = []
    for number in range(4):
        connection = socket.create_connection(("127.0.0.1", gateway.port))
        connection.sendall(head(f"/v1/blobs/held/{number}", "Content-Length: 100000") + b"x" * 3000)
        holders.append(connection)
    until(lambda: gateway.gateway.uploads.taken_count == 4)
    with gateway.client() as client:
        refused = client.put("/v1/blobs/fifth", content=b"x")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    for connection in holders:
        connection.close()


def test_one_connection_too_many_is_refused(tmp_path: Path) -> None:
    with running(embedded(tmp_path), CONNECTIONS_MAX=4) as own:
        body = head("/v1/blobs/held", "Content-Length: 100000")  # under way: an idle one would make room
        holders = [socket.create_connection(("127.0.0.1", own.port)) for _ in range(4)]
        try:
            for connection in holders:
                connection.sendall(body)
            until(lambda: own.gateway.uploads.taken_count == 4)
            assert status_of(own.raw(head("/livez", method="GET"), timeout=3)) == 503
        finally:
            for connection in holders:
                connection.close()
        until(lambda: not own.connections)
        assert status_of(own.raw(head("/livez", "Connection: close", method="GET"))) == 200


def test_encoded_or_partial_body_is_refused(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        assert client.put("/v1/blobs/gz", content=b"x", headers={"Content-Encoding": "gzip"}).status_code == 415
        assert client.put("/v1/blobs/gz", content=b"x", headers={"Content-Range": "bytes 0-0/5"}).status_code == 400
        assert client.put("/v1/blobs/gz", content=b"x", headers={"Content-Encoding": "identity"}).status_code == 201


def test_metadata_that_cannot_be_kept_are_refused(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        for headers in ({"X-Nearkin-Meta-A": "%FF"}, {"X-Nearkin-Meta-": "x"}, {"X-Nearkin-Meta-%FF": "x"}):
            assert client.put("/v1/blobs/meta", content=b"x", headers=headers).status_code == 400, headers
        assert client.get("/v1/blobs/meta").status_code == 404


@pytest.mark.parametrize("least", [1024, MIB])
def test_sleeping_reader_is_disconnected(tmp_path: Path, least: int) -> None:
    with running(embedded(tmp_path), SLOW_SECONDS=1, SLOW_BYTES_PER_SECOND=least) as gateway:
        with gateway.client() as client:
            assert client.put("/v1/blobs/long", content=os.urandom(24 * MIB)).status_code == 201
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", gateway.port))
            connection.sendall(head("/v1/blobs/long", method="GET"))
            until(lambda: gateway.gateway.downloads.taken_count, poll_seconds=0.01)
            until(lambda: not gateway.gateway.downloads.taken_count)


def test_slow_reader_above_least_rate_gets_all(tmp_path: Path) -> None:
    content = os.urandom(3 * MIB)
    with running(embedded(tmp_path), SLOW_SECONDS=1, SLOW_BYTES_PER_SECOND=4 * 1024) as gateway:
        with gateway.client() as client:
            client.put("/v1/blobs/slow", content=content)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", gateway.port))
            connection.sendall(head("/v1/blobs/slow", "Connection: close", method="GET"))
            taken = bytearray()
            for _ in range(40):  # 4 s, each of some 20 kB: the system's buffers hold megabytes
                time.sleep(0.1)
                taken += connection.recv(100_000)
            assert len(taken) < MIB
            taken += drain(connection)
    assert taken.endswith(content)


def test_fragment_is_no_part_of_a_key(gateway: RunningGateway) -> None:
    answer = gateway.raw(head("/v1/blobs/cut#off?x=1", "Content-Length: 4") + b"frag")
    assert status_of(answer) == 400
    assert b"%23" in answer
    with gateway.client() as client:
        assert client.get("/v1/blobs/cut").status_code == 404
        assert client.put("/v1/blobs/cut%23off", content=b"whole").status_code == 201
        assert client.get("/v1/blobs/cut%23off").content == b"whole"


def test_leaving_reader_frees_its_slot(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.put("/v1/blobs/left", content=os.urandom(4 * MIB))
        for _ in range(5):
            with client.stream("GET", "/v1/blobs/left") as answer:
                next(answer.iter_raw())


def test_leaving_reader_does_not_delay_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End read-ahead in the thread that waits for it, never in the loop of all clients."""
    ended: list[str] = []

    close = PrefetchIterator.close

    def record_close(pieces: PrefetchIterator[memoryview]) -> None:
        ended.append(threading.current_thread().name)
        close(pieces)

    monkeypatch.setattr(PrefetchIterator, "close", record_close)
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        client.put("/v1/blobs/left", content=os.urandom(40 * MIB))
        with client.stream("GET", "/v1/blobs/left") as answer:
            next(answer.iter_raw())
        until(lambda: not gateway.gateway.downloads.taken_count)
        gc.collect()
        assert ended
        assert "gateway" not in ended  # the loop's thread


# --- memory, in a process of its own ---------------------------------------------------------------------------------


def test_streaming_160_megabytes_takes_bounded_memory(tmp_path: Path) -> None:
    environment = {
        "NEARKIN_STORE": str(tmp_path / "store"),
        "NEARKIN_GATEWAY__INGEST": "embedded",
        "NEARKIN_BASE__CACHE_BYTES": "8MiB",
        "NEARKIN_RESTORE__CACHE_BYTES": "8MiB",
    }
    total, piece = 160 * MIB, os.urandom(MIB)

    def body() -> Iterator[bytes]:
        for number in range(total // MIB):
            yield number.to_bytes(8, "big") * (MIB // 16) + piece[: MIB // 2]

    with process(environment, tmp_path) as (child, url):
        with httpx.Client(base_url=url, timeout=120) as client:
            client.put("/v1/blobs/warm", content=piece)
            memory = psutil.Process(child.pid)
            before, peak, done = memory.memory_info().rss, 0, threading.Event()

            def watch() -> None:
                nonlocal peak
                while not done.wait(0.01):
                    peak = max(peak, memory.memory_info().rss)

            watcher = threading.Thread(target=watch)
            watcher.start()
            assert client.put("/v1/blobs/large", content=body()).json()["size_bytes"] == total
            with client.stream("GET", "/v1/blobs/large") as answer:
                size = sum(len(part) for part in answer.iter_raw())
            done.set()
            watcher.join()
        assert size == total
    # The pipeline's own buffers (3 batches, blocks, caches) take some 70 MiB; the body is 160.
    assert peak - before < 110 * MIB, f"{(peak - before) / MIB:.0f} MiB more than at rest"


@pytest.mark.soak
def test_many_tiny_uploads_are_all_stored(tmp_path: Path) -> None:
    count, failures = 2000, []
    environment = {"NEARKIN_STORE": str(tmp_path / "store"), "NEARKIN_GATEWAY__INGEST": "embedded"}
    environment |= {"NEARKIN_GATEWAY__REQUESTS_PER_SECOND": "0"}
    with process(environment, tmp_path) as (child, url):

        def put(start: int) -> None:
            with httpx.Client(base_url=url, timeout=60) as client:
                for number in range(start, count, 16):
                    answer = client.put(f"/v1/blobs/tiny/{number:05d}", content=b"%d" % number)
                    if answer.status_code != 201:
                        failures.append((number, answer.text))

        threads = [threading.Thread(target=put, args=(start,)) for start in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert psutil.Process(child.pid).memory_info().rss < 500 * MIB
        with httpx.Client(base_url=url, timeout=60) as client:
            keys, query = [], "limit=1000"
            while query:
                answer = client.get(f"/v1/blobs?{query}")
                keys += [entry["key"] for entry in answer.json()["blobs"]]
                query = answer.links["next"]["url"].partition("?")[2] if "next" in answer.links else ""
            assert keys == [f"tiny/{number:05d}" for number in range(count)]
            assert client.get("/v1/blobs/tiny/01234").content == b"1234"


def test_stopping_gateway_finishes_the_upload(tmp_path: Path) -> None:
    environment = {"NEARKIN_STORE": str(tmp_path / "store"), "NEARKIN_GATEWAY__INGEST": "embedded"}
    with process(environment, tmp_path) as (child, url):

        def body() -> Iterator[bytes]:
            for number in range(20):
                if number == 5:
                    httpx.get(
                        f"{url}/livez", timeout=60
                    ).raise_for_status()  # it is later in the stream: this one is being read
                    child.terminate()
                time.sleep(0.05)
                yield b"x" * 100_000

        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.put("/v1/blobs/last", content=body()).status_code == 201
        assert child.wait(60) == 0
    with running(embedded(tmp_path / "store")) as gateway, gateway.client() as client:
        assert client.get("/v1/blobs/last").content == b"x" * 2_000_000


@pytest.mark.parametrize("length", ["Content-Length: 6", "Transfer-Encoding: chunked"])
def test_body_under_an_upgrade_is_refused(gateway: RunningGateway, length: str) -> None:
    """Refuse the body of a request that asks for h2c, which the parser ends with its head.

    `curl --http2` and Java's client ask for h2c with the first request.
    """
    beginning = head("/v1/blobs/upgrade", "Connection: Upgrade", "Upgrade: h2c", length)
    assert status_of(gateway.raw(beginning + (b"abcdef" if "Length" in length else b"6\r\nabcdef\r\n0\r\n\r\n"))) == 400
    with gateway.client() as client:
        assert client.get("/v1/blobs/upgrade").status_code == 404
        asked = {"Connection": "Upgrade", "Upgrade": "h2c"}
        assert client.get("/v1/blobs", headers=asked).status_code == 200  # without a body it is passed over


@pytest.mark.parametrize("method", ["PUT", "POST", "PATCH"])
def test_http_1_0_body_without_length_is_411(gateway: RunningGateway, method: str) -> None:
    """Refuse an HTTP/1.0 body without Content-Length instead of storing an empty version."""
    beginning = head("/v1/blobs/one-zero", method=method).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = gateway.raw(beginning + b"hello")
    assert (status_of(answer), b"urn:nearkin:problem:length-required" in answer) == (411, True)
    with gateway.client() as client:
        assert client.get("/v1/blobs/one-zero").status_code == 404
    whole = head("/v1/blobs/one-zero-whole", "Content-Length: 5").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert status_of(gateway.raw(whole + b"hello")) == 201
    assert status_of(gateway.raw(b"GET /v1/blobs/one-zero-whole HTTP/1.0\r\nHost: localhost\r\n\r\n")) == 200


def test_trailers_are_bounded_and_are_no_headers(gateway: RunningGateway) -> None:
    beginning = head("/v1/blobs/trailers", "Transfer-Encoding: chunked", "Connection: close") + b"3\r\nabc\r\n0\r\n"
    assert status_of(gateway.raw(beginning + b"X-Nearkin-Meta-a: b\r\n\r\n")) == 201
    with gateway.client() as client:
        assert client.get("/v1/info/trailers").json()["metadata"] == {}
    sent = 0
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection, suppress(OSError):
        connection.sendall(beginning)
        while sent < 64 * MIB:
            sent += connection.send(b"X-Trailer: " + b"x" * 1000 + b"\r\n")
    assert sent < 32 * MIB  # what the sockets hold, and no more


def test_repeated_header_lines_all_count(gateway: RunningGateway) -> None:
    """Apply every line of a coding and of a digest."""
    for more in (
        ("Content-Encoding: identity", "Content-Encoding: gzip"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Content-Digest: sha-512=:AA==:", f"Content-Digest: sha-256=:{'A' * 43}=:"),
    ):
        chunked = more[0].startswith("Transfer")
        body = b"1\r\nx\r\n0\r\n\r\n" if chunked else b"x"
        sized = more if chunked else (*more, "Content-Length: 1")
        assert status_of(gateway.raw(head("/v1/blobs/lines", *sized) + body)) in (400, 415), more
    with gateway.client() as client:
        assert client.get("/v1/blobs/lines").status_code == 404


def test_gateway_stopped_during_start_stops(tmp_path: Path) -> None:
    blocked = (
        "import os, signal, sys, time\n"
        "import nearkin_gateway.server as server\n"
        "from nearkin.cli import main\n"
        "def opening(*_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(5)\n"
        "    os._exit(77)\n"
        "server.make_gateway = opening\n"
        "sys.exit(main(['serve', sys.argv[1], '--port', '0', '--no-token']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", blocked, str(tmp_path / "store")], check=False, timeout=60)
    assert ended.returncode == 143
