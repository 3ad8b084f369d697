"""Test access control: tokens, scopes, tenants, addresses, rates."""

from __future__ import annotations

import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from nearkin.client.smoke import NotWell, smoke
from nearkin.store import open_store
from nearkin_gateway.auth import tokens
from nearkin_gateway.http import request_limits
from nearkin_gateway.middleware.request_metrics import METHODS
from nearkin_gateway.server import check_address
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, ConfigError, NotFound
from nearkin_shared.observability import metrics
from tests.support.checks.waiting import until
from tests.support.servers.gateways import RunningGateway, embedded, running

Maker = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module", autouse=True)
def _looks_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "LOOK_SECONDS", 0.05)
        yield


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[RunningGateway]:
    file = folder / "tokens.json"
    tokens.create(file, "default", ["read"], note="first")
    with open_store(folder / "store", settings=with_changes(Settings(), {"tenant": "other"}), create=True) as store:
        store.put("shared/name", b"other's", metadata={"whose": "other"})
        store.put("only/other", b"other's alone")
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(file)}})) as found:
        with found.client(tokens.create(file, "default", ["write"])[0]) as writer:
            until(lambda: writer.put("/v1/blobs/shared/name", content=b"default's").status_code == 201)
        yield found


@pytest.fixture
def client(gateway: RunningGateway, folder: Path) -> Iterator[Maker]:
    made: list[httpx.Client] = []

    def make(tenant: str = "default", *scopes: str, days: int | None = 1) -> httpx.Client:
        text, _ = tokens.create(folder / "tokens.json", tenant, scopes or ("read",), days=days)
        made.append(gateway.client(text))
        until(lambda: made[-1].get("/v1/blobs").status_code != 401)
        return made[-1]

    yield make
    for found in made:
        found.close()


ROUTES = [
    ("GET", "/v1/blobs", "read"), ("GET", "/v1/blobs/shared/name", "read"), ("HEAD", "/v1/blobs/shared/name", "read"),
    ("GET", "/v1/blobs/shared/name/versions", "read"), ("GET", "/v1/info/shared/name", "read"),
    ("GET", "/v1/explain/shared/name", "read"), ("GET", "/v1/stats", "read"), ("GET", "/v1/status/x", "read"),
    ("PUT", "/v1/blobs/new", "write"), ("POST", "/v1/blobs/new", "write"), ("DELETE", "/v1/blobs/new", "delete"),
    ("POST", "/v1/undelete/new", "delete"), ("POST", "/v1/retention/new?until=2030-01-01", "delete"),
    ("GET", "/v1/deleted", "read"), ("PUT", "/v1/checkpoints/new", "write"),
    ("GET", "/v1/checkpoints/new/versions", "read"), ("GET", "/v1/checkpoints/new?version=1", "read"),
    ("DELETE", "/v1/checkpoints/new", "write"),
    ("POST", "/v1/uploads", "write"), ("HEAD", "/v1/uploads/x", "write"), ("GET", "/v1/uploads/x", "write"),
    ("PATCH", "/v1/uploads/x", "write"), ("DELETE", "/v1/uploads/x", "write"),
    ("GET", "/v1/config", "operator"), ("PATCH", "/v1/config", "operator"), ("GET", "/v1/workers", "operator"),
    ("GET", "/v1/reduction", "read"), ("GET", "/v1/growth", "read"), ("GET", "/v1/tenants", "admin"),
    ("GET", "/v1/pipeline", "operator"), ("GET", "/v1/dead", "operator"), ("POST", "/v1/dead/replay", "operator"),
    ("GET", "/v1/dead/letters/0:0", "operator"), ("POST", "/v1/dead/drop", "operator"),
    ("GET", "/v1/audit", "operator"), ("GET", "/v1/gc", "operator"), ("POST", "/v1/gc", "operator"),
    ("GET", "/v1/scrub", "operator"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
def test_routes_require_a_token_with_scope(client: Maker, method: str, path: str, scope: str) -> None:
    others = [other for other in tokens.SCOPES if other not in (scope, "operator" if scope == "admin" else scope)]
    with_it, without = client("default", scope), client("default", *others)
    body = b"{}" if path == "/v1/config" else b"x"
    assert with_it.request(method, path, content=body).status_code not in (401, 403)
    refused = without.request(method, path, content=body)
    assert refused.status_code == 403
    assert f'scope="{scope}"' in refused.headers["www-authenticate"]
    del without.headers["authorization"]
    anonymous = without.request(method, path, content=body)
    assert (anonymous.status_code, anonymous.headers["www-authenticate"]) == (401, 'Bearer realm="nearkin"')


def test_no_route_is_missing_from_the_table(gateway: RunningGateway) -> None:
    schema = httpx.get(f"{gateway.url}/openapi.json").json()
    everything = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    secured = {(method, path) for method, path in everything if "security" in schema["paths"][path][method.lower()]}
    assert everything - secured == {("GET", "/livez"), ("GET", "/readyz"), ("OPTIONS", "/v1/uploads")}
    patterns = {path: re.sub(r"\\\{[^}]*\\\}", ".+", re.escape(path)) for _, path in secured}
    for method, path in secured:
        fits = [asked for verb, asked, _ in ROUTES if verb == method and re.fullmatch(patterns[path], asked)]
        assert fits, f"{method} {path}"


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer x", "Basic dXNlcjpwYXNz", "bearer nk_00000000_" + "A" * 43, "Bearer nk_00000000_\xe9"],
)  # fmt: skip
def test_invalid_token_is_401(gateway: RunningGateway, header: str) -> None:
    answer = httpx.get(f"{gateway.url}/v1/blobs", headers={b"Authorization": header.encode("latin-1")})
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")


def test_another_tenants_blob_is_404(client: Maker) -> None:
    mine, theirs = client("default", "read"), client("other", "read", "write")
    assert mine.get("/v1/blobs/shared/name").content == b"default's"
    assert theirs.get("/v1/blobs/shared/name").content == b"other's"
    for path in ("", "/versions", "?version=1"):
        assert mine.get(f"/v1/blobs/only/other{path}").status_code == 404
        assert theirs.get(f"/v1/blobs/only/other{path}").status_code == 200
    assert mine.get("/v1/explain/only/other").status_code == 404
    assert mine.get("/v1/info/only/other").status_code == 404
    assert {entry["key"] for entry in mine.get("/v1/blobs").json()["blobs"]} <= {"shared/name", "new", "shared-note"}
    assert [entry["key"] for entry in theirs.get("/v1/blobs").json()["blobs"]] == ["only/other", "shared/name"]


def test_embedded_store_accepts_its_tenant_only(client: Maker) -> None:
    refused = client("other", "read", "write").put("/v1/blobs/x", content=b"x")
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:nearkin:problem:foreign-tenant")


def test_another_tenants_status_is_404(client: Maker) -> None:
    result = client("default", "write").put("/v1/blobs/shared-note", content=b"x").json()
    assert client("default", "read").get(result["status"]).json()["state"] == "committed"
    assert client("other", "read").get(result["status"]).status_code == 404


def test_revoked_or_expired_token_is_refused(gateway: RunningGateway, client: Maker, folder: Path) -> None:
    mine = client("default", "read")
    number = mine.headers["authorization"].split("_")[1]
    tokens.revoke(folder / "tokens.json", number)
    until(lambda: mine.get("/v1/blobs").status_code == 401)
    late = client("default", "read")
    number = late.headers["authorization"].split("_")[1]
    file = folder / "tokens.json"
    content = json.loads(file.read_text())
    for entry in content["tokens"]:
        if entry["id"] == number:
            entry["expires"] = 1
    file.write_text(json.dumps(content))
    until(lambda: late.get("/v1/blobs").status_code == 401)
    assert late.get("/v1/blobs").json()["type"] == "urn:nearkin:problem:expired-token"


def test_broken_tokens_file_keeps_old_tokens(client: Maker, folder: Path) -> None:
    mine = client("default", "read")
    file = folder / "tokens.json"
    before = file.read_bytes()
    try:
        file.write_bytes(b"{broken")
        time.sleep(0.2)
        assert mine.get("/v1/blobs").status_code == 200
    finally:
        file.write_bytes(before)


def test_revoked_token_ends_after_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a revoked token although its file could not be read at first."""
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    file = tmp_path / "tokens.json"
    text, made = tokens.create(file, "default", ["read"])
    known = tokens.TokenFile(file)
    tokens.revoke(file, made.id)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        assert known.find(text) == made  # the tokens read before stay
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert known.find(text) is None


def test_token_revoked_during_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    file = tmp_path / "tokens.json"
    text, made = tokens.create(file, "default", ["read"])
    plain = tokens._read

    def then_revoked(path: Path) -> tokens._FileContent:
        found = plain(path)
        monkeypatch.setattr(tokens, "_read", plain)
        tokens.revoke(path, made.id)
        return found

    monkeypatch.setattr(tokens, "_read", then_revoked)
    assert tokens.TokenFile(file).find(text) is None


def test_tokens_file_is_private_without_tokens(tmp_path: Path) -> None:
    """Store no token in the file, which only its owner can read."""
    text, made = tokens.create(tmp_path / "t.json", "default", ["read", "admin"], note="n")
    content = (tmp_path / "t.json").read_text()
    assert text not in content
    assert text.split("_", 2)[2] not in content
    assert (tmp_path / "t.json").stat().st_mode & 0o077 == 0
    assert tokens.TokenFile(tmp_path / "t.json").find(text) == made
    assert tokens.TokenFile(tmp_path / "t.json").find(text[:-1] + ("A" if text[-1] != "A" else "B")) is None
    assert [found.id for found in tokens.read_tokens(tmp_path / "t.json")] == [made.id]


def test_bad_tokens_are_refused_when_they_are_made(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    for tenant, scopes, days in (
        ("", ["read"], 1),
        ("a\nb", ["read"], 1),
        ("a", ["reed"], 1),
        ("a", [], 1),
        ("a", ["read"], 0),
    ):
        with pytest.raises(BadInput):
            tokens.create(file, tenant, scopes, days=days)
    with pytest.raises(ConfigError, match="no such file"):
        tokens.revoke(file, "00000000")
    tokens.create(file, "a", ["read"])
    with pytest.raises(NotFound):
        tokens.revoke(file, "00000000")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "nearkin.example", "127.0.0.1.nip.io"])
def test_no_tokens_serves_loopback_only(host: str) -> None:
    settings = with_changes(Settings(), {"gateway": {"host": host}})
    with pytest.raises(ConfigError, match="loopback"):
        check_address(settings)
    check_address(with_changes(settings, {"auth": {"tokens_file": "x"}}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_loopback_needs_no_tokens(host: str) -> None:
    check_address(with_changes(Settings(), {"gateway": {"host": host}}))


def test_ended_gateway_leaves_no_thread(tmp_path: Path) -> None:
    """End all threads with the gateway.

    The body's frames use the hashing and local file pools.
    """
    before = set(threading.enumerate())
    with running(embedded(tmp_path / "store")) as found, found.client() as client:
        for key in ("deleted", "k"):
            assert client.put(f"/v1/blobs/{key}", content=b"k").status_code == 201
        assert client.delete("/v1/blobs/deleted").is_success
        assert [entry["key"] for entry in client.get("/v1/blobs").json()["blobs"]] == ["k"]
        assert client.put("/v1/blobs/large", content=bytes(2_000_000)).status_code == 201
        assert client.get("/readyz").status_code == 200
        own = [thread for thread in threading.enumerate() if thread not in before]
        used = {"nearkin-catalogue_0", "nearkin-gateway-writer", "nearkin-gateway-hash_0", "nearkin-gateway-disk_0"}
        assert used | {"nearkin-ready_0"} <= {thread.name for thread in own}
    until(lambda: not [thread for thread in own if thread.is_alive()])


def test_rate_limit_names_the_retry_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(request_limits, "time", SimpleNamespace(monotonic=lambda: now))
    with running(embedded(tmp_path, {"gateway": {"requests_per_second": 5}})) as gateway, gateway.client() as client:
        answers = [client.get("/v1/blobs") for _ in range(12)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 7
        assert answers[-1].headers["retry-after"] == "1"
        now += 1.0
        assert client.get("/v1/blobs").status_code == 200
        assert client.get("/livez").status_code == 200


def test_secrets_are_not_shown_by_config(tmp_path: Path) -> None:
    changes = {"kafka": {"sasl_password": "hunter2"}, "token": "nk_secret"}
    with running(embedded(tmp_path, changes)) as gateway, gateway.client() as client:
        text = client.get("/v1/config").text
    assert "hunter2" not in text
    assert "nk_secret" not in text


def test_smoke_test_notices_missing_access_check(
    gateway: RunningGateway, folder: Path, client: Maker, tmp_path: Path
) -> None:
    """Store a blob in the smoke test and notice a gateway without access control."""
    text = client("default", "read", "write").headers["authorization"].removeprefix("Bearer ")
    assert [line.partition(":")[0] for line in smoke(gateway.url, text)][:2] == ["/readyz", "/v1/blobs without a token"]
    assert len(smoke(gateway.url, None)) == 2
    with (
        running(embedded(tmp_path / "open")) as open_door,
        pytest.raises(NotWell, match=r"without a token: 200, want 401"),
    ):
        smoke(open_door.url, None)
    with pytest.raises(NotWell, match="ConnectError"):
        smoke("http://127.0.0.1:1", None)


def test_requests_are_counted_by_route_only(gateway: RunningGateway, client: Maker) -> None:
    """Count requests by route, never by text that strangers send."""
    reader = client("default", "read")

    def request_counts() -> dict[tuple[str, str, str], float]:
        return {
            (sample.labels["method"], sample.labels["route"], sample.labels["status"]): sample.value
            for sample in next(iter(metrics.REQUESTS.collect())).samples
            if sample.name.endswith("_total")
        }

    before, bytes_before = request_counts(), metrics.BYTES.labels("in")._value.get()
    assert client("default", "write").put("/v1/blobs/counted", content=b"x" * 4321).status_code == 201
    assert metrics.BYTES.labels("in")._value.get() - bytes_before == 4321
    assert reader.get("/v1/blobs/shared/name").status_code == 200
    assert reader.get("/v1/no/such/place").status_code == 404
    assert reader.request("PROPFIND", "/v1/blobs/shared/name").status_code == 405

    def added() -> dict[tuple[str, str, str], float]:
        return {
            key: count - before.get(key, 0.0) for key, count in request_counts().items() if count != before.get(key)
        }

    # A request is counted after its answer was sent; those of the fixture, which asked more, are counted too.
    got, nowhere = ("GET", "/v1/blobs/{key:path}", "200"), ("GET", "other", "404")
    until(lambda: {got, nowhere} <= added().keys() and any(method == "other" for method, _, _ in added()), added)
    assert added()[got] == 1
    assert sum(count for (_, route, status), count in added().items() if (route, status) == ("other", "404")) == 1
    assert {method for method, _, _ in request_counts()} <= METHODS | {"other"}
    assert not any("shared" in route for _, route, _ in request_counts())


def test_admin_of_a_tenant_sees_and_sets_nothing_of_others(client: Maker) -> None:
    """`admin` of one tenant listed all tenants and set `service.read_only` for all of them."""
    admin = client("default", "read", "write", "delete", "admin")
    client("another", "read")
    answer = admin.patch("/v1/config", json={"service": {"read_only": True}})
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:nearkin:problem:missing-scope")
    assert admin.put("/v1/blobs/writable", content=b"x").status_code == 201
    for path in ("/v1/config", "/v1/workers", "/v1/pipeline", "/v1/dead", "/v1/audit", "/v1/gc", "/v1/scrub"):
        assert admin.get(path).status_code == 403, path
    assert admin.post("/v1/gc", json={"action": "pause"}).status_code == 403
    assert [found["tenant"] for found in admin.get("/v1/tenants").json()["tenants"]] == ["default"]


def test_operator_has_no_tenant(client: Maker, tmp_path: Path) -> None:
    """A token of the scope `operator` alone opens the settings and no tenant's blobs."""
    _, made = tokens.create(tmp_path / "t.json", "default", ["operator"])
    assert (made.tenant, tokens.TokenFile(tmp_path / "t.json").tenants()) == ("", [])
    operator = client("ignored", "operator")
    assert operator.get("/v1/config").status_code == 200
    assert operator.get("/v1/tenants").status_code == 200
    for path in ("/v1/blobs", "/v1/stats", "/v1/growth", "/v1/deleted"):
        assert operator.get(path).status_code == 403, path
    assert operator.put("/v1/blobs/x", content=b"x").status_code == 403


def test_statistics_of_a_tenant_hold_nothing_of_others(client: Maker, tmp_path: Path) -> None:
    """Sums of an embedded gateway counted every tenant of its folder."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    with open_store(shared, settings=with_changes(Settings(), {"tenant": "other"}), create=True) as store:
        store.put("k", os.urandom(300_000))
    shown = []
    for folder in (alone, shared):
        with open_store(folder, create=True) as store:
            store.put("k", bytes(range(256)) * 100)
            found = store.tenant_stats()
            shown.append((found.versions, found.keys, found.containers, found.ledger.logical_bytes))
            if folder == shared:
                assert store.stats().versions == 2
                assert found.ledger.stored_bytes < 300_000
    assert shown[0] == shown[1] == (1, 1, 1, 25_600)
    other = client("other", "read")
    for path in ("/v1/stats", "/v1/reduction", "/v1/growth"):
        assert other.get(path).status_code == 404, path
