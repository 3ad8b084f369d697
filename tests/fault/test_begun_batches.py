"""Test that batches overlap without a change of what is durable before what, and that none delays an upload."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.blob_table import blob_id
from tests.fault.test_committer_batches import add_batch, origins_of
from tests.support.checks.waiting import until
from tests.support.fakes.committer_log import CommitterLog, blob_of

FIRST, SECOND, THIRD = ((time.time_ns() // 1_000_000).to_bytes(6, "big") + bytes([n]) * 10 for n in range(3))


def on_event(log: CommitterLog, monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    """Call `look` with the key of each event that the committer sends."""
    send = log.outbox.send

    def looked(name: str, key: bytes, value: bytes, headers: Any) -> None:
        send(name, key, value, headers)
        look(log.outbox.events[-1]["key"])

    monkeypatch.setattr(log.outbox, "send", looked)


def held_manifests(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the manifests of batches wait for the event that this returns."""
    released, put_many = threading.Event(), log.manifests.put_many

    def wait(manifests: Any, threads: Any) -> Any:
        assert released.wait(30)
        return put_many(manifests, threads)

    monkeypatch.setattr(log.manifests, "put_many", wait)
    return released


def test_next_batch_is_created_during_events(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests of a batch need not wait until the one before it is in the index and reported."""
    add_batch(log, "ab", FIRST)
    add_batch(log, "cd", SECOND, 3)
    on_event(log, monkeypatch, lambda _: until(lambda: len(log.manifests.versions("t", "d")) == 1, seconds=30))
    assert log.read() == dict.fromkeys("abcd", "committed")
    assert log.committable() == 4


def test_event_follows_manifest_and_index(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event reports a version that restores and is listed; offsets move behind it (I2, I4)."""
    seen: list[tuple[str, list[int], list[int], int]] = []

    def look(key: str) -> None:
        listed = [entry.version for entry in log.index.catalog("t", key)]
        seen.append((key, log.manifests.versions("t", key), listed, log.committable()))

    for number, batch in enumerate((FIRST, SECOND, THIRD)):
        add_batch(log, "ab"[number % 2] + "xy", batch, 1 + 3 * number)
    on_event(log, monkeypatch, look)
    log.read()
    assert [key for key, *_ in seen] == [*"axy", *"bxy", *"axy"]
    for number, (_, versions, listed, offset) in enumerate(seen):
        assert versions
        assert listed
        assert offset <= 2 * (number // 3), "the records of a batch are read again until all its events are sent"
    assert log.committable() == 6


def test_upload_waits_for_no_batch_in_work(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for it; the batch keeps its thread, and its records their offset."""
    released = held_manifests(log, monkeypatch)
    add_batch(log, "ab", FIRST, 8)
    add_batch(log, "cd", SECOND, 11)
    log.handler.handle(log.records)
    log.add_segments(5, 0)
    log.add_end(5, 1)
    log.handler.handle(log.records[4:])
    assert log.states() == {"k5": "committed"}
    assert (log.committable(), log.handler.idle() > 0) == (0, True), "it neither spins nor forgets"
    released.set()
    assert log.read(len(log.records)) == {"k5": "committed", **dict.fromkeys("abcd", "committed")}
    assert log.committable() == 6


def test_batch_behind_a_left_out_blob_waits(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob whose number another writer took is committed before the next batch's blob of its key."""
    put_many, calls = log.manifests.put_many, list[int]()

    def raced(manifests: Any, threads: Any) -> Any:
        calls.append(len(manifests))
        if len(calls) == 1:
            log.manifests.put(replace(manifests[0], origin=b"another writer's"))
        return put_many(manifests, threads)

    monkeypatch.setattr(log.manifests, "put_many", raced)
    add_batch(log, "ab", FIRST)
    add_batch(log, "a", SECOND, 7)
    add_batch(log, "a", THIRD, 9)
    assert log.read() == {"a": "committed", "b": "committed"}
    assert origins_of(log, "a")[1:] == [1, 7, 9]


def test_batch_behind_a_late_one_waits(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is withdrawn and committed again comes before the next batch's version of its key."""
    answers = ["its container is pending delete", None]
    monkeypatch.setattr(log.handler._lanes["t"].collected, "find_dangling", lambda _: answers.pop(0))
    long_ago = (time.time_ns() // 1_000_000 - 20 * 3600 * 1000).to_bytes(6, "big") + bytes(10)
    add_batch(log, "ab", long_ago)
    add_batch(log, "a", SECOND, 7)
    assert log.read() == {"a": "committed", "b": "committed"}
    events = [event for event in log.outbox.events if event["key"] == "a"]
    assert [event["origin"] for event in events] == [blob_of(1).hex(), blob_of(7).hex()]
    assert events[0]["version"] < events[1]["version"]
    assert not answers, "both versions of the late batch were checked"


@pytest.mark.parametrize("error", [RuntimeError("surprise"), StoreUnavailable("away for a moment")])
def test_batch_behind_a_failed_one_waits(log: CommitterLog, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error is met by further attempts, before the next batch is tried."""
    put_many, left = log.manifests.put_many, [error]

    def failing(manifests: Any, threads: Any) -> Any:
        if left:
            raise left.pop()
        return put_many(manifests, threads)

    monkeypatch.setattr(log.manifests, "put_many", failing)
    for number, batch in enumerate((FIRST, SECOND, THIRD)):
        add_batch(log, "ab", batch, 1 + 2 * number)
    assert log.read() == {"a": "committed", "b": "committed"}
    assert [origins_of(log, key) for key in "ab"] == [[1, 3, 5], [2, 4, 6]]
    assert [event["id"] for event in log.outbox.events] == [
        blob_id(batch, number).hex() for batch in (FIRST, SECOND, THIRD) for number in range(2)
    ]
    assert not log.outbox.letters


def test_revoked_partition_takes_its_batch_along(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifests are created before the next owner begins; that one sends the events."""
    released = held_manifests(log, monkeypatch)
    add_batch(log, "ab", FIRST)
    log.handler.handle(log.records)
    draining = threading.Thread(target=log.handler.drain, args=(0,))
    draining.start()
    draining.join(0.2)
    assert draining.is_alive(), "another committer must not begin while this one writes"
    released.set()
    draining.join(30)
    assert [origins_of(log, key) for key in "ab"] == [[1], [2]]
    log.handler.on_dropped(0)
    while log.handler.has_ready_blobs:
        log.handler.idle()
    assert log.states() == {}
    log.handler._begun.close()
    log.begin()
    assert log.read() == {"a": "committed", "b": "committed"}
    assert [event["origin"] for event in log.outbox.events] == [blob_of(1).hex(), blob_of(2).hex()]
    assert [origins_of(log, key) for key in "ab"] == [[1], [2]]


def test_record_stays_behind_a_batch_in_work(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large record of a topic is committed behind a batch that may have a blob of its key."""
    released = held_manifests(log, monkeypatch)
    add_batch(log, ["k5", "b"], FIRST, 8)
    log.add_segments(5, 0)
    log.add_end(5, 1, metadata={"kafka": "t[0]@7"})
    log.handler.handle(log.records)
    log.handler.idle()
    assert log.states() == {}
    released.set()
    assert log.read(len(log.records)) == {"k5": "committed", "b": "committed"}
    assert origins_of(log, "k5") == [8, 5]
