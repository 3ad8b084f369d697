"""Adapt obstore's clients to the object store interface.

Invariant: each failure is one of the project's errors, with its cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore
from obstore.store import ObjectStore as ObstoreStore

from nearkin_shared.errors import NearkinError, NotFound
from nearkin_shared.objectstore.base import AlreadyExists, Payload, check_size, join_parts, unavailable
from nearkin_shared.objectstore.local import TOGETHER_BYTES_MAX

if TYPE_CHECKING:
    from obstore import ObjectMeta

REFUSALS = (BaseError, OSError)
"""Errors of obstore; a missing object is its FileNotFoundError, thus an OSError."""


class ObstoreObjectStore:
    """An object store on any obstore client whose acknowledgement means durable.

    The memory client is for tests.
    """

    far = False

    def __init__(self, client: ObstoreStore) -> None:
        self._client = client

    def put_new(self, name: str, *parts: Payload) -> None:  # noqa: D102
        try:
            obstore.put(self._client, name, join_parts(parts), mode="create", use_multipart=False)
        except (AlreadyExistsError, FileExistsError) as err:
            raise AlreadyExists(f"{name}: already there") from err
        except REFUSALS as err:
            raise self._translated(name, err) from err

    def get(self, name: str) -> bytes:  # noqa: D102
        try:
            found = obstore.get(self._client, name)
            check_size(name, found.meta["size"])
            return bytes(found.bytes())
        except REFUSALS as err:
            raise self._translated(name, err) from err

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:  # noqa: D102
        try:
            wanted = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
            found = obstore.get_ranges(self._client, name, starts=[s for s, _ in wanted], ends=[e for _, e in wanted])
            if len(found) == len(starts) == 1 and len(found[0]) >= TOGETHER_BYTES_MAX:
                return [memoryview(found[0])]  # its own buffer: a copy of 4 MiB costs 0.3 CPU s a GB in page faults
            # The slices share one buffer with their neighbours: copied, so that a cache never pins the rest.
            copies = map(bytes, found)
            # The client refuses an empty range; readers of an empty directory or object request one.
            return [next(copies) if start < end else b"" for start, end in zip(starts, ends, strict=True)]
        except REFUSALS as err:
            raise self._translated(name, err) from err

    def size_bytes(self, name: str) -> int:  # noqa: D102
        return self._meta(name)["size"]

    def stamp(self, name: str) -> tuple[int, str | None]:
        """Return an object's size and a value that changes with its bytes.

        Raises NotFound or StoreUnavailable.
        """
        found = self._meta(name)
        return found["size"], found["e_tag"]

    def _meta(self, name: str) -> ObjectMeta:
        try:
            return obstore.head(self._client, name)
        except REFUSALS as err:
            raise self._translated(name, err) from err

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:  # noqa: D102
        try:
            for page in obstore.list(self._client, prefix, chunk_size=1000):
                for entry in page:
                    yield entry["path"], entry["size"]
        except REFUSALS as err:
            raise self._translated(prefix, err) from err

    def delete(self, name: str) -> None:  # noqa: D102
        try:
            obstore.delete(self._client, name)
        except REFUSALS as err:
            translated = self._translated(name, err)
            if not isinstance(translated, NotFound):
                raise translated from err

    def replace(self, name: str, data: Payload) -> None:
        """Make `data` the object, whatever is there. Raises StoreUnavailable."""
        try:
            obstore.put(self._client, name, data, mode="overwrite", use_multipart=False)
        except REFUSALS as err:
            raise self._translated(name, err) from err

    def _translated(self, name: str, err: Exception) -> NearkinError:
        """Return NotFound if `err` is about a missing object only, else StoreUnavailable."""
        if isinstance(err, FileNotFoundError):
            return NotFound(f"{name}: no such object")
        return unavailable(name, err)


def local_client(root: Path) -> ObstoreObjectStore:
    """Return obstore's client of a folder."""
    return ObstoreObjectStore(LocalStore(root))


def memory_objects() -> ObstoreObjectStore:
    """Return an empty object store in memory, for tests."""
    return ObstoreObjectStore(MemoryStore())
