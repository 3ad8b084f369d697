# size: one wrapper of object stores
"""Count the bytes that a GC run frees.

|   encryption -> parity -> metered -> folder or S3

Invariant: every byte written or deleted through it is counted, with parity and the overhead of encryption.
"""

from __future__ import annotations

from nearkin_shared.errors import NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import Payload, SupportsReplace
from nearkin_shared.objectstore.delegating import DelegatingObjectStore


class MeteredObjectStore(DelegatingObjectStore):
    """An object store that counts the bytes written and deleted, for one writing thread."""

    freed_bytes = 0
    """Bytes deleted minus bytes written."""

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises AlreadyExists, StoreUnavailable."""
        super().put_new(name, *parts)
        self.freed_bytes -= sum(map(len, parts))

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error. Raises StoreUnavailable."""
        before_bytes = self._size_bytes(name)
        super().delete(name)
        self.freed_bytes += before_bytes

    def replace(self, name: str, data: Payload) -> None:
        """Replace a damaged object by its original bytes. Raises StoreUnavailable."""
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
