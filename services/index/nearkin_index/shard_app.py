"""HTTP application of an index shard.

    POST /v1/CALL   one call of `nearkin_shared.index.shards.shard_messages`; those of `state_messages` are answered by
                    the first shard alone, also while its index is not complete
    GET  /livez     200 while the process works        GET /readyz   200 once the index is complete

    400 request refused   401 token   404 no such call   409 other shard or store   413 too large   503 not ready

Invariant: no call is answered before the index has all entries of the store (I5), nor after it was found damaged.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nearkin_index.shard_index import ShardIndex
from nearkin_index.state_file import StateFile
from nearkin_shared.errors import BadInput, IndexDamaged, NearkinError, PermanentError
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.index.shards import shard_messages as messages
from nearkin_shared.index.shards.shard_messages import BODY_BYTES_MAX, SHARD_HEADER, numbers_of
from nearkin_shared.index.shards.state_messages import STATE_REQUESTS

_log = logging.getLogger("nearkin.index")


Calls = Mapping[str, Callable[[Any], object]]


def _run_call(calls: Calls, call: str, body: bytes | bytearray) -> bytes:
    """Return the answer to a call. Raises NearkinError."""
    answer = calls[call](messages.decode_request(call, body))
    return messages.encode(answer) if call in messages.ANSWERS else b""


class StateCalls:
    """Calls of the shared state."""

    def __init__(self, state: StateFile) -> None:
        self._calls: Calls = {
            "take_lease": lambda request: state.take_lease(request.token, request.seconds),
            "renew_lease": lambda request: state.renew_lease(request.holder, request.seconds),
            "release_lease": lambda request: state.release_lease(request.holder),
            "clock": lambda _: state.clock(),
            "get_value": lambda request: state.get(request.name),
            "put_value": lambda request: state.put(request.name, request.value, request.seconds),
            "put_absent": lambda request: state.put_absent(request.name, request.value, request.seconds),
            "remove_value": lambda request: state.remove(request.name, request.value),
        }

    def run(self, call: str, body: bytes | bytearray) -> bytes:
        """Return the answer to a call. Raises NearkinError."""
        return _run_call(self._calls, call, body)


class ShardCalls:
    """Calls of one shard's index; writes wait for each other."""

    def __init__(self, index: ShardIndex, container_ids: Callable[[], Collection[int]]) -> None:
        """`container_ids`: lists the containers of the store."""
        self._index = index
        self._container_ids = container_ids
        self._writing = threading.Lock()
        self._calls: Calls = {
            name: getattr(self, name) for name in messages.REQUESTS.keys() - STATE_REQUESTS.keys() - {"ready"}
        }

    def run(self, call: str, body: bytes | bytearray) -> bytes:
        """Return the answer to a call. Raises NearkinError."""
        return _run_call(self._calls, call, body)

    def locate(self, request: messages.Lookup) -> messages.Located:
        """Look up keys."""
        return messages.Located.of(*self._index.at(request.table, request.rows))

    def publish(self, request: messages.Publication) -> None:
        """Add entries of containers."""
        with self._writing:
            self._index.add_parts(request.parts)

    def withdraw(self, request: messages.Withdrawal) -> None:
        """Withdraw entries of containers."""
        chunks = {one: None if data is None else numbers_of(data) for one, data in request.chunks.items()}
        segments = {one: numbers_of(data) for one, data in request.segments.items()}
        with self._writing:
            self._index.withdraw(chunks, segments, request.containers)

    def renew(self, request: ContainerSummary) -> None:
        """Replace the summary of a container."""
        with self._writing:
            self._index.renew(request)

    def commit(self, request: messages.Commits) -> None:
        """Add versions."""
        with self._writing:
            self._index.add_entries(request.versions)

    def mark(self, request: messages.Marks) -> None:
        """Record marks of versions."""
        with self._writing:
            self._index.mark_many(request.marks)

    def collect(self, request: messages.Collection) -> None:
        """Remove versions."""
        with self._writing:
            self._index.collect_many(request.versions)

    def versions(self, request: messages.Versions) -> list[int]:
        """Return the versions of a key."""
        return self._index.versions_of(request.tenant, request.key)

    def catalog(self, request: messages.CatalogPage) -> messages.Entries:
        """Return some versions."""
        found = self._index.catalog_after(request.tenant, request.prefix, request.key, request.version, request.count)
        return list(islice(found, request.count))

    def containers(self, request: messages.ContainerPage) -> messages.Summaries:
        """Return some summaries."""
        return self._index.summaries_after(request.after)

    def report(self, request: messages.MissingContainer) -> None:
        """Stop to rebuild the index if it lists a container that the store lacks.

        Raises: IndexDamaged.
        """
        container = request.container
        if container in self._index.container_ids() and container not in self._container_ids():
            raise IndexDamaged(f"container {container:016x}: the index lists it, and the store lacks it")

    def generation(self, request: messages.Generation) -> int:
        """Record a GC generation, and return the recorded one."""
        with self._writing:
            self._index.record_generation(request.at_least)
            return self._index.generation


class ShardApp:
    """State of a shard's application: without calls until its index is complete."""

    def __init__(self, position: str, token: str, on_damage: Callable[[], None], state: StateFile | None) -> None:
        """`state`: the fleet's shared state, of the first shard."""
        self._position, self._token, self._on_damage = position, token, on_damage
        self._state = None if state is None else StateCalls(state)
        self.calls: ShardCalls | None = None
        routes = [
            Route("/livez", self._live, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
            Route("/v1/{call}", self._answer, methods=["POST"]),
        ]
        self.app: Starlette = Starlette(routes=routes)

    async def _live(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        is_ready = self.calls is not None
        return PlainTextResponse("ok\n" if is_ready else "the index is being completed\n", 200 if is_ready else 503)

    async def _answer(self, request: Request) -> Response:
        call = request.path_params["call"]
        refused = self._refusal(request, call)
        if refused is not None:
            return refused
        body = await _bounded_body(request)
        if body is None:
            return PlainTextResponse(f"body: more than {BODY_BYTES_MAX} bytes; send fewer rows", 413)
        if call == "ready":
            return Response(messages.encode(self.calls is not None), media_type="application/msgpack")
        calls = self._state if call in STATE_REQUESTS else self.calls
        if calls is None:
            return PlainTextResponse("the index is being completed; try again", 503)
        return await run_in_threadpool(self._run, calls, call, body)

    def _refusal(self, request: Request, call: str) -> Response | None:
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return PlainTextResponse("token: missing or wrong; give the token of the shards", 401)
        if call not in messages.REQUESTS:
            return PlainTextResponse(f"call {call[:40]!r}: there is none", 404)
        if call in STATE_REQUESTS and self._state is None:
            return PlainTextResponse(f"call {call}: the first shard alone has the shared state", 404)
        position = request.headers.get(SHARD_HEADER, "")
        if position != self._position:
            return PlainTextResponse(
                f"{SHARD_HEADER} {position[:80]!r}: this is {self._position!r}; correct the URLs of the shards",
                409,
            )
        return None

    def _run(self, calls: ShardCalls | StateCalls, call: str, body: bytearray) -> Response:
        try:
            return Response(calls.run(call, body), media_type="application/msgpack")
        except IndexDamaged as err:
            _log.exception("%s: the shard stops, and rebuilds its index when it starts", call)
            self.calls = None
            self._on_damage()
            return PlainTextResponse(str(err), 503)
        except (BadInput, PermanentError) as err:
            return PlainTextResponse(str(err), 400)
        except NearkinError as err:
            return PlainTextResponse(str(err), 503)


async def _bounded_body(request: Request) -> bytearray | None:
    """Return the body, or None if it is too large."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
        return None
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            return None
    return body
