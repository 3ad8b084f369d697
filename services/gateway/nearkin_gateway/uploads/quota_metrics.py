"""Keep the metrics of quotas: used bytes, limits, refusals.

Invariant (I10): a tenant has series only while it has the quota and uploads; `remove` ends them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from nearkin_shared.observability import metrics

IDLE_SECONDS = 3600.0
"""Series of a tenant that uploads no more end after this long: nothing renews them, and an alert would stay."""


class QuotaMetrics:
    """The series of one gateway's tenants; for one event loop."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        """The quotas of each tenant that have series."""
        self._renewed: dict[str, float] = {}
        """When the tenant last uploaded, in seconds of the monotonic clock."""

    def show(self, tenant: str, quota: str, value: int, limit: int) -> None:
        """Set the used bytes and the limit."""
        self._renew(tenant, quota)
        metrics.QUOTA_BYTES.labels(tenant, quota).set(limit)
        metrics.QUOTA_USED.labels(tenant, quota).set(value)

    def count_refusal(self, tenant: str, quota: str) -> None:
        """Count an upload that a quota refused."""
        self._renew(tenant, quota)
        metrics.QUOTA_REFUSED.labels(tenant, quota).inc()

    def remove(self, tenant: str, kept: Collection[str] = ()) -> None:
        """Remove the series of a tenant, except those of the quotas `kept`."""
        names = self._names.get(tenant, set())
        for name in names.difference(kept):
            names.discard(name)
            for metric in (metrics.QUOTA_BYTES, metrics.QUOTA_USED, metrics.QUOTA_REFUSED):
                with suppress(KeyError):  # a rate has no bytes, and a quota may have refused nothing
                    metric.remove(tenant, name)
        if not names:
            self._names.pop(tenant, None)
            self._renewed.pop(tenant, None)

    def tenants(self) -> list[str]:
        """Return the tenants that have series."""
        return list(self._names)

    def is_idle(self, tenant: str) -> bool:
        """Return whether the series of a tenant are old."""
        return time.monotonic() - self._renewed.get(tenant, 0.0) > IDLE_SECONDS

    def _renew(self, tenant: str, quota: str) -> None:
        self._names.setdefault(tenant, set()).add(quota)
        self._renewed[tenant] = time.monotonic()
