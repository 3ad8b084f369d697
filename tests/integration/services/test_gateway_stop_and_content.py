"""An upload that a stop cuts, digests that are announced, the media type that is kept."""

from __future__ import annotations

import base64
import hashlib
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.support.checks.waiting import until
from tests.support.servers.gateways import drain, process


def test_upload_cut_by_a_stop_is_503_without_traceback(tmp_path: Path) -> None:
    """Return 503 to uploads at the end of `shutdown_seconds`; the log has no traceback."""
    environment = {
        "NEARKIN_STORE": str(tmp_path / "store"),
        "NEARKIN_GATEWAY__INGEST": "embedded",
        "NEARKIN_GATEWAY__SHUTDOWN_SECONDS": "1",
    }
    with process(environment, tmp_path) as (child, url):
        address = httpx.URL(url).host, httpx.URL(url).port or 0
        with socket.create_connection(address, timeout=30) as sending:
            sending.sendall(b"PUT /v1/blobs/cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n")
            sending.sendall(b"Expect: 100-continue\r\n\r\n")
            assert sending.recv(100).startswith(b"HTTP/1.1 100")  # the request is being read
            sending.sendall(b"x" * 1000)
            child.send_signal(signal.SIGTERM)
            answer = drain(sending).decode()
        assert child.wait(60) == 0
    assert answer.startswith("HTTP/1.1 503"), answer
    assert "retry-after: 5" in answer.lower()
    assert "urn:nearkin:problem:stopping" in answer
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


def digest(name: str, data: bytes) -> str:
    return base64.b64encode(hashlib.new(name, data).digest()).decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-MD5": digest("md5", b"other")},
        {"Content-MD5": "AAAA"},
        {"Content-MD5": "not base64"},
        {"Content-Digest": f"sha-512=:{digest('sha512', b'other')}:"},
        {"Content-Digest": "sha-512=:AAAA:"},
        {"Content-Digest": f"md5=:{digest('md5', b'other')}:"},
        {"Content-Digest": f"sha=:{digest('sha1', b'other')}:"},
        {"Content-Digest": "garbage"},
        {"Content-Digest": f"sha-256=:{digest('sha256', b'body')}:, sha-512=:{digest('sha512', b'other')}:"},
        {"Content-MD5": digest("md5", b"body"), "Content-Digest": f"md5=:{digest('md5', b'other')}:"},
    ],
)
def test_wrong_or_malformed_digest_is_400(client: httpx.Client, headers: dict[str, str]) -> None:
    """A digest of any known algorithm that the body has not is refused, and nothing is stored."""
    answer = client.put("/v1/blobs/digest/wrong", content=b"body", headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] in ("urn:nearkin:problem:bad-digest", "urn:nearkin:problem:digest-mismatch")
    assert client.get("/v1/blobs/digest/wrong").status_code == 404


def test_right_digests_are_taken(client: httpx.Client) -> None:
    """Accept right digests; ignore those of unknown algorithms (RFC 9530)."""
    headers = {
        "Content-MD5": digest("md5", b"body"),
        "Content-Digest": f"sha-512=:{digest('sha512', b'body')}:, unixsum=:AAA=:",
    }
    assert client.put("/v1/blobs/digest/right", content=b"body", headers=headers).status_code == 201


def test_content_type_is_kept_and_returned(client: httpx.Client) -> None:
    """Return the media type of a put, or `filetype` of a tus upload, from GET and HEAD."""
    client.put("/v1/blobs/page", content=b"{}", headers={"Content-Type": "application/json; charset=utf-8"})
    for answer in (client.get("/v1/blobs/page"), client.head("/v1/blobs/page")):
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        assert (answer.headers["x-content-type-options"], answer.headers["content-disposition"]) == (
            "nosniff",
            "attachment",
        )
    assert client.get("/v1/info/page").json()["metadata"] == {"content-type": "application/json; charset=utf-8"}
    described = f"key {base64.b64encode(b'tus/page').decode()},filetype {base64.b64encode(b'image/png').decode()}"
    tus = {"Tus-Resumable": "1.0.0", "Upload-Length": "1", "Upload-Metadata": described}
    client.post("/v1/uploads", headers={**tus, "Content-Type": "application/offset+octet-stream"}, content=b"x")
    assert until(lambda: client.get("/v1/blobs/tus/page")).headers["content-type"] == "image/png"


@pytest.mark.parametrize("sent", [None, "", "text", "text/<b>", "application/octet-stream", "a/" + "b" * 300])
def test_content_type_that_is_none_is_octets(client: httpx.Client, sent: str | None) -> None:
    """Drop an invalid media type, and ignore one that a client writes into metadata."""
    headers = {} if sent is None else {"Content-Type": sent}
    assert client.put("/v1/blobs/plain", content=b"x", headers=headers).status_code == 201
    assert client.get("/v1/blobs/plain").headers["content-type"] == "application/octet-stream"
    client.put("/v1/blobs/plain", content=b"x", headers={"X-Nearkin-Meta-content-type": "no type%0D%0AX-Evil: 1"})
    assert client.get("/v1/blobs/plain").headers["content-type"] == "application/octet-stream"
