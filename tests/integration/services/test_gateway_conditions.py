"""Test conditional and repeated requests against a real gateway on a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nearkin.lab.generated_data import random_bytes
from tests.support.servers.gateways import RunningGateway


def test_conditions_of_reads_hold(client: httpx.Client) -> None:
    tag = client.put("/v1/blobs/cond", content=b"one").headers["etag"]
    get = client.get("/v1/blobs/cond")
    assert client.get("/v1/blobs/cond", headers={"If-None-Match": tag}).status_code == 304
    assert client.get("/v1/blobs/cond", headers={"If-None-Match": f'"x", W/{tag}'}).status_code == 304
    assert client.get("/v1/blobs/cond", headers={"If-None-Match": '"x"'}).status_code == 200
    assert client.get("/v1/blobs/cond", headers={"If-Match": tag}).status_code == 200
    assert client.get("/v1/blobs/cond", headers={"If-Match": f"W/{tag}"}).status_code == 412
    assert client.get("/v1/blobs/cond", headers={"If-Match": '"x"'}).status_code == 412
    modified_since = {"If-Modified-Since": get.headers["last-modified"]}
    assert client.get("/v1/blobs/cond?version=1", headers=modified_since).status_code == 304
    assert client.get("/v1/blobs/cond", headers=modified_since).status_code == 200
    assert client.get("/v1/blobs/cond", headers={**modified_since, "If-None-Match": tag}).status_code == 304
    early = "Sat, 01 Jan 2000 00:00:00 GMT"
    assert client.get("/v1/blobs/cond", headers={"If-Unmodified-Since": early}).status_code == 412
    both = {"Range": "bytes=0-0"}
    assert client.get("/v1/blobs/cond", headers={**both, "If-Range": tag}).content == b"o"
    assert client.get("/v1/blobs/cond", headers={**both, "If-Range": '"other"'}).content == b"one"
    assert client.get("/v1/blobs/cond", headers={**both, "If-Range": f"W/{tag}"}).content == b"one"
    assert client.head("/v1/blobs/cond", headers={"If-None-Match": "*"}).status_code == 304


def test_lists_on_several_lines_are_read_as_on_one(client: httpx.Client) -> None:
    tag = client.put("/v1/blobs/lines", content=b"one").headers["etag"]
    path = "/v1/blobs/lines"
    unless = [("If-None-Match", '"x"'), ("If-None-Match", tag)]
    only = [("If-Match", '"x"'), ("If-Match", tag)]
    assert client.put(path, content=b"two", headers=unless).status_code == 412
    assert client.get(path, headers=[*unless, ("Range", "bytes=0-0")]).status_code == 304
    assert client.get(path, headers=only).content == b"one"
    assert client.get(path, headers=[("Range", "bytes=0-0"), ("Range", "bytes=1-1")]).status_code == 200
    wanted = [("Want-Repr-Digest", "sha-512=1"), ("Want-Repr-Digest", "sha-256=10")]
    assert client.put(path, content=b"two", headers=[*only, *wanted]).status_code == 201
    assert client.get(path).headers["repr-digest"].startswith("sha-256=:")
    assert client.delete(path, headers=only).status_code == 412  # of the version before
    now = client.get(path).headers["etag"]
    assert client.delete(path, headers=[("If-Match", tag), ("If-Match", now)]).status_code == 204


def test_date_never_yields_304_for_newer_content(client: httpx.Client) -> None:
    """Never answer Not Modified by date for content that the caller lacks."""
    client.put("/v1/blobs/dated", content=b"one")
    first = client.get("/v1/blobs/dated")
    client.put("/v1/blobs/dated", content=b"two")  # within the second, mostly
    second = client.get("/v1/blobs/dated", headers={"If-Modified-Since": first.headers["last-modified"]})
    assert (second.status_code, second.content) == (200, b"two")
    unmodified = {"If-Unmodified-Since": first.headers["last-modified"], "Range": "bytes=1-"}
    assert client.get("/v1/blobs/dated", headers=unmodified).status_code == 412
    assert client.get("/v1/blobs/dated?version=1", headers=unmodified).content == b"ne"
    client.delete("/v1/blobs/dated?version=2")
    again = client.get("/v1/blobs/dated", headers={"If-Modified-Since": second.headers["last-modified"]})
    assert (again.status_code, again.content) == (200, b"one")


def test_conditions_of_puts_hold(client: httpx.Client) -> None:
    only_first = {"If-None-Match": "*"}
    tag = client.put("/v1/blobs/once", content=b"one", headers=only_first).headers["etag"]
    assert client.put("/v1/blobs/once", content=b"two", headers=only_first).status_code == 412
    assert client.put("/v1/blobs/once", content=b"two", headers={"If-Match": tag}).status_code == 201
    assert client.put("/v1/blobs/once", content=b"three", headers={"If-Match": tag}).status_code == 412
    assert client.get("/v1/blobs/once").content == b"two"


def test_conditional_put_resent_gets_same_result(client: httpx.Client) -> None:
    """Its answer was lost; by then the version that its condition meets is its own."""
    only_first = {"If-None-Match": "*", "Idempotency-Key": "lost the answer"}
    first = client.put("/v1/blobs/lost", content=b"one", headers=only_first)
    again = client.put("/v1/blobs/lost", content=b"one", headers=only_first)
    assert (again.status_code, again.json(), again.headers["idempotent-replayed"]) == (201, first.json(), "true")
    over = {"If-Match": first.headers["etag"], "Idempotency-Key": "lost this one too"}
    second = client.put("/v1/blobs/lost", content=b"two", headers=over)
    assert (second.status_code, second.json()["version"]) == (201, 2)
    assert client.put("/v1/blobs/lost", content=b"two", headers=over).json() == second.json()
    assert client.put("/v1/blobs/lost", content=b"three", headers={**over, "Idempotency-Key": "new"}).status_code == 412
    assert len(client.get("/v1/blobs/lost/versions").json()["versions"]) == 2


def test_conditional_put_resent_early_is_known(
    gateway: RunningGateway, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recognise the repeat although the version exists before its outcome is reported."""
    only_first = {"If-None-Match": "*", "Idempotency-Key": "sent again at once"}
    first = client.put("/v1/blobs/at once", content=b"one", headers=only_first)
    of_origin, origins = gateway.gateway.outcomes.of_origin, list[bytes]()

    def late(origin: bytes) -> dict[str, Any] | None:
        origins.append(origin)
        return of_origin(origin) if len(origins) > 2 else None

    async def not_searched(*_: object) -> None:
        """Leave the stored versions alone, as an ingest does whose committer searches them."""

    monkeypatch.setattr(gateway.gateway.outcomes, "of_origin", late)
    monkeypatch.setattr(gateway.gateway.ingest, "find_committed", not_searched)
    again = client.put("/v1/blobs/at once", content=b"one", headers=only_first)
    assert (again.status_code, again.json(), again.headers["idempotent-replayed"]) == (201, first.json(), "true")
    stranger = {"If-None-Match": "*", "Idempotency-Key": "a stranger"}
    assert client.put("/v1/blobs/at once", content=b"one", headers=stranger).status_code == 412


def test_idempotency_key_stores_once(client: httpx.Client) -> None:
    """Store once for a repeated Idempotency-Key; refuse other content."""
    data = random_bytes(100_000, 8)
    first = client.put("/v1/blobs/idem", content=data, headers={"Idempotency-Key": "k1"})
    again = client.put("/v1/blobs/idem", content=data, headers={"Idempotency-Key": "k1"})
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    other = client.put("/v1/blobs/idem", content=data + b"!", headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["type"]) == (422, "urn:nearkin:problem:idempotency-key-reused")
    assert client.put("/v1/blobs/idem2", content=data, headers={"Idempotency-Key": "k1"}).json()["version"] == 1
    assert len(client.get("/v1/blobs/idem/versions").json()["versions"]) == 1
    assert client.put("/v1/blobs/idem", content=b"", headers={"Idempotency-Key": "k" * 256}).status_code == 400


def test_two_uploads_of_one_key_at_once_are_one(gateway: RunningGateway) -> None:
    """Store once for two concurrent uploads with one Idempotency-Key."""
    data, statuses = random_bytes(3_000_000, 11), []
    both_began = threading.Barrier(2)

    def slowly() -> Iterator[bytes]:
        for start in range(0, len(data), 300_000):
            if start == 300_000:
                both_began.wait(60)
            time.sleep(0.02)
            yield data[start : start + 300_000]

    def put() -> None:
        with gateway.client() as mine:
            statuses.append(mine.put("/v1/blobs/twice", content=slowly(), headers={"Idempotency-Key": "k"}).status_code)

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [201, 409]
