"""Calls for the shared state of a fleet, which the first shard keeps, as MessagePack.

    take_lease renew_lease release_lease clock    get_value put_value put_absent remove_value

Invariant: names, values and times have a bound.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from nearkin_shared.limits import MIB

VALUE_BYTES_MAX = MIB
SECONDS_MAX = 366 * 24 * 3600
LEASE_SECONDS_MAX = 3600.0

ValueName = Annotated[str, Meta(min_length=1, max_length=200)]
Value = Annotated[bytes, Meta(max_length=VALUE_BYTES_MAX)]
Holder = Annotated[bytes, Meta(max_length=100)]
LeaseSeconds = Annotated[float, Meta(gt=0, le=LEASE_SECONDS_MAX)]


class LeaseRequest(Struct, frozen=True):
    """Asks for the lease."""

    token: Annotated[str, Meta(min_length=1, max_length=64)]
    seconds: LeaseSeconds


class LeaseRenewal(Struct, frozen=True):
    """Renews the lease of a holder."""

    holder: Holder
    seconds: LeaseSeconds


class LeaseRelease(Struct, frozen=True):
    """Releases the lease of a holder."""

    holder: Holder


class ClockRequest(Struct, frozen=True):
    """Asks for the server's clock."""


class ValueRequest(Struct, frozen=True):
    """Asks for a value."""

    name: ValueName


class ValueWrite(Struct, frozen=True):
    """Writes a value, None seconds for ever."""

    name: ValueName
    value: Value
    seconds: Annotated[int, Meta(ge=1, le=SECONDS_MAX)] | None = None


class ValueRemoval(Struct, frozen=True):
    """Removes a value if it is this one."""

    name: ValueName
    value: Value


STATE_REQUESTS: dict[str, type[Any]] = {
    "take_lease": LeaseRequest,
    "renew_lease": LeaseRenewal,
    "release_lease": LeaseRelease,
    "clock": ClockRequest,
    "get_value": ValueRequest,
    "put_value": ValueWrite,
    "put_absent": ValueWrite,
    "remove_value": ValueRemoval,
}
STATE_ANSWERS: dict[str, Any] = {
    "take_lease": bytes | None,
    "renew_lease": bool,
    "clock": float,
    "get_value": bytes | None,
    "put_absent": bytes | None,
}
"""Answers that are not empty."""
