# size: one class, with its constants
"""Know how busy each tenant keeps a worker.

Invariant: counts fade by each step, so they describe the last few.
"""

from __future__ import annotations

from collections import Counter

FADING = 0.75
"""Share of the counts that a step keeps of those before it: half of them after two steps."""
FORGOTTEN = 0.01
MINOR_SHARE = 0.25


class TenantActivity:
    """Messages of each tenant in the last steps."""

    def __init__(self) -> None:
        self._recent: dict[str, float] = {}
        self._step: Counter[str] = Counter()

    def add(self, tenant: str) -> None:
        """Count a message of the step in work."""
        self._step[tenant] += 1

    def end_step(self) -> Counter[str]:
        """End a step, which may have had no messages; return its messages by tenant."""
        ended, self._step = self._step, Counter()
        faded = {tenant: count * FADING for tenant, count in self._recent.items() if count > FORGOTTEN}
        self._recent = {tenant: faded.get(tenant, 0.0) + ended[tenant] for tenant in {*faded, *ended}}
        return ended

    def is_minor(self, tenant: str) -> bool:
        """Return whether the last steps were for other tenants, but for MINOR_SHARE."""
        return self._recent.get(tenant, 0.0) <= MINOR_SHARE * sum(self._recent.values())
