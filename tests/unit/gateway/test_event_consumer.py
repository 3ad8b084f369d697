"""Test how the events of the pipeline are read: a client waits for its own."""

from __future__ import annotations

from typing import Any

import pytest

from nearkin_gateway.backends.event_consumer import BATCH_MESSAGES, EventConsumer
from nearkin_shared.config.settings import Settings


class OneBatch:
    """A Kafka client that has some messages; the reader is stopped after them."""

    def __init__(self, reader: EventConsumer, messages: list[str]) -> None:
        self._reader, self._messages = reader, messages

    def assign(self, parts: object) -> None:
        pass

    def poll(self, seconds: float) -> str | None:
        if not self._messages:
            self._reader._stop.set()
            return None
        return self._messages.pop(0)

    def consume(self, count: int, seconds: float) -> list[str]:
        assert seconds == 0, "a batch that is not full sits out the timeout, and the events in it wait"
        found, self._messages[:] = self._messages[:count], self._messages[count:]
        return found


class Collected:
    """An event loop that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, _add: object, _outcomes: object, events: Any) -> None:
        self.batches.append(events)


def test_events_are_passed_on_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first event does not wait for others; those that are there already come with it."""
    unused: Any = None
    reader, loop = EventConsumer(Settings(), unused, "gateway", unused), Collected()
    monkeypatch.setattr(reader, "_assign_new", lambda client, since_ms: None)
    monkeypatch.setattr(reader, "_take", lambda message, events: events.append(message))
    events = [str(number) for number in range(BATCH_MESSAGES + 2)]
    client: Any = OneBatch(reader, events.copy())
    collecting: Any = loop
    reader._read(client, collecting, 0)
    assert loop.batches == [events[:BATCH_MESSAGES], events[BATCH_MESSAGES:]]
