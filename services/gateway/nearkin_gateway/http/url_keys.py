"""Parse keys in URLs.

Invariant: a key is decoded once, strictly; two keys never share a URL. No URL names a reserved key.

Routes match the path as it was sent. In it a literal `/versions` at the end names the versions of a key; a key that
ends with it is written with its last slash as %2F: /v1/blobs/notes%2Fversions. All other slashes may be either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import quote, unquote_to_bytes

from fastapi import Depends, Path, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from nearkin_gateway.http.problems import Problem
from nearkin_shared.errors import NearkinError
from nearkin_shared.limits import KEY_BYTES_MAX
from nearkin_shared.validation import check_user_key, checkpoint_key_of

_VERSIONS = "/versions"
_DESCRIPTION = (
    "The key, percent-encoded; a slash may be written as / or %2F. A key that ends in `/versions` needs %2F "
    "for that last slash."
)


class PathAsSent:
    """Give routes the percent-encoded path: decoded, %2F would equal /."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            scope["path"] = scope["raw_path"].decode("latin-1")
            if scope["method"] == "POST" and scope["path"].startswith("/v1/uploads/"):
                for name, value in scope["headers"]:  # tus: for clients behind proxies that know GET and POST alone
                    if name == b"x-http-method-override" and value in (b"PATCH", b"DELETE"):
                        scope["method"] = value.decode()
        await self._app(scope, receive, send)


def decode_key(text: str) -> str:
    """Return the key that a URL names. Raises Problem, BadInput."""
    data = unquote_to_bytes(text)
    if len(data) > KEY_BYTES_MAX:
        raise Problem(414, "key-too-long", f"key of {len(data)} bytes: want at most {KEY_BYTES_MAX}")
    try:
        key = data.decode()
    except UnicodeDecodeError as err:
        raise Problem(400, "bad-key", f"key: is not UTF-8 (byte {err.start})") from err
    check_user_key(key)
    return key


@contextmanager
def checkpoints_by_key(key: str) -> Iterator[None]:
    """Name checkpoints in errors by the key of their backup.

    Callers do not know the reserved one.
    """
    reserved = checkpoint_key_of(key)

    def named(text: str) -> str:
        return text.replace(f"key {reserved!r}", f"checkpoints of key {key!r}").replace(reserved, key)

    try:
        yield
    except NearkinError as err:
        err.args = tuple(named(part) if isinstance(part, str) else part for part in err.args)
        raise
    except Problem as problem:
        problem.detail = named(problem.detail)
        raise


def quote_key(key: str) -> str:
    """Return a key as one path segment; `.` and `..` are escaped: clients resolve them."""
    return key.replace(".", "%2E") if key in (".", "..") else quote(key, safe="")


def blob_url(key: str, version: int | None = None) -> str:
    """Return where a blob is found."""
    url = f"/v1/blobs/{quote_key(key)}"
    return url if version is None else f"{url}?version={version}"


def _plain(request: Request, key: Annotated[str, Path(description=_DESCRIPTION)]) -> str:
    return decode_key(key)


def _blob(request: Request, key: Annotated[str, Path(description=_DESCRIPTION)]) -> str:
    if key.endswith(_VERSIONS):
        raise Problem(
            405,
            "method-not-allowed",
            f"{request.method} is not for the versions of a key; a key that ends in /versions is written with %2F",
            headers={"Allow": "GET"},
        )
    return _plain(request, key)


Key = Annotated[str, Depends(_plain)]
BlobKey = Annotated[str, Depends(_blob)]


def _named_by_query(request: Request) -> None:
    """Raise Problem for a query that is not UTF-8: replaced bytes would name other keys."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError as err:
        raise Problem(400, "bad-query", f"query: is not UTF-8 (byte {err.start}, percent-decoded)") from err


KeysInQuery = Depends(_named_by_query)
