"""Tenants of a store. Invariant: whose a container is follows from a version that names its tenant, never from a guess.

container header: domain 16 bytes      manifest: tenant      domain_of(tenant) == domain
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from nearkin_shared.errors import PermanentError
from nearkin_shared.fingerprints import Fingerprinter, domain_of
from nearkin_shared.storage.manifests import ManifestStore

TENANTS_MAX = 1 << 16
"""Tenants known by name, 10 MB of them; containers of any further ones count as no version's."""
FINGERPRINTERS_MAX = 64
"""Kept made: each holds 4 KiB of keys."""


class DomainOwners:
    """Who owns which dedup domain; asks the manifests only when it meets a domain that it does not know."""

    def __init__(
        self, fingerprinter: Callable[[str], Fingerprinter], known: Iterable[str], manifests: ManifestStore
    ) -> None:
        self._by_domain = {domain_of(tenant): tenant for tenant in known}
        self._manifests = manifests
        self._all_read = False
        self._fingerprinter = lru_cache(FINGERPRINTERS_MAX)(fingerprinter)

    def owner(self, domain: bytes) -> str | None:
        """Return the tenant of a domain, None where no readable version is of it. Raises StoreUnavailable."""
        if domain not in self._by_domain and not self._all_read:
            self._read_all()
        return self._by_domain.get(domain)

    def fingerprinter(self, domain: bytes) -> Fingerprinter | None:
        """Return what names the chunks of a domain, None where its tenant is not known. Raises StoreUnavailable."""
        tenant = self.owner(domain)
        return None if tenant is None else self._fingerprinter(tenant)

    def _read_all(self) -> None:
        for name, _ in self._manifests.names():
            if len(self._by_domain) >= TENANTS_MAX:
                break
            try:
                tenant = self._manifests.read(name).tenant
            except PermanentError:  # broken or just deleted: whoever reads the manifests themselves says so
                continue
            self._by_domain.setdefault(domain_of(tenant), tenant)
        self._all_read = True
