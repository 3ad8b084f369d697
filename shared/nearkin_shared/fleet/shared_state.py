# size: the interface that each server of a fleet's state implements
"""Interface of the state that the processes of a fleet share besides the index.

    lease             held by the worker that runs GC or rebuilds the index; each has a number one higher than before
    lock:DIGEST       token of the process that changes a key; expires
    refused:BLOB      why a conditional put was refused; expires
    gc, gc-ask        result of the last GC run, and the token of a requested one
    store             id of the store to which the index belongs

Nothing else is kept there: live settings and outcomes are in Kafka, quotas and pauses in the object store, fairness
in each gateway.

Invariant: a value is read back until it expires, never later than `seconds` after the last write by the server's own
clock that only runs forwards; a lease has one holder at a time.
"""

from __future__ import annotations

from typing import Protocol


class SharedState(Protocol):
    """Lease and small values. Thread-safe.

    Each call may be repeated, and raises StoreUnavailable.
    """

    def take_lease(self, token: str, seconds: float) -> bytes | None:
        """Take the lease if it is free; return its holder `NUMBER:TOKEN`, else None."""

    def renew_lease(self, holder: bytes, seconds: float) -> bool:
        """Let the lease run for `seconds` from now on; return whether `holder` still had it."""

    def release_lease(self, holder: bytes) -> None:
        """Release the lease unless another one has it."""

    def clock(self) -> float:
        """Return the server's time in seconds since 1970, to compare clocks."""

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if there is none or it has expired."""

    def put(self, name: str, value: bytes, seconds: int | None = None) -> None:
        """Write a value, for `seconds` or for ever."""

    def put_absent(self, name: str, value: bytes, seconds: int | None = None) -> bytes | None:
        """Write a value unless there is one; return the one that is there, None if it expires.

        The caller has written it if it is the caller's own value.
        """

    def remove(self, name: str, value: bytes) -> None:
        """Remove a value if it is this one."""

    def close(self) -> None:
        """Close all connections."""
