"""Rounds over a test's store. Invariant: what a round reports was told before, and is what the disk says after it."""

from __future__ import annotations

from nearkin.api import Store
from nearkin.testing.clock import DAY, Clock
from nearkin.testing.stores import SMALL, settings, stored_bytes

COLLECTED = settings(
    SMALL, {"deletion": {"undelete_seconds": 7 * DAY}, "gc": {"grace_seconds": DAY, "compact_below": 0.8}}
)
"""A grace of a day, and a week in which what was deleted comes back."""


def collected(store: Store, clock: Clock, rounds: int = 4) -> int:
    """Collect round after round, each a day later; return the bytes freed. Raises AssertionError."""
    freed = 0
    for _ in range(rounds):
        clock.now += DAY
        told, before = store.gc(dry_run=True), stored_bytes(store.root)
        done = store.gc()
        assert before - stored_bytes(store.root) == done.freed_bytes == told.freed_bytes
        assert (done.versions, done.condemned_containers) == (told.versions, told.condemned_containers)
        assert store.verify().damage == ()
        assert store.stats().ledger.stored_bytes == stored_bytes(store.root)
        freed += done.freed_bytes
    return freed
