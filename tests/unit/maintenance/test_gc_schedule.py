"""When rounds are due: what nearkin_maintenance.gc.schedule says."""

from __future__ import annotations

import pytest

from nearkin_maintenance.gc.schedule import GcSchedule


def test_what_a_round_condemned_is_freed_by_one_more_and_the_interval_stays() -> None:
    regular = GcSchedule(0.0).after(100.0, 100, due_seconds=50)
    assert regular == GcSchedule(100.0, 150.0)
    assert not regular.is_due(149.0, 100)
    assert regular.is_due(150.0, 100)
    freed = regular.after(151.0, 100, due_seconds=50)  # what died meanwhile waits for the regular one
    assert freed == GcSchedule(100.0)
    assert freed.next_run(100) == 200


@pytest.mark.parametrize("due_seconds", [None, 0.0, -1.0, 76.0])
def test_nothing_condemned_or_due_about_when_the_next_round_is_needs_no_round_of_its_own(
    due_seconds: float | None,
) -> None:
    assert GcSchedule(0.0).after(100.0, 100, due_seconds) == GcSchedule(100.0)


def test_a_freeing_round_that_comes_as_late_as_the_regular_one_is_the_regular_one() -> None:
    assert GcSchedule(0.0, 50.0).after(100.0, 100, due_seconds=50) == GcSchedule(100.0, 150.0)


def test_a_round_that_was_asked_for_early_begins_a_new_interval() -> None:
    assert GcSchedule(0.0, 50.0).after(20.0, 100, due_seconds=10) == GcSchedule(20.0, 30.0)


def test_a_round_of_the_future_is_not_waited_for() -> None:
    assert GcSchedule(1000.0, 1050.0).is_due(10.0, 100)
    assert GcSchedule(1000.0, 1050.0).after(10.0, 100, due_seconds=50) == GcSchedule(10.0, 60.0)


def test_without_an_interval_no_round_is_due() -> None:
    schedule = GcSchedule(0.0, 50.0)
    assert schedule.next_run(0) is None
    assert not schedule.is_due(1e9, 0)
