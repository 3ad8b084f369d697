"""Provide a clock for tests.

Invariant: its time changes only when a test moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

DAY = 86_400


@dataclass
class Clock:
    """Clock of a store or a maintenance worker: seconds since 1970."""

    now: float = 1_764_000_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now
