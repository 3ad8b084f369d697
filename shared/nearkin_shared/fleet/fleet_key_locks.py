"""Key locks and refused conditional puts of a fleet.

    lock:DIGEST   the holder's token; expires after LOCK_SECONDS should the holder die
    refused:BLOB  why a conditional put was refused; expires after REFUSED_SECONDS

Invariant: a lock that expires, or is lost with its server, lets at most a deletion and a conditional put of one key
overlap; two puts are ordered by the exclusive create of a version number, whatever the server does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.fleet.shared_state import SharedState
from nearkin_shared.storage.key_locks import WAIT_SECONDS
from nearkin_shared.storage.manifests import key_digest

LOCK_SECONDS = 60
POLL_SECONDS, POLL_SECONDS_MAX = 0.005, 0.1
REFUSED_SECONDS = 8 * 24 * 3600
"""Longer than Kafka keeps a record by default: a put that is read again must be refused again."""
REASON_CHARACTERS_MAX = 500


class FleetKeyLocks:
    """Locks shared by gateways, committers and maintenance workers.

    Raises: StoreUnavailable, in all calls.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def after_fork(self) -> None:
        """Do nothing: a lock belongs to its token, not to a process."""

    def for_deletion(self, tenant: str, key: str) -> AbstractContextManager[None]:
        """Lock the key as a put does: deletions of one key wait for each other."""
        return self.for_put(tenant, key)

    @contextmanager
    def for_put(self, tenant: str, key: str) -> Iterator[None]:
        """Lock the key for LOCK_SECONDS at most.

        Raises: StoreUnavailable, if another process keeps it.
        """
        name, token = f"lock:{key_digest(tenant, key)}", secrets.token_bytes(16)
        deadline, pause_seconds = time.monotonic() + WAIT_SECONDS, POLL_SECONDS
        while self._state.put_absent(name, token, LOCK_SECONDS) != token:  # its own: an earlier reply may be lost
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"key {key!r}: another change of it takes longer than {WAIT_SECONDS:.0f} s; try again"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(POLL_SECONDS_MAX, pause_seconds * 2)
        try:
            yield
        finally:
            self._state.remove(name, token)

    def refusal(self, blob: bytes) -> str | None:
        """Return why a conditional put with this blob id was refused, or None."""
        found = self._state.get(f"refused:{blob.hex()}")
        return None if found is None else found.decode(errors="replace")

    def note_refusal(self, blob: bytes, reason: str) -> None:
        """Record the refusal of a conditional put: if read again, it must not be committed."""
        self._state.put(f"refused:{blob.hex()}", reason[:REASON_CHARACTERS_MAX].encode(), REFUSED_SECONDS)
