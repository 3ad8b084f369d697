"""A fence before a store. Invariant: nothing is written or removed once the check fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nearkin.store.objects import ObjectStore, Payload


class FencedObjects:
    """An ObjectStore that asks, before each effect, whether it still may."""

    def __init__(self, objects: ObjectStore, check: Callable[[], None]) -> None:
        """`check` raises where it may not."""
        self._objects = objects
        self._check = check

    @property
    def far(self) -> bool:
        """Return whether each read costs a trip."""
        return self._objects.far

    def put_new(self, name: str, data: Payload) -> None:
        """Write an object. Raises what the check raises, AlreadyExists, StoreUnavailable."""
        self._check()
        self._objects.put_new(name, data)

    def delete(self, name: str) -> None:
        """Remove an object. Raises what the check raises, StoreUnavailable."""
        self._check()
        self._objects.delete(name)

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound or StoreUnavailable."""
        return self._objects.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return the byte ranges [start, end) in order. Raises NotFound or StoreUnavailable."""
        return self._objects.get_ranges(name, starts, ends)

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""
        return self._objects.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order."""
        return self._objects.names(prefix)
