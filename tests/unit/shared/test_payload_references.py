"""Test messages whose bytes are in packs: stages in several processes pass references on."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin_committer import handler as committer_handler
from nearkin_committer.handler import CommitterHandler
from nearkin_delta import blob_packs
from nearkin_shared.errors import BadInput, Corrupt, NotFound
from nearkin_shared.formats.message import End, Envelope, Frame, Fresh, Placed, decode, encode
from nearkin_shared.formats.message_layout import MessageKind, Pack, UndecodedMessage, read_header
from nearkin_shared.formats.payload_references import encode_referenced, is_referenced, packs_of
from nearkin_shared.kafka.consumer_loop import Handler, Record, SupportsCommitted
from nearkin_shared.kafka.message_authentication import MAC_HEADER, EnvelopeAuthenticator
from nearkin_shared.kafka.payload_reader import PayloadReader
from nearkin_shared.kafka.stage_chain import ChainLink
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage import staged_packs
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.staged_packs import UploadAttempt, pack_name, put_pack, refer
from tests.support.fakes.committers import EmptyBacklog, RecordingOutbox
from tests.support.fakes.stage_fleet import SETTINGS, Fleet, indexed_tenants

CONTENT = text_like(2_500_000, 4) + bytes(300_000) + random_bytes(900_000, 5)
PACK_BYTES = 1_500_000
BLOB = b"b" * 16
STAGES = ("chunker", "dedup", "resemblance", "delta")
PACK = struct.Struct("<QQQ32s")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with indexed_tenants(tmp_path) as tenants:
        yield Fleet(tenants, monkeypatch)


def uploaded(fleet: Fleet, blob: bytes = BLOB, inline: int = -1, pack_bytes: int = PACK_BYTES) -> list[bytes]:
    """Return the messages of an upload in packs; slice number `inline` goes through Kafka."""
    attempt, values = UploadAttempt(blob, "t", "key", b"o" * 16, 5), []
    for number, start in enumerate(range(0, len(CONTENT), pack_bytes)):
        part = CONTENT[start : start + pack_bytes]
        if number == inline:
            for at in range(0, len(part), 500_000):
                payload = np.frombuffer(part[at : at + 500_000], np.uint8)
                values.append(encode(Frame(Envelope(blob, "t", "key", start + at), payload)))
            continue
        reference = refer(attempt, start, [part])
        put_pack(fleet.objects, reference, [part])
        values.append(encode(reference))
    end = End(Envelope(blob, "t", "key", len(CONTENT)), 5, b"o" * 16, size_bytes=len(CONTENT), blake3=b"3" * 32)
    return [*values, encode(end)]


class Split:
    """A worker for each stage; a test passes their messages on, as Kafka would."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.links: dict[str, ChainLink] = {link.service: link for link in fleet.links()}
        self.workers: dict[str, Handler] = {name: fleet.chained([link]) for name, link in self.links.items()}
        self.offsets = dict.fromkeys(STAGES, 0)

    def run(self, stage: str, values: list[bytes]) -> list[bytes]:
        """Let a stage process messages; return those that it sends to the next stage."""
        link, first = self.links[stage], self.offsets[stage]
        self.offsets[stage] += len(values)
        records = [Record(link.topic, 0, first + at, v[8:24], v, {}, ()) for at, v in enumerate(values)]
        sent = {id(outbox): len(outbox.sent) for outbox in self.fleet.outboxes}
        self.workers[stage].handle(records)
        self.workers[stage].drain(0)
        found = [one for outbox in self.fleet.outboxes for one in outbox.sent[sent.get(id(outbox), 0) :]]
        return [value for name, value in found if name != "placed"]

    def paired(self, values: list[bytes]) -> list[bytes]:
        """Return what reaches the delta stage."""
        for stage in STAGES[:-1]:
            values = self.run(stage, values)
        return values

    def commit(self, without: int = 0) -> None:
        """Commit the offset of the delta stage, but for the last records."""
        worker = self.workers["delta"]
        assert isinstance(worker, SupportsCommitted)
        (offset,) = [offset for _, offset, _ in worker.committable()]
        worker.on_committed(0, offset - without)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


@pytest.fixture
def split(fleet: Fleet) -> Iterator[Split]:
    made = Split(fleet)
    yield made
    made.close()


def packs(fleet: Fleet, wanted: int | None = None) -> int:
    """Return the number of packs; wait until it is `wanted`."""
    deadline = time.monotonic() + 10
    while True:
        found = sum(1 for _ in fleet.objects.names("staging"))
        if wanted is None or found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def inline_values() -> list[bytes]:
    """Return the messages of an upload that goes through Kafka."""
    envelope, payload = Envelope(b"i" * 16, "t", "inline"), np.frombuffer(CONTENT[:500_000], np.uint8)
    end = End(replace(envelope, position=500_000), 5, b"o" * 16, size_bytes=500_000, blake3=b"3" * 32)
    return [encode(Frame(envelope, payload)), encode(end)]


def listed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the threads that list objects from now on, in their order."""
    names, threads = fleet.objects.names, list[str]()

    def recorded(prefix: str) -> Iterator[tuple[str, int]]:
        threads.append(threading.current_thread().name)
        return names(prefix)

    monkeypatch.setattr(fleet.objects, "names", recorded)
    return threads


def placed_bytes(fleet: Fleet) -> int:
    return sum(int(one.lengths.sum()) for one in fleet.placed() if isinstance(one, Placed))


def delete_packs(fleet: Fleet) -> None:
    for name, _ in list(fleet.objects.names("staging")):
        fleet.objects.delete(name)


def referenced(split: Split, kind: MessageKind = MessageKind.FRESH) -> UndecodedMessage:
    """Return the first message of a kind about an upload in packs."""
    values = uploaded(split.fleet)
    for name in STAGES[: 2 if kind is MessageKind.FRESH else 3]:
        values = split.run(name, values)
    return read_header(values[0], "sent")


def with_references(message: UndecodedMessage, entries: bytes) -> UndecodedMessage:
    data = bytearray(message.head[: message.starts[-1]])
    struct.pack_into("<I", data, 40, len(entries))
    return read_header(bytes(data) + entries, "damaged")


def test_stages_in_several_processes_pass_references(split: Split, fleet: Fleet) -> None:
    """No message between them carries bytes of the blob, and the same segments are stored."""
    values = uploaded(fleet)
    for stage in STAGES[:-1]:
        values = split.run(stage, values)
        assert sum(map(len, values)) < len(CONTENT) // 10
        assert all(map(is_referenced, values[:-1]))
    split.run("delta", values)
    assert placed_bytes(fleet) == len(CONTENT)
    chained = fleet.chained(fleet.links())
    again = uploaded(fleet, b"c" * 16)
    chained.handle([Record("frames", 0, at, b"c" * 16, value, {}, ()) for at, value in enumerate(again)])
    chained.drain(0)
    repeated = [one for one in fleet.placed() if isinstance(one, Placed) and one.envelope.blob == b"c" * 16]
    assert all(one.known.all() for one in repeated)
    chained.close()


@pytest.mark.parametrize("inline", [0, 1, 2])
def test_upload_that_is_partly_in_kafka_is_stored(split: Split, fleet: Fleet, inline: int) -> None:
    """A gateway sends frames while the object store refuses packs; a segment may have bytes of both."""
    paired = split.paired(uploaded(fleet, inline=inline))
    assert {is_referenced(value) for value in paired[:-1]} == {True, False}
    split.run("delta", paired)
    assert placed_bytes(fleet) == len(CONTENT)
    assert not any(isinstance(one, End) and one.failure for one in fleet.placed())


def test_packs_stay_until_their_blob_has_ended(split: Split, fleet: Fleet) -> None:
    *parts, end = split.paired(uploaded(fleet))
    split.run("delta", parts)
    split.commit()
    assert packs(fleet) == 3
    split.run("delta", [end])
    split.commit(without=1)
    time.sleep(0.2)  # a deletion would follow soon
    assert packs(fleet) == 3
    split.commit()
    assert packs(fleet, 0) == 0


def test_pack_cut_by_two_workers_stays(split: Split, fleet: Fleet) -> None:
    """Messages of a worker without the delta stage may need it still; a worker with all stages takes the blob over."""
    values = uploaded(fleet)
    records = [Record("frames", 0, at, BLOB, value, {}, ()) for at, value in enumerate(values)]
    split.workers["chunker"].handle(records[:2])
    ((_, offset, state),) = split.workers["chunker"].committable()
    assert offset == 1  # of the second pack, of which a part was sent
    other = fleet.chained(fleet.links())
    assert isinstance(other, SupportsCommitted)
    other.on_assigned(0, state)
    other.handle(records[offset:])
    other.drain(0)
    other.on_committed(0, len(records))
    assert packs(fleet, 2) == 2
    time.sleep(0.2)  # no other deletion follows
    assert packs(fleet) == 2
    other.close()


def test_worker_that_begins_within_a_blob_deletes_all_packs(split: Split, fleet: Fleet) -> None:
    """Its predecessor saw the first references: their packs are found by listing."""
    paired = split.paired(uploaded(fleet))
    other = refer(UploadAttempt(b"d" * 16, "t", "key", b"o" * 16, 5), 0, [b"another blob"])
    put_pack(fleet.objects, other, [b"another blob"])
    split.run("delta", paired[len(paired) // 2 :])
    split.commit()
    assert packs(fleet, 1) == 1
    assert [name for name, _ in fleet.objects.names("staging")] == [pack_name(other.pack)]


@pytest.mark.parametrize("count", [1, 3])
def test_worker_that_begins_before_an_end_deletes_packs(
    split: Split, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Its predecessor saw all references: the packs of all blobs that ended are found by one listing."""
    paired = [split.paired(uploaded(fleet, bytes([66 + number]) * 16)) for number in range(count)]
    split.run("delta", [value for *parts, _ in paired for value in parts])
    split.commit()
    assert packs(fleet) == 3 * count
    split.workers["delta"] = fleet.chained([split.links["delta"]])
    listings = listed(fleet, monkeypatch)
    split.run("delta", [end for *_, end in paired])
    split.commit()
    assert packs(fleet, 0) == 0
    assert len([name for name in listings if name.startswith("nearkin-staging")]) == 1


def test_end_of_a_blob_without_packs_lists_nothing(split: Split, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small uploads go through Kafka: to list all packs behind each of them would cost more than the uploads."""
    listings = listed(fleet, monkeypatch)
    end = End(Envelope(b"e" * 16, "t", "empty", 0), 5, b"o" * 16, size_bytes=0, blake3=b"3" * 32)
    split.run("delta", split.paired([*inline_values(), encode(end)]))
    split.commit()
    assert not listings  # a listing would come soon: see below
    split.run("delta", split.paired(uploaded(fleet))[-1:])
    split.commit()
    packs(fleet, 0)
    assert len([name for name in listings if name.startswith("nearkin-staging")]) == 1


def test_chain_that_lost_a_partition_deletes_all_packs(split: Split, fleet: Fleet) -> None:
    """Another worker saw the middle of a blob, and this one its start and its end."""
    fresh = split.run("dedup", split.run("chunker", uploaded(fleet)))
    worker = fleet.chained([split.links["resemblance"], split.links["delta"]])
    assert isinstance(worker, SupportsCommitted)
    records = [Record("nearkin.fresh", 0, at, BLOB, value, {}, ()) for at, value in enumerate(fresh)]
    worker.handle(records[:1])
    worker.drain(0)
    worker.on_dropped(0)
    worker.on_assigned(0, "")
    worker.handle(records[-1:])
    worker.drain(0)
    worker.on_committed(0, len(records))
    assert packs(fleet, 0) == 0
    worker.close()


def test_repeated_messages_without_packs_have_no_effect(split: Split, fleet: Fleet) -> None:
    """A worker that replaces a crashed one sends messages again whose packs were deleted behind the end."""
    fresh = split.run("dedup", split.run("chunker", uploaded(fleet)))
    split.run("delta", split.run("resemblance", fresh))
    split.commit()
    assert packs(fleet, 0) == 0
    placed = len(fleet.placed())
    later = Split(fleet)  # with no pack in memory
    repeated = later.run("resemblance", fresh[:-1])
    assert len(repeated) == len(fresh) - 1
    later.run("delta", repeated)
    assert len(fleet.placed()) == placed
    assert not any(outbox.dead for outbox in fleet.outboxes)
    later.close()


def test_lost_pack_fails_its_blob_behind_the_end(split: Split, fleet: Fleet) -> None:
    """The end is sent first: if another worker has stored the segments, it commits the blob."""
    paired = split.paired(uploaded(fleet))
    delete_packs(fleet)
    split.run("delta", paired)
    first, second = fleet.placed()
    assert isinstance(first, End)
    assert first.failure is None
    assert isinstance(second, End)
    assert second.failure is not None
    assert "staging/" in second.failure
    assert "upload it again" in second.failure
    assert (second.origin, second.segments) == (b"o" * 16, first.segments)


class Committing:
    """A committer that receives what reaches topic `placed`, in the order of the calls of `receive`."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(committer_handler, "Outbox", RecordingOutbox)
        manifests = ManifestStore(memory_objects())
        self._fleet, self._received, self._next = fleet, dict[int, int](), 0
        self.handler = CommitterHandler(SETTINGS, manifests, fleet.tenants, "w", EmptyBacklog(), None)
        self.handler.on_assigned(0, "")

    def receive(self) -> list[str]:
        """Receive what was sent since the last call; return the states of all blobs that have ended."""
        for outbox in self._fleet.outboxes:
            values = [value for name, value in outbox.sent if name == "placed"]
            for value in values[self._received.get(id(outbox), 0) :]:
                self.handler.handle([Record("placed", 0, self._next, BLOB, value, {}, ())])
                self._next += 1
            self._received[id(outbox)] = len(values)
        recording: Any = self.handler._outbox
        return [event["state"] for event in recording.events]


def test_blob_that_two_workers_cut_is_committed(split: Split, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with all stages cuts it again and deletes its packs, before the first worker's messages are read."""
    committer, values = Committing(fleet, monkeypatch), uploaded(fleet, pack_bytes=300_000)
    sent = split.paired(values)
    records = [Record("frames", 0, at, BLOB, value, {}, ()) for at, value in enumerate(values)]
    other = fleet.chained(fleet.links())
    assert isinstance(other, SupportsCommitted)
    other.handle(records[:2])
    other.drain(0)
    ((_, offset, _),) = other.committable()
    other.on_committed(0, offset)
    assert packs(fleet, len(values) - 1 - offset) == len(values) - 1 - offset
    assert offset > 0
    committer.receive()
    split.run("delta", sent)
    assert committer.receive() == []
    other.handle(records[2:])
    other.drain(0)
    assert committer.receive() == ["committed"]
    other.close()


def test_packs_of_a_forgotten_blob_are_found_by_listing(
    split: Split, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_packs, "BLOBS_MAX", 1)
    one, other = split.paired(uploaded(fleet)), split.paired(uploaded(fleet, b"c" * 16))
    for values in ([one[0]], [other[0]], one[1:], other[1:]):
        split.run("delta", values)
    split.commit()
    assert packs(fleet, 0) == 0


@pytest.mark.parametrize("names_max", [1, 10_000])
def test_packs_of_a_large_blob_are_all_deleted(
    split: Split, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, names_max: int
) -> None:
    """A blob of 100 GB has more packs than deletions may wait: they are one deletion."""
    monkeypatch.setattr(blob_packs, "NAMES_MAX", names_max)
    monkeypatch.setattr(staged_packs, "DELETIONS_MAX", 1)
    split.workers["delta"] = fleet.chained([split.links["delta"]])
    split.run("delta", split.paired(uploaded(fleet)))
    split.commit()
    assert packs(fleet, 0) == 0


def committed(split: Split, values: list[bytes]) -> None:
    """Let the chunker process messages and commit their offsets."""
    split.run("chunker", values)
    worker = split.workers["chunker"]
    assert isinstance(worker, SupportsCommitted)
    for partition, offset, _ in worker.committable():
        worker.on_committed(partition, offset)


@pytest.mark.parametrize("is_told", [True, False])
def test_packs_that_no_segment_refers_to_are_deleted(split: Split, fleet: Fleet, is_told: bool) -> None:
    """A blob that has failed in the chunker leaves packs that no later stage knows."""
    *frames, _ = uploaded(fleet)
    tail = refer(UploadAttempt(BLOB, "t", "key", b"o" * 16, 5), len(CONTENT), [b"a small pack"])
    put_pack(fleet.objects, tail, [b"a small pack"])
    failed = End(Envelope(BLOB, "t", "key"), 5, b"o" * 16, failure="the client went away")
    if is_told:  # by its gateway
        split.run("chunker", frames)
        committed(split, [encode(tail), encode(failed)])
        assert packs(fleet, 3) == 3
    else:  # it lacks the bytes of the second pack, and its client goes on
        split.run("chunker", frames[:1])
        committed(split, [frames[2], encode(tail)])
        assert packs(fleet, 2) == 2
    assert pack_name(tail.pack) not in [name for name, _ in fleet.objects.names("staging")]


def test_segments_of_many_small_packs_have_their_bytes(split: Split, fleet: Fleet) -> None:
    """A slow client fills a pack of some bytes each second; a message could not name all of them."""
    attempt, values = UploadAttempt(BLOB, "t", "key", b"o" * 16, 5), []
    content = random_bytes(300_000, 8)
    for start in range(0, len(content), 1000):
        reference = refer(attempt, start, [content[start : start + 1000]])
        put_pack(fleet.objects, reference, [content[start : start + 1000]])
        values.append(encode(reference))
    end = End(Envelope(BLOB, "t", "key", len(content)), 5, b"o" * 16, size_bytes=len(content), blake3=b"3" * 32)
    sent = split.run("chunker", [*values, encode(end)])
    assert not any(map(is_referenced, sent))
    committed(split, [])
    assert packs(fleet, 0) == 0
    split.run("delta", split.run("resemblance", split.run("dedup", sent)))
    assert placed_bytes(fleet) == len(content)


def test_pack_of_an_earlier_worker_is_not_released(split: Split, fleet: Fleet) -> None:
    """Its segments refer to the pack at which another chunker takes over."""
    values = uploaded(fleet, inline=2)
    split.run("chunker", values[:2])
    ((_, offset, state),) = split.workers["chunker"].committable()
    assert offset == 1
    split.workers["chunker"] = fleet.chained([split.links["chunker"]])
    split.workers["chunker"].on_assigned(0, state)
    split.offsets["chunker"] = offset
    committed(split, values[offset:])
    time.sleep(0.2)  # a deletion would follow soon
    assert packs(fleet) == 2


def test_dead_letter_with_the_bytes_of_packs_is_signed(split: Split, fleet: Fleet) -> None:
    """Kafka's record is signed, too, but with references: a replay sends the bytes, with a signature of them."""
    value = split.paired(uploaded(fleet))[0]
    ours = EnvelopeAuthenticator(b"k" * 32, required=True)
    for outbox in fleet.outboxes:
        outbox.authenticator = ours
    changed, name = bytearray(value), "nearkin.paired"
    changed[value.index(bytes(read_header(value, "sent").column("names")[:32]))] ^= 1  # a fingerprint
    headers = {MAC_HEADER: ours.mac_of(name, BLOB, bytes(changed))}
    split.workers["delta"].handle([Record(name, 0, 0, BLOB, bytes(changed), headers, tuple(headers.items()))])
    ((letter, (key, replayed)),) = [
        found for outbox in fleet.outboxes for found in zip(outbox.dead, outbox.dead_records, strict=True)
    ]
    assert not is_referenced(replayed)
    ours.check("delta", name, key, replayed, letter[MAC_HEADER])


@pytest.mark.parametrize("kind", [MessageKind.FRESH, MessageKind.PAIRED])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 40])
def test_reader_gives_the_bytes_of_the_blob(
    split: Split, monkeypatch: pytest.MonkeyPatch, kind: MessageKind, whole_bytes: int
) -> None:
    """Both for packs that are read whole and for ranges of packs."""
    monkeypatch.setattr("nearkin_shared.kafka.payload_reader.WHOLE_BYTES", whole_bytes)
    found = PayloadReader(split.fleet.objects).with_bytes(referenced(split, kind))
    assert not found.is_referenced
    assert found.kind is kind
    assert bytes(found.payload) == CONTENT[: found.payload_bytes]  # the text has no repeated chunk
    assert decode(found.parts, "inline")


def test_reader_without_a_pack_raises_not_found(split: Split, fleet: Fleet) -> None:
    message = referenced(split)
    delete_packs(fleet)
    with pytest.raises(NotFound, match="staging/"):
        PayloadReader(fleet.objects).with_bytes(message)


def test_pack_that_is_too_short_is_refused(split: Split, fleet: Fleet) -> None:
    message = referenced(split)
    name = pack_name(packs_of(message)[0])
    fleet.objects.delete(name)
    fleet.objects.put_new(name, CONTENT[:1000])
    with pytest.raises(Corrupt, match="staging/"):
        PayloadReader(fleet.objects).with_bytes(message)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (b"", "references to no pack"),
        (b"123", "do not parse"),
        (PACK.pack(0, 0, 1, b"d" * 32), "reference to 0 bytes"),
        (PACK.pack(0, 1 << 40, 1, b"d" * 32), "want 1 to"),
        (PACK.pack(0, 10, 1 << 62, b"d" * 32), "before the year 10000"),
        (PACK.pack(0, 10, 1, b"d" * 32) + PACK.pack(11, 10, 1, b"d" * 32), "at the end of the one before it"),
        (PACK.pack(5, 10, 1, b"d" * 32) + PACK.pack(0, 10, 1, b"d" * 32), "at the end of the one before it"),
    ],
)
def test_malformed_references_are_corrupt(split: Split, entries: bytes, reason: str) -> None:
    with pytest.raises(Corrupt, match=reason):
        packs_of(with_references(referenced(split), entries))


def test_packs_without_all_bytes_are_refused(split: Split, fleet: Fleet) -> None:
    damaged = with_references(referenced(split), PACK.pack(1 << 30, 10, 1, b"d" * 32))
    with pytest.raises(Corrupt, match="its packs have 0 of the"):
        PayloadReader(fleet.objects).with_bytes(damaged)


def test_message_with_references_is_refused_elsewhere(split: Split) -> None:
    """Only segments have them, and only the stages behind the chunker read them."""
    with pytest.raises(Corrupt, match="bytes are in packs"):
        decode(referenced(split).parts, "sent")
    frame = bytearray(encode(Frame(Envelope(BLOB, "t", "key"), np.zeros(10, np.uint8))))
    frame[4] = 6
    with pytest.raises(Corrupt, match="which only segments have"):
        read_header(bytes(frame), "sent")


@pytest.mark.parametrize(
    ("wrong", "reason"), [([], "no pack"), ([Pack(BLOB, 0, 1, 1, b"d" * 32)] * 20_000, "payload bytes")]
)
def test_too_few_or_too_many_packs_are_refused(split: Split, wrong: list[Pack], reason: str) -> None:
    found = decode(PayloadReader(split.fleet.objects).with_bytes(referenced(split)).parts, "inline")
    assert isinstance(found, Fresh)
    with pytest.raises(BadInput, match=reason):
        encode_referenced(found, wrong)
