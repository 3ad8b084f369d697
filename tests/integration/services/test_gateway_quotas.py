"""Test quotas of tenants over HTTP: an embedded gateway, a real store."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY

from nearkin.client import connect
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.uploads import tenant_usage
from nearkin_shared.errors import QuotaExceeded
from nearkin_shared.limits import MIB
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

TENANT = "default"
SetQuota = Callable[..., None]


def content(size_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """Run a gateway that reads its tokens file each time, and the sums before each refusal."""
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(tenant_usage, "REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(tenant_usage, "COST_SHARE", 0)
    tokens.create(tmp_path / "tokens.json", TENANT, ["read"])
    with running(embedded(tmp_path / "store", {"auth": {"tokens_file": str(tmp_path / "tokens.json")}})) as found:
        yield found


@pytest.fixture
def token(gateway: RunningGateway, tmp_path: Path) -> str:
    return tokens.create(tmp_path / "tokens.json", TENANT, ["read", "write", "delete"])[0]


@pytest.fixture
def client(gateway: RunningGateway, token: str) -> Iterator[httpx.Client]:
    with gateway.client(token) as found:
        yield found


@pytest.fixture
def set_quota(tmp_path: Path) -> SetQuota:
    def change(**limits: int) -> None:
        tokens.set_quota(tmp_path / "tokens.json", TENANT, TenantQuota(**limits))

    return change


def used(client: httpx.Client) -> dict[str, dict[str, int]]:
    quotas: dict[str, dict[str, int]] = client.get("/v1/stats").json()["quotas"]
    return quotas


def test_put_beyond_logical_quota_is_507(client: httpx.Client, set_quota: SetQuota) -> None:
    """Name quota, value, limit and remedy; store an upload that fits."""
    set_quota(logical_bytes=3 * MIB)
    assert client.put("/v1/blobs/a", content=content(2 * MIB, 1)).status_code == 201
    refused = client.put("/v1/blobs/b", content=content(2 * MIB, 2))
    assert refused.status_code == 507
    problem = refused.json()
    assert problem["type"] == "urn:nearkin:problem:quota-exceeded"
    assert (problem["quota"], problem["value"], problem["limit"]) == ("logical_bytes", 4 * MIB, 3 * MIB)
    assert "delete versions" in problem["remedy"]
    assert client.put("/v1/blobs/c", content=content(MIB, 3)).status_code == 201
    assert client.put("/v1/blobs/d", content=b"1").status_code == 507
    assert used(client) == {"logical_bytes": {"value": 3 * MIB, "limit": 3 * MIB}}
    until(lambda: client.get("/v1/stats").json()["logical_bytes"] == 3 * MIB)
    labels = {"tenant": TENANT, "quota": "logical_bytes"}
    assert REGISTRY.get_sample_value("nearkin_tenant_used_bytes", labels) == 3 * MIB
    assert REGISTRY.get_sample_value("nearkin_tenant_quota_bytes", labels) == 3 * MIB
    assert (REGISTRY.get_sample_value("nearkin_quota_refused_total", labels) or 0) >= 2


def test_deletion_makes_room_at_once(client: httpx.Client, set_quota: SetQuota) -> None:
    """Read the sums again before an upload is refused; a raised limit counts at once too."""
    set_quota(logical_bytes=MIB)
    assert client.put("/v1/blobs/a", content=content(MIB, 1)).status_code == 201
    assert client.put("/v1/blobs/b", content=content(MIB, 2)).status_code == 507
    assert client.delete("/v1/blobs/a").status_code == 204
    assert client.put("/v1/blobs/b", content=content(MIB, 2)).status_code == 201
    set_quota(logical_bytes=2 * MIB)
    assert client.put("/v1/blobs/c", content=content(MIB, 3)).status_code == 201
    set_quota()
    assert client.put("/v1/blobs/d", content=content(MIB, 4)).status_code == 201
    assert used(client) == {}
    labels = {"tenant": TENANT, "quota": "logical_bytes"}
    assert REGISTRY.get_sample_value("nearkin_tenant_used_bytes", labels) is None


@pytest.mark.parametrize("declared", [True, False])
def test_concurrent_puts_never_exceed_the_quota(
    gateway: RunningGateway, client: httpx.Client, token: str, set_quota: SetQuota, declared: bool
) -> None:
    """Reserve room at admission: of twelve uploads at once as many succeed as fit."""
    set_quota(logical_bytes=4 * MIB + 100)

    async def body(seed: int) -> Any:
        data = content(MIB, seed)
        for start in range(0, MIB, MIB // 8):
            yield data[start : start + MIB // 8]
            await asyncio.sleep(0.02)

    async def put_all() -> list[int]:
        headers = {"Authorization": f"Bearer {token}"} | ({"Content-Length": str(MIB)} if declared else {})
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, headers=headers) as many:
            puts = [many.put(f"/v1/blobs/k{seed}", content=body(seed)) for seed in range(12)]
            return [answer.status_code for answer in await asyncio.gather(*puts)]

    statuses = asyncio.run(put_all())
    assert set(statuses) <= {201, 507}
    assert statuses.count(201) <= 4
    until(lambda: client.get("/v1/stats").json()["logical_bytes"] == statuses.count(201) * MIB)
    if declared:
        assert statuses.count(201) == 4
    assert gateway.gateway.admission.in_flight.of(TENANT).blobs == 0
    for seed in range(20, 24 - statuses.count(201)):  # what was refused or cut holds no room
        assert client.put(f"/v1/blobs/k{seed}", content=content(MIB, seed)).status_code == 201
    assert client.put("/v1/blobs/last", content=content(MIB, 30)).status_code == 507


def test_put_beyond_stored_quota_is_507(client: httpx.Client, set_quota: SetQuota) -> None:
    """Count what the tenant takes in the object store: duplicates of a stored blob cost little."""
    data = content(2 * MIB, 1)
    set_quota(stored_bytes=3 * MIB)
    assert client.put("/v1/blobs/a", content=data).status_code == 201
    refused = client.put("/v1/blobs/b", content=content(2 * MIB, 2))
    assert (refused.status_code, refused.json()["quota"]) == (507, "stored_bytes")
    set_quota(stored_bytes=5 * MIB)
    for number in range(8):
        assert client.put(f"/v1/blobs/copy{number}", content=data).status_code == 201
    assert 2 * MIB < used(client)["stored_bytes"]["value"] < 3 * MIB


def test_refusal_by_quota_precedes_the_body(gateway: RunningGateway, token: str, set_quota: SetQuota) -> None:
    """Answer `Expect: 100-continue` with 507 in place of 100, so that no body travels."""
    set_quota(logical_bytes=1000)
    head = (
        f"PUT /v1/blobs/k HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        "Content-Length: 2000\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 507 ")


def test_uploads_beyond_the_rate_are_slowed_then_429(client: httpx.Client, set_quota: SetQuota) -> None:
    """Read at the tenant's rate; refuse while earlier uploads have taken ten seconds more."""
    set_quota(upload_bytes_per_second=MIB)
    began = time.monotonic()
    assert client.put("/v1/blobs/a", content=content(2 * MIB, 1)).status_code == 201
    assert 1.5 <= time.monotonic() - began <= 20
    assert 0 < used(client)["upload_bytes_per_second"]["value"] <= MIB
    set_quota(upload_bytes_per_second=64 * 1024)
    assert client.put("/v1/blobs/b", content=content(64 * 1024, 2)).status_code == 201
    set_quota(upload_bytes_per_second=64 * 1024)
    admission = client.put("/v1/blobs/c", content=b"fits")
    assert admission.status_code == 201


def test_upload_far_beyond_the_rate_is_429(
    gateway: RunningGateway, client: httpx.Client, set_quota: SetQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State when the tenant is back at its rate in `Retry-After`."""
    monkeypatch.setattr("nearkin_gateway.uploads.upload_admission.READ_DELAY_SECONDS_MAX", 0.0)
    set_quota(upload_bytes_per_second=100_000)
    assert client.put("/v1/blobs/a", content=content(2_000_000, 1)).status_code == 201
    refused = client.put("/v1/blobs/b", content=b"1")
    problem = refused.json()
    assert (refused.status_code, problem["type"]) == (429, "urn:nearkin:problem:upload-rate-exceeded")
    assert (problem["quota"], problem["limit"]) == ("upload_bytes_per_second", 100_000)
    assert problem["value"] > 100_000
    assert 10 <= int(refused.headers["retry-after"]) <= 15
    assert client.get("/v1/blobs/a").status_code == 200


def test_resumable_upload_beyond_a_quota_is_507(client: httpx.Client, set_quota: SetQuota) -> None:
    """Refuse it when it begins; one that no longer fits at its end is kept and committed once it fits."""
    tus = {"Tus-Resumable": "1.0.0"}

    def create(size_bytes: int) -> httpx.Response:
        named = f"key {base64.b64encode(b'k').decode()}"
        return client.post("/v1/uploads", headers={**tus, "Upload-Length": str(size_bytes), "Upload-Metadata": named})

    set_quota(logical_bytes=MIB)
    assert create(2 * MIB).status_code == 507
    made = create(MIB)
    assert made.status_code == 201
    assert client.put("/v1/blobs/meanwhile", content=content(MIB // 2, 1)).status_code == 201
    media = {"Content-Type": "application/offset+octet-stream", "Upload-Offset": "0"}
    last = client.patch(made.headers["location"], content=content(MIB, 2), headers={**tus, **media})
    assert (last.status_code, last.json()["quota"]) == (507, "logical_bytes")
    set_quota(logical_bytes=2 * MIB)
    assert client.head(made.headers["location"], headers=tus).headers["upload-offset"] == str(MIB)
    until(lambda: client.get("/v1/blobs/k").status_code == 200)
    assert client.get("/v1/blobs/k").content == content(MIB, 2)


def test_client_raises_quota_exceeded_without_retries(gateway: RunningGateway, token: str, set_quota: SetQuota) -> None:
    set_quota(logical_bytes=100)
    with connect(gateway.url, token=token) as store, pytest.raises(QuotaExceeded, match="limit 100"):
        store.put("k", bytes(200))


def test_invalid_quotas_keep_those_read_before(
    gateway: RunningGateway, client: httpx.Client, set_quota: SetQuota, tmp_path: Path
) -> None:
    """Refuse a tokens file with an invalid quota; the limits and tokens read before stay."""
    set_quota(logical_bytes=10)
    assert client.put("/v1/blobs/a", content=bytes(11)).status_code == 507
    file = tmp_path / "tokens.json"
    found = json.loads(file.read_text())
    invalid: list[object] = [{TENANT: {"logical_bytes": "many"}}, {TENANT: {"blobs": 1}}, {"": {}}, [], {TENANT: 5}]
    for quotas in invalid:
        file.write_text(json.dumps({**found, "quotas": quotas}))
        assert client.put("/v1/blobs/a", content=bytes(11)).status_code == 507, quotas
