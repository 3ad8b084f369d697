# size: one record of the fleet store; it joins neither the epochs nor the connection.
"""Record in Redis of the store to which an index belongs.

Invariant: the record outlives all epochs of the index; only an emptied Redis or another prefix loses it.
"""

from __future__ import annotations

from nearkin_shared.index.redis.connection import RedisServer


def read_owner(server: RedisServer, prefix: str) -> str | None:
    """Return the id of the store that the index belongs to, or None for a new index.

    Raises: StoreUnavailable.
    """
    found = server.one(("GET", _key(prefix)))
    return None if found is None else str(found.decode())


def claim_index(server: RedisServer, prefix: str, store_id: str) -> str:
    """Record the store of the index unless one is recorded; return the recorded id."""
    _, recorded = server.run([("SET", _key(prefix), store_id, "NX"), ("GET", _key(prefix))])
    return str(recorded.decode())


def _key(prefix: str) -> str:
    return f"{prefix}:{{m}}:store"
