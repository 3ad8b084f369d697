"""Status and requests of GC runs, shared by the fleet.

Invariant: status information only; its loss costs one GC run.

    gc        result of the last GC run, JSON, read by every maintenance worker to keep one interval
    gc-ask    exists while a GC run is requested; each request writes another value
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from nearkin_shared.fleet.shared_state import SharedState

_STATUS, _REQUEST = "gc", "gc-ask"


class GcStatusStore:
    """Status of GC runs between maintenance workers and gateways.

    Raises: StoreUnavailable, in all calls.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def last(self) -> dict[str, Any] | None:
        """Return the status of the last GC run of any worker, or None."""
        status = self._state.get(_STATUS)
        return None if status is None else dict(json.loads(status))

    def state(self) -> object:
        """Return a token that changes when a GC run has ended or failed.

        Until then the run may have written.
        """
        return self._state.get(_STATUS)

    def record_run(self, status: dict[str, Any], request: bytes | None) -> None:
        """Record the result of a GC run and remove the request that it fulfilled.

        A request made after `request` was read stays: this run may have missed a deletion made while it was active.
        """
        self._state.put(_STATUS, json.dumps(status).encode())
        if request is not None:
            self._state.remove(_REQUEST, request)

    def record_failure(self, failed_at: float, failure: str) -> None:
        """Record that a GC run failed. It stays due, and requested if it was."""
        last = {name: value for name, value in (self.last() or {}).items() if name != "failure"}
        self._state.put(_STATUS, json.dumps({**last, "failed_at": failed_at, "failure": failure}).encode())

    def request_run(self) -> None:
        """Request a GC run: the first worker that reads the request runs one, due or not."""
        self._state.put(_REQUEST, secrets.token_bytes(8))

    @property
    def requested_run(self) -> bytes | None:
        """Return the token of the pending request, or None."""
        return self._state.get(_REQUEST)
