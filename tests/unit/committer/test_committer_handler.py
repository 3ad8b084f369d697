"""Test the committer worker: which blobs it gives up, and what it waits for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_committer.open_blob import OpenBlob
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.formats.blob_table import BatchedBlob
from nearkin_shared.formats.message import BatchEnd, End, Envelope, encode
from nearkin_shared.kafka.clients import Headers
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.lag import Backlog
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.manifests import ManifestStore

SETTINGS = with_changes(Settings(), {"kafka": {"upload_idle_seconds": 60}})
BLOB = b"0123456789abcdef"


class Waiting(Backlog):
    """Reports the age of the backlog and the end of `placed` that a test sets."""

    def __init__(self, oldest_seconds: float = 0.0, end: int = 0) -> None:
        self.age_seconds, self.end = oldest_seconds, end

    def unread(self, name: str, partition: int, offset: int) -> bool:
        assert (name, partition) == ("placed", 0)
        return self.end > offset

    def oldest_seconds(self, services: Collection[str]) -> float:
        assert "delta" in services
        assert "committer" not in services, "a late blob would wait for itself for ever"
        return self.age_seconds


class UnreachableConsumer:
    """A consumer whose Kafka is unreachable."""

    def __init__(self) -> None:
        self.asked = 0

    def get_watermark_offsets(self, part: TopicPartition, timeout: float) -> tuple[int, int]:
        self.asked += 1
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))


def test_unreachable_kafka_is_not_queried_per_partition() -> None:
    """Each query takes the whole timeout.

    For 60 partitions longer than a worker may go without polling.
    """
    backlog, asking = Backlog(SETTINGS), UnreachableConsumer()
    backlog._asking = asking  # type: ignore[assignment]
    assert all(backlog.unread("frames", partition, 7) for partition in range(60)), "an unknown backlog counts as unread"
    assert asking.asked == 1
    backlog._away_since -= 6
    assert backlog.unread("frames", 0, 7)
    assert asking.asked == 2


class Kept:
    """An outbox that keeps events instead of sending them."""

    authenticator = None

    def __init__(self, *_: object) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, name: str, key: bytes, value: bytes, headers: Headers) -> None:
        self.events.append(json.loads(value))

    def flush(self) -> None:
        pass


class Clock:
    """Clock that only a test advances."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


class Stages(Backlog):
    """Stages of which one is down from `since` to `until`, in seconds of the clock."""

    def __init__(self, clock: Clock, since: float, until: float) -> None:
        self._clock, self._made, self._since, self._until = clock, clock.now, since, until

    def unread(self, name: str, partition: int, offset: int) -> bool:
        return False

    def oldest_seconds(self, services: Collection[str]) -> float:
        now = self._clock.now - self._made
        return max(0.0, now - self._since) if now < self._until else 0.0


def waiting_for_a_segment(
    monkeypatch: pytest.MonkeyPatch, backlog: Backlog, clock: Clock, blobs: tuple[bytes, ...] = (BLOB,)
) -> CommitterHandler:
    monkeypatch.setattr(committer_handler, "Outbox", Kept)
    monkeypatch.setattr(committer_handler, "time", clock)
    unused: Any = None
    handler = CommitterHandler(SETTINGS, ManifestStore(memory_objects()), unused, "w", backlog, None)
    handler.on_assigned(0, "")
    for number, blob in enumerate(blobs):
        end = encode(End(Envelope(blob, "t", "key", 5), 1, blob, 5, b"b" * 32, segments=1))
        handler.handle([Record("placed", 0, number, blob, end, {}, ())])
        handler._open[0, blob, "t", "key"].last_seen = clock.now
    return handler


def seconds_until_given_up(handler: CommitterHandler, clock: Clock, seconds_max: int) -> int | None:
    sent_events: Any = handler._outbox
    for seconds in range(seconds_max):
        handler.idle()
        if sent_events.events:
            assert [event["state"] for event in sent_events.events] == ["failed"]
            return seconds
        clock.now += 1
    return None


@pytest.mark.parametrize(
    ("backlog", "is_given_up"), [(Waiting(), True), (Waiting(oldest_seconds=700), False), (Waiting(end=2), False)]
)
def test_blob_is_given_up_only_without_segments_in_flight(
    monkeypatch: pytest.MonkeyPatch, backlog: Waiting, is_given_up: bool
) -> None:
    """While a store is unavailable or a worker pauses, segments wait in the topics before.

    All of them arrive later.
    """
    clock = Clock()
    handler = waiting_for_a_segment(monkeypatch, backlog, clock)
    assert (seconds_until_given_up(handler, clock, 1000) is not None) == is_given_up
    assert list(handler.committable()) == [(0, 1 if is_given_up else 0, "")]


def test_blob_that_lacks_bytes_fails_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delta stage has not found a pack.

    Another worker may have cut the blob, too: its segments may still arrive.
    """
    clock = Clock()
    handler = waiting_for_a_segment(monkeypatch, Waiting(), clock)
    end = End(Envelope(BLOB, "t", "key", 5), 1, BLOB, 5, b"b" * 32, segments=1, failure="staging/1 is missing")
    handler.handle([Record("placed", 0, 1, BLOB, encode(end), {}, ())])
    assert [blob.failure for blob in handler._open.values()] == ["staging/1 is missing"]
    handler._open[0, BLOB, "t", "key"].last_seen = clock.now
    seconds = seconds_until_given_up(handler, clock, 1000)
    assert seconds is not None
    assert seconds < 2 * SETTINGS.kafka.upload_idle_seconds
    sent_events: Any = handler._outbox
    assert [event["failure"] for event in sent_events.events] == ["staging/1 is missing"]
    assert list(handler.committable()) == [(0, 2, "")]


@pytest.mark.parametrize(("since", "until"), [(5, 100), (5, 290), (5, 299), (5, 595), (50, 590), (5, 3000)])
def test_delayed_blob_waits_full_time_after_stage_catches_up(
    monkeypatch: pytest.MonkeyPatch, since: int, until: int
) -> None:
    """The stage has just sent a segment, which up to three more stages process."""
    clock = Clock()
    handler = waiting_for_a_segment(monkeypatch, Stages(clock, since, until), clock)
    idle_seconds = SETTINGS.kafka.upload_idle_seconds
    seen_behind = until - since > idle_seconds
    is_given_up = seconds_until_given_up(handler, clock, until + 10 * idle_seconds)
    assert is_given_up is not None
    assert is_given_up > (until if seen_behind else 0) + (committer_handler.LATE_TIMES - 1) * idle_seconds
    assert is_given_up < until + (committer_handler.LATE_TIMES + 1) * idle_seconds


def test_blobs_that_wait_again_are_evicted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, other = Clock(), b"another-blob-16b"
    handler = waiting_for_a_segment(monkeypatch, Waiting(oldest_seconds=61), clock, (BLOB, other))
    handler._open[0, BLOB, "t", "key"].last_seen -= 61
    handler.idle()
    assert [name[1] for name in handler._open] == [other, BLOB], "the blob seen last must be the last"


def with_slow_commits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> tuple[CommitterHandler, list[str]]:
    """Return a handler whose commits take a second each, and the tenants that it commits for, in their order."""
    handler, order = waiting_for_a_segment(monkeypatch, Waiting(), clock, ()), list[str]()

    def carry_out(blob: OpenBlob, end: End, record: Record) -> list[tuple[int, int]]:
        clock.now += 1
        order.append(blob.envelope.tenant)
        return handler._finish(blob)

    monkeypatch.setattr(handler, "_carry_out", carry_out)
    return handler, order


def complete(offset: int, tenant: str, metadata: Mapping[str, str] | None = None, key: str = "k") -> Record:
    """Return the record that completes a blob without segments."""
    blob = offset.to_bytes(16, "big")
    whole = End(Envelope(blob, tenant, key), 1, blob, 0, bytes(32), segments=0, metadata=dict(metadata or {}))
    return Record("placed", 0, offset, blob, encode(whole), {}, ())


def test_flood_delays_no_commit_of_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete blob of a tenant with no other one is committed next, though five of another tenant came first."""
    handler, order = with_slow_commits(monkeypatch, Clock())
    handler.handle([complete(offset, "flood") for offset in range(5)])
    handler.handle([complete(5, "quiet")])
    assert order == ["flood", "quiet"]
    assert list(handler.committable()) == [(0, 1, "")], "blobs that wait are read again after a crash (I4)"
    handler.idle()
    while handler.idle() == 0.0:
        pass
    assert order == ["flood", "quiet", *4 * ["flood"]]
    assert list(handler.committable()) == [(0, 6, "")]


def test_lost_partition_takes_its_complete_blobs_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next owner commits them; here they would be committed without the partition."""
    handler, order = with_slow_commits(monkeypatch, Clock())
    handler.handle([complete(offset, "flood") for offset in range(3)])
    handler.on_dropped(0)
    handler.idle()
    handler.idle()
    assert order == ["flood"]


def test_complete_blob_that_waits_is_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the blobs before it take, and though its end is sent again."""
    clock = Clock()
    handler, order = with_slow_commits(monkeypatch, clock)
    handler.handle([complete(0, "t"), complete(1, "t")])
    handler.handle([complete(1, "t")])
    clock.now += 10_000
    handler._fail_late()
    handler.idle()
    handler.idle()
    sent_events: Any = handler._outbox
    assert (order, sent_events.events) == (["t", "t"], [])


def test_committer_with_many_complete_blobs_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_handler, "READY_BLOBS_MAX", 2)
    handler, _ = with_slow_commits(monkeypatch, Clock())
    handler.handle([complete(offset, "t") for offset in range(3)])
    assert handler._commits.blobs == 2, "other stages of the process read it"
    assert not handler.has_room
    handler.handle([])
    assert handler.has_room


def test_upload_waits_for_no_records_of_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for an upload, and none for the records of a topic, which keep their order."""
    handler, _ = with_slow_commits(monkeypatch, Clock())
    carry_out: Any = handler._carry_out
    monkeypatch.setattr(handler, "_carry_out_batch", lambda begun: carry_out(begun.blob, None, begun.record))
    batch = b"batch-of-records"
    blobs = tuple(BatchedBlob(f"k{number}", 0, bytes(32), bytes(16), 1, segments=0) for number in range(2))
    ended = encode(BatchEnd(Envelope(batch, "records", "k0", blobs=2), blobs))
    handler.handle([Record("placed", 0, 0, batch, ended, {}, ()), complete(1, "records", {"kafka": "t[0]@7"})])
    handler.handle([complete(2, "records", key="uploaded")])
    assert [name[1] for name in handler._finished] == [batch, (2).to_bytes(16, "big")]


@pytest.mark.parametrize("like_records", [(0, 1, 0, 1, 0), (0, 0, 1, 1, 0), (0, 1, 1, 0, 0), (1, 0, 1, 0, 1)])
def test_uploads_of_a_key_keep_their_order(monkeypatch: pytest.MonkeyPatch, like_records: tuple[int, ...]) -> None:
    """Also if some have the metadata of a record, as a version that is copied has."""
    handler, order = with_slow_commits(monkeypatch, Clock())
    metadata = {"kafka": "t[0]@7"}
    handler.handle([complete(0, "t", metadata), complete(1, "t")])
    handler.handle([complete(2 + at, "t", metadata if is_like else None) for at, is_like in enumerate(like_records)])
    while handler.idle() == 0.0 or len(order) < 7:
        pass
    assert [int.from_bytes(name[1], "big") for name in handler._finished] == list(range(7))
    assert (handler._commits.blobs, list(handler.committable())) == (0, [(0, 7, "")])
