# size: one rule, used by settings, services and commands
"""Validate names of tenants.

Names appear in logs, metrics, listings and problems, one a line, so characters that break a line or are invisible are
refused.

Invariant: the same rule applies in settings, tokens, topics, records and commands.
"""

from __future__ import annotations

from nearkin_shared.errors import TenantCollision
from nearkin_shared.limits import TENANT_BYTES_MAX


def tenant_problem(tenant: str) -> str | None:
    """Return what is wrong with a tenant's name, or None if it is valid."""
    size_bytes = len(tenant.encode(errors="replace"))
    if 1 <= size_bytes <= TENANT_BYTES_MAX and tenant.isprintable():
        return None
    return f"want 1 to {TENANT_BYTES_MAX} bytes of UTF-8 that can be printed, without line ends and control characters"


def collision_of(tenant: str, where: str) -> TenantCollision:
    """Return the error for a tenant whose hash belongs to another name in `where`.

    The text does not contain the other name.
    """
    return TenantCollision(
        f"tenant {tenant!r}: another name has the same hash in {where}, so their data could not be kept apart: "
        "choose another name for this tenant"
    )
