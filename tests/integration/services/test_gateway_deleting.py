"""Deleting over HTTP: a real gateway on a real socket, by hand and through both clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import pytest

import nearkin
from nearkin.store import open_store
from nearkin_gateway.auth import tokens
from nearkin_gateway.catalog import version_catalog
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotFound
from nearkin_shared.results import Damage
from nearkin_shared.storage.manifests import mark_name, object_name
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deleting")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[RunningGateway]:
    tokens.create(folder / "tokens.json", "default", ["read"])
    with open_store(folder / "store", settings=with_changes(Settings(), {"tenant": "other"}), create=True) as store:
        store.put("shared", b"other's")
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(folder / "tokens.json")}})) as found:
        yield found


@pytest.fixture(scope="module")
def token(gateway: RunningGateway, folder: Path) -> str:
    text = tokens.create(folder / "tokens.json", "default", ["read", "write", "delete", "admin", "operator"])[0]
    _wait_for(gateway, text)
    return text


def _wait_for(gateway: RunningGateway, token: str) -> None:
    with gateway.client(token) as client:
        until(lambda: client.get("/v1/blobs").status_code != 401)  # a new token is taken within a second


@pytest.fixture
def client(gateway: RunningGateway, token: str) -> Iterator[httpx.Client]:
    with gateway.client(token) as found:
        yield found


def put(client: httpx.Client, key: str, *contents: bytes) -> list[str]:
    return [client.put(f"/v1/blobs/{key}", content=content).headers["etag"] for content in contents]


def listed(client: httpx.Client, prefix: str, **params: str) -> list[tuple[str, int]]:
    page = client.get("/v1/blobs", params={"prefix": prefix, **params}).json()
    assert page["damaged"] == []
    return [(entry["key"], entry["version"]) for entry in page["blobs"]]


def test_deleted_key_is_hidden_at_once(client: httpx.Client, token: str) -> None:
    put(client, "gone", b"one", b"two")
    put(client, "gone/not", b"stays")
    answer = client.delete("/v1/blobs/gone", params={"reason": "a test"})
    assert (answer.status_code, answer.content, answer.headers["x-nearkin-versions"]) == (204, b"", "2")
    for path in (
        "/v1/blobs/gone", "/v1/blobs/gone?version=1", "/v1/blobs/gone?version=2", "/v1/blobs/gone/versions",
        "/v1/info/gone", "/v1/info/gone?version=1", "/v1/explain/gone",
    ):  # fmt: skip
        answer = client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json"), path
    assert client.head("/v1/blobs/gone").status_code == 404
    assert client.get("/v1/blobs/gone", headers={"Range": "bytes=0-1"}).status_code == 404
    assert listed(client, "gone") == listed(client, "gone", versions="all") == [("gone/not", 1)]
    assert client.delete("/v1/blobs/gone").status_code == 404
    (one, two) = client.get("/v1/deleted", params={"prefix": "gone"}).json()["deleted"]
    assert (one["key"], one["version"], one["reason"]) == ("gone", 1, "a test")
    assert one["who"] == token.split("_")[1]
    assert two["until"] > two["deleted"]


def test_put_after_deletion_gets_a_new_number(client: httpx.Client) -> None:
    put(client, "again", b"one", b"two")
    client.delete("/v1/blobs/again")
    answer = client.put("/v1/blobs/again", content=b"three", headers={"If-None-Match": "*"})
    assert (answer.status_code, answer.json()["version"]) == (201, 3)
    client.delete("/v1/blobs/again", params={"version": 3})
    assert client.put("/v1/blobs/again", content=b"four").json()["version"] == 4
    assert listed(client, "again", versions="all") == [("again", 4)]


def test_one_version_is_deleted_and_undeleted(client: httpx.Client) -> None:
    put(client, "single", b"one", b"two", b"three")
    assert client.delete("/v1/blobs/single?version=3").status_code == 204
    assert client.get("/v1/blobs/single").content == b"two"
    assert listed(client, "single") == [("single", 2)]
    assert [v["version"] for v in client.get("/v1/blobs/single/versions").json()["versions"]] == [1, 2]
    assert client.delete("/v1/blobs/single?version=3").status_code == 404
    assert client.delete("/v1/blobs/single?version=4").status_code == 404
    assert client.delete("/v1/blobs/single?version=0").status_code == 422
    answer = client.post("/v1/undelete/single?version=3")
    assert (answer.status_code, answer.headers["x-nearkin-versions"]) == (204, "1")
    assert client.get("/v1/blobs/single").content == b"three"
    assert client.post("/v1/undelete/single?version=3").status_code == 404
    assert client.post("/v1/undelete/never").status_code == 404


def test_if_match_names_the_newest_version(client: httpx.Client) -> None:
    """Compare If-Match with the newest version that would be deleted."""
    one, two = put(client, "match", b"one", b"two")
    refused = client.delete("/v1/blobs/match", headers={"If-Match": one})
    assert (refused.status_code, refused.json()["type"]) == (412, "urn:nearkin:problem:precondition-failed")
    assert listed(client, "match", versions="all") == [("match", 1), ("match", 2)]
    assert client.delete("/v1/blobs/match?version=1", headers={"If-Match": two}).status_code == 412
    assert client.delete("/v1/blobs/match?version=1", headers={"If-Match": one}).status_code == 204
    assert client.delete("/v1/blobs/match", headers={"If-Match": two}).status_code == 204
    assert client.delete("/v1/blobs/match", headers={"If-Match": "*"}).status_code == 404


def test_deletion_resent_keeps_later_puts(client: httpx.Client) -> None:
    client.put("/v1/blobs/resent", content=b"first")
    once = {"Idempotency-Key": "lost the answer"}
    assert client.delete("/v1/blobs/resent", headers=once).headers["x-nearkin-versions"] == "1"
    assert client.put("/v1/blobs/resent", content=b"of another client").json()["version"] == 2
    repeat = client.delete("/v1/blobs/resent", headers=once)
    assert (repeat.status_code, repeat.headers["x-nearkin-versions"]) == (204, "1")
    assert client.get("/v1/blobs/resent").content == b"of another client"
    assert client.delete("/v1/blobs/resent").headers["x-nearkin-versions"] == "1"  # another call takes it


def test_idempotency_key_repeats_the_response(client: httpx.Client) -> None:
    put(client, "repeat", b"one", b"two")
    headers = {"Idempotency-Key": "x"}
    for _ in range(2):
        answer = client.delete("/v1/blobs/repeat", headers=headers)
        assert (answer.status_code, answer.headers["x-nearkin-versions"]) == (204, "2")
    assert client.delete("/v1/blobs/repeat", headers={"Idempotency-Key": "y"}).status_code == 404
    assert client.delete("/v1/blobs/repeat", headers={"Idempotency-Key": ""}).status_code in (400, 404)


def test_another_tenants_blob_is_not_deleted(client: httpx.Client, gateway: RunningGateway, folder: Path) -> None:
    text = tokens.create(folder / "tokens.json", "other", ["read", "delete"])[0]
    _wait_for(gateway, text)
    assert client.delete("/v1/blobs/shared").status_code == 404
    put(client, "mine", b"mine")
    with gateway.client(text) as other:
        assert other.delete("/v1/blobs/mine").status_code == 404
        assert other.get("/v1/blobs/shared").content == b"other's"
        assert other.delete("/v1/blobs/shared").status_code == 204
        assert other.get("/v1/blobs/shared").status_code == 404
        assert [entry["key"] for entry in other.get("/v1/deleted").json()["deleted"]] == ["shared"]
    assert "shared" not in {entry["key"] for entry in client.get("/v1/deleted").json()["deleted"]}


def test_stats_count_deleted_uncollected_data(client: httpx.Client) -> None:
    before = client.get("/v1/stats").json()
    put(client, "counted", b"x" * 1000, b"y" * 500)
    client.delete("/v1/blobs/counted")
    after = client.get("/v1/stats").json()
    assert after["deleted_versions"] == before["deleted_versions"] + 2
    assert after["deleted_bytes"] == before["deleted_bytes"] + 1500
    assert (after["versions"], after["keys"]) == (before["versions"], before["keys"])
    assert after["stored_bytes"] == sum(after["parts"].values())


def test_pages_skip_deleted_versions(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        put(client, f"page/{number:02}", b"x", b"y")
    for number in [*range(13), 15, 19]:
        client.delete(f"/v1/blobs/page/{number:02}")
    client.delete("/v1/blobs/page/16?version=2")

    def all_pages(path: str, name: str, **params: str | int) -> tuple[list[tuple[str, int]], int]:
        found, after, pages = [], None, 0
        while True:
            more: dict[str, str] = {} if after is None else {"after": after}
            page = client.get(path, params={"prefix": "page/", **params, **more}).json()
            assert len(page[name]) <= int(params["limit"])
            found += [(entry["key"], entry["version"]) for entry in page[name]]
            pages += 1
            if page["next"] is None:
                return found, pages
            assert page["next"] != after
            after = page["next"]

    newest = [("page/13", 2), ("page/14", 2), ("page/16", 1), ("page/17", 2), ("page/18", 2)]
    every = [(f"page/{n}", v) for n in (13, 14, 16, 17, 18) for v in (1, 2) if (n, v) != (16, 2)]
    deleted_pairs = [
        (f"page/{n:02}", v) for n in range(20) for v in (1, 2) if n in (*range(13), 15, 19) or (n, v) == (16, 2)
    ]
    for limit in (1, 2, 5, 100):
        assert all_pages("/v1/blobs", "blobs", limit=limit)[0] == newest
        assert all_pages("/v1/blobs", "blobs", limit=limit, versions="all")[0] == every
        assert all_pages("/v1/deleted", "deleted", limit=limit)[0] == deleted_pairs
    monkeypatch.setattr(version_catalog, "EXAMINED_MAX", 3)  # pages may be empty, and still lead on
    assert all_pages("/v1/blobs", "blobs", limit=2)[0] == newest
    assert all_pages("/v1/blobs", "blobs", limit=2, versions="all")[0] == every
    found, pages = all_pages("/v1/deleted", "deleted", limit=100)
    assert (found, pages > 4) == (deleted_pairs, True)


def test_read_only_gateway_deletes_nothing(client: httpx.Client) -> None:
    put(client, "kept", b"x")
    client.patch("/v1/config", json={"service": {"read_only": True}})
    try:
        assert client.delete("/v1/blobs/kept").json()["type"] == "urn:nearkin:problem:read-only"
        assert client.post("/v1/undelete/kept").status_code == 503
    finally:
        client.patch("/v1/config", json={"service": {"read_only": False}})
    assert client.get("/v1/blobs/kept").content == b"x"


def test_reader_of_deleted_version_gets_all(client: httpx.Client) -> None:
    """Send every byte to a reader that began before the deletion."""
    data = bytes(range(256)) * 40_000
    put(client, "read", data)
    with client.stream("GET", "/v1/blobs/read") as answer:
        pieces = answer.iter_raw(65536)
        got = next(pieces)
        assert client.delete("/v1/blobs/read").status_code == 204
        assert got + b"".join(pieces) == data
    assert client.get("/v1/blobs/read").status_code == 404


def test_of_concurrent_deletions_one_is_counted(client: httpx.Client) -> None:
    for number in range(10):
        put(client, f"race/{number}", b"x")
        barrier = threading.Barrier(4)

        def delete(key: str = f"race/{number}", barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            return client.delete(f"/v1/blobs/{key}").status_code

        with ThreadPoolExecutor(4) as threads:
            assert sorted(threads.map(lambda _, work=delete: work(), range(4))) == [204, 404, 404, 404]


def test_numbers_grow_with_puts_and_deletions(client: httpx.Client) -> None:
    """Give growing version numbers under concurrent puts and deletions."""
    numbers: list[int] = []
    stop = threading.Event()

    def delete() -> set[int]:
        codes = set()
        while not stop.is_set():
            codes.add(client.delete("/v1/blobs/side").status_code)
        return codes

    with ThreadPoolExecutor(2) as threads:
        work = [threads.submit(delete) for _ in range(2)]
        for number in range(12):
            numbers.append(client.put("/v1/blobs/side", content=b"%d" % number).json()["version"])
        stop.set()
        assert set.union(*(done.result() for done in work)) <= {204, 404}
    assert numbers == list(range(1, 13))
    client.put("/v1/blobs/side", content=b"last")
    assert client.get("/v1/blobs/side").content == b"last"


# --- clients ---------------------------------------------------------------------------------------------------------


def test_both_clients_delete_and_undelete(gateway: RunningGateway, token: str) -> None:
    with nearkin.connect(gateway.url, token) as store:
        store.put("client/a", b"one")
        store.put("client/a", b"two")
        store.put("client/b", b"b")
        assert store.delete("client/a", reason="sync") == 2
        with pytest.raises(NotFound):
            store.get("client/a")
        with pytest.raises(NotFound):
            store.delete("client/a")
        assert [info.key for info in store.versions("client/", all_versions=True)] == ["client/b"]
        assert [(d.version, d.reason) for d in store.list_deleted("client/")] == [(1, "sync"), (2, "sync")]
        assert store.stats().deleted_versions >= 2
        assert store.undelete("client/a") == 2
        assert store.get("client/a", 1).read() == b"one"

    async def awaited() -> None:
        async with nearkin.connect_async(gateway.url, token) as store:
            assert await store.delete("client/a", 1, reason="async") == 1
            assert [(d.version, d.reason) for d in await store.list_deleted("client/")] == [(1, "async")]
            found = await store.versions("client/", all_versions=True)
            assert [(info.key, info.version) for info in found] == [("client/a", 2), ("client/b", 1)]
            assert await store.undelete("client/a", 1) == 1
            with pytest.raises(NotFound):
                await store.undelete("client/a")

    anyio.run(awaited)


def test_both_clients_name_unreadable_versions(gateway: RunningGateway, token: str) -> None:
    names = gateway.store
    with nearkin.connect(gateway.url, token) as store:
        store.put("broken/a", b"one")
        store.put("broken/b", b"two")
        store.put("broken/c", b"three")
        store.delete("broken/c")
        (names / object_name("default", "broken/a", 1)).write_bytes(b"rot")
        (names / mark_name("default", "broken/c", 1, 1)).write_bytes(b"rot")
        broken: list[Damage] = []
        # A listing comes from the index (ADR 58), a read from the manifest.
        assert [info.key for info in store.versions("broken/", broken=broken.append)] == ["broken/a", "broken/b"]
        assert broken == []
        with pytest.raises(nearkin.Corrupt, match=object_name("default", "broken/a", 1)):
            store.get("broken/a").read()
        assert store.list_deleted("broken/", broken=broken.append) == []
        assert [d.versions for d in broken] == [(("broken/c", 1),)]

    async def awaited() -> None:
        broken: list[Damage] = []
        async with nearkin.connect_async(gateway.url, token) as store:
            assert await store.list_deleted("broken/", broken=broken.append) == []
        assert [d.versions for d in broken] == [(("broken/c", 1),)]

    anyio.run(awaited)
    (names / object_name("default", "broken/a", 1)).unlink()
