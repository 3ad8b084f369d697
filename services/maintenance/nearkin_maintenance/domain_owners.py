# size: gc, verify, optimize and repair use it
"""Map dedup domains to tenants.

container header: domain 16 bytes      manifest: tenant      domain_of(tenant) == domain

Invariant: the owner of a container follows from a version that names its tenant, never from a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from nearkin_shared.errors import PermanentError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.storage.manifests import ManifestStore

TENANTS_MAX = 1 << 16
"""Tenants held in memory, 10 MB; containers of any further ones count as ownerless."""
FINGERPRINTERS_MAX = 64
"""Fingerprinters held in memory: each has 4 KiB of keys."""


class DomainOwners:
    """Owners of dedup domains; reads the manifests only when it meets an unknown domain."""

    def __init__(
        self, fingerprinter: Callable[[str], Fingerprinter], known: Iterable[str], manifests: ManifestStore
    ) -> None:
        self._by_domain = {domain_of(tenant): tenant for tenant in known}
        self._manifests = manifests
        self._all_read = False
        self._fingerprinter = lru_cache(FINGERPRINTERS_MAX)(fingerprinter)

    def owner(self, domain: bytes) -> str | None:
        """Return the tenant of a domain, or None if no readable version has it.

        Raises: StoreUnavailable.
        """
        if domain not in self._by_domain and not self._all_read:
            self._read_all()
        return self._by_domain.get(domain)

    def fingerprinter(self, domain: bytes) -> Fingerprinter | None:
        """Return the fingerprinter of a domain, or None if its tenant is unknown.

        Raises: StoreUnavailable.
        """
        tenant = self.owner(domain)
        return None if tenant is None else self._fingerprinter(tenant)

    def _read_all(self) -> None:
        for name, _ in self._manifests.names():
            if len(self._by_domain) >= TENANTS_MAX:
                break
            try:
                tenant = self._manifests.read(name).tenant
            except PermanentError:  # damaged or just deleted: the callers that read manifests report it
                continue
            self._by_domain.setdefault(domain_of(tenant), tenant)
        self._all_read = True
