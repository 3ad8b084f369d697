# size: one record of the fleet; it joins neither the epochs nor the connection.
"""Record of the store to which the index of a fleet belongs.

Invariant: the record outlives all epochs of the index; only an emptied server or another prefix loses it.
"""

from __future__ import annotations

from nearkin_shared.fleet.shared_state import SharedState

_OWNER = "store"


def read_owner(state: SharedState) -> str | None:
    """Return the id of the store that the index belongs to, or None for a new index.

    Raises: StoreUnavailable.
    """
    found = state.get(_OWNER)
    return None if found is None else found.decode()


def claim_index(state: SharedState, store_id: str) -> str:
    """Record the store of the index unless one is recorded; return the recorded id."""
    recorded = state.put_absent(_OWNER, store_id.encode())
    assert recorded is not None  # it never expires
    return recorded.decode()
