"""Probes of an index shard, as a process, while it waits for a store, completes its index, answers and stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nearkin import open_store
from nearkin.lab.generated_data import text_like
from nearkin_index.shard_server import ShardOptions, ShardServer
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.limits import MIB
from nearkin_shared.observability.health import Pulse
from tests.support.checks.waiting import until
from tests.support.data.stores import SMALL
from tests.support.data.stores import settings as chosen
from tests.support.servers.index_shards import ContainerShelf
from tests.support.servers.server import free_port
from tests.support.servers.shard_process import ShardProcess


class MonitoredShard(ShardProcess):
    """A shard that has a monitor, over a store in a folder."""

    def __init__(self, folder: Path, number: int = 0, count: int = 1) -> None:
        self.store = folder / "store"
        self.monitor_port = free_port()
        environment = {
            "NEARKIN_STORE": str(self.store),
            "NEARKIN_STORAGE__CREATE": "true",
            "NEARKIN_INDEX__MAP_BYTES": "64MiB",
            "NEARKIN_MONITOR__PORT": str(self.monitor_port),
        }
        super().__init__(folder / f"shard-{number}", number, count, environment)

    def fill(self) -> None:
        """Put a blob into the store."""
        with open_store(self.store, settings=chosen(SMALL, {"store": str(self.store)}), create=True) as opened:
            opened.put("k", text_like(200_000, 1))

    def probe(self, path: str) -> httpx.Response:
        """Return what the monitor answers."""
        return httpx.get(f"http://127.0.0.1:{self.monitor_port}{path}", timeout=10)

    def ready(self) -> bool:
        """Return whether its monitor answers, whatever the state of the index is."""
        try:
            return self.probe("/livez").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[MonitoredShard]:
    made = MonitoredShard(tmp_path)
    yield made
    made.stop()


def test_shard_without_a_store_is_live_and_not_ready(tmp_path: Path) -> None:
    """All but the first one wait for the store."""
    with MonitoredShard(tmp_path, 1, 2) as second:
        found = second.probe("/readyz")
        assert (found.status_code, found.json()["servers"]) == (503, "still connecting")
        second.fill()
        until(lambda: second.probe("/readyz").status_code == 200)


def test_shard_is_ready_once_its_index_is_complete(shard: MonitoredShard) -> None:
    """It is live while it cannot read the containers."""
    shard.fill()
    containers, away = shard.store / "containers", shard.store / "away"
    containers.rename(away)
    containers.touch()
    shard.start()
    until(lambda: shard.probe("/readyz").json().get("index") == "the index is being completed")
    assert shard.probe("/livez").status_code == 200
    assert httpx.get(f"{shard.url}/readyz").status_code == 503
    containers.unlink()
    away.rename(containers)
    until(lambda: shard.probe("/readyz").status_code == 200)
    assert httpx.get(f"{shard.url}/readyz").status_code == 200


def test_shard_shows_the_metrics_of_its_index(shard: MonitoredShard) -> None:
    """They are those of every process with an index."""
    shard.fill()
    shard.start()
    until(lambda: shard.probe("/readyz").status_code == 200)
    assert "nearkin_index_reads_total" in shard.probe("/metrics").text


def test_idle_shard_reports_that_it_is_alive(tmp_path: Path) -> None:
    """The loop that answers calls makes steps without any call; a shard that stops is not ready."""
    pulse, options = Pulse(), ShardOptions(0, 1, tmp_path, port=free_port(), map_bytes=64 * MIB)
    server = ShardServer(options, ContainerShelf().store_of(0, 1))
    with pytest.raises(StoreUnavailable, match="being completed"):
        server.check_ready()
    thread = threading.Thread(target=server.run, args=(pulse.beat,))
    thread.start()
    try:
        until(lambda: server.shard.calls is not None)
        server.check_ready()
        time.sleep(1.5)
        assert pulse.silent_seconds < 1.0
    finally:
        server.stop()
        thread.join(20)
    with pytest.raises(StoreUnavailable, match="stops"):
        server.check_ready()
