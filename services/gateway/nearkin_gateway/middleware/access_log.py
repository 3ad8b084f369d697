"""Log each request with an id that its response carries too.

Invariant: a line is bounded and has no secret.

    method=GET path="/v1/blobs/a" status=200 seconds=0.012 received=0 sent=1000 peer=127.0.0.1 request=0f3a...

Text of the caller is quoted as JSON, so that no request can forge a line; the query, which may have secrets, is
omitted. A valid `X-Request-ID` of the request is kept.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin_gateway.middleware.byte_counts import ByteCountingExchange

HEADER = b"x-request-id"
PATH_CHARACTERS_MAX = 256
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
_GIVEN = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("nearkin.access")


class AccessLog:
    """Wrap the application: add the request id to all logs of a request, and log its end."""

    def __init__(self, app: ASGIApp, *, enabled: bool) -> None:
        self._app, self._enabled = app, enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        began, exchange = time.perf_counter(), ByteCountingExchange(receive, send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (HEADER, request_id.encode())]}
            await exchange.send(message)

        try:
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                await self._app(scope, exchange.receive, send_with_id)
        finally:
            if self._enabled and not (scope["path"] in PROBES and exchange.status < 400):
                _log.info(
                    "method=%s path=%s status=%d seconds=%.3f received=%d sent=%d peer=%s request=%s",
                    _quote(scope["method"]), _quote(scope["path"]), exchange.status, time.perf_counter() - began,
                    exchange.received_bytes, exchange.sent_bytes, (scope.get("client") or ("unknown",))[0], request_id,
                )  # fmt: skip


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == HEADER and _GIVEN.fullmatch(value):
            return str(value.decode())
    return secrets.token_hex(8)


def _quote(text: str) -> str:
    """Return the caller's text as JSON, with escapes for control and non-ASCII characters."""
    return json.dumps(text if len(text) <= PATH_CHARACTERS_MAX else text[:PATH_CHARACTERS_MAX] + "...")
