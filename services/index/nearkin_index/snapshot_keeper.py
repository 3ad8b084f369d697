"""Keep the snapshot of a shard's tags recent, so that the shard's next start is short.

A killed shard reads the directories of all containers that its snapshot lacks, and answers nothing meanwhile. The age
of a snapshot is the time for which it has lacked many containers, one in 128: that of an idle shard stays 0.

    age 0 .. SAVE_SECONDS   nothing    .. AGE_SECONDS_MAX   it is saved, tried again    above   the shard is not ready

Invariant: an old snapshot stops no call; readiness keeps an update from the next shard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nearkin_index.shard_index import ShardIndex
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.observability import metrics

LOOK_SECONDS = 15.0
SAVE_SECONDS = 300.0
"""Age at which a snapshot is saved, and time between two tries."""
AGE_SECONDS_MAX = 1800.0
"""Age beyond which the shard is not ready: all tries have failed."""


class SnapshotKeeper:
    """Saves the tags of one index in time, and knows the age of their snapshot."""

    def __init__(self, index: ShardIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._clock = index, clock
        self._behind_since: float | None = None
        self._next_try = 0.0

    @property
    def age_seconds(self) -> float:
        """Return for how long the snapshot has lacked many containers."""
        since = self._behind_since
        return 0.0 if since is None else self._clock() - since

    def check(self) -> None:
        """Raise StoreUnavailable if the snapshot is too old."""
        age = self.age_seconds
        if age > AGE_SECONDS_MAX:
            raise StoreUnavailable(
                f"the snapshot of the tags is {age:.0f} s old and lacks {self._index.tablets.unsaved} containers: "
                "the next start would be slow; is the shard's volume full?"
            )

    def run(self, stopping: threading.Event) -> None:
        """Keep the snapshot recent until `stopping` is set."""
        while not stopping.wait(LOOK_SECONDS):
            self.step()

    def step(self) -> None:
        """Note whether the snapshot is behind, and save it if it has been for long."""
        tables, now = self._index.tablets, self._clock()
        if tables.is_snapshot_behind and self._behind_since is None:
            self._behind_since, self._next_try = now, now + SAVE_SECONDS
        if tables.is_snapshot_behind and now >= self._next_try:
            self._next_try = now + SAVE_SECONDS
            tables.save()
        if not tables.is_snapshot_behind:
            self._behind_since = None
        metrics.SNAPSHOT_AGE.labels("shards").set(self.age_seconds)
        metrics.SNAPSHOT_LACKS.labels("shards").set(tables.unsaved)
