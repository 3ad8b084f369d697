"""Test retention over HTTP.

Extended by gateway, clients and command, honoured by deletions.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import httpx
import pytest

import nearkin
from nearkin.cli.retain import parse_end
from nearkin_gateway.auth import tokens
from nearkin_shared.errors import AccessDenied, BadInput, NotFound, RetentionActive
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

LATER = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retention")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[RunningGateway]:
    tokens.create(folder / "tokens.json", "default", ["read"])
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(folder / "tokens.json")}})) as found:
        yield found


def new_token(gateway: RunningGateway, folder: Path, *scopes: str) -> str:
    text = tokens.create(folder / "tokens.json", "default", list(scopes))[0]
    with gateway.client(text) as client:
        until(lambda: client.get("/v1/blobs").status_code != 401)
    return text


@pytest.fixture(scope="module")
def token(gateway: RunningGateway, folder: Path) -> str:
    return new_token(gateway, folder, "read", "write", "delete")


@pytest.fixture
def client(gateway: RunningGateway, token: str) -> Iterator[httpx.Client]:
    with gateway.client(token) as found:
        yield found


def test_gateway_extends_a_retention(client: httpx.Client) -> None:
    """An extension is in every answer that shows the version, and its deletion is 409."""
    client.put("/v1/blobs/one", content=b"x")
    client.put("/v1/blobs/two", content=b"y")
    answer = client.post("/v1/retention/one", params={"until": LATER.isoformat(), "reason": "audit"})
    assert answer.status_code == 200
    shown = answer.json()["retain_until"]
    assert datetime.fromisoformat(shown) == LATER
    assert client.get("/v1/info/one").json()["retain_until"] == shown
    listed = {blob["key"]: blob["retain_until"] for blob in client.get("/v1/blobs").json()["blobs"]}
    assert (listed["one"], listed["two"]) == (shown, None)
    versions = client.get("/v1/blobs/one/versions").json()["versions"]
    assert [version["retain_until"] for version in versions] == [shown]
    refused = client.delete("/v1/blobs/one")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:nearkin:problem:retained")
    assert client.delete("/v1/blobs/two").status_code == 204


def test_gateway_refuses_to_shorten_a_retention(client: httpx.Client) -> None:
    """Return 400 for an earlier time (with both), 404 without the key, 422 without a time.

    A repeat changes nothing.
    """
    client.put("/v1/blobs/kept", content=b"x")
    for _ in range(2):
        assert client.post("/v1/retention/kept", params={"until": LATER.isoformat()}).status_code == 200
    earlier = client.post("/v1/retention/kept", params={"until": (LATER - timedelta(days=1)).isoformat()})
    assert earlier.status_code == 400
    assert f"{LATER:%Y-%m-%dT%H:%M:%SZ}" in earlier.json()["detail"]
    assert "never shortened" in earlier.json()["detail"]
    assert client.post("/v1/retention/none", params={"until": LATER.isoformat()}).status_code == 404
    assert client.post("/v1/retention/kept").status_code == 422
    assert client.post("/v1/retention/kept", params={"until": "1960-01-01T00:00:00Z"}).status_code == 400


def test_token_without_delete_cannot_retain(gateway: RunningGateway, folder: Path) -> None:
    """Refuse retention to a token that writes and may not delete."""
    text = new_token(gateway, folder, "read", "write")
    with gateway.client(text) as client:
        client.put("/v1/blobs/junk", content=b"x")
        assert client.post("/v1/retention/junk", params={"until": LATER.isoformat()}).status_code == 403
    with nearkin.connect(gateway.url, text) as store, pytest.raises(AccessDenied):
        store.retain("junk", LATER)


def test_clients_extend_a_retention(gateway: RunningGateway, token: str) -> None:
    """Both clients extend, and raise what the library raises."""
    with nearkin.connect(gateway.url, token) as store:
        store.put("mine", b"x")
        assert store.retain("mine", LATER).retain_until == LATER
        assert store.info("mine").retain_until == LATER
        with pytest.raises(RetentionActive):
            store.delete("mine")
        with pytest.raises(BadInput):
            store.retain("mine", LATER - timedelta(days=1))
        with pytest.raises(NotFound):
            store.retain("mine", LATER, 7)

    async def again() -> None:
        async with nearkin.connect_async(gateway.url, token) as store:
            assert (await store.retain("mine", LATER + timedelta(days=1), 1)).retain_until == LATER + timedelta(days=1)

    anyio.run(again)


def test_end_of_a_retention_is_parsed() -> None:
    """Parse `--until` as ISO 8601 in UTC and `--for` as a duration; refuse all else."""
    now = datetime(2026, 11, 27, tzinfo=UTC)
    assert parse_end("2027-01-02", None, now) == datetime(2027, 1, 2, tzinfo=UTC)
    assert parse_end("2027-01-02T03:00+02:00", None, now) == datetime(2027, 1, 2, 1, tzinfo=UTC)
    assert parse_end(None, "36h", now) == now + timedelta(hours=36)
    for end, duration in ((None, None), ("2027-01-02", "36h"), ("soon", None), (None, "soon"), (None, "-1d")):
        with pytest.raises(BadInput):
            parse_end(end, duration, now)
