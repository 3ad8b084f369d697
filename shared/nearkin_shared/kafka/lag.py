"""Measure the lag of each consumer group.

Invariant: any process can measure it, so that a stage that is down is measured too.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from nearkin_shared.config.pipeline_stages import STAGE_TOPICS_OF
from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import ADMIN_SECONDS_MAX, consumer, group, retention_ms, topic
from nearkin_shared.observability import metrics
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.lag")

LOOK_SECONDS = 15.0
STOP_SECONDS = 35.0
AGE_PASSES = 8
"""Questions to find how old the oldest waiting record is: between 1 s and a week each halves what is left of the
exponent, so that eight determine it within 5 %."""
AGE_MS_MIN = 1000
SIZED_SECONDS = 120.0
"""Seconds for which a mean record size of a group is used: measuring it reads READ_BYTES_MAX of each group."""
SIZED_RECORDS = 16
SIZED_WAIT_SECONDS = 2.0
READ_BYTES_MAX = 2 * 1024 * 1024
BACKLOG_SECONDS = 5.0
"""How long an answer of `Backlog` counts, and how long Kafka may take for one."""
TELLS_END: Mapping[str, bool] = {"enable.partition.eof": True}
Place = tuple[str, int]
"""Topic and partition."""
WAITS: Mapping[str, str] = STAGE_TOPICS_OF
"""Which topic each group takes from."""


def watched_groups(settings: Settings) -> list[tuple[str, list[str]]]:
    """Return (group, its topics) of all stages, and of the ingest where it has topics."""
    found = [(group(settings, service), [topic(settings, name)]) for service, name in WAITS.items()]
    if settings.ingest.topics:
        topics = [entry.partition("=")[0] for entry in settings.ingest.topics]
        found.append((settings.ingest.group or group(settings, "ingest"), topics))
    return found


@frozen
class GroupLag:
    """The progress of one group.

    `taken` is the sum of its committed offsets: its growth is the group's rate.
    """

    group: str
    behind: Mapping[Place, int]
    old: int
    """Of the records that wait, those older than half of kafka.retention_hours."""
    taken: int
    oldest_seconds: float = 0.0
    """Age of the oldest record that waits: 5 % too much at most, a second at least; 0 for none, or without `ages`."""
    bytes_behind: int = 0
    """Bytes of what waits, as if all were as long as the first SIZED_RECORDS of the longest queue; 0 without `ages`."""


class LagReader:
    """Asks Kafka how far each group is. For one thread at a time.

    By a consumer of each group that never joins it. The admin client asks for all groups at once, but ends the process
    while a coordinator moves (SIGSEGV and SIGABRT, librdkafka 2.16; its issue 3663, confluent-kafka-python's 1982).
    """

    def __init__(self, settings: Settings, *, ages: bool = False) -> None:
        """`ages`: also determine `oldest_seconds` and `bytes_behind`, by AGE_PASSES more requests."""
        self._ages = ages
        bounds = {"fetch.max.bytes": READ_BYTES_MAX // 2, "queued.max.messages.kbytes": READ_BYTES_MAX // 1024}
        self._watched = [
            (name, topics, consumer(settings, name, "nearkin-lag", **bounds, **TELLS_END))
            for name, topics in watched_groups(settings)
        ]
        self._means: dict[str, tuple[float, float]] = {}
        """When each group's records were weighed, and their mean bytes."""
        self._retention_ms = int(retention_ms(settings))
        self._old_ms = self._retention_ms // 2

    def read(self, stop: threading.Event | None = None) -> Iterator[GroupLag]:
        """Yield each group as it is asked, until `stop`. Raises KafkaException, TimeoutError."""
        for name, topics, asking in self._watched:
            if stop is not None and stop.is_set():
                return  # a Kafka that is away lets each question wait for ADMIN_SECONDS_MAX
            yield self._lag(name, asking, topics)

    def close(self) -> None:
        """Close the connections."""
        for _, _, asking in self._watched:
            asking.close()

    def _lag(self, name: str, asking: Consumer, topics: Sequence[str]) -> GroupLag:
        there = asking.list_topics(timeout=ADMIN_SECONDS_MAX).topics
        parts = [TopicPartition(full, part) for full in topics if full in there for part in there[full].partitions]
        if not parts:
            return GroupLag(name, {}, 0, 0)
        committed = _offsets(asking.committed(parts, timeout=ADMIN_SECONDS_MAX))
        before_ms = time.time_ns() // 1_000_000 - self._old_ms
        times = [TopicPartition(part.topic, part.partition, before_ms) for part in parts]
        young = _offsets(asking.offsets_for_times(times, timeout=ADMIN_SECONDS_MAX))
        behind, begins, old, taken = dict[Place, int](), dict[Place, int](), dict[Place, int](), 0
        for part in parts:
            place = part.topic, part.partition
            begin, end = asking.get_watermark_offsets(part, timeout=ADMIN_SECONDS_MAX)
            # Nothing committed, or what was is no longer there: the group will begin at what is left.
            following = max(begin, committed.get(place, -1))
            behind[place] = end - following
            begins[place] = following
            taken += following
            # A negative offset: there is no newer record.
            old[place] = max(0, (young[place] if young[place] >= 0 else end) - following)
        for place in without_record(
            asking, [TopicPartition(*place, begins[place]) for place in behind if behind[place] == 1]
        ):
            behind[place] = old[place] = 0
        waiting = [TopicPartition(*place, begins[place]) for place, records in behind.items() if records]
        if not self._ages:
            return GroupLag(name, behind, sum(old.values()), taken)
        longest = max(waiting, key=lambda part: behind[part.topic, part.partition], default=None)
        mean_bytes = self._mean_bytes(name, asking, longest)
        bytes_behind = round(mean_bytes * sum(behind.values()))
        return GroupLag(name, behind, sum(old.values()), taken, self._oldest_seconds(asking, waiting), bytes_behind)

    def _mean_bytes(self, name: str, asking: Consumer, begin: TopicPartition | None) -> float:
        """Return the mean size of records at an offset, keys and values; cached.

        It is used for SIZED_SECONDS.
        """
        weighed, mean_bytes = self._means.get(name, (-math.inf, 0.0))
        if begin is None or time.monotonic() - weighed < SIZED_SECONDS:
            return mean_bytes
        asking.assign([begin])  # not a member of the group: nothing is committed, and no partition moves
        try:
            found = [one for one in asking.consume(SIZED_RECORDS, SIZED_WAIT_SECONDS) if one.error() is None]
        finally:
            asking.unassign()
        if found:
            mean_bytes = sum(len(one.value() or b"") + len(one.key() or b"") for one in found) / len(found)
            self._means[name] = time.monotonic(), mean_bytes
        return mean_bytes

    def _oldest_seconds(self, asking: Consumer, waiting: Sequence[TopicPartition]) -> float:
        """Return the age of the oldest record at these offsets, found by time, without reading it."""
        now_ms = time.time_ns() // 1_000_000
        young_ms, old_ms = AGE_MS_MIN, max(AGE_MS_MIN, self._retention_ms)
        for _ in range(AGE_PASSES if waiting else 0):
            middle_ms = round(math.sqrt(young_ms * old_ms))
            times = [TopicPartition(part.topic, part.partition, now_ms - middle_ms) for part in waiting]
            since = _offsets(asking.offsets_for_times(times, timeout=ADMIN_SECONDS_MAX))
            # A negative offset: no record is that recent.
            older = [part for part in waiting if not 0 <= since[part.topic, part.partition] <= part.offset]
            if older:
                waiting, young_ms = older, middle_ms
            else:
                old_ms = middle_ms
        return old_ms / 1000 if waiting else 0.0


class Backlog:
    """Whether records that a caller misses may be in flight; if unknown, they may be."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asking: Consumer | None = None
        self._reader: LagReader | None = None
        self._last_age: tuple[float, float] = (-math.inf, 0.0)
        """When the age was asked for, and what it was."""
        self._away_since = -math.inf
        """When Kafka was last asked in vain: it is not asked of each partition, which would take as long each time."""

    def unread(self, name: str, partition: int, offset: int) -> bool:
        """Return whether a topic has records from `offset` on."""
        if time.monotonic() - self._away_since < BACKLOG_SECONDS:
            return True
        if self._asking is None:
            self._asking = consumer(self._settings, group(self._settings, "lag"), "nearkin-backlog", **TELLS_END)
        part = TopicPartition(topic(self._settings, name), partition)
        try:
            _, end = self._asking.get_watermark_offsets(part, timeout=BACKLOG_SECONDS)
            if end - offset == 1:
                return not without_record(self._asking, [TopicPartition(part.topic, partition, offset)])
        except KafkaException as err:
            _log.warning("%s: its end is not known: %s", part.topic, err)
            self._away_since = time.monotonic()
            return True
        return end > offset

    def oldest_seconds(self, services: Collection[str]) -> float:
        """Return the age of the oldest record that waits for one of these stages.

        Infinite if Kafka is unavailable.
        """
        asked, age_seconds = self._last_age
        if time.monotonic() - asked < BACKLOG_SECONDS:
            return age_seconds
        names = {group(self._settings, service) for service in services}
        try:
            if self._reader is None:
                self._reader = LagReader(self._settings, ages=True)
            age_seconds = max((lag.oldest_seconds for lag in self._reader.read() if lag.group in names), default=0.0)
        except (KafkaException, TimeoutError) as err:
            _log.warning("lag was not read: %s", str(err) or type(err).__name__)
            age_seconds = math.inf
        self._last_age = time.monotonic(), age_seconds
        return age_seconds

    def close(self) -> None:
        """Close the connections."""
        if self._asking is not None:
            self._asking.close()
        if self._reader is not None:
            self._reader.close()
        self._asking = self._reader = None


class LagWatch:
    """Looks every LOOK_SECONDS, on a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._reader = LagReader(settings, ages=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-lag", daemon=True)

    def start(self) -> Callable[[], None]:
        """Begin; return what ends it."""
        self._thread.start()
        return self.stop

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._reader.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except (KafkaException, TimeoutError) as err:
                _log.warning("lag was not read: %s", str(err) or type(err).__name__)
            self._stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Read it once. Raises KafkaException, TimeoutError."""
        for found in self._reader.read(self._stop):
            for place, records in found.behind.items():
                metrics.LAG.labels(found.group, *map(str, place)).set(records)
            metrics.OLD_LAG.labels(found.group).set(found.old)
            metrics.LAG_SECONDS.labels(found.group).set(found.oldest_seconds)
            metrics.LAG_BYTES.labels(found.group).set(found.bytes_behind)
        if not self._stop.is_set():
            metrics.LAG_SEEN.set(time.time())


def without_record(asking: Consumer, parts: Sequence[TopicPartition]) -> list[Place]:
    """Return the partitions without a record at their offset, which is their last.

    A transaction, such as that of `nearkin dlq replay`, ends with a marker, which has an offset but is not delivered
    to consumers: until the next record the lag would seem to be one.
    """
    if not parts:
        return []
    ended: dict[Place, bool] = {}
    asking.assign(list(parts))  # not a member of the group: nothing is committed, and no partition moves
    try:
        deadline = time.monotonic() + BACKLOG_SECONDS
        while len(ended) < len(parts):
            message = asking.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                break
            problem, name, partition = message.error(), message.topic(), message.partition()
            if name is not None and partition is not None:  # the first answer counts: a record's is followed by the end
                ended.setdefault((name, partition), problem is not None and problem.code() == KafkaError._PARTITION_EOF)
    finally:
        asking.unassign()
    return [place for place, empty in ended.items() if empty]


def _offsets(parts: Sequence[TopicPartition]) -> dict[Place, int]:
    """Return the offset of each partition. Raises KafkaException if one is unknown."""
    for part in parts:
        if part.error is not None:
            raise KafkaException(part.error)
    return {(part.topic, part.partition): part.offset for part in parts}
