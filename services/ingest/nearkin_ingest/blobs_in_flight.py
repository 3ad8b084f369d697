"""Bound what one consumer has in the pipeline, by the events about its blobs.

    sent to `frames` -> in flight -> event on `committed`, committed or failed -> done

Records that arrive faster than workers store them wait in their own topic. In `frames` they would be before every
later upload.

Invariant: a blob without an event is forgotten after FORGOTTEN_SECONDS, so no lost event stops a consumer.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from nearkin_shared.config.settings import Settings
from nearkin_shared.kafka.clients import (
    ADMIN_SECONDS_MAX,
    SELDOM_FILLED,
    as_bytes,
    consumer,
    group,
    topic,
    unavailable,
)
from nearkin_shared.limits import MIB

_log = logging.getLogger("nearkin.ingest")

BLOBS_MAX = 4096
"""Of small records the work of 2 s: a batch is committed 1 to 2 s after it was sent, since its container waits for
others."""
BYTES_MAX = 32 * MIB
OBJECT_BYTES_MAX = 8 * MIB
"""Bound of the bytes that are counted for one blob, so that large objects pass some at a time."""
FORGOTTEN_SECONDS = 60.0
EVENTS_MAX = 1000


class BlobsInFlight:
    """The blobs of one consumer without an event. Not thread-safe."""

    def __init__(self, settings: Settings, client_id: str) -> None:
        """Connect; `open` begins to read."""
        self._topic = topic(settings, "committed")
        self._settings = settings
        self._events: Consumer | None = consumer(
            settings, group(settings, "config-readers"), client_id, **SELDOM_FILLED
        )
        self._blobs: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """When each was sent, and its bytes; the oldest first."""
        self._bytes = 0

    def open(self) -> None:
        """Read events from now on. Raises StoreUnavailable."""
        client = self._events
        assert client is not None
        try:
            client.assign(self._ends(client))
        except KafkaException as err:
            if err.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise unavailable(self._settings, err) from err
            self._give_up(err.args[0])

    def _ends(self, client: Consumer) -> list[TopicPartition]:
        """Return the ends of all partitions. Raises KafkaException."""
        found = client.list_topics(self._topic, ADMIN_SECONDS_MAX).topics[self._topic]
        if found.error is not None:  # a topic that one may not see, or that is missing, has no partitions
            raise KafkaException(found.error)
        places = [TopicPartition(self._topic, part) for part in found.partitions]
        for place in places:
            place.offset = client.get_watermark_offsets(place, ADMIN_SECONDS_MAX)[1]
        return places

    def add(self, blob: bytes, size_bytes: int) -> None:
        """Count a blob that is sent."""
        if self._events is not None:
            counted_bytes = min(size_bytes, OBJECT_BYTES_MAX)
            self._blobs[blob] = time.monotonic(), counted_bytes
            self._bytes += counted_bytes

    def has_room(self, seconds: float = 0.0) -> bool:
        """Take the events that have arrived; return whether there is room.

        Without room it waits for an event, for `seconds`.
        """
        client = self._events
        if client is None or not self._blobs:
            return True
        first = client.poll(0.0 if self._is_within_bounds() else seconds)
        if first is not None:
            for message in (first, *client.consume(EVENTS_MAX - 1, 0)):
                problem = message.error()
                if problem is None:
                    self._end(as_bytes(message.key()) or b"")
                elif problem.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    self._give_up(problem)
        self._forget_old()
        return self._is_within_bounds()

    def close(self) -> None:
        """Close the connection."""
        if self._events is not None:
            self._events.close()

    def _is_within_bounds(self) -> bool:
        return len(self._blobs) < BLOBS_MAX and self._bytes < BYTES_MAX

    def _end(self, blob: bytes) -> None:
        _, counted_bytes = self._blobs.pop(blob, (0.0, 0))
        self._bytes -= counted_bytes

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._blobs:
            blob, (sent, _) = next(iter(self._blobs.items()))
            if now - sent < FORGOTTEN_SECONDS:
                break
            self._end(blob)

    def _give_up(self, problem: KafkaError) -> None:
        """Bound nothing: the operator has not granted the right to read events."""
        _log.warning("%s: %s; grant ingest Read on it, or its records delay uploads", self._topic, problem.str())
        if self._events is not None:
            self._events.close()
        self._events = None
        self._blobs.clear()
        self._bytes = 0
