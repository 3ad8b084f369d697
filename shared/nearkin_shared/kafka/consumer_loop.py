"""Run the loop of a worker.

    1 fetch  2 process: read, decide, put, publish  3 emit  4 flush  5 commit offsets

A crash between two steps only repeats work: every effect is idempotent. After the loss of a dependency the loop starts
again from Kafka's offsets (`run_forever`), because the data in memory may belong to a partition of another worker.

Invariant (I4): offsets are committed after effects, on revocation as during normal work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar, runtime_checkable

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage
from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_delay, wait_random_exponential

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import RetryableError, StoreUnavailable
from nearkin_shared.formats.message_layout import Encoded
from nearkin_shared.kafka.batch_spans import trace_records
from nearkin_shared.kafka.clients import (
    as_bytes,
    consumer,
    group,
    is_final,
    on_parts,
    topic,
    unavailable,
)
from nearkin_shared.kafka.fetched_records import FetchedRecords
from nearkin_shared.kafka.rebalance import RebalanceTrigger
from nearkin_shared.kafka.truncation import LeaderEpochs, Reading, read_again
from nearkin_shared.observability import metrics
from nearkin_shared.observability.tracing import current
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin.worker")

IDLE_SECONDS = 0.25
"""How long a worker without work sleeps at a time: at 0.05 s waking up took as much Python as a slow put's work."""
COMMIT_SECONDS = 0.5
RETRY_SECONDS_MAX = 60.0
RESTART_SECONDS = 1.0
BATCH_MESSAGES = 32
"""Messages that a worker processes in one batch: 32 MiB at their largest."""
BATCH_MESSAGES_MIN = 16
STEP_SECONDS = 0.1
"""How long a step should take at most: the records of others wait for it. It has fewer messages on a busy machine."""
FETCH_MESSAGES = 256
PREFETCH = {
    "queued.min.messages": 2 * BATCH_MESSAGES,
    "fetch.message.max.bytes": 128 * 1024,
    "fetch.queue.backoff.ms": 10,
}
"""Bounds of the client's queue, which is one for all partitions: by default 32 MiB of a flood would be before all else.
The answers to fetches have equal shares of all partitions. With the default backoff each full queue cost a second."""
FED_IN_MEMORY = {"fetch.wait.max.ms": 1000}
"""For a topic of which nearly all messages are passed in memory: an empty answer costs the broker 1 ms of CPU."""
GATHER_SECONDS = 1.0
"""How long a batch may grow while messages stream: one at a time costs a stage three times what one of sixteen does.
No caller waits for it: a caller that waits has sent an end, which ends the batch."""

Made = TypeVar("Made")


@frozen
class Record:
    """A record as received."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: Encoded
    """From Kafka always bytes."""
    headers: dict[str, bytes]
    all_headers: tuple[tuple[str, bytes | None], ...]
    is_internal: bool = False
    """Sent by another stage of this process, not by Kafka."""

    @property
    def label(self) -> str:
        """Name the topic, partition and offset of the record, for messages."""
        if self.is_internal:
            return f"{self.topic}, message {self.offset} in memory"
        return f"{self.topic}[{self.partition}] offset {self.offset}"


class Handler(Protocol):
    """The work of one kind of worker; called from one thread."""

    def on_assigned(self, partition: int, metadata: str) -> None:
        """Begin a partition; `metadata` is what was committed with its offset."""

    def handle(self, records: list[Record]) -> None:
        """Work on records, in order. Raises RetryableError when a dependency is away for long."""

    def idle(self) -> float:
        """Do work that is due without records; return the seconds until the next call at most."""

    def drain(self, partition: int) -> None:
        """Bring all effects of a partition to their end, before it is given up."""

    def on_dropped(self, partition: int) -> None:
        """Forget a partition."""

    def committable(self) -> Iterable[tuple[int, int, str]]:
        """Yield (partition, offset, metadata) that may be committed."""

    def close(self) -> None:
        """Release all resources; incomplete work is dropped."""


@runtime_checkable
class SupportsCommitted(Protocol):
    """A handler that keeps something until an offset is committed."""

    def on_committed(self, partition: int, offset: int) -> None:
        """Release what records before a committed offset needed: they are not read again."""


@runtime_checkable
class SupportsRoundRobin(Protocol):
    """A handler that takes all fetched records, and orders the work on them by itself.

    It does some of it in each step.
    """

    @property
    def has_room(self) -> bool:
        """Return whether it takes more records."""


class Runnable(Protocol):
    """A worker that `run_forever` runs."""

    def run(self, stop: threading.Event, paused: Callable[[], bool]) -> None:
        """Work until `stop`. Raises RetryableError after a dependency was away for long."""


class Loop:
    """One consumer carrying one handler."""

    def __init__(
        self,
        settings: Settings,
        service: str,
        name: str,
        worker: str,
        handler: Handler,
        beat: Callable[[], None] = lambda: None,
        is_held_back: Callable[[], bool] = lambda: False,
        *,
        is_fed_in_memory: bool = False,
    ) -> None:
        """`worker` is a static member id of the group, kept over restarts (KIP-345).

        `beat` is called after each step, idle ones included. `is_held_back`: a later stage is far behind, so partitions
        with many records wait. `is_fed_in_memory`: the stage before is in this process, so the topic is mostly empty.
        """
        self._settings = settings
        self._topic = topic(settings, name)
        self._handler = handler
        self._sorts = handler if isinstance(handler, SupportsRoundRobin) else None
        self._beat, self._is_held_back = beat, is_held_back
        self._stage = service
        self._name = worker
        self._committed: dict[int, tuple[int, str]] = {}
        self._epochs = LeaderEpochs()
        self._truncated: set[int] = set()
        """Partitions of which the records that are being fetched are behind a truncation: they come again."""
        self._last_commit = time.monotonic()
        self._paused = False
        self._failed = False
        self._closing = False
        self._mine: set[int] = set()
        """Partitions that the handler has."""
        self._streaming = False
        self._fetched: FetchedRecords[Record] = FetchedRecords()
        """Records not processed yet. Waiting for more of them may lose a partition, and their work with it."""
        self._full: set[int] = set()
        """Partitions that are not fetched until some of their records are processed."""
        self._step_messages = BATCH_MESSAGES
        self._idle_seconds = 0.0
        self._consumer: Consumer = consumer(
            settings,
            group(settings, service),
            worker,
            **{"group.instance.id": self._name},
            **PREFETCH,
            **(FED_IN_MEMORY if is_fed_in_memory else {}),
        )
        self._second_round = RebalanceTrigger(settings, group(settings, service))

    def run(self, stop: threading.Event, paused: Callable[[], bool]) -> None:
        """Work until `stop`. Raises RetryableError after a dependency was away for long."""
        try:
            came, went, lost = (
                on_parts(self._settings, callback) for callback in (self._assigned, self._revoked, self._lost)
            )
            self._consumer.subscribe([self._topic], on_assign=came, on_revoke=went, on_lost=lost)
            while not stop.is_set():
                self._pause(paused())
                records = self._take()
                if records:
                    failpoint("worker.received")
                    began = time.monotonic()
                    hand_over(self._stage, self._handler, records)
                    self._fit_step(len(records), time.monotonic() - began)
                    failpoint("worker.handled")
                self._idle_seconds = min(self._handler.idle(), IDLE_SECONDS)
                if time.monotonic() - self._last_commit >= COMMIT_SECONDS:
                    self._commit()
                self._beat()
            for part in self._consumer.assignment():
                self._handler.drain(part.partition)
            self._commit()
        except KafkaException as err:
            self._failed = True
            raise unavailable(self._settings, err) from err
        except BaseException:
            self._failed = True
            raise
        finally:
            self._second_round.end()
            self._closing = True
            try:
                self._consumer.close()  # revokes: complete work is committed, failed work is dropped
            finally:
                self._handler.close()

    def _take(self) -> list[Record]:
        """Return the records of the next step, by round robin over partitions.

        In a stream of messages also those that arrive within GATHER_SECONDS, unless an end is among them or the handler
        has work that is due.
        """
        if self._sorts is not None and not self._sorts.has_room:
            return []
        self._resume_emptied()
        is_held_back = self._is_held_back()
        has_work = len(self._fetched) > 0 and not is_held_back and not self._paused
        arrived = self._fetch(0.0 if has_work else self._idle_seconds)
        gather_seconds = GATHER_SECONDS if self._idle_seconds >= IDLE_SECONDS else self._idle_seconds
        deadline = time.monotonic() + gather_seconds
        while arrived and self._streaming and not self._fetched.has_end:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._fetched) >= self._step_messages:
                break
            arrived = self._fetch(left)
        self._streaming = len(self._fetched) > 0
        if self._paused:
            return []
        if self._sorts is not None:
            return self._fetched.take(len(self._fetched))
        return self._fetched.take(self._step_messages, short_alone=is_held_back)

    def _fetch(self, seconds: float) -> bool:
        """Hold the records that the client has; return whether there were any.

        Waits for the first one.
        """
        first = self._consumer.poll(seconds)
        if first is not None or not len(self._fetched):
            metrics.RECORD_AGE.labels(self._stage).set(_age_seconds(first))
        if first is None:
            return False
        self._hold(first)  # before the client may lose its partition in the next call
        self._truncated.clear()  # what the client gives from now on is what it reads again
        # `consume` would sit out any timeout for a batch that is not full: it is given none.
        for message in self._consumer.consume(FETCH_MESSAGES - 1, 0):
            self._hold(message)
        self._truncated.clear()
        full = {part for part in self._mine - self._full if self._fetched.is_full(part, len(self._mine))}
        if full:
            self._consumer.pause([TopicPartition(self._topic, part) for part in full])
            self._full |= full
        return True

    def _hold(self, message: KafkaMessage) -> None:
        record = self._record(message)
        if record is not None and record.partition in self._mine:
            self._fetched.add(record)

    def _resume_emptied(self) -> None:
        """Fetch partitions again whose records are processed by half."""
        if self._paused or not self._full:
            return
        emptied = {part for part in self._full if self._fetched.has_room(part, len(self._mine))}
        if emptied:
            self._consumer.resume([TopicPartition(self._topic, part) for part in emptied])
            self._full -= emptied

    def _fit_step(self, messages: int, seconds: float) -> None:
        """Choose the size of the next step by how long one took."""
        if messages >= self._step_messages or seconds > STEP_SECONDS:
            fitting = int(messages * STEP_SECONDS / max(seconds, 1e-6))
            self._step_messages = min(BATCH_MESSAGES, max(BATCH_MESSAGES_MIN, fitting))

    def _record(self, message: KafkaMessage) -> Record | None:
        problem = message.error()
        if problem is not None:
            if problem.code() in (KafkaError._PARTITION_EOF, KafkaError.UNKNOWN_TOPIC_OR_PART):
                return None
            if is_final(problem):
                raise self._ended(problem)
            _log.warning("%s: %s", self._topic, problem.str())
            return None
        headers = tuple((str(header[0]), as_bytes(header[1])) for header in message.headers() or ())
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        if partition in self._truncated:
            return None
        reading = self._epochs.note(message)
        if reading is Reading.TRUNCATED:
            _log.error(
                "%s[%d]: truncated below offset %d; it is read from its beginning", self._topic, partition, offset
            )
            self._truncated.add(partition)
            read_again(self._consumer, self._topic, partition)
        if reading is not Reading.NEW:
            return None
        return Record(
            self._topic,
            partition,
            offset,
            as_bytes(message.key()),
            as_bytes(message.value()) or b"",
            {name: value for name, value in headers if value is not None},
            headers,
        )

    def _ended(self, problem: KafkaError) -> StoreUnavailable:
        """Return the error that makes `run_forever` begin with a new consumer."""
        return StoreUnavailable(
            f"{self._topic}: {problem.str()}; a new consumer takes over. "
            f"Should this come again and again, two workers run as {self._name}: give each a --worker of its own"
        )

    def _pause(self, paused: bool) -> None:
        parts = self._consumer.assignment() if paused != self._paused or paused else []
        if paused:
            self._consumer.pause(parts)  # again each time: partitions may have come meanwhile
        elif self._paused:
            self._consumer.resume([part for part in parts if part.partition not in self._full])
        self._paused = paused

    def _assigned(self, client: Consumer, parts: list[TopicPartition]) -> None:
        # A consumer that is being closed has no coordinator to ask any more: it would wait for all of the timeout.
        known = client.committed(parts, timeout=30.0) if parts and not self._closing else []
        begins = []
        for part in known:
            if part.error is not None:
                raise KafkaException(part.error)
            self._handler.on_assigned(part.partition, part.metadata or "")
            self._mine.add(part.partition)
            begins.append(self._epochs.resume(part))
        client.incremental_assign(begins or parts)
        if self._closing:
            return
        if not self._paused:
            client.resume(begins or parts)  # a pause outlasts the loss of a partition
        self._second_round.begin()
        _log.info("%s: took partitions %s", self._topic, sorted(part.partition for part in parts))

    def _revoked(self, client: Consumer, parts: list[TopicPartition]) -> None:
        if not self._failed:
            for part in parts:
                if part.partition in self._mine:
                    self._handler.drain(part.partition)
            self._commit()
        self._forget(parts)
        client.incremental_unassign(parts)

    def _lost(self, client: Consumer, parts: list[TopicPartition]) -> None:
        self._forget(parts)
        client.incremental_unassign(parts)

    def _forget(self, parts: list[TopicPartition]) -> None:
        for part in parts:
            # The next owner of the partition begins at the committed offsets, which are before these records.
            self._fetched.drop(part.partition)
            self._full.discard(part.partition)
            if part.partition in self._mine:
                self._mine.remove(part.partition)
                self._handler.on_dropped(part.partition)
            self._committed.pop(part.partition, None)
            self._epochs.forget(self._topic, part.partition)

    def _commit(self) -> None:
        self._last_commit = time.monotonic()
        wanted = {part: (offset, metadata) for part, offset, metadata in self._handler.committable()}
        changed = {part: state for part, state in wanted.items() if self._committed.get(part) != state}
        if not changed:
            return
        offsets = [
            self._epochs.committed(self._topic, part, offset, metadata) for part, (offset, metadata) in changed.items()
        ]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as err:
            # Another member has the partition, or the coordinator moves: the next owner repeats a little work. A fatal
            # error is reported again as a message; raised here it would interrupt a rebalance.
            _log.warning("%s: offsets not committed: %s", self._topic, err.args[0].str())
            return
        self._committed.update(changed)
        if isinstance(self._handler, SupportsCommitted):
            for part, (offset, _) in changed.items():
                self._handler.on_committed(part, offset)
        failpoint("worker.committed")


def hand_over(stage: str, handler: Handler, records: list[Record]) -> None:
    """Let a stage process records, with its metrics and spans. Raises RetryableError."""
    metrics.RECORDS.labels(stage).inc(len(records))
    metrics.RECORD_BYTES.labels(stage).inc(sum(len(record.value) for record in records))
    tracing = current()
    with metrics.STEP_SECONDS.labels(stage).time():
        if tracing is None:
            handler.handle(records)
        else:
            with trace_records(tracing, stage, records) as given:
                handler.handle(given)


def _age_seconds(message: KafkaMessage | None) -> float:
    """Return how long ago a record was sent; 0 where there is none or it does not say."""
    if message is None or message.error() is not None:
        return 0.0
    kind, sent_ms = message.timestamp()
    return 0.0 if kind == TIMESTAMP_NOT_AVAILABLE else max(0.0, time.time() - sent_ms / 1000)


def patiently(work: Callable[[], Made]) -> Made:
    """Call `work`; retry while a dependency is unavailable, as `retrying` states.

    The first attempt is plain, because setting up the retries takes 60 us, a third of a stage's work on a segment.
    """
    try:
        return work()
    except RetryableError:
        return retrying()(work)


def retrying() -> Retrying:
    """Return the retry policy for unavailable dependencies: jitter, up to RETRY_SECONDS_MAX."""
    return Retrying(
        retry=retry_if_exception_type(RetryableError),
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        stop=stop_after_delay(RETRY_SECONDS_MAX),
        before_sleep=before_sleep_log(_log, logging.WARNING),
        reraise=True,
    )


def run_forever(make: Callable[[], Runnable], stop: threading.Event, paused: Callable[[], bool], stage: str) -> None:
    """Run loops one after another: after a long outage, restart from Kafka's offsets."""
    metrics.RESTARTS.labels(stage)  # there from the start, so that the first one is seen as a change
    while not stop.is_set():
        try:
            make().run(stop, paused)
        except RetryableError as err:
            metrics.RESTARTS.labels(stage).inc()
            _log.warning("starting over: %s", err)
            stop.wait(RESTART_SECONDS)
