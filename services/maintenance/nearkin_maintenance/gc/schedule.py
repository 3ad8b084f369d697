# size: a pure rule that the embedded backend uses without the worker
"""Decide when a GC run is due.

    regular run                   freeing run                         regular run
    marks data for deletion       deletes what is due by then         one interval after the previous regular run

Invariant: at most two runs per interval, whatever was marked for deletion. Without the freeing run, unreachable data
wait an interval instead of a grace: 30 days of small edits then took up to 1.31 times a fresh store, with it 1.10
(benchmarks/gc_each_day.py).
"""

from __future__ import annotations

from nearkin_shared.utils.frozen import frozen

FREEING_SHARE_MAX = 0.75
"""Share of an interval after which due data wait for the next regular run."""


@frozen
class GcSchedule:
    """Times of the last regular run and of the freeing run after it; seconds of any clock."""

    regular: float
    freeing: float | None = None

    def next_run(self, interval_seconds: float) -> float | None:
        """Return when the next run is due, or None if no interval is set."""
        if not interval_seconds:
            return None
        regular = self.regular + interval_seconds
        return regular if self.freeing is None else min(self.freeing, regular)

    def is_due(self, now: float, interval_seconds: float) -> bool:
        """Return whether a run is due.

        A last run in the future was recorded by a wrong clock: the next run is due at once.
        """
        next_run = self.next_run(interval_seconds)
        return next_run is not None and (now >= next_run or now < self.regular)

    def after(self, now: float, interval_seconds: float, due_seconds: float | None) -> GcSchedule:
        """Return the schedule after a run that ended at `now`.

        `due_seconds`: until the first pending delete is due.
        """
        was_freeing = self.freeing is not None and self.freeing <= now < self.regular + interval_seconds
        if was_freeing:
            return GcSchedule(self.regular)
        if due_seconds is None or not 0 < due_seconds <= interval_seconds * FREEING_SHARE_MAX:
            return GcSchedule(now)
        return GcSchedule(now, now + due_seconds)
