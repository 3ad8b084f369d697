"""State in Redis that the processes of a fleet share.

    {prefix}:{m}:lease   the holder; expires          {prefix}:{m}:fence   number of the last lease
    {prefix}:{m}:NAME    a value of that name

Invariant: all keys are in one slot of a Cluster, that of the index's epoch.
"""

from __future__ import annotations

from nearkin_shared.index.redis.connection import Command, RedisServer


class RedisSharedState:
    """Lease and small values in Redis. Shared by threads."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._server = server
        self._prefix = f"{prefix}:{{m}}"
        self._lease_keys = [self._key("lease"), self._key("fence")]

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def take_lease(self, token: str, seconds: float) -> bytes | None:
        """Take the lease if it is free; return its holder, else None."""
        holder: bytes | None = self._server.one(RedisServer.call("take", self._lease_keys, token, int(seconds * 1000)))
        return holder

    def renew_lease(self, holder: bytes, seconds: float) -> bool:
        """Renew the lease; return whether `holder` still had it."""
        return bool(self._server.one(RedisServer.call("renew", self._lease_keys[:1], holder, int(seconds * 1000))))

    def release_lease(self, holder: bytes) -> None:
        """Release the lease unless another one has it."""
        self._server.one(RedisServer.call("release", self._lease_keys[:1], holder))

    def clock(self) -> float:
        """Return the server's time in seconds since 1970."""
        seconds, microseconds = map(int, self._server.one(RedisServer.call("now", self._lease_keys[:1])))
        return seconds + microseconds / 1e6

    def get(self, name: str) -> bytes | None:
        """Return a value, or None."""
        found: bytes | None = self._server.one(("GET", self._key(name)))
        return found

    def put(self, name: str, value: bytes, seconds: int | None = None) -> None:
        """Write a value, for `seconds` or for ever."""
        self._server.one(("SET", self._key(name), value, *_expiry(seconds)))

    def put_absent(self, name: str, value: bytes, seconds: int | None = None) -> bytes | None:
        """Write a value unless there is one; return the one that is there."""
        key = self._key(name)
        commands: list[Command] = [("SET", key, value, "NX", *_expiry(seconds)), ("GET", key)]
        found: bytes | None = self._server.run(commands)[1]
        return found

    def remove(self, name: str, value: bytes) -> None:
        """Remove a value if it is this one."""
        self._server.one(RedisServer.call("release", [self._key(name)], value))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _expiry(seconds: int | None) -> tuple[object, ...]:
    return () if seconds is None else ("EX", seconds)
