"""Locks on keys: one conditional put or deletion of a key at a time.

An exclusive create orders puts among each other. A deletion creates another object than a put does, so the check of a
precondition and the create that relies on it would not exclude a deletion in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from nearkin_shared.errors import StoreLocked

WAIT_SECONDS = 30.0
"""A holder writes one manifest, or the marks of one deletion."""


class KeyLocks(Protocol):
    """Exclude conditional puts of a key from its other conditional puts and from its deletions."""

    def for_put(self, tenant: str, key: str) -> AbstractContextManager[None]:
        """Hold the key for a conditional put. Raises RetryableError where it stays taken."""

    def for_deletion(self, tenant: str, key: str) -> AbstractContextManager[None]:
        """Hold the key for a deletion; several deletions may hold it. Raises RetryableError where it stays taken."""

    def after_fork(self) -> None:
        """Begin without any lock held, in a process that was forked."""


class ProcessKeyLocks:
    """One lock for all keys of a process, held for some writes of small objects.

    Of a local store another process that writes is refused by the store's own lock.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without any lock held, in a process that was forked."""
        self._changed = threading.Condition()
        self._putting = False
        self._deletions = 0

    @contextmanager
    def for_put(self, tenant: str, key: str) -> Iterator[None]:
        """Hold the lock alone. Raises StoreLocked where it stays taken."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._putting and not self._deletions, WAIT_SECONDS):
                raise _taken_error(key)
            self._putting = True
        try:
            yield
        finally:
            with self._changed:
                self._putting = False
                self._changed.notify_all()

    @contextmanager
    def for_deletion(self, tenant: str, key: str) -> Iterator[None]:
        """Hold the lock with other deletions. Raises StoreLocked where it stays taken."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._putting, WAIT_SECONDS):
                raise _taken_error(key)
            self._deletions += 1
        try:
            yield
        finally:
            with self._changed:
                self._deletions -= 1
                self._changed.notify_all()


def _taken_error(key: str) -> StoreLocked:
    return StoreLocked(f"key {key!r}: another change of it took over {WAIT_SECONDS:.0f} s; try again")
