"""One caller, or one server that hangs, does not deny the others: probes, connections, readers, empty uploads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest

from nearkin.testing.gateways import embedded, running
from nearkin_gateway.app import THREADS_MAX
from nearkin_gateway.catalogue import Catalogue


def test_readyz_while_the_object_store_hangs_denies_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.15: more probes than threads wait for a hanging object store; a put goes on, and they are told."""
    goes_on, checks = threading.Event(), []

    def hang(_: Catalogue) -> None:
        checks.append(1)
        goes_on.wait(60)

    monkeypatch.setattr(Catalogue, "check", hang)

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
            goes_on.set()
    assert (put.status_code, len(checks)) == (201, 1)
    assert {(probe.status_code, probe.json()["type"]) for probe in probes} == {(503, "urn:nearkin:problem:not-ready")}
