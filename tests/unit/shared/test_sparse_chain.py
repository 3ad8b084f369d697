"""Test segments that a gateway deduplicated: their messages, and the claims that workers accept."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nearkin.lab.generated_data import random_bytes, text_like
from nearkin.workers import edge_dedup
from nearkin.workers.edge_dedup import AWAY_SECONDS, EdgeDedup
from nearkin_chunker import BlobRun, ChunkerStage, FrameRuns
from nearkin_dedup import sparse_segments
from nearkin_shared.config.loader import with_changes
from nearkin_shared.errors import Corrupt, StoreUnavailable
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.message import (
    End,
    Envelope,
    Frame,
    Placed,
    Sparse,
    decode,
    encode,
    is_staged,
    split_messages,
)
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.kafka.consumer_loop import Handler, Record, SupportsCommitted
from nearkin_shared.kafka.tenant_context import TenantContext
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.pipeline.stage import LookupResults
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.staged_packs import UploadAttempt, put_pack, refer
from nearkin_shared.types import ContainerId, FreshBatch, Locations
from tests.support.fakes.stage_fleet import SETTINGS, Fleet, indexed_tenants

CONTENT = text_like(3_000_000, 4) + bytes(300_000) + random_bytes(700_000, 5)
GRACE_SECONDS = SETTINGS.gc.grace_seconds


class EdgeFleet(Fleet):
    """A fleet with the stages of a gateway over the same index."""

    def __init__(self, objects: Any, tenants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tenants, monkeypatch)
        self.containers = objects
        self.lane: TenantContext = tenants["t"]
        self.edge = EdgeDedup(SETTINGS, lambda _: self.lane.fingerprinter, lambda _: self.lane.index)
        self.worker = self.chained(self.links())
        self.offset = 0

    def reduce(self, content: bytes, blob: bytes, frame_bytes: int = FRAME_BYTES_MAX) -> list[bytes]:
        """Return the messages of a gateway."""
        reducer = self.edge.open(Envelope(blob, "t", "key"))
        parts = [content[at : at + frame_bytes] for at in range(0, len(content), frame_bytes)]
        messages = [one for part in parts for one in reducer.reduce([part], final=False)]
        return messages + reducer.reduce([], final=True)

    def handle(self, values: list[bytes], blob: bytes, size_bytes: int = len(CONTENT)) -> list[Placed | End]:
        """Process messages and the end of a blob; return what was placed of it."""
        end = End(Envelope(blob, "t", "key", size_bytes), 1, blob, size_bytes, b"3" * 32)
        records = [
            Record("frames", 0, self.offset + at, blob, value, {}, ())
            for at, value in enumerate([*values, encode(end)])
        ]
        self.offset += len(records)
        self.worker.handle(records)
        self.worker.drain(0)
        assert max(at for _, at, _ in self.worker.committable()) == self.offset
        return [one for one in self.placed() if one.envelope.blob == blob]

    def store(self, blob: bytes = b"a" * 16, content: bytes = CONTENT) -> list[Placed]:
        """Store a content as frames; return its locations."""
        values = []
        for at in range(0, len(content), FRAME_BYTES_MAX):
            part = np.frombuffer(content[at : at + FRAME_BYTES_MAX], np.uint8)
            values.append(encode(Frame(Envelope(blob, "t", "key", at), part)))
        return runs(self.handle(values, blob, len(content)))

    def withdraw(self) -> None:
        """Withdraw all entries, as a GC run does with those of containers that no version names."""
        for container, _ in self.lane.containers.ids():
            segments = len(self.lane.containers.directory(container).segments)
            index: Any = self.lane.index
            index.withdraw({container: None}, {container: np.arange(segments, dtype=np.uint32)}, [container])
        found = self.lane.index.locate_chunks(self.decoded(self.reduce(CONTENT, b"w" * 16))[0].batch.names)[1]
        assert not found.any()

    def decoded(self, messages: list[bytes]) -> list[FreshBatch]:
        found = [decode(message, "a message") for message in messages]
        return [one.batch for one in found if isinstance(one, Sparse)]

    @property
    def dead(self) -> list[bytes]:
        """The stages of dead letters."""
        return [str(letter["__connect.errors.stage"]).encode() for outbox in self.outboxes for letter in outbox.dead]


def runs(placed: list[Placed | End]) -> list[Placed]:
    assert not [one for one in placed if isinstance(one, End) and one.failure]
    found = [one for one in placed if isinstance(one, Placed)]
    (end,) = (one for one in placed if isinstance(one, End))
    assert end.segments == sum(len(one.segments) for one in found)
    assert end.size_bytes == sum(int(one.lengths.sum()) for one in found)
    return found


def failure(placed: list[Placed | End]) -> str:
    return next(one.failure for one in placed if isinstance(one, End) and one.failure)


def locations(placed: list[Placed]) -> list[tuple[int, int]]:
    found = sorted(placed, key=lambda one: one.envelope.sequence)
    return [pair for one in found for pair in zip(one.segments.containers, one.segments.ordinals, strict=True)]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EdgeFleet]:
    objects = memory_objects()
    with indexed_tenants(tmp_path, objects) as tenants:
        made = EdgeFleet(objects, tenants, monkeypatch)
        yield made
        made.worker.close()


def test_known_content_is_sent_as_names_only(fleet: EdgeFleet) -> None:
    first = fleet.store()
    messages = fleet.reduce(CONTENT, b"b" * 16)
    assert sum(map(len, messages)) < len(CONTENT) / 100
    again = runs(fleet.handle(messages, b"b" * 16))
    assert all(run.known.all() for run in again)
    assert locations(again) == locations(first)
    assert not fleet.dead


def test_new_content_is_placed_as_from_frames(fleet: EdgeFleet) -> None:
    first = runs(fleet.handle(fleet.reduce(CONTENT, b"b" * 16), b"b" * 16))
    again = fleet.store()
    assert all(run.known.all() for run in again)
    assert locations(again) == locations(first)
    assert sum(run.ledger.zero_chunks for run in first) > 0


def test_changed_content_is_sent_by_its_changes(fleet: EdgeFleet) -> None:
    fleet.store()
    changed = CONTENT[:1_000_000] + b"a change" + CONTENT[1_000_000:]
    messages = fleet.reduce(changed, b"b" * 16)
    assert sum(map(len, messages)) < 250_000
    placed = runs(fleet.handle(messages, b"b" * 16, len(changed)))
    assert 0 < sum(run.ledger.unique_bytes for run in placed) < 200_000


@pytest.mark.parametrize("frame_bytes", [50_000, 300_001, 900_000])
def test_segments_do_not_depend_on_frames(fleet: EdgeFleet, frame_bytes: int) -> None:
    whole = fleet.decoded(fleet.reduce(CONTENT, b"b" * 16))
    parts = fleet.decoded(fleet.reduce(CONTENT, b"b" * 16, frame_bytes))
    for column in ("segment_ids", "names"):
        one, other = (np.concatenate([getattr(batch.batch, column) for batch in found]) for found in (whole, parts))
        assert np.array_equal(one, other)


def test_repeated_chunk_is_sent_once_a_message(fleet: EdgeFleet) -> None:
    piece = random_bytes(150_000, 8)
    messages = fleet.reduce(piece * 4, b"b" * 16)
    assert sum(map(len, messages)) < 2.2 * len(piece)
    placed = runs(fleet.handle(messages, b"b" * 16, 4 * len(piece)))
    assert sum(run.ledger.unique_bytes for run in placed) < 2 * len(piece)


def test_withdrawn_entries_are_found_by_their_claims(fleet: EdgeFleet) -> None:
    """Keep an accepted upload whose chunks a GC run withdraws before the worker looks them up: the lease (I6)."""
    first = fleet.store()
    messages = fleet.reduce(CONTENT, b"b" * 16)
    fleet.withdraw()
    again = runs(fleet.handle(messages, b"b" * 16))
    assert sum(run.ledger.unique_bytes for run in again) == 0
    chunks = [location for run in again for location in chunks_of(fleet, run)]
    assert chunks == [location for run in first for location in chunks_of(fleet, run)]


def chunks_of(fleet: EdgeFleet, run: Placed) -> list[tuple[int, int]]:
    """Return the locations of a run's chunks, by the recipes of its segments."""
    found: list[tuple[int, int]] = []
    for container, ordinal in zip(run.segments.containers.tolist(), run.segments.ordinals.tolist(), strict=True):
        recipes = fleet.lane.containers.directory(container).segments
        chunks = recipes.chunks.take(slice(int(recipes.bounds[ordinal]), int(recipes.bounds[ordinal + 1])))
        found += zip(chunks.containers.tolist(), chunks.ordinals.tolist(), strict=True)
    return found


def test_entries_withdrawn_long_ago_are_no_lease(fleet: EdgeFleet) -> None:
    """Fail an upload visibly if its chunks may be deleted while it is in flight."""
    fleet.store()
    messages = fleet.reduce(CONTENT, b"b" * 16)
    fleet.withdraw()
    at_us = int((time.time() - 0.6 * GRACE_SECONDS) * 1e6)
    none = np.zeros(0, np.uint32)
    pending = {
        int(container): PendingDelete(at_us, none, none, whole=True) for container, _ in fleet.lane.containers.ids()
    }
    PendingDeleteStore(fleet.containers).replace(pending)
    fleet.lane.collected._watch._read_at = -1e9
    assert "are not in the store any more" in failure(fleet.handle(messages, b"b" * 16))
    assert "upload the blob again" in failure(fleet.placed())


def test_claim_of_a_damaged_chunk_fails_the_blob(fleet: EdgeFleet) -> None:
    """Let the sender upload it again: its bytes then replace the damaged ones."""
    fleet.store()
    messages = fleet.reduce(CONTENT, b"b" * 16)
    fleet.withdraw()
    ((container, _), *_) = fleet.lane.containers.ids()
    fleet.lane.quarantine.note({int(container): np.array([7], np.uint32)}, {}, everything=False)
    assert "1 chunks are not in the store any more" in failure(fleet.handle(messages, b"b" * 16))
    assert runs(fleet.handle(fleet.reduce(CONTENT, b"c" * 16), b"c" * 16))


def test_claim_of_another_chunk_fails_the_blob(fleet: EdgeFleet) -> None:
    """Believe no location: a sender could read what it never had."""
    fleet.store()
    (batch, *_) = fleet.decoded(fleet.reduce(CONTENT, b"b" * 16))
    ((container, _), *_) = fleet.lane.containers.ids()
    ordinals = np.arange(len(batch.batch.lengths), dtype=np.uint32)[::-1] % 100
    swapped = replace(
        batch,
        segment_known=np.zeros(batch.batch.segments, np.bool_),
        chunk_locations=Locations(np.full(len(ordinals), container, np.uint64), ordinals.astype(np.uint32)),
    )
    fleet.withdraw()
    message = encode(Sparse(Envelope(b"b" * 16, "t", "key"), swapped))
    assert "are not in the store any more" in failure(fleet.handle([message], b"b" * 16, batch.batch.logical_bytes))


def test_claim_of_an_unknown_chunk_fails_the_blob(fleet: EdgeFleet) -> None:
    """Refuse names without bytes that no container has, and leave other blobs alone."""
    (batch, *_) = fleet.decoded(fleet.reduce(CONTENT, b"b" * 16))
    count = len(batch.batch.lengths)
    empty = replace(
        batch,
        chunk_known=np.ones(count, np.bool_),
        chunk_locations=Locations(np.full(count, 77, np.uint64), np.arange(count, dtype=np.uint32)),
        first=np.arange(count, dtype=np.int64),
        fresh=np.zeros(0, np.intp),
    )
    message = encode(Sparse(Envelope(b"b" * 16, "t", "key"), empty))
    assert "are not in the store any more" in failure(fleet.handle([message], b"b" * 16, batch.batch.logical_bytes))
    assert fleet.dead
    assert runs(fleet.handle(fleet.reduce(CONTENT, b"c" * 16), b"c" * 16))


@pytest.mark.parametrize("by_segment", [False, True])
def test_claims_of_many_containers_fail_the_blob(
    fleet: EdgeFleet, monkeypatch: pytest.MonkeyPatch, by_segment: bool
) -> None:
    """Read few directories for a message, however many containers its claims name; other blobs are not affected."""
    (batch, *_) = fleet.decoded(fleet.reduce(CONTENT[:700_000], b"b" * 16, 700_000))
    count, segments = len(batch.batch.lengths), batch.batch.segments
    monkeypatch.setattr(sparse_segments, "CLAIMED_CONTAINERS_MAX", segments - 2)
    each = np.arange(count if not by_segment else segments, dtype=np.uint64) + np.uint64(1000)
    nowhere = Locations(np.zeros(count, np.uint64), np.zeros(count, np.uint32))
    claims = Locations(each, np.zeros(len(each), np.uint32))
    many = replace(
        batch,
        segment_known=np.full(segments, by_segment),
        segment_locations=claims if by_segment else batch.segment_locations,
        chunk_known=np.ones(count, np.bool_),
        chunk_locations=nowhere if by_segment else claims,
        first=np.arange(count, dtype=np.int64),
        fresh=np.zeros(0, np.intp),
    )
    read: list[int] = []
    directory = fleet.lane.containers.directory

    def counted(container: ContainerId) -> Directory:
        read.append(int(container))
        return directory(container)

    monkeypatch.setattr(fleet.lane.containers, "directory", counted)
    message = encode(Sparse(Envelope(b"b" * 16, "t", "key"), many))
    placed = fleet.handle([message], b"b" * 16, batch.batch.logical_bytes)
    assert f"their claims name more than {segments - 2} containers; upload the blob again" in failure(placed)
    assert len(set(read)) <= segments - 2
    assert len(read) <= 2 * (segments - 2)  # together with others, and alone
    assert runs(fleet.handle(fleet.reduce(CONTENT, b"c" * 16), b"c" * 16))


def _other_segment_id(batch: FreshBatch) -> FreshBatch:
    ids = batch.batch.segment_ids.copy()
    ids[0, 0] ^= 1
    return replace(batch, batch=replace(batch.batch, segment_ids=ids))


def _zero_flag(batch: FreshBatch) -> FreshBatch:
    zero, known = batch.batch.zero.copy(), batch.chunk_known.copy()
    zero[3] = known[3] = True
    fresh = batch.fresh[batch.fresh != 3]
    return replace(batch, batch=replace(batch.batch, zero=zero), chunk_known=known, fresh=fresh)


def _other_bytes(batch: FreshBatch) -> FreshBatch:
    payload = batch.batch.payload.copy()
    payload[int(batch.batch.offsets[int(batch.fresh[2])])] ^= 1
    return replace(batch, batch=replace(batch.batch, payload=payload))


@pytest.mark.parametrize(
    ("change", "stage"), [(_other_segment_id, "dedup"), (_zero_flag, "dedup"), (_other_bytes, "delta")]
)
def test_wrong_name_in_sparse_segments_fails(
    fleet: EdgeFleet, change: Callable[[FreshBatch], FreshBatch], stage: str
) -> None:
    """Store nothing under the name of another content."""
    content = random_bytes(400_000, 6)
    (batch, *_) = fleet.decoded(fleet.reduce(content, b"b" * 16))
    message = encode(Sparse(Envelope(b"b" * 16, "t", "key"), change(batch)))
    placed = fleet.handle([message], b"b" * 16, batch.batch.logical_bytes)
    assert "fail" in failure(placed)
    assert failure(placed).startswith(stage)
    assert not any(isinstance(one, Placed) for one in placed)


def test_missing_message_fails_the_blob(fleet: EdgeFleet) -> None:
    messages = fleet.reduce(CONTENT, b"b" * 16)
    assert len(messages) > 3
    del messages[1]
    assert "want segment" in failure(fleet.handle(messages, b"b" * 16))


def test_frames_and_sparse_segments_do_not_mix(fleet: EdgeFleet) -> None:
    frame = encode(Frame(Envelope(b"b" * 16, "t", "key", 0), np.frombuffer(random_bytes(10_000, 3), np.uint8)))
    messages = fleet.reduce(CONTENT, b"b" * 16)
    assert "frames and sparse segments" in failure(fleet.handle([frame, *messages], b"b" * 16))


def test_lost_partition_sends_no_segment_twice(fleet: EdgeFleet) -> None:
    """Go on from the committed state: the segments are numbered as before."""
    messages = fleet.reduce(CONTENT, b"b" * 16)
    some = [Record("frames", 0, at, b"b" * 16, value, {}, ()) for at, value in enumerate(messages[:3])]
    fleet.worker.handle(some)
    fleet.worker.drain(0)
    (_, offset, metadata), *_ = fleet.worker.committable()
    fleet.worker.on_dropped(0)
    fleet.worker.on_assigned(0, metadata)
    fleet.offset = offset
    assert runs(fleet.handle(messages[offset:], b"b" * 16))


def staged(fleet: EdgeFleet, messages: list[bytes], blob: bytes = b"b" * 16) -> list[bytes]:
    """Return references to packs of two messages each."""
    attempt, found, at = UploadAttempt(blob, "t", "key", b"o" * 16, 5), [], 0
    for start in range(0, len(messages), 2):
        pack = messages[start : start + 2]
        reference = replace(refer(attempt, at, pack), is_sparse=True)
        put_pack(fleet.objects, reference, pack)
        found.append(encode(reference))
        at += sum(map(len, pack))
    return found


def test_packs_of_sparse_segments_are_placed(fleet: EdgeFleet) -> None:
    references = staged(fleet, fleet.reduce(CONTENT, b"b" * 16))
    assert all(map(is_staged, references))
    assert runs(fleet.handle(references, b"b" * 16))
    assert fleet.store()[0].known.all()


def test_sparse_packs_are_deleted_behind_the_offset(fleet: EdgeFleet) -> None:
    references = staged(fleet, fleet.reduce(CONTENT, b"b" * 16))
    fleet.handle(references, b"b" * 16)
    assert sum(1 for _ in fleet.objects.names("staging")) == len(references)
    worker: Handler = fleet.worker
    assert isinstance(worker, SupportsCommitted)
    worker.on_committed(0, 2)
    deadline = time.monotonic() + 10
    while sum(1 for _ in fleet.objects.names("staging")) > len(references) - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(1 for _ in fleet.objects.names("staging")) == len(references) - 2


def test_pack_of_another_blob_fails_the_blob(fleet: EdgeFleet) -> None:
    references = staged(fleet, fleet.reduce(CONTENT, b"c" * 16))
    assert "not a part of blob" in failure(fleet.handle(references, b"b" * 16))


def test_pack_of_damaged_messages_is_refused() -> None:
    data = encode(End(Envelope(b"b" * 16, "t", "key"), 1, b"o" * 16, 0, b"3" * 32))
    assert split_messages(memoryview(data * 3), "pack") == [data] * 3
    for damaged in (data[:-1], data + b"x", b"N" + data, data[:5] + b"\x63" + data[6:]):
        with pytest.raises(Corrupt, match="pack"):
            split_messages(memoryview(damaged), "pack")


def test_all_bytes_are_sent_while_the_index_is_away(fleet: EdgeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse no upload for it, and do not ask for each batch."""
    fleet.store()
    asked = []

    def away(_: object, names: object) -> None:
        asked.append(names)
        raise StoreUnavailable("redis: away")

    monkeypatch.setattr(type(fleet.lane.index), "locate_segments", away)
    messages = fleet.reduce(CONTENT, b"b" * 16)
    assert len(asked) == 1
    assert sum(map(len, messages)) > len(CONTENT) - 300_000
    monkeypatch.setattr(edge_dedup, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + AWAY_SECONDS))
    fleet.reduce(CONTENT, b"c" * 16)
    assert len(asked) == 2
    monkeypatch.undo()
    assert all(run.known.all() for run in runs(fleet.handle(messages, b"b" * 16)))


def test_segments_with_rules_are_those_of_the_chunker(fleet: EdgeFleet) -> None:
    """Go on within an item at the state of the batch before."""
    ruled = with_changes(SETTINGS, {"chunker": {"rules": "all"}})
    namer = fleet.lane.fingerprinter
    reducer = EdgeDedup(ruled, lambda _: namer, lambda _: fleet.lane.index).open(Envelope(b"b" * 16, "t", "key"))
    data = tar_of(random_bytes(700_000, 1), text_like(900_000, 2), random_bytes(90_000, 3))
    messages = [
        one for at in range(0, len(data), 200_000) for one in reducer.reduce([data[at : at + 200_000]], final=False)
    ]
    found = fleet.decoded(messages + reducer.reduce([], final=True))
    whole = FrameRuns(np.frombuffer(data, np.uint8), (BlobRun(0, 0, len(data), True),))
    expected = ChunkerStage(ruled, namer).decide(whole, LookupResults()).segments
    assert np.array_equal(np.concatenate([one.batch.names for one in found]), expected.names)
    assert np.array_equal(np.concatenate([one.batch.segment_ids for one in found]), expected.segment_ids)


def tar_of(*members: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for number, content in enumerate(members):
            header = tarfile.TarInfo(f"member{number}")
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return written.getvalue()
