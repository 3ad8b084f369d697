"""List, replay and drop dead letters.

A mark is a record of the dead topic without value whose header names the letter; DROPPED_HEADER distinguishes a drop
from a replay. Replay and mark are one transaction. A second replay or drop, even a concurrent one, is fenced by the
transactional id before it reads the marks.

Invariant: a letter is replayed or dropped at most once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import field, replace

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, NotFound, PermanentError
from nearkin_shared.kafka.clients import as_bytes, connection, topic, unavailable
from nearkin_shared.kafka.dead_letters import (
    CLASS_HEADER,
    IN_MEMORY_HEADER,
    MESSAGE_HEADER,
    OFFSET_HEADER,
    OMITTED_HEADERS_HEADER,
    OMITTED_KEY_HEADER,
    OMITTED_VALUE_HEADER,
    OUR_HEADERS,
    PARTITION_HEADER,
    STAGE_HEADER,
    TOPIC_HEADER,
)
from nearkin_shared.utils.frozen import frozen

MARK_HEADER = "__nearkin.replay.of"
REPLAYED_HEADER = "__nearkin.replayed.from"
"""Header of a replayed record: the dead topic, partition and offset of its letter."""
DROPPED_HEADER = "__nearkin.dropped.by"
"""Header of the mark of a dropped letter, next to MARK_HEADER: the user or token that dropped it."""
DROPPED_BY_BYTES_MAX = 256
LISTED_MAX = 10_000
"""Letters of one listing: 2 kB of memory each."""
TRANSACTION_LETTERS = 100
TRANSACTION_BYTES = 32 * 1024 * 1024
PARTITION_BY_KEY = -1
LEADER_CHANGES = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
LEADER_SECONDS = 0.1
ASK_SECONDS = 10.0
SILENCE_SECONDS = 60.0
RECORD_BYTES_MAX = 256 * 1024 * 1024

Headers = tuple[tuple[str, bytes | None], ...]
Place = tuple[int, int]
"""Partition and offset in the dead topic."""


@frozen
class DeadLetter:
    """A record that could not be processed.

    `key` and `value` are None if the record had none, or see `omitted`.
    """

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    value_bytes: int
    headers: Headers
    replayed: bool = False
    dropped: bool = False
    ours: dict[str, str] = field(default_factory=dict)
    """The headers that say where and why, by name."""

    @property
    def place(self) -> Place:
        """Location of the letter."""
        return self.partition, self.offset

    @property
    def source_topic(self) -> str | None:
        """Return the topic of the record, None where the letter does not say."""
        return self.ours.get(TOPIC_HEADER) or None

    @property
    def is_in_memory(self) -> bool:
        """Return whether a stage of the same process had passed the record: Kafka never had it."""
        return IN_MEMORY_HEADER in self.ours

    @property
    def source(self) -> tuple[str, int, int] | None:
        """Return topic, partition and offset of the record in Kafka.

        None where Kafka never had it, or the letter does not say.
        """
        parts = (self.ours.get(PARTITION_HEADER, ""), self.ours.get(OFFSET_HEADER, ""))
        name = self.source_topic
        if (
            name is None
            or self.is_in_memory
            or not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts)
        ):
            return None
        return name, int(parts[0]), int(parts[1])

    @property
    def stage(self) -> str:
        """Return who gave it up."""
        return self.ours.get(STAGE_HEADER, "")

    @property
    def error(self) -> str:
        """Return the class of the error."""
        return self.ours.get(CLASS_HEADER, "")

    @property
    def message(self) -> str:
        """Text of the error."""
        return self.ours.get(MESSAGE_HEADER, "")

    @property
    def omitted(self) -> bool:
        """Whether the record was too large to be copied: its value is in its original topic."""
        return any(name in self.ours for name in (OMITTED_VALUE_HEADER, OMITTED_KEY_HEADER, OMITTED_HEADERS_HEADER))


def parse_place(text: str) -> Place:
    """Read `PARTITION:OFFSET`. Raises BadInput."""
    partition, colon, offset = text.partition(":")
    if not colon or not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (partition, offset)):
        raise BadInput(f"letter {text!r:.60}: want PARTITION:OFFSET as `nearkin dlq list` shows it, such as 0:17")
    return int(partition), int(offset)


def list_letters(
    settings: Settings,
    limit: int = 100,
    source: str | None = None,
    *,
    replayed: bool = False,
    dropped: bool = False,
) -> list[DeadLetter]:
    """Return the newest `limit` letters, oldest first, without values and headers.

    Only those of the topic `source` if given. Replayed letters are included if `replayed`, dropped ones if `dropped`.
    Raises StoreUnavailable.
    """
    found: OrderedDict[Place, DeadLetter] = OrderedDict()
    for letter, mark in _scan(settings, None):
        if mark is not None:
            before = found.pop(mark, None)
            if before is not None and (dropped if _is_drop(letter) else replayed):
                found[mark] = _with_mark(before, letter)
        elif source is None or letter.source_topic == source:
            found[letter.place] = replace(letter, value=None, headers=())
            if len(found) > LISTED_MAX:
                found.popitem(last=False)
    return sorted(found.values(), key=lambda letter: (letter.timestamp_ms, letter.place))[-min(limit, LISTED_MAX) :]


def read_letter(settings: Settings, place: Place) -> DeadLetter:
    """Return one letter, whole. Raises NotFound, StoreUnavailable."""
    known = _known_letters(settings, [place])[place]
    with _reader(settings) as reading:
        return replace(_kept(settings, reading, known), replayed=known.replayed, dropped=known.dropped)


def replay(settings: Settings, places: Iterable[Place]) -> list[DeadLetter]:
    """Replay letters, each once; return them without their values.

    All checks precede the first send. Raises NotFound, BadInput (replayed or dropped before, or a letter without an
    origin), PermanentError (the record was deleted), StoreUnavailable.
    """
    producer = _transactional(settings)
    try:
        known = _begin(settings, producer, places)
        for letter in known:
            if letter.source is None and not letter.is_in_memory:
                raise BadInput(f"letter {letter.partition}:{letter.offset}: does not say which topic it came from")
        with _reader(settings) as reading:
            for batch in _batches(_restore_letter(settings, reading, letter) for letter in known):
                _commit(producer, batch, lambda letter: _produce_replay(settings, producer, letter))
    except KafkaException as err:
        raise unavailable(settings, err) from err
    return known


def drop(settings: Settings, places: Iterable[Place], dropped_by: str = "") -> list[DeadLetter]:
    """Mark letters as dropped, so that they are neither listed nor replayed; return them.

    They are returned without values. The records stay in the topic until its retention removes them. All checks precede
    the
    first mark. Raises NotFound, BadInput (replayed or dropped before), StoreUnavailable.
    """
    producer = _transactional(settings)
    header = (DROPPED_HEADER, dropped_by.encode(errors="replace")[:DROPPED_BY_BYTES_MAX])
    try:
        known = _begin(settings, producer, places)
        for start in range(0, len(known), TRANSACTION_LETTERS):
            batch = known[start : start + TRANSACTION_LETTERS]
            _commit(producer, batch, lambda letter: _produce_mark(settings, producer, letter, [header]))
    except KafkaException as err:
        raise unavailable(settings, err) from err
    return known


def _begin(settings: Settings, producer: Producer, places: Iterable[Place]) -> list[DeadLetter]:
    """Fence every other replay or drop, then return the letters.

    Raises NotFound, BadInput, KafkaException.
    """
    wanted = list(dict.fromkeys(places))
    producer.init_transactions(SILENCE_SECONDS)
    known = _known_letters(settings, wanted)
    for partition, offset in wanted:
        letter = known[partition, offset]
        if letter.replayed or letter.dropped:
            raise BadInput(f"letter {partition}:{offset}: was {'dropped' if letter.dropped else 'sent back'} already")
    return [known[place] for place in wanted]


def _batches(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Yield letters, as many as one transaction takes."""
    batch: list[DeadLetter] = []
    batch_bytes = 0
    for letter in letters:
        if batch and (len(batch) == TRANSACTION_LETTERS or batch_bytes + letter.value_bytes > TRANSACTION_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(letter)
        batch_bytes += letter.value_bytes
    if batch:
        yield batch


def _commit(producer: Producer, letters: list[DeadLetter], produce: Callable[[DeadLetter], None]) -> None:
    """Call `produce` for each letter in one transaction.

    Raises KafkaException, BufferError: nothing was sent.
    """
    producer.begin_transaction()
    try:
        for letter in letters:
            produce(letter)
        producer.commit_transaction(SILENCE_SECONDS)
    except (KafkaException, BufferError):
        with suppress(KafkaException):  # an abort that fails leaves the transaction to time out: no more is visible
            producer.abort_transaction(SILENCE_SECONDS)
        raise


def _produce_replay(settings: Settings, producer: Producer, letter: DeadLetter) -> None:
    """Produce the record to the topic it came from, and its mark.

    Its key chooses the partition if it was passed in memory.
    """
    name, partition, _ = letter.source or (letter.source_topic or "", PARTITION_BY_KEY, 0)
    where = f"{topic(settings, 'dead')}[{letter.partition}]@{letter.offset}".encode()
    headers = [(header, value) for header, value in letter.headers if header not in OUR_HEADERS]
    producer.produce(name, letter.value, letter.key, partition=partition, headers=[*headers, (REPLAYED_HEADER, where)])
    _produce_mark(settings, producer, letter, [])


def _produce_mark(
    settings: Settings, producer: Producer, letter: DeadLetter, headers: list[tuple[str, bytes | None]]
) -> None:
    """Produce the mark of a letter to the partition that holds the letter."""
    place = f"{letter.partition}:{letter.offset}".encode()
    producer.produce(
        topic(settings, "dead"), None, letter.key, partition=letter.partition, headers=[(MARK_HEADER, place), *headers]
    )


def _restore_letter(settings: Settings, reading: Consumer, known: DeadLetter) -> DeadLetter:
    """Return a letter with its complete record; omitted parts are read from the origin.

    Raises PermanentError.
    """
    letter = _kept(settings, reading, known)
    if not letter.omitted:
        return letter
    if letter.source is None:
        if OMITTED_VALUE_HEADER in letter.ours or OMITTED_KEY_HEADER in letter.ours:
            raise PermanentError(
                f"letter {letter.partition}:{letter.offset}: its record was passed in memory and was too large to be "
                "kept: upload the blob again"
            )
        return letter
    whole = _record_at(reading, *letter.source)
    if whole is None:
        name, partition, offset = letter.source
        raise PermanentError(
            f"letter {letter.partition}:{letter.offset}: its record was too large to be kept here and is no longer in "
            f"{name}[{partition}] at offset {offset}"
        )
    return replace(letter, key=whole.key, value=whole.value, value_bytes=whole.value_bytes, headers=whole.headers)


def _kept(settings: Settings, reading: Consumer, known: DeadLetter) -> DeadLetter:
    letter = _record_at(reading, topic(settings, "dead"), *known.place)
    if letter is None:
        raise NotFound(f"letter {known.partition}:{known.offset}: was removed meanwhile")
    return letter


def _record_at(reading: Consumer, name: str, partition: int, offset: int) -> DeadLetter | None:
    """Return one record of any topic; None where it is there no more."""
    reading.assign([TopicPartition(name, partition, offset)])
    try:
        message = reading.poll(ASK_SECONDS)
    finally:
        reading.unassign()
    if message is None or message.error() is not None or message.offset() != offset:
        return None
    return letter_of(message)


def _known_letters(settings: Settings, places: list[Place]) -> dict[Place, DeadLetter]:
    """Return these letters without values, with their marks. Raises NotFound."""
    starts: dict[int, int] = {}
    for partition, offset in places:
        starts[partition] = min(offset, starts.get(partition, offset))
    found: dict[Place, DeadLetter] = {}
    wanted = set(places)
    for letter, mark in _scan(settings, starts) if starts else ():
        if mark in found:
            found[mark] = _with_mark(found[mark], letter)
        elif mark is None and letter.place in wanted:
            found[letter.place] = replace(letter, value=None, headers=())
    for partition, offset in places:
        if (partition, offset) not in found:
            dead = topic(settings, "dead")
            raise NotFound(f"letter {partition}:{offset}: {dead} has none; `nearkin dlq list` shows all")
    return found


def _scan(settings: Settings, starts: dict[int, int] | None) -> Iterator[tuple[DeadLetter, Place | None]]:
    """Yield (letter, None) and (mark, location of its letter), up to the current end.

    `starts` are offsets by partition.
    """
    dead = topic(settings, "dead")
    with _reader(settings) as reading:
        try:
            parts = _parts(reading, dead, starts)
            reading.assign(parts)
            left = {part.partition for part in parts}
            while left:
                message = reading.poll(SILENCE_SECONDS)
                problem = message.error() if message is not None else KafkaError(KafkaError._TIMED_OUT)
                if message is not None and problem is None:
                    letter = letter_of(message)
                    yield letter, marked_place(letter)
                elif message is not None and problem is not None and problem.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition() or 0)
                else:
                    _check(problem)
        except KafkaException as err:
            raise unavailable(settings, err) from err


def _parts(reading: Consumer, dead: str, starts: dict[int, int] | None) -> list[TopicPartition]:
    """Return the partitions and offsets to read; none if the topic does not exist.

    No worker ran then, so that nothing failed.
    """
    about = reading.list_topics(dead, timeout=ASK_SECONDS).topics[dead]
    if about.error is not None:
        if about.error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            return []
        _check(about.error)
    parts = []
    for number in about.partitions:
        low, high = _bounds(reading, TopicPartition(dead, number))
        start = low if starts is None else max(low, starts.get(number, high))
        if start < high:
            parts.append(TopicPartition(dead, number, start))
    return parts


def _bounds(reading: Consumer, part: TopicPartition) -> tuple[int, int]:
    """Return the first and last offset of a partition; retries for ASK_SECONDS.

    Its leader may be changing.
    """
    deadline = time.monotonic() + ASK_SECONDS
    while True:
        try:
            return reading.get_watermark_offsets(part, timeout=ASK_SECONDS)
        except KafkaException as err:
            if err.args[0].code() not in LEADER_CHANGES or time.monotonic() >= deadline:
                raise
            time.sleep(LEADER_SECONDS)


def _check(problem: KafkaError | None) -> None:
    """Raise what will not pass by itself."""
    if problem is not None and not problem.retriable():
        raise KafkaException(problem)


def marked_place(letter: DeadLetter) -> Place | None:
    """Return the place that a mark names, None for a letter."""
    if letter.value is None and TOPIC_HEADER not in letter.ours:
        for name, value in letter.headers:
            if name == MARK_HEADER:
                try:
                    return parse_place((value or b"").decode("latin-1"))
                except BadInput:
                    return None
    return None


def _is_drop(mark: DeadLetter) -> bool:
    """Return whether a mark is that of a dropped letter."""
    return any(name == DROPPED_HEADER for name, _ in mark.headers)


def _with_mark(letter: DeadLetter, mark: DeadLetter) -> DeadLetter:
    """Return a letter with the state that its mark records."""
    return replace(letter, dropped=True) if _is_drop(mark) else replace(letter, replayed=True)


def letter_of(message: KafkaMessage) -> DeadLetter:
    """Return a letter, or a mark, from its message."""
    pairs = message.headers() or []
    headers = tuple((str(pair[0]), as_bytes(pair[1])) for pair in pairs)
    partition, offset, value = message.partition(), message.offset(), as_bytes(message.value())
    assert partition is not None
    assert offset is not None
    return DeadLetter(
        partition=partition,
        offset=offset,
        timestamp_ms=message.timestamp()[1],
        key=as_bytes(message.key()),
        value=value,
        value_bytes=len(value or b""),
        headers=headers,
        ours={name: (text or b"").decode(errors="replace") for name, text in headers if name in OUR_HEADERS},
    )


class _reader:  # noqa: N801 - used as a function, in a with statement
    """A consumer that belongs to no group and is closed at the end."""

    def __init__(self, settings: Settings) -> None:
        self._consumer = Consumer(
            connection(settings, "nearkin-dlq")
            | {
                "group.id": f"{settings.kafka.topic_prefix}dlq",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "fetch.max.bytes": 16 * 1024 * 1024,
                "queued.max.messages.kbytes": 32 * 1024,
            }
        )

    def __enter__(self) -> Consumer:
        return self._consumer

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _transactional(settings: Settings) -> Producer:
    return Producer(
        connection(settings, "nearkin-dlq")
        | {
            "transactional.id": f"{settings.kafka.topic_prefix}dlq-replay",
            "transaction.timeout.ms": int(SILENCE_SECONDS * 1000),
            "message.max.bytes": RECORD_BYTES_MAX,
            "compression.type": settings.kafka.compression,
        }
    )
