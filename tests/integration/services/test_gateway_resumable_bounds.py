"""Test the bounds of resumable uploads.

How many are open, and the last response's content.
"""

from __future__ import annotations

import base64
import hashlib
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.state import HAND_OVERS_MAX
from nearkin_gateway.uploads import upload_bodies
from nearkin_gateway.uploads.resumable_store import Meta, Resumable, StagedUpload
from nearkin_shared.objectstore.base import Payload
from nearkin_shared.objectstore.local import LocalObjectStore
from tests.support.checks.waiting import until
from tests.support.servers.gateways import embedded, running

TUS = {"Tus-Resumable": "1.0.0"}
WHOLE = {"gateway": {"address_share": 1}}
"""With TENANT_SHARE=1 one caller may have all there is."""
OCTETS = {**TUS, "Content-Type": "application/offset+octet-stream", "Upload-Offset": "0"}


def meta(key: str, length: int) -> Meta:
    now_us = time.time_ns() // 1000
    return Meta("default", key, length, now_us, now_us + 3_600_000_000)


def begin_upload(client: httpx.Client, key: str, length: int) -> httpx.Response:
    described = f"key {base64.b64encode(key.encode()).decode()}"
    return client.post("/v1/uploads", headers={**TUS, "Upload-Length": str(length), "Upload-Metadata": described})


def test_dropping_finished_keeps_the_limit(tmp_path: Path) -> None:
    """Make no room beyond the limit of open uploads by dropping finished ones."""
    with (
        running(embedded(tmp_path, WHOLE), RESUMABLE_MAX=3, TENANT_SHARE=1) as gateway,
        gateway.client() as client,
    ):
        for key in ("a", "b"):
            assert begin_upload(client, key, 5).status_code == 201
        for _ in range(3):
            done = begin_upload(client, "empty", 0)
            assert client.get(done.headers["location"]).json()["state"] == "handed-over"
            assert client.delete(done.headers["location"], headers=TUS).status_code == 204
        assert [begin_upload(client, key, 5).status_code for key in ("c", "d")] == [201, 503]


def test_upload_begun_during_the_count_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumable = Resumable(LocalObjectStore(tmp_path), 2)
    resumable.create(meta("first", 5))
    plain = resumable._load

    def slow(number: str) -> StagedUpload:
        resumable.create(meta("meanwhile", 5))
        return plain(number)

    monkeypatch.setattr(resumable, "_load", slow)
    resumable.sweep(lambda _: None)
    with pytest.raises(Problem):
        resumable.check_room(Holders("default", "", ""))


def test_creation_refused_for_its_body_is_free(tmp_path: Path) -> None:
    """Keep no slot and no bytes of a creation refused for its body."""
    with running(embedded(tmp_path, WHOLE), RESUMABLE_MAX=1, TENANT_SHARE=1) as gateway:
        described = f"key {base64.b64encode(b'k').decode()}"
        headers = {**OCTETS, "Upload-Length": "3", "Upload-Metadata": described}
        wrong = {**headers, "Upload-Checksum": f"sha256 {base64.b64encode(bytes(32)).decode()}"}
        for given, body, status in ((headers, b"abcd", 413), (wrong, b"abc", 460), (headers, b"abcd", 413)):
            answer = httpx.post(f"{gateway.url}/v1/uploads", headers=given, content=body)
            assert (answer.status_code, "location" in answer.headers) == (status, False)
        assert not [path for path in (tmp_path / "uploads").rglob("*") if path.is_file()]
        assert httpx.post(f"{gateway.url}/v1/uploads", headers=headers, content=b"abc").status_code == 201


def test_part_without_space_is_503_and_resent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return 503 if a part with checksum does not fit; it can be sent again."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = str(begin_upload(client, "full", 2_000_000).headers["location"])
        body = bytes(2_000_000)
        checked = {**OCTETS, "Upload-Checksum": f"sha256 {base64.b64encode(hashlib.sha256(body).digest()).decode()}"}
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        monkeypatch.setattr(upload_bodies, "SPOOL_MEMORY_BYTES", 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # files end there, as on a full disk
        try:
            answer = httpx.patch(f"{gateway.url}{url}", content=body, headers=checked)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:nearkin:problem:unavailable")
        assert client.patch(url, content=body, headers=checked).status_code == 204


def test_last_part_of_an_expired_upload_is_404(tmp_path: Path) -> None:
    """Refuse the last part of an upload that expired meanwhile."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        url = str(begin_upload(client, "late", 5).headers["location"])
        parts = gateway.store / url.removeprefix("/v1/") / "parts"

        def body() -> Iterator[bytes]:
            yield b"ab"
            until(lambda: gateway.gateway.resuming)
            gateway.gateway.resumable.remove(url.rpartition("/")[2])  # as a sweep does
            yield b"cde"

        answer = client.patch(url, content=body(), headers=OCTETS)
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:nearkin:problem:not-found")
        assert client.get("/v1/blobs/late").status_code == 404
        assert parts.is_dir()  # orphans, until the sweep after next


def test_repeated_head_begins_one_hand_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin one hand-over for repeated requests for a complete upload."""
    with running(embedded(tmp_path)) as gateway, gateway.client() as client:
        left = Resumable(LocalObjectStore(tmp_path), 10)
        numbers = [left.create(meta(f"left {number}", 3)) for number in range(HAND_OVERS_MAX + 1)]
        for number in numbers:
            left.stage(number, 0, b"abc", tenant="default")
        plain, released = Resumable.read, threading.Event()

        def stuck(resumable: Resumable, staged: StagedUpload) -> Iterator[Payload]:
            released.wait(300)
            yield from plain(resumable, staged)

        monkeypatch.setattr(Resumable, "read", stuck)
        try:
            for number in [*numbers, *numbers * 3]:
                with pytest.raises(httpx.ReadTimeout):  # an answer waits for the hand-over
                    client.head(f"/v1/uploads/{number}", headers=TUS, timeout=0.1)
            until(lambda: sorted(gateway.gateway.background) == sorted(numbers), lambda: gateway.gateway.background)
        finally:
            released.set()
        for number in numbers:
            assert client.head(f"/v1/uploads/{number}", headers=TUS).status_code == 200
            assert client.get(f"/v1/uploads/{number}").json()["state"] == "handed-over"
