"""Test uploads of a gateway that deduplicates: order, room, packs, slow clients and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin.workers.edge_dedup import EdgeDedup
from nearkin_gateway.backends import edge_upload
from nearkin_gateway.backends.edge_upload import EdgeUpload
from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.kafka_ingest import KafkaIngest, Tracker
from nearkin_gateway.backends.pack_writer import PackStore
from nearkin_gateway.backends.source_dedup import SourceReducer
from nearkin_gateway.http.request_limits import Budget
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.message import End, Envelope, Sparse, StagedFrame, decode, split_messages
from nearkin_shared.kafka import clients
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.staged_packs import read_pack
from nearkin_shared.types import U8, Bools, Locations

REQUEST = UploadRequest("t", "key", b"b" * 16, b"o" * 16, 1)
FRAME_BYTES = 900 * KIB
CONTENT = random_bytes(30 * MIB, 3)


class AllKnown:
    """An index that has every chunk but no segment, or nothing."""

    def __init__(self, known: bool) -> None:
        self.known = known

    def locate_segments(self, segment_ids: U8) -> tuple[Locations, Bools]:
        return Locations.empty(len(segment_ids)), segment_ids[:, 0] > 255

    def locate_chunks(self, names: U8) -> tuple[Locations, Bools]:
        found = names[:, 0] < (256 if self.known else 0)
        locations = Locations.empty(len(names))
        locations.containers[found] = 9
        return locations, found


class SendingIngest(KafkaIngest):
    """The ingest of a gateway; Kafka acknowledges each message when the test says so."""

    def __init__(self, objects: Any, inline_bytes: int = MIB) -> None:
        super().__init__(Settings(), "test", None, PackStore(objects, inline_bytes))
        self.objects = objects
        self.values: list[bytes] = []
        self.acknowledge = True

    async def send(
        self, full: str, key: bytes, value: bytes, headers: Mapping[str, bytes], tracker: Tracker, room_bytes: int
    ) -> None:
        message = decode(value, "sent")
        if isinstance(message, StagedFrame):
            read_pack(self.objects, message)  # durable before it is referred to
        self.values.append(value)
        tracker.sent()
        asyncio.get_running_loop().call_soon(tracker.on_delivery, room_bytes, None)

    def segments(self) -> list[Sparse]:
        """Return the sent segments, those in packs included, without gaps."""
        found: list[Sparse] = []
        for value in self.values:
            message, parts = decode(value, "sent"), [value]
            if isinstance(message, StagedFrame):
                assert message.is_sparse
                parts = split_messages(read_pack(self.objects, message).data, "pack")
            found += [one for part in parts if isinstance(one := decode(part, "part"), Sparse)]
        reached, sequence = 0, 0
        for one in found:
            assert (one.envelope.position, one.envelope.sequence) == (reached, sequence)
            reached += one.batch.batch.logical_bytes
            sequence += one.batch.batch.segments
        return found

    @property
    def ends(self) -> list[End]:
        return [one for value in self.values if isinstance(one := decode(value, "sent"), End)]


@pytest.fixture(autouse=True)
def _no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = clients.connection

    def with_broker(settings: Settings, client_id: str) -> dict[str, Any]:
        return connection(settings, client_id) | {"test.mock.num.brokers": 1}

    monkeypatch.setattr(clients, "connection", with_broker)


def reducer(known: bool) -> SourceReducer:
    index: Any = AllKnown(known)
    edge = EdgeDedup(Settings(), lambda tenant: Fingerprinter(b"s" * 32, tenant), lambda _: index)
    return edge.open(Envelope(REQUEST.blob, REQUEST.tenant, REQUEST.key))


async def write(upload: EdgeUpload, content: bytes, frame_bytes: int = FRAME_BYTES) -> None:
    for start in range(0, len(content), frame_bytes):
        await upload.write(bytearray(content[start : start + frame_bytes]))
    await upload.finish(UploadResult(len(content), b"3" * 32))


def uploaded(content: bytes, known: bool, ingest: SendingIngest | None = None) -> SendingIngest:
    async def put() -> SendingIngest:
        found = ingest or SendingIngest(memory_objects())
        upload = EdgeUpload(found, REQUEST, reducer(known))
        await write(upload, content)
        assert found.budget.used_bytes == upload._own.used_bytes == 0
        return found

    return asyncio.run(put())


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES, 12 * MIB + 5])
@pytest.mark.parametrize("known", [False, True])
def test_edge_upload_sends_every_segment_in_order(size: int, known: bool) -> None:
    ingest = uploaded(CONTENT[:size], known)
    found = ingest.segments()
    assert sum(one.batch.batch.logical_bytes for one in found) == size
    assert sum(int(one.batch.batch.lengths[one.batch.fresh].sum()) for one in found) == (0 if known else size)
    (end,) = ingest.ends
    assert (end.size_bytes, end.envelope.position, end.segments) == (size, size, None)
    assert isinstance(decode(ingest.values[-1], "end"), End)


def test_known_upload_stays_inline_and_new_one_is_staged() -> None:
    known, new = uploaded(CONTENT, known=True), uploaded(CONTENT, known=False)
    assert not [value for value in known.values if isinstance(decode(value, "sent"), StagedFrame)]
    assert sum(map(len, known.values)) < len(CONTENT) / 100
    assert len([value for value in new.values if isinstance(decode(value, "sent"), StagedFrame)]) >= 4
    assert sum(map(len, new.values)) < 3000


def test_edge_uploads_share_little_room() -> None:
    """Wait for acknowledgements, never for one's own bytes: budgets smaller than one batch."""

    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects())
        ingest.budget, ingest.upload_bytes_max = Budget(3 * MIB), 2 * MIB
        uploads = [EdgeUpload(ingest, REQUEST, reducer(known=False)) for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*(write(upload, CONTENT[: 9 * MIB]) for upload in uploads)), 60)
        assert ingest.budget.used_bytes == 0
        return ingest

    assert len(asyncio.run(put()).ends) == 3


def test_slow_client_holds_a_tail_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_upload, "HOLD_SECONDS", 0.05)

    async def put() -> None:
        ingest = SendingIngest(memory_objects())
        upload = EdgeUpload(ingest, REQUEST, reducer(known=True))
        await upload.write(bytearray(CONTENT[: 2 * FRAME_BYTES]))
        for _ in range(200):
            if upload._held_bytes == 0 and upload._sent_bytes:
                break
            await asyncio.sleep(0.05)
        assert upload._held == []
        assert upload._own.used_bytes < 100 * KIB
        await upload.finish(UploadResult(2 * FRAME_BYTES, b"3" * 32))
        assert sum(one.batch.batch.logical_bytes for one in ingest.segments()) == 2 * FRAME_BYTES

    asyncio.run(put())


class BrokenReducer:
    """A reducer that fails at one call."""

    def __init__(self, good: SourceReducer, failing: int) -> None:
        self._good, self._left = good, failing

    def reduce(self, frames: Sequence[bytes | bytearray], *, final: bool) -> list[bytes]:
        self._left -= 1
        if not self._left:
            raise StoreUnavailable("a planted fault")
        return self._good.reduce(frames, final=final)


def _late_failure(upload: EdgeUpload) -> Awaitable[None]:
    upload._reduce_late()
    return asyncio.sleep(0.5)


@pytest.mark.parametrize("between", [lambda _: asyncio.sleep(0), _late_failure])
def test_failed_reduction_ends_the_upload(between: Callable[[EdgeUpload], Awaitable[None]]) -> None:
    """Send no end behind lost segments; an abort then reports the failure."""

    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects(), inline_bytes=0)
        upload = EdgeUpload(ingest, REQUEST, BrokenReducer(reducer(known=False), 4))
        for _ in range(3):
            await upload.write(bytearray(CONTENT[: 5 * MIB]))
        while not ingest.values:
            await asyncio.sleep(0.01)
        await upload.write(bytearray(CONTENT[:MIB]))
        await between(upload)
        with pytest.raises(StoreUnavailable, match="planted"):
            await upload.finish(UploadResult(16 * MIB, b"3" * 32))
        assert not ingest.ends
        await upload.abort("it failed")
        await upload._tracker.wait_for_acks()
        assert ingest.budget.used_bytes == 0
        return ingest

    assert [end.failure for end in asyncio.run(put()).ends] == ["it failed"]


def test_aborted_edge_upload_leaves_no_pack() -> None:
    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects(), inline_bytes=0)
        upload = EdgeUpload(ingest, REQUEST, reducer(known=False))
        await upload.write(bytearray(CONTENT[: 5 * MIB]))
        await upload.abort("the client went away")
        assert ingest.budget.used_bytes == 0
        return ingest

    ingest = asyncio.run(put())
    assert not ingest.values
    assert not list(ingest.objects.names("staging"))
