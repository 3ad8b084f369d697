"""Test concatenation of partial uploads (tus), and the headers of resumable uploads."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearkin_gateway.uploads import resumable_store as stored
from nearkin_gateway.uploads.resumable_store import Meta, Resumable, StagedUpload
from nearkin_shared.errors import NotFound
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.servers.gateways import RunningGateway, embedded, running

TUS = {"Tus-Resumable": "1.0.0"}
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream"}
PARTIAL = {"Upload-Concat": "partial"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    changes = {"gateway": {"body_bytes_max": "4MiB"}}
    with running(embedded(tmp_path_factory.mktemp("store"), changes), PARTIAL_UPLOADS_MAX=3) as found:
        yield found


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found


def described(key: str, **more: str) -> str:
    return ",".join(f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in {"key": key, **more}.items())


def partial(client: httpx.Client, data: bytes, length: int | None = None) -> str:
    """Upload `data` as a partial upload without metadata, as tus-js-client does.

    Return its URL.
    """
    headers = {**OCTETS, **PARTIAL, "Upload-Length": str(len(data) if length is None else length)}
    answer = client.post("/v1/uploads", headers=headers, content=data)
    assert answer.status_code == 201, answer.text
    return str(answer.headers["location"])


def final(client: httpx.Client, key: str, urls: list[str]) -> httpx.Response:
    headers = {**TUS, "Upload-Metadata": described(key, host="db1"), "Upload-Concat": "final;" + " ".join(urls)}
    return client.post("/v1/uploads", headers=headers)


def ids_of(gateway: RunningGateway) -> list[str]:
    folder = gateway.store / "uploads"
    return sorted(path.parent.name for path in folder.glob("*/meta")) if folder.is_dir() else []


def test_partial_upload_alone_stores_no_blob(client: httpx.Client) -> None:
    """Make no version of a complete partial upload with a key; its HEAD reports `partial`."""
    headers = {**OCTETS, **PARTIAL, "Upload-Length": "5", "Upload-Metadata": described("alone")}
    url = str(client.post("/v1/uploads", headers=headers, content=b"third").headers["location"])
    response = client.head(url, headers=TUS).headers
    assert (response["upload-offset"], response["upload-concat"], response["upload-metadata"]) == (
        "5",
        "partial",
        described("alone"),
    )
    assert client.get(url).json()["state"] == "staged"
    assert client.get("/v1/blobs/alone").status_code == 404


def test_final_upload_stores_the_parts_in_order(gateway: RunningGateway, client: httpx.Client) -> None:
    """Join three partial uploads into one blob with the final one's metadata.

    Free their bytes.
    """
    data = [os.urandom(700_001), b"", os.urandom(300_000)]
    urls = [partial(client, part) for part in data]
    answer = final(client, "joined", [f"{gateway.url}{url}" for url in urls])
    assert (answer.status_code, answer.headers["upload-offset"]) == (201, "1000001")
    blob = client.get("/v1/blobs/joined")
    assert (blob.content, blob.headers["x-nearkin-meta-host"]) == (b"".join(data), "db1")
    response = client.head(answer.headers["location"], headers=TUS)
    assert (response.headers["upload-length"], response.headers["upload-concat"]) == (
        "1000001",
        "final;" + " ".join(urls),
    )
    assert [client.head(url, headers=TUS).status_code for url in urls] == [404] * 3


def test_final_upload_repeated_is_one_version(client: httpx.Client) -> None:
    """A client that lost the answer asks again, and gets the same upload."""
    urls = [partial(client, b"a"), partial(client, b"b")]
    first, second = final(client, "repeated", urls), final(client, "repeated", urls)
    assert (second.status_code, second.headers["location"]) == (201, first.headers["location"])
    assert len(client.get("/v1/blobs/repeated/versions").json()["versions"]) == 1


@pytest.mark.parametrize("name", ["unfinished", "plain", "unknown", "twice", "many", "large", "length"])
def test_final_upload_of_wrong_parts_is_refused(client: httpx.Client, name: str) -> None:
    """Refuse parts that cannot be concatenated, each with its own status; make no version."""
    whole = partial(client, b"whole")
    ordinary = client.post("/v1/uploads", headers={**TUS, "Upload-Length": "9", "Upload-Metadata": described("p")})
    urls, status = {
        "unfinished": ([whole, partial(client, b"1", 2)], 409),
        "plain": ([str(ordinary.headers["location"])], 400),
        "unknown": (["/v1/uploads/" + "0" * 32], 404),
        "twice": ([whole, whole], 400),
        "many": ([partial(client, b"x") for _ in range(4)], 400),
        "large": ([partial(client, bytes(1_500_000)) for _ in range(3)], 413),
        "length": ([whole], 400),
    }[name]
    headers = {**TUS, "Upload-Metadata": described("wrong"), "Upload-Concat": "final;" + " ".join(urls)}
    answer = client.post("/v1/uploads", headers={**headers, **({"Upload-Length": "5"} if name == "length" else {})})
    assert answer.status_code == status, answer.text
    assert client.get("/v1/blobs/wrong").status_code == 404


def test_claimed_part_is_in_one_final_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse one of two final uploads with a common part.

    Delete the part with the other alone.
    """
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        urls = [partial(client, b"a"), partial(client, b"b"), partial(client, b"c")]
        monkeypatch.setattr("nearkin_gateway.uploads.concatenation.hand_over", _never)
        first = final(client, "first", urls[:2])
        assert (first.status_code, "upload-offset" in first.headers) == (201, True)
        second = final(client, "second", urls[1:])
        assert (second.status_code, second.json()["type"]) == (409, "urn:nearkin:problem:claimed")
        assert client.delete(urls[0], headers=TUS).status_code == 409
        assert client.patch(first.headers["location"], headers={**OCTETS, "Upload-Offset": "2"}).status_code == 403
        assert client.head(first.headers["location"], headers=TUS).status_code == 200  # hands it over
        assert client.get("/v1/blobs/first").content == b"ab"
        assert client.delete(urls[2], headers=TUS).status_code == 204


async def _never(*_: object) -> None:
    """Leave a final upload as a gateway does that dies before the hand-over."""


def test_create_final_that_lost_the_race_takes_it_back(tmp_path: Path) -> None:
    """A final upload that cannot claim all its parts leaves neither itself nor claims behind."""
    uploads = Resumable(LocalObjectStore(tmp_path), 10)
    parts = [uploads.create(meta(partial=True, length=0)) for _ in range(3)]
    uploads.create_final("1" * 32, meta(sources=(parts[2],)))
    with pytest.raises(AlreadyExists):
        uploads.create_final("2" * 32, meta(sources=tuple(parts)))
    assert [uploads.load("default", part).claim for part in parts] == [None, None, "1" * 32]
    with pytest.raises(NotFound):
        uploads.load("default", "2" * 32)


def test_sweep_removes_parts_of_final_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep partial uploads as long as the final upload that claims them.

    Else they expire alone.
    """
    monkeypatch.setattr(stored, "UNSEEN_SECONDS", 0.0)
    uploads = Resumable(LocalObjectStore(tmp_path), 10)
    alone, claimed = (uploads.create(meta(partial=True, length=0, lives_us=-1)) for _ in range(2))
    waiting = uploads.create_final("3" * 32, meta(sources=(claimed,), length=0, lives_us=-1))
    handed: list[StagedUpload] = []
    uploads.sweep(handed.append)
    assert [staged.id for staged in handed] == [waiting.id]
    left = sorted(path.parent.name for path in (tmp_path / "uploads").glob("*/meta"))
    assert (left, alone in left) == (sorted([waiting.id, claimed]), False)
    uploads.remove(waiting.id)
    assert not list((tmp_path / "uploads").glob("*/meta"))


def meta(
    *, partial: bool = False, sources: tuple[str, ...] = (), length: int = 0, lives_us: int = 3_600_000_000
) -> Meta:
    now_us = time.time_ns() // 1000
    return Meta("default", "k", length, now_us, now_us + lives_us, partial=partial, sources=sources)


@pytest.mark.parametrize(
    "headers",
    [
        {"Upload-Concat": "whole"},
        {"Upload-Concat": "final;"},
        {"Upload-Concat": "final;https://evil.example/x"},
        {"Upload-Concat": ""},
        {"Upload-Defer-Length": "1"},
        {"Trailer": "Upload-Checksum"},
    ],
)
def test_extension_not_offered_is_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    """A header of an extension that OPTIONS does not name never makes an ordinary upload."""
    answer = client.post(
        "/v1/uploads", headers={**TUS, "Upload-Length": "5", "Upload-Metadata": described("k"), **headers}
    )
    assert answer.status_code == 400, answer.text


# --- pages of other origins ------------------------------------------------------------------------------------------


def test_cross_origin_page_uploads_where_configured(tmp_path: Path) -> None:
    """Allow a page of a configured origin the preflight, the upload, and all headers of tus."""
    page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    with running(embedded(tmp_path, {"gateway": {"cors_origins": ["https://app.example"]}})) as gateway:
        preflight = {"Access-Control-Request-Method": "PATCH", "Access-Control-Request-Headers": "upload-offset"}
        asked = httpx.options(f"{gateway.url}/v1/uploads/{'0' * 32}", headers={**page, **preflight})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, page["Origin"])
        assert "upload-offset" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        described_k = {"Upload-Length": "2", "Upload-Metadata": described("page")}
        made = httpx.post(f"{gateway.url}/v1/uploads", headers={**OCTETS, **described_k, **page}, content=b"hi")
        assert made.status_code == 201
        exposed = {name.strip().lower() for name in made.headers["access-control-expose-headers"].split(",")}
        assert {name for name in made.headers if name.startswith(("tus-", "upload-"))} | {"location"} <= exposed
        refused = httpx.get(f"{gateway.url}/v1/blobs/none", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (404, page["Origin"])
        other = {**page, "Origin": "https://evil.example"}
        assert "access-control-allow-origin" not in httpx.get(f"{gateway.url}/livez", headers=other).headers
        assert httpx.post(f"{gateway.url}/v1/uploads", headers={**OCTETS, **other}).status_code == 403


def test_cross_origin_is_off_by_default(gateway: RunningGateway) -> None:
    """Without `gateway.cors_origins` no answer lets a page of another origin read it."""
    answer = httpx.get(f"{gateway.url}/livez", headers={"Origin": "https://app.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
