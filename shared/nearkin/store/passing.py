"""An object store over another. Invariant: it adds nothing; what a wrapper does not say is what the one below does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearkin.store.objects import ObjectStore, Payload


class PassingObjects:
    """Passes all on to `inner`; wrappers override what they change."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @property
    def far(self) -> bool:
        """Return whether reads of the store below take long."""
        return self.inner.far

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises AlreadyExists, StoreUnavailable."""
        self.inner.put_new(name, *parts)

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound, Corrupt or StoreUnavailable."""
        return self.inner.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order. Raises NotFound, Corrupt or StoreUnavailable."""
        return self.inner.get_ranges(name, starts, ends)

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""
        return self.inner.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order."""
        return self.inner.names(prefix)

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine. Raises StoreUnavailable."""
        self.inner.delete(name)
