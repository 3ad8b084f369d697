"""State that a fleet shares, as the clients of the first index shard see it.

Invariant: every call may be repeated after a lost reply.
"""

from __future__ import annotations

from nearkin_shared.index.shards import state_messages as messages
from nearkin_shared.index.shards.shard_connection import ShardConnection

STATE_TIMEOUT_SECONDS = 5.0
"""Timeout of one try: a lease is renewed every 10 s."""
SCOPE = "scope"
"""Name of the value that a new state file begins with; fences of another one may repeat."""


class ShardSharedState:
    """Lease and small values in the first index shard. Shared by threads."""

    def __init__(self, shard: ShardConnection) -> None:
        self._shard = shard

    def take_lease(self, token: str, seconds: float) -> bytes | None:
        """Take the lease if it is free; return its holder, else None."""
        holder: bytes | None = self._shard.call("take_lease", messages.LeaseRequest(token, seconds))
        return holder

    def renew_lease(self, holder: bytes, seconds: float) -> bool:
        """Renew the lease; return whether `holder` still had it."""
        return bool(self._shard.call("renew_lease", messages.LeaseRenewal(holder, seconds)))

    def release_lease(self, holder: bytes) -> None:
        """Release the lease unless another one has it."""
        self._shard.call("release_lease", messages.LeaseRelease(holder))

    def clock(self) -> float:
        """Return the server's time in seconds since 1970."""
        return float(self._shard.call("clock", messages.ClockRequest()))

    def get(self, name: str) -> bytes | None:
        """Return a value, or None."""
        found: bytes | None = self._shard.call("get_value", messages.ValueRequest(name))
        return found

    def put(self, name: str, value: bytes, seconds: int | None = None) -> None:
        """Write a value, for `seconds` or for ever."""
        self._shard.call("put_value", messages.ValueWrite(name, value, seconds))

    def put_absent(self, name: str, value: bytes, seconds: int | None = None) -> bytes | None:
        """Write a value unless there is one; return the one that is there."""
        found: bytes | None = self._shard.call("put_absent", messages.ValueWrite(name, value, seconds))
        return found

    def remove(self, name: str, value: bytes) -> None:
        """Remove a value if it is this one."""
        self._shard.call("remove_value", messages.ValueRemoval(name, value))

    def close(self) -> None:
        """Close the connections."""
        self._shard.close()
