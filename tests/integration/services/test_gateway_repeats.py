"""Test uploads repeated after the embedded gateway was killed or restarted: stored once."""

from __future__ import annotations

import base64
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import nearkin
from nearkin.store import Item
from nearkin_shared.storage.committed_origins import BlobOrigin
from tests.support.servers.gateways import process

TUS = {"Tus-Resumable": "1.0.0"}
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream"}
DESCRIBED = {"Upload-Metadata": f"key {base64.b64encode(b'blob').decode()}"}
AFTER_COMMIT = ["commit.manifest", "upload.durable"]


@contextmanager
def serve(folder: Path, failpoint: str = "") -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    environment = {
        "NEARKIN_STORE": str(folder / "store"),
        "NEARKIN_GATEWAY__INGEST": "embedded",
        "NEARKIN_FAILPOINT": failpoint,
    }
    with process(environment, folder) as (child, url), httpx.Client(base_url=url, timeout=30) as client:
        yield child, client


def version_count(client: httpx.Client) -> int:
    return len(client.get("/v1/blobs/blob/versions").json()["versions"])


def send_until_killed(folder: Path, failpoint: str, headers: dict[str, str]) -> str:
    """Send an upload of 5 bytes to a gateway killed at a failpoint; return the upload's URL."""
    with serve(folder, f"{failpoint}:1:kill") as (child, client):
        created = client.post("/v1/uploads", headers={**TUS, **DESCRIBED, "Upload-Length": "5", **headers})
        assert created.status_code == 201, created.text
        url = str(created.headers["location"])
        with suppress(httpx.HTTPError):
            client.patch(url, headers={**OCTETS, "Upload-Offset": "0"}, content=b"hello")
        assert child.wait(30) == -signal.SIGKILL
    return url


@pytest.mark.parametrize("failpoint", AFTER_COMMIT)
def test_tus_upload_killed_after_commit_is_one_version(tmp_path: Path, failpoint: str) -> None:
    """A gateway killed between the commit of a resumable upload and its note stores it once."""
    url = send_until_killed(tmp_path, failpoint, {})
    with serve(tmp_path) as (_, client):
        assert client.head(url, headers=TUS).headers["upload-offset"] == "5"
        assert client.get(url).json()["state"] == "handed-over"
        assert (version_count(client), client.get("/v1/blobs/blob").content) == (1, b"hello")


def test_conditional_tus_upload_killed_is_not_refused(tmp_path: Path) -> None:
    """Return the upload's own version after a kill, although its condition would refuse it."""
    url = send_until_killed(tmp_path, "upload.durable", {"If-None-Match": "*"})
    with serve(tmp_path) as (_, client):
        response = client.head(url, headers=TUS)
        assert (response.status_code, response.headers["upload-offset"]) == (200, "5")
        shown = client.get(url).json()
        assert (shown["state"], shown.get("failure"), version_count(client)) == ("handed-over", None, 1)


def test_final_upload_killed_after_commit_is_one_version(tmp_path: Path) -> None:
    """A final upload whose POST is repeated after a kill stores its parts once."""
    with serve(tmp_path, "upload.durable:1:kill") as (child, client):
        urls = []
        for data in (b"he", b"llo"):
            headers = {**OCTETS, "Upload-Concat": "partial", "Upload-Length": str(len(data))}
            urls.append(str(client.post("/v1/uploads", headers=headers, content=data).headers["location"]))
        final = {**TUS, **DESCRIBED, "Upload-Concat": "final;" + " ".join(urls)}
        with suppress(httpx.HTTPError):
            client.post("/v1/uploads", headers=final)
        assert child.wait(30) == -signal.SIGKILL
    with serve(tmp_path) as (_, client):
        assert client.post("/v1/uploads", headers=final).status_code == 201
        assert (version_count(client), client.get("/v1/blobs/blob").content) == (1, b"hello")


@pytest.mark.parametrize("failpoint", ["", *AFTER_COMMIT])
def test_idempotency_key_outlives_a_restart(tmp_path: Path, failpoint: str) -> None:
    """Return the first PUT's version for its Idempotency-Key after a kill or a stop."""
    headers = {"Idempotency-Key": "one", "If-None-Match": "*"}
    with serve(tmp_path, f"{failpoint}:1:kill" if failpoint else "") as (child, client):
        with suppress(httpx.HTTPError):
            client.put("/v1/blobs/blob", headers=headers, content=b"hello")
        if failpoint:
            assert child.wait(30) == -signal.SIGKILL
    with serve(tmp_path) as (_, client):
        repeated = client.put("/v1/blobs/blob", headers=headers, content=b"hello")
        assert (repeated.status_code, repeated.headers.get("idempotent-replayed")) == (201, "true")
        assert client.put("/v1/blobs/blob", headers=headers, content=b"other").status_code == 422
        assert version_count(client) == 1
        other = client.put("/v1/blobs/blob", headers={"Idempotency-Key": "two"}, content=b"hello")
        assert (other.status_code, version_count(client)) == (201, 2)


def test_put_of_a_committed_origin_makes_no_version(tmp_path: Path) -> None:
    """A commit searches for its origin itself: two attempts may wait for the writer at once."""
    origin = BlobOrigin(b"o" * 16, time.time_ns() // 1000)
    with nearkin.create_store(tmp_path / "store") as store:
        first, second = store.put_many([Item("key", data, origin=origin) for data in (b"one", b"two")])
        assert first.info == second.info == store.info("key")
        assert [store.put("key", b"three").info.version, store.get("key", 1).read()] == [2, b"one"]
    with nearkin.open_store(tmp_path / "store") as store:
        (third,) = store.put_many([Item("key", b"one", origin=origin)])
        assert (third.info.version, len(store.versions(all_versions=True))) == (1, 2)
        assert store.verify().damage == ()
