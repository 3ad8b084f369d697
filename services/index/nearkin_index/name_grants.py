# size: a promise between processes, apart from the calls that use it
"""Grants by which a shard vouches for names that its answers carry to clients.

    answer: the grant, then names are read   |   withdrawal: names go, then a new grant, then a wait for the one before

Invariant: when a withdrawal is acknowledged, no grant lasts under which a client has the names that it removed.
"""

from __future__ import annotations

import secrets
import threading
import time

from nearkin_shared.index.shards.held_names import GRANT_SECONDS, now_seconds

_BYTES = 16


class NameGrants:
    """The grant of one shard: the same for all clients until a withdrawal. Shared by threads."""

    def __init__(self) -> None:
        """Begin with a new grant; the process before this one may have given others."""
        self._lock = threading.Lock()
        self._grant = secrets.token_bytes(_BYTES)
        self._ends_at = now_seconds() + GRANT_SECONDS

    def give(self) -> bytes:
        """Give the grant for an answer whose names are not yet read."""
        with self._lock:
            self._ends_at = now_seconds() + GRANT_SECONDS
            return self._grant

    def end(self) -> None:
        """End the grant after names were withdrawn: wait until no client has it."""
        with self._lock:
            self._grant = secrets.token_bytes(_BYTES)
            ends_at = self._ends_at
        while (remaining_seconds := ends_at - now_seconds()) > 0:
            time.sleep(remaining_seconds)
