# size: one wrapper of object stores
"""Check a fence before each change of an object store.

Invariant: nothing is written or deleted after the check fails.
"""

from __future__ import annotations

from collections.abc import Callable

from nearkin_shared.objectstore.base import ObjectStore, Payload
from nearkin_shared.objectstore.delegating import DelegatingObjectStore
from nearkin_shared.objectstore.parity import SupportsReconstruction
from nearkin_shared.utils.failpoints import failpoint


class FencedObjectStore(DelegatingObjectStore):
    """An object store that checks before each change whether it is permitted."""

    def __init__(self, objects: ObjectStore, check: Callable[[], None]) -> None:
        """`check` raises if changes are not permitted."""
        super().__init__(objects)
        self._check = check

    def _check_fence(self) -> None:
        self._check()
        failpoint("fence.passed")

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises the check's error, AlreadyExists, StoreUnavailable."""
        self._check_fence()
        super().put_new(name, *parts)

    def delete(self, name: str) -> None:
        """Delete an object. Raises the check's error, StoreUnavailable."""
        self._check_fence()
        super().delete(name)

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as written; None if the inner store cannot. Raises StoreUnavailable."""
        return self.inner.reconstruct(name) if isinstance(self.inner, SupportsReconstruction) else None
