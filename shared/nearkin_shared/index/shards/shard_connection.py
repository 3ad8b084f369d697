"""HTTP connection to one index shard.

Invariant: a call returns the shard's answer, or raises; a shard that is away is never an answer.
"""

from __future__ import annotations

import random
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from blake3 import blake3

from nearkin_shared.errors import BadInput, ConfigError, StoreUnavailable
from nearkin_shared.index.shards.http_connection import HttpConnection, HttpFailure
from nearkin_shared.index.shards.shard_messages import SHARD_HEADER, decode_answer, encode
from nearkin_shared.utils.url_masking import mask_urls

TIMEOUT_SECONDS = 30.0
RETRIES = 5
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.05, 2.0
CONNECTIONS_MAX = 16
_CONTEXT = "nearkin 2026 token of index shards"
_AGAIN = {429, 500, 502, 503, 504}


def shard_token(secret: bytes) -> str:
    """Return the token of a store's shards, which all processes with the store's secret have."""
    return blake3(secret, derive_key_context=_CONTEXT).hexdigest()


class ShardConnection:
    """Calls of one shard over connections that are kept. Shared by threads."""

    def __init__(
        self,
        url: str,
        position: str,
        token: str = "",
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retries: int = RETRIES,
    ) -> None:
        """Prepare connections.

        `position` is the number of the shard, their count and the store's id.

        Raises: ConfigError.
        """
        if not _is_url(url):
            raise ConfigError(f'index shard "{mask_urls(url)}": give a URL such as http://index-0.index:7420')
        self.name: str = f"index shard {mask_urls(url)}"
        self.retries = retries
        headers = {SHARD_HEADER: position, "content-type": "application/msgpack"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._connect = partial(HttpConnection, url, headers, timeout_seconds)
        self._idle: deque[HttpConnection] = deque(maxlen=CONNECTIONS_MAX)

    def call(self, name: str, request: object) -> Any:
        """Send a request and return its answer; all requests may be repeated.

        Raises: StoreUnavailable, if the shard stays away or is not ready; BadInput, ConfigError.
        """
        return self.start(name, request).answer()

    def start(self, name: str, request: object) -> ShardCall:
        """Send a request, whose answer must be awaited or abandoned."""
        return ShardCall(self, name, encode(request))

    def take(self) -> HttpConnection:
        """Return a connection that no other call uses. Raises HttpFailure."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                kept = self._idle.pop()
                if kept.is_idle:
                    return kept
                kept.close()
        return self._connect()

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection whose answer was read for other calls."""
        if len(self._idle) < CONNECTIONS_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections that no call uses."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


class ShardCall:
    """One request that was sent, and is sent again until the shard answers."""

    def __init__(self, shard: ShardConnection, name: str, body: bytes) -> None:
        self._shard, self._name, self._body = shard, name, body
        self._problem = ""
        self._connection: HttpConnection | None = None
        self._send()

    def _send(self) -> None:
        try:
            self._connection = self._shard.take()
            self._connection.send(f"/v1/{self._name}", self._body)
        except HttpFailure as err:
            self._fail(err)

    def _fail(self, err: HttpFailure) -> None:
        self._problem = f"does not answer ({err})"
        self.abandon()

    def answer(self) -> Any:
        """Return the answer.

        Raises: StoreUnavailable, if the shard stays away or is not ready; BadInput, ConfigError.
        """
        pause_seconds = PAUSE_SECONDS
        for attempt in range(self._shard.retries + 1):
            if attempt:
                time.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311
                pause_seconds = min(PAUSE_SECONDS_MAX, pause_seconds * 2)
                self._send()
            status, content = self._received()
            if status == 200:
                return decode_answer(self._name, content)
            if status:
                self._problem = f"answers {status}: {content[:500].decode(errors='replace')}"
                if status not in _AGAIN:
                    break
        else:
            raise StoreUnavailable(f"{self._shard.name} {self._problem}; is it running, and is it ready?")
        refused = ConfigError if status in {401, 409} else BadInput
        raise refused(f"{self._shard.name} {self._problem}")

    def _received(self) -> tuple[int, bytes]:
        """Return status and content of an answer, status 0 if there is none."""
        connection = self._connection
        if connection is None:
            return 0, b""
        try:
            found = connection.receive()
        except HttpFailure as err:
            self._fail(err)
            return 0, b""
        self._connection = None
        self._shard.give_back(connection)
        return found

    def abandon(self) -> None:
        """Close the connection, unless the answer was read. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
