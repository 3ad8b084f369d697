"""Waiting in tests. Invariant: what does not come in time fails the test and tells what there was instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

POLL_SECONDS = 0.05


def until(
    what: Callable[[], Found],
    told: Callable[[], object] = lambda: "waited in vain",
    seconds: float = 90.0,
    poll_seconds: float = POLL_SECONDS,
) -> Found:
    """Ask until the answer is true, and return it. Raises AssertionError with what is `told` once time is up."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() >= deadline:
            raise AssertionError(told())
        time.sleep(poll_seconds)
    return found
