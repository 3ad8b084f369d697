"""Send the chunks of an upload that the store lacks, and the recipes of all others.

    frames -> batches of 4 MiB -> cut, name, ask the index (a thread) -> sparse segments -> Kafka, or packs if many

The app floor hands in the stages (`SourceDedup`). A known chunk leaves this process as its name and location: its
bytes are dropped, since its container is durable, and its location is valid for a grace (I6). If the index does not
answer, nothing is known, and all bytes are sent.

Of a slow client no segment may be certain for minutes. Workers would fail the upload as idle, so a message without
segments is sent after KEEP_ALIVE_SECONDS: where the blob is cut does not depend on its client's speed.

Invariants: `finish` returns after Kafka has acknowledged every segment and the end (I3). No upload holds more than
the undecided tail of its bytes, one segment, while it waits for its client.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.kafka_ingest import KafkaIngest, KafkaUpload
from nearkin_gateway.backends.pack_writer import HOLD_SECONDS, Frames
from nearkin_gateway.backends.source_dedup import BATCH_BYTES, SourceDedup, SourceReducer
from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_shared.formats.message import Envelope, StagedFrame
from nearkin_shared.limits import KIB
from nearkin_shared.utils.frozen import frozen

MARGIN_SHARE = 16
MARGIN_BYTES = 4 * KIB
"""Room that a frame takes beyond its size: names, locations and the header of a message."""
KEEP_ALIVE_SECONDS = 60.0
"""Time without a message before a keep-alive is sent: a fifth of `kafka.upload_idle_seconds`."""


@frozen
class EdgeUploads:
    """The stages of all uploads, and the threads that run them."""

    dedup: SourceDedup
    pool: WorkerPool

    def begin(self, ingest: KafkaIngest, intent: UploadRequest) -> EdgeUpload:
        """Start an upload; nothing is sent before its first segment."""
        reducer = self.dedup.open(Envelope(intent.blob, intent.tenant, intent.key))
        return EdgeUpload(ingest, intent, reducer, self.pool)


class EdgeUpload(KafkaUpload):
    """An upload of one blob as sparse segments."""

    def __init__(self, ingest: KafkaIngest, intent: UploadRequest, reducer: SourceReducer, pool: WorkerPool) -> None:
        """`pool` has the threads that cut and ask the index."""
        super().__init__(ingest, intent)
        self._reducer, self._pool = reducer, pool
        self._turn = asyncio.Lock()
        self._held: list[bytes | bytearray] = []
        self._held_bytes = self._held_room_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._sent_bytes = 0
        """Bytes of the messages so far."""
        self._sent_at = time.monotonic()
        """When the last of them was sent."""

    async def write(self, frame: bytes | bytearray) -> None:
        """Take a frame once there is room for it; reduce a batch when it is full."""
        self._tracker.check()
        room_bytes = len(frame) + len(frame) // MARGIN_SHARE + MARGIN_BYTES
        await self._take_room(room_bytes)
        self._held.append(frame)
        self._held_bytes += len(frame)
        self._held_room_bytes += room_bytes
        self._position += len(frame)
        if self._held_bytes >= BATCH_BYTES:
            await self._reduce()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._reduce_late)

    async def abort(self, why: str) -> None:
        """Report that the upload ended without success, unless nothing was sent."""
        self._stop_timer()
        if self._late is not None:
            await asyncio.gather(self._late, return_exceptions=True)
        self._held.clear()
        await super().abort(why)

    async def _finish(self, ending: UploadResult) -> None:
        await self._reduce(final=True)
        await super()._finish(ending)

    async def _take_room(self, room_bytes: int) -> None:
        """Wait for room; held frames are sent first, or the upload could wait for itself."""
        if self._held and not all(budget.has_room(room_bytes) for budget in (self._own, self._ingest.budget)):
            await self._reduce()
        await super()._take_room(room_bytes)

    def _reduce_late(self) -> None:
        """Reduce the frames of a slow client.

        Those that arrive while an earlier reduction runs are reduced after HOLD_SECONDS.
        """
        self._timer = None
        if self._late is None or self._late.done():
            self._late = asyncio.ensure_future(self._reduce())
        else:
            self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._reduce_late)

    async def _reduce(self, *, final: bool = False) -> None:
        """Cut the held frames, ask the index, and send what the store lacks."""
        async with self._turn:  # in the order of the blob
            self._stop_timer()
            frames, self._held, self._held_bytes = self._held, [], 0
            room_bytes, self._held_room_bytes = self._held_room_bytes, 0
            if self._failure is not None:
                raise self._failure
            if frames or final:
                try:
                    await self._reduce_frames(frames, room_bytes, final=final)
                except Exception as err:
                    self._failure = err  # the next segments would not follow those sent before
                    raise

    async def _reduce_frames(self, frames: Frames, room_bytes: int, *, final: bool) -> None:
        messages = await self._pool.run(self._reducer.reduce, frames, final=final)
        now = time.monotonic()
        if messages:
            self._sent_at = now
        elif self._sent_bytes and now - self._sent_at >= KEEP_ALIVE_SECONDS:  # else workers do not know the upload
            messages, self._sent_at = [self._reducer.keep_alive()], now
        self._give_room(room_bytes - sum(map(len, messages)))
        for message in messages:
            if self._packs is None:
                await self._send_frames(self._sent_bytes, [message])
            else:
                await self._packs.add(message)
            self._sent_bytes += len(message)

    def _give_room(self, room_bytes: int) -> None:
        """Give back the room of bytes that are not sent, or keep account of more that are."""
        for budget in (self._own, self._ingest.budget):
            budget.give(room_bytes)
        self._unsent_bytes -= room_bytes

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _send_frames(self, position: int, frames: Frames) -> None:
        """Send messages inline; `position` counts their bytes."""
        for message in frames:
            await self._send(bytes(message), len(message), "sparse", position)
            position += len(message)

    async def _send_reference(self, staged: StagedFrame) -> None:
        await super()._send_reference(replace(staged, is_sparse=True))
