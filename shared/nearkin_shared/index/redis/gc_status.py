"""Status and requests of GC runs, shared by the fleet through Redis.

Invariant: status information only; its loss costs one GC run.

    {prefix}:{m}:gc        result of the last GC run, JSON, read by every maintenance worker to keep one interval
    {prefix}:{m}:gc-ask    exists while a GC run is requested; each request writes another value
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.redis_index import RedisIndex


class GcStatusStore:
    """Status of GC runs between maintenance workers and gateways.

    Raises: StoreUnavailable, in all calls.
    """

    def __init__(self, index: RedisIndex) -> None:
        self._server = index.server
        self._status_key = f"{index.prefix}:{{m}}:gc"
        self._request_key = f"{index.prefix}:{{m}}:gc-ask"

    def last(self) -> dict[str, Any] | None:
        """Return the status of the last GC run of any worker, or None."""
        status = self._server.one(("GET", self._status_key))
        return None if status is None else dict(json.loads(status))

    def state(self) -> object:
        """Return a token that changes when a GC run has ended or failed.

        Until then the run may have written.
        """
        return self._server.one(("GET", self._status_key))

    def record_run(self, status: dict[str, Any], request: bytes | None) -> None:
        """Record the result of a GC run and remove the request that it fulfilled.

        A request made after `request` was read stays: this run may have missed a deletion made while it was active.
        """
        self._server.one(("SET", self._status_key, json.dumps(status)))
        if request is not None:
            self._server.one(RedisServer.call("release", [self._request_key], request))

    def record_failure(self, failed_at: float, failure: str) -> None:
        """Record that a GC run failed. It stays due, and requested if it was."""
        last = {name: value for name, value in (self.last() or {}).items() if name != "failure"}
        self._server.run([("SET", self._status_key, json.dumps({**last, "failed_at": failed_at, "failure": failure}))])

    def request_run(self) -> None:
        """Request a GC run: the first worker that reads the request runs one, due or not."""
        self._server.one(("SET", self._request_key, secrets.token_bytes(8)))

    @property
    def requested_run(self) -> bytes | None:
        """Return the token of the pending request, or None."""
        found: bytes | None = self._server.one(("GET", self._request_key))
        return found
