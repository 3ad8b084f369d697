"""The committer's worker: what it gives up, and what it waits for."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from nearkin.config import Settings
from nearkin.config_layers import with_changes
from nearkin.formats.message import End, Envelope, encode
from nearkin.runners.kafka import committing
from nearkin.runners.kafka.clients import Headers
from nearkin.runners.kafka.committing import CommitHandler
from nearkin.runners.kafka.lag import Backlog
from nearkin.runners.kafka.loop import Record
from nearkin.store.manifests import ManifestStore
from nearkin.store.objects import memory_objects

SETTINGS = with_changes(Settings(), {"kafka": {"upload_idle_seconds": 1}})
BLOB = b"0123456789abcdef"


class Waiting(Backlog):
    """Says how old what waits is, and where `placed` ends, as it is told."""

    def __init__(self, oldest_seconds: float = 0.0, end: int = 0) -> None:
        self.age_seconds, self.end = oldest_seconds, end

    def unread(self, name: str, partition: int, offset: int) -> bool:
        assert (name, partition) == ("placed", 0)
        return self.end > offset

    def oldest_seconds(self, services: Collection[str]) -> float:
        assert "delta" in services
        assert "committer" not in services, "what a late blob itself holds back would hold it for good"
        return self.age_seconds


class Kept:
    """An outbox whose events are looked at instead of sent."""

    def __init__(self, *_: object) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, name: str, key: bytes, value: bytes, headers: Headers) -> None:
        self.events.append(json.loads(value))

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("backlog", "given_up"), [(Waiting(), True), (Waiting(oldest_seconds=60), False), (Waiting(end=2), False)]
)
def test_a_blob_is_given_up_only_when_nothing_is_on_its_way_that_it_may_lack(
    monkeypatch: pytest.MonkeyPatch, backlog: Waiting, given_up: bool
) -> None:
    """A store that is away for minutes, or a pause, holds segments up in the topics before: all of them come later."""
    monkeypatch.setattr(committing, "Outbox", Kept)
    unused: Any = None
    handler = CommitHandler(SETTINGS, ManifestStore(memory_objects()), unused, "w", backlog)
    handler.assigned(0, "")
    end = encode(End(Envelope(BLOB, "t", "key", 5), 1, BLOB, 5, b"b" * 32, segments=1))
    handler.handle([Record("placed", 0, 0, BLOB, end, {}, ())])
    handler._open[BLOB].last_seen -= 3
    handler.idle()
    told: Any = handler._outbox
    assert [event["state"] for event in told.events] == (["failed"] if given_up else [])
    assert list(handler.committable()) == [(0, 1 if given_up else 0, "")]


def test_what_was_late_has_its_whole_time_again_once_the_stages_before_have_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that took the frame which waited has sent a young segment on, and three more stages have to take that."""
    monkeypatch.setattr(committing, "Outbox", Kept)
    unused: Any = None
    backlog = Waiting(oldest_seconds=60)
    chosen = with_changes(Settings(), {"kafka": {"upload_idle_seconds": 60}})
    handler = CommitHandler(chosen, ManifestStore(memory_objects()), unused, "w", backlog)
    handler.assigned(0, "")
    for number, blob in enumerate((BLOB, b"another-blob-16b")):
        end = encode(End(Envelope(blob, "t", "key", 5), 1, blob, 5, b"b" * 32, segments=1))
        handler.handle([Record("placed", 0, number, blob, end, {}, ())])
    told: Any = handler._outbox
    handler._open[BLOB].last_seen -= 121
    backlog.age_seconds = 61.0
    handler.idle()
    assert list(handler._open)[-1] == BLOB, "last seen last: room is made at the other end"
    backlog.age_seconds = 0.0
    handler._open[BLOB].last_seen -= 119
    handler.idle()
    assert told.events == []
    handler._open[BLOB].last_seen -= 2
    handler.idle()
    assert [event["state"] for event in told.events] == ["failed"]
