"""Run chaos briefly; `benchmarks/chaos.py` is the long run.

The failure's text contains the seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.chaos import MODES, Chaos


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_pipeline_under_chaos_keeps_its_promises(
    tmp_path: Path, need: Callable[[Callable[[], Any]], Any], capsys: Any, mode: str
) -> None:
    """Every acknowledged blob restores though workers, gateway and servers die, and stages move between processes."""
    seed = secrets.randbelow(1_000_000)
    report = need(lambda: Chaos(tmp_path, seed, 24, 6, print, mode).run())
    assert not report.problems, report
    assert report.created + report.accepted == 24, report
