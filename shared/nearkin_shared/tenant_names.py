"""Names of tenants. Invariant: one rule wherever a name comes in: settings, tokens, topics, records, commands.

They are shown in logs, metrics, listings and problems, one a line: what breaks a line, or cannot be seen, is no name.
"""

from __future__ import annotations

from nearkin_shared.errors import TenantCollision
from nearkin_shared.limits import TENANT_BYTES_MAX


def tenant_problem(tenant: str) -> str | None:
    """Return what a tenant's name should be, None where it is that."""
    size_bytes = len(tenant.encode(errors="replace"))
    if 1 <= size_bytes <= TENANT_BYTES_MAX and tenant.isprintable():
        return None
    return f"want 1 to {TENANT_BYTES_MAX} bytes of UTF-8 that can be printed, without line ends and control characters"


def collision_of(tenant: str, where: str) -> TenantCollision:
    """Return the error for a tenant whose hash belongs to another name `where`; it does not tell which name."""
    return TenantCollision(
        f"tenant {tenant!r}: another name has the same hash in {where}, so their data could not be kept apart: "
        "choose another name for this tenant"
    )
