"""Answers that are no successes come as our own errors, and never tell a token."""

from __future__ import annotations

import pytest

import nearkin
from nearkin.client import exchange
from nearkin.client.remote import RemoteStore
from nearkin.errors import (
    BadInput,
    ConfigError,
    Denied,
    NotFound,
    Permanent,
    Retryable,
)
from nearkin.testing.gateway import TOKEN, ScriptedGateway
from nearkin.testing.samples import noise

DATA = noise(300_000, "client").tobytes()


def test_errors_come_as_our_own(store: RemoteStore, gateway: ScriptedGateway) -> None:
    with pytest.raises(NotFound, match="key 'none': the store has none"):
        store.get("none")
    store.put("k", DATA)
    with pytest.raises(NotFound, match="version 9"):
        store.get("k", 9)
    with pytest.raises(BadInput, match="range 5 to 2"):
        store.get("k", start=5, stop=2)
    with pytest.raises(BadInput, match="versions count from 1"):
        store.info("k", 0)
    gateway.script("deny")
    with pytest.raises(Denied, match="has no scope write"):
        store.put("k", DATA)


def test_a_token_that_is_missing_or_wrong_is_denied_and_never_told(gateway: ScriptedGateway) -> None:
    for token in (None, "another-token"):
        with nearkin.connect(gateway.url, token) as store, pytest.raises(Denied) as raised:
            store.put("k", DATA)
        assert "another-token" not in str(raised.value)
    assert len(gateway.seen) == 2


def test_another_program_s_page_is_told_from_a_gateway_s(store: RemoteStore, gateway: ScriptedGateway) -> None:
    gateway.script("html", "redirect")
    with pytest.raises(Permanent, match=r"GET http://127.*/v1/stats: not what a Nearkin gateway answers"):
        store.stats()
    with pytest.raises(Permanent, match=r"302.*http://elsewhere.example/"):
        store.stats()


def test_nobody_listening_is_retryable_and_names_the_server() -> None:
    with nearkin.connect("http://127.0.0.1:9", TOKEN) as store, pytest.raises(Retryable, match=r"127\.0\.0\.1:9"):
        store.stats()


@pytest.mark.parametrize("url", ["", "127.0.0.1", "ftp://h", "http://user:pw@h", "http://h?x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="server"):
        nearkin.connect(url)


def test_the_token_comes_from_the_environment_and_is_not_in_what_is_printed(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARKIN_TOKEN", TOKEN)
    with nearkin.connect(gateway.url) as store:
        assert store.versions() == []
    assert TOKEN not in repr(exchange.Endpoint.of(gateway.url, TOKEN))


def test_a_token_over_plain_http_to_another_machine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    exchange.Endpoint.of("http://nearkin.example", TOKEN)
    assert "unencrypted" in caplog.text
    caplog.clear()
    for url in ("https://nearkin.example", "http://localhost:1", "http://[::1]"):
        exchange.Endpoint.of(url, TOKEN)
    assert caplog.text == ""
