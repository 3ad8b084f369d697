"""Delegate all calls of an object store to another one.

Invariant: a call that a wrapper does not override has the effect of the inner store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

from nearkin_shared.objectstore.base import ObjectStore, Payload, SupportsFileSizes, SupportsMissingFolders


class DelegatingObjectStore:
    """Delegates all calls to `inner`; wrappers override some."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def rewrap(self, wrap: Callable[[ObjectStore], ObjectStore]) -> Self:
        """Return a copy of this wrapper over `wrap` of the innermost store."""
        other = copy.copy(self)
        other.inner = rewrap_lowest(self.inner, wrap)
        return other

    def takes_bytes(self, name: str, object_bytes: int) -> int:
        """Return the stored size of a new object, with the overhead of all wrappers."""
        return takes_bytes(self.inner, name, object_bytes)

    def clear_bytes(self, name: str, stored_bytes: int) -> int:
        """Return the plaintext size of a stored object; negative if it is truncated."""
        return clear_bytes(self.inner, name, stored_bytes)

    @property
    def record_key(self) -> bytes | None:
        """The key that authenticates records; None if they are encrypted or have no MAC."""
        return record_key_of(self.inner)

    @property
    def far(self) -> bool:
        """Whether reads of the inner store have high latency."""
        return self.inner.far

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises AlreadyExists, StoreUnavailable."""
        self.inner.put_new(name, *parts)

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound, Corrupt or StoreUnavailable."""
        return self.inner.get(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order.

        Raises NotFound, Corrupt or StoreUnavailable.
        """
        return self.inner.get_ranges(name, starts, ends)

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""
        return self.inner.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order."""
        return self.inner.names(prefix)

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is no error. Raises StoreUnavailable."""
        self.inner.delete(name)


def takes_bytes(objects: ObjectStore, name: str, object_bytes: int) -> int:
    """Return the stored size of a new object, with the overhead of all wrappers."""
    return objects.takes_bytes(name, object_bytes) if isinstance(objects, DelegatingObjectStore) else object_bytes


def clear_bytes(objects: ObjectStore, name: str, stored_bytes: int) -> int:
    """Return the plaintext size of a stored object; negative if it is truncated."""
    return objects.clear_bytes(name, stored_bytes) if isinstance(objects, DelegatingObjectStore) else stored_bytes


def file_sizes(objects: ObjectStore, folders: Iterable[str]) -> Iterator[dict[str, int] | None]:
    """Yield {file name: stored bytes} of each folder, None for one that `names` has to list."""
    if isinstance(objects, DelegatingObjectStore):
        return file_sizes(objects.inner, folders)
    if isinstance(objects, SupportsFileSizes):
        return objects.file_sizes(folders)
    return (None for _ in folders)


def are_missing(objects: ObjectStore, folders: Sequence[str]) -> list[bool]:
    """Return which folders do not exist; False also for those that `names` has to list."""
    if isinstance(objects, DelegatingObjectStore):
        return are_missing(objects.inner, folders)
    if isinstance(objects, SupportsMissingFolders):
        return objects.are_missing(folders)
    return [False] * len(folders)


def record_key_of(objects: ObjectStore) -> bytes | None:
    """Return the key that authenticates records of an object store; None without MACs."""
    return objects.record_key if isinstance(objects, DelegatingObjectStore) else None


def rewrap_lowest(objects: ObjectStore, wrap: Callable[[ObjectStore], ObjectStore]) -> ObjectStore:
    """Return the same wrappers over `wrap` of the innermost store."""
    return objects.rewrap(wrap) if isinstance(objects, DelegatingObjectStore) else wrap(objects)
