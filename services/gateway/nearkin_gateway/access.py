"""Who is asking. Invariant: a route names the scope it needs, and runs for nobody else; one tenant for each caller."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from nearkin_gateway.problems import Problem
from nearkin_gateway.state import gateway_of

_bearer = HTTPBearer(
    auto_error=False,
    description="A token of `nearkin token create`; not asked for where no tokens are configured (loopback only).",
)
_Given = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request belongs to. `name` for logs and rates: a token's id, or the address."""

    tenant: str
    name: str


def needs(scope: str) -> Callable[..., Awaitable[Caller]]:
    """Return the dependency that lets callers with `scope` pass. It answers 401, 403 or 429 to others."""

    async def caller(request: Request, given: _Given) -> Caller:
        gateway = gateway_of(request)
        address = request.client.host if request.client is not None else "unknown"
        if gateway.tokens is None:
            gateway.rates.take(address)
            return Caller(gateway.settings.tenant, address)
        if given is None:
            raise _unauthorized("", "want Authorization: Bearer with a token of `nearkin token create`", "no-token")
        token = gateway.tokens.find(given.credentials)
        if token is None:
            gateway.rates.take(address)  # whoever guesses is slowed down by address
            raise _unauthorized("invalid_token", "the token is not known, or was revoked", "bad-token")
        if token.expired(time.time()):
            raise _unauthorized("invalid_token", f"the token {token.id} has expired", "expired-token")
        gateway.rates.take(token.id)
        if scope not in token.scopes:
            raise Problem(
                403,
                "missing-scope",
                f"the token {token.id} has not the scope {scope}",
                headers={"WWW-Authenticate": f'Bearer realm="nearkin", error="insufficient_scope", scope="{scope}"'},
            )
        return Caller(token.tenant, token.id)

    return caller


def _unauthorized(code: str, detail: str, name: str) -> Problem:
    error = f', error="{code}", error_description="{detail}"' if code else ""
    return Problem(401, name, detail, headers={"WWW-Authenticate": f'Bearer realm="nearkin"{error}'})


Reader = Annotated[Caller, Depends(needs("read"))]
Writer = Annotated[Caller, Depends(needs("write"))]
Deleter = Annotated[Caller, Depends(needs("delete"))]
Admin = Annotated[Caller, Depends(needs("admin"))]
