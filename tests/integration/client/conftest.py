"""Provide a client and a gateway with scripted failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import nearkin
from nearkin.client import http
from nearkin.client.sync import RemoteStore
from tests.support.fakes.scripted_gateway import TOKEN, ScriptedGateway


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_jitter", lambda _state: 0.001)
    for name in [name for name in os.environ if name.startswith("NEARKIN_TOKEN")]:
        monkeypatch.delenv(name)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(tmp_path / "store") as server:
        yield server


@pytest.fixture
def store(gateway: ScriptedGateway) -> Iterator[RemoteStore]:
    with nearkin.connect(gateway.url, TOKEN, commit_seconds=5.0) as opened:
        yield opened
