"""Send a blob.

Invariant (I8): bytes are verified before they are sent; an error cuts the body short.

thread:  next piece, fetched and verified    ||    loop:  the piece before it, in slices of SLICE_BYTES
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.http.request_limits import ConcurrencyLimit
from nearkin_shared.errors import Corrupt, NearkinError
from nearkin_shared.observability import metrics
from nearkin_shared.reading.restore import VerifiedPieces

SLICE_BYTES = 1024 * 1024
"""Each slice passes some ten wrappers of `send`: with 256 KiB a restore of random bytes took a tenth more CPU time. The
event loop copies a slice into the socket in 0.2 ms, and serves no other request meanwhile.
"""
LOOKS = 4
"""Checks, in SLOW_SECONDS, of the bytes that a reader took."""
_UNKNOWN: Mapping[str, Callable[[], Any]] = {"unsent_bytes": lambda: 0, "abort": lambda: None}
"""For a connection of another server than ours, which handles clients that read nothing itself."""
_log = logging.getLogger("nearkin.gateway")


class BlobResponse(Response):
    """A blob or a range of it, with its declared length: a client notices a missing end."""

    def __init__(
        self,
        pieces: VerifiedPieces,
        first: memoryview | None,
        status: int,
        headers: Mapping[str, str],
        slot: AbstractContextManager[None],
        slots: ConcurrencyLimit,
    ) -> None:
        super().__init__(status_code=status, headers=dict(headers))
        self._pieces, self._first, self._slot = pieces, first, slot
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all; whatever ends it early ends the connection."""
        try:
            await self._send_all(scope, receive, send)
        finally:
            self._slot.__exit__(None, None, None)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        piece, coming = self._first, None
        watch = _Watch(self._slots, **scope.get("extensions", {}).get("nearkin.connection", _UNKNOWN))
        try:
            while piece is not None:
                coming = asyncio.create_task(asyncio.to_thread(next, self._pieces, None))
                for start in range(0, len(piece), SLICE_BYTES):
                    if gone.done():
                        return
                    body = piece[start : start + SLICE_BYTES]
                    with watch.sending(len(body)):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                piece = await coming
            await send({"type": "http.response.body", "body": b""})
        except NearkinError as err:
            if isinstance(err, Corrupt):
                metrics.CORRUPT.labels("restore").inc()
            _log.error("%s: the body is cut short: %s", scope["path"], err)
            raise
        finally:
            watch.end()
            gone.cancel()
            if coming is not None and not coming.done():  # a generator must not be closed while a thread runs it
                with suppress(Exception):
                    await asyncio.shield(coming)
            # Without this reference the loop would close it on disposal, and wait for the running read.
            await asyncio.shield(asyncio.to_thread(self._pieces.close))


class _Watch:
    """End a response to a client that reads less than `slots` require over SLOW_SECONDS."""

    def __init__(self, slots: ConcurrencyLimit, unsent_bytes: Callable[[], int], abort: Callable[[], None]) -> None:
        """Watch one response.

        `unsent_bytes` returns the bytes not yet sent; `abort` ends the connection, since closing waits for a slow
        client.
        """
        self._seconds, self._slots = limits.SLOW_SECONDS, slots
        self._unsent_bytes, self._abort = unsent_bytes, abort
        self._handed_bytes = self._taken_bytes = 0
        self._waiting = False
        self._since = 0.0
        """When it had taken so much, or began to wait."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)

    @contextmanager
    def sending(self, size_bytes: int) -> Iterator[None]:
        """Say that so much is handed over, for as long as the block waits."""
        self._waiting, self._since = True, self._loop.time()
        try:
            yield
        finally:
            self._waiting = False
            self._handed_bytes += size_bytes

    def _look(self) -> None:
        taken_bytes, now = self._handed_bytes - self._unsent_bytes(), self._loop.time()
        least_bytes = self._seconds * self._slots.least_bytes_per_second
        if not self._waiting or taken_bytes - self._taken_bytes >= least_bytes:
            self._taken_bytes, self._since = taken_bytes, now
        elif now - self._since >= self._seconds:
            _log.warning("a client took less than %.0f bytes in %.0f s: connection closed", least_bytes, self._seconds)
            self._abort()
            return
        self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)

    def end(self) -> None:
        """Look no more."""
        self._timer.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
