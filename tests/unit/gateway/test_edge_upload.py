"""Test uploads of a gateway that deduplicates: order, room, packs, slow clients and failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin.workers.edge_dedup import EdgeDedup
from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.backends import edge_upload
from nearkin_gateway.backends.edge_upload import KEEP_ALIVE_SECONDS, EdgeUpload
from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.kafka_ingest import KafkaIngest, Tracker
from nearkin_gateway.backends.pack_writer import HOLD_SECONDS, PackStore
from nearkin_gateway.backends.source_dedup import SourceReducer
from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.http.request_bodies import FRAME_SECONDS
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
POOL = WorkerPool("edge", 4)


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
            read_pack(self.objects, message.pack)  # durable before it is referred to
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
                parts = split_messages(read_pack(self.objects, message.pack).data, "pack")
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
        upload = EdgeUpload(found, REQUEST, reducer(known), POOL)
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
        requests = [replace(REQUEST, blob=bytes([number]) * 16) for number in range(3)]  # packs have names of their own
        uploads = [EdgeUpload(ingest, request, reducer(known=False), POOL) for request in requests]
        await asyncio.wait_for(asyncio.gather(*(write(upload, CONTENT[: 9 * MIB]) for upload in uploads)), 60)
        assert ingest.budget.used_bytes == 0
        return ingest

    assert len(asyncio.run(put()).ends) == 3


def test_slow_client_holds_a_tail_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_upload, "HOLD_SECONDS", 0.05)

    async def put() -> None:
        ingest = SendingIngest(memory_objects())
        upload = EdgeUpload(ingest, REQUEST, reducer(known=True), POOL)
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

    def keep_alive(self) -> bytes:
        return self._good.keep_alive()


def _late_failure(upload: EdgeUpload) -> Awaitable[None]:
    upload._reduce_late()
    return asyncio.sleep(0.5)


@pytest.mark.parametrize("between", [lambda _: asyncio.sleep(0), _late_failure])
def test_failed_reduction_ends_the_upload(between: Callable[[EdgeUpload], Awaitable[None]]) -> None:
    """Send no end behind lost segments; an abort then reports the failure."""

    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects(), inline_bytes=0)
        upload = EdgeUpload(ingest, REQUEST, BrokenReducer(reducer(known=False), 4), POOL)
        for _ in range(3):
            await upload.write(bytearray(CONTENT[: 5 * MIB]))
        while not ingest.values:
            await asyncio.sleep(0.01)
        await upload.write(bytearray(CONTENT[:MIB]))
        await between(upload)
        with pytest.raises(StoreUnavailable, match="planted"):
            await upload.finish(UploadResult(16 * MIB, b"3" * 32))
        await upload.abort("it failed")
        await upload._tracker.wait_for_acks()
        assert ingest.budget.used_bytes == 0
        return ingest

    assert [end.failure for end in asyncio.run(put()).ends] == ["a planted fault"]


class ExactBudget(Budget):
    """A budget that refuses to take back more than it gave."""

    def give(self, count_bytes: int) -> None:
        assert count_bytes <= self.used_bytes
        super().give(count_bytes)


class SlowPacks(PackStore):
    """Packs that are stored when the test says so."""

    def __init__(self, objects: Any) -> None:
        super().__init__(objects, 0)
        self.released = asyncio.Event()
        self.begun = 0

    async def put(self, staged: StagedFrame, parts: Sequence[memoryview]) -> bool:
        self.begun += 1
        await self.released.wait()
        return await super().put(staged, parts)


def test_failed_end_gives_room_back_once() -> None:
    """Keep the memory bound (I10): packs that are being sent give their room back by their acknowledgements."""

    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects())
        ingest.packs = packs = SlowPacks(ingest.objects)
        ingest.budget = ExactBudget(96 * MIB)
        upload = EdgeUpload(ingest, REQUEST, BrokenReducer(reducer(known=False), 4), POOL)
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        for start in range(0, 15 * MIB, 5 * MIB):
            await upload.write(bytearray(CONTENT[start : start + 5 * MIB]))
        packs.released.set()
        while not ingest.values:
            await asyncio.sleep(0.01)
        packs.released.clear()
        await upload.write(bytearray(CONTENT[:MIB]))
        assert upload._packs is not None
        upload._packs.send_held()
        while packs.begun < 2:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.2, packs.released.set)
        with pytest.raises(StoreUnavailable, match="planted"):
            await upload.finish(UploadResult(16 * MIB, b"3" * 32))
        await asyncio.gather(*upload._packs._sending, return_exceptions=True)
        await upload._tracker.wait_for_acks()
        assert not errors
        assert ingest.budget.used_bytes == upload._own.used_bytes == 0
        return ingest

    ingest = asyncio.run(asyncio.wait_for(put(), 60))
    assert [end.failure for end in ingest.ends] == ["a planted fault"]


class HeldReducer(BrokenReducer):
    """A reducer whose first call waits for the test, and that records its threads."""

    def __init__(self, good: SourceReducer) -> None:
        super().__init__(good, -1)
        self.released = threading.Event()
        self.threads: list[str] = []

    def reduce(self, frames: Sequence[bytes | bytearray], *, final: bool) -> list[bytes]:
        self.threads.append(threading.current_thread().name)
        self.released.wait(30)
        return super().reduce(frames, final=final)


def test_frames_behind_a_late_reduction_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold no frame of a client that stops while an earlier frame waits for the index."""
    monkeypatch.setattr(edge_upload, "HOLD_SECONDS", 0.02)

    async def put() -> None:
        held, ingest = HeldReducer(reducer(known=True)), SendingIngest(memory_objects())
        upload = EdgeUpload(ingest, REQUEST, held, POOL)
        await upload.write(bytearray(CONTENT[:MIB]))
        while not held.threads:
            await asyncio.sleep(0.01)
        await upload.write(bytearray(CONTENT[MIB : 2 * MIB]))
        await asyncio.sleep(0.2)
        held.released.set()
        async with asyncio.timeout(20):
            while upload._held:
                await asyncio.sleep(0.02)
        await upload.finish(UploadResult(2 * MIB, b"3" * 32))
        assert sum(one.batch.batch.logical_bytes for one in ingest.segments()) == 2 * MIB

    asyncio.run(put())


def test_reductions_use_threads_of_their_own() -> None:
    """Leave the threads of the object store to it while Redis does not answer."""

    async def put() -> list[str]:
        held = HeldReducer(reducer(known=True))
        held.released.set()
        await write(EdgeUpload(SendingIngest(memory_objects()), REQUEST, held, POOL), CONTENT[:MIB])
        return held.threads

    threads = asyncio.run(put())
    assert threads
    assert all(name.startswith("nearkin-gateway-edge") for name in threads)


@pytest.mark.parametrize("inline_bytes", [0, 100 * MIB])
def test_slow_upload_is_kept_alive(monkeypatch: pytest.MonkeyPatch, inline_bytes: int) -> None:
    """Send messages without segments while none is certain; the segments stay those of a fast client."""
    monkeypatch.setattr(edge_upload, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(edge_upload, "KEEP_ALIVE_SECONDS", 0.05)

    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects(), inline_bytes)
        upload, at = EdgeUpload(ingest, REQUEST, reducer(known=False), POOL), 2 * MIB
        await upload.write(bytearray(CONTENT[:at]))
        async with asyncio.timeout(30):
            while sum(not one.batch.batch.segments for one in ingest.segments()) < 3:
                await upload.write(bytearray(CONTENT[at : at + 10]))
                at += 10
                await asyncio.sleep(0.06)
        await upload.write(bytearray(CONTENT[at : 3 * MIB]))
        await upload.finish(UploadResult(3 * MIB, b"3" * 32))
        assert ingest.budget.used_bytes == upload._own.used_bytes == 0
        return ingest

    slow, fast = asyncio.run(put()).segments(), uploaded(CONTENT[: 3 * MIB], known=False).segments()
    assert [row.tobytes() for one in slow for row in one.batch.batch.segment_ids] == [
        row.tobytes() for one in fast for row in one.batch.batch.segment_ids
    ]


def test_keep_alive_precedes_the_idle_limit() -> None:
    """Leave room for a lost message, and for the slowest permitted client."""
    longest_seconds = KEEP_ALIVE_SECONDS + HOLD_SECONDS + FRAME_SECONDS + limits.SLOW_SECONDS
    assert 2 * longest_seconds < Settings().kafka.upload_idle_seconds


def test_aborted_edge_upload_leaves_no_pack() -> None:
    async def put() -> SendingIngest:
        ingest = SendingIngest(memory_objects(), inline_bytes=0)
        upload = EdgeUpload(ingest, REQUEST, reducer(known=False), POOL)
        await upload.write(bytearray(CONTENT[: 5 * MIB]))
        await upload.abort("the client went away")
        assert ingest.budget.used_bytes == 0
        return ingest

    ingest = asyncio.run(put())
    assert not ingest.values
    assert not list(ingest.objects.names("staging"))
