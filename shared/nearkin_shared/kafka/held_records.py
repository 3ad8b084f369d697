"""Find the records of stage topics that dead letters still point to.

A letter whose record was too large to be copied omits a part of it; a replay reads that part from the record's own
topic. Such a record is held until its letter was replayed or dropped, or left the topic `dead` by retention.

Invariant: a letter that was acknowledged before `update` was called is taken into account, or `update` returns False.
Letters and marks are read as `nearkin dlq` reads them, committed: while a replay's transaction is open, later letters
cannot be seen.
"""

from __future__ import annotations

import logging
import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import ADMIN_SECONDS_MAX, STAGE_TOPICS, consumer, group, topic
from nearkin_shared.kafka.dead_letter_replay import Place, letter_of, marked_place

_log = logging.getLogger("nearkin.trim")

SCAN_SECONDS_MAX = 60.0
"""One `update` reads so long at most; the next one continues there. A first one reads all letters."""
READ_BYTES_MAX = 8 * 1024 * 1024
Source = tuple[str, int, int]
"""Topic, partition and offset of a record."""


class HeldRecords:
    """Records that dead letters point to. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._topic = topic(settings, "dead")
        self._stage_topics = frozenset(topic(settings, name) for name in STAGE_TOPICS)
        bounds = {"fetch.max.bytes": READ_BYTES_MAX, "queued.max.messages.kbytes": READ_BYTES_MAX // 1024}
        name = group(settings, "lag")
        self._reading = consumer(settings, name, "nearkin-trim", **bounds, **{"enable.partition.eof": True})
        self._asking = consumer(settings, name, "nearkin-trim", **{"isolation.level": "read_uncommitted"})
        self._following: dict[int, int] = {}
        """Offset after the last letter or mark that was read, by partition of `dead`."""
        self._sources: dict[Place, Source] = {}

    def update(self) -> bool:
        """Read new letters and marks; return whether all that were acknowledged before are known.

        Raises KafkaException.
        """
        about = self._asking.list_topics(self._topic, timeout=ADMIN_SECONDS_MAX).topics[self._topic]
        if about.error is not None:
            raise KafkaException(about.error)
        ends = {}
        for part in about.partitions:
            low, ends[part] = self._asking.get_watermark_offsets(
                TopicPartition(self._topic, part), timeout=ADMIN_SECONDS_MAX
            )
            for place in [place for place in self._sources if place[0] == part and place[1] < low]:
                del self._sources[place]
        self._read(set(ends))
        return all(self._following.get(part, 0) >= end for part, end in ends.items())

    def first_of(self, name: str, partition: int, begin: int) -> int | None:
        """Return the lowest offset from `begin` on that a letter points to, or None.

        `begin`: first offset that the partition has. Letters outlive records that retention deleted.
        """
        return min(
            (source[2] for source in self._sources.values() if source[:2] == (name, partition) and source[2] >= begin),
            default=None,
        )

    def close(self) -> None:
        """Close the connections."""
        self._reading.close()
        self._asking.close()

    def _read(self, left: set[int]) -> None:
        """Read partitions of `dead` to their current ends."""
        begins = [TopicPartition(self._topic, part, self._following.get(part, OFFSET_BEGINNING)) for part in left]
        self._reading.assign(begins)
        deadline = time.monotonic() + SCAN_SECONDS_MAX
        try:
            while left and (seconds := deadline - time.monotonic()) > 0:
                part = self._take(self._reading, seconds)
                if part is not None:
                    left.discard(part)
        finally:
            self._reading.unassign()

    def _take(self, reading: Consumer, seconds: float) -> int | None:
        """Take one letter or mark; return the partition that was read to its end."""
        message = reading.poll(seconds)
        if message is None:
            return None
        problem, part, offset = message.error(), message.partition() or 0, message.offset() or 0
        if problem is not None:
            if problem.code() == KafkaError._PARTITION_EOF:
                self._following[part] = offset
                return part
            if not problem.retriable():
                raise KafkaException(problem)
            return None
        letter = letter_of(message)
        mark = marked_place(letter)
        if mark is not None:
            self._sources.pop(mark, None)
        elif letter.omitted and letter.source is not None and letter.source[0] in self._stage_topics:
            self._sources[letter.place] = letter.source
            _log.warning(
                "%s[%d] offset %d is not trimmed: dead letter %d:%d points to it", *letter.source, part, offset
            )
        self._following[part] = offset + 1
        return None
