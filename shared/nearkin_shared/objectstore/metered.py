"""What a round makes less. Invariant: every byte that is put and removed through it counts, seals and parity too.

seal -> parity -> counted -> folder or S3
"""

from __future__ import annotations

from nearkin_shared.errors import NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import Payload, SupportsReplace
from nearkin_shared.objectstore.delegating import DelegatingObjectStore


class MeteredObjectStore(DelegatingObjectStore):
    """An object store that counts what goes through it. For one thread that writes."""

    freed_bytes = 0
    """What was removed, less what was put."""

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises AlreadyExists, StoreUnavailable."""
        super().put_new(name, *parts)
        self.freed_bytes -= sum(map(len, parts))

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine. Raises StoreUnavailable."""
        before_bytes = self._size_bytes(name)
        super().delete(name)
        self.freed_bytes += before_bytes

    def replace(self, name: str, data: Payload) -> None:
        """Put an object's own bytes in the place of what became of them. Raises StoreUnavailable."""
        if not isinstance(self.inner, SupportsReplace):
            raise StoreUnavailable(f"{name}: this object store cannot replace an object")
        before_bytes = self._size_bytes(name)
        self.inner.replace(name, data)
        self.freed_bytes += before_bytes - len(data)

    def _size_bytes(self, name: str) -> int:
        try:
            return self.size_bytes(name)
        except NotFound:
            return 0
