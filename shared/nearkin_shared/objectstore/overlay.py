"""A store as it would be. Invariant: what lies below is read and never changed; all writes and removals stay here.

    put_new -> a scratch folder      delete -> remembered      get, names -> the folder, then what lies below

A preview does a whole round on one, so that it can tell no other bytes than the round.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from nearkin_shared.errors import NotFound
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore, Payload, join_parts
from nearkin_shared.objectstore.parity import SupportsReconstruction


class OverlayObjectStore:
    """An ObjectStore over another. It takes room in the system's temporary folder for what is written.

    100 bytes of memory for each object that is written or removed. Writes are not durable: nothing outlives it.
    """

    def __init__(self, below: ObjectStore) -> None:
        self._below = below
        self._folder = tempfile.TemporaryDirectory(prefix="nearkin-preview-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}
        """Bytes of each object that lies here; -1: removed."""

    def __enter__(self) -> OverlayObjectStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @property
    def far(self) -> bool:
        """Return whether reads of what lies below take long."""
        return self._below.far

    def put_new(self, name: str, *parts: Payload) -> None:
        """Keep an object here. Raises AlreadyExists, StoreUnavailable."""
        with self._lock:
            if self._is_there(name):
                raise AlreadyExists(f"{name}: already there")
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._written[name] = path.write_bytes(join_parts(parts))

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound or StoreUnavailable."""
        return self._path(name).read_bytes() if self._here(name) else self._below.get(name)

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object of the store below as it was written, where that knows; what lies here is whole."""
        if name in self._written or not isinstance(self._below, SupportsReconstruction):
            return None
        return self._below.reconstruct(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order. Raises NotFound or StoreUnavailable."""
        if not self._here(name):
            return self._below.get_ranges(name, starts, ends)
        found = []
        with self._path(name).open("rb") as file:
            for start, end in zip(starts, ends, strict=True):
                file.seek(start)
                found.append(file.read(end - start))
        return found

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""
        return self._written[name] if self._here(name) else self._below.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order."""
        for name, size_bytes in self._below.names(prefix):
            if name not in self._written:
                yield name, size_bytes
        for name, size_bytes in list(self._written.items()):
            if size_bytes >= 0 and name.startswith(f"{prefix}/"):
                yield name, size_bytes

    def delete(self, name: str) -> None:
        """Count an object as removed; one that is not there is fine."""
        if self._written.get(name, -1) >= 0:
            self._path(name).unlink()
        self._written[name] = -1

    def _here(self, name: str) -> bool:
        size_bytes = self._written.get(name)
        if size_bytes == -1:
            raise NotFound(f"{name}: no such object")
        return size_bytes is not None

    def _is_there(self, name: str) -> bool:
        try:
            return self._here(name) or self._below.size_bytes(name) >= 0
        except NotFound:
            return False

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)
