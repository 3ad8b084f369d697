"""Test leader epochs committed with offsets.

A log that was truncated and written again is detected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from confluent_kafka import TopicPartition

from nearkin_shared.kafka.truncation import LeaderEpochs, Reading


@dataclass
class Message:
    """A record as the client returns it."""

    at: int
    epoch: int | None

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def leader_epoch(self) -> int | None:
        return self.epoch


def read(epochs: LeaderEpochs, at: int, epoch: int | None) -> Reading:
    return epochs.note(cast("Any", Message(at, epoch)))


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ((9, 4), [Reading.HANDLED, Reading.NEW]),
        ((9, 3), [Reading.HANDLED, Reading.NEW]),
        ((9, 5), [Reading.TRUNCATED, Reading.NEW]),
        ((12, 5), [Reading.NEW, Reading.NEW]),
        ((0, 5), [Reading.NEW, Reading.NEW]),
    ],
    ids=["same", "older", "rewritten", "removed by retention", "out of range"],
)
def test_first_record_after_resume_is_checked(first: tuple[int, int], expected: list[Reading]) -> None:
    """F.32: a later epoch below the committed offset means a truncated log."""
    epochs = LeaderEpochs()
    begin = epochs.resume(TopicPartition("t", 0, 10, "", 4))
    assert begin.offset == 9
    assert [read(epochs, *first), read(epochs, first[0] + 1, first[1])] == expected


@pytest.mark.parametrize(
    "committed", [TopicPartition("t", 0), TopicPartition("t", 0, 10), TopicPartition("t", 0, 0, "", 4)]
)
def test_resume_without_epoch_is_left_to_the_client(committed: TopicPartition) -> None:
    """F.32: an offset committed by an older release, or none, has no epoch.

    The client decides.
    """
    epochs = LeaderEpochs()
    assert epochs.resume(committed).offset == TopicPartition("t", 0).offset
    assert read(epochs, 9, 7) is Reading.NEW


def test_committed_offset_carries_last_epoch() -> None:
    """F.32: a commit carries the epoch of the last record read.

    If none was read, that of the last commit.
    """
    epochs = LeaderEpochs()
    epochs.resume(TopicPartition("t", 0, 10, "", 4))
    assert epochs.committed("t", 0, 10).leader_epoch == 4
    read(epochs, 10, 6)
    assert epochs.committed("t", 0, 11, "state").leader_epoch == 6
    epochs.forget("t", 0)
    assert epochs.committed("t", 0, 11).leader_epoch is None
