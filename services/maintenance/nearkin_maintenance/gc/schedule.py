"""When a round of garbage collection is due. Invariant: never more than two in an interval, whatever was condemned.

    regular .......... freeing .................... regular .......... freeing
    condemns           what is due by then goes     an interval after the regular one before

Without the second one what dies waits for an interval instead of a grace: 30 days of small edits then took up to 1.31
times a fresh store, with it 1.10 (benchmarks/gc_each_day.py).
"""

from __future__ import annotations

from nearkin_shared.utils.frozen import frozen

FREEING_SHARE_MAX = 0.75
"""What is due later in an interval than this waits for the next regular round."""


@frozen
class GcSchedule:
    """The last regular round, and when another one is to free what it condemned; seconds, of whatever clock."""

    regular: float
    freeing: float | None = None

    def next_run(self, interval_seconds: float) -> float | None:
        """Return when the next round is due; None: never, of itself."""
        if not interval_seconds:
            return None
        regular = self.regular + interval_seconds
        return regular if self.freeing is None else min(self.freeing, regular)

    def is_due(self, now: float, interval_seconds: float) -> bool:
        """Return whether one is due. One of the future was one by a clock that was wrong: it is not waited for."""
        next_round = self.next_run(interval_seconds)
        return next_round is not None and (now >= next_round or now < self.regular)

    def after(self, now: float, interval_seconds: float, due_seconds: float | None) -> GcSchedule:
        """Return the schedule once a round has ended; in `due_seconds` the first of what is condemned may go."""
        was_freeing = self.freeing is not None and self.freeing <= now < self.regular + interval_seconds
        if was_freeing:
            return GcSchedule(self.regular)
        if due_seconds is None or not 0 < due_seconds <= interval_seconds * FREEING_SHARE_MAX:
            return GcSchedule(now)
        return GcSchedule(now, now + due_seconds)
