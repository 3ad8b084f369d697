"""Test dashboard sessions and tokens, one test for each rule that is checked on use."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from starlette.requests import HTTPConnection

from nearkin_gateway.auth import tokens
from nearkin_gateway.auth.sessions import CLOSED_MAX, Sessions, check_loopback_host, check_same_origin
from nearkin_gateway.auth.tokens import AccessToken, TokenFile
from nearkin_gateway.http.problems import Problem

SECRET = b"s" * 32
SESSION_SECONDS = 3600
DAY_SECONDS = 86_400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def token(path: Path) -> AccessToken:
    return tokens.create(path, "t", ["read"], days=1)[1]


@pytest.fixture
def sessions(path: Path, token: AccessToken, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    return Sessions(SECRET, TokenFile(path), 10 * DAY_SECONDS)


def connection(**headers: str) -> HTTPConnection:
    """Return a connection that was opened with these headers."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw})


def test_session_of_expired_token_is_over(sessions: Sessions, token: AccessToken) -> None:
    """F.32: a session ends with the token that opened it, before its own time is over."""
    now = time.time()
    cookie = sessions.open(token, now)
    assert sessions.read(cookie, now + DAY_SECONDS - 60) is not None
    assert sessions.read(cookie, now + DAY_SECONDS + 60) is None


def test_session_of_revoked_token_is_over(sessions: Sessions, token: AccessToken, path: Path) -> None:
    """F.32: a session ends when its token is revoked."""
    now = time.time()
    cookie = sessions.open(token, now)
    assert sessions.read(cookie, now) is not None
    tokens.revoke(path, token.id)
    assert sessions.read(cookie, now) is None


def test_session_of_replaced_token_is_refused(sessions: Sessions, token: AccessToken, path: Path) -> None:
    """F.32: a session belongs to one token.

    Another token with the same id does not continue it.
    """
    now = time.time()
    cookie = sessions.open(token, now)
    path.write_text(path.read_text().replace(token.sha256, "0" * 64) + "\n")
    assert sessions.read(cookie, now) is None


def test_session_past_its_time_is_over(path: Path, token: AccessToken) -> None:
    """F.32: a session ends in time, though its token is still valid."""
    sessions = Sessions(SECRET, TokenFile(path), SESSION_SECONDS)
    now = time.time()
    cookie = sessions.open(token, now)
    assert sessions.read(cookie, now + SESSION_SECONDS - 60) is not None
    assert sessions.read(cookie, now + SESSION_SECONDS + 1) is None


def test_session_with_changed_cookie_is_refused(sessions: Sessions, token: AccessToken) -> None:
    """F.32: a cookie whose MAC does not verify opens nothing.

    Neither with a later time, nor of another store.
    """
    now = time.time()
    cookie = sessions.open(token, now - 100)
    kind, number, opened, nonce, mac = cookie.split(".")
    assert sessions.read(cookie, now) is not None
    for changed in (
        ".".join((kind, number, str(int(opened) + 50), nonce, mac)),
        ".".join((kind, number, opened, "0" * 32, mac)),
        ".".join((kind, number, opened, nonce, "0" * 64)),
        Sessions(b"o" * 32, sessions._tokens, SESSION_SECONDS).open(token, now),
    ):
        assert sessions.read(changed, now) is None, changed


def test_session_logged_out_is_over_and_bounded(sessions: Sessions, token: AccessToken) -> None:
    """F.32: a logged out session is refused, and the memory of such sessions is bounded."""
    now = time.time()
    cookie, other = sessions.open(token, now), sessions.open(token, now)
    sessions.close(cookie)
    assert sessions.read(cookie, now) is None
    assert sessions.read(other, now) is not None
    for number in range(CLOSED_MAX + 1):
        sessions.close(str(number))
    assert len(sessions._closed) == CLOSED_MAX


def test_session_csrf_differs_from_its_cookie_mac(sessions: Sessions, token: AccessToken) -> None:
    """F.32: the CSRF token is not the MAC in the cookie, and each session has its own."""
    now = time.time()
    cookies = [sessions.open(token, now) for _ in range(2)]
    found = [sessions.read(cookie, now) for cookie in cookies]
    secrets = {session.csrf for session in found if session is not None}
    assert len(secrets | {cookie.rpartition(".")[2] for cookie in cookies}) == 4


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site", "host": "here"},
        {"sec_fetch_site": "same-site", "origin": "http://here", "host": "here"},
        {"origin": "http://there", "host": "here"},
        {"origin": "null", "host": "here"},
        {"host": "here"},
    ],
)
def test_change_of_another_site_is_refused(headers: dict[str, str]) -> None:
    """F.32: with a session, a change from another site's page or without an origin is refused."""
    check_same_origin(connection(origin="http://here", host="here", sec_fetch_site="same-origin"), must_say=True)
    with pytest.raises(Problem) as refused:
        check_same_origin(connection(**headers), must_say=True)
    assert refused.value.status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "1270.0.0.1"])
def test_foreign_host_without_tokens_is_refused(host: str) -> None:
    """F.32: a gateway without tokens answers under loopback names only (DNS rebinding)."""
    for good in ("localhost:8080", "127.0.0.1", "[::1]:80", "127.1.2.3:1"):
        check_loopback_host(connection(host=good))
    with pytest.raises(Problem) as refused:
        check_loopback_host(connection(host=host))
    assert refused.value.status == 403


def test_token_with_wrong_secret_is_not_found(path: Path) -> None:
    """F.32: a token is identified by its secret, not by its id alone."""
    text, token = tokens.create(path, "t", ["read"])
    found = TokenFile(path)
    assert found.find(text) == token
    assert found.find(f"nk_{token.id}_{'A' * 43}") is None
    assert found.find(text[:-1] + ("A" if text[-1] != "A" else "B")) is None


def test_token_revoked_is_not_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.32: a revoked token is refused from the next read of the file on."""
    monkeypatch.setattr(tokens, "LOOK_SECONDS", 0.0)
    text, token = tokens.create(path, "t", ["read"])
    found = TokenFile(path)
    tokens.revoke(path, token.id)
    assert found.find(text) is None
    assert found.by_id(token.id) is None


def test_token_expires_with_its_last_day(path: Path) -> None:
    """F.32: a token is expired from the second on that it names."""
    _, token = tokens.create(path, "t", ["read"], days=1)
    assert token.expires is not None
    assert not token.expired(token.expires - 1)
    assert token.expired(token.expires)


def test_tokens_file_is_private_and_holds_no_token(path: Path) -> None:
    """F.32: only its owner can read the token file, and no token can be derived from it."""
    text, _ = tokens.create(path, "t", ["read"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert text.rpartition("_")[2] not in path.read_text()
