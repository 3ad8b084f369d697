# size: one middleware
"""Trace requests.

Invariant: the context sent into the pipeline is this request's span, sampled or not.

A request's own `traceparent` is the parent, and its sampling decision is followed; without one a trace begins.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin_gateway.middleware.request_metrics import METHODS, OTHER
from nearkin_shared.observability.tracing import Tracing, closing

UNTRACED = frozenset({"/livez", "/readyz", "/metrics"})
"""Probes, one in some seconds each."""


class RequestTracing:
    """Wraps the application, in processes that are traced."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its span's context instead of the caller's."""
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        tracing = self._tracing
        method = scope["method"] if scope["method"] in METHODS else OTHER
        given = [value for name, value in scope["headers"] if name == b"traceparent"]
        span = tracing.begin(
            method,
            tracing.context(given[0]) if len(given) == 1 else None,
            "server",
            attributes={"http.request.method": method},
        )
        others = [(name, value) for name, value in scope["headers"] if name != b"traceparent"]
        scope = {**scope, "headers": [*others, (b"traceparent", tracing.open(span))]}

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        with closing(tracing, span):
            try:
                await self._app(scope, receive, sent)
            finally:
                route = getattr(scope.get("route"), "path", OTHER)  # an unknown path is no label
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
