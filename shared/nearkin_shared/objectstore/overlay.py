"""Overlay an object store with changes that are discarded.

    put_new -> a scratch folder      delete -> recorded      get, names -> the folder, then the inner store

A preview executes a complete GC run on an overlay, so that it reports the bytes of a real run.

Invariant: the inner store is read and never changed; all writes and deletions stay in the overlay.
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
    """An object store over another one; writes take space in the system's temporary folder.

    100 bytes of memory for each object that is written or deleted. Writes are not durable and end with the process.
    """

    def __init__(self, below: ObjectStore) -> None:
        self._inner = below
        self._folder = tempfile.TemporaryDirectory(prefix="nearkin-preview-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}
        """Bytes of each object in the overlay; -1: deleted."""

    def __enter__(self) -> OverlayObjectStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @property
    def far(self) -> bool:
        """Whether reads of the inner store have high latency."""
        return self._inner.far

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object to the overlay. Raises AlreadyExists, StoreUnavailable."""
        with self._lock:
            if self._exists(name):
                raise AlreadyExists(f"{name}: already there")
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._written[name] = path.write_bytes(join_parts(parts))

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound or StoreUnavailable."""
        return self._path(name).read_bytes() if self._is_in_overlay(name) else self._inner.get(name)

    def reconstruct(self, name: str) -> bytes | None:
        """Return an object as written, if the inner store can reconstruct it.

        Objects in the overlay are undamaged.
        """
        if name in self._written or not isinstance(self._inner, SupportsReconstruction):
            return None
        return self._inner.reconstruct(name)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end) in order. Raises NotFound or StoreUnavailable."""
        if not self._is_in_overlay(name):
            return self._inner.get_ranges(name, starts, ends)
        found = []
        with self._path(name).open("rb") as file:
            for start, end in zip(starts, ends, strict=True):
                file.seek(start)
                found.append(file.read(end - start))
        return found

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound or StoreUnavailable."""
        return self._written[name] if self._is_in_overlay(name) else self._inner.size_bytes(name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below `prefix`, in no order."""
        for name, size_bytes in self._inner.names(prefix):
            if name not in self._written:
                yield name, size_bytes
        for name, size_bytes in list(self._written.items()):
            if size_bytes >= 0 and name.startswith(f"{prefix}/"):
                yield name, size_bytes

    def delete(self, name: str) -> None:
        """Record an object as deleted; a missing one is no error."""
        if self._written.get(name, -1) >= 0:
            self._path(name).unlink()
        self._written[name] = -1

    def _is_in_overlay(self, name: str) -> bool:
        size_bytes = self._written.get(name)
        if size_bytes == -1:
            raise NotFound(f"{name}: no such object")
        return size_bytes is not None

    def _exists(self, name: str) -> bool:
        try:
            return self._is_in_overlay(name) or self._inner.size_bytes(name) >= 0
        except NotFound:
            return False

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)
