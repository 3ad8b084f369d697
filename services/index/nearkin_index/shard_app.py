"""HTTP application of an index shard.

    POST /v1/CALL   one call of `nearkin_shared.index.shards.shard_messages`; those of `state_messages` are answered by
                    the first shard alone, also while its index is not complete
    GET  /livez     200 while the process works        GET /readyz   200 once the index is complete

A lookup that memory answers is answered in the loop: a thread for each costs more than the lookup.

    400 request refused   401 token   404 no such call   409 other shard or store   413 too large   503 not ready

Invariant: no call is answered before the index has all entries of the store (I5), nor after it was found damaged.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nearkin_index.name_grants import NameGrants
from nearkin_index.shard_index import ShardIndex
from nearkin_index.state_file import StateFile
from nearkin_shared.errors import BadInput, IndexDamaged, NearkinError, PermanentError
from nearkin_shared.index.protocols import ContainerSummary
from nearkin_shared.index.shards import shard_messages as messages
from nearkin_shared.index.shards.shard_messages import BODY_BYTES_MAX, CARRIED_BYTES_MAX, SHARD_HEADER, numbers_of
from nearkin_shared.index.shards.state_messages import STATE_REQUESTS
from nearkin_shared.types import Bools, Locations

CALLS_PATH = "/v1/"
_POSITION = SHARD_HEADER.encode()
_log = logging.getLogger("nearkin.index")
Answer = TypeVar("Answer", bytes, bytes | None)

Calls = Mapping[str, Callable[[Any], object]]


def _run_call(calls: Calls, call: str, body: bytes) -> bytes:
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

    def run(self, call: str, body: bytes) -> bytes:
        """Return the answer to a call. Raises NearkinError."""
        return _run_call(self._calls, call, body)


class ShardCalls:
    """Calls of one shard's index; writes wait for each other."""

    def __init__(self, index: ShardIndex, container_ids: Callable[[], Collection[int]]) -> None:
        """`container_ids`: lists the containers of the store."""
        self._index = index
        self._container_ids = container_ids
        self._grants = NameGrants()
        self._writing = threading.Lock()
        self._calls: Calls = {
            name: getattr(self, name) for name in messages.REQUESTS.keys() - STATE_REQUESTS.keys() - {"ready"}
        }

    def run(self, call: str, body: bytes) -> bytes:
        """Return the answer to a call. Raises NearkinError."""
        return _run_call(self._calls, call, body)

    def run_at_once(self, call: str, body: bytes) -> bytes | None:
        """Return the answer to a lookup that need not wait for a disk or another call, else None.

        Raises: NearkinError.
        """
        request: messages.Lookup = messages.decode_request(call, body)
        grant = self._granted(request)
        found = self._index.at_once(request.table, request.rows)
        return None if found is None else messages.encode(self._located(request, grant, *found))

    def locate(self, request: messages.Lookup) -> messages.Located:
        """Look up keys."""
        grant = self._granted(request)
        return self._located(request, grant, *self._index.at(request.table, request.rows))

    def _granted(self, request: messages.Lookup) -> bytes:
        """Return the grant for an answer, before it is read; empty if it carries no names."""
        return self._grants.give() if request.carry_bytes and request.table != "features" else b""

    def _located(self, request: messages.Lookup, grant: bytes, locations: Locations, found: Bools) -> messages.Located:
        """Return an answer, with names of the last hit's container and of the next ones."""
        if not grant:
            return messages.Located.of(locations, found)
        hits = np.flatnonzero(found)
        rows = None
        if len(hits):
            last = int(locations.containers[hits[-1]])
            rows = self._index.carried(request.table, last, min(request.carry_bytes, CARRIED_BYTES_MAX))
        return messages.Located.of(locations, found, messages.Carried.of(grant, rows))

    def publish(self, request: messages.Publication) -> None:
        """Add entries of containers."""
        with self._writing:
            self._index.add_parts(request.parts)

    def withdraw(self, request: messages.Withdrawal) -> None:
        """Withdraw entries of containers; return when no client may find them among carried names."""
        chunks = {one: None if data is None else numbers_of(data) for one, data in request.chunks.items()}
        segments = {one: numbers_of(data) for one, data in request.segments.items()}
        with self._writing:
            self._index.withdraw(chunks, segments, request.containers)
        self._grants.end()

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


class _Refused(Exception):
    """Answer that refuses a request: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ShardApp:
    """ASGI application of a shard: without calls of the index until that is complete.

    Calls are answered without Starlette, whose requests and routes cost more than a lookup.
    """

    def __init__(self, position: str, token: str, on_damage: Callable[[], None], state: StateFile | None) -> None:
        """`state`: the fleet's shared state, of the first shard."""
        self._position, self._on_damage = position.encode(), on_damage
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._state = None if state is None else StateCalls(state)
        self.calls: ShardCalls | None = None
        routes = [Route("/livez", self._live, methods=["GET"]), Route("/readyz", self._ready, methods=["GET"])]
        self._probes = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(CALLS_PATH):
            await self._probes(scope, receive, send)
            return
        try:
            status, content = 200, await self._answer(scope, receive)
        except _Refused as err:
            status, content = err.status, str(err).encode()
        kind = b"application/msgpack" if status == 200 else b"text/plain; charset=utf-8"
        headers = [(b"content-length", b"%d" % len(content)), (b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _live(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        is_ready = self.calls is not None
        return PlainTextResponse("ok\n" if is_ready else "the index is being completed\n", 200 if is_ready else 503)

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        """Return the answer to a call. Raises _Refused."""
        call, headers = scope["path"][len(CALLS_PATH) :], dict(scope["headers"])
        self._check(call, headers)
        body = await _bounded_body(headers, receive)
        if call == "ready":
            return messages.encode(self.calls is not None)
        calls = self._state if call in STATE_REQUESTS else self.calls
        if calls is None:
            raise _Refused(503, "the index is being completed; try again")
        if isinstance(calls, ShardCalls) and call == "locate":
            answer = self._run(calls.run_at_once, call, body)
            if answer is not None:
                return answer
        return await run_in_threadpool(self._run, calls.run, call, body)

    def _check(self, call: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise _Refused for a wrong token, call or position."""
        given = headers.get(b"authorization", b"")
        if self._authorization and not hmac.compare_digest(given, self._authorization):
            raise _Refused(401, "token: missing or wrong; give the token of the shards")
        if call not in messages.REQUESTS:
            raise _Refused(404, f"call {call[:40]!r}: there is none")
        if call in STATE_REQUESTS and self._state is None:
            raise _Refused(404, f"call {call}: the first shard alone has the shared state")
        position = headers.get(_POSITION, b"")
        if position != self._position:
            this, other = self._position.decode(), position[:80].decode("latin-1")
            raise _Refused(409, f"{SHARD_HEADER} {other!r}: this is {this!r}; correct the URLs of the shards")

    def _run(self, run: Callable[[str, bytes], Answer], call: str, body: bytes) -> Answer:
        """Return the answer to a call. Raises _Refused."""
        try:
            return run(call, body)
        except IndexDamaged as err:
            _log.exception("%s: the shard stops, and rebuilds its index when it starts", call)
            self.calls = None
            self._on_damage()
            raise _Refused(503, str(err)) from err
        except (BadInput, PermanentError) as err:
            raise _Refused(400, str(err)) from err
        except NearkinError as err:
            raise _Refused(503, str(err)) from err


async def _bounded_body(headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
    """Return the body of a request. Raises _Refused, if it is too large."""
    refused = _Refused(413, f"body: more than {BODY_BYTES_MAX} bytes; send fewer rows")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
        raise refused
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, "body: the connection ended before it was complete")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_BYTES_MAX:
            raise refused
        if not message.get("more_body", False):
            return b"".join(parts)
