"""Report the lag and the rate of each stage.

Invariant: Kafka is queried only when a caller asks, and once for all concurrent callers.
The rate is the difference of two sums of committed offsets, some seconds apart.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise

from confluent_kafka import KafkaException

from nearkin_gateway.http.problems import RETRY_SECONDS
from nearkin_shared.config.pipeline_stages import PIPELINE_STAGES
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.kafka.clients import group, unavailable
from nearkin_shared.kafka.dead_letter_replay import DeadLetter, drop, list_letters, parse_place, read_letter, replay
from nearkin_shared.kafka.lag import GroupLag, LagReader
from nearkin_shared.utils.frozen import frozen

READ_SECONDS = 5.0
"""A reading counts for so long: it asks Kafka some 25 questions."""
READINGS_MAX = 60
RATE_SECONDS = 60.0
"""Period over which rates are computed."""
LETTERS_MAX = 200
FEW_RECORDS = 64
"""Records of one stage that are no backlog: an idle stage has as many until it commits, and no rate that counts."""
Reading = tuple[float, Sequence[GroupLag]]
"""When Kafka was read, in seconds of the monotonic clock, and the lag of each group."""


@frozen
class StageState:
    """One consumer group: its lag in records, the old ones of these, and its rate once known."""

    group: str
    lag_records: int
    old_records: int
    records_per_second: float | None


class PipelineState:
    """Reads lag and dead letters when asked. All calls block: they belong on a thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._reader: LagReader | None = None
        self._readings: deque[tuple[float, list[GroupLag]]] = deque(maxlen=READINGS_MAX)
        self._letters: tuple[float, list[DeadLetter]] = (-READ_SECONDS, [])

    def stages(self) -> list[StageState]:
        """Return how far each group is, READ_SECONDS old at most. Raises StoreUnavailable."""
        readings = self._recent_readings()
        since, last = readings[0], readings[-1]
        before = {found.group: found.taken for found in since[1]}
        seconds = last[0] - since[0]
        return [
            StageState(
                found.group,
                sum(found.behind.values()),
                found.old,
                max(0, found.taken - before.get(found.group, found.taken)) / seconds if seconds > 0 else None,
            )
            for found in last[1]
        ]

    def wait_seconds(self) -> float | None:
        """Return how long a new upload waits for its commit; None: not known yet.

        Raises StoreUnavailable.
        """
        groups = {group(self._settings, stage) for stage in PIPELINE_STAGES}
        return drain_seconds(self._recent_readings(), groups)

    def waiting_records(self) -> dict[int, int]:
        """Return the records by partition that wait for the first stage, as last read."""
        readings = list(self._readings)
        first = group(self._settings, PIPELINE_STAGES[0])
        found = [lag.behind for lag in readings[-1][1] if lag.group == first] if readings else []
        return {partition: records for behind in found for (_, partition), records in behind.items()}

    def _recent_readings(self) -> list[tuple[float, list[GroupLag]]]:
        """Return the readings of the last RATE_SECONDS, the last one at most READ_SECONDS old."""
        with self._lock:
            now = time.monotonic()
            if not self._readings or now - self._readings[-1][0] >= READ_SECONDS:
                self._readings.append((now, self._read()))
            recent = [entry for entry in self._readings if now - entry[0] <= RATE_SECONDS]
            return recent or [self._readings[-1]]

    def letters(self) -> list[DeadLetter]:
        """Return the newest kept dead letters, oldest first. Raises StoreUnavailable."""
        with self._lock:
            if time.monotonic() - self._letters[0] >= READ_SECONDS:
                self._letters = (time.monotonic(), list_letters(self._settings, LETTERS_MAX, replayed=True))
            return self._letters[1]

    def letter(self, name: str) -> DeadLetter:
        """Return one dead letter, whole. Raises BadInput, NotFound, StoreUnavailable."""
        return read_letter(self._settings, parse_place(name))

    def replay(self, names: list[str]) -> list[DeadLetter]:
        """Replay dead letters, each once.

        Raises BadInput, NotFound, PermanentError, StoreUnavailable.
        """
        sent = replay(self._settings, [parse_place(name) for name in names])
        self._invalidate_letters()
        return sent

    def drop(self, names: list[str], dropped_by: str) -> list[DeadLetter]:
        """Mark letters as dropped. Raises BadInput, NotFound, StoreUnavailable."""
        dropped = drop(self._settings, [parse_place(name) for name in names], dropped_by)
        self._invalidate_letters()
        return dropped

    def _invalidate_letters(self) -> None:
        """Let the next listing read the topic."""
        with self._lock:
            self._letters = (-READ_SECONDS, [])

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def _read(self) -> list[GroupLag]:
        try:
            if self._reader is None:
                self._reader = LagReader(self._settings)
            return list(self._reader.read())
        except KafkaException as err:
            raise unavailable(self._settings, err) from err
        except TimeoutError as err:
            raise StoreUnavailable(f"kafka {self._settings.kafka.bootstrap_servers}: offsets not available") from err


def drain_seconds(readings: Sequence[Reading], groups: Collection[str]) -> float | None:
    """Return how long these groups need for the records that wait for them.

    The sum of all groups, since records that one has handled wait for the next. Infinite if a group with a backlog
    makes no progress; None before its rate is known.
    """
    total_seconds = 0.0
    for found in readings[-1][1]:
        waiting = sum(found.behind.values())
        if found.group not in groups or not waiting:
            continue
        rates = _rates(readings, found.group)
        if not rates and waiting > FEW_RECORDS:
            return None
        best = max(rates, default=0.0)
        seconds = waiting / best if best else math.inf
        total_seconds += min(seconds, RETRY_SECONDS) if waiting <= FEW_RECORDS else seconds
    return total_seconds


def _rates(readings: Sequence[Reading], name: str) -> list[float]:
    """Return the records a second that a group took, between each two readings.

    The best of them is what it can do: the mean of a minute includes the time before its records arrived.
    """
    taken = [(at, found.taken) for at, groups in readings for found in groups if found.group == name]
    return [max(0, later - former) / (then - at) for (at, former), (then, later) in pairwise(taken) if then > at]
