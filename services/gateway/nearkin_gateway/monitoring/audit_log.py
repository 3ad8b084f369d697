"""Write the audit log: caller and operation, one bounded record for each event.

    first use of a token, or first failure, of an address  -> a record; repeats are counted until the window ends
    a change                                               -> always a record: each costs its caller a durable write
    a read                                                 -> a record, at most 100 a second of a tenant and event

Invariant (I10): requests cost a bounded number of records, and those left out are counted. No record holds a token, a
password or content: fields come from EVENTS, values that callers chose are bounded and escaped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import structlog

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.auth.tokens import AccessToken
from nearkin_gateway.http.request_limits import Rates, peer_group
from nearkin_gateway.monitoring.audit_events import EVENTS, AuditEvent
from nearkin_shared.config.services import AuditSettings
from nearkin_shared.limits import KEY_BYTES_MAX
from nearkin_shared.observability import log_setup, metrics
from nearkin_shared.utils.frozen import frozen

VALUE_CHARACTERS_MAX = KEY_BYTES_MAX
"""A whole key, so that a record names it without doubt."""
WINDOW_KEYS_MAX = 10_000
"""Tokens and addresses counted one by one in a window; others are bounded by AUDIT_RECORDS_PER_SECOND alone."""
_log = logging.getLogger(log_setup.AUDIT)
_gateway_log = logging.getLogger("nearkin.gateway")


@frozen
class Actor:
    """The origin of a request: tenant, token id and peer address, each "" where there is none."""

    tenant: str = ""
    token: str = ""
    peer: str = ""


class AuditLog:
    """Writes audit records. Safe between threads."""

    def __init__(self, settings: AuditSettings) -> None:
        self._settings = settings
        self._rates = Rates(limits.AUDIT_RECORDS_PER_SECOND)
        self._window: dict[tuple[str, Actor, str, str], int] = {}
        """Repeats since the window began, by event, actor, `via` and reason."""
        self._suppressed: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Return whether records are written."""
        return self._settings.records != "none"

    def record(self, name: str, actor: Actor, fields: Mapping[str, object]) -> None:
        """Write a record of an event of EVENTS, unless settings or rates leave it out."""
        event = EVENTS[name]
        if not self.enabled or (event.is_read and self._settings.records != "all"):
            return
        metrics.AUDIT_EVENTS.labels(name).inc()
        self._emit(event, actor, fields)

    def record_success(self, actor: Actor, via: str) -> None:
        """Record that a token or a session was accepted; `via`: bearer or session."""
        self._record_once("auth.succeeded", actor, via, "")

    def record_failure(self, actor: Actor, via: str, reason: str) -> None:
        """Record that a request was refused because of who sent it; `reason` is one of REASONS."""
        self._record_once("auth.failed", actor, via, reason)

    def record_token_changes(self, added: Iterable[AccessToken], removed: Iterable[AccessToken]) -> None:
        """Record which tokens a changed tokens file has gained and lost."""
        for name, tokens in (("token.created", added), ("token.revoked", removed)):
            for token in tokens:
                fields = {"scopes": " ".join(token.scopes), "expires": token.expires}
                self.record(name, Actor(token.tenant, token.id), fields)

    def summarize(self) -> None:
        """End the window: record repeats and the number of suppressed records."""
        with self._lock:
            window, self._window = self._window, {}
        for (name, actor, via, reason), repeats in window.items():
            if repeats:
                self._emit(EVENTS[name], actor, {"reason": reason, "via": via, "repeats": repeats}, repeats, "")
        with self._lock:
            suppressed, self._suppressed = self._suppressed, Counter()
        for name, count in sorted(suppressed.items()):
            fields = {"suppressed": name, "count": count}
            self._write(EVENTS["audit.suppressed"], Actor(), fields, "")

    async def summarize_for_ever(self) -> None:
        """Call `summarize` at the end of every window."""
        while self.enabled:
            await asyncio.sleep(limits.AUDIT_WINDOW_SECONDS)
            try:
                self.summarize()
            except Exception:  # the next window must not stay without an end: its failures would never be recorded
                _gateway_log.exception("the audit log's window could not be summarized; the next one is")

    def _record_once(self, name: str, actor: Actor, via: str, reason: str) -> None:
        if not self.enabled:
            return
        metrics.AUDIT_EVENTS.labels(name).inc()
        key = name, Actor(actor.tenant, actor.token, peer_group(actor.peer)), via, reason
        with self._lock:
            repeats = self._window.get(key)
            if repeats is not None:
                self._window[key] = repeats + 1
                return
            if len(self._window) < WINDOW_KEYS_MAX:
                self._window[key] = 0
        self._emit(EVENTS[name], actor, {"reason": reason, "via": via})

    def _emit(
        self,
        event: AuditEvent,
        actor: Actor,
        fields: Mapping[str, object],
        count: int = 1,
        request_id: str | None = None,
    ) -> None:
        """Write a record that stands for `count` events, or count them as suppressed."""
        if event.is_limited:
            with self._lock:
                allowed = self._rates.allows(f"{event.name} {actor.tenant}")
                if not allowed:
                    self._suppressed[event.name] += count
            if not allowed:
                metrics.AUDIT_SUPPRESSED.labels(event.name).inc(count)
                return
        self._write(event, actor, fields, request_id)

    def _write(self, event: AuditEvent, actor: Actor, fields: Mapping[str, object], request_id: str | None) -> None:
        """Write a record; `request_id` None: that of the request at work."""
        if request_id is None:
            request_id = structlog.contextvars.get_contextvars().get("request_id", "")
        whole = {"tenant": actor.tenant, "token": actor.token, "peer": actor.peer, **fields, "request_id": request_id}
        shown = {name: _bound_value(value) for name, value in whole.items() if value not in (None, "")}
        log_setup.log_event(_log, event.level, event.name, shown)


def _bound_value(value: object) -> object:
    """Return a value as a record may hold it: numbers as they are, text bounded and escaped."""
    if isinstance(value, int):
        return value
    text = str(value)
    if len(text) > VALUE_CHARACTERS_MAX:
        text = text[:VALUE_CHARACTERS_MAX] + "..."
    return text if text.isprintable() and "\\" not in text else "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character == "\\":
        return "\\\\"
    return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()
