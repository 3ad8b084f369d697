"""Limits in one process. Invariant: whoever is over a limit is told so at once; nobody waits in a queue without end."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from nearkin_gateway.problems import RETRY_SECONDS, Problem

CALLERS_MAX = 10_000
"""Callers whose rate is remembered; the one not seen for longest is forgotten, which is in its favour."""


class Slots:
    """So many at a time; one more is answered 503."""

    def __init__(self, name: str, slots_max: int) -> None:
        self._name, self._max = name, slots_max
        self.taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot. Raises Problem."""
        if self.taken >= self._max:
            raise Problem(
                503,
                "busy",
                f"{self._max} {self._name} are running, which is the most; try again",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


class Rates:
    """A token bucket for each caller: `per_second` requests, in bursts of as many."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count a request. Raises Problem 429."""
        if not self._per_second:
            return
        now = time.monotonic()
        left, since = self._buckets.pop(caller, (float(self._per_second), now))
        left = min(float(self._per_second), left + (now - since) * self._per_second)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if len(self._buckets) > CALLERS_MAX:
            self._buckets.popitem(last=False)
        if not allowed:
            raise Problem(
                429,
                "too-many-requests",
                f"at most {self._per_second} requests a second; slow down",
                headers={"Retry-After": "1"},
            )


class Budget:
    """Bytes that may be on their way at once; who wants more waits, first come first served."""

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.used_bytes = 0

    async def take(self, count_bytes: int) -> None:
        """Wait until `count_bytes` fit; more than the whole budget is let through alone."""
        if not self._waiting and self._fits(count_bytes):
            self.used_bytes += count_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, count_bytes)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count_bytes)  # it was our turn already
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def give(self, count_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= count_bytes
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, wanted_bytes = self._waiting.popleft()
            if not turn.done():
                self.used_bytes += wanted_bytes
                turn.set_result(None)

    def _fits(self, count_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + count_bytes <= self._max
