"""Count the declared bytes of open resumable uploads, by tenant.

    created, begun or whole   its declared length counts, though no byte may have arrived
    handed over               it is counted among the uploads in flight instead (`UploadAdmission.admit`)
    committed, removed        no longer

A gateway learns from a sweep which uploads other gateways began or ended, so they count about a minute later.

Invariant: a tenant's sum is that of the lengths kept here; there are at most as many as open uploads (RESUMABLE_MAX).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping


class StagedBytes:
    """The lengths of open uploads by id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lengths: dict[str, tuple[str, int]] = {}
        """Tenant and declared bytes."""
        self._sums: Counter[str] = Counter()

    def of(self, tenant: str, without: Collection[str] = ()) -> int:
        """Return the declared bytes of a tenant's uploads, except those with the ids `without`."""
        with self._lock:
            left_out = (self._lengths.get(number, ("", 0)) for number in set(without))
            return self._sums[tenant] - sum(length_bytes for owner, length_bytes in left_out if owner == tenant)

    def add(self, number: str, tenant: str, length_bytes: int) -> None:
        """Count an upload; one that is counted already is unchanged."""
        with self._lock:
            self._add(number, tenant, length_bytes)

    def discard(self, number: str) -> None:
        """Stop counting an upload, if it was counted."""
        with self._lock:
            self._discard(number)

    def replace(self, held: Mapping[str, tuple[str, int]]) -> None:
        """Count these uploads and no others."""
        with self._lock:
            for number in self._lengths.keys() - held.keys():
                self._discard(number)
            for number, (tenant, length_bytes) in held.items():
                self._add(number, tenant, length_bytes)

    def _add(self, number: str, tenant: str, length_bytes: int) -> None:
        if number not in self._lengths:
            self._lengths[number] = tenant, length_bytes
            self._sums[tenant] += length_bytes

    def _discard(self, number: str) -> None:
        tenant, length_bytes = self._lengths.pop(number, ("", 0))
        self._sums[tenant] -= length_bytes
        if not self._sums[tenant]:
            del self._sums[tenant]
