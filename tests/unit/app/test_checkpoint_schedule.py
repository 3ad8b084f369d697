"""Test when a backup makes checkpoints: the loss by a kill is bounded, and small trees have none."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from nearkin.trees import checkpoint_schedule
from nearkin.trees.checkpoint_schedule import CheckpointSchedule
from nearkin_shared.results import PutResult

STEP = 1 << 20
FIRST = checkpoint_schedule.CHECKPOINT_BYTES_FIRST


class Backup:
    """Reads STEP bytes at a time; a checkpoint is durable only once the backup waits for it."""

    def __init__(self, earlier_bytes: int = 0, group_bytes: int = 0) -> None:
        self.now = 0.0
        self.read_bytes = self.durable_bytes = 0
        self.made: list[int] = []
        self._futures: dict[int, Future[PutResult]] = {}
        self._group_bytes = group_bytes
        self._schedule = CheckpointSchedule(earlier_bytes, lambda: self.now)

    def read(self, step: int = STEP) -> None:
        self.read_bytes += step
        if self._schedule.is_due(self.read_bytes, self._group_bytes):
            self._futures[self.read_bytes] = Future()
            self.made.append(self.read_bytes)
            self._schedule.record(self.read_bytes, self._futures[self.read_bytes])
        while (done := self._schedule.checkpoint_to_await(self.read_bytes, self._group_bytes)) is not None:
            self.durable_bytes = next(at for at, future in self._futures.items() if future is done)
            done.set_result(None)  # type: ignore[arg-type]


def test_loss_is_below_a_tenth_with_the_slowest_disk() -> None:
    """Whatever the disk does: from 56 MiB on, less than a tenth or 8 MiB is read and not durable."""
    backup = Backup()
    for _ in range(4000):
        backup.read()
        lost = backup.read_bytes - backup.durable_bytes
        if backup.read_bytes >= FIRST + 2 * checkpoint_schedule.CHECKPOINT_BYTES_MIN:
            assert lost < max(backup.read_bytes / 10, 2 * checkpoint_schedule.CHECKPOINT_BYTES_MIN), backup.read_bytes
    assert backup.made[0] == FIRST
    assert len(backup.made) < 80


def test_continued_run_counts_bytes_of_killed_ones() -> None:
    backup = Backup(earlier_bytes=2400 << 20)
    for _ in range(340):
        backup.read()
    assert backup.made == [160 << 20, 331 << 20], "1/16 of 2,560 MiB, then of 2,731"


def test_many_entries_make_checkpoints_rare() -> None:
    backup = Backup(group_bytes=32 << 20)
    for _ in range(400):
        backup.read()
    assert backup.made == [128 << 20, 256 << 20, 384 << 20]


@pytest.mark.parametrize(("fresh_bytes", "expected"), [(1, [1]), (0, [])])
def test_slow_backup_has_one_after_five_minutes(fresh_bytes: int, expected: list[int]) -> None:
    """None is made if nothing was read since the last one."""
    backup = Backup()
    backup.now = checkpoint_schedule.CHECKPOINT_SECONDS_MAX
    backup.read(fresh_bytes)
    assert backup.made == expected
