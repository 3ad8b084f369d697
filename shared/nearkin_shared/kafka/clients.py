"""Create Kafka clients, and send messages.

Invariant: messages that `Outbox.flush` waited for are acknowledged by Kafka, in the order sent for each key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.tls_files import check_certificates
from nearkin_shared.errors import ConfigError, NearkinError, PermanentError, StoreUnavailable
from nearkin_shared.formats.message_layout import Encoded, joined
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.kafka.offset_tracker import PartitionOffsets

_log = logging.getLogger("nearkin.kafka")

STAGE_TOPICS = ("frames", "segments", "fresh", "paired", "placed")
TOPICS = (*STAGE_TOPICS, "committed", "dead", "config", "workers")
COMPACTED = ("config", "workers")
COMPACT_SOON = {"segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1", "delete.retention.ms": "3600000"}
"""An open segment is never compacted, and the default closes it after a week: past PATCHes were read at every start."""
SMALL_SEGMENTS = {"segment.bytes": str(16 * 1024 * 1024), "file.delete.delay.ms": "1000"}
"""Of the stage topics: a broker frees whole segments of trimmed records, and never the one that is written. With its
defaults each partition keeps 1 GiB, and freed segments for another minute."""
READABLE_BY_ALL = {"compression.type": "gzip"}
"""Of `committed`, which programs of others read. gzip is the one codec that every client has built in; kafka-python
reads lz4, snappy and zstd with further packages alone."""
OUTBOX_BYTES_MAX = 64 * 1024 * 1024
FLUSH_SECONDS_MAX = 60.0
ADMIN_SECONDS_MAX = 30.0
TOPIC_BYTES_MAX = 1_048_588
"""Kafka's default limit of a record batch, spelled out in our topics whatever the broker's own default is."""

SELDOM_FILLED = {"fetch.wait.max.ms": 500}
"""For a topic that is mostly empty and never paused. The broker answers at once when a record arrives, and an empty
answer costs it 1 ms of CPU. A reader that waits for the end of a topic waits this long for it."""
REPLICAS_FOR_TWO = 3
"""From so many replicas on two have to acknowledge: one may then be away."""
_NOT_ALLOWED = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})
NOT_NOW = frozenset(
    {
        *(KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN),
        *(KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_CONTROLLER, KafkaError.NETWORK_EXCEPTION),
    }
)
"""Errors of brokers and the client while a controller is unavailable or moves."""
REPEAT_SECONDS = 10.0
REPORTED_MAX = 256
_said: dict[str, float] = {}
"""Time of the last log line of each error, in this process."""
_said_lock = threading.Lock()

Headers = Mapping[str, bytes]
OnParts = Callable[[Consumer, list[TopicPartition]], None]
"""Callback of a consumer when partitions are assigned or revoked."""


def topic(settings: Settings, name: str) -> str:
    """Return the full name of one of TOPICS."""
    return f"{settings.kafka.topic_prefix}{name}"


def group(settings: Settings, service: str) -> str:
    """Return the consumer group of a service."""
    return f"{settings.kafka.topic_prefix}{service}"


def connection(settings: Settings, client_id: str) -> dict[str, Any]:
    """Return the librdkafka settings that all clients share. Raises ConfigError."""
    kafka = settings.kafka
    found: dict[str, Any] = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": client_id,
        "security.protocol": kafka.security_protocol,
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 2_000,
        "error_cb": _on_error,
        "logger": _log,
    }
    if kafka.security_protocol.startswith("sasl"):
        for name in ("sasl_username", "sasl_password"):
            if not getattr(kafka, name):
                raise ConfigError(
                    f'kafka.{name}: not set, and kafka.security_protocol "{kafka.security_protocol}" wants it '
                    f"(NEARKIN_KAFKA__{name.upper()})"
                )
        found |= {
            "sasl.mechanism": kafka.sasl_mechanism,
            "sasl.username": kafka.sasl_username,
            "sasl.password": kafka.sasl_password,
        }
    if kafka.ca_file is not None and kafka.security_protocol.endswith("ssl"):
        check_certificates("kafka.ca_file", kafka.ca_file)
        found["ssl.ca.location"] = kafka.ca_file
    return found


def _on_error(err: KafkaError) -> None:
    """Log a client's error, each at most once in REPEAT_SECONDS; librdkafka reconnects itself.

    While a broker is unavailable each client reports each attempt: 1,200 lines of one maintenance worker in a chaos run
    of
    a minute.
    """
    said, now = err.str(), time.monotonic()
    with _said_lock:
        if now - _said.get(said, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(_said) >= REPORTED_MAX:
            _said.clear()
        _said[said] = now
    _log.warning("kafka: %s", said)


def retention_ms(settings: Settings) -> str:
    """Return how long topics keep messages, as Kafka has it."""
    return str(settings.kafka.retention_hours * 3_600_000)


def durability(settings: Settings) -> dict[str, str]:
    """Return what topics need so that what Kafka acknowledged outlives the loss of one broker.

    With fewer than three replicas no second one is waited for: a single restart would stop all writes.
    """
    in_sync = 2 if settings.kafka.replication >= REPLICAS_FOR_TWO else 1
    return {"min.insync.replicas": str(in_sync), "unclean.leader.election.enable": "false"}


def durability_problem(found: Mapping[str, str | None], wanted: Mapping[str, str]) -> str | None:
    """Return which setting of a topic may lose acknowledged messages, or None."""
    if found.get("unclean.leader.election.enable") != wanted["unclean.leader.election.enable"]:
        return "unclean.leader.election.enable is not false: a replica that lacks acknowledged messages may lead"
    in_sync = found.get("min.insync.replicas") or "1"
    if int(in_sync) < int(wanted["min.insync.replicas"]):
        return (
            f"min.insync.replicas is {in_sync}, want {wanted['min.insync.replicas']}: one broker may hold the only copy"
        )
    return None


def check_durability(settings: Settings) -> None:
    """Refuse topics that may lose acknowledged messages (I3).

    Topics that an older version created keep other settings, a codec or no compaction: a warning names them. Without
    the
    right to describe configurations the check is skipped with a warning. Raises ConfigError, StoreUnavailable.
    """
    wanted = durability(settings)
    admin = AdminClient(connection(settings, "nearkin-topics"))
    names = {topic(settings, name): name for name in TOPICS}
    try:
        asked = admin.describe_configs([ConfigResource(ResourceType.TOPIC, name) for name in names])
        answers = {resource.name: answer.result(ADMIN_SECONDS_MAX) for resource, answer in asked.items()}
    except KafkaException as err:
        if err.args[0].code() in _NOT_ALLOWED:
            _log.warning("topics: not checked for durability, the user may not describe configurations: %s", err)
            return
        raise unavailable(settings, err) from err
    except TimeoutError as err:
        raise StoreUnavailable(f"kafka: topics not described in {ADMIN_SECONDS_MAX:.0f} s") from err
    for name, entries in answers.items():
        held = {one: entry.value for one, entry in entries.items()}
        problem = durability_problem(held, wanted)
        if problem is None and names[name] not in COMPACTED and "compact" in held["cleanup.policy"]:
            problem = f"cleanup.policy is {held['cleanup.policy']}, and compaction removes records that are not done"
        if problem is not None:
            raise ConfigError(f"kafka topic {name}: {problem}; run `python -m nearkin_shared.kafka.topics`")
        differing = [
            f"{one} is {held.get(one)}, want {value}"
            for one, value in topic_config(settings, names[name]).items()
            if held.get(one) != value and not is_stricter(one, held.get(one) or value, value)
        ]
        if differing:
            _log.warning("kafka topic %s: %s; run `python -m nearkin_shared.kafka.topics`", name, "; ".join(differing))


def topic_config(settings: Settings, name: str) -> dict[str, str]:
    """Return the settings of one of TOPICS: durability, retention, segments, codec."""
    if name in COMPACTED:
        return {**durability(settings), "cleanup.policy": "compact", **COMPACT_SOON}
    own = READABLE_BY_ALL if name == "committed" else SMALL_SEGMENTS if name in STAGE_TOPICS else {}
    return {**durability(settings), "cleanup.policy": "delete", "retention.ms": retention_ms(settings), **own}


def is_stricter(setting: str, held: str, wanted: str) -> bool:
    """Return whether an operator's setting is stricter.

    That is more replicas, earlier compaction, or smaller segments.
    """
    match setting:
        case "min.insync.replicas":
            return int(held) > int(wanted)
        case "segment.ms" | "min.cleanable.dirty.ratio" | "segment.bytes" | "file.delete.delay.ms":
            return float(held) < float(wanted)
    return False


def create_topics(settings: Settings) -> list[str]:
    """Create the missing TOPICS; return their names. Raises StoreUnavailable, PermanentError."""
    return _create(
        settings,
        [
            NewTopic(
                topic(settings, name),
                1 if name in COMPACTED else settings.kafka.partitions,
                replication_factor=settings.kafka.replication,
                config={"max.message.bytes": str(TOPIC_BYTES_MAX), **topic_config(settings, name)},
            )
            for name in TOPICS
        ],
    )


def create_named(settings: Settings, names: Sequence[str]) -> list[str]:
    """Make a user's topics that are missing, as the brokers' defaults have it.

    Raises StoreUnavailable, PermanentError.
    """
    kafka = settings.kafka
    return _create(settings, [NewTopic(name, kafka.partitions, replication_factor=kafka.replication) for name in names])


def _create(settings: Settings, wanted: Sequence[NewTopic]) -> list[str]:
    admin = AdminClient(connection(settings, "nearkin-topics"))
    try:
        there = admin.list_topics(timeout=ADMIN_SECONDS_MAX).topics
    except KafkaException as err:
        raise unavailable(settings, err) from err
    made = []
    for new in wanted:
        if new.topic in there:
            continue
        try:
            admin.create_topics([new])[new.topic].result(ADMIN_SECONDS_MAX)
            made.append(new.topic)
        except KafkaException as err:
            code, said = err.args[0].code(), f"topic {new.topic}: {err.args[0].str()}"
            if code == KafkaError.INVALID_REPLICATION_FACTOR:
                raise StoreUnavailable(f"{said} Brokers may be starting yet; else lower kafka.replication") from err
            if code in NOT_NOW:
                raise StoreUnavailable(said) from err
            if code != KafkaError.TOPIC_ALREADY_EXISTS:
                raise PermanentError(said) from err
        except TimeoutError as err:
            raise StoreUnavailable(f"topic {new.topic}: kafka has not made it in {ADMIN_SECONDS_MAX:.0f} s") from err
    return made


def producer(settings: Settings, client_id: str) -> Producer:
    """Return a producer that repeats nothing, loses nothing, and holds a bounded queue."""
    return Producer(
        connection(settings, client_id)
        | {
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": settings.kafka.compression,
            "linger.ms": 2,
            "batch.size": 1_000_000,
            "message.max.bytes": TOPIC_BYTES_MAX,
            "queue.buffering.max.kbytes": OUTBOX_BYTES_MAX // 1024,
            "queue.buffering.max.messages": 10_000,
            "delivery.timeout.ms": 120_000,
        }
    )


def consumer(settings: Settings, group_id: str, client_id: str, **extra: Any) -> Consumer:
    """Return a consumer that commits nothing by itself."""
    found = {
        "group.id": group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": settings.kafka.session_timeout_ms,
        "heartbeat.interval.ms": settings.kafka.session_timeout_ms // 4,
        "max.poll.interval.ms": 600_000,
        # Bounds of what waits in this process: the broker's default of 64 MiB a topic is for larger machines.
        "queued.max.messages.kbytes": 32 * 1024,
        "fetch.max.bytes": 16 * 1024 * 1024,
        # A partition that is read again after a pause waits for the end of the open request.
        "fetch.wait.max.ms": 100,
        "topic.metadata.refresh.interval.ms": 30_000,
        "allow.auto.create.topics": False,
    }
    return Consumer(connection(settings, client_id) | found | extra)


def unavailable(settings: Settings, err: KafkaException) -> StoreUnavailable:
    """Return the error for a Kafka that does not answer."""
    reason = err.args[0].str() if err.args and isinstance(err.args[0], KafkaError) else str(err)
    return StoreUnavailable(f"kafka {settings.kafka.bootstrap_servers}: {reason}")


def on_parts(settings: Settings, callback: OnParts) -> OnParts:
    """Wrap a callback for assigned or revoked partitions.

    An uncaught error of the client in such a callback leaves `poll` as a bare KafkaError, which is no exception and
    passes
    every `except` clause with a type. Here it becomes StoreUnavailable.
    """

    def call(client: Consumer, parts: list[TopicPartition]) -> None:
        try:
            callback(client, parts)
        except KafkaException as err:
            raise unavailable(settings, err) from err

    return call


def as_bytes(value: str | bytes | None) -> bytes | None:
    """Return a key, value or header of a message as bytes; the client's types allow text too."""
    return value.encode() if isinstance(value, str) else value


def delivery_error(problem: KafkaError, full: str, value_bytes: int) -> NearkinError:
    """Return the error for an undelivered message: PermanentError if it is too large."""
    if problem.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return PermanentError(
            f"kafka topic {full}: a message of {value_bytes} bytes was refused as too large: want max.message.bytes "
            f"{TOPIC_BYTES_MAX} or more (kafka-configs --alter --topic {full} --add-config "
            f"max.message.bytes={TOPIC_BYTES_MAX}), and the brokers' message.max.bytes no lower; then start again what "
            "has ended: it goes on from Kafka's offsets"
        )
    return StoreUnavailable(f"kafka topic {full}: a message was not delivered: {problem.str()}")


def is_final(problem: KafkaError) -> bool:
    """Return whether the client that reported this must be replaced.

    The error of a message has the code of a fatal error, but not its flag.
    """
    return problem.fatal() or problem.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID)


def signed_headers(
    authenticator: EnvelopeAuthenticator | None, full: str, key: bytes, value: bytes, headers: Headers
) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message, with its MAC where there is an authenticator."""
    found: list[tuple[str, bytes | None]] = [(name, text) for name, text in headers.items() if name != MAC_HEADER]
    if authenticator is not None:
        found.append((MAC_HEADER, authenticator.mac_of(full, key, value)))
    return found


class Outbox:
    """Messages in flight to Kafka. Not shared between threads."""

    authenticator: EnvelopeAuthenticator | None = None
    stages_in_memory: frozenset[str] = frozenset()

    def __init__(self, settings: Settings, client_id: str, authenticator: EnvelopeAuthenticator | None) -> None:
        """`authenticator` signs the messages of `send`; None: for topics of other programs only."""
        self._settings = settings
        self.authenticator = authenticator
        self._producer = producer(settings, client_id)
        self._failure: NearkinError | None = None
        self._unanswered = PartitionOffsets()
        self.sent_messages = 0
        self.sent_bytes = 0

    @property
    def acknowledged_messages(self) -> int:
        """Number of messages acknowledged before the first one that is not."""
        return self._unanswered.committable or 0

    def send(self, name: str, key: bytes, value: Encoded, headers: Headers) -> None:
        """Sign and queue a message for one of TOPICS; waits while the queue is full.

        Raises StoreUnavailable, PermanentError.
        """
        full, data = topic(self._settings, name), joined(value)
        self.send_to(full, key, data, signed_headers(self.authenticator, full, key, data, headers))

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Queue a message for any topic. Raises as `send` does, also for earlier messages."""
        deadline = time.monotonic() + FLUSH_SECONDS_MAX
        while True:
            self._check()
            try:
                on_delivery = partial(self._delivered, self.sent_messages)
                self._producer.produce(full, value, key, headers=list(headers), on_delivery=on_delivery)
            except BufferError as err:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"kafka: {full}: no room to send for {FLUSH_SECONDS_MAX:.0f} s") from err
                self._producer.poll(0.1)
                continue
            except KafkaException as err:
                raise delivery_error(err.args[0], full, len(value or b"")) from err
            self._unanswered.start(self.sent_messages)
            self.sent_messages += 1
            self.sent_bytes += len(value or b"")
            return

    def poll_acks(self) -> None:
        """Learn what was acknowledged, without waiting.

        Raises StoreUnavailable, PermanentError for what never will be.
        """
        self._producer.poll(0)
        self._check()

    def flush(self) -> None:
        """Wait until all messages are acknowledged. Raises StoreUnavailable, PermanentError.

        PermanentError: a message is too large.
        """
        left = self._producer.flush(FLUSH_SECONDS_MAX)
        self._check()
        if left:
            raise StoreUnavailable(f"kafka: {left} messages not acknowledged in {FLUSH_SECONDS_MAX:.0f} s")

    def close(self) -> None:
        """Drop the queued messages: their offsets are not committed."""
        self._producer.purge(in_queue=True, in_flight=True)
        self._producer.flush(1.0)

    def _delivered(self, number: int, err: KafkaError | None, message: KafkaMessage) -> None:
        if err is None:
            self._unanswered.finish(number)
        elif self._failure is None:
            self._failure = delivery_error(err, message.topic() or "", len(message))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
