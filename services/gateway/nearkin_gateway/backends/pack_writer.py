"""Gather the frames of an upload into packs, and send references to them.

    frames -> packs of up to 8 MiB -> object store (two at a time) -> references to Kafka, in order

The first INLINE_BYTES are held back: an upload that ends before stays inline.

Invariants: a reference is sent after its pack is durable, and references follow each other in the order of the blob.
No upload holds memory while it waits for its client: held frames are sent after HOLD_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from nearkin_shared.errors import NearkinError, StoreUnavailable
from nearkin_shared.formats.message import StagedFrame
from nearkin_shared.limits import MIB
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.storage.staged_packs import (
    PACK_BYTES,
    UploadAttempt,
    delete_expired,
    delete_pack,
    pack_name,
    put_pack,
    refer,
)

INLINE_BYTES = MIB
"""Uploads up to this size go through Kafka: two frames cost less than a put and a get of the object store."""
HOLD_SECONDS = 1.0
"""How long frames wait for more of a slow client."""
PACKS_IN_FLIGHT = 2
AWAY_SECONDS = 30.0
"""How long uploads stay inline after the object store refused a pack."""
SWEEP_SECONDS = 3600.0
_log = logging.getLogger("nearkin.gateway")

Frames = Sequence[bytes | bytearray]
Views = Sequence[memoryview]


class PackStore:
    """The packs in the object store; unavailable for AWAY_SECONDS after a failure."""

    def __init__(self, objects: ObjectStore, inline_bytes: int = INLINE_BYTES) -> None:
        self._objects = objects
        self.inline_bytes = inline_bytes
        self._away_until = 0.0

    async def delete(self, staged: StagedFrame) -> None:
        """Delete a pack whose reference was not sent, if it exists."""
        await asyncio.to_thread(delete_pack, self._objects, pack_name(staged.pack))

    async def delete_expired_for_ever(self, retention_hours: int) -> None:
        """Delete packs whose references have left Kafka, every SWEEP_SECONDS, until cancelled.

        Kafka keeps a record for up to twice its retention: until a segment of its log is full or as old.
        """
        while True:
            before_ms = int((time.time() - 2 * retention_hours * 3600) * 1000)
            try:
                count = await asyncio.to_thread(delete_expired, self._objects, before_ms)
            except NearkinError as err:
                _log.warning("expired packs not deleted: %s", err)
            else:
                if count:
                    _log.warning("%d packs that no upload needed any more were deleted", count)
            await asyncio.sleep(SWEEP_SECONDS)

    @property
    def is_available(self) -> bool:
        """Return whether packs are worth a try."""
        return time.monotonic() >= self._away_until

    async def put(self, staged: StagedFrame, parts: Views) -> bool:
        """Store a pack; return False if the object store is unavailable."""
        try:
            await asyncio.to_thread(put_pack, self._objects, staged, parts)
        except StoreUnavailable as err:
            _log.warning("uploads go through Kafka for %.0f s: %s", AWAY_SECONDS, err)
            self._away_until = time.monotonic() + AWAY_SECONDS
            return False
        return True


class PackWriter:
    """The frames of one upload that are not sent yet."""

    def __init__(
        self,
        packs: PackStore,
        attempt: UploadAttempt,
        send_reference: Callable[[StagedFrame], Awaitable[None]],
        send_frames: Callable[[int, Frames], Awaitable[None]],
    ) -> None:
        """`send_frames` receives the position of the first frame, and sends frames inline."""
        self._packs, self._attempt = packs, attempt
        self._send_reference, self._send_frames = send_reference, send_frames
        self._held: list[bytes | bytearray] = []
        self._held_bytes = 0
        self._position = 0
        """Offset in the blob of the first held frame."""
        self._sending: list[asyncio.Task[None]] = []
        self._is_large = self._is_cancelled = False
        self._unsent: dict[int, StagedFrame] = {}
        """References that are not sent yet, by position: their packs may be stored."""
        self._timer: asyncio.TimerHandle | None = None

    async def add(self, frame: bytes | bytearray) -> None:
        """Add a frame; wait while more than PACKS_IN_FLIGHT packs are being sent.

        Raises the failure of an earlier one.
        """
        self._held.append(frame)
        self._held_bytes += len(frame)
        self._is_large = self._is_large or self._position + self._held_bytes > self._packs.inline_bytes
        if self._is_large and self._held_bytes + len(frame) > PACK_BYTES:
            self.send_held()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.send_held)
        while len(self._sending) > PACKS_IN_FLIGHT:
            await self._sending[0]
            self._sending.pop(0)

    def send_held(self) -> None:
        """Begin to send the held frames: as a pack if the upload is large, otherwise inline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._held:
            return
        frames, position = self._held, self._position
        self._position += self._held_bytes
        self._held, self._held_bytes = [], 0
        earlier = self._sending[-1] if self._sending else None
        self._sending.append(asyncio.ensure_future(self._send(frames, position, earlier)))

    async def _send(self, frames: Frames, position: int, earlier: asyncio.Task[None] | None) -> None:
        is_stored = False
        if self._is_large and self._packs.is_available:
            views = [memoryview(frame) for frame in frames]
            staged = self._unsent[position] = await asyncio.to_thread(refer, self._attempt, position, views)
            is_stored = await self._packs.put(staged, views)
        if earlier is not None:
            await earlier
        if self._is_cancelled:
            return
        if is_stored:
            await self._send_reference(staged)
            del self._unsent[position]
        else:
            await self._send_frames(position, frames)

    async def flush(self) -> None:
        """Send all frames, and wait until Kafka has queued them. Raises the first failure."""
        self.send_held()
        while self._sending:
            await self._sending[0]
            self._sending.pop(0)

    async def cancel(self) -> None:
        """Drop the held frames, and delete the packs whose references were not sent."""
        self._is_cancelled = True
        self._held, self._held_bytes = [], 0
        self.send_held()
        sending, self._sending = self._sending, []
        await asyncio.gather(*sending, return_exceptions=True)
        for staged in self._unsent.values():
            await self._packs.delete(staged)
