"""Keep records that cannot be processed in a topic of their own.

A record is copied whole if it fits into a message; otherwise the letter states what was omitted: it is in its original
topic. A message between stages of one process is in no topic of Kafka: its letter is marked so.

Invariant: an unprocessable record is kept, with its origin and reason, and blocks no other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.message_layout import Encoded, joined
from nearkin_shared.kafka.clients import TOPIC_BYTES_MAX, topic
from nearkin_shared.observability import metrics

_log = logging.getLogger("nearkin.dead")

TOPIC_HEADER = "__connect.errors.topic"
PARTITION_HEADER = "__connect.errors.partition"
OFFSET_HEADER = "__connect.errors.offset"
STAGE_HEADER = "__connect.errors.stage"
CLASS_HEADER = "__connect.errors.exception.class.name"
MESSAGE_HEADER = "__connect.errors.exception.message"
OMITTED_VALUE_HEADER = "__nearkin.errors.omitted.value.bytes"
OMITTED_KEY_HEADER = "__nearkin.errors.omitted.key.bytes"
OMITTED_HEADERS_HEADER = "__nearkin.errors.omitted.headers"
IN_MEMORY_HEADER = "__nearkin.errors.in.memory"
"""Of a record that another stage of the same process passed: partition and offset are those of a topic in memory."""
CONNECT_HEADERS = (TOPIC_HEADER, PARTITION_HEADER, OFFSET_HEADER, STAGE_HEADER, CLASS_HEADER, MESSAGE_HEADER)
"""As Kafka Connect names them, so that its users' tools read them."""
OUR_HEADERS = frozenset(
    {*CONNECT_HEADERS, OMITTED_VALUE_HEADER, OMITTED_KEY_HEADER, OMITTED_HEADERS_HEADER, IN_MEMORY_HEADER}
)
MESSAGE_CHARACTERS_MAX = 1000
HEADERS_BYTES_MAX = 12 * 1024
"""Bound of the record's own headers in its dead letter, bytes."""
LETTER_BYTES_MAX = TOPIC_BYTES_MAX - 4 * 1024
"""Bound of a letter that the broker accepts, with the overhead of a batch, bytes."""
KEY_BYTES_KEPT = 64 * 1024
HEADER_BYTES = 10
"""Overhead of a header besides its name and value, bytes."""


class Sender(Protocol):
    """The methods of an outbox that dead letters need."""

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Queue a message for any topic."""


class RejectedRecord(Protocol):
    """The fields of a record that dead letters need."""

    @property
    def topic(self) -> str:
        """Where it came from."""

    @property
    def partition(self) -> int:
        """Where it came from."""

    @property
    def offset(self) -> int:
        """Where it came from."""

    @property
    def key(self) -> bytes | None:
        """Kept as it is."""

    @property
    def value(self) -> Encoded | None:
        """Kept as it is."""

    @property
    def all_headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Kept up to HEADERS_BYTES_MAX."""


def send_dead_letter(
    settings: Settings,
    outbox: Sender,
    record: RejectedRecord,
    stage: str,
    err: BaseException,
    *,
    is_in_memory: bool = False,
) -> None:
    """Queue the dead letter of a record that `stage` could not process.

    `is_in_memory`: Kafka has no such record, so its letter must hold all that a replay needs.
    """
    _log.error("%s[%d] offset %d: dead letter: %s", record.topic, record.partition, record.offset, err)
    metrics.DEAD_LETTERS.labels(stage).inc()
    if isinstance(err, Corrupt):
        metrics.CORRUPT.labels(stage).inc()
    own: list[tuple[str, bytes | None]] = []
    used = omitted = 0
    for name, text in record.all_headers:
        if name not in OUR_HEADERS:
            used += len(name.encode()) + len(text or b"") + HEADER_BYTES
            if used <= HEADERS_BYTES_MAX:
                own.append((name, text))
            else:
                omitted += 1
    headers: list[tuple[str, bytes | None]] = [
        *own,
        (TOPIC_HEADER, record.topic.encode()),
        (PARTITION_HEADER, str(record.partition).encode()),
        (OFFSET_HEADER, str(record.offset).encode()),
        (STAGE_HEADER, stage.encode()),
        (CLASS_HEADER, f"{type(err).__module__}.{type(err).__qualname__}".encode()),
        (MESSAGE_HEADER, str(err)[:MESSAGE_CHARACTERS_MAX].encode(errors="replace")),
    ]
    if is_in_memory:
        headers.append((IN_MEMORY_HEADER, b"1"))
    if omitted:
        headers.append((OMITTED_HEADERS_HEADER, str(omitted).encode()))
    key = record.key
    value = None if record.value is None else joined(record.value)
    if key is not None and len(key) > KEY_BYTES_KEPT:
        headers.append((OMITTED_KEY_HEADER, str(len(key)).encode()))
        key = None
    headers_bytes = sum(len(name.encode()) + len(text or b"") + HEADER_BYTES for name, text in headers)
    if value is not None and len(value) + len(key or b"") + headers_bytes > LETTER_BYTES_MAX:
        headers.append((OMITTED_VALUE_HEADER, str(len(value)).encode()))
        value = None
    outbox.send_to(topic(settings, "dead"), key, value, headers)
