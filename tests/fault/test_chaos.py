"""Run chaos briefly; `benchmarks/chaos.py` is the long run.

The failure's text contains the seed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.chaos import MODES, Chaos, ChaosFleet
from tests.support.engines.durability import Promises
from tests.support.servers.server import free_port


def test_clients_end_when_a_server_stays_away() -> None:
    """Puts that nothing answers end at once, not after the ten minutes of their tries."""
    promises = Promises(1, 4, free_port())
    timer = threading.Timer(0.5, promises.end_puts)
    timer.start()
    began = time.monotonic()
    puts = promises.put_all()
    assert time.monotonic() - began < 30
    assert len(puts) == 4
    assert all(put.cut and put.created is None and not put.accepted for put in puts)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_pipeline_under_chaos_keeps_its_promises(
    tmp_path: Path, need: Callable[[Callable[[], Any]], Any], capsys: Any, mode: str
) -> None:
    """Every acknowledged blob restores though workers, gateway and servers die, and stages move between processes."""
    seed = secrets.randbelow(1_000_000)
    report = need(lambda: Chaos(tmp_path, seed, 24, 6, print, ChaosFleet(mode)).run())
    assert not report.problems, report
    assert report.created + report.accepted == 24, report


@pytest.mark.soak
@pytest.mark.parametrize(
    "fleet",
    [
        ChaosFleet("fused", shards=2),
        ChaosFleet("split", shards=1),
        ChaosFleet("to-split", edge=True, gc_mode="hybrid", shards=2),
    ],
    ids=["fused", "split", "all"],
)
def test_pipeline_on_shards_under_chaos_keeps_promises(
    tmp_path: Path, need: Callable[[Callable[[], Any]], Any], fleet: ChaosFleet
) -> None:
    """The same without Redis, while index shards die, do not answer, and lose their index; no read is wrong."""
    seed = secrets.randbelow(1_000_000)
    report = need(lambda: Chaos(tmp_path, seed, 24, 6, print, fleet).run())
    assert not report.problems, report
    assert report.created + report.accepted == 24, report
    assert report.reads, report
