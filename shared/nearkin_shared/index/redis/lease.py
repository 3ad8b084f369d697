"""A lease in Redis. Invariant: who works under it stops before it can be another's.

    free -> taken, with a number that grows -> renewed every third of its life -> let go, or over by itself

Its holder counts its own time from before it asked: what it holds in its own eyes, Redis holds longer.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from types import TracebackType

from nearkin_shared.errors import NearkinError, RetryableError
from nearkin_shared.index.redis.connection import Server
from nearkin_shared.index.redis.redis_index import RedisIndex
from nearkin_shared.utils.failpoints import failpoint

LEASE_SECONDS = 30.0
RENEWALS_A_LEASE = 3


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, as Redis' does."""


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class LeaseLost(RetryableError):
    """The lease is no longer held: another may work, so nothing more is done."""


class Lease:
    """The one lease of an index's maintenance workers: who rebuilds it, or collects garbage, holds it."""

    def __init__(self, index: RedisIndex, lease_seconds: float = LEASE_SECONDS) -> None:
        self._index = index
        self._seconds = lease_seconds
        self._keys = [f"{index.prefix}:{{m}}:lease", f"{index.prefix}:{{m}}:fence"]
        self._holder: bytes | None = None
        self._until = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Take it if it is free; it is then renewed until `release`."""
        asked = _now()
        milliseconds = int(self._seconds * 1000)
        holder = self._index.server.one(Server.call("take", self._keys, secrets.token_hex(8), milliseconds))
        if holder is None:
            return False
        self._holder, self._until = holder, asked + self._seconds
        self._over.clear()
        self._thread = threading.Thread(target=self._renew, name="nearkin-lease", daemon=True)
        self._thread.start()
        failpoint("lease.taken")
        return True

    def check(self) -> None:
        """Raise LeaseLost unless it is held."""
        if _now() >= self._until:
            raise LeaseLost(
                "the maintenance service's lease has passed to another, or Redis does not answer: the round ends here"
            )

    def skew_seconds(self) -> float:
        """Return how far this machine's clock is ahead of the server's that has the lease; negative: behind."""
        asked = time.time()
        seconds, microseconds = map(int, self._index.server.one(Server.call("now", self._keys[:1])))
        return (asked + time.time()) / 2 - (seconds + microseconds / 1e6)

    def give_up(self) -> None:
        """Hold it no longer, whatever Redis says."""
        self._until = 0.0

    def release(self) -> None:
        """Let go of it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._until = 0.0
        if self._holder is not None:
            with suppress(NearkinError):  # it ends by itself
                self._index.server.one(Server.call("release", self._keys[:1], self._holder))
            self._holder = None
            failpoint("lease.released")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / RENEWALS_A_LEASE):
            asked = _now()
            with suppress(NearkinError):  # what is not renewed ends
                renew = Server.call("renew", self._keys[:1], self._holder, int(self._seconds * 1000))
                if not self._index.server.one(renew):
                    self._until = 0.0
                    return
                if self._until:
                    self._until = asked + self._seconds
                failpoint("lease.renewed")
