"""How far each group is behind. Invariant: told from outside, by whoever watches: a stage that is down is seen too."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from nearkin import metrics
from nearkin.config import Settings
from nearkin.runners.kafka.clients import ADMIN_SECONDS_MAX, connection, group, retention_ms, topic

_log = logging.getLogger("nearkin.lag")

LOOK_SECONDS = 15.0
STOP_SECONDS = 35.0
Place = tuple[str, int]
"""Topic and partition."""
WAITS: Mapping[str, str] = {
    "chunker": "frames",
    "dedup": "segments",
    "resemblance": "fresh",
    "delta": "paired",
    "committer": "placed",
}
"""Which topic each group takes from."""


def watched(settings: Settings) -> list[tuple[str, list[str]]]:
    """Return (group, its topics) of all stages, and of the ingest where it has topics."""
    found = [(group(settings, service), [topic(settings, name)]) for service, name in WAITS.items()]
    if settings.ingest.topics:
        topics = [entry.partition("=")[0] for entry in settings.ingest.topics]
        found.append((settings.ingest.group or group(settings, "ingest"), topics))
    return found


class LagWatch:
    """Looks every LOOK_SECONDS, on a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._admin = AdminClient(connection(settings, "nearkin-lag"))
        self._watched = watched(settings)
        self._old_ms = int(retention_ms(settings)) // 2
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

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except (KafkaException, TimeoutError) as err:
                _log.warning("lag was not read: %s", str(err) or type(err).__name__)
            self._stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Read it once. Raises KafkaException, TimeoutError."""
        for name, topics in self._watched:
            behind, old = self._behind(name, topics)
            for place, records in behind.items():
                metrics.LAG.labels(name, *map(str, place)).set(records)
            metrics.OLD_LAG.labels(name).set(old)
        metrics.LAG_SEEN.set(time.time())

    def _behind(self, name: str, topics: Sequence[str]) -> tuple[dict[Place, int], int]:
        """Return how many records each partition has for the group, and how many of all these are old."""
        there = self._admin.list_topics(timeout=ADMIN_SECONDS_MAX).topics
        parts = [TopicPartition(full, part) for full in topics if full in there for part in there[full].partitions]
        if not parts:
            return {}, 0
        asked = ConsumerGroupTopicPartitions(name, parts)
        answer = self._admin.list_consumer_group_offsets([asked])[name].result(ADMIN_SECONDS_MAX)
        committed = {(part.topic, part.partition): part.offset for part in answer.topic_partitions or []}
        ends = self._offsets(parts, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        begins = self._offsets(parts, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        before_ms = time.time_ns() // 1_000_000 - self._old_ms
        young = self._offsets(parts, OffsetSpec.for_timestamp(before_ms))
        # Nothing committed, or what was is no longer there: the group will begin at what is left.
        next_ones = {place: max(begin, committed.get(place, -1)) for place, begin in begins.items()}
        old = sum(  # an offset of -1: nothing younger is there
            max(0, (young[place] if young[place] >= 0 else end) - next_ones[place]) for place, end in ends.items()
        )
        return {place: end - next_ones[place] for place, end in ends.items()}, old

    def _offsets(self, parts: Sequence[TopicPartition], spec: OffsetSpec) -> dict[Place, int]:
        asked = self._admin.list_offsets(dict.fromkeys(parts, spec), request_timeout=ADMIN_SECONDS_MAX)
        return {(part.topic, part.partition): answer.result(ADMIN_SECONDS_MAX).offset for part, answer in asked.items()}
