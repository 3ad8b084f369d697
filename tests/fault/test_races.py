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
"""Every step of every pair: a minute and a half. Else each seventh, and all of those that found a bug."""
EVERY = 1 if ALL else 7


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
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
def test_whatever_comes_by_at_a_step_what_was_acknowledged_restores(place: Path, pair: Callable[..., int]) -> None:
    assert pair(place, every=EVERY) >= 20


@pytest.mark.soak
def test_an_undeletion_beside_a_round_came_in_time_or_not_and_nothing_is_counted_of_one_that_did_not(
    place: Path,
) -> None:
    """If it looked before the GC run's mark and recorded after it, 160 bytes that no process wrote were counted for
    good.
    """
    assert races.undelete_while_collecting(place, every=1 if ALL else 3) >= 20


def test_an_undeletion_that_comes_too_late_does_not_say_that_it_came_in_time(place: Path) -> None:
    """A GC run collected the version, and its marks, between the check of the undeletion and its mark."""
    assert races.collect_while_undeleting(place, every=1 if ALL else 3) >= 6


def test_two_committers_of_one_key_each_get_a_number(place: Path) -> None:
    assert races.commit_while_committing(place) >= 6


def test_what_is_reached_again_is_spared_by_the_next_round(place: Path) -> None:
    assert races.manifest_away(place) >= 1


def test_nobody_takes_the_store_of_a_writer_that_sleeps(place: Path) -> None:
    races.stopped_writer(place)
