"""Inject faults into an object store, by script.

Invariant: the n-th mutating call meets the n-th letter, and nothing else differs from `inner`.

FaultyObjectStore(inner, "..L.E")    the third write is done but its reply lost, the fifth fails before it writes
"""

from __future__ import annotations

import threading

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import ObjectStore, Payload
from nearkin_shared.objectstore.delegating import DelegatingObjectStore

LETTERS = ".LE"


class FaultyObjectStore(DelegatingObjectStore):
    """An ObjectStore whose `put_new` and `delete` each consume one letter; when none are left, all calls succeed.

    `.` does it; `L` does it and raises StoreUnavailable: the reply is lost; `E` raises before doing it.
    """

    def __init__(self, inner: ObjectStore, script: str) -> None:
        unknown = set(script) - set(LETTERS)
        if unknown:
            raise ValueError(f"script {script!r}: {''.join(sorted(unknown))!r} unknown; want letters of {LETTERS!r}")
        super().__init__(inner)
        self._script = script
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str, str]] = []
        """(letter, operation, object name) of each mutating call so far."""

    @property
    def spent(self) -> bool:
        """Return whether every letter was met: otherwise the test did not reach the end of its script."""
        return len(self.calls) >= len(self._script)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object, or fail as scripted."""
        letter = self._next("put_new", name)
        super().put_new(name, *parts)
        self._reply(letter, name)

    def delete(self, name: str) -> None:
        """Remove an object, or fail as scripted."""
        letter = self._next("delete", name)
        super().delete(name)
        self._reply(letter, name)

    def _next(self, operation: str, name: str) -> str:
        with self._lock:
            letter = self._script[len(self.calls)] if len(self.calls) < len(self._script) else "."
            self.calls.append((letter, operation, name))
        if letter == "E":
            raise StoreUnavailable(f"{name}: failed before writing, as scripted")
        return letter

    def _reply(self, letter: str, name: str) -> None:
        if letter == "L":
            raise StoreUnavailable(f"{name}: written, but the reply was lost, as scripted")
