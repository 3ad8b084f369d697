"""Provide a gateway per test file, and a client; files with other settings have their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers.gateways import RunningGateway, embedded, running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running(embedded(tmp_path_factory.mktemp("store"))) as found:
        yield found


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[httpx.Client]:
    with gateway.client() as found:
        yield found
