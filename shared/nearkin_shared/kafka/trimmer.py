"""Delete handled records of the stage topics from the broker.

    committed offset of the group -> record before it unchanged -> dead letters that point below -> DeleteRecords

A group commits an offset after the effects of all records before it (I4), and each stage topic has one group, so no
worker reads them again.

Invariant: no record is deleted that its group has not handled, nor one that a dead letter points to. The last handled
record stays: its leader epoch shows whether the log was truncated below the committed offset and written again
(`truncation`). In a log that was, records below the committed offset are new, and nothing is deleted.

Deleting is idempotent, so several maintenance workers need no lease. DeleteRecords is the one request of an admin
client, which may end the process while a coordinator moves (`LagReader`): the client is made for each trim that
deletes something, and all questions are asked by consumers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from nearkin_shared.config.pipeline_stages import STAGE_TOPICS_OF
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import RetryableError
from nearkin_shared.kafka.clients import ADMIN_SECONDS_MAX, connection, consumer, group, topic
from nearkin_shared.kafka.held_records import HeldRecords
from nearkin_shared.observability import metrics

_log = logging.getLogger("nearkin.trim")

READ_SECONDS = 10.0
"""Wait for the last handled records of a topic's partitions."""
READ_BYTES_MAX = 2 * 1024 * 1024
STOP_SECONDS = 35.0


class Trimmer:
    """Deletes handled records. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        bounds = {"fetch.max.bytes": READ_BYTES_MAX // 2, "queued.max.messages.kbytes": READ_BYTES_MAX // 1024}
        self._settings = settings
        self._asking = [
            (topic(settings, name), consumer(settings, group(settings, service), "nearkin-trim", **bounds))
            for service, name in STAGE_TOPICS_OF.items()
        ]
        self._held = HeldRecords(settings)

    def trim(self) -> dict[str, int]:
        """Delete what was handled; return the number of deleted records by topic.

        Raises KafkaException, TimeoutError, RetryableError.
        """
        begins: dict[tuple[str, int], int] = {}
        handled: list[TopicPartition] = []
        for full, asking in self._asking:
            found = _committed(asking, full)
            for part in list(found):
                begin, end = asking.get_watermark_offsets(part, timeout=ADMIN_SECONDS_MAX)
                # An offset beyond the end: the log was truncated, and the group will read it from its beginning.
                if not begin < part.offset - 1 < end:
                    found.remove(part)
                begins[full, part.partition] = begin
            handled += _unchanged(asking, found)
        if not handled:
            return {}
        if not self._held.update():
            _log.info("records are not trimmed yet: dead letters are being replayed, or not all are read")
            return {}
        wanted = []
        for part in handled:
            begin = begins[part.topic, part.partition]
            target = self._before_held(part, begin)
            if target.offset > begin:
                wanted.append(target)
        return self._delete(wanted, begins) if wanted else {}

    def close(self) -> None:
        """Close the connections."""
        for _, asking in self._asking:
            asking.close()
        self._held.close()

    def _before_held(self, part: TopicPartition, begin: int) -> TopicPartition:
        """Return the partition with the offset below which records are deleted."""
        held = self._held.first_of(part.topic, part.partition, begin)
        last = part.offset - 1
        return TopicPartition(part.topic, part.partition, last if held is None else min(held, last))

    def _delete(self, wanted: list[TopicPartition], begins: Mapping[tuple[str, int], int]) -> dict[str, int]:
        admin = AdminClient(connection(self._settings, "nearkin-trim"))
        found: dict[str, int] = {}
        for part, done in admin.delete_records(wanted, request_timeout=ADMIN_SECONDS_MAX).items():
            begin = done.result(ADMIN_SECONDS_MAX).low_watermark
            found[part.topic] = found.get(part.topic, 0) + begin - begins[part.topic, part.partition]
        return found


def _committed(asking: Consumer, full: str) -> list[TopicPartition]:
    """Return a topic's committed offsets that have a leader epoch. Raises KafkaException."""
    there = asking.list_topics(timeout=ADMIN_SECONDS_MAX).topics
    parts = [TopicPartition(full, part) for part in there[full].partitions] if full in there else []
    found = asking.committed(parts, timeout=ADMIN_SECONDS_MAX) if parts else []
    for part in found:
        if part.error is not None:
            raise KafkaException(part.error)
    return [part for part in found if part.offset > 0 and part.leader_epoch is not None and part.leader_epoch >= 0]


def _unchanged(asking: Consumer, parts: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Return the partitions whose last handled record is the one that the group read.

    Another has a later leader epoch than was committed.
    """
    left = {part.partition: part for part in parts}
    if not left:
        return []
    # not a member of the group: nothing is committed, and no partition moves
    asking.assign([TopicPartition(part.topic, part.partition, part.offset - 1) for part in left.values()])
    found, deadline = [], time.monotonic() + READ_SECONDS
    try:
        while left and (seconds := deadline - time.monotonic()) > 0:
            message = asking.poll(seconds)
            part = None if message is None or message.error() else left.pop(message.partition() or 0, None)
            if message is None or part is None:
                continue
            epoch = message.leader_epoch()
            if message.offset() == part.offset - 1 and epoch is not None and epoch <= (part.leader_epoch or 0):
                found.append(part)
    finally:
        asking.unassign()
    return found


class TrimThread:
    """Trims every `kafka.trim_seconds`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seconds = settings.kafka.trim_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nearkin-trim", daemon=True)

    def start(self) -> Callable[[], None]:
        """Begin, unless `kafka.trim_seconds` is 0; return what ends it."""
        if self._seconds:
            for name in STAGE_TOPICS_OF.values():
                metrics.TRIMMED.labels(topic(self._settings, name))
            metrics.TRIM_SEEN.set(time.time())  # the first trim is due now: its failure counts from here
            self._thread.start()
        return self.stop

    def stop(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        trimmer = Trimmer(self._settings)
        while not self._stop.wait(self._seconds):
            try:
                for name, records in trimmer.trim().items():
                    metrics.TRIMMED.labels(name).inc(records)
                metrics.TRIM_SEEN.set(time.time())
            except (KafkaException, TimeoutError, RetryableError) as err:
                _log.warning("records were not trimmed: %s", str(err) or type(err).__name__)
        trimmer.close()
