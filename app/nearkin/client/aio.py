"""Access the store behind a gateway from asyncio, with the methods and requests of `sync`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import BinaryIO

import anyio.to_thread
import httpx

from nearkin.client import requests
from nearkin.client.async_calls import AsyncGatewayCalls
from nearkin.client.http import unreachable
from nearkin.client.streaming import Download
from nearkin_shared.errors import NearkinError
from nearkin_shared.results import VersionInfo
from nearkin_shared.validation import Progress, write_pieces


class AsyncRemoteStore(AsyncGatewayCalls):
    """A store behind a gateway; `aclose` gives its connections back."""

    async def get(
        self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None
    ) -> AsyncRemoteBlob:
        """Return a version (the newest by default) or its bytes [start, stop).

        Raises NotFound, BadInput, AccessDenied.
        """
        found = await self.info(key, version)
        return AsyncRemoteBlob(self, found, start, requests.check_range(found, start, stop))


class AsyncRemoteBlob:
    """A version, or a range of one, with its `pieces`, `read` and `write_to`."""

    def __init__(self, store: AsyncRemoteStore, info: VersionInfo, start: int, stop: int) -> None:
        self.info = info
        self.size_bytes: int = stop - start
        """Bytes of the range, not of the version."""
        self._store = store
        self._start, self._stop = start, stop

    def __aiter__(self) -> AsyncGenerator[memoryview, None]:
        return self.pieces()

    async def pieces(self) -> AsyncGenerator[memoryview, None]:
        """Yield the range's bytes in order, as `RemoteBlob.pieces` does.

        Raises Corrupt, StoreUnavailable.
        """
        download = Download(self.info, self._start, self._stop)
        while not download.is_complete:
            response, pieces, piece = await self._store.open_download(download)
            failure: NearkinError | None = None
            try:
                while piece and not download.is_complete:
                    ready = download.take(piece)
                    if ready:
                        yield memoryview(ready)
                    piece = b"" if download.is_complete else await anext(pieces, b"")
            except httpx.TransportError as err:
                failure = unreachable(download.label, err)
            finally:
                await response.aclose()
            if not download.is_complete:
                download.on_disconnect(failure)

    async def read(self) -> bytes:
        """Return the range's bytes."""
        return b"".join([bytes(piece) async for piece in self.pieces()])

    async def write_to(self, file: BinaryIO, progress: Progress | None = None) -> int:
        """Write the range's bytes in a thread; return how many.

        `progress` is called with the size of each piece.
        """
        written = 0
        async for piece in self.pieces():
            written += await anyio.to_thread.run_sync(write_pieces, [piece], file, None)
            if progress is not None:
                progress(len(piece))
        return written
