"""Know the logical and stored bytes of tenants with quotas.

    sums of the index, read every USAGE_SECONDS  +  outcomes of uploads since that reading began

Invariant (I10): no committed version is left out. One that was committed while the index was read may be counted twice,
until the next reading. While the index is rebuilt no sum becomes smaller, and a tenant that was not read before is an
error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nearkin_shared.errors import NearkinError, NotFound
from nearkin_shared.results import Stats
from nearkin_shared.validation import is_reserved_key

USAGE_SECONDS = 60.0
"""Age of sums that a reading replaces: deletions and GC runs are seen by then."""
REFUSED_SECONDS = 2.0
"""The same before an upload is refused: a tenant that has just deleted something should not wait."""
COST_SHARE = 20
"""A reading of a tenant with 200,000 versions takes 3 s: at most this part of the time is spent on it."""
ReadSums = Callable[[str, bool], Awaitable[tuple[Stats, bool]]]
"""(tenant, whether they have to be whole) -> sums with every version committed before the call, if they are whole."""
_log = logging.getLogger("nearkin.gateway")


@dataclass(slots=True)
class TenantUsage:
    """The bytes of one tenant as known now."""

    logical_bytes: int = 0
    """Of visible versions."""
    stored_bytes: int = 0
    fresh_logical_bytes: int = 0
    """Committed since the last reading began."""
    fresh_stored_bytes: int = 0
    checkpoint_bytes: int = 0
    """Of checkpoints, which are no versions: they count while checkpoints are stored, not in what they end as."""
    fresh_checkpoint_bytes: int = 0
    read_at: float = -math.inf
    took_seconds: float = 0.0
    reading: asyncio.Task[None] | None = None

    @property
    def stored_share(self) -> float:
        """Return the stored bytes to expect for a logical byte: the mean, at most 1."""
        return min(1.0, self.stored_bytes / self.logical_bytes) if self.logical_bytes else 1.0


class TenantUsages:
    """The usage of each tenant that was asked for; for one event loop."""

    def __init__(self, read: ReadSums) -> None:
        self._read = read
        self._tenants: dict[str, TenantUsage] = {}

    def known(self, tenant: str) -> TenantUsage | None:
        """Return what is known of a tenant, if it was read."""
        usage = self._tenants.get(tenant)
        return usage if usage is not None and usage.read_at > -math.inf else None

    async def current(self, tenant: str, *, refuses: bool = False) -> TenantUsage:
        """Return the usage of a tenant.

        The first call waits for a reading, and so does one that `refuses` an upload by older sums than REFUSED_SECONDS.
        Raises StoreUnavailable.
        """
        usage = self._tenants.setdefault(tenant, TenantUsage())
        age_seconds = asyncio.get_running_loop().time() - usage.read_at
        wanted_seconds = REFUSED_SECONDS if refuses else USAGE_SECONDS
        if age_seconds >= max(wanted_seconds, usage.took_seconds * COST_SHARE) and usage.reading is None:
            usage.reading = asyncio.create_task(self._refresh(tenant, usage))
        if usage.reading is not None and (refuses or usage.read_at == -math.inf):
            await asyncio.shield(usage.reading)
        return usage

    def forget(self, tenant: str) -> None:
        """Drop what is known of a tenant: the next call of `current` reads it again."""
        self._tenants.pop(tenant, None)

    def tenants(self) -> list[str]:
        """Return the tenants that were asked for."""
        return list(self._tenants)

    def on_committed(self, event: dict[str, Any]) -> None:
        """Count a committed version by its event."""
        usage = self._tenants.get(str(event["tenant"]))
        ledger = event.get("ledger")
        if usage is None or not isinstance(ledger, dict):
            return
        of_checkpoint = is_reserved_key(str(event.get("key", "")))
        for counted in ("logical_bytes", "stored_bytes"):
            value = ledger.get(counted)
            name = "checkpoint_bytes" if of_checkpoint and counted == "logical_bytes" else counted
            if type(value) is int and value > 0:
                setattr(usage, name, getattr(usage, name) + value)
                setattr(usage, f"fresh_{name}", getattr(usage, f"fresh_{name}") + value)

    async def _refresh(self, tenant: str, usage: TenantUsage) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        usage.fresh_logical_bytes = usage.fresh_stored_bytes = usage.fresh_checkpoint_bytes = 0
        try:
            stats, is_whole = await self._read(tenant, usage.read_at == -math.inf)
        except NotFound:  # an embedded gateway stores for its own tenant alone
            usage.read_at = loop.time()
        except NearkinError as err:
            if usage.read_at == -math.inf:
                raise
            _log.warning("sums of a tenant with quotas were not read: %s", err)
        else:
            logical_bytes = stats.ledger.logical_bytes - stats.deleted_bytes + usage.fresh_logical_bytes
            stored_bytes = stats.ledger.stored_bytes + usage.fresh_stored_bytes
            checkpoint_bytes = stats.checkpoint_bytes + usage.fresh_checkpoint_bytes
            usage.checkpoint_bytes = checkpoint_bytes if is_whole else max(checkpoint_bytes, usage.checkpoint_bytes)
            usage.logical_bytes = logical_bytes if is_whole else max(logical_bytes, usage.logical_bytes)
            usage.stored_bytes = stored_bytes if is_whole else max(stored_bytes, usage.stored_bytes)
            usage.read_at = loop.time()
        finally:
            usage.took_seconds = loop.time() - began
            usage.reading = None
