# size: one middleware
"""Count requests. Invariant: a label is a known route or method, never text of a client."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin_shared.observability import metrics

METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"


class RequestMetrics:
    """Wrap the application inside the path rewriting: the route is read from the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; count it when it has ended, however it did."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else OTHER
        began, status = time.perf_counter(), 0

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                metrics.RECEIVED_BYTES.inc(len(message.get("body", b"")))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                metrics.SENT_BYTES.inc(len(message.get("body", b"")))
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            metrics.REQUESTS.labels(method, route, str(status)).inc()
            metrics.REQUEST_SECONDS.labels(method).observe(time.perf_counter() - began)
