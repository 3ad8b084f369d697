"""A fence before a store. Invariant: nothing is written or removed once the check fails."""

from __future__ import annotations

from collections.abc import Callable

from nearkin_shared.objectstore.base import ObjectStore, Payload
from nearkin_shared.objectstore.delegating import DelegatingObjectStore
from nearkin_shared.objectstore.parity import SupportsReconstruction
from nearkin_shared.utils.failpoints import failpoint


class FencedObjectStore(DelegatingObjectStore):
    """An ObjectStore that asks, before each effect, whether it still may."""

    def __init__(self, objects: ObjectStore, check: Callable[[], None]) -> None:
        """`check` raises where it may not."""
        super().__init__(objects)
        self._check = check

    def _may(self) -> None:
        self._check()
        failpoint("fence.passed")

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises what the check raises, AlreadyExists, StoreUnavailable."""
        self._may()
        super().put_new(name, *parts)

    def delete(self, name: str) -> None:
        """Remove an object. Raises what the check raises, StoreUnavailable."""
        self._may()
        super().delete(name)

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as it was written, None where the store below does not know. Raises StoreUnavailable."""
        return self.inner.reconstruct(name) if isinstance(self.inner, SupportsReconstruction) else None
