"""Test quotas of tenants over HTTP: an embedded gateway, a real store."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY

from nearkin.client import connect
from nearkin.embedded.gateway_backend import EmbeddedUpload, StoreListing
from nearkin_gateway import gateway_limits
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.tenant_quota import TenantQuota
from nearkin_gateway.uploads import resumable_store, tenant_usage
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


@pytest.mark.parametrize("zeros", [1, 20, 40])
def test_length_with_leading_zeros_counts_in_full(
    gateway: RunningGateway, token: str, set_quota: SetQuota, zeros: int
) -> None:
    """Refuse a body beyond the quota however many zeros precede its declared length; take one that fits."""
    set_quota(logical_bytes=1000)

    def put(size_bytes: int) -> bytes:
        head = (
            f"PUT /v1/blobs/k HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Length: {'0' * zeros}{size_bytes}\r\nConnection: close\r\n\r\n"
        )
        return gateway.raw(head.encode() + bytes(size_bytes)).split(b"\r\n", 1)[0]

    assert put(2000).startswith(b"HTTP/1.1 507 ")
    assert put(1000).startswith(b"HTTP/1.1 201 ")
    assert put(0).startswith(b"HTTP/1.1 507 ")


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
    set_quota(logical_bytes=2 * MIB)
    made = create(MIB)
    assert made.status_code == 201
    assert client.put("/v1/blobs/meanwhile", content=content(MIB // 2, 1)).status_code == 201
    set_quota(logical_bytes=MIB)
    media = {"Content-Type": "application/offset+octet-stream", "Upload-Offset": "0"}
    last = client.patch(made.headers["location"], content=content(MIB, 2), headers={**tus, **media})
    assert (last.status_code, last.json()["quota"]) == (507, "logical_bytes")
    again = client.head(made.headers["location"], headers=tus)  # 200 at the last byte means done: its bytes are deleted
    assert (again.status_code, "upload-offset" in again.headers) == (507, False)
    shown = client.get(made.headers["location"]).json()
    assert (shown["state"], shown["reason"], shown["offset_bytes"]) == ("staged", "quota-exceeded", MIB)
    assert "limit 1048576" in shown["failure"]
    set_quota(logical_bytes=2 * MIB)
    assert client.get(made.headers["location"]).json()["reason"] is None
    assert client.head(made.headers["location"], headers=tus).headers["upload-offset"] == str(MIB)
    until(lambda: client.get("/v1/blobs/k").status_code == 200)
    assert client.get("/v1/blobs/k").content == content(MIB, 2)


TUS = {"Tus-Resumable": "1.0.0"}
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream", "Upload-Offset": "0"}
NAMED = {"Upload-Metadata": f"key {base64.b64encode(b'k').decode()}"}


def test_open_resumable_uploads_count_against_the_quota(client: httpx.Client, set_quota: SetQuota) -> None:
    """Count declared lengths from the creation on, and once: the upload itself is committed where it fits exactly."""

    def create() -> httpx.Response:
        return client.post("/v1/uploads", headers={**TUS, **NAMED, "Upload-Length": str(MIB)})

    set_quota(logical_bytes=3 * MIB)
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda _: create(), range(6)))
    assert sorted(answer.status_code for answer in made) == [201] * 3 + [507] * 3
    urls = [answer.headers["location"] for answer in made if answer.status_code == 201]
    assert used(client)["logical_bytes"]["value"] == 3 * MIB
    assert client.put("/v1/blobs/other", content=b"1").status_code == 507
    assert client.patch(urls[0], content=content(MIB, 1), headers=OCTETS).status_code == 204
    assert client.get("/v1/blobs/k").content == content(MIB, 1)
    assert used(client)["logical_bytes"]["value"] == 3 * MIB
    assert client.delete(urls[1], headers=TUS).status_code == 204
    assert client.put("/v1/blobs/other", content=content(MIB, 2)).status_code == 201
    assert client.put("/v1/blobs/more", content=b"1").status_code == 507


def test_final_upload_beyond_the_quota_is_507_at_once(client: httpx.Client, set_quota: SetQuota) -> None:
    """Check a concatenation before it claims its parts; one that replaces what they count for fits exactly."""
    partial = {**OCTETS, "Upload-Concat": "partial", "Upload-Length": str(MIB)}
    set_quota(logical_bytes=2 * MIB)
    parts = [client.post("/v1/uploads", content=content(MIB, seed), headers=partial) for seed in (1, 2)]
    assert [part.status_code for part in parts] == [201, 201]
    first, second = (part.headers["location"] for part in parts)
    set_quota(logical_bytes=2 * MIB - 1)
    refused = client.post("/v1/uploads", headers={**TUS, **NAMED, "Upload-Concat": f"final;{first} {second}"})
    assert refused.status_code == 507
    set_quota(logical_bytes=2 * MIB)
    other = {**TUS, **NAMED, "Upload-Concat": f"final;{second} {first}"}  # 409 if the first one had claimed them
    assert client.post("/v1/uploads", headers=other).status_code == 201
    assert client.get("/v1/blobs/k").content == content(MIB, 2) + content(MIB, 1)


def test_upload_refused_by_a_quota_is_not_swept_soon(
    gateway: RunningGateway, client: httpx.Client, set_quota: SetQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hand a whole upload over again a quarter of an hour after its 507, not with each sweep."""
    monkeypatch.setattr(resumable_store, "UNSEEN_SECONDS", 0.0)
    made = client.post("/v1/uploads", headers={**TUS, **NAMED, "Upload-Length": str(MIB)})
    set_quota(logical_bytes=10)
    assert client.patch(made.headers["location"], content=content(MIB, 1), headers=OCTETS).status_code == 507
    handed: list[str] = []
    gateway.gateway.resumable.sweep(lambda staged: handed.append(staged.id))
    assert handed == []
    monkeypatch.setattr(resumable_store, "QUOTA_RETRY_SECONDS", 0.0)
    gateway.gateway.resumable.sweep(lambda staged: handed.append(staged.id))
    assert handed == [made.headers["location"].rpartition("/")[2]]


def test_uploads_during_a_rebuild_count_earlier_sums(
    client: httpx.Client, set_quota: SetQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer 503 while what the tenant stored is not known, instead of taking a partial sum for all of it."""
    assert client.put("/v1/blobs/a", content=content(MIB, 1)).status_code == 201
    set_quota(logical_bytes=2 * MIB)
    monkeypatch.setattr(StoreListing, "is_complete", False)
    refused = client.put("/v1/blobs/b", content=b"1")
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert "rebuilt" in refused.json()["detail"]
    assert used(client) == {"logical_bytes": {"value": None, "limit": 2 * MIB}}
    monkeypatch.setattr(StoreListing, "is_complete", True)
    assert client.put("/v1/blobs/b", content=b"1").status_code == 201
    monkeypatch.setattr(StoreListing, "is_complete", False)
    assert client.put("/v1/blobs/c", content=content(MIB, 2)).status_code == 507
    assert client.put("/v1/blobs/c", content=content(MIB - 1, 2)).status_code == 201


def test_reservation_ends_with_an_unexpected_error(
    gateway: RunningGateway, client: httpx.Client, set_quota: SetQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release the bytes of an upload whose end is not known, once no outcome can come any more."""

    async def fail(upload: EmbeddedUpload, _: object) -> None:
        await upload.abort("its spooled body is closed")
        raise OSError(errno.EIO, "the spooled body cannot be read")

    set_quota(logical_bytes=MIB)
    monkeypatch.setattr(gateway_limits, "UPLOAD_STATUS_SECONDS", 0.1)
    with monkeypatch.context() as failing:
        failing.setattr(EmbeddedUpload, "finish", fail)
        assert client.put("/v1/blobs/a", content=content(MIB, 1)).status_code == 500
    until(lambda: not gateway.gateway.admission.in_flight.of(TENANT).blobs)
    assert client.put("/v1/blobs/a", content=content(MIB, 1)).status_code == 201


def test_parallel_bodies_far_beyond_the_rate_are_cut(
    gateway: RunningGateway, client: httpx.Client, set_quota: SetQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End a body with 429 at a debt of a minute; a resumable one keeps what arrived."""
    monkeypatch.setattr("nearkin_gateway.uploads.upload_admission.READ_DELAY_SECONDS_MAX", 0.0)
    made = client.post("/v1/uploads", headers={**TUS, **NAMED, "Upload-Length": str(8 * MIB)})
    set_quota(upload_bytes_per_second=64 * 1024)

    def body() -> Iterator[bytes]:
        for start in range(0, 8 * MIB, MIB // 8):
            yield content(8 * MIB, 1)[start : start + MIB // 8]

    began = time.monotonic()
    cut = client.patch(made.headers["location"], content=body(), headers=OCTETS)
    took_seconds = time.monotonic() - began
    assert (cut.status_code, cut.json()["quota"]) == (429, "upload_bytes_per_second")
    assert 50 <= int(cut.headers["retry-after"]) <= 60
    set_quota()
    offset = int(client.head(made.headers["location"], headers=TUS).headers["upload-offset"])
    assert 3 * MIB < offset < 64 * 1024 * (60 + took_seconds) + MIB // 2  # the last read is at most 256 KiB
    rest = {**OCTETS, "Upload-Offset": str(offset)}
    assert client.patch(made.headers["location"], content=content(8 * MIB, 1)[offset:], headers=rest).status_code == 204
    assert client.get("/v1/blobs/k").content == content(8 * MIB, 1)


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
