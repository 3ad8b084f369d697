"""The committer when the index refuses, its log is read again, or too much is pending: each event matches the state."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis as redis_client

from nearkin import open_store
from nearkin.lab.generated_data import random_bytes
from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import RetryableError
from nearkin_shared.formats.blob_table import BatchedBlob, blob_id
from nearkin_shared.formats.head_record import Heads, encode_heads
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Placed, decode, encode
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.redis import RedisIndex
from nearkin_shared.kafka.consumer_loop import Record
from nearkin_shared.kafka.tenant_context import tenant_contexts
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.objectstore.delegating import record_key_of
from nearkin_shared.objectstore.factory import open_store_of
from nearkin_shared.results import Ledger
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore, key_digest, object_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import Locations
from tests.support.fakes.committers import EmptyBacklog, RecordingOutbox
from tests.support.servers.redis_server import RedisServer

SEGMENT_BYTES = 1000
BEGAN_US = time.time_ns() // 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


class Log:
    """Partition 0 of `placed`, and the committer that reads it: over Redis and objects in a folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objects, self.found = open_store_of(settings)
        self.manifests = ManifestStore(self.objects)
        self.index = RedisIndex(settings.redis, b"")
        self.stored = stored_segments(settings)
        self.records: list[Record] = []
        self.begin()

    def begin(self) -> None:
        """Replace the committer by one without any state."""
        made = tenant_contexts(
            self.settings,
            self.objects,
            bytes.fromhex(self.found.secret),
            self.found.fingerprint_bits,
            self.index.for_domain,
        )
        self.handler = CommitterHandler(self.settings, self.manifests, made, "w", EmptyBacklog(), None)
        self.handler.on_assigned(0, "")
        outbox: Any = self.handler._outbox
        self.outbox: RecordingOutbox = outbox

    def add_segments(self, number: int, sequence: int, count: int = 1) -> None:
        """Add `count` segments of blob `number`."""
        rows = np.arange(sequence, sequence + count) % len(self.stored)
        segments = self.stored.take(rows)
        lengths = np.full(count, SEGMENT_BYTES, np.uint32)
        self._add(number, Placed(envelope(number, sequence), segments, np.zeros(count, np.bool_), lengths, Ledger()))

    def add_end(self, number: int, segments: int, size_bytes: int | None = None) -> None:
        """Add the end of blob `number`; `size_bytes` is by default the sum of its segments."""
        size = segments * SEGMENT_BYTES if size_bytes is None else size_bytes
        whole = End(envelope(number, segments), *start_of(number), size, bytes(32), None, segments)
        self._add(number, whole)

    def _add(self, number: int, message: Placed | End | BatchEnd) -> None:
        record = Record("placed", 0, len(self.records), blob_of(number), encode(message), {}, ())
        self.records.append(record)

    def read(self, start: int = 0) -> dict[str, str]:
        """Pass on all records from `start`; return the last event of each key."""
        self.handler.handle(self.records[start:])
        while len(self.handler._ready):
            self.handler.idle()
        return self.states()

    def states(self) -> dict[str, str]:
        return {event["key"]: event["state"] for event in self.outbox.events}

    def committable(self) -> int:
        return next(offset for _, offset, _ in self.handler.committable())


def stored_segments(settings: Settings) -> Locations:
    """Store a blob of the tenant and return its segments: the committer refuses segments that no container has."""
    of_tenant = with_changes(Settings(), {"tenant": "t"})
    with open_store(Path(str(settings.object_store.url)), settings=of_tenant) as store:
        store.put("stored", random_bytes(1 << 20, 1))
        return store._manifests.get("t", "stored", 1).segments


def blob_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def envelope(number: int, sequence: int) -> Envelope:
    return Envelope(blob_of(number), "t", f"k{number}", sequence * SEGMENT_BYTES, sequence)


def start_of(number: int) -> tuple[int, bytes]:
    return BEGAN_US, blob_of(number)


@pytest.fixture
def log(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(committer_handler, "Outbox", RecordingOutbox)
    with redis_client.Redis.from_url(server.url) as client:
        client.flushall()
    changes = {
        "object_store": {"url": str(tmp_path / "objects")},
        "storage": {"create": True},
        "redis": {"url": server.url},
        "kafka": {"upload_idle_seconds": 1},
    }
    made = Log(with_changes(Settings(), changes))
    yield made
    made.index.close()


def advance_clock(log: Log, seconds: float) -> None:
    """Advance the clock of pending blobs."""
    for blob in log.handler._open.values():
        blob.last_seen -= seconds


def test_blob_with_messages_of_another_tenant_makes_no_version(log: Log) -> None:
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


def test_offset_with_copy_in_another_partition_advances(log: Log) -> None:
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
    log: Log, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A version that the index refuses permanently is still reported as committed."""
    _, versions = log.index._home(log.index.epochs.current, "t")
    with redis_client.Redis.from_url(server.url) as client:
        client.set(versions, b"not a sorted set")
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert log.manifests.versions("t", "k1") == [1]
    assert log.outbox.events[-1]["version"] == 1
    assert log.outbox.letters == []
    assert "the index refused it; listings lack it until the index is rebuilt" in caplog.text
    assert log.committable() == 2


def test_error_after_the_manifest_is_a_dead_letter(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error after the manifest yields a dead letter, and the version is committed."""

    def fail_unexpectedly(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(RedisIndex, "commit", fail_unexpectedly)
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert len(log.outbox.letters) == 1


def test_end_read_again_without_segments_is_committed(log: Log) -> None:
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


def test_committed_blob_whose_pack_is_gone_is_reported_committed(log: Log) -> None:
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


def test_committed_blob_that_lacks_bytes_now_is_reported_committed(log: Log) -> None:
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


def test_version_committed_in_time_with_late_copies_stays(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_blob_with_a_gap_waits_for_the_missing_segment(log: Log) -> None:
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
def test_blob_of_another_length_than_its_end_fails(log: Log, difference: int) -> None:
    """F.32: The bytes of all segments are compared with the length that the end names (I8)."""
    log.add_segments(1, 0)
    log.add_end(1, 1, SEGMENT_BYTES + difference)
    assert log.read() == {"k1": "failed"}
    assert log.manifests.versions("t", "k1") == []
    assert len(log.outbox.letters) == 1


def test_version_of_missing_segments_is_refused(log: Log) -> None:
    """F.32: An index that names a container that the store lacks makes no version (I2)."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    for name, _ in list(log.objects.names("containers")):
        log.objects.delete(name)
    assert log.read() == {"k1": "failed"}
    assert log.manifests.versions("t", "k1") == []


def test_late_version_of_pending_delete_is_taken_back(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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
    log: Log, monkeypatch: pytest.MonkeyPatch, answer: Exception
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


def test_two_uploads_of_one_key_are_two_versions(log: Log) -> None:
    """F.32: A version belongs to an upload only if it has the origin of that upload (I2)."""
    log.add_segments(1, 0)
    log.add_end(1, 1)
    one, lengths = log.stored.take(slice(1)), np.full(1, SEGMENT_BYTES, np.uint32)
    log._add(2, Placed(replace(envelope(2, 0), key="k1"), one, np.zeros(1, np.bool_), lengths, Ledger()))
    log._add(2, End(replace(envelope(2, 1), key="k1"), *start_of(2), SEGMENT_BYTES, bytes(32), None, 1))
    log.read()
    assert log.manifests.versions("t", "k1") == [1, 2]


@pytest.mark.parametrize("hours", [2, 23])
def test_upload_repeated_hours_later_is_one_version(log: Log, hours: int) -> None:
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


def test_too_many_blobs_oldest_continue(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_too_many_blobs_dead_upload_makes_room(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_too_many_records_largest_blob_fails(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_number_of_a_lost_manifest_is_not_reused(log: Log) -> None:
    """F.22: A version takes the number after the highest that a GC run has listed, though its manifest was lost."""
    heads = VersionHeads(log.objects)
    listed = Heads({bytes.fromhex(key_digest("t", "k1")): 4})
    log.objects.put_new(heads.name(1), encode_heads(1, listed, record_key_of(log.objects)))
    log.add_segments(1, 0)
    log.add_end(1, 1)
    assert log.read() == {"k1": "committed"}
    assert log.manifests.versions("t", "k1") == [5]


# --- batches of small blobs ------------------------------------------------------------------------------------------

BATCH = (time.time_ns() // 1_000_000).to_bytes(6, "big") + bytes(10)


def add_batch(log: Log, keys: str, batch: bytes = BATCH, first_origin: int = 1) -> None:
    """Add a batch with a blob of one segment for each letter, and its end."""
    of_all = Envelope(batch, "t", keys[0], blobs=len(keys))
    rows = np.arange(len(keys)) % len(log.stored)
    lengths = np.full(len(keys), SEGMENT_BYTES, np.uint32)
    ledger = Ledger(chunks=2 * len(keys), raw_chunks=len(keys), unique_bytes=100 * len(keys))
    log._add(0, Placed(of_all, log.stored.take(rows), np.zeros(len(keys), np.bool_), lengths, ledger))
    blobs = tuple(
        BatchedBlob(key, SEGMENT_BYTES, bytes(32), blob_of(first_origin + number), BEGAN_US, {"n": key}, None, 1)
        for number, key in enumerate(keys)
    )
    log._add(0, BatchEnd(replace(of_all, sequence=len(keys)), blobs))


def origins_of(log: Log, key: str) -> list[int]:
    """Return the origins of a key's versions, in their order."""
    versions = log.manifests.versions("t", key)
    return [int.from_bytes(log.manifests.get("t", key, version).origin, "big") for version in versions]


def test_batch_makes_a_version_of_each_blob(log: Log) -> None:
    """Blobs of one key become versions in the order of the batch, each with its own segment and share."""
    add_batch(log, "abcab")
    assert log.read() == dict.fromkeys("abc", "committed")
    assert [origins_of(log, key) for key in "abc"] == [[1, 4], [2, 5], [3]]
    found = log.manifests.get("t", "b", 2)
    assert (found.size_bytes, found.metadata, found.previous.version) == (SEGMENT_BYTES, {"n": "b"}, 1)
    assert found.previous.digest == log.manifests.digest("t", "b", 1)
    assert (found.ledger.chunks, found.ledger.unique_bytes, found.ledger.logical_bytes) == (2, 100, SEGMENT_BYTES)
    assert found.segments.ordinals.tolist() == log.stored.take(slice(4, 5)).ordinals.tolist()
    assert [entry.version for entry in log.index.catalog("t", "b")] == [1, 2]
    assert sorted(event["id"] for event in log.outbox.events) == sorted(blob_id(BATCH, n).hex() for n in range(5))
    assert log.committable() == 2


def test_batch_that_comes_again_makes_no_version(log: Log) -> None:
    """After a crash the same records come again, in the same batch or another one: each blob is committed once."""
    add_batch(log, "abca")
    log.read()
    log.begin()
    add_batch(log, "ca", bytes(range(16)), 3)
    add_batch(log, "d", bytes(range(1, 17)), 9)
    assert log.read() == dict.fromkeys("abcd", "committed")
    assert [origins_of(log, key) for key in "abcd"] == [[1, 4], [2], [3], [9]]
    assert Counter(event["origin"] for event in log.outbox.events)[blob_of(3).hex()] == 2


def test_batch_and_single_blobs_share_the_numbers(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that another writer takes between listing and create is not used twice (I2)."""
    put_many = log.manifests.put_many

    def raced(manifests: Any, threads: Any) -> Any:
        monkeypatch.setattr(log.manifests, "put_many", put_many)
        log.manifests.put(replace(manifests[1], origin=b"another writer's"))
        return put_many(manifests, threads)

    monkeypatch.setattr(log.manifests, "put_many", raced)
    add_batch(log, "abb")
    assert log.read() == {"a": "committed", "b": "committed"}
    assert log.manifests.get("t", "b", 1).origin == b"another writer's"
    assert origins_of(log, "b")[1:] == [2, 3]
    assert origins_of(log, "a") == [1]


def test_blob_of_a_batch_with_lost_segment_fails_alone(log: Log) -> None:
    """The others are committed; the lost one is reported, and its records become a dead letter."""
    add_batch(log, "abc")
    message = decode(log.records[0].value, "placed")
    assert isinstance(message, Placed)
    containers = message.segments.containers.copy()
    containers[1] = containers[0] + np.uint64(1 << 30)
    lost = replace(message, segments=replace(message.segments, containers=containers))
    log.records[0] = replace(log.records[0], value=encode(lost))
    assert log.read() == {"a": "committed", "b": "failed", "c": "committed"}
    assert [origins_of(log, key) for key in "abc"] == [[1], [], [3]]
    assert len(log.outbox.letters) == 1
    assert log.committable() == 2


def test_failed_batch_fails_each_of_its_blobs(log: Log) -> None:
    """A stage that fails a batch knows only its first key: the blobs are reported when the end arrives."""
    failure = End(Envelope(BATCH, "t", "a", blobs=3), 0, BATCH, failure="dedup: no")
    log._add(0, failure)
    assert log.read() == {}
    assert log.committable() == 0
    add_batch(log, "abc")
    assert log.read(1) == dict.fromkeys("abc", "failed")
    assert {event["failure"] for event in log.outbox.events} == {"dedup: no"}
    assert log.committable() == 3
    assert not log.manifests.versions("t", "a")


def test_failed_batch_without_segments_finds_versions(log: Log) -> None:
    """Report blobs that an earlier batch has committed as committed: the chunker failed on their second batch."""
    add_batch(log, "ab")
    log.read()
    log.begin()
    envelope = Envelope(bytes(range(16)), "t", "a", blobs=3)
    blobs = [
        BatchedBlob(key, SEGMENT_BYTES, bytes(32), blob_of(at), BEGAN_US, {}, None, 0)
        for at, key in enumerate("abc", 1)
    ]
    log._add(0, End(envelope, 0, envelope.blob, failure="chunker: no"))
    log._add(0, BatchEnd(envelope, tuple(blobs)))
    assert log.read() == {"a": "committed", "b": "committed", "c": "failed"}
    assert [origins_of(log, key) for key in "abc"] == [[1], [2], []]


def test_batch_of_damaged_content_fails_each_blob(log: Log) -> None:
    """Segments that are not those of the blobs make no version of any of them."""
    add_batch(log, "ab")
    end = decode(log.records[1].value, "end")
    assert isinstance(end, BatchEnd)
    first = replace(end.blobs[0], size_bytes=end.blobs[0].size_bytes - 1)
    second = replace(end.blobs[1], size_bytes=end.blobs[1].size_bytes + 1)
    log.records[1] = replace(log.records[1], value=encode(replace(end, blobs=(first, second))))
    assert log.read() == {"a": "failed", "b": "failed"}
    assert not log.manifests.versions("t", "a")


def test_batch_of_one_key_reads_each_version_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for an earlier attempt read all versions of the key for each blob: 32,640 manifests for 256 blobs."""
    reads: list[int] = []
    get = log.manifests.get

    def counted(tenant: str, key: str, version: int) -> Manifest:
        reads.append(version)
        return get(tenant, key, version)

    monkeypatch.setattr(log.manifests, "get", counted)
    log.begin()
    add_batch(log, "a" * 48)
    add_batch(log, "a" * 16, bytes(range(16)), 33)
    add_batch(log, "a" * 16, bytes(range(1, 17)), 101)
    assert log.read() == {"a": "committed"}
    assert len(reads) <= 48 + 16 + 16, "at most once each, and those that come again"
    monkeypatch.undo()
    assert origins_of(log, "a") == [*range(1, 49), *range(101, 117)]


def test_batch_of_empty_blobs_makes_versions(log: Log) -> None:
    """A batch whose blobs are all empty has no segments, so its end is its only message."""
    of_all = Envelope(BATCH, "t", "a", blobs=2)
    empty = [BatchedBlob(key, 0, bytes(32), blob_of(at), BEGAN_US, {}, None, 0) for at, key in enumerate("ab", 1)]
    log._add(0, BatchEnd(of_all, tuple(empty)))
    assert log.read() == {"a": "committed", "b": "committed"}
    assert log.manifests.get("t", "b", 1).size_bytes == 0


def test_batch_end_of_another_tenant_makes_no_version(log: Log) -> None:
    """A batch has one tenant: the end of another tenant's batch with its id names none of its segments (I9)."""
    add_batch(log, "ab")
    end = decode(log.records[1].value, "end")
    assert isinstance(end, BatchEnd)
    log.records[1] = replace(log.records[1], value=encode(replace(end, envelope=replace(end.envelope, tenant="other"))))
    assert log.read() == {}
    assert not log.manifests.versions("other", "a")
    assert not log.manifests.versions("t", "a")
