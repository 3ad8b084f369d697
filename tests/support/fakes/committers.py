"""Fake the surroundings of a committer: an outbox to inspect, and stages without a backlog."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from nearkin_shared.kafka.clients import Headers
from nearkin_shared.kafka.lag import Backlog


class EmptyBacklog(Backlog):
    """A backlog that is always empty."""

    def __init__(self) -> None:
        """Start without a Kafka connection."""

    def unread(self, name: str, partition: int, offset: int) -> bool:
        """Return False."""
        return False

    def oldest_seconds(self, services: Collection[str]) -> float:
        """Return 0."""
        return 0.0


class RecordingOutbox:
    """An outbox that records events and dead letters instead of sending them."""

    authenticator = None

    def __init__(self, *_: object) -> None:
        self.events: list[dict[str, Any]] = []
        self.letters: list[dict[str, bytes | None]] = []

    def send(self, name: str, key: bytes, value: bytes, headers: Headers) -> None:
        """Record an event."""
        assert name == "committed"
        self.events.append(json.loads(value))

    def send_to(
        self, full: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
    ) -> None:
        """Record the headers of a dead letter."""
        self.letters.append(dict(headers))

    def flush(self) -> None:
        """Do nothing."""
