"""Test that one caller or one hanging server does not deny service to the others.

Covered are probes, connections, readers and empty uploads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
import time
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from nearkin_gateway.app import THREADS_MAX
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.catalog.version_catalog import VersionCatalog
from nearkin_gateway.http.connection_protocol import PIPELINED_MAX
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import ConcurrencyLimit, Holders, Holdings, Shares
from nearkin_gateway.uploads.resumable_store import Meta, Resumable
from nearkin_shared.errors import NotFound
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results import Stats
from tests.support.checks.waiting import until
from tests.support.servers.gateways import embedded, running


def test_readyz_while_the_object_store_hangs_denies_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a put while more probes than threads wait for a hanging object store."""
    released, checks = threading.Event(), []

    def hang(_: VersionCatalog) -> None:
        checks.append(1)
        released.wait(60)

    monkeypatch.setattr(VersionCatalog, "check", hang)

    async def ask(url: str) -> tuple[httpx.Response, list[httpx.Response]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
            probes = [asyncio.create_task(client.get("/readyz")) for _ in range(THREADS_MAX + 6)]
            while not checks:
                await asyncio.sleep(0.01)
            put = await client.put("/v1/blobs/k", content=bytes(2_000_000))
            return put, list(await asyncio.gather(*probes))

    with running(embedded(tmp_path)) as gateway:
        try:
            put, probes = asyncio.run(ask(gateway.url))
        finally:
            released.set()
    assert (put.status_code, len(checks)) == (201, 1)
    assert {(probe.status_code, probe.json()["type"]) for probe in probes} == {(503, "urn:nearkin:problem:not-ready")}


# --- connections, readers, empty uploads -----------------------------------------------------------------------------


def half_sent(port: int, address: str) -> socket.socket:
    """Return a connection from an address of loopback that has sent half a request head."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(address, 0))
    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: ")
    return connection


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(10) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_half_sent_heads_deny_no_other_client(tmp_path: Path) -> None:
    """Answer each new request while half-sent heads of many addresses take all connections."""
    with running(embedded(tmp_path), CONNECTIONS_MAX=20) as gateway, ExitStack() as held:
        heads = [held.enter_context(half_sent(gateway.port, f"127.0.0.{2 + number}")) for number in range(20)]
        until(lambda: gateway.connections == 20)
        for _ in range(5):
            assert httpx.get(f"{gateway.url}/livez").status_code == 200
        until(lambda: not is_open(heads[0]))  # the oldest made room
        assert is_open(heads[-1])


def test_half_sent_heads_of_one_address_are_bounded(tmp_path: Path) -> None:
    """Bound one address to IDLE_PER_ADDRESS_MAX idle connections.

    Leave those of others open.
    """
    with running(embedded(tmp_path), IDLE_PER_ADDRESS_MAX=5) as gateway, ExitStack() as held:
        other = held.enter_context(half_sent(gateway.port, "127.0.0.3"))
        heads = [held.enter_context(half_sent(gateway.port, "127.0.0.2")) for _ in range(12)]
        until(lambda: gateway.connections == 6)
        until(lambda: [is_open(head) for head in heads] == [False] * 7 + [True] * 5)
        assert is_open(other)


def test_busy_connection_is_never_closed_for_another(tmp_path: Path) -> None:
    """Treat a connection with a request in progress as busy, however many its address opens."""
    with (
        running(embedded(tmp_path), IDLE_PER_ADDRESS_MAX=1) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as busy,
    ):
        busy.sendall(b"PUT /v1/blobs/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab")
        until(lambda: gateway.gateway.uploads.taken_count == 1)
        for _ in range(3):
            assert httpx.get(f"{gateway.url}/livez").status_code == 200
        busy.sendall(b"cd")
        assert busy.recv(100).startswith(b"HTTP/1.1 201")


def test_slow_readers_of_one_token_deny_no_other_tenant(tmp_path: Path) -> None:
    """Bound slow readers to their token's share of the downloads (429)."""
    evil = tokens.create(tmp_path / "tokens.json", "default", ["read", "write"])[0]
    victim = tokens.create(tmp_path / "tokens.json", "victim", ["read"])[0]
    changes = {"auth": {"tokens_file": str(tmp_path / "tokens.json")}}
    with running(embedded(tmp_path / "store", changes), DOWNLOADS_MAX=4) as gateway, ExitStack() as held:
        with gateway.client(evil) as client:
            assert client.put("/v1/blobs/big", content=os.urandom(8 << 20)).status_code == 201
            for taken in (1, 2):
                reader = held.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
                line = f"GET /v1/blobs/big HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {evil}\r\n\r\n"
                reader.sendall(line.encode())
                until(lambda: gateway.gateway.downloads.taken_count == taken)  # noqa: B023 - it is called before the next one
            refused = client.get("/v1/blobs/big", headers={"Range": "bytes=0-9"})
            assert (refused.status_code, refused.json()["type"]) == (429, "urn:nearkin:problem:share-exceeded")
            assert "2 downloads of this token are running" in refused.json()["detail"]
        with gateway.client(victim) as client:  # a slot was free for it: only the blob is not
            assert client.get("/v1/blobs/big").status_code == 404
        with gateway.gateway.downloads.one(Holders("victim", "v", "127.0.0.9")):
            assert gateway.gateway.downloads.taken_count == 3


def test_slots_demand_more_speed_as_they_fill() -> None:
    """Accept clients as slow as `slow` up to half of the slots, and `busy` when all are taken."""
    slots, demanded = ConcurrencyLimit("downloads", 4, None, (1024, 65_536)), []
    with ExitStack() as held:
        for number in range(4):
            demanded.append(slots.least_bytes_per_second)
            held.enter_context(slots.one(Holders(f"t{number}", "", "")))
        demanded.append(slots.least_bytes_per_second)
    assert demanded == pytest.approx([1024, 1024, 1024, 8192, 65_536])
    assert slots.least_bytes_per_second == 1024


@pytest.mark.parametrize(("kind", "slots"), [("tenant", 6), ("token", 4), ("address", 2)])
def test_holdings_refuse_beyond_each_share(kind: str, slots: int) -> None:
    """Bound a tenant, a token and an address by their own shares, and all by the limit."""
    holdings = Holdings("slots", 8, Shares(tenant=0.75, token=0.5, address=0.25))

    def holders_of(number: int) -> Holders:
        others = {"tenant": f"t{number}", "token": f"k{number}", "address": f"127.0.0.{number}"}
        return Holders(**{**others, kind: "2001:db8::1" if kind == "address" else "mine"})

    for number in range(slots):
        holdings.check_room(holders_of(number))
        holdings.add(number, holders_of(number))
    with pytest.raises(Problem, match=f"slots of this {kind} are") as refused:
        holdings.check_room(Holders("x", "x", "2001:db8::ffff") if kind == "address" else holders_of(99))  # one /64
    assert refused.value.status == 429
    for number in range(slots, 8):
        holdings.add(number, Holders(f"o{number}", "", ""))
    with pytest.raises(Problem) as full:
        holdings.check_room(Holders("new", "", ""))
    assert full.value.status == 503
    holdings.replace({})
    assert (len(holdings), holdings._counts) == (0, {})


def test_empty_uploads_hold_a_share_and_expire_in_minutes(tmp_path: Path) -> None:
    """Bound a tenant's empty uploads; delete them after RESUMABLE_EMPTY_SECONDS."""
    bounds = {"RESUMABLE_MAX": 4, "TENANT_SHARE": 0.5, "RESUMABLE_EMPTY_SECONDS": 60}
    settings = embedded(tmp_path, {"gateway": {"address_share": 1}})
    with running(settings, **bounds) as gateway, gateway.client() as client:
        headers = {"Tus-Resumable": "1.0.0", "Upload-Length": "1", "Upload-Metadata": "key aw=="}
        answers = [client.post("/v1/uploads", headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [201, 201, 429]
        gateway.gateway.resumable.check_room(Holders("other", "", ""))
        expires = parsedate_to_datetime(answers[0].headers["upload-expires"]).timestamp()
        assert expires - time.time() < 61


def test_empty_upload_expires_and_one_with_bytes_stays(tmp_path: Path) -> None:
    """Expire an upload without bytes after its minutes; keep one with bytes as before."""
    uploads, now_us = Resumable(LocalObjectStore(tmp_path), 10), time.time_ns() // 1000
    meta = Meta("default", "k", 5, now_us, now_us + 3_600_000_000, empty_expires_us=now_us - 1)
    empty, begun = uploads.create(meta), uploads.create(meta)
    uploads.stage(begun, 0, b"a", tenant="default")
    uploads.sweep(lambda _: None)
    assert [path.parent.name for path in (tmp_path / "uploads").glob("*/meta")] == [begun]
    assert uploads.load("default", begun).offset == 1
    with pytest.raises(NotFound):
        uploads.load("default", empty)


# --- pipelined requests ----------------------------------------------------------------------------------------------


def test_pipelined_requests_of_a_connection_are_bounded(tmp_path: Path) -> None:
    """Answer PIPELINED_MAX + 1 of 50 requests in one write; then close the connection."""
    with running(embedded(tmp_path)) as gateway:
        answers = gateway.raw(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1") == PIPELINED_MAX + 1
        assert answers.lower().count(b"connection: close") == 1
        few = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * PIPELINED_MAX
        last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert gateway.raw(few + last).count(b"HTTP/1.1 200") == PIPELINED_MAX + 1


def test_client_that_leaves_a_pipeline_leaves_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Log no error if a client resets its connection while more of its requests wait."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        assert client.put("/v1/blobs/large", content=os.urandom(32 * MIB)).status_code == 201
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as leaving:
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
                leaving.sendall(b"GET /v1/blobs/large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
                assert leaving.recv(100).startswith(b"HTTP/1.1 200")
            until(lambda: not gateway.gateway.downloads.taken_count)
        assert client.get("/livez").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_sums_of_quotas_occupy_no_thread_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read them with the threads of requests to Redis, which may not answer."""
    file, threads = tmp_path / "tokens.json", []
    token, *_ = tokens.create(file, "default", ["write"])
    tokens.set_quota(file, "default", TenantQuota(logical_bytes=MIB))
    recount = VersionCatalog.recount

    def observed(catalogue: VersionCatalog, tenant: str, *, needs_whole: bool) -> tuple[Stats, bool]:
        threads.append(threading.current_thread().name)
        return recount(catalogue, tenant, needs_whole=needs_whole)

    monkeypatch.setattr(VersionCatalog, "recount", observed)
    with (
        running(embedded(tmp_path / "store", {"auth": {"tokens_file": str(file)}})) as gateway,
        gateway.client(token) as client,
    ):
        assert client.put("/v1/blobs/k", content=b"1").status_code == 201
    assert threads
    assert all(name.startswith("nearkin-gateway-control") for name in threads)
