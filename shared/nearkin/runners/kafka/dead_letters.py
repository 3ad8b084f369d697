"""Dead letters. Invariant: a record that cannot be processed is kept whole, with where and why, and stalls nobody."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from nearkin.config import Settings
from nearkin.runners.kafka.clients import topic

_log = logging.getLogger("nearkin.dead")

TOPIC_HEADER = "__connect.errors.topic"
PARTITION_HEADER = "__connect.errors.partition"
OFFSET_HEADER = "__connect.errors.offset"
STAGE_HEADER = "__connect.errors.stage"
CLASS_HEADER = "__connect.errors.exception.class.name"
MESSAGE_HEADER = "__connect.errors.exception.message"
OUR_HEADERS = (TOPIC_HEADER, PARTITION_HEADER, OFFSET_HEADER, STAGE_HEADER, CLASS_HEADER, MESSAGE_HEADER)
"""As Kafka Connect names them, so that its users' tools read them."""
MESSAGE_CHARACTERS_MAX = 1000
HEADERS_BYTES_MAX = 12 * 1024
"""What a record's own headers may take in its dead letter: with ours it stays below Kafka's limit."""


class Sender(Protocol):
    """What dead letters need of an outbox."""

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Queue a message for any topic."""


class Rejected(Protocol):
    """What dead letters need of a record."""

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
    def value(self) -> bytes | None:
        """Kept as it is."""

    @property
    def all_headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Kept up to HEADERS_BYTES_MAX."""


def send_dead_letter(settings: Settings, outbox: Sender, record: Rejected, stage: str, err: BaseException) -> None:
    """Queue the dead letter of a record that `stage` could not process."""
    _log.error("%s[%d] offset %d: dead letter: %s", record.topic, record.partition, record.offset, err)
    own: list[tuple[str, bytes | None]] = []
    used = 0
    for name, value in record.all_headers:
        used += len(name.encode()) + len(value or b"")
        if used <= HEADERS_BYTES_MAX and name not in OUR_HEADERS:
            own.append((name, value))
    outbox.send_to(
        topic(settings, "dead"),
        record.key,
        record.value,
        [
            *own,
            (TOPIC_HEADER, record.topic.encode()),
            (PARTITION_HEADER, str(record.partition).encode()),
            (OFFSET_HEADER, str(record.offset).encode()),
            (STAGE_HEADER, stage.encode()),
            (CLASS_HEADER, f"{type(err).__module__}.{type(err).__qualname__}".encode()),
            (MESSAGE_HEADER, str(err)[:MESSAGE_CHARACTERS_MAX].encode(errors="replace")),
        ],
    )
