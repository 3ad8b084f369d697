"""The committer when the index refuses, its log is read again, or too much is pending: each event matches the state."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis as redis_client

from nearkin_committer import handler as committer_handler
from nearkin_shared.errors import RetryableError
from nearkin_shared.formats.head_record import Heads, encode_heads
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import End, Placed
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.delegating import record_key_of
from nearkin_shared.results import Ledger
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore, key_digest, object_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from tests.support.fakes.committer_log import BEGAN_US, SEGMENT_BYTES, CommitterLog, envelope, start_of
from tests.support.servers.redis_server import RedisServer


def advance_clock(log: CommitterLog, seconds: float) -> None:
    """Advance the clock of pending blobs."""
    for blob in log.handler._open.values():
        blob.last_seen -= seconds


def test_blob_with_messages_of_another_tenant_makes_no_version(log: CommitterLog) -> None:
    """Messages of another tenant about a blob make no version of it.

    Its version would name segments of another domain, or take the end of another tenant's blob (I9).
    """
    log.add_segments(1, 0)
    whole = End(replace(envelope(1, 1), tenant="other"), *start_of(1), SEGMENT_BYTES, bytes(32), None, 1)
    log._add(1, whole)
    log._add(1, replace(whole, envelope=replace(whole.envelope, tenant="t", key="k2")))
    log._add(1, replace(whole, envelope=replace(whole.envelope, key="k3"), blake3=b"", failure="another tenant's"))
    assert log.read() == {"k3": "failed"}
    log.add_end(1, 1)
    assert log.read(4) == {"k3": "failed", "k1": "committed"}
    assert (log.manifests.versions("t", "k1"), log.manifests.versions("other", "k1")) == ([1], [])


def test_offset_with_copy_in_another_partition_advances(log: CommitterLog) -> None:
    """A copy of a record in another partition does not delay the offset of its own."""
    log.handler.on_assigned(1, "")
    log.add_segments(1, 0)
    log.handler.handle([replace(log.records[0], partition=1)])
    log.read()
    log.handler.on_dropped(1)  # to another committer; the blob's messages of partition 0 stay
    log.add_end(1, 1)
    assert log.read(1) == {"k1": "committed"}
    assert log.committable() == 2


# --- what is there is committed --------------------------------------------------------------------------------------


def test_version_refused_by_the_index_is_reported_committed(
    log: CommitterLog, committer_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A version that the index refuses permanently is still reported as committed."""
    _, versions = log.index._home(log.index.epochs.current, "t")
    with redis_client.Redis.from_url(committer_redis.url) as client:
        client.set(versions, b"not a sorted set")
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert log.manifests.versions("t", "k1") == [1]
    assert log.outbox.events[-1]["version"] == 1
    assert log.outbox.letters == []
    assert "the index refused it; listings lack it until the index is rebuilt" in caplog.text
    assert log.committable() == 2


def test_error_after_the_manifest_is_a_dead_letter(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error after the manifest yields a dead letter, and the version is committed."""

    def fail_unexpectedly(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(RedisIndex, "commit", fail_unexpectedly)
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert len(log.outbox.letters) == 1


def test_end_read_again_without_segments_is_committed(log: CommitterLog) -> None:
    """An end that is read again without its segments belongs to a committed blob.

    Offsets advance record by record: a blob in between delays the end, not the records before it.
    """
    log.add_segments(1, 0)
    log.add_segments(2, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    start = log.committable()
    assert start == 1
    log.begin()
    log.read(start)
    advance_clock(log, 1 + committer_handler.LATE_TIMES)
    log.handler.idle()
    assert log.states() == {"k1": "committed", "k2": "failed"}
    assert log.manifests.versions("t", "k1") == [1]
    assert log.committable() == 3


def test_committed_blob_whose_pack_is_gone_is_reported_committed(log: CommitterLog) -> None:
    """The pack was deleted behind the commit; then Kafka lost the offsets, and the reference was read again."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    log.begin()
    began_us, origin = start_of(1)
    gone = End(envelope(1, 0), began_us, origin, failure="staging/x is missing; upload it again", segments=0)
    log._add(1, gone)
    log._add(2, End(envelope(2, 0), *start_of(2), failure="staging/y is missing; upload it again", segments=0))
    assert log.read(2) == {"k1": "committed", "k2": "failed"}
    assert log.committable() == len(log.records)


def test_committed_blob_that_lacks_bytes_now_is_reported_committed(log: CommitterLog) -> None:
    """A worker repeats the end of a blob behind its commit: its packs were deleted, and another committer reads it."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    log.begin()
    for number in (1, 2):  # blob 2 has no version: its segments may still arrive
        whole = End(envelope(number, 1), *start_of(number), SEGMENT_BYTES, bytes(32), None, 1)
        log._add(number, replace(whole, failure="staging/x: no such object"))
    assert log.read(2) == {"k1": "committed"}
    assert log.committable() == len(log.records) - 1
    log.add_segments(2, 0)
    assert log.read(4) == {"k1": "committed", "k2": "committed"}
    assert log.manifests.versions("t", "k1") == [1]
    assert log.committable() == len(log.records)


def test_version_committed_in_time_with_late_copies_stays(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that was committed in time stays, however late its records are read again.

    The segment cannot be read by then: that is damage, and a copy may restore it; the version must be kept.
    """
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    for name, _ in list(log.objects.names("containers")):
        log.objects.delete(name)
    hours, time_ns = int(20 * 3600e9), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + hours)
    log.begin()
    assert log.read() == {"k1": "committed"}
    log.add_segments(2, 0)
    log.add_end(2, 1)
    assert log.read(2)["k2"] == "failed", "a version as late as this is checked"
    assert (log.manifests.versions("t", "k1"), log.manifests.versions("t", "k2")) == ([1], [])


# --- what a version must have ----------------------------------------------------------------------------------------


def test_blob_with_a_gap_waits_for_the_missing_segment(log: CommitterLog) -> None:
    """F.32: Overlapping runs hold as many segments as the end names, and one segment is still missing (I2)."""
    log.add_segments(1, 0, 2)
    log.add_segments(1, 1)
    log.add_segments(1, 3)
    log.add_end(1, 4)
    assert log.read() == {}
    log.add_segments(1, 2)
    assert log.read(4) == {"k1": "committed"}
    assert len(log.manifests.get("t", "k1", 1).segments) == 4


@pytest.mark.parametrize("difference", [-1, 1])
def test_blob_of_another_length_than_its_end_fails(log: CommitterLog, difference: int) -> None:
    """F.32: The bytes of all segments are compared with the length that the end names (I8)."""
    log.add_segments(1, 0)
    log.add_end(1, 1, SEGMENT_BYTES + difference)
    assert log.read() == {"k1": "failed"}
    assert log.manifests.versions("t", "k1") == []
    assert len(log.outbox.letters) == 1


def test_version_of_missing_segments_is_refused(log: CommitterLog) -> None:
    """F.32: An index that names a container that the store lacks makes no version (I2)."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    for name, _ in list(log.objects.names("containers")):
        log.objects.delete(name)
    assert log.read() == {"k1": "failed"}
    assert log.manifests.versions("t", "k1") == []


def test_late_version_of_pending_delete_is_taken_back(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.32: A version durable after half of the grace, whose segment is pending delete, is deleted again (I6).

    Its number stays taken: a GC run that has counted its references knows it by that number.
    """
    container, ordinal = int(log.stored.containers[0]), log.stored.ordinals[:1]
    pending = PendingDelete(time.time_ns() // 1000, np.zeros(0, np.uint32), ordinal)
    PendingDeleteStore(log.objects).replace({container: pending})
    hours, time_ns = int(20 * 3600e9), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + hours)
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "failed"}
    history = log.manifests.histories("t", "k1")[1]
    assert (history.committed, history.sequence) == (False, 1)
    assert not log.manifests.shows("t", "k1", history)
    assert log.manifests.mark("t", "k1", 1, 1).who == "committer"


@pytest.mark.parametrize("answer", [RetryableError("killed"), AlreadyExists("k1")])
def test_version_late_in_a_paused_put_is_taken_back(
    log: CommitterLog, monkeypatch: pytest.MonkeyPatch, answer: Exception
) -> None:
    """A committer is paused in its put, and then killed, or misses the answer: the version is checked all the same."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    seconds, time_ns, put = 20 * 3600, time.time_ns, ManifestStore.put

    def put_later(self: ManifestStore, manifest: Manifest) -> int:
        monkeypatch.setattr(ManifestStore, "put", put)
        monkeypatch.setattr(time, "time_ns", lambda: time_ns() + int(seconds * 1e9))
        for name, _ in list(log.objects.names("containers")):  # a GC run, a grace later
            log.objects.delete(name)
        put(self, manifest)
        name = object_name(manifest.tenant, manifest.key, manifest.version)
        path = Path(str(log.settings.object_store.url).removeprefix("file://"), name)
        os.utime(path, (time.time() + seconds, time.time() + seconds))
        raise answer

    monkeypatch.setattr(ManifestStore, "put", put_later)
    with suppress(RetryableError):
        log.read()
    if isinstance(answer, RetryableError):
        log.begin()
        log.read()
    assert log.states() == {"k1": "failed"}
    assert not log.manifests.histories("t", "k1")[1].committed


def test_two_uploads_of_one_key_are_two_versions(log: CommitterLog) -> None:
    """F.32: A version belongs to an upload only if it has the origin of that upload (I2)."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    one, lengths = log.stored.take(slice(1)), np.full(1, SEGMENT_BYTES, np.uint32)
    log._add(2, Placed(replace(envelope(2, 0), key="k1"), one, np.zeros(1, np.bool_), lengths, Ledger()))
    log._add(2, End(replace(envelope(2, 1), key="k1"), *start_of(2), SEGMENT_BYTES, bytes(32), None, 1))
    log.read()
    assert log.manifests.versions("t", "k1") == [1, 2]


@pytest.mark.parametrize("hours", [2, 23])
def test_upload_repeated_hours_later_is_one_version(log: CommitterLog, hours: int) -> None:
    """F.16: An `Idempotency-Key` holds for its day: the committer searches back to the first attempt, not 5 minutes."""
    origin, later_us = b"o" * 16, hours * 3600 * 1_000_000
    one, lengths = log.stored.take(slice(1)), np.full(1, SEGMENT_BYTES, np.uint32)

    def repeat(number: int, began_us: int) -> None:
        log.begin()
        log._add(number, Placed(replace(envelope(number, 0), key="k"), one, np.zeros(1, np.bool_), lengths, Ledger()))
        first_us = began_us - 24 * 3600 * 1_000_000
        whole = End(replace(envelope(number, 1), key="k"), began_us, origin, SEGMENT_BYTES, bytes(32), None, 1)
        log._add(number, replace(whole, first_attempt_us=first_us))
        assert log.read(len(log.records) - 2) == {"k": "committed"}

    repeat(1, BEGAN_US)
    repeat(2, BEGAN_US + later_us)
    assert log.manifests.versions("t", "k") == [1]


# --- too much gathers ------------------------------------------------------------------------------------------------


def test_too_many_blobs_oldest_continue(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many blobs are pending, the oldest ones continue."""
    monkeypatch.setattr(committer_handler, "OPEN_BLOBS_MAX", 3)
    for sequence in range(2):
        for number in range(8):
            log.add_segments(number, sequence)
    for number in range(8):
        log.add_end(number, 2)
    log.read()
    assert Counter(log.states().values()) == {"committed": 3, "failed": 5}
    assert [log.states()[f"k{number}"] for number in range(3)] == ["committed"] * 3
    failures = {event["failure"] for event in log.outbox.events if event["state"] == "failed"}
    assert failures == {
        "more than 3 blobs are gathering: add partitions (kafka.partitions) or committers, then put it again"
    }
    assert len(log.outbox.events) == 8
    assert log.committable() == len(log.records)


def test_too_many_blobs_dead_upload_makes_room(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many blobs are pending, one whose upload is dead makes room."""
    monkeypatch.setattr(committer_handler, "OPEN_BLOBS_MAX", 3)
    for number in range(3):
        log.add_segments(number, 0)
    log.read()
    advance_clock(log, 1.5)
    log.add_segments(0, 1)  # is alive
    log.add_segments(3, 0)
    log.add_end(3, 1)
    log.add_end(0, 2)
    assert log.read(3) == {"k1": "failed", "k3": "committed", "k0": "committed"}
    assert log.committable() == 2


def test_too_many_records_largest_blob_fails(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many records are pending, the blob with most of them fails."""
    monkeypatch.setattr(committer_handler, "RECORDS_MAX", 10)
    log.add_segments(1, 0)
    for sequence in range(40):
        log.add_segments(2, sequence)
    log.add_end(2, 40)
    log.add_end(1, 1)
    assert log.read() == {"k2": "failed", "k1": "committed"}
    assert log.handler._records == 0
    assert log.committable() == len(log.records)


def test_number_of_a_lost_manifest_is_not_reused(log: CommitterLog) -> None:
    """F.22: A version takes the number after the highest that a GC run has listed, though its manifest was lost."""
    heads = VersionHeads(log.objects)
    listed = Heads({bytes.fromhex(key_digest("t", "k1")): 4})
    log.objects.put_new(heads.name(1), encode_heads(1, listed, record_key_of(log.objects)))
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert log.manifests.versions("t", "k1") == [5]
