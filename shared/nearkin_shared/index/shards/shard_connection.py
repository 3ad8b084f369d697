"""HTTP connection to one index shard.

Invariant: a call returns the shard's answer, or raises; a shard that is away is never an answer.
"""

from __future__ import annotations

import random
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
from blake3 import blake3

from nearkin_shared.errors import BadInput, ConfigError, StoreUnavailable
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
        if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
            raise ConfigError(f'index shard "{mask_urls(url)}": give a URL such as http://index-0.index:7420')
        self.name: str = f"index shard {mask_urls(url)}"
        self._retries = retries
        headers = {SHARD_HEADER: position, "content-type": "application/msgpack"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds, limits=limits)

    def call(self, name: str, request: object) -> Any:
        """Send a request and return its answer; all requests may be repeated.

        Raises: StoreUnavailable, if the shard stays away or is not ready; BadInput, ConfigError.
        """
        body, pause_seconds, problem = encode(request), PAUSE_SECONDS, ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311
                pause_seconds = min(PAUSE_SECONDS_MAX, pause_seconds * 2)
            try:
                response = self._client.post(f"/v1/{name}", content=body)
            except httpx.TransportError as err:
                problem = f"does not answer ({type(err).__name__})"
                continue
            if response.status_code == 200:
                return decode_answer(name, response.content)
            problem = f"answers {response.status_code}: {response.text[:500]}"
            if response.status_code not in _AGAIN:
                break
        else:
            raise StoreUnavailable(f"{self.name} {problem}; is it running, and is it ready?")
        refused = ConfigError if response.status_code in {401, 409} else BadInput
        raise refused(f"{self.name} {problem}")

    def close(self) -> None:
        """Close all connections."""
        self._client.close()
