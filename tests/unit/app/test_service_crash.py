"""Check that a service is killed at each failpoint that only services pass."""

from __future__ import annotations

from nearkin_shared.utils.failpoints import POINTS, SERVICE_POINTS
from tests.support.engines.service_crash import DYING

SELDOM = {"lease.renewed"}
"""A lease is renewed only in a GC run of more than ten seconds."""


def test_each_service_failpoint_is_a_crash_point() -> None:
    dying = {point for points in DYING.values() for point in points}
    assert dying >= SERVICE_POINTS.keys() - SELDOM
    assert dying <= POINTS.keys()
    assert len(dying) >= 25
