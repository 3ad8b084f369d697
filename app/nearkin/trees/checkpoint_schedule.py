"""Decide when a backup makes a checkpoint, and when it waits for one.

    read | durable            | checkpoint in progress | read since |
                                <- distance ->          <- half a distance: wait for the one in progress ->

A checkpoint is two objects and their syncs, and a wait leaves a core idle: both are rare enough once the distance is
a share of what was read. Bytes are those that were read, by this run and by the killed ones that it continues.

Invariant: once the first checkpoint is due, at most 1.5 distances are read and not durable, and a piece of a file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from nearkin_shared.results import PutResult

CHECKPOINT_BYTES_FIRST = 48 << 20
"""Smaller trees have no checkpoint: for 10,000 small files, 45 MB, eleven more would double the stored objects."""
CHECKPOINT_BYTES_MIN, CHECKPOINT_BYTES_MAX = 4 << 20, 8 << 30
CHECKPOINT_SHARE = 16
"""A checkpoint comes after another 1/16 of what was read: 1.5 of them are less than the tenth that a kill may cost.

Each takes 20 ms of processor time, half of it to decode bases of its entries: of a first GB there are 43 of them; at
1/24, with a wait after two distances, there were 63."""
CHECKPOINT_GROUPS_FACTOR = 4
"""A checkpoint writes all entry groups so far: it comes after so many times their bytes at the earliest, so that the
checkpoints of millions of tiny files do not take most of the time."""
CHECKPOINT_SECONDS_MAX = 300.0
IN_PROGRESS_MAX = 1.5
"""Distances that may be read and not durable."""


class CheckpointSchedule:
    """The checkpoints of one backup."""

    def __init__(self, earlier_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`earlier_bytes`: read by the killed runs that this one continues."""
        self._earlier_bytes = earlier_bytes
        self._clock = clock
        self._last = (0, clock())
        self._in_progress: deque[tuple[int, Future[PutResult]]] = deque()
        self._durable_bytes = 0

    def done_bytes(self, read_bytes: int) -> int:
        """Return the bytes read so far, those of killed runs included."""
        return self._earlier_bytes + read_bytes

    def is_due(self, read_bytes: int, group_bytes: int) -> bool:
        """Return whether a checkpoint is due after `read_bytes` of this run."""
        last_bytes, last_time = self._last
        fresh = read_bytes - last_bytes
        if fresh >= self._distance(read_bytes, group_bytes) and self.done_bytes(read_bytes) >= CHECKPOINT_BYTES_FIRST:
            return True
        return bool(fresh) and self._clock() - last_time >= CHECKPOINT_SECONDS_MAX

    def record(self, read_bytes: int, done: Future[PutResult] | None) -> None:
        """Record a checkpoint; `done` is resolved once it is durable, None if none could be made."""
        self._last = (read_bytes, self._clock())
        if done is not None:
            self._in_progress.append((read_bytes, done))

    def checkpoint_to_await(self, read_bytes: int, group_bytes: int) -> Future[PutResult] | None:
        """Return the checkpoint that must be durable before more is read, if any."""
        while self._in_progress and self._in_progress[0][1].done():
            self._durable_bytes = self._in_progress.popleft()[0]
        if read_bytes - self._durable_bytes < IN_PROGRESS_MAX * self._distance(read_bytes, group_bytes):
            return None
        return self._in_progress[0][1] if self._in_progress else None

    def _distance(self, read_bytes: int, group_bytes: int) -> int:
        share = self.done_bytes(read_bytes) // CHECKPOINT_SHARE
        return min(max(CHECKPOINT_BYTES_MIN, share, CHECKPOINT_GROUPS_FACTOR * group_bytes), CHECKPOINT_BYTES_MAX)
