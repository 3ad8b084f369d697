"""Clients of the gateway.

    with nearkin.connect("https://nearkin.example") as store:            # the token from NEARKIN_TOKEN
        store.put("db.dump", Path("db.dump"))
        store.get("db.dump").read()

Invariant: a put that returns is committed; errors are of nearkin_shared.errors.

http           calls and responses, and the errors that responses mean; no input or output
requests       the requests of a put, a listing and so on, as generators over calls; no input or output
streaming      the upload of a source, the download of a version with its digest
async_calls    the calls over httpx for asyncio; sync_calls, the same for threads, is generated from it
aio, sync      the stores that callers use, and their blobs
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearkin.client.aio import AsyncRemoteStore
    from nearkin.client.sync import RemoteStore

TOKEN_VARIABLE = "NEARKIN_TOKEN"  # noqa: S105 - its name


def connect(url: str, token: str | None = None, *, commit_seconds: float = 600.0) -> RemoteStore:
    """Return the store behind the gateway at `url`; nothing is sent before the first call.

    `token` defaults to NEARKIN_TOKEN. A put that is not committed within `commit_seconds` after its last byte raises
    RetryableError. Raises ConfigError for a URL or a token that cannot be one.
    """
    from nearkin.client.http import Endpoint
    from nearkin.client.sync import RemoteStore

    return RemoteStore(Endpoint.of(url, _token(token)), commit_seconds)


def connect_async(url: str, token: str | None = None, *, commit_seconds: float = 600.0) -> AsyncRemoteStore:
    """Return the same for asyncio or trio."""
    from nearkin.client.aio import AsyncRemoteStore
    from nearkin.client.http import Endpoint

    return AsyncRemoteStore(Endpoint.of(url, _token(token)), commit_seconds)


def _token(token: str | None) -> str | None:
    return token if token is not None else os.environ.get(TOKEN_VARIABLE) or None
