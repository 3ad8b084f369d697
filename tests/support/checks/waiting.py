"""Wait for conditions in tests.

Invariant: a condition that is not met in time fails the test with a report of the actual state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

POLL_SECONDS = 0.05


def until(
    condition: Callable[[], Found],
    describe: Callable[[], object] = lambda: "the condition was not met in time",
    seconds: float = 90.0,
    poll_seconds: float = POLL_SECONDS,
) -> Found:
    """Poll until the result is true, and return it.

    Raises: AssertionError with the result of `describe` when the time is up.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(describe())
        time.sleep(poll_seconds)
    return found
