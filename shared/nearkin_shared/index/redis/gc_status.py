"""Rounds of garbage collection, as the fleet knows them. Invariant: it only tells and asks; losing it costs one round.

{prefix}:{m}:gc       what the last round came to, JSON: whoever asks, and every maintenance, so that all keep one
interval {prefix}:{m}:gc-ask   there while a round is asked for; each who asks writes another value
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from nearkin_shared.index.redis.connection import Server
from nearkin_shared.index.redis.redis_index import RedisIndex


class GcStatusStore:
    """What maintenance workers and gateways tell each other of rounds. All calls raise StoreUnavailable."""

    def __init__(self, index: RedisIndex) -> None:
        self._server = index.server
        self._told = f"{index.prefix}:{{m}}:gc"
        self._asked = f"{index.prefix}:{{m}}:gc-ask"

    def last(self) -> dict[str, Any] | None:
        """Return what was told of the last round, by whichever maintenance; None where there was none."""
        told = self._server.one(("GET", self._told))
        return None if told is None else dict(json.loads(told))

    def state(self) -> object:
        """Return what is another as soon as a round has ended, or has failed: it may have written until then."""
        return self._server.one(("GET", self._told))

    def record_run(self, told: dict[str, Any], asked: bytes | None) -> None:
        """Say what a round came to; whoever had `asked` before it began has it.

        Who asked since wants another one: what was deleted while this one was at work it may not have seen.
        """
        self._server.one(("SET", self._told, json.dumps(told)))
        if asked is not None:
            self._server.one(Server.call("release", [self._asked], asked))

    def record_failure(self, at: float, failure: str) -> None:
        """Say that a round did not end. It stays due, and asked for if it was."""
        last = {name: value for name, value in (self.last() or {}).items() if name != "failure"}
        self._server.run([("SET", self._told, json.dumps({**last, "failed_at": at, "failure": failure}))])

    def request_run(self) -> None:
        """Ask for a round: the maintenance service that sees it first does one, due or not."""
        self._server.one(("SET", self._asked, secrets.token_bytes(8)))

    @property
    def requested_run(self) -> bytes | None:
        """Return what stands for a round that is asked for, None where none is."""
        found: bytes | None = self._server.one(("GET", self._asked))
        return found
