"""Key locks and refused conditional puts of a fleet.

    {prefix}:{m}:lock:DIGEST   the holder's token; expires after LOCK_SECONDS should the holder die
    {prefix}:{m}:refused:BLOB  why a conditional put was refused; expires after REFUSED_SECONDS

Invariant: a lock that expires, or is lost with Redis, lets at most a deletion and a conditional put of one key overlap;
two puts are ordered by the exclusive create of a version number, whatever Redis does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.index.redis.connection import RedisServer
from nearkin_shared.index.redis.redis_index import RedisIndex
from nearkin_shared.storage.key_locks import WAIT_SECONDS
from nearkin_shared.storage.manifests import key_digest

LOCK_SECONDS = 60
POLL_SECONDS, POLL_SECONDS_MAX = 0.005, 0.1
REFUSED_SECONDS = 8 * 24 * 3600
"""Longer than Kafka keeps a record by default: a put that is read again must be refused again."""
REASON_CHARACTERS_MAX = 500


class RedisKeyLocks:
    """Locks shared by gateways, committers and maintenance workers.

    Raises: StoreUnavailable, in all calls.
    """

    def __init__(self, index: RedisIndex) -> None:
        self._server = index.server
        self._prefix = f"{index.prefix}:{{m}}"

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
        name, token = f"{self._prefix}:lock:{key_digest(tenant, key)}", secrets.token_bytes(16)
        deadline, pause_seconds = time.monotonic() + WAIT_SECONDS, POLL_SECONDS
        while not self._server.one(("SET", name, token, "NX", "EX", LOCK_SECONDS)):
            if self._server.one(("GET", name)) == token:
                break  # the reply to an earlier try was lost
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"key {key!r}: another change of it takes longer than {WAIT_SECONDS:.0f} s; try again"
                )
            time.sleep(pause_seconds)
            pause_seconds = min(POLL_SECONDS_MAX, pause_seconds * 2)
        try:
            yield
        finally:
            self._server.one(RedisServer.call("release", [name], token))

    def refusal(self, blob: bytes) -> str | None:
        """Return why a conditional put with this blob id was refused, or None."""
        found = self._server.one(("GET", f"{self._prefix}:refused:{blob.hex()}"))
        return None if found is None else bytes(found).decode(errors="replace")

    def note_refusal(self, blob: bytes, reason: str) -> None:
        """Record the refusal of a conditional put: if read again, it must not be committed."""
        name = f"{self._prefix}:refused:{blob.hex()}"
        self._server.one(("SET", name, reason[:REASON_CHARACTERS_MAX].encode(), "EX", REFUSED_SECONDS))
