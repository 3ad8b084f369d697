"""Access the store behind a gateway from asyncio, with the methods and requests of `sync`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Self

import anyio
import anyio.to_thread
import httpx
from tenacity import AsyncRetrying

from nearkin.client import requests
from nearkin.client.http import (
    ANSWER_BYTES_MAX,
    Answer,
    Call,
    Conversation,
    Endpoint,
    T,
    closed_error,
    error_of,
    retry_options,
    unreachable,
)
from nearkin.client.requests import AcceptedPut
from nearkin.client.streaming import AsyncSource, Download, Upload
from nearkin.client.sync import PUTS_IN_FLIGHT_MAX
from nearkin_shared.errors import NearkinError, StoreUnavailable
from nearkin_shared.preconditions import precondition_of
from nearkin_shared.results import Damage, Deletion, Explanation, PutResult, Stats, VersionInfo
from nearkin_shared.validation import Progress, write_pieces


class AsyncRemoteStore:
    """A store behind a gateway; `aclose` gives its connections back."""

    def __init__(self, endpoint: Endpoint, commit_seconds: float) -> None:
        self.url: str = endpoint.url
        self._commit_seconds = commit_seconds
        self._http = httpx.AsyncClient(**endpoint.client_options())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    # --- put ---------------------------------------------------------------------------------------------------------

    async def put(
        self,
        key: str,
        source: AsyncSource,
        *,
        metadata: Mapping[str, str] | None = None,
        sha256: bytes | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
        progress: Progress | None = None,
    ) -> PutResult:
        """Store a new version of `key` as `RemoteStore.put` does; accepts an async iterable too."""
        upload, precondition = Upload(source, progress), precondition_of(if_match, if_none_match)
        return await self._hold(requests.put(key, upload, metadata or {}, sha256, self._commit_seconds, precondition))

    async def put_many(
        self,
        items: Iterable[tuple[str, AsyncSource]] | AsyncIterable[tuple[str, AsyncSource]],
        *,
        progress: Progress | None = None,
    ) -> AsyncIterator[PutResult]:
        """Store many blobs, each sent while earlier ones are committed. Yields results in order."""
        waiting: deque[AcceptedPut] = deque()
        async for key, source in _each(items):
            upload = Upload(source, progress)
            done = await self._hold(requests.accept(key, upload, {}, None, 0.0, self._commit_seconds))
            if isinstance(done, AcceptedPut):
                waiting.append(done)
            while waiting and (isinstance(done, PutResult) or len(waiting) >= PUTS_IN_FLIGHT_MAX):
                yield await self._settled(waiting.popleft())
            if isinstance(done, PutResult):
                yield done
        while waiting:
            yield await self._settled(waiting.popleft())

    async def _settled(self, accepted: AcceptedPut) -> PutResult:
        return await self._hold(requests.await_commit(accepted, self._commit_seconds))

    # --- get ---------------------------------------------------------------------------------------------------------

    async def get(
        self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None
    ) -> AsyncRemoteBlob:
        """Return a version (the newest by default) or its bytes [start, stop).

        Raises NotFound, BadInput, AccessDenied.
        """
        found = await self.info(key, version)
        return AsyncRemoteBlob(self, found, start, requests.check_range(found, start, stop))

    async def info(self, key: str, version: int | None = None) -> VersionInfo:
        """Return what is known of a version, the newest by default. Raises NotFound."""
        return await self._hold(requests.info(key, version))

    async def explain(self, key: str, version: int | None = None) -> Explanation:
        """Return how each chunk of a version is kept. Raises NotFound."""
        return await self._hold(requests.explain(key, version))

    async def versions(
        self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
    ) -> list[VersionInfo]:
        """Return the newest version, or all, of each key that starts with `prefix`, by key.

        Unreadable versions are omitted and passed to `broken`, by default logged as a warning.
        """
        return await self._hold(requests.versions(prefix, all_versions, broken))

    # --- delete ------------------------------------------------------------------------------------------------------

    async def delete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
        """Delete a version, or all current versions of the key; return how many.

        They are deleted for every reader. Sent again if the connection fails, and done once all the same. Raises
        NotFound, RetentionActive (the minimum age of a version: none is deleted), AccessDenied,
        TenantErased, StoreUnavailable.
        """
        return await self._hold(requests.delete(key, version, reason))

    async def undelete(self, key: str, version: int | None = None, *, reason: str = "") -> int:
        """Undelete a version, or all that the latest `delete` of the key took; return how many.

        Raises NotFound (no version of it is deleted, or the time to undelete has passed), AccessDenied, TenantErased,
        StoreUnavailable.
        """
        return await self._hold(requests.undelete(key, version, reason))

    async def retain(self, key: str, until: datetime, version: int | None = None, *, reason: str = "") -> VersionInfo:
        """Retain a version, the newest by default, until a time; return it.

        A retention is extended, never shortened. Sent again if the connection fails; a repeat changes nothing. Raises
        NotFound, BadInput (the time is earlier than the current retention), AccessDenied, TenantErased,
        StoreUnavailable.
        """
        return await self._hold(requests.retain(key, until, version, reason))

    async def list_deleted(self, prefix: str = "", *, broken: Callable[[Damage], None] | None = None) -> list[Deletion]:
        """Return the deleted, not yet collected versions of keys that start with `prefix`, by key."""
        return await self._hold(requests.list_deleted(prefix, broken))

    # --- the store as a whole ----------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Return sums over the store."""
        return await self._hold(requests.stats())

    async def config(self) -> dict[str, Any]:
        """Return the settings that the services run with. Raises AccessDenied."""
        return await self._hold(requests.config())

    async def change_config(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Change settings of the running services; return all settings.

        Raises BadInput, AccessDenied.
        """
        return await self._hold(requests.change_config(changes))

    # --- the wire ----------------------------------------------------------------------------------------------------

    async def _hold(self, conversation: Conversation[T]) -> T:
        try:
            call = next(conversation)
            while True:
                call = conversation.send(await self._answer(call))
        except StopIteration as end:
            value: T = end.value
            return value

    async def _answer(self, call: Call) -> Answer:
        await anyio.sleep(call.after_seconds)
        async for attempt in AsyncRetrying(**retry_options(call), sleep=anyio.sleep):
            with attempt:
                return await self._answer_once(call)
        raise AssertionError("unreachable: tenacity returns or raises")

    async def _answer_once(self, call: Call) -> Answer:
        response = await self._send(call)
        try:
            return await self._collected(call, response)
        finally:
            await response.aclose()

    async def _collected(self, call: Call, response: httpx.Response) -> Answer:
        """Return the whole answer. Raises the error that it stands for."""
        named, body = self._named(call), bytearray()
        try:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise StoreUnavailable(f"{named}: answers more than {ANSWER_BYTES_MAX:,} bytes")
        except httpx.TransportError as err:
            raise unreachable(named, err) from err
        if not response.is_success:
            raise error_of(named, response.status_code, response.headers, bytes(body))
        return Answer(response.status_code, response.headers, bytes(body), named)

    async def _send(self, call: Call) -> httpx.Response:
        if self._http.is_closed:
            raise closed_error(self.url)
        request = self._http.build_request(
            call.method,
            self.url + call.path,
            params=dict(call.params),
            headers=dict(call.headers),
            content=call.upload.async_pieces() if call.upload is not None else call.body,
            timeout=call.timeout(),
        )
        try:
            return await self._http.send(request, stream=True)
        except httpx.TransportError as err:
            raise unreachable(self._named(call), err) from err

    def _named(self, call: Call) -> str:
        return f"{call.method} {self.url}{call.path}"

    async def open_download(self, download: Download) -> tuple[httpx.Response, AsyncIterator[bytes], bytes]:
        """Return a started response, the rest of its pieces, and the first. Raises as `get` does."""
        call = download.call()
        async for attempt in AsyncRetrying(**retry_options(call), sleep=anyio.sleep):
            with attempt:
                response = await self._send(call)
                try:
                    if not response.is_success:
                        await self._collected(call, response)
                    download.on_headers(response.status_code, response.headers)
                    pieces = response.aiter_raw()
                    return response, pieces, await anext(pieces, b"")
                except httpx.TransportError as err:
                    await response.aclose()
                    raise unreachable(self._named(call), err) from err
                except BaseException:
                    await response.aclose()
                    raise
        raise AssertionError("unreachable: tenacity returns or raises")


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


async def _each(
    items: Iterable[tuple[str, AsyncSource]] | AsyncIterable[tuple[str, AsyncSource]],
) -> AsyncIterator[tuple[str, AsyncSource]]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
