"""Test the health endpoint of a process over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from nearkin_shared.config.loader import load
from nearkin_shared.config.services import MonitorSettings
from nearkin_shared.errors import ConfigError, StoreUnavailable
from nearkin_shared.observability import health as monitoring
from nearkin_shared.observability import metrics, readiness
from nearkin_shared.observability.health import Monitor

SETTINGS = MonitorSettings(port=0, stall_seconds=10)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    made = Monitor(SETTINGS)
    made.start()
    yield made
    made.stop()


def asked(monitor: Monitor, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{monitor.port}{path}", timeout=10)


def test_loop_without_a_step_for_long_is_not_live(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(monitoring, "time", SimpleNamespace(monotonic=lambda: now))
    pulse = monitor.pulse("delta")
    monitor.pulse("committer")
    assert (asked(monitor, "/livez").status_code, asked(monitor, "/livez").json()) == (200, {"status": "ok"})
    now += 11.25
    assert set(monitor.stalled_loops()) == {"delta", "committer"}
    pulse.beat()
    answer = asked(monitor, "/livez")
    assert (answer.status_code, answer.json()) == (503, {"status": "stalled", "committer": "no step for 11 s"})


def test_readiness_follows_connection_checks_and_stop(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "VALID_SECONDS", 0.0)
    away = True
    asks = 0

    def redis() -> None:
        nonlocal asks
        asks += 1
        if away:
            raise StoreUnavailable("redis 127.0.0.1:6379: refused")

    assert asked(monitor, "/readyz").json() == {"status": "not ready", "servers": "still connecting"}
    monitor.on_connect({"redis": redis, "kafka": lambda: None})
    answer = asked(monitor, "/readyz")
    assert (answer.status_code, answer.json()["redis"]) == (503, "redis 127.0.0.1:6379: refused")
    assert asked(monitor, "/livez").status_code == 200  # a restart would not bring Redis back
    away = False
    assert asked(monitor, "/readyz").status_code == 200
    monkeypatch.setattr(readiness, "VALID_SECONDS", 60.0)
    before = asks
    assert [asked(monitor, "/readyz").status_code for _ in range(3)] == [200] * 3
    assert asks == before
    monitor.stopping()
    assert asked(monitor, "/readyz").status_code == 503


def test_metrics_are_prometheus_text(monitor: Monitor) -> None:
    metrics.BLOBS.labels("committed")
    answer = asked(monitor, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE nearkin_blobs_total counter" in answer.text
    assert "process_resident_memory_bytes" in answer.text
    assert asked(monitor, "/other").status_code == 404


def test_used_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f'monitor.port "{port}" on 127.0.0.1: Address already in use'):
            Monitor(replace(SETTINGS, port=port)).start()


def test_without_a_port_nothing_listens() -> None:
    assert load()[0].monitor.port is None
    silent = Monitor(MonitorSettings())
    silent.start()
    assert silent.port is None
    silent.stop()
