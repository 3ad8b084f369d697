"""Record each authenticated request at its end, with its status and transferred bytes.

The route's operation selects the event (OPERATIONS); handlers add fields by `annotate`, before the response. A
request that was refused because of its caller is recorded by nearkin_gateway.auth.access as auth.failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from nearkin_gateway.middleware.byte_counts import ByteCountingExchange
from nearkin_gateway.monitoring.audit_events import EVENTS, OPERATIONS
from nearkin_gateway.monitoring.audit_log import Actor, AuditLog

NOTE = "nearkin.audit"
"""Key of the note in a request's scope."""


@dataclass(slots=True)
class RequestNote:
    """The fields of a request for its audit record."""

    actor: Actor | None = None
    event: str = ""
    """An event other than that of the operation."""
    fields: dict[str, object] = field(default_factory=dict)


def identify(request: HTTPConnection, actor: Actor) -> None:
    """Note who sent a request."""
    if (note := request.scope.get(NOTE)) is not None:
        note.actor = actor


def annotate(request: HTTPConnection, event: str = "", **fields: object) -> None:
    """Note fields of a request's record, or that it is of another event than its operation's."""
    if (note := request.scope.get(NOTE)) is not None:
        note.event = event or note.event
        note.fields |= fields


class AuditRequests:
    """Wraps the application; inside of what binds the id of the request."""

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and record it."""
        if scope["type"] != "http" or not self._audit.enabled:
            await self._app(scope, receive, send)
            return
        note = scope[NOTE] = RequestNote()
        exchange = ByteCountingExchange(receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._record(scope, note, exchange)

    def _record(self, scope: Scope, note: RequestNote, exchange: ByteCountingExchange) -> None:
        operation = getattr(scope.get("route"), "operation_id", None) or ""
        name = note.event or OPERATIONS.get(operation)
        if name is None or note.actor is None:
            return
        event = EVENTS[name]
        fields: dict[str, object] = {"operation": operation} if "operation" in event.fields else {}
        if event.counted:
            fields["bytes"] = exchange.sent_bytes if event.counted == "sent" else exchange.received_bytes
        result = exchange.status if exchange.is_whole else f"{exchange.status} cut short"
        self._audit.record(name, note.actor, {**fields, **note.fields, "result": result})
