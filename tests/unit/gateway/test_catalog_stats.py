"""Test how long a gateway caches the statistics of its catalog."""

from __future__ import annotations

import pytest

from nearkin_gateway.catalog.version_catalog import STATS_SECONDS, STATS_SHARE, _CachedStats
from nearkin_shared.results import Stats

CHEAP, COSTLY = 0.01, 1.0


@pytest.mark.parametrize(
    ("took", "changed", "age", "fresh"),
    [
        (CHEAP, False, STATS_SECONDS / 2, True),
        (CHEAP, False, STATS_SECONDS * 2, False),
        (CHEAP, True, 0.001, False),
        (COSTLY, True, COSTLY / STATS_SHARE / 2, True),
        (COSTLY, False, COSTLY / STATS_SHARE * 1.1, False),
    ],
)
def test_costly_stats_are_kept_for_a_share_of_time(took: float, changed: bool, age: float, fresh: bool) -> None:
    """F.28: a caller that requests statistics all the time uses a bounded share of a core."""
    kept = _CachedStats(Stats.__new__(Stats), 100.0, 100.0 + took, changed)
    assert kept.is_fresh(100.0 + took + age) is fresh
