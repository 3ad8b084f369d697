"""Limit requests in one process.

Invariant: beyond a limit a client is refused at once or waits briefly.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from nearkin_gateway.http.problems import RETRY_SECONDS, Problem
from nearkin_shared.utils.frozen import frozen

CALLERS_MAX = 10_000
"""Callers whose rate is remembered; the one not seen for longest is forgotten, which is in its favour."""
DEBT_SECONDS_MAX = 600.0
"""Debt that is remembered: with the slowest rate and all slots taken, uploads that end have read less beyond it."""
RATE_WINDOW_SECONDS = 10.0
"""Time over which a rate is reported."""


@frozen
class Holders:
    """The holder of a slot: its tenant, its token ("" without tokens), its peer address."""

    tenant: str
    token: str
    address: str


@frozen
class Shares:
    """Maximum shares of a limit for one tenant, one token and one peer address, each 0 to 1."""

    tenant: float = 1.0
    token: float = 1.0
    address: float = 1.0


class Holdings:
    """Slots by id, counted by holder.

    Invariant: no holder has more than its share of `places_max`.
    """

    def __init__(self, name: str, places_max: int, shares: Shares, state: str = "running") -> None:
        self._name, self._max, self._shares, self._state = name, places_max, shares, state
        self._held: dict[object, Holders] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def occupancy(self) -> float:
        """Return the share of all places that is taken."""
        return len(self._held) / self._max

    def check_room(self, holders: Holders, retry_seconds: int = RETRY_SECONDS) -> None:
        """Refuse one more slot. Raises Problem: 503 if all are taken, 429 beyond a share."""
        retry = {"Retry-After": str(retry_seconds)}
        if len(self._held) >= self._max:
            why = f"{self._max} {self._name} are {self._state}, which is the most; try again"
            raise Problem(503, "busy", why, headers=retry)
        for kind, name in _names(holders):
            most = max(1, math.ceil(getattr(self._shares, kind) * self._max))
            if self._counts[kind, name] >= most:
                why = f"{most} {self._name} of this {kind} are {self._state}, its share of {self._max}"
                remedy = " (gateway.address_share)" if kind == "address" else ""
                raise Problem(429, "share-exceeded", f"{why}{remedy}", headers=retry)

    def add(self, place: object, holders: Holders) -> None:
        """Count a slot; an id that is counted already is unchanged."""
        if place not in self._held:
            self._held[place] = holders
            self._counts.update(_names(holders))

    def discard(self, place: object) -> None:
        """Stop counting a slot, if it was counted."""
        holders = self._held.pop(place, None)
        for name in [] if holders is None else _names(holders):
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]

    def replace(self, held: Mapping[object, Holders]) -> None:
        """Count these slots and no others."""
        for place in self._held.keys() - held.keys():
            self.discard(place)
        for place, holders in held.items():
            self.add(place, holders)


class ConcurrencyLimit:
    """A limit of concurrent requests that also sets the minimum speed of a client.

    `rates`: minimum bytes a second while half of the slots are free, and while none is.
    """

    def __init__(
        self, name: str, slots_max: int, shares: Shares | None = None, rates: tuple[int, int] = (0, 0)
    ) -> None:
        self._held = Holdings(name, slots_max, shares or Shares())
        self._least, self._busy = rates[0], max(rates)

    @property
    def taken_count(self) -> int:
        """Return how many are taken."""
        return len(self._held)

    @property
    def occupancy(self) -> float:
        """Return the share of all slots that is taken."""
        return self._held.occupancy

    @property
    def least_bytes_per_second(self) -> float:
        """Return what a client must move now; it doubles in even steps between half full and full."""
        fullness = max(0.0, self._held.occupancy - 0.5) * 2
        return self._least * (self._busy / self._least) ** fullness if self._least else 0.0

    @contextmanager
    def one(self, holders: Holders) -> Iterator[None]:
        """Hold a slot. Raises Problem 503 or 429."""
        self._held.check_room(holders)
        place = object()
        self._held.add(place, holders)
        try:
            yield
        finally:
            self._held.discard(place)


def _names(holders: Holders) -> list[tuple[str, str]]:
    names = ("tenant", holders.tenant), ("token", holders.token), ("address", peer_group(holders.address))
    return [(kind, name) for kind, name in names if name]


def peer_group(address: str) -> str:
    """Return what addresses of one peer share: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class Rates:
    """A token bucket for each caller: `per_second` requests, in bursts of as many."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count a request. Raises Problem 429."""
        if not self.allows(caller):
            raise Problem(
                429,
                "too-many-requests",
                f"at most {self._per_second} requests a second; slow down",
                headers={"Retry-After": "1"},
            )

    def allows(self, caller: str) -> bool:
        """Count one more of a caller and return whether its rate allows it."""
        if not self._per_second:
            return True
        now = time.monotonic()
        left, since = self._buckets.pop(caller, (float(self._per_second), now))
        left = min(float(self._per_second), left + (now - since) * self._per_second)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if len(self._buckets) > CALLERS_MAX:
            self._buckets.popitem(last=False)
        return allowed


class ByteRates:
    """Bytes of each tenant beyond its rate: a debt that shrinks by the rate each second.

    Invariant (I10): no tenant owes more than DEBT_SECONDS_MAX, even after its rate was lowered.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _ByteRate] = OrderedDict()

    def add(self, tenant: str, count_bytes: int, limit: int) -> None:
        """Count bytes of a tenant that may take `limit` a second."""
        now = time.monotonic()
        held = self._tenants.pop(tenant, None) or _ByteRate(now, now)
        debt_bytes = max(0.0, held.debt_bytes - (now - held.at) * limit) + count_bytes
        held.debt_bytes = min(debt_bytes, DEBT_SECONDS_MAX * limit)
        if now - held.window_began >= RATE_WINDOW_SECONDS:
            held.earlier_rate = held.rate(now)
            held.window_began, held.window_bytes = now, 0
        held.window_bytes += count_bytes
        held.at = now
        self._tenants[tenant] = held
        if len(self._tenants) > CALLERS_MAX:
            self._tenants.popitem(last=False)

    def debt_seconds(self, tenant: str, limit: int) -> float:
        """Return how long the tenant has to wait until it is back at its rate."""
        held = self._tenants.get(tenant)
        if held is None:
            return 0.0
        return max(0.0, min(held.debt_bytes / limit, DEBT_SECONDS_MAX) - (time.monotonic() - held.at))

    def rate(self, tenant: str) -> int:
        """Return the bytes a second of a tenant, over about RATE_WINDOW_SECONDS."""
        held = self._tenants.get(tenant)
        return 0 if held is None else round(held.rate(time.monotonic()))


@dataclass(slots=True)
class _ByteRate:
    """The bytes of one tenant; times in seconds of the monotonic clock."""

    at: float
    window_began: float
    window_bytes: int = 0
    debt_bytes: float = 0.0
    earlier_rate: float = 0.0
    """Of the window before this one."""

    def rate(self, now: float) -> float:
        """Return the rate of this window, and of the earlier one while this is short."""
        seconds = now - self.window_began
        share = min(1.0, seconds / RATE_WINDOW_SECONDS)
        return self.window_bytes / max(seconds, RATE_WINDOW_SECONDS) + (1 - share) * self.earlier_rate


class Budget:
    """Bytes in flight at once; a request for more waits, first come first served."""

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
                self.give(count_bytes)  # the budget was granted already
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def has_room(self, count_bytes: int) -> bool:
        """Return whether `take` would not wait."""
        return not self._waiting and self._fits(count_bytes)

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
