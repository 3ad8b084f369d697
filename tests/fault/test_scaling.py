"""Change the number of workers under load, in both modes.

The failure's text contains the seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.scaling import SCALED, Scaling

BLOBS = 70


@pytest.mark.soak
@pytest.mark.parametrize("mode", SCALED)
def test_replicas_from_one_to_four_and_back_lose_nothing(
    tmp_path: Path, need: Callable[[Callable[[], Any]], Any], mode: str
) -> None:
    """Every acknowledged blob restores, and none is stored twice, though workers join and leave meanwhile."""
    report = need(lambda: Scaling(tmp_path, secrets.randbelow(1_000_000), BLOBS, mode, print).run())
    assert not report.problems, report
    assert report.created + report.accepted == BLOBS, report
