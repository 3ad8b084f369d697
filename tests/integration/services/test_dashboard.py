"""Test the dashboard's pages over HTTP: sessions, CSRF, the policy, and the figures shown."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from html import escape
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from nearkin.embedded.gateway_backend import StoreListing
from nearkin.lab.generated_data import mutate, records_like
from nearkin.store import open_store
from nearkin_gateway.app import openapi_document
from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.sessions import COOKIE, CSRF_HEADER, SECURE_COOKIE
from nearkin_gateway.catalog.version_catalog import STATS_SECONDS
from nearkin_gateway.dashboard import pages
from nearkin_gateway.dashboard.rendering import POLICY
from nearkin_shared.kafka.asyncapi import document
from tests.support.servers.gateways import RunningGateway, embedded, running

PAGES = ("/", "/ui/blobs", "/ui/deleted", "/ui/blob?key=db%2Fdump", "/ui/pipeline", "/ui/upkeep", "/ui/settings")
EVIL = "evil/\"><script>alert(1)</script>'&amp;"
Login = Callable[..., httpx.Client]


@pytest.fixture(scope="module", autouse=True)
def _looks_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "LOOK_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def token(folder: Path) -> str:
    return tokens.create(folder / "tokens.json", "default", tokens.SCOPES)[0]


@pytest.fixture(scope="module")
def gateway(folder: Path, token: str) -> Iterator[RunningGateway]:
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(folder / "tokens.json")}})) as found:
        with found.client(token) as client:
            first = records_like(400_000, 1)
            blobs = [("db/dump", data) for data in (first, mutate(first, 2), mutate(first, 3))]
            for key, data in [*blobs, ("web/page", b"x" * 50_000), (EVIL, b"evil")]:
                answer = client.put(
                    f"/v1/blobs/{quote(key, safe='')}", content=data, headers={"X-Nearkin-Meta-A": "%3Cb%3E"}
                )
                assert answer.status_code == 201, answer.text
        yield found


@pytest.fixture
def login(gateway: RunningGateway, token: str) -> Iterator[Login]:
    made: list[httpx.Client] = []

    def make(text: str = token, **more: Any) -> httpx.Client:
        made.append(httpx.Client(base_url=gateway.url, timeout=60, headers={"Origin": gateway.url}, **more))
        answer = made[-1].post("/login", data={"token": text, "next": "/"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/"), answer.text
        return made[-1]

    yield make
    for client in made:
        client.close()


def csrf_of(client: httpx.Client) -> str:
    found = re.search(r'<meta name="nearkin-csrf" content="([0-9a-f]{64})">', client.get("/").text)
    assert found is not None
    return found[1]


# --- sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_page_without_session_is_the_login(gateway: RunningGateway, page: str) -> None:
    """Show the login without a session and return to the page afterwards."""
    with gateway.client() as client:
        answer = client.get(page)
        assert answer.status_code == 303
        wanted = "/login" if page == "/" else f"/login?next={quote(page, safe='')}"
        assert answer.headers["location"] == wanted
        shown = client.get(answer.headers["location"])
        assert f'name="next" value="{escape(page)}"' in shown.text


def test_cookie_is_private_and_holds_no_token(gateway: RunningGateway, token: str) -> None:
    """Hide the cookie from scripts and other sites; it holds no token."""
    with gateway.client() as client:
        answer = client.post("/login", data={"token": token}, headers={"Origin": gateway.url})
    cookie = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["secure"]) == (True, "strict", "/", "")
    assert int(cookie["max-age"]) == 8 * 3600
    secret = token.split("_", 2)[2]  # a secret may hold "_" itself
    assert secret not in answer.headers["set-cookie"]
    assert secret not in answer.headers["location"]


def test_cookie_behind_tls_is_secure_host_only(gateway: RunningGateway, token: str) -> None:
    host = gateway.url.removeprefix("http://")
    with gateway.client() as client:
        answer = client.post("/login", data={"token": token}, headers={"Origin": f"https://{host}"})
    cookie = SimpleCookie(answer.headers["set-cookie"])[SECURE_COOKIE]
    assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", "")


def test_login_ends_with_its_token(gateway: RunningGateway, folder: Path) -> None:
    text = tokens.create(folder / "tokens.json", "default", ["read"], days=1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda now=time.time: now() + 86_400 - 600)
        with gateway.client() as client:
            answer = client.post("/login", data={"token": text}, headers={"Origin": gateway.url})
    assert 0 < int(SimpleCookie(answer.headers["set-cookie"])[COOKIE]["max-age"]) <= 600


@pytest.mark.parametrize("text", ["", "nk_00000000_" + "A" * 43, "x" * 300])
def test_invalid_token_opens_nothing(gateway: RunningGateway, text: str) -> None:
    """Open nothing with an invalid token, and do not show it."""
    with gateway.client() as client:
        answer = client.post("/login", data={"token": text, "next": "/ui/blobs"}, headers={"Origin": gateway.url})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert text == "" or text not in answer.text
    assert 'role="alert"' in answer.text


def test_login_from_another_site_is_refused(gateway: RunningGateway, token: str) -> None:
    with gateway.client() as client:
        for headers in (
            {},
            {"Origin": "https://evil.example"},
            {"Origin": gateway.url, "Sec-Fetch-Site": "cross-site"},
        ):
            answer = client.post("/login", data={"token": token}, headers=headers)
            assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), headers


@pytest.mark.parametrize("following", ["//evil.example/", "https://evil.example/", "/\\evil.example", "x", "/\tx"])
def test_login_never_redirects_to_another_host(gateway: RunningGateway, token: str, following: str) -> None:
    with gateway.client() as client:
        answer = client.post("/login", data={"token": token, "next": following}, headers={"Origin": gateway.url})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_revoked_token_ends_its_sessions(login: Login, folder: Path) -> None:
    text, made = tokens.create(folder / "tokens.json", "default", tokens.SCOPES)
    client = login(text)
    assert client.get("/").status_code == 200
    tokens.revoke(folder / "tokens.json", made.id)
    assert client.get("/").status_code == 303
    assert client.get("/v1/blobs").status_code == 401


def test_session_expires(login: Login) -> None:
    client = login()
    assert client.get("/v1/stats").status_code == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda now=time.time: now() + 8 * 3600 + 1)
        assert client.get("/v1/stats").status_code == 401


def test_modified_cookie_is_invalid(login: Login) -> None:
    client = login()
    good = client.cookies[COOKIE]
    version, number, opened, nonce, mac = good.split(".")
    later = str(int(opened) + 3600)
    forged = [
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        ".".join((version, number, later, nonce, mac)),
        ".".join((version, "00000000", opened, nonce, mac)),
        "",
        "1.x",
    ]
    for cookie in forged:
        answer = httpx.get(client.base_url.join("/v1/stats"), cookies={COOKIE: cookie})
        assert answer.status_code == 401, cookie
    assert httpx.get(client.base_url.join("/v1/stats"), cookies={COOKIE: good}).status_code == 200


def test_logout_invalidates_a_kept_cookie(login: Login) -> None:
    client = login()
    kept, csrf = client.cookies[COOKIE], csrf_of(client)
    assert client.post("/logout", data={"csrf": "0" * 64}).status_code == 403
    assert client.get("/").status_code == 200
    answer = client.post("/logout", data={"csrf": csrf})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert client.get("/").status_code == 303
    assert httpx.get(client.base_url.join("/v1/stats"), cookies={COOKIE: kept}).status_code == 401


# --- changes by cookie -----------------------------------------------------------------------------------------------

CHANGES = [
    ("PUT", "/v1/blobs/csrf"), ("POST", "/v1/blobs/csrf"), ("DELETE", "/v1/blobs/csrf"), ("POST", "/v1/undelete/csrf"),
    ("POST", "/v1/uploads"), ("PATCH", "/v1/uploads/x"), ("DELETE", "/v1/uploads/x"), ("PATCH", "/v1/config"),
    ("POST", "/v1/dead/replay"), ("POST", "/v1/dead/drop"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_change_by_cookie_needs_token_and_origin(login: Login, method: str, path: str) -> None:
    """Require the page's token and its origin for a change by cookie."""
    client = login()
    csrf, other = csrf_of(client), csrf_of(login())
    origin = str(client.headers.pop("origin"))
    before = client.get("/v1/blobs/csrf").status_code
    refused: list[dict[str, str]] = [
        {},
        {"Origin": origin},
        {"Origin": origin, CSRF_HEADER: other},
        {CSRF_HEADER: csrf},
        {"Origin": "https://evil.example", CSRF_HEADER: csrf},
        {"Origin": "null", CSRF_HEADER: csrf},
        {"Origin": origin, "Sec-Fetch-Site": "same-site", CSRF_HEADER: csrf},
    ]
    for headers in refused:
        answer = client.request(method, path, content=b"{}", headers=headers)
        assert answer.status_code == 403, headers
        assert answer.json()["type"].rpartition(":")[2] in ("cross-site", "bad-csrf")
    assert client.get("/v1/blobs/csrf").status_code == before
    passed = client.request(method, path, content=b"{}", headers={"Origin": origin, CSRF_HEADER: csrf})
    assert passed.status_code not in (401, 403)
    if passed.status_code == 201:
        client.delete("/v1/blobs/csrf", headers={"Origin": origin, CSRF_HEADER: csrf})


def test_session_has_its_tokens_scopes_only(login: Login, folder: Path) -> None:
    """Give a session the scopes and tenant of its token, and no more."""
    client = login(tokens.create(folder / "tokens.json", "default", ["read"])[0])
    csrf = csrf_of(client)
    assert client.put("/v1/blobs/x", content=b"x", headers={CSRF_HEADER: csrf}).status_code == 403
    overview = client.get("/").text
    assert "/ui/settings" not in overview
    for page in ("/ui/pipeline", "/ui/upkeep", "/ui/settings"):
        answer = client.get(page)
        assert (answer.status_code, "scope operator" in answer.text) == (403, True)
    blob = client.get("/ui/blob", params={"key": "db/dump"}).text
    assert "data-delete" not in blob
    other = login(tokens.create(folder / "tokens.json", "other", tokens.SCOPES)[0])
    answer = other.get("/ui/blob", params={"key": "db/dump"})
    assert (answer.status_code, "there is none" in answer.text) == (404, True)


# --- without tokens --------------------------------------------------------------------------------------------------


def test_cross_site_without_tokens_is_refused(tmp_path: Path) -> None:
    """Refuse changes and reads of another site's page without tokens."""
    with running(embedded(tmp_path / "store")) as found, found.client() as client:
        assert client.get("/").status_code == 200
        assert client.put("/v1/blobs/a", content=b"a").status_code == 201
        assert client.put("/v1/blobs/b", content=b"b", headers={"Origin": found.url}).status_code == 201
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "evil.example", "Origin": "http://evil.example"},
        ):
            assert client.post("/v1/blobs/c", content=b"c", headers=headers).status_code == 403, headers
        for path in ("/", "/v1/blobs/a", "/v1/config"):
            assert client.get(path, headers={"Host": f"evil.example:{found.port}"}).status_code == 403
            for host in ("localhost", "127.0.0.1", f"LOCALHOST:{found.port}", f"[::1]:{found.port}"):
                assert client.get(path, headers={"Host": host}).status_code == 200
        assert client.get("/v1/blobs/c").status_code == 404
        assert client.get("/login").headers["location"] == "/"


def test_dashboard_switched_off_has_no_pages(tmp_path: Path) -> None:
    with running(embedded(tmp_path / "store", {"dashboard": {"enabled": False}})) as found, found.client() as client:
        for path in ("/", "/login", "/ui/blobs", "/ui/static/dashboard.js"):
            assert client.get(path).status_code == 404
        assert client.get("/v1/growth").status_code == 200


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, "/login", "/ui/blob?key=nothing"])
def test_pages_have_the_strict_policy(login: Login, page: str) -> None:
    """Send the strict content policy with every page, which breaks none of it."""
    answer = login().get(page)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert "unsafe" not in POLICY
    for tag in re.findall(r"<[a-zA-Z][^>]*>", answer.text):
        assert " style=" not in tag
        assert not re.search(r"\son[a-z]+\s*=", tag), tag
        assert "//" not in re.sub(r'xmlns="[^"]*"', "", tag), tag
    assert re.findall(r"<script[^>]*>[^<]+</script>|<style", answer.text) == []


def test_client_names_are_text_in_every_page(login: Login) -> None:
    client = login()
    blob = client.get("/ui/blob", params={"key": EVIL}).text
    for text in (
        client.get("/ui/blobs").text,
        blob,
        client.get("/").text,
        client.get("/ui/blobs", params={"prefix": EVIL}).text,
    ):
        assert "<script>alert" not in text
        assert "alert(1)" not in text or escape("<script>alert(1)") in text
    assert "&lt;b&gt;" in blob


def test_overview_equals_the_api(login: Login) -> None:
    client = login()
    time.sleep(STATS_SECONDS)  # a put of a moment ago is in none of them, or in all
    stats, reduction = client.get("/v1/stats").json(), client.get("/v1/reduction").json()["tenants"][0]
    growth = client.get("/v1/growth").json()
    assert reduction["logical_bytes"] == stats["logical_bytes"]
    assert abs(reduction["stored_bytes"] - stats["stored_bytes"]) <= 1
    assert abs(sum(row["stored_bytes"] for row in reduction["prefixes"]) - stats["stored_bytes"]) <= len(
        reduction["prefixes"]
    )
    assert {row["prefix"] for row in reduction["prefixes"]} >= {"db/", "web/", "evil/"}
    database = next(row for row in reduction["prefixes"] if row["prefix"] == "db/")
    versions = client.get("/v1/blobs/db/dump/versions").json()["versions"]
    assert (database["versions"], database["logical_bytes"]) == (3, sum(entry["size_bytes"] for entry in versions))
    assert database["reduction_ratio"] > 2
    last = growth["points"][-1]
    assert (last["logical_bytes"], growth["read"]) == (stats["logical_bytes"], growth["versions"])
    assert abs(last["stored_bytes"] - stats["stored_bytes"]) <= 1
    logical = [point["logical_bytes"] for point in growth["points"]]
    assert logical == sorted(logical)
    page = client.get("/").text
    assert f'<dd id="card-versions">{stats["versions"]}</dd>' in page
    assert re.search(r'<dd id="card-logical">[0-9.]+ MB</dd>', page)


def test_pages_read_the_index_off_the_loop(
    login: Login, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the index on a thread of the pool, never on the serving loop."""
    asked: list[str] = []

    def whole(_listing: StoreListing) -> bool:
        asked.append(threading.current_thread().name)
        return True

    monkeypatch.setattr(StoreListing, "is_complete", property(whole))
    client = login()
    for page in PAGES:
        assert client.get(page).status_code == 200
    assert asked
    assert "gateway" not in asked  # the loop's thread


def test_blob_page_shows_kinds_and_versions(login: Login) -> None:
    """Show each kind of chunk and all versions."""
    client = login()
    answer = client.get("/v1/explain/db/dump").json()
    page = client.get("/ui/blob", params={"key": "db/dump"}).text
    for kind in ("duplicate", "delta"):
        assert answer["kinds"][kind]["chunks"]
        assert f'class="kind-{kind}"' in page
    assert re.findall(r'data-delete="db/dump" data-version="([0-9])"', page) == ["3", "2", "1"]
    first = client.get("/ui/blob", params={"key": "db/dump", "version": "1"}).text
    assert '<h2 id="version-title">Version 1</h2>' in first


def test_lists_lead_from_page_to_page_and_name_every_key_once(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 8)
    client = login()
    csrf = csrf_of(client)
    wanted = {f"many/{number:03}" for number in range(20)}
    for key in wanted:
        client.put(f"/v1/blobs/{key}", content=key.encode(), headers={CSRF_HEADER: csrf})
    url, seen, turned = "/ui/blobs?prefix=many%2F", list[str](), 0
    while url:
        text = client.get(url).text
        seen += re.findall(r'<th scope="row" class="name"><a href="[^"]*">(many/[0-9]+)</a>', text)
        following = re.search(r'rel="next" href="([^"]*)"', text)
        url, turned = (following[1].replace("&amp;", "&") if following else ""), turned + 1
    assert (sorted(seen), turned) == (sorted(wanted), 3)


def test_changed_setting_applies_and_is_audited(login: Login) -> None:
    client = login()
    headers = {CSRF_HEADER: csrf_of(client), "Content-Type": "application/merge-patch+json"}
    assert (
        client.patch("/v1/config", json={"features": {"algorithm": "ntransform"}}, headers=headers).status_code == 200
    )
    newest = client.get("/v1/audit").json()["changes"][0]
    assert newest["changes"] == {"features": {"algorithm": "ntransform"}}
    page = client.get("/ui/settings").text
    assert "<option selected>ntransform</option>" in page
    assert newest["by"] in page
    assert client.patch("/v1/config", json={"features": {"algorithm": None}}, headers=headers).status_code == 200
    assert client.get("/v1/audit").json()["changes"][0]["changes"] == {}


def test_commits_appear_in_the_last_hour(login: Login) -> None:
    answer = login().get("/v1/pipeline").json()
    assert (answer["embedded"], answer["stages"], len(answer["minutes"])) == (True, [], 60)
    assert sum(minute["committed"] for minute in answer["minutes"]) >= 5
    assert sum(minute["logical_bytes"] for minute in answer["minutes"]) >= 1_250_000


def test_damage_is_shown_on_the_upkeep_page(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.put("a", records_like(300_000, 5))
        container = next((tmp_path / "store/containers").rglob("*.nkc"))
        with container.open("r+b") as file:
            file.seek(5_000)
            file.write(bytes(64))
        assert store.verify().damage
    with running(embedded(tmp_path / "store")) as found, found.client() as client:
        answer = client.get("/v1/scrub").json()
        assert answer["quarantined_containers"] == 1
        page = client.get("/ui/upkeep").text
        assert answer["quarantined"][0]["object_name"] in page
        assert '<dd class="problem">1</dd>' in page


def test_both_interface_documents_are_served(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        assert client.get("/openapi.json").json() == json.loads(json.dumps(openapi_document()))
        assert client.get("/asyncapi.json").json() == json.loads(json.dumps(document()))


def test_assets_are_few_and_revalidated(gateway: RunningGateway) -> None:
    """Serve a fixed set of assets and revalidate them by their tag."""
    with gateway.client() as client:
        for name, media in (
            ("dashboard.js", "text/javascript"),
            ("dashboard.css", "text/css"),
            ("icon.svg", "image/svg+xml"),
        ):
            answer = client.get(f"/ui/static/{name}")
            assert answer.headers["content-type"].partition(";")[0] == media
            again = client.get(f"/ui/static/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("..%2Frendering.py", "%2E%2E/rendering.py", "none.js", "rendering.py"):
            assert client.get(f"/ui/static/{name}").status_code == 404
