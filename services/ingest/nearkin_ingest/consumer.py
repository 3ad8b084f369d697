"""Consume users' topics and store their records as blobs.

    1 poll  2 read and check  3 queue frames and end, or a dead letter  4 flush  5 commit offsets          (I4)

Blobs of a key become versions in the order of their records. A record that is delivered again has the same origin, so
it is committed once. A record that can never be stored becomes a dead letter; one whose object cannot be read now holds
back its own partition only, at most for RECORD_RETRY_SECONDS. After a loss of Kafka the consumer restarts from its
committed offsets (`run_forever`). It takes no records while many of its blobs are in flight (`blobs_in_flight`).

Invariant: a record's offset is committed after its blob, or its dead letter, is durable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import AdminClient
from tenacity import RetryCallState, Retrying, wait_random_exponential

from nearkin_ingest.blob_batches import BlobBatches
from nearkin_ingest.blobs_in_flight import BlobsInFlight
from nearkin_ingest.frames import (
    STAGE,
    DependencyUnavailable,
    attempt_id,
    frames_of,
    header_pairs,
    object_frames,
    send_blob,
)
from nearkin_ingest.records import Intake, UserRecord, intake_of, origin_of, tenants_of
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, RetryableError, StoreUnavailable
from nearkin_shared.kafka.clients import (
    ADMIN_SECONDS_MAX,
    Outbox,
    as_bytes,
    connection,
    consumer,
    group,
    is_final,
    on_parts,
    topic,
    unavailable,
)
from nearkin_shared.kafka.dead_letters import send_dead_letter
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.rebalance import RebalanceTrigger
from nearkin_shared.kafka.truncation import HandledRecords, Reading, read_again
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.observability import metrics, tracing

_log = logging.getLogger("nearkin.ingest")

POLL_SECONDS = 0.05
BATCH_RECORDS = 500
"""Records between two flushes; the client's prefetch bounds their bytes, 32 MiB."""
ALIVE_SECONDS = 5.0
"""Interval at which a consumer polls while it streams a long object, to stay in the group."""
PAUSE_AFTER_SECONDS = 5.0
BACKOFF_SECONDS_MAX = 30.0
RECORD_RETRY_SECONDS = 3600
"""How long a record may block its partition while a dependency is unavailable; then it becomes a dead letter."""

_Place = tuple[str, int]
_Piece = TypeVar("_Piece", bytes, memoryview)


class _PartitionRevoked(Exception):
    """The partition was revoked or this consumer stops: the record is started elsewhere."""


@dataclass(slots=True)
class _Stall:
    """A partition that waits for a dependency of its next record."""

    offset: int
    since: float
    attempts: int = 0
    until: float = 0.0


class IngestConsumer:
    """One consumer of the group. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        objects: ObjectStore | None,
        worker: str,
        authenticator: EnvelopeAuthenticator | None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`objects`: where claim checks are stored.

        `worker`: a unique name, stable over restarts (KIP-345).

        `beat` is called after each step, and after each piece of a long object.
        """
        self._settings = settings
        self._objects = objects
        self._tenants = tenants_of(settings)
        self._beat = beat
        self._outbox = Outbox(settings, f"{worker}-ingest", authenticator)
        self._in_flight = BlobsInFlight(settings, f"{worker}-ingest-events")
        self._batches = BlobBatches(self._outbox, self._in_flight.add)
        self._consumer: Consumer = consumer(
            settings,
            settings.ingest.group or group(settings, STAGE),
            f"{worker}-ingest",
            **{"group.instance.id": f"{STAGE}-{worker}"},
        )
        self._second_round = RebalanceTrigger(settings, settings.ingest.group or group(settings, STAGE))
        self._admin = AdminClient(connection(settings, f"{worker}-ingest-topics"))
        self._cluster = ""
        self._partitions = settings.kafka.partitions
        """Partitions of our topics, as Kafka reports them: with another number a key's blobs would lose their order."""
        self._topic_ids: dict[str, str] = {}
        self._handled = HandledRecords()
        self._truncated: set[_Place] = set()
        """Partitions of which the batch that is being taken has records behind a truncation: they come again."""
        self._closing = False
        self._mine: set[_Place] = set()
        self._done: dict[_Place, int] = {}
        """The offset to commit next, by partition."""
        self._stalled: dict[_Place, _Stall] = {}
        self._ahead: deque[KafkaMessage] = deque()
        self._paused = False
        self._stop = threading.Event()
        self._alive_at = self._roomy_at = time.monotonic()

    def run(self, stop: threading.Event, paused: Callable[[], bool]) -> None:
        """Consume until `stop`. Raises RetryableError if Kafka is unavailable."""
        self._stop = stop
        try:
            self._look_at_cluster()
            self._in_flight.open()
            came, went, lost = (on_parts(self._settings, on) for on in (self._assigned, self._revoked, self._lost))
            self._consumer.subscribe(list(self._tenants), on_assign=came, on_revoke=went, on_lost=lost)
            while not stop.is_set():
                self._pause(paused() or self._is_held_back())
                self._resume_due()
                self._step(self._take() if self._paused or self._in_flight.has_room() else [])  # 1
                self._beat()
        except KafkaException as err:
            raise unavailable(self._settings, err) from err
        finally:
            self._second_round.end()
            try:
                self._outbox.close()
                self._in_flight.close()
            finally:
                self._closing = True
                self._consumer.close()

    def _step(self, records: list[UserRecord]) -> None:
        """Process a batch of records and commit their offsets."""
        count_taken(records)
        passed_over: set[_Place] = set()
        with metrics.STEP_SECONDS.labels(STAGE).time() if records else nullcontext():
            for record in records:
                place = (record.topic, record.partition)
                if place not in passed_over and not self._one(record):  # 2, 3
                    passed_over.add(place)
            self._settle()  # 4, 5

    # --- one record --------------------------------------------------------------------------------------------------

    def _gather(self, intake: Intake, origin: bytes) -> None:
        """Add a small record's blob to a batch; continue the trace of its producer, or begin one."""
        with tracing.span(STAGE, intake.traceparent, tracing.about(origin, intake.tenant), begins=True) as traceparent:
            if traceparent != intake.traceparent:
                intake = replace(intake, traceparent=traceparent)
            self._batches.add(intake, origin, self._partitions)

    def _send(self, intake: Intake, origin: bytes, place: _Place) -> None:
        """Queue a record's blob; continues the trace of its producer, or begins one."""
        self._batches.send_before(intake, self._partitions)
        attempt = attempt_id(intake.tenant, intake.key, self._partitions)
        attributes = tracing.about(attempt, intake.tenant)
        with tracing.span(STAGE, intake.traceparent, attributes, begins=True) as traceparent:
            traced = replace(intake, traceparent=traceparent)
            size_bytes = send_blob(self._outbox, traced, attempt, origin, self._pieces(intake, place))
            self._in_flight.add(attempt, size_bytes)

    def _one(self, record: UserRecord) -> bool:
        """Process one record.

        False if it, and those after it in its partition, will be delivered again.
        """
        place = (record.topic, record.partition)
        if place not in self._mine or self._stop.is_set():
            return False
        try:
            intake = intake_of(record, self._tenants[record.topic], self._settings)
            if intake is not None:
                origin = origin_of(self._cluster, self._topic_id(record.topic), record)
                if self._batches.takes(intake):
                    self._gather(intake, origin)
                else:
                    self._send(intake, origin, place)
        except _PartitionRevoked:
            return False
        except DependencyUnavailable as err:
            if not self._waited_enough(record):
                self._stall(record, err)
                return False
            send_dead_letter(self._settings, self._outbox, record, STAGE, err)
        except (RetryableError, KafkaException):
            raise
        except Exception as err:
            _log.debug("%s", record.label, exc_info=err)
            send_dead_letter(self._settings, self._outbox, record, STAGE, err)
        self._stalled.pop(place, None)
        self._done[place] = record.offset + 1
        self._handled.add(*place, record.offset, record.leader_epoch)
        return True

    def _pieces(self, intake: Intake, place: _Place) -> Iterator[memoryview] | Iterator[bytes]:
        if intake.dataref is None:
            return self._watched(frames_of(intake.value or b""), place)
        if self._objects is None:
            raise BadInput("dataref: this consumer has no object store")
        return self._watched(object_frames(self._objects, intake.dataref), place)

    def _watched(self, pieces: Iterator[_Piece], place: _Place) -> Iterator[_Piece]:
        """Yield the pieces; poll in between to stay in the group. Raises _PartitionRevoked."""
        for piece in pieces:
            yield piece
            self._beat()
            if time.monotonic() - self._alive_at > ALIVE_SECONDS:
                parts = self._consumer.assignment()
                self._consumer.pause(parts)
                message = self._consumer.poll(0)
                if message is not None:
                    self._ahead.append(message)
                self._resume(self._consumer.assignment())
                self._alive_at = time.monotonic()
            if place not in self._mine or self._stop.is_set():
                raise _PartitionRevoked("partition revoked; its next consumer starts the record again")

    def _waited_enough(self, record: UserRecord) -> bool:
        stall = self._stalled.get((record.topic, record.partition))
        if stall is None or stall.offset != record.offset:
            return False
        return time.monotonic() - stall.since > RECORD_RETRY_SECONDS

    def _stall(self, record: UserRecord, err: DependencyUnavailable) -> None:
        """Seek back to a record and pause its partition until the next attempt."""
        place, now = (record.topic, record.partition), time.monotonic()
        stall = self._stalled.get(place)
        if stall is None or stall.offset != record.offset:
            stall = self._stalled[place] = _Stall(record.offset, now)
        stall.attempts += 1
        stall.until = now + _backoff_seconds(stall.attempts)
        _log.warning("%s: waits %.1f s: %s", record.label, stall.until - now, err)
        back = TopicPartition(record.topic, record.partition, record.offset)
        self._consumer.pause([back])
        self._consumer.seek(back)

    def _resume_due(self) -> None:
        """Resume the partitions whose wait is over."""
        now = time.monotonic()
        due = [place for place, stall in self._stalled.items() if 0 < stall.until <= now]
        for place in due:
            self._stalled[place].until = 0.0
        if due:
            self._resume([TopicPartition(*place) for place in due])

    # --- the consumer ------------------------------------------------------------------------------------------------

    def _take(self) -> list[UserRecord]:
        messages = list(self._ahead)
        self._ahead.clear()
        first = self._consumer.poll(POLL_SECONDS)
        self._alive_at = time.monotonic()
        if first is not None:
            # No second wait: `consume` would sit out its timeout for a batch that is not full.
            messages += [first, *self._consumer.consume(BATCH_RECORDS - 1, 0)]
        self._truncated.clear()
        return [record for message in messages if (record := self._record(message)) is not None]

    def _record(self, message: KafkaMessage) -> UserRecord | None:
        problem = message.error()
        if problem is not None:
            if problem.code() == KafkaError._PARTITION_EOF:
                return None
            if is_final(problem):
                raise StoreUnavailable(f"kafka: {problem.str()}; a new consumer takes over")
            _log.warning("kafka: %s", problem.str())  # also an unknown topic: consumed once it is created
            return None
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        if not self._is_new(message, (topic, partition)):
            return None
        kind, timestamp_ms = message.timestamp()
        unreadable = None
        try:
            headers = header_pairs(message.headers())
        except (UnicodeDecodeError, SystemError) as err:  # a header's name that is not UTF-8
            headers, unreadable = (), f"headers cannot be read: {err}"
        return UserRecord(
            topic=topic,
            partition=partition,
            offset=offset,
            key=as_bytes(message.key()),
            value=as_bytes(message.value()),
            all_headers=headers,
            unreadable=unreadable,
            timestamp_ms=None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
            leader_epoch=epoch if (epoch := message.leader_epoch()) is not None and epoch >= 0 else None,
        )

    def _is_new(self, message: KafkaMessage, place: _Place) -> bool:
        """Return whether to handle a record now.

        A partition whose log was truncated is read again.
        """
        if place in self._truncated:
            return False
        reading = self._handled.judge(message)
        if reading is Reading.TRUNCATED:
            _log.error(
                "%s[%d]: truncated below offset %d and written again; its new records are read from its beginning",
                *place, message.offset(),
            )  # fmt: skip
            self._truncated.add(place)
            read_again(self._consumer, *place)
        return reading is Reading.NEW

    def _settle(self) -> None:
        """Flush, then commit the offsets of completed records. Raises StoreUnavailable."""
        self._batches.send_all(self._partitions)  # also those whose partition was lost: later they would be too late
        if not self._done:
            return
        self._outbox.flush()
        done, self._done = self._done, {}
        offsets = [
            self._handled.committed(*place, offset, self._topic_ids.get(place[0], ""))
            for place, offset in done.items()
            if place in self._mine
        ]
        try:
            if offsets:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as err:
            # After a rebalance the next owner repeats a few records, which are committed once all the same. A partition
            # that stays with this member is committed with the next batch or the next step.
            _log.warning("offsets not committed: %s", err.args[0].str())
            for place, offset in done.items():
                self._done.setdefault(place, offset)

    def _pause(self, paused: bool) -> None:
        if paused:
            self._consumer.pause(self._consumer.assignment())  # each time: partitions may have been assigned meanwhile
        was, self._paused = self._paused, paused
        if was and not paused:
            self._resume(self._consumer.assignment())

    def _is_held_back(self) -> bool:
        """Wait a moment for room in the pipeline; return whether there has been none for long.

        Partitions are paused only then, since that drops what the client has fetched. Until then it is not polled.
        """
        if self._in_flight.has_room(POLL_SECONDS):
            self._roomy_at = time.monotonic()
        return time.monotonic() - self._roomy_at > PAUSE_AFTER_SECONDS

    def _resume(self, parts: list[TopicPartition]) -> None:
        """Resume the partitions that do not wait."""
        if self._paused:
            return
        waiting = {place for place, stall in self._stalled.items() if stall.until}
        self._consumer.resume([part for part in parts if (part.topic, part.partition) not in waiting])

    def _assigned(self, client: Consumer, parts: list[TopicPartition]) -> None:
        # A consumer that is being closed has no coordinator to ask any more.
        known = client.committed(parts, timeout=ADMIN_SECONDS_MAX) if parts and not self._closing else []
        for part in parts:
            self._topic_ids.pop(part.topic, None)  # the topic may have been created again
        begins = []
        for part in known:
            if part.error is not None:
                raise KafkaException(part.error)
            begins.append(self._handled.resume(part, self._topic_id(part.topic) if part.metadata else ""))
        client.incremental_assign(begins or parts)
        if self._closing:
            return
        self._second_round.begin()
        self._mine |= {(part.topic, part.partition) for part in parts}
        _log.info("took %s", ", ".join(sorted(f"{part.topic}[{part.partition}]" for part in parts)) or "nothing")

    def _revoked(self, client: Consumer, parts: list[TopicPartition]) -> None:
        self._settle()
        self._lost(client, parts)

    def _lost(self, client: Consumer, parts: list[TopicPartition]) -> None:
        for part in parts:
            place = (part.topic, part.partition)
            self._mine.discard(place)
            self._done.pop(place, None)
            self._stalled.pop(place, None)
            self._handled.forget(*place)
        client.incremental_unassign(parts)

    def _look_at_cluster(self) -> None:
        found = self._admin.list_topics(timeout=ADMIN_SECONDS_MAX)
        self._cluster = str(found.cluster_id or "")
        frames = found.topics.get(topic(self._settings, "frames"))
        if frames is not None and frames.partitions:
            self._partitions = len(frames.partitions)
        if self._partitions != self._settings.kafka.partitions:
            _log.warning(
                'kafka.partitions "%d": topic %s has %d; set that number',
                self._settings.kafka.partitions, topic(self._settings, "frames"), self._partitions,
            )  # fmt: skip

    def _topic_id(self, topic: str) -> str:
        """Return the topic's id, which differs if it is created again.

        Empty if the brokers have none.

        Raises: KafkaException, StoreUnavailable.
        """
        if topic not in self._topic_ids:
            found = self._admin.describe_topics(TopicCollection([topic]), request_timeout=ADMIN_SECONDS_MAX)[topic]
            try:
                self._topic_ids[topic] = str(found.result(ADMIN_SECONDS_MAX).topic_id or "")
            except TimeoutError as err:  # not the fault of the record
                raise StoreUnavailable(
                    f"topic {topic}: kafka did not describe it within {ADMIN_SECONDS_MAX:.0f} s; retrying"
                ) from err
        return self._topic_ids[topic]


def count_taken(records: Sequence[UserRecord]) -> None:
    """Count received records, repeated deliveries included."""
    sent_ms = [record.timestamp_ms for record in records if record.timestamp_ms is not None]
    metrics.RECORD_AGE.labels(STAGE).set(max(0.0, time.time() - min(sent_ms) / 1000) if sent_ms else 0.0)
    metrics.RECORDS.labels(STAGE).inc(len(records))
    metrics.RECORD_BYTES.labels(STAGE).inc(sum(len(record.value or b"") for record in records))


_jitter = wait_random_exponential(multiplier=0.25, max=BACKOFF_SECONDS_MAX)


def _backoff_seconds(attempt: int) -> float:
    """Return tenacity's exponential wait with full jitter, to be waited without blocking."""
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = attempt
    return max(0.05, _jitter(state))
