"""Test that the committer makes a version of each blob of a batch, whatever arrives late, twice or damaged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nearkin_shared.formats.blob_table import BatchedBlob, blob_id
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.message import BatchEnd, End, Envelope, Placed, decode, encode
from nearkin_shared.results import Ledger
from tests.support.fakes.committer_log import BEGAN_US, SEGMENT_BYTES, CommitterLog, blob_of

BATCH = (time.time_ns() // 1_000_000).to_bytes(6, "big") + bytes(10)


def add_batch(log: CommitterLog, keys: Sequence[str], batch: bytes = BATCH, first_origin: int = 1) -> None:
    """Add a batch with a blob of one segment for each key, and its end."""
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


def origins_of(log: CommitterLog, key: str) -> list[int]:
    """Return the origins of a key's versions, in their order."""
    versions = log.manifests.versions("t", key)
    return [int.from_bytes(log.manifests.get("t", key, version).origin, "big") for version in versions]


def test_batch_makes_a_version_of_each_blob(log: CommitterLog) -> None:
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


def test_batch_that_comes_again_makes_no_version(log: CommitterLog) -> None:
    """After a crash the same records come again, in the same batch or another one: each blob is committed once."""
    add_batch(log, "abca")
    log.read()
    log.begin()
    add_batch(log, "ca", bytes(range(16)), 3)
    add_batch(log, "d", bytes(range(1, 17)), 9)
    assert log.read() == dict.fromkeys("abcd", "committed")
    assert [origins_of(log, key) for key in "abcd"] == [[1, 4], [2], [3], [9]]
    assert Counter(event["origin"] for event in log.outbox.events)[blob_of(3).hex()] == 2


def test_batch_and_single_blobs_share_the_numbers(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_blob_of_a_batch_with_lost_segment_fails_alone(log: CommitterLog) -> None:
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


def test_failed_batch_fails_each_of_its_blobs(log: CommitterLog) -> None:
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


def test_failed_batch_without_segments_finds_versions(log: CommitterLog) -> None:
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


def test_batch_of_damaged_content_fails_each_blob(log: CommitterLog) -> None:
    """Segments that are not those of the blobs make no version of any of them."""
    add_batch(log, "ab")
    end = decode(log.records[1].value, "end")
    assert isinstance(end, BatchEnd)
    first = replace(end.blobs[0], size_bytes=end.blobs[0].size_bytes - 1)
    second = replace(end.blobs[1], size_bytes=end.blobs[1].size_bytes + 1)
    log.records[1] = replace(log.records[1], value=encode(replace(end, blobs=(first, second))))
    assert log.read() == {"a": "failed", "b": "failed"}
    assert not log.manifests.versions("t", "a")


def test_batch_of_one_key_reads_each_version_once(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_batch_of_empty_blobs_makes_versions(log: CommitterLog) -> None:
    """A batch whose blobs are all empty has no segments, so its end is its only message."""
    of_all = Envelope(BATCH, "t", "a", blobs=2)
    empty = [BatchedBlob(key, 0, bytes(32), blob_of(at), BEGAN_US, {}, None, 0) for at, key in enumerate("ab", 1)]
    log._add(0, BatchEnd(of_all, tuple(empty)))
    assert log.read() == {"a": "committed", "b": "committed"}
    assert log.manifests.get("t", "b", 1).size_bytes == 0


def test_batch_end_of_another_tenant_makes_no_version(log: CommitterLog) -> None:
    """A batch has one tenant: the end of another tenant's batch with its id names none of its segments (I9)."""
    add_batch(log, "ab")
    end = decode(log.records[1].value, "end")
    assert isinstance(end, BatchEnd)
    log.records[1] = replace(log.records[1], value=encode(replace(end, envelope=replace(end.envelope, tenant="other"))))
    assert log.read() == {}
    assert not log.manifests.versions("other", "a")
    assert not log.manifests.versions("t", "a")


def test_new_keys_of_a_batch_are_not_listed(log: CommitterLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing takes six system calls; keys that have versions are listed, whichever they are of a batch."""
    add_batch(log, "bd")
    log.read()
    listed: list[str] = []
    histories = log.manifests.histories

    def record(tenant: str, key: str) -> Any:
        listed.append(key)
        return histories(tenant, key)

    monkeypatch.setattr(log.manifests, "histories", record)
    add_batch(log, "abcde", bytes(range(16)), 3)
    assert log.read() == dict.fromkeys("abcde", "committed")
    assert listed == ["b", "d"]
    assert [origins_of(log, key) for key in "abcde"] == [[3], [1, 4], [5], [2, 6], [7]]
