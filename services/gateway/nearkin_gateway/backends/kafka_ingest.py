"""Send uploads into the pipeline.

    write: wait for both budgets -> frame to Kafka              acknowledgement: release the budgets, in any order
    finish: end to Kafka -> wait for the last acknowledgement   abort: an end with the reason

Invariant (I3): `finish` returns after Kafka has acknowledged every frame and the end. The producer is idempotent and
keyed by the blob: frames of an attempt arrive once and in order, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.backends.ingest_backend import UploadRequest, UploadResult
from nearkin_gateway.backends.pack_writer import Frames, PackStore, PackWriter
from nearkin_gateway.http.problems import from_error
from nearkin_gateway.http.request_limits import Budget
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import BadInput, NearkinError, StoreUnavailable
from nearkin_shared.formats.message import FAILURE_CHARACTERS_MAX, End, Envelope, Frame, StagedFrame, encode
from nearkin_shared.formats.upload_parts import CopiedRange
from nearkin_shared.kafka.clients import delivery_error, is_final, producer, signed_headers, topic, unavailable
from nearkin_shared.kafka.message_authentication import EnvelopeAuthenticator
from nearkin_shared.kafka.record_guard import headers_of
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.storage.staged_packs import UploadAttempt
from nearkin_shared.validation import check_metadata, check_stored_key

POLL_SECONDS = 0.1
ROOM_SECONDS = 0.02
ROOM_SECONDS_MAX = 60.0
"""How long one message may wait for room in the producer's own queue."""
CHECK_SECONDS = 3.0
"""How long Kafka may take to answer a readiness check."""
CLOSE_SECONDS = 15.0
ABORT_SECONDS = 10.0
"""How long the answer to an upload that failed waits for its end."""
MESSAGE_ROOM_BYTES = 64 * 1024
"""Size that an end counts as, in addition to its metadata."""
_log = logging.getLogger("nearkin.gateway")


def check_request(intent: UploadRequest) -> None:
    """Refuse the key or the metadata of an upload. Raises BadInput."""
    check_stored_key(intent.key)
    check_metadata(intent.metadata)


class KafkaIngest:
    """One producer for all uploads of a process."""

    commits = False
    takes_ranges = False

    def __init__(
        self,
        settings: Settings,
        client_id: str,
        authenticator: EnvelopeAuthenticator | None,
        packs: PackStore | None = None,
    ) -> None:
        """`authenticator` signs every message.

        `packs`: for large uploads; None: all bytes go through Kafka.
        """
        self.packs = packs
        self._settings = settings
        self._authenticator = authenticator
        self.frames = topic(settings, "frames")
        self.budget = Budget(limits.UNACKNOWLEDGED_BYTES)
        self.upload_bytes_max = limits.UPLOAD_UNACKNOWLEDGED_BYTES
        self._client_id = client_id
        self._producer = producer(settings, client_id)
        self._ended: deque[Producer] = deque()
        """Producers that failed, until they have reported the outcome of their last messages."""
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="nearkin-gateway-kafka", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def find_committed(self, tenant: str, key: str, origin: BlobOrigin) -> dict[str, Any] | None:
        """Return None: the committer searches for the origin, and the topic has the outcomes."""
        return None

    def accepts(self, tenant: str) -> bool:
        """Return True: the pipeline takes all."""
        return True

    async def open(self) -> None:
        """Start to receive acknowledgements."""
        self._loop = asyncio.get_running_loop()
        self._poller.start()

    async def close(self) -> None:
        """Let what is queued go out, within a bound."""
        left = await asyncio.to_thread(self._producer.flush, CLOSE_SECONDS)
        if left:
            _log.warning("kafka: %d messages were not acknowledged before the stop", left)
        self._stop.set()
        if self._poller.is_alive():
            await asyncio.to_thread(self._poller.join)

    async def begin(self, intent: UploadRequest) -> KafkaUpload:
        """Start an upload; nothing is sent before its first frame. Raises BadInput."""
        check_request(intent)
        return KafkaUpload(self, intent)

    def check(self) -> None:
        """Raise StoreUnavailable where Kafka does not answer; blocks for CHECK_SECONDS at most."""
        try:
            self._producer.list_topics(self.frames, CHECK_SECONDS)
        except KafkaException as err:
            raise unavailable(self._settings, err) from err

    async def publish(self, name: str, key: bytes, value: bytes) -> None:
        """Send a message to one of TOPICS and wait for its acknowledgement.

        Raises StoreUnavailable.
        """
        tracker = Tracker()
        await self.send(topic(self._settings, name), key, value, {}, tracker, 0)
        await tracker.wait_for_acks()

    async def send(
        self, full: str, key: bytes, value: bytes, headers: Mapping[str, bytes], tracker: Tracker, room_bytes: int
    ) -> None:
        """Queue a message.

        Its acknowledgement is reported to `tracker`, and releases `room_bytes`.
        """
        loop = self._loop
        assert loop is not None

        def delivered(err: KafkaError | None, _message: KafkaMessage) -> None:
            failure = None if err is None else delivery_error(err, full, len(value))
            if not loop.is_closed():
                loop.call_soon_threadsafe(tracker.on_delivery, room_bytes, failure)

        deadline = time.monotonic() + ROOM_SECONDS_MAX
        signed: list[tuple[str, str | bytes | None]] = [*signed_headers(self._authenticator, full, key, value, headers)]
        while True:
            try:
                self._producer.produce(full, value, key, headers=signed, on_delivery=delivered)
            except BufferError as err:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"kafka: {full}: no room to send for {ROOM_SECONDS_MAX:.0f} s") from err
                await asyncio.sleep(ROOM_SECONDS)
            except KafkaException as err:
                if is_final(err.args[0]):
                    self._renew()
                raise delivery_error(err.args[0], full, len(value)) from err
            else:
                tracker.sent()
                return

    def _renew(self) -> None:
        """Replace the producer; messages of the old one count as lost, and their uploads get 503."""
        _log.error("kafka: the producer failed for good; a new one takes over")
        self._producer.purge(in_queue=True, in_flight=True)
        self._ended.append(self._producer)
        self._producer = producer(self._settings, self._client_id)

    def _poll(self) -> None:
        while not self._stop.is_set():
            self._producer.poll(POLL_SECONDS)
            if self._ended and not self._ended[0].flush(0):
                self._ended.popleft()


class Tracker:
    """The acknowledgements of some messages, in one event loop."""

    def __init__(self, *budgets: Budget) -> None:
        self._budgets = budgets
        self._waiting = 0
        self._failure: NearkinError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def sent(self) -> None:
        """Count a message as sent."""
        self._waiting += 1
        self._idle.clear()

    def on_delivery(self, room_bytes: int, err: NearkinError | None) -> None:
        """Count one that is acknowledged, or lost."""
        self._waiting -= 1
        for budget in self._budgets:
            budget.give(room_bytes)
        if err is not None and self._failure is None:
            self._failure = err
        if not self._waiting:
            self._idle.set()

    def check(self) -> None:
        """Raise StoreUnavailable for a lost message, PermanentError for one too large."""
        if self._failure is not None:
            raise self._failure

    async def wait_for_acks(self) -> None:
        """Wait for all acknowledgements, up to the delivery timeout. Raises as `check` does."""
        await self._idle.wait()
        self.check()


class KafkaUpload:
    """An upload of one blob in frames."""

    def __init__(self, ingest: KafkaIngest, intent: UploadRequest) -> None:
        self._ingest = ingest
        self._intent = intent
        self._own = Budget(ingest.upload_bytes_max)
        self._tracker = Tracker(self._own, ingest.budget)
        self._position = 0
        self._is_begun = False
        """Whether Kafka has a message of this upload."""
        self._is_ended = False
        """Whether Kafka has its end."""
        self._unsent_bytes = 0
        """Room that was taken for what is not sent yet."""
        self._packs: PackWriter | None = None
        if ingest.packs is not None:
            attempt = UploadAttempt(intent.blob, intent.tenant, intent.key, intent.origin, intent.began_us)
            self._packs = PackWriter(ingest.packs, attempt, self._send_reference, self._send_frames)

    async def write(self, frame: bytes | bytearray) -> None:
        """Send a frame once there is room for it."""
        self._tracker.check()
        await self._take_room(len(frame))
        if self._packs is None:
            await self._send_frames(self._position, [frame])
        else:
            await self._packs.add(frame)
        self._position += len(frame)

    async def copy(self, copied: CopiedRange) -> None:
        """Refuse: the gateway reads ranges, and the pipeline gets bytes. Raises BadInput."""
        raise BadInput(f"bytes {copied.start} to {copied.stop} of a base: the pipeline takes no ranges; send bytes")

    async def finish(self, ending: UploadResult) -> None:
        """Send the end and wait for every acknowledgement.

        An upload whose end cannot be sent ends as failed: its workers and its tenant do not wait until it is idle.
        """
        try:
            await self._finish(ending)
        except BaseException as err:
            if not self._is_ended:
                why = from_error(err).detail if isinstance(err, Exception) else "the gateway stopped"
                aborting = asyncio.ensure_future(self.abort(why))
                with suppress(TimeoutError, asyncio.CancelledError):  # the pipeline ends a silent upload by itself
                    await asyncio.wait_for(asyncio.shield(aborting), ABORT_SECONDS)
            raise

    async def _finish(self, ending: UploadResult) -> None:
        if self._packs is not None:
            await self._packs.flush()
        self._tracker.check()
        end = End(
            envelope=self._envelope(),
            began_us=self._intent.began_us,
            origin=self._intent.origin,
            size_bytes=ending.size_bytes,
            blake3=ending.blake3,
            sha256=ending.sha256,
            metadata=self._intent.metadata,
            precondition=self._intent.precondition,
            first_attempt_us=self._intent.first_attempt_us,
        )
        await self._take_room(MESSAGE_ROOM_BYTES)
        await self._send(encode(end), MESSAGE_ROOM_BYTES, "end", self._position)
        self._is_ended = True
        await self._tracker.wait_for_acks()

    async def abort(self, why: str) -> None:
        """Report that the upload ended without success, unless no frame or an end was sent."""
        if self._packs is not None:
            await self._packs.cancel()  # first: packs in flight give their room back when they are acknowledged
        self._release_unsent()
        if not self._is_begun or self._is_ended:
            return
        end = End(
            envelope=self._envelope(),
            began_us=self._intent.began_us,
            origin=self._intent.origin,
            size_bytes=self._position,
            failure=why[:FAILURE_CHARACTERS_MAX],
        )
        try:
            await self._take_room(MESSAGE_ROOM_BYTES)
            await self._send(encode(end), MESSAGE_ROOM_BYTES, "end", self._position)
            self._is_ended = True
        except NearkinError as err:
            _log.warning("upload %s: its end could not be sent: %s", self._intent.blob.hex(), err)

    def _envelope(self, position: int | None = None) -> Envelope:
        position = self._position if position is None else position
        return Envelope(self._intent.blob, self._intent.tenant, self._intent.key, position)

    async def _send_frames(self, position: int, frames: Frames) -> None:
        for frame in frames:
            message = Frame(self._envelope(position), np.frombuffer(frame, np.uint8))
            await self._send(encode(message), len(frame), "frame", position)
            position += len(frame)

    async def _send_reference(self, staged: StagedFrame) -> None:
        await self._send(encode(staged), staged.size_bytes, "frame", staged.envelope.position)

    async def _take_room(self, room_bytes: int) -> None:
        """Wait for room in both budgets.

        What this upload holds is sent first, or it could wait for itself.
        """
        budgets = self._own, self._ingest.budget
        if self._packs is not None and not all(budget.has_room(room_bytes) for budget in budgets):
            self._packs.send_held()
        await self._own.take(room_bytes)
        try:
            await self._ingest.budget.take(room_bytes)
        except asyncio.CancelledError:
            self._own.give(room_bytes)
            raise
        self._unsent_bytes += room_bytes

    def _release_unsent(self) -> None:
        """Give back the room of frames that are not sent any more."""
        for budget in (self._own, self._ingest.budget):
            budget.give(self._unsent_bytes)
        self._unsent_bytes = 0

    async def _send(self, value: bytes, room_bytes: int, kind: str, position: int) -> None:
        """Queue a message for which room was taken; its acknowledgement gives the room back."""
        trace = self._intent.trace
        headers = headers_of("gateway", kind, self._envelope(position), None if trace is None else trace.encode())
        await self._ingest.send(self._ingest.frames, self._intent.blob, value, headers, self._tracker, room_bytes)
        self._is_begun = True
        self._unsent_bytes -= room_bytes
