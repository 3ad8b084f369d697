"""Calls held at each of their steps while another is done.

Dedup hits while a GC run marks, commits during the sweep, bases that die while they are chosen, undeletions while
their versions are collected, a writer that sleeps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engines import races

ALL = "SOAK" in os.environ
"""Every step of every pair takes a minute and a half. The short run does each seventh, and all that found a bug."""
EVERY = 1 if ALL else 7


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nearkin-", dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.mark.parametrize(
    "pair",
    [
        races.put_while_collecting,
        races.collect_while_putting,
        races.delete_while_putting,
    ],
    ids=lambda pair: pair.__name__,
)
def test_call_at_each_step_of_another_keeps_acknowledged_data(folder: Path, pair: Callable[..., int]) -> None:
    """Whichever call is done at a step of another, acknowledged data restore."""
    assert pair(folder, every=EVERY) >= 20


@pytest.mark.soak
def test_undelete_during_gc_run_is_whole_or_not_counted(
    folder: Path,
) -> None:
    """An undeletion during a GC run is in time or not, and one that is not is not counted.

    If it looked before the GC run's mark and recorded after it, 160 bytes that no process wrote were counted for
    good.
    """
    assert races.undelete_while_collecting(folder, every=1 if ALL else 3) >= 20


def test_undelete_too_late_is_not_reported_in_time(folder: Path) -> None:
    """An undeletion that is too late does not report success.

    A GC run collected the version, and its marks, between the check of the undeletion and its mark.
    """
    assert races.collect_while_undeleting(folder, every=1 if ALL else 3) >= 6


def test_two_committers_of_a_key_get_a_number_each(folder: Path) -> None:
    """Two committers of one key each get a number."""
    assert races.commit_while_committing(folder) >= 6


def test_data_reachable_again_are_kept_by_the_next_run(folder: Path) -> None:
    """Data that are reachable again are kept by the next GC run."""
    assert races.lose_manifest(folder) >= 1


def test_store_of_a_sleeping_writer_is_not_taken(folder: Path) -> None:
    """No other process takes the store of a writer that sleeps."""
    races.stopped_writer(folder)
