"""Send the requests of a store behind a gateway, from asyncio.

tools/make_sync_client.py writes the same for threads, sync_calls.py: edit this module, then run it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import anyio
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
from nearkin.client.requests import PUTS_IN_FLIGHT_MAX, AcceptedPut
from nearkin.client.streaming import AsyncItems, AsyncSource, Download, Upload, each_async
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.preconditions import precondition_of
from nearkin_shared.results import Damage, Deletion, Explanation, PutResult, Stats, VersionInfo
from nearkin_shared.validation import Progress


class AsyncGatewayCalls:
    """The calls of a store behind a gateway, all except those that read content."""

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
        """Store a new version of `key`. Returns once it is committed and durable.

        `source` is the path of a file, a file-like object open for reading bytes, or bytes (AsyncSource has all kinds).
        If the connection fails, a path, bytes or a seekable file are sent again; they are stored once all the same
        (perhaps twice by an embedded gateway that was ended in between). `if_match` and `if_none_match` as for
        `Store.put`. Raises PreconditionFailed (nothing stored), BadInput (nothing stored),
        AccessDenied, StoreUnavailable (the same put may be tried again), SourceFailed, Corrupt (what was stored is not
        what was sent).
        """
        upload, precondition = Upload(source, progress), precondition_of(if_match, if_none_match)
        return await self._hold(requests.put(key, upload, metadata or {}, sha256, self._commit_seconds, precondition))

    async def put_many(
        self,
        items: AsyncItems,
        *,
        progress: Progress | None = None,
    ) -> AsyncIterator[PutResult]:
        """Store many blobs, each sent while earlier ones are committed. Yields results in order."""
        waiting: deque[AcceptedPut] = deque()
        async for key, source in each_async(items):
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

    # --- versions ----------------------------------------------------------------------------------------------------

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
        NotFound, RetentionActive (retention.min_age_seconds: none is deleted), AccessDenied,
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

        Until then it cannot be deleted. A retention is extended, never shortened. Sent again if the connection fails;
        a repeat changes nothing. Raises NotFound, BadInput (the time is earlier than the current retention),
        AccessDenied, TenantErased, StoreUnavailable.
        """
        return await self._hold(requests.retain(key, until, version, reason))

    async def list_deleted(self, prefix: str = "", *, broken: Callable[[Damage], None] | None = None) -> list[Deletion]:
        """Return the deleted, not yet collected versions of keys that start with `prefix`, by key."""
        return await self._hold(requests.list_deleted(prefix, broken))

    # --- the store as a whole ----------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Return sums over the store."""
        return await self._hold(requests.stats())

    async def gc_state(self) -> dict[str, Any]:
        """Return the result of the last GC run, and whether GC is paused. Raises AccessDenied."""
        return await self._hold(requests.gc_state())

    async def change_gc(self, action: str) -> dict[str, Any]:
        """Request a GC run (`run`), `pause` GC or `resume` it; return the state.

        After `run` it is the state before the run, which is done later: poll until `last.ended` changes. Raises
        BadInput, AccessDenied, GcPaused.
        """
        return await self._hold(requests.change_gc(action))

    async def config(self) -> dict[str, Any]:
        """Return the settings that the services run with. Raises AccessDenied."""
        return await self._hold(requests.config())

    async def change_config(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Change settings of the running services; return all settings.

        Example: {"features": {"algorithm": "odess"}}. Raises BadInput (nothing is changed), AccessDenied.
        """
        return await self._hold(requests.change_config(changes))

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Return the newest dead letters that are not dropped, newest first. Raises AccessDenied."""
        return await self._hold(requests.dead_letters())

    async def dead_letter(self, name: str, value_bytes_max: int) -> dict[str, Any]:
        """Return a dead letter with its headers and the first bytes of its value.

        Raises NotFound, AccessDenied.
        """
        return await self._hold(requests.dead_letter(name, value_bytes_max))

    async def settle_dead_letters(self, action: str, names: Sequence[str]) -> list[str]:
        """`replay` or `drop` dead letters, each once; return their names.

        Raises BadInput, NotFound, AccessDenied.
        """
        return await self._hold(requests.settle_dead_letters(action, names))

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
