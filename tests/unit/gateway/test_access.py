"""Test the gateway's rate limits and origin checks, one test for each kind of caller."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from nearkin_gateway.auth import access, tokens
from nearkin_gateway.auth.sessions import COOKIE, CSRF_HEADER, Sessions
from nearkin_gateway.auth.tokens import TokenFile
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import Rates

RATE = 3
ADDRESS = "192.0.2.7"


class Refusals:
    """Audit log that keeps its failures in memory."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record_failure(self, actor: object, via: str, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the gateway members that `access` uses.

    `secret` is its only token, and its clock does not advance.
    """
    monkeypatch.setattr("nearkin_gateway.http.request_limits.time", SimpleNamespace(monotonic=lambda: 100.0))
    text, token = tokens.create(tmp_path / "tokens.json", "t", ["read", "write"], days=1)
    known = TokenFile(tmp_path / "tokens.json")
    return SimpleNamespace(
        rates=Rates(RATE),
        tokens=known,
        sessions=Sessions(b"s" * 32, known, 3600),
        audit=Refusals(),
        bounds=SimpleNamespace(cors_origins=("https://app.example",)),
        settings=SimpleNamespace(tenant="t"),
        secret=text,
        token=token,
    )


def request(method: str = "GET", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": method, "headers": raw, "client": (ADDRESS, 1)})


def check_limited(ask: Any) -> None:
    """Check that RATE requests pass and the next one is answered 429."""
    for _ in range(RATE):
        ask()
    with pytest.raises(Problem) as refused:
        ask()
    assert refused.value.status == 429


def test_caller_without_token_has_a_rate(gateway: Any) -> None:
    """F.32: a gateway without tokens limits requests by address."""
    check_limited(lambda: access.open_caller(request(host="localhost"), gateway))


def test_bearer_has_a_rate(gateway: Any) -> None:
    """F.32: requests with a token are limited by token."""
    check_limited(lambda: access.shown_token(request(), gateway, gateway.secret, "bearer"))


def test_guessed_tokens_have_a_rate(gateway: Any) -> None:
    """F.32: unknown tokens are limited by address: RATE answers of 401, then 429."""

    def guess() -> None:
        with pytest.raises(Problem) as refused:
            access.shown_token(request(), gateway, "nk_" + "0" * 40, "bearer")
        if refused.value.status == 429:
            raise refused.value
        assert refused.value.status == 401

    check_limited(guess)


@pytest.mark.parametrize("headers", [{}, {"cookie": f"{COOKIE}=forged"}], ids=["nothing", "forged-session"])
def test_missing_tokens_have_a_rate(gateway: Any, headers: dict[str, str]) -> None:
    """F.28: requests without a token are limited by address, as those with an unknown token."""

    def ask() -> None:
        with pytest.raises(Problem) as refused:
            access._session_token(request(**headers), gateway)
        if refused.value.status == 429:
            raise refused.value
        assert refused.value.status == 401

    check_limited(ask)


def test_session_has_a_rate(gateway: Any) -> None:
    """F.32: requests of a dashboard session are limited by the token that opened it."""
    cookie = gateway.sessions.open(gateway.token, time.time())
    check_limited(lambda: access._session_token(request(cookie=f"{COOKIE}={cookie}"), gateway))
    with pytest.raises(Problem) as refused:  # the token's rate is used up too
        access.shown_token(request(), gateway, gateway.secret, "bearer")
    assert refused.value.status == 429


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost"},
    ],
)
def test_change_of_another_site_without_token_is_refused(gateway: Any, headers: dict[str, str]) -> None:
    """F.32: a gateway without tokens refuses a change from another site's page and records it."""
    access.open_caller(request("PUT", host="localhost", origin="https://app.example"), gateway)
    with pytest.raises(Problem) as refused:
        access.open_caller(request("PUT", host="localhost", **headers), gateway)
    assert refused.value.name == "cross-site"
    assert gateway.audit.reasons == ["cross-site"]


def test_change_of_another_site_with_session_is_refused(gateway: Any) -> None:
    """F.32: a change with a session needs the own origin and the CSRF token."""
    cookie = gateway.sessions.open(gateway.token, time.time())
    csrf = gateway.sessions.read(cookie, time.time()).csrf
    shared = {"cookie": f"{COOKIE}={cookie}", "host": "here"}
    with pytest.raises(Problem) as refused:
        access._session_token(request("PUT", **shared, **{CSRF_HEADER: csrf}, origin="http://there"), gateway)
    assert refused.value.name == "cross-site"
    access._session_token(request("PUT", **shared, **{CSRF_HEADER: csrf}, origin="http://here"), gateway)
