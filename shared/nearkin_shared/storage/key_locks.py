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
"""Longest wait; a holder writes one manifest, or the marks of one deletion."""


class KeyLocks(Protocol):
    """Locks that exclude a key's conditional puts from each other and from deletions."""

    def for_put(self, tenant: str, key: str) -> AbstractContextManager[None]:
        """Lock the key for a conditional put. Raises RetryableError on timeout."""

    def for_deletion(self, tenant: str, key: str) -> AbstractContextManager[None]:
        """Lock the key for a deletion; deletions share it. Raises RetryableError on timeout."""

    def after_fork(self) -> None:
        """Start without any lock held, in a forked process."""


class ProcessKeyLocks:
    """One lock for all keys of a process, held for a few writes of small objects.

    Another process that writes to a local store is refused by the store's writer lock.
    """

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Start without any lock held, in a forked process."""
        self._changed = threading.Condition()
        self._putting = False
        self._deletions = 0

    @contextmanager
    def for_put(self, tenant: str, key: str) -> Iterator[None]:
        """Hold the lock exclusively. Raises StoreLocked on timeout."""
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
        """Share the lock with other deletions. Raises StoreLocked on timeout."""
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
    return StoreLocked(f"key {key!r}: another change of it takes longer than {WAIT_SECONDS:.0f} s; try again")
