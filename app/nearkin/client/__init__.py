"""Clients of the gateway. Invariant: what a call returns is committed there; what it raises is one of
nearkin_shared.errors.

    with nearkin.connect("https://nearkin.example") as store:            # the token from NEARKIN_TOKEN
        store.put("db.dump", Path("db.dump"))
        store.get("db.dump").read()

exchange       calls and answers, and the errors that answers stand for; no input or output
conversations  what a put, a listing and so on say to the gateway, as generators over calls; no input or output
transfer       the two streams: a source on its way up, a version on its way down with its digest
remote, aio    the same store over httpx, for threads and for asyncio
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
