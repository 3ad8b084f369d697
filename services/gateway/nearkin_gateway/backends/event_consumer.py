"""Read the events of the pipeline: outcomes of uploads and heartbeats of workers.

topic `committed`  from UPLOAD_STATUS_SECONDS ago on -> the table of outcomes
topic `workers`    compacted, from its start                   -> the newest heartbeat of each worker

Invariant: without a group or committed offsets, so each gateway reads all of them for itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.uploads.upload_status import UploadStatuses
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import NotAuthentic, StoreUnavailable
from nearkin_shared.kafka.clients import SELDOM_FILLED, as_bytes, consumer, group, topic, unavailable
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator

BATCH_MESSAGES = 500
POLL_SECONDS = 0.1
ADMIN_SECONDS = 10.0
GROWN_SECONDS = 30.0
"""How often it is asked whether the topic has more partitions by now."""
RESTART_SECONDS = 1.0
CAUGHT_UP_SECONDS = 30.0
WORKERS_MAX = 10_000
_ID = re.compile("[0-9a-f]{32}", re.ASCII)
CLOSE_SECONDS = 10.0
_log = logging.getLogger("nearkin.gateway")


class EventConsumer:
    """Read both topics on a thread and pass events to the event loop."""

    def __init__(
        self, settings: Settings, outcomes: UploadStatuses, client_id: str, authenticator: EnvelopeAuthenticator
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._outcomes = outcomes
        self._client_id = client_id
        self._committed, self._workers_topic = topic(settings, "committed"), topic(settings, "workers")
        self._words: dict[str, dict[str, Any]] = {}
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._partitions = 0
        self._behind: set[int] = set()

    async def open(self) -> None:
        """Start; return when earlier events are read. Raises StoreUnavailable after a timeout."""
        loop = asyncio.get_running_loop()
        since_ms = time.time_ns() // 1_000_000 - limits.UPLOAD_STATUS_SECONDS * 1000
        self._outcomes.set_known_from(since_ms)
        self._thread = threading.Thread(target=self._run, args=(loop, since_ms), name="nearkin-watch", daemon=True)
        self._thread.start()
        if not await asyncio.to_thread(self._caught_up.wait, CAUGHT_UP_SECONDS):
            await self.close()
            raise StoreUnavailable(f"topic {self._committed}: not read in {CAUGHT_UP_SECONDS:.0f} s")

    async def close(self) -> None:
        """Stop."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def workers(self) -> list[dict[str, Any]]:
        """Return the newest word of each worker, with how long ago it was seen."""
        now = datetime.now(UTC)
        return [{**word, "silent_seconds": _silent_seconds(word, now)} for _, word in sorted(self._words.items())]

    def _run(self, loop: asyncio.AbstractEventLoop, since_ms: int) -> None:
        while not self._stop.is_set():
            try:
                client = consumer(
                    self._settings,
                    group(self._settings, "gateway-readers"),
                    self._client_id,
                    **{"enable.partition.eof": True},
                    **SELDOM_FILLED,
                )
                try:
                    self._read(client, loop, since_ms)
                finally:
                    client.close()
            except (KafkaException, StoreUnavailable) as err:
                _log.warning("%s: %s; reading it again", self._committed, err)
                self._stop.wait(RESTART_SECONDS)

    def _read(self, client: Consumer, loop: asyncio.AbstractEventLoop, since_ms: int) -> None:
        """Read until stopped. An event that is read twice after a restart changes nothing."""
        self._partitions = 0
        client.assign([TopicPartition(self._workers_topic, 0, OFFSET_BEGINNING)])
        self._assign_new(client, since_ms)
        looked = time.monotonic()
        while not self._stop.is_set():
            events: list[tuple[dict[str, Any], bytes]] = []
            first = client.poll(POLL_SECONDS)
            # `consume` would sit out any timeout for a batch that is not full, while a caller waits: it is given none.
            for message in [] if first is None else [first, *client.consume(BATCH_MESSAGES - 1, 0)]:
                self._take(message, events)
            if events and not loop.is_closed():
                loop.call_soon_threadsafe(_add_all, self._outcomes, events)
            if not self._behind:
                self._caught_up.set()
            if time.monotonic() - looked > GROWN_SECONDS:
                self._assign_new(client, since_ms)
                looked = time.monotonic()

    def _assign_new(self, client: Consumer, since_ms: int) -> None:
        """Read partitions that are new, from the first message that matters."""
        try:
            found = client.list_topics(self._committed, ADMIN_SECONDS).topics[self._committed]
            if found.error is not None:
                raise StoreUnavailable(f"topic {self._committed}: {found.error.str()}")
            count = len(found.partitions)
            if count <= self._partitions:
                return
            fresh = [TopicPartition(self._committed, part, since_ms) for part in range(self._partitions, count)]
            client.incremental_assign(client.offsets_for_times(fresh, ADMIN_SECONDS))
        except KafkaException as err:
            raise unavailable(self._settings, err) from err
        self._behind |= set(range(self._partitions, count))
        self._partitions = count

    def _take(self, message: KafkaMessage, events: list[tuple[dict[str, Any], bytes]]) -> None:
        problem = message.error()
        if problem is not None:
            if problem.code() == KafkaError._PARTITION_EOF:
                if message.topic() == self._committed:
                    self._behind.discard(message.partition() or 0)
                return
            _log.warning("%s: %s", message.topic(), problem.str())
            return
        value = message.value()
        if not self._is_authentic(message):
            return
        if message.topic() == self._workers_topic:
            key = message.key()
            self._on_event(key.decode(errors="replace") if isinstance(key, bytes) else "", value)
            return
        try:
            event = json.loads(value or b"")
            if not all(isinstance(event[name], str) for name in ("id", "origin", "state", "tenant", "key")):
                raise ValueError("a field is missing")  # noqa: TRY301 - the caller adds the position
            if not _ID.fullmatch(event["id"]) or not isinstance(event.get("ledger"), dict | None):
                raise ValueError("a field has no value of a committer")  # noqa: TRY301
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            _log.error("%s[%s] offset %s: %s", message.topic(), message.partition(), message.offset(), err)
            return
        events.append((event, value or b""))

    def _is_authentic(self, message: KafkaMessage) -> bool:
        """Return whether a process of this store sent a message; log one that none has sent."""
        headers = {str(header[0]): as_bytes(header[1]) for header in message.headers() or ()}
        full, key, value = message.topic() or "", as_bytes(message.key()), as_bytes(message.value())
        reader = "workers" if full == self._workers_topic else "committed"
        try:
            self._authenticator.check(reader, full, key, value, headers.get(MAC_HEADER))
        except NotAuthentic as err:
            _log.error("%s[%s] offset %s: passed over: %s", full, message.partition(), message.offset(), err)
            return False
        return True

    def _on_event(self, name: str, value: bytes | None) -> None:
        if value is None:
            self._words.pop(name, None)
            return
        try:
            word = json.loads(value)
        except (ValueError, RecursionError):
            return
        if isinstance(word, dict) and (name in self._words or len(self._words) < WORKERS_MAX):
            self._words = {**self._words, name: word}  # replaced whole: the loop reads it meanwhile


def _add_all(outcomes: UploadStatuses, events: Sequence[tuple[dict[str, Any], bytes]]) -> None:
    for event, text in events:
        outcomes.add(event, text)


def _silent_seconds(word: dict[str, Any], now: datetime) -> float | None:
    try:
        seen = datetime.fromisoformat(str(word["seen"]))
        return round(max(0.0, (now - seen).total_seconds()), 1)
    except (KeyError, ValueError, TypeError):
        return None
