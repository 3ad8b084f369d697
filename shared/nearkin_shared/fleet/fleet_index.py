# size: the interface by which services use the index of a fleet, whichever it is
"""Interface of an index that a fleet shares.

Invariant: services use the index by this interface alone; the backend is chosen where it is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from nearkin_shared.fleet.shared_state import SharedState
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.index.protocols import Index, SupportsCollection, SupportsGenerations, SupportsReports


class FleetIndex(Index, SupportsCollection, SupportsGenerations, SupportsReports, Protocol):
    """Index of all tenants, with the shared state. Thread-safe."""

    @property
    def state(self) -> SharedState:
        """Return the state that is kept on the same server."""

    @property
    def fence_scope(self) -> str:
        """Return the scope in which numbers of leases grow.

        Those of another scope may repeat.
        """

    def for_domain(self, domain: bytes) -> FleetIndex:
        """Return the index seen from another domain.

        It shares the connections: close only one of them.
        """

    def check(self) -> bool:
        """Ask its server whether the index may lack entries. Raises StoreUnavailable."""

    @property
    def has_catalog(self) -> bool:
        """Return whether the catalog is complete, even if containers are missing in the index."""

    def catalog_after(
        self, tenant: str, prefix: str, key: str, version: int | None, count: int = ...
    ) -> Iterator[CatalogEntry]:
        """Yield the entries of `catalog` after `key`; with `version`, after that version of it."""
