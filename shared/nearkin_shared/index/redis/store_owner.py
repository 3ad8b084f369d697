"""Record in Redis which store an index belongs to.

Invariant: the record outlives all epochs of the index; only an emptied Redis or another prefix loses it.
"""

from __future__ import annotations

from nearkin_shared.index.redis.connection import Server


def read_owner(server: Server, prefix: str) -> str | None:
    """Return the id of the store that the index belongs to, None for a new index. Raises StoreUnavailable."""
    found = server.one(("GET", _key(prefix)))
    return None if found is None else str(found.decode())


def claim_index(server: Server, prefix: str, store_id: str) -> str:
    """Record the store that the index belongs to unless one is recorded; return the recorded id."""
    _, recorded = server.run([("SET", _key(prefix), store_id, "NX"), ("GET", _key(prefix))])
    return str(recorded.decode())


def _key(prefix: str) -> str:
    return f"{prefix}:{{m}}:store"
