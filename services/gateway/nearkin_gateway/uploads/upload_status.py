"""Outcomes of uploads by their id.

Invariant: an outcome is evicted only to bound memory, and the time of the last eviction is kept.

The table holds events of the topic `committed` in the order of arrival, bounded in bytes. An id contains the time at
which its upload began: an id that is newer than the last evicted one and not in the table is still in flight.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from nearkin_gateway.monitoring.rolling_stats import RollingStats

ID_BYTES = 16
MAC_BYTES = 8
ENTRY_BYTES = 400
"""Memory of an entry in addition to its text: keys, future slots, Python objects (measured 370)."""
_TICKET = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})", re.ASCII)


def new_id() -> bytes:
    """Return the id of an upload attempt: 6 bytes milliseconds since 1970, 10 bytes random."""
    return (time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(ID_BYTES - 6)


def began_ms(blob: bytes) -> int:
    """Return when the upload with this id began."""
    return int.from_bytes(blob[:6], "big")


class UploadIds:
    """Public ids with a MAC: an id in flight differs from one that was never issued."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context="nearkin 2026 status ids of a gateway").digest()

    def of(self, tenant: str, blob: bytes) -> str:
        """Return the public id."""
        return f"{blob.hex()}-{self._mac(tenant, blob)}"

    def read(self, tenant: str, ticket: str) -> bytes | None:
        """Return the blob id, or None if this id was not issued to this tenant."""
        match = _TICKET.fullmatch(ticket)
        if match is None:
            return None
        blob = bytes.fromhex(match[1])
        return blob if hmac.compare_digest(match[2], self._mac(tenant, blob)) else None

    def origin(self, tenant: str, key: str, idempotency_key: str) -> bytes:
        """Return the origin that all attempts with one idempotency key share."""
        hasher = blake3(self._key, derive_key_context="nearkin 2026 origin of an idempotency key")
        for part in (tenant, key, idempotency_key):
            encoded = part.encode()
            hasher.update(len(encoded).to_bytes(4, "big") + encoded)
        return hasher.digest(length=ID_BYTES)

    def _mac(self, tenant: str, blob: bytes) -> str:
        return blake3(blob + tenant.encode(), key=self._key).hexdigest(length=MAC_BYTES)


class UploadStatuses:
    """Table of outcomes for one event loop; `add` must be called in it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._events: OrderedDict[str, bytes] = OrderedDict()
        self._origins: dict[str, str] = {}
        """Origin -> id of the first outcome that had it."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._forgotten_ms = 0
        self.minutes = RollingStats()
        """Sums of the last hour by minute."""
        self.on_event: Callable[[dict[str, Any]], None] | None = None
        """Called with each event that is added."""

    def __len__(self) -> int:
        return len(self._events)

    def set_known_from(self, since_ms: int) -> None:
        """Record that earlier outcomes are not in the table."""
        self._forgotten_ms = max(self._forgotten_ms, since_ms)

    def add(self, event: dict[str, Any], text: bytes | None = None) -> None:
        """Add an event; a repeated one changes nothing. `text` is its JSON as received.

        A later `committed` replaces `failed`: the log was read again, and the version exists.
        """
        number, origin = str(event["id"]), str(event["origin"])
        earlier = self._events.get(number)
        committed = event["state"] == "committed"
        if earlier is None or (committed and json.loads(earlier)["state"] != "committed"):
            kept = json.dumps(event).encode() if text is None else text
            self._events[number] = kept
            self._bytes += len(kept) + ENTRY_BYTES - (0 if earlier is None else len(earlier) + ENTRY_BYTES)
            self.minutes.add(event)
            if self.on_event is not None:
                self.on_event(event)
            if committed:
                self._origins.setdefault(origin, number)
            while self._bytes > self._bytes_max and len(self._events) > 1:
                self._forget_oldest()
        for waiter in self._waiting.get(number, ()):
            if not waiter.done():
                waiter.set_result(None)

    def get(self, blob: bytes) -> dict[str, Any] | None:
        """Return the event of an upload."""
        text = self._events.get(blob.hex())
        return None if text is None else dict(json.loads(text))

    def of_origin(self, origin: bytes) -> dict[str, Any] | None:
        """Return the event that committed an origin."""
        number = self._origins.get(origin.hex())
        return None if number is None else self.get(bytes.fromhex(number))

    def may_be_forgotten(self, blob: bytes) -> bool:
        """Return whether the outcome of an upload may have been evicted."""
        return began_ms(blob) <= self._forgotten_ms

    async def wait(self, blob: bytes, seconds: float) -> dict[str, Any] | None:
        """Wait up to `seconds` for the event of an upload; None if it does not arrive."""
        number = blob.hex()
        if number not in self._events and seconds > 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(number, set()).add(turn)
            try:
                await asyncio.wait_for(turn, seconds)
            except TimeoutError:
                pass
            finally:
                mine = self._waiting[number]
                mine.discard(turn)
                if not mine:
                    del self._waiting[number]
        return self.get(blob)

    def _forget_oldest(self) -> None:
        number, text = self._events.popitem(last=False)
        self._bytes -= len(text) + ENTRY_BYTES
        event = json.loads(text)
        if self._origins.get(str(event["origin"])) == number:
            del self._origins[str(event["origin"])]
        self._forgotten_ms = max(self._forgotten_ms, time.time_ns() // 1_000_000)
