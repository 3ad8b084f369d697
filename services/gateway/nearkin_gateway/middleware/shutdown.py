"""Answer requests that a stop cuts off: the client is asked to retry.

uvicorn cancels running requests after `gateway.shutdown_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearkin_gateway.http.problems import MEDIA_TYPE, RETRY_SECONDS, Problem, problem_body

DETAIL = "this gateway is stopping and the request did not end in time; nothing was stored: send it again"
_log = logging.getLogger("nearkin.gateway")


class AnswerCutRequests:
    """Wrap the application: a cancelled request gets 503, or its connection is aborted."""

    def __init__(self, app: ASGIApp, is_stopping: Callable[[], bool]) -> None:
        self._app, self._is_stopping = app, is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._is_stopping():
                raise
            _log.warning("%s: cut by the stop", scope["method"])
            if not has_begun:
                await _send_unavailable(scope, send)
            elif (connection := scope.get("extensions", {}).get("nearkin.connection")) is not None:
                connection["abort"]()  # an answer that ends early must not look whole


async def _send_unavailable(scope: Scope, send: Send) -> None:
    body = problem_body(Problem(503, "stopping", DETAIL), scope["path"])
    headers = {
        "content-type": MEDIA_TYPE,
        "content-length": str(len(body)),
        "retry-after": str(RETRY_SECONDS),
        "connection": "close",
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 503, "headers": raw})
    await send({"type": "http.response.body", "body": body})
