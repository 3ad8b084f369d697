"""Authenticate callers and check their scope.

Invariant: a route runs only for callers with the scope that it declares; each caller has one tenant.

Authorization: Bearer TOKEN      programs
session cookie                   pages of the dashboard; a change needs their CSRF token and Origin too
neither                          without configured tokens: loopback by a loopback name, and no other site
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from nearkin_gateway.auth.sessions import (
    CSRF_HEADER,
    SAFE_METHODS,
    LoginSession,
    check_loopback_host,
    check_same_origin,
    cookie_of,
)
from nearkin_gateway.auth.tokens import OPERATOR, SCOPES, AccessToken
from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.middleware.audit_requests import identify
from nearkin_gateway.middleware.cors import is_allowed_origin
from nearkin_gateway.monitoring.audit_log import Actor
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_gateway.uploads.upload_service import FOREIGN_TENANT, check_open
from nearkin_shared.utils.frozen import frozen

_bearer = HTTPBearer(
    auto_error=False,
    description="A token of `nearkin token create`; not asked for where no tokens are configured (loopback only).",
)
_Given = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


@frozen
class Caller:
    """Whom a request belongs to. `name` for logs and rates: a token's id, or the address."""

    tenant: str
    """Empty for an operator without a tenant."""
    name: str
    address: str = ""
    """Where the request comes from."""
    token: str = ""
    """The token's id; "" where no tokens are configured."""
    scopes: frozenset[str] = frozenset(SCOPES)
    via: str = "open"
    """How the request was authenticated: bearer, session, or open where no tokens are configured."""

    @property
    def holders(self) -> Holders:
        """Return whose shares of the gateway's limits the request counts against."""
        return Holders(self.tenant, self.token, self.address)

    @property
    def actor(self) -> Actor:
        """Return the origin of the request for the audit log."""
        return Actor(self.tenant, self.token, self.address)

    @property
    def is_operator(self) -> bool:
        """Return whether the caller may see and set what is not of one tenant."""
        return OPERATOR in self.scopes


def needs(*scopes: str) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that accepts callers with one of `scopes`.

    It answers 401, 403 or 429 to all other callers.
    """
    scope = scopes[0]

    async def caller(request: Request, given: _Given) -> Caller:
        gateway = gateway_of(request)
        if gateway.tokens is None:
            found = open_caller(request, gateway)
        else:
            if given is None:
                via, token = "session", _session_token(request, gateway)
            else:
                via, token = "bearer", shown_token(request, gateway, given.credentials, "bearer")
            if not set(scopes) & set(token.scopes):
                record_refusal(request, gateway, via, "scope", token)
                raise _missing_scope(token, scope)
            found = Caller(token.tenant, token.id, address_of(request), token.id, frozenset(token.scopes), via)
            gateway.audit.record_success(found.actor, via)
        identify(request, found.actor)
        return found

    return caller


def _session_token(request: Request, gateway: Gateway) -> AccessToken:
    """Return the token of the request's session. Raises Problem 401, 403 or 429."""
    session = session_of(request, gateway)
    if session is None:
        record_refusal(request, gateway, "session", "missing" if cookie_of(request) is None else "session")
        gateway.rates.take(address_of(request))
        raise _unauthorized("", "want Authorization: Bearer with a token of `nearkin token create`", "no-token")
    gateway.rates.take(session.token.id)
    if request.method not in SAFE_METHODS:
        try:
            check_same_origin(request, must_say=True)
        except Problem as err:
            record_refusal(request, gateway, "session", err.name, session.token)
            raise
        if not hmac.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), session.csrf.encode()):
            record_refusal(request, gateway, "session", "bad-csrf", session.token)
            raise Problem(403, "bad-csrf", f"{CSRF_HEADER}: is not this session's; load the page again")
    return session.token


def _missing_scope(token: AccessToken, scope: str) -> Problem:
    challenge = f'Bearer realm="nearkin", error="insufficient_scope", scope="{scope}"'
    why = f"the token {token.id} has not the scope {scope}"
    return Problem(403, "missing-scope", why, headers={"WWW-Authenticate": challenge})


def record_refusal(request: Request, gateway: Gateway, via: str, reason: str, token: AccessToken | None = None) -> None:
    """Record a refused request; `token` only where its secret was proved."""
    known = ("", "") if token is None else (token.tenant, token.id)
    gateway.audit.record_failure(Actor(*known, address_of(request)), via, reason)


def open_caller(request: Request, gateway: Gateway) -> Caller:
    """Return the caller of a gateway without tokens.

    Raises Problem: 403 for a request that a page of another site sent, 429.
    """
    address = address_of(request)
    gateway.rates.take(address)
    try:
        check_loopback_host(request)
        if request.method not in SAFE_METHODS and not is_allowed_origin(request.headers, gateway.bounds.cors_origins):
            check_same_origin(request, must_say=False)
    except Problem as err:
        record_refusal(request, gateway, "open", err.name)
        raise
    return Caller(gateway.settings.tenant, address, address)


def session_of(request: Request, gateway: Gateway) -> LoginSession | None:
    """Return the session of a browser, if it has one that is still open."""
    cookie = cookie_of(request)
    if cookie is None or gateway.sessions is None:
        return None
    return gateway.sessions.read(cookie, time.time())


def shown_token(request: Request, gateway: Gateway, text: str, via: str) -> AccessToken:
    """Return the token that `text` is, counted. Raises Problem 401 or 429."""
    assert gateway.tokens is not None
    token = gateway.tokens.find(text)
    if token is None:
        record_refusal(request, gateway, via, "unknown")
        gateway.rates.take(address_of(request))  # limits guesses of one address
        raise _unauthorized("invalid_token", "the token is not known, or was revoked", "bad-token")
    if token.expired(time.time()):
        record_refusal(request, gateway, via, "expired", token)
        gateway.rates.take(address_of(request))
        raise _unauthorized("invalid_token", f"the token {token.id} has expired", "expired-token")
    gateway.rates.take(token.id)
    return token


async def check_open_to(request: Request, gateway: Gateway, caller: Caller) -> None:
    """Check that the caller may upload now. Raises Problem, TenantErased, StoreUnavailable."""
    try:
        await check_open(gateway, caller.tenant)
    except Problem as err:
        if err.name == FOREIGN_TENANT:
            gateway.audit.record_failure(caller.actor, caller.via, FOREIGN_TENANT)
        raise


def address_of(request: Request) -> str:
    """Return where a request comes from."""
    return request.client.host if request.client is not None else "unknown"


def _unauthorized(code: str, detail: str, name: str) -> Problem:
    error = f', error="{code}", error_description="{detail}"' if code else ""
    return Problem(401, name, detail, headers={"WWW-Authenticate": f'Bearer realm="nearkin"{error}'})


Reader = Annotated[Caller, Security(needs("read"), scopes=["read"])]
Writer = Annotated[Caller, Security(needs("write"), scopes=["write"])]
Deleter = Annotated[Caller, Security(needs("delete"), scopes=["delete"])]
Admin = Annotated[Caller, Security(needs("admin", OPERATOR), scopes=["admin", OPERATOR])]
Operator = Annotated[Caller, Security(needs(OPERATOR), scopes=[OPERATOR])]
