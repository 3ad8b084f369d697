# size: one middleware
"""Let pages of configured web origins use the API (CORS).

Invariant: off by default, and never with cookies.

A page of another origin authenticates with a token in `Authorization`; the dashboard's session stays its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

PREFLIGHT_SECONDS = 600
METHODS = ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS")
EXPOSED_HEADERS = (
    "*",  # metadata, whose names are the caller's; browsers that do not know it read the list
    "Accept-Ranges", "Content-Disposition", "Content-Range", "ETag", "Idempotent-Replayed", "Link", "Location",
    "Repr-Digest", "Retry-After", "Tus-Checksum-Algorithm", "Tus-Extension", "Tus-Max-Size", "Tus-Resumable",
    "Tus-Version", "Upload-Concat", "Upload-Expires", "Upload-Length", "Upload-Metadata", "Upload-Offset",
    "X-Nearkin-Meta-Omitted", "X-Nearkin-Version", "X-Nearkin-Versions",
    "X-Request-ID",
)  # fmt: skip


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application with CORS for `origins`; the application itself without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        allow_credentials=False,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_SECONDS,
    )


def is_allowed_origin(headers: Headers, origins: Sequence[str]) -> bool:
    """Return whether a request comes from a page of one of `origins`."""
    origin = headers.get("origin")
    return origin is not None and ("*" in origins or origin in origins)
