"""Test batches of small records: keys of one partition, in order, within the bounds of a message."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from nearkin_ingest import blob_batches
from nearkin_ingest.blob_batches import BLOB_BYTES_MAX, BLOBS_MAX, BlobBatches
from nearkin_ingest.frames import partition_of
from nearkin_ingest.records import Intake
from nearkin_shared.formats.message import Batch, decode
from nearkin_shared.kafka.clients import Headers
from nearkin_shared.storage.manifests import key_digest
from tests.support.data.batches import take_apart

PARTITIONS = 4


class KeptMessages:
    """An outbox that keeps the batches that it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.keys: list[bytes] = []
        self.sent: list[tuple[bytes, int]] = []

    def on_sent(self, blob: bytes, size_bytes: int) -> None:
        self.sent.append((blob, size_bytes))

    def send(self, name: str, key: bytes, value: bytes, headers: Headers) -> None:
        assert name == "frames"
        assert headers["ce_type"] == b"io.nearkin.batch.v1"
        found = decode(value, "sent")
        assert isinstance(found, Batch)
        self.batches.append(found)
        self.keys.append(key)


@pytest.fixture
def kept() -> KeptMessages:
    return KeptMessages()


def batches_to(kept: KeptMessages) -> BlobBatches:
    outbox: Any = kept
    return BlobBatches(outbox, kept.on_sent)


def intake(key: str, value: bytes | None = b"value", tenant: str = "t") -> Intake:
    return Intake(tenant, key, {"kafka": f"topic[0]@{key}"}, value, None, 1000, None)


def test_batch_has_keys_of_one_partition_and_tenant(kept: KeptMessages) -> None:
    """All keys of a batch have the partition of the batch, which topic `placed` would give to each of them."""
    batches = batches_to(kept)
    keys = [f"key-{number}" for number in range(100)]
    for number, key in enumerate(keys):
        batches.add(intake(key, b"%d" % number, tenant="ab"[number % 2]), number.to_bytes(16, "big"), PARTITIONS)
    batches.send_all(PARTITIONS)
    assert sorted(blob.key for batch in kept.batches for blob in batch.blobs) == sorted(keys)
    assert len(kept.batches) == 2 * PARTITIONS
    for attempt, batch in zip(kept.keys, kept.batches, strict=True):
        tenant, partition = batch.envelope.tenant, zlib.crc32(attempt) % PARTITIONS
        placed = {zlib.crc32(bytes.fromhex(key_digest(tenant, blob.key))) % PARTITIONS for blob in batch.blobs}
        assert placed == {partition}
        assert batch.envelope.blob == attempt
        start = 0
        for blob in batch.blobs:
            value = batch.payload[start : start + blob.size_bytes].tobytes()
            assert blob.blake3 == blake3(value).digest()
            assert int.from_bytes(blob.origin, "big") == int(value) == keys.index(blob.key)
            start += blob.size_bytes
    batches.send_all(PARTITIONS)
    assert len(kept.batches) == 2 * PARTITIONS, "a batch was sent twice"


def test_full_batch_is_sent_before_the_next_blob(kept: KeptMessages) -> None:
    batches = batches_to(kept)
    for number in range(BLOBS_MAX + 1):
        batches.add(intake("same", b"%d" % number), bytes(16), PARTITIONS)
    assert [len(batch.blobs) for batch in kept.batches] == [BLOBS_MAX]
    batches.send_all(PARTITIONS)
    assert [len(batch.blobs) for batch in kept.batches] == [BLOBS_MAX, 1]
    wanted = [(end.envelope.blob, end.size_bytes) for batch in kept.batches for _, end in take_apart(batch)]
    assert kept.sent == wanted, "each blob is counted by the id that its event has"
    kept.batches.clear()
    many = blob_batches.BATCH_BYTES_MAX // BLOB_BYTES_MAX
    for _ in range(many + 1):
        batches.add(intake("same", bytes(BLOB_BYTES_MAX)), bytes(16), PARTITIONS)
    assert [len(batch.blobs) for batch in kept.batches] == [many]


def test_batch_of_long_names_fits_its_message(kept: KeptMessages) -> None:
    """A control character takes six bytes as JSON: rows are counted as if each character were one."""
    batches = batches_to(kept)
    for _ in range(300):
        long = replace(intake("\x01" * 1000), metadata={"m": "\x02" * 200})
        assert batches.takes(long)
        batches.add(long, bytes(16), PARTITIONS)
    batches.send_all(PARTITIONS)
    assert sum(len(batch.blobs) for batch in kept.batches) == 300
    assert not batches.takes(replace(intake("k"), metadata={"m": "\x02" * 2000}))


def test_larger_blob_is_sent_behind_the_batch_of_its_key(kept: KeptMessages) -> None:
    batches = batches_to(kept)
    assert not batches.takes(intake("k", bytes(BLOB_BYTES_MAX + 1)))
    assert not batches.takes(replace(intake("k", None), dataref="incoming/x"))
    batches.add(intake("k"), bytes(16), PARTITIONS)
    other = next(
        key for key in map(str, range(99)) if partition_of("t", key, PARTITIONS) != partition_of("t", "k", PARTITIONS)
    )
    batches.send_before(intake(other, bytes(BLOB_BYTES_MAX + 1)), PARTITIONS)
    assert not kept.batches
    batches.send_before(intake("k", bytes(BLOB_BYTES_MAX + 1)), PARTITIONS)
    assert [blob.key for blob in kept.batches[0].blobs] == ["k"]
