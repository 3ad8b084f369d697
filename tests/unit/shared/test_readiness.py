"""Test readiness with checks that hang, and with checks that many callers request at once."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.observability import readiness
from nearkin_shared.observability.readiness import Readiness


def test_check_that_hangs_runs_once_for_all_callers() -> None:
    """F.15: fifty callers share one check; later ones are answered at once."""
    may_end, runs = threading.Event(), []

    def hang() -> None:
        runs.append(threading.current_thread().name)
        may_end.wait(60)

    found = Readiness({"object store": hang, "kafka": lambda: None}, deadline_seconds=0.2)
    try:
        with ThreadPoolExecutor(50) as callers:
            answers = list(callers.map(lambda _: found.missing(), range(50)))
        assert [list(answer) for answer in answers] == [["object store"]] * 50
        began = time.monotonic()
        assert asyncio.run(found.missing_soon()) == {"object store": "no answer for 0 s"}
        assert (time.monotonic() - began < 0.15, len(runs)) == (True, 1)
    finally:
        may_end.set()
        found.close()


def test_check_result_is_shared_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.15: a result is valid for VALID_SECONDS; a failure is reported with its reason."""
    answers = iter([None, StoreUnavailable("redis: refused"), None])

    def check() -> None:
        if (err := next(answers)) is not None:
            raise err

    found = Readiness({"redis": check})
    assert [found.missing() for _ in range(3)] == [{}] * 3
    monkeypatch.setattr(readiness, "VALID_SECONDS", 0.0)
    assert found.missing() == {"redis": "redis: refused"}
    assert asyncio.run(found.missing_soon()) == {}
    found.close()
