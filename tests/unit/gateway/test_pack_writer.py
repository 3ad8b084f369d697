"""Test which frames of an upload go into packs, in which order, and what a failing object store changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from nearkin.lab.generated_data import random_bytes
from nearkin_gateway.backends import pack_writer
from nearkin_gateway.backends.pack_writer import Frames, PackStore, PackWriter
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.formats.message import StagedFrame
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.obstore_adapter import memory_objects
from nearkin_shared.storage.staged_packs import PACK_BYTES, UploadAttempt, read_pack

FRAME_BYTES = 900 * 1024
ATTEMPT = UploadAttempt(b"b" * 16, "tenant", "key", b"o" * 16, 1)


class Sent:
    """The messages that a writer sends: (position, bytes, whether by reference)."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.messages: list[tuple[int, bytes, bool]] = []

    async def reference(self, staged: StagedFrame) -> None:
        data = read_pack(self.objects, staged.pack).tobytes()  # durable before it is sent
        self.messages.append((staged.envelope.position, data, True))

    async def frames(self, position: int, frames: Frames) -> None:
        for frame in frames:
            self.messages.append((position, bytes(frame), False))
            position += len(frame)

    def content(self) -> bytes:
        """Return what was sent, which must be in order and without gaps."""
        reached = 0
        for position, data, _ in self.messages:
            assert position == reached
            reached += len(data)
        return b"".join(data for _, data, _ in self.messages)

    @property
    def by_reference(self) -> list[bool]:
        return [staged for _, _, staged in self.messages]


class Flaky:
    """An object store whose puts, given by name, fail or wait as a test sets."""

    far = False

    def __init__(self, put: Callable[[str], None]) -> None:
        self._inner, self._put, self.puts = memory_objects(), put, 0

    def put_new(self, name: str, *parts: Any) -> None:
        self.puts += 1
        self._put(name)
        self._inner.put_new(name, *parts)

    def get(self, name: str) -> bytes:
        return self._inner.get(name)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def left(self) -> list[str]:
        return [name for name, _ in self._inner.names("staging")]


def written(content: bytes, objects: Any, inline_bytes: int = MIB, frame_bytes: int = FRAME_BYTES) -> Sent:
    async def write() -> Sent:
        sent = Sent(objects)
        writer = PackWriter(PackStore(objects, inline_bytes), ATTEMPT, sent.reference, sent.frames)
        for start in range(0, len(content), frame_bytes):
            await writer.add(bytearray(content[start : start + frame_bytes]))
        await writer.flush()
        return sent

    return asyncio.run(write())


@pytest.mark.parametrize("size", [1, 900 * 1024, MIB])
def test_small_upload_is_inline(size: int) -> None:
    content = random_bytes(size, 1)
    sent = written(content, memory_objects())
    assert sent.content() == content
    assert not any(sent.by_reference)


@pytest.mark.parametrize("size", [MIB + 1, 5 * MIB, 30 * MIB + 17])
def test_large_upload_is_all_references(size: int) -> None:
    content = random_bytes(size, 2)
    sent = written(content, memory_objects())
    assert sent.content() == content
    assert all(sent.by_reference)
    assert max(len(data) for _, data, _ in sent.messages) <= PACK_BYTES
    assert len(sent.messages) <= size // (PACK_BYTES - FRAME_BYTES) + 1


def test_unavailable_object_store_leaves_the_upload_inline() -> None:
    """Kafka takes the bytes while the object store is away: no upload is refused for it."""

    def fail(name: str) -> None:
        if not name.endswith("-0000000000000000"):
            raise StoreUnavailable("s3: away")

    objects = Flaky(fail)
    content = random_bytes(40 * MIB, 3)
    sent = written(content, objects)
    assert sent.content() == content
    assert sent.by_reference[0]
    assert not any(sent.by_reference[1:])
    assert objects.puts <= 1 + pack_writer.PACKS_IN_FLIGHT + 1  # then it is not asked for a while


def test_zero_inline_bytes_stages_every_upload() -> None:
    sent = written(b"x", memory_objects(), inline_bytes=0)
    assert sent.messages == [(0, b"x", True)]


def test_frames_of_a_slow_client_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "HOLD_SECONDS", 0.05)

    async def write() -> list[int]:
        sent = Sent(memory_objects())
        writer = PackWriter(PackStore(sent.objects, MIB), ATTEMPT, sent.reference, sent.frames)
        counts = []
        for number in range(3):
            await writer.add(bytearray(random_bytes(800 * 1024, number)))
            await asyncio.sleep(0.5)
            counts.append(len(sent.messages))
        await writer.flush()
        assert sent.by_reference == [False, True, True]
        return counts

    assert asyncio.run(write()) == [1, 2, 3]


def test_failure_to_send_is_raised() -> None:
    async def refuse(*_: object) -> None:
        raise StoreUnavailable("kafka: a message was not delivered")

    async def write() -> None:
        writer = PackWriter(PackStore(memory_objects(), 0), ATTEMPT, refuse, refuse)
        await writer.add(bytearray(b"x"))
        await writer.flush()

    with pytest.raises(StoreUnavailable, match="not delivered"):
        asyncio.run(write())


def test_cancelled_upload_sends_nothing_more() -> None:
    async def write() -> Sent:
        sent = Sent(memory_objects())
        writer = PackWriter(PackStore(sent.objects, 0), ATTEMPT, sent.reference, sent.frames)
        await writer.add(bytearray(b"x" * 1000))
        await writer.cancel()
        await asyncio.sleep(0.1)
        return sent

    assert asyncio.run(write()).messages == []


def test_packs_of_a_cancelled_upload_are_deleted() -> None:
    """Leave no pack without a reference: nothing else would delete it for days."""
    objects: Any = Flaky(lambda _: time.sleep(0.2))

    async def write() -> None:
        sent = Sent(objects)
        writer = PackWriter(PackStore(objects, 0), ATTEMPT, sent.reference, sent.frames)
        await writer.add(bytearray(b"x" * 1000))
        writer.send_held()
        await asyncio.sleep(0.05)
        await writer.cancel()
        assert sent.messages == []

    asyncio.run(write())
    assert objects.puts == 1
    assert objects.left() == []
