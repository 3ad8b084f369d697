"""Sending a blob. Invariant: verified first, then sent; what goes wrong in the middle cuts the body short (I8).

thread:  next piece, fetched and verified    ||    loop:  the piece before it, in slices of SLICE_BYTES
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nearkin import metrics
from nearkin.config_services import GatewaySettings
from nearkin.errors import Corrupt, NearkinError
from nearkin.restore import VerifiedPieces

SLICE_BYTES = 256 * 1024
_log = logging.getLogger("nearkin.gateway")


class BlobResponse(Response):
    """A blob or a range of it, with its length declared: a reader notices when the end is missing."""

    def __init__(
        self,
        pieces: VerifiedPieces,
        first: memoryview | None,
        status: int,
        headers: Mapping[str, str],
        bounds: GatewaySettings,
        slot: AbstractContextManager[None],
    ) -> None:
        super().__init__(status_code=status, headers=dict(headers))
        self._pieces, self._first, self._bounds, self._slot = pieces, first, bounds, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all; whatever ends it early ends the connection."""
        try:
            await self._send_all(scope, receive, send)
        finally:
            self._slot.__exit__(None, None, None)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_disconnected(receive))
        piece, coming = self._first, None
        try:
            while piece is not None:
                coming = asyncio.create_task(asyncio.to_thread(next, self._pieces, None))
                for start in range(0, len(piece), SLICE_BYTES):
                    if gone.done():
                        return
                    body = piece[start : start + SLICE_BYTES]
                    # At the slowest rate we bear this is how long what was sent before may take.
                    seconds = max(self._bounds.slow_seconds, SLICE_BYTES / self._bounds.slow_bytes_per_second)
                    try:
                        async with asyncio.timeout(seconds):
                            await send({"type": "http.response.body", "body": body, "more_body": True})
                    except TimeoutError:
                        _log.warning("%s: the client takes nothing for %.0f s: let go", scope["path"], seconds)
                        scope["extensions"]["nearkin.abort"]["call"]()
                        return
                piece = await coming
            await send({"type": "http.response.body", "body": b""})
        except NearkinError as err:
            if isinstance(err, Corrupt):
                metrics.CORRUPT.labels("restore").inc()
            _log.error("%s: the body is cut short: %s", scope["path"], err)
            raise
        finally:
            gone.cancel()
            if coming is not None and not coming.done():  # a generator must not be closed while a thread runs it
                with suppress(Exception):
                    await asyncio.shield(coming)
            # Dropped, it would be closed by whoever drops it: this loop, which would wait for what is being read.
            await asyncio.shield(asyncio.to_thread(self._pieces.close))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
