"""Test error responses: the client raises its own errors, and none shows a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.client import http
from nearkin.client.sync import RemoteStore
from nearkin_shared.errors import AccessDenied, BadInput, ConfigError, NotFound, PermanentError, RetryableError
from tests.support.data.samples import noise
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway
from tests.support.servers.certificates import self_signed

DATA = noise(300_000, "client").tobytes()


def test_errors_are_the_clients_own(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Raise the client's own errors."""
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
    with pytest.raises(AccessDenied, match="has no scope write"):
        store.put("k", DATA)


def test_bad_token_is_denied_and_never_shown(gateway: ScriptedGateway) -> None:
    """Deny a missing or wrong token, and show it nowhere."""
    for token in (None, "another-token"):
        with nearkin.connect(gateway.url, token) as store, pytest.raises(AccessDenied) as raised:
            store.put("k", DATA)
        assert "another-token" not in str(raised.value)
        assert str(raised.value).endswith("; NEARKIN_TOKEN, or `token` of nearkin.connect, names the token")
    assert len(gateway.seen) == 2


def test_foreign_page_differs_from_gateway_error(store: RemoteStore, gateway: ScriptedGateway) -> None:
    """Distinguish another program's page from a gateway's response."""
    gateway.script("html", "redirect")
    with pytest.raises(PermanentError, match=r"GET http://127.*/v1/stats: not what a Nearkin gateway answers"):
        store.stats()
    with pytest.raises(PermanentError, match=r"302.*http://elsewhere.example/"):
        store.stats()


def test_no_listener_is_retryable_and_named() -> None:
    """Raise a retryable error that names the server if nothing listens."""
    with nearkin.connect("http://127.0.0.1:9", TOKEN) as store, pytest.raises(RetryableError, match=r"127\.0\.0\.1:9"):
        store.stats()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def https(certificates: Path, gateway: ScriptedGateway) -> str:
    gateway.speak_tls(certificates / "cert.pem", certificates / "key.pem")
    return gateway.url.replace("http:", "https:")


def test_own_certificate_is_trusted_where_named(
    https: str, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trust a private certificate where the setting names it."""
    with (
        nearkin.connect(https, TOKEN) as store,
        pytest.raises(PermanentError, match=r"certificate is not trusted.*self-signed.*SSL_CERT_FILE"),
    ):
        store.stats()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
    with nearkin.connect(https, TOKEN) as store:
        assert store.put("k", DATA).info.size_bytes == len(DATA)
        assert store.get("k").read() == DATA


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_file_without_certificates_is_refused(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ConfigError, match=rf"SSL_CERT_FILE={file}: want PEM certificates"):
        nearkin.connect("https://localhost:1", TOKEN)


def test_https_to_plain_port_is_reported_once(gateway: ScriptedGateway) -> None:
    url = gateway.url.replace("http:", "https:")
    with nearkin.connect(url, TOKEN) as store, pytest.raises(PermanentError, match=f"{url}.*speaks no TLS there"):
        store.stats()


def test_open_gets_are_named_when_none_is_left(
    store: RemoteStore, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name the open gets when no connection is left."""
    store.put("k", noise(3_000_000, "left open").tobytes())
    monkeypatch.setattr(http, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(http, "ATTEMPTS_MAX", 2)
    left = [store.get("k").pieces() for _ in range(http.CONNECTIONS_MAX)]
    for pieces in left:
        next(pieces)
    with pytest.raises(RetryableError, match=r"32 calls of this client are at work.*not read to its end"):
        store.stats()
    for pieces in left:
        pieces.close()
    assert store.stats().versions == 1


@pytest.mark.parametrize(
    ("version", "reason", "expected"),
    [
        (1, "r" * 1025, "reason of 1025 bytes.*at most 1024"),
        (1, "\ud800", "reason .*not valid UTF-8"),
        (1, 7, "reason 7: want text"),
        ("1", "", "version '1': want a whole number"),
        (0, "", "versions count from 1"),
    ],
)
def test_unencodable_reason_is_refused_unsent(
    store: RemoteStore, gateway: ScriptedGateway, tmp_path: Path, version: Any, reason: Any, expected: str
) -> None:
    """Refuse, before it is sent, what no tombstone can record."""
    with nearkin.open_store(tmp_path / "local", create=True) as local:
        for one in (store, local):
            for call in (one.delete, one.undelete):
                with pytest.raises(BadInput, match=expected):
                    call("k", version, reason=reason)
    assert gateway.seen == []


@pytest.mark.parametrize("url", ["", "127.0.0.1", "ftp://h", "http://user:pw@h", "http://h?x"])
def test_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="server"):
        nearkin.connect(url)


def test_environment_token_is_not_in_output(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the token from the environment; show it in no representation."""
    monkeypatch.setenv("NEARKIN_TOKEN", TOKEN)
    with nearkin.connect(gateway.url) as store:
        assert store.versions() == []
    assert TOKEN not in repr(http.Endpoint.of(gateway.url, TOKEN))


def test_token_over_plain_http_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Warn of a token sent over plain HTTP to another machine."""
    http.Endpoint.of("http://nearkin.example", TOKEN)
    assert "unencrypted" in caplog.text
    caplog.clear()
    for url in ("https://nearkin.example", "http://localhost:1", "http://[::1]"):
        http.Endpoint.of(url, TOKEN)
    assert caplog.text == ""
