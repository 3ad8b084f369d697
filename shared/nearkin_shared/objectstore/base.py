"""Define the object store, and store objects in a folder.

`put_new` returns only when the bytes would survive a power cut; a second `put_new` of a name raises AlreadyExists.

Invariant: an object appears whole and durable, or not at all, and is never overwritten.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from nearkin_shared.errors import Corrupt, NoRoom, PermanentError, StoreUnavailable
from nearkin_shared.limits import MANIFEST_BYTES_MAX, OBJECT_BYTES_MAX

if TYPE_CHECKING:
    pass

Payload = bytes | memoryview


class AlreadyExists(PermanentError):
    """An object of this name is there; nothing was written."""


class ObjectStore(Protocol):
    """A flat space of immutable objects named by `/`-separated ASCII paths."""

    @property
    def far(self) -> bool:
        """Whether reads have such a latency that others should be in flight meanwhile."""

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object, its parts one behind the other, durably.

        Raises AlreadyExists, or StoreUnavailable: it is there whole, or not at all.
        """

    def get(self, name: str) -> bytes:
        """Return a whole object.

        Raises NotFound, StoreUnavailable, Corrupt (the object exceeds the bound of objects).
        """

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order. Raises NotFound or StoreUnavailable.

        Short adjacent ranges may share TOGETHER_BYTES_MAX of memory: a caller that keeps one for long copies it.
        """

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order; errors are raised."""

    def delete(self, name: str) -> None:
        """Remove an object, durably; one that is not there is fine."""


@runtime_checkable
class SupportsReplace(Protocol):
    """An object store that can replace damaged bytes by the original ones.

    Also an erasure record by one that is due earlier.
    """

    def replace(self, name: str, data: Payload) -> None:
        """Replace an object, durably: a reader sees the old or the new bytes, never a mixture.

        Raises StoreUnavailable: one of the two exists.
        """


@runtime_checkable
class SupportsStamps(Protocol):
    """An object store that detects whether another program replaced an object."""

    def stamp(self, name: str) -> tuple[int, str | None]:
        """Return an object's size and a value that changes with its bytes.

        Raises NotFound or StoreUnavailable.
        """


@runtime_checkable
class SupportsErasure(Protocol):
    """An object store in which tenants can be erased."""

    def check_tenant(self, tenant: str) -> None:
        """Raise TenantErased where a tenant was. Raises StoreUnavailable."""


@runtime_checkable
class SupportsSalvage(Protocol):
    """An object store whose objects may be readable in part."""

    def salvage(self, name: str) -> bytes | None:
        """Return an object with zeros for unreadable parts; None if nothing is readable."""


@runtime_checkable
class SupportsFileSizes(Protocol):
    """An object store that lists the files of many small folders quickly."""

    def file_sizes(self, folders: Iterable[str]) -> Iterator[dict[str, int] | None]:
        """Yield {file name: bytes} of each folder, None for one with other entries than files."""


@runtime_checkable
class SupportsMissingFolders(Protocol):
    """An object store that knows quickly which small folders do not exist."""

    def are_missing(self, folders: Sequence[str]) -> list[bool]:
        """Return which folders do not exist; False too where `names` has to report an error."""


def check_tenant(objects: ObjectStore, tenant: str) -> None:
    """Raise TenantErased where a tenant was, in a store where that can be."""
    if _supports_erasure(type(objects)):
        cast(SupportsErasure, objects).check_tenant(tenant)


@cache
def _supports_erasure(kind: type[object]) -> bool:
    """Return whether stores of a class refuse erased tenants: it takes 8 us to find out."""
    return issubclass(kind, SupportsErasure)


def join_parts(parts: Sequence[Payload]) -> Payload:
    """Return the parts one behind the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else b"".join(parts)


def check_size(name: str, size_bytes: int) -> None:
    """Raise Corrupt for an object that is larger than any: before its bytes take memory."""
    most = MANIFEST_BYTES_MAX if name.startswith("manifests/") else OBJECT_BYTES_MAX
    if size_bytes > most:
        raise Corrupt(f"{name}: {size_bytes} bytes, where none has more than {most}: run `nearkin verify`")


def unavailable(name: str, err: Exception) -> StoreUnavailable:
    """Return what an object store's failure means."""
    if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoom(f"{name}: no room left on the device; all before is as it was: make room and run the same again")
    return StoreUnavailable(f"{name}: {str(err).splitlines()[0]}")
