"""Test that the client and the commands agree with the real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nearkin
from nearkin.cli import main
from nearkin.cli.exit_codes import ExitCode
from nearkin.client import http, requests
from nearkin.embedded.gateway_backend import EmbeddedIngest
from nearkin_gateway.auth import tokens
from nearkin_shared.errors import AccessDenied, BadInput, ConfigError, NotFound, StoreUnavailable
from nearkin_shared.observability import metrics
from tests.support.servers.gateways import RunningGateway, embedded, running

KEYS = ("a/b", "..", ".", "ä ö%2F?#&=+", "versions", "x/versions", "a//b/", "\u202e\n", "k" * 1024)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("client")
    os.environ.pop("NEARKIN_TOKEN", None)
    text = tokens.create(folder / "tokens.json", "default", tokens.SCOPES)[0]
    (folder / "token").write_text(text)
    (folder / "reader").write_text(tokens.create(folder / "tokens.json", "default", ["read"])[0])
    with running(embedded(folder / "store", {"auth": {"tokens_file": str(folder / "tokens.json")}})) as found:
        yield found


@pytest.fixture(scope="module")
def token(gateway: RunningGateway) -> str:
    return (gateway.store.parent / "token").read_text()


def test_client_puts_and_gets_any_key(gateway: RunningGateway, token: str) -> None:
    data = os.urandom(3_000_000)
    with nearkin.connect(gateway.url, token) as store:
        for key in KEYS:
            metadata = {"Host": "db1", "ключ": "линия\n"}
            result = store.put(key, data, metadata=metadata)
            assert (result.info.key, result.info.version, result.info.metadata) == (key, 1, metadata)
            assert result.ledger.logical_bytes == len(data)
            assert store.get(key).read() == data
            assert store.get(key, start=1_000_000, stop=1_000_010).read() == data[1_000_000:1_000_010]
            assert store.info(key).metadata == metadata
        store.put("a/b", b"second")
        assert {info.key for info in store.versions()} == set(KEYS)
        assert [info.version for info in store.versions("a/b", all_versions=True)] == [1, 2]
        assert sum(segment.length_bytes for segment in store.explain("a/b", 1).segments) == len(data)
        assert store.stats().versions == len(KEYS) + 1
        with pytest.raises(NotFound):
            store.get("nothing").read()


def test_put_outlasting_the_timeout_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a put whose commit takes longer than any read timeout."""
    monkeypatch.setattr(http, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(http, "ATTEMPTS_MAX", 3)
    monkeypatch.setattr(http, "BACKOFF_SECONDS_MAX", 0.5)
    monkeypatch.setattr(requests, "WAIT_SECONDS", 0.1)
    plain, released = EmbeddedIngest._put, threading.Event()

    def slow(ingest: EmbeddedIngest, jobs: list[Any]) -> None:
        released.wait(30)
        plain(ingest, jobs)

    monkeypatch.setattr(EmbeddedIngest, "_put", slow)
    with running(embedded(tmp_path)) as gateway:
        with (
            nearkin.connect(gateway.url, commit_seconds=0.1) as store,
            pytest.raises(StoreUnavailable, match="running"),
        ):
            store.put("given up", b"it goes on by itself")
        later = threading.Timer(4.0, released.set)
        later.start()
        with nearkin.connect(gateway.url, commit_seconds=60.0) as store:
            assert store.put("slow", b"committed in the end").info.version == 1
            assert [info.version for info in store.versions("slow", all_versions=True)] == [1]
        later.join()


def test_client_changes_settings_or_is_refused(gateway: RunningGateway, token: str) -> None:
    """Change settings with the client, which reports refused ones."""
    with nearkin.connect(gateway.url, token) as store:
        assert store.change_config({"features": {"algorithm": "odess"}})["settings"]["features"]["algorithm"] == "odess"
        refused = metrics.CONFIG_REFUSED._value.get()
        with pytest.raises(ConfigError, match="choose finesse"):
            store.change_config({"features": {"algorithm": "odes"}})
        with pytest.raises(ConfigError, match="not a hot setting"):
            store.change_config({"store": {"folder": "elsewhere"}})
        assert metrics.CONFIG_REFUSED._value.get() == refused + 2  # the alert NearkinSettingsRefused
        store.change_config({"service": {"read_only": True}})
        with pytest.raises(StoreUnavailable, match="read_only"):
            store.put("refused", b"x")
        store.change_config({"features": {"algorithm": None}, "service": {"read_only": None}})
        with pytest.raises(BadInput, match="SHA-256"):
            store.put("refused", b"x", sha256=bytes(32))


def test_token_without_scope_is_denied(gateway: RunningGateway) -> None:
    reader = (gateway.store.parent / "reader").read_text()
    with nearkin.connect(gateway.url, reader) as store:
        with pytest.raises(AccessDenied):
            store.put("denied", b"x")
        with pytest.raises(AccessDenied):
            store.config()
    with nearkin.connect(gateway.url, "nk_00000000_" + "A" * 43) as store, pytest.raises(AccessDenied):
        store.versions()


def test_asyncio_client_returns_the_same(gateway: RunningGateway, token: str) -> None:
    async def run() -> None:
        async with nearkin.connect_async(gateway.url, token) as store:
            results = [result async for result in store.put_many((f"async/{n}", b"%d" % n) for n in range(20))]
            assert [result.info.key for result in results] == [f"async/{n}" for n in range(20)]
            assert await (await store.get("async/7")).read() == b"7"

    asyncio.run(run())


def test_command_line_works_on_a_server(
    gateway: RunningGateway,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NEARKIN_TOKEN", token)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(200_000))
    server = ("--server", gateway.url)
    assert main([*server, "put", "cli/blob", str(source), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["version"] == 1
    assert main([*server, "get", "cli/blob", "-o", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    capfd.readouterr()
    assert main([*server, "ls", "cli/", "--json"]) == 0
    assert [entry["key"] for entry in json.loads(capfd.readouterr().out)] == ["cli/blob"]
    assert main([*server, "get", "cli/nothing"]) == ExitCode.NOT_FOUND
