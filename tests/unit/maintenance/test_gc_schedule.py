"""Test when GC runs are due (nearkin_maintenance.gc.schedule)."""

from __future__ import annotations

import pytest

from nearkin_maintenance.gc.schedule import GcSchedule


def test_after_regular_run_schedules_one_freeing_run() -> None:
    """Data marked by a regular run are freed by one more run, and the interval stays."""
    regular = GcSchedule(0.0).after(100.0, 100, due_seconds=50)
    assert regular == GcSchedule(100.0, 150.0)
    assert not regular.is_due(149.0, 100)
    assert regular.is_due(150.0, 100)
    freed = regular.after(151.0, 100, due_seconds=50)  # data unreachable since then wait for the regular run
    assert freed == GcSchedule(100.0)
    assert freed.next_run(100) == 200


@pytest.mark.parametrize("due_seconds", [None, 0.0, -1.0, 76.0])
def test_after_nothing_due_soon_schedules_no_freeing_run(due_seconds: float | None) -> None:
    """No data are pending, or they are due about when the next regular run is."""
    assert GcSchedule(0.0).after(100.0, 100, due_seconds) == GcSchedule(100.0)


def test_after_late_freeing_run_counts_as_regular() -> None:
    """A freeing run as late as the regular one is the regular one."""
    assert GcSchedule(0.0, 50.0).after(100.0, 100, due_seconds=50) == GcSchedule(100.0, 150.0)


def test_after_requested_run_begins_interval() -> None:
    """A run that was requested early begins a new interval."""
    assert GcSchedule(0.0, 50.0).after(20.0, 100, due_seconds=10) == GcSchedule(20.0, 30.0)


def test_is_due_last_run_in_future_is_due() -> None:
    """A last run in the future was recorded by a wrong clock."""
    assert GcSchedule(1000.0, 1050.0).is_due(10.0, 100)
    assert GcSchedule(1000.0, 1050.0).after(10.0, 100, due_seconds=50) == GcSchedule(10.0, 60.0)


def test_next_run_without_interval_is_none() -> None:
    """Without an interval no run is due."""
    schedule = GcSchedule(0.0, 50.0)
    assert schedule.next_run(0) is None
    assert not schedule.is_due(1e9, 0)
