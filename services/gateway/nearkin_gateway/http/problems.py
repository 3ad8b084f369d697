"""Answer errors as problem documents (RFC 9457), also errors of the framework.

`type` is `urn:nearkin:problem:NAME`: stable, one for each kind; programs compare it, people read `detail`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from nearkin_shared.errors import (
    BadInput,
    BaseUnusable,
    ConfigError,
    Corrupt,
    FormatTooNew,
    GcPaused,
    NotFound,
    PreconditionFailed,
    RetentionActive,
    RetryableError,
    TenantErased,
)
from nearkin_shared.observability import metrics
from nearkin_shared.preconditions import PRECONDITION

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 5
TUS_VERSION = "1.0.0"
"""Of the resumable uploads: the protocol wants it in every answer."""
ERRORS_MAX = 20
DETAIL_CHARACTERS_MAX = 1000
_ADDRESS = re.compile(r"[a-z0-9+]+://[^\s,;\"']+|(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):[0-9]{2,5}\b")
_PATH = re.compile(r"(?<![\w.)~-])~?(?:/[\w.+@%-]+)+/?")
_log = logging.getLogger("nearkin.gateway")


class ProblemBody(BaseModel):
    """A problem document (RFC 9457)."""

    type: str = Field(examples=["urn:nearkin:problem:not-found"])
    title: str
    status: int
    detail: str = Field(description="The wrong value, and the valid ones.")
    instance: str | None = Field(default=None, description="Path of the request.")
    errors: list[dict[str, str]] | None = Field(default=None, description="Each field that was refused.")
    quota: str | None = Field(default=None, description="Of a refusal by a quota: its name.")
    value: int | None = Field(default=None, description="Bytes, this upload included.")
    limit: int | None = Field(default=None, description="Bytes that the quota allows.")
    remedy: str | None = Field(default=None, description="How to make it fit.")


class Problem(Exception):
    """A request that is answered with a problem document."""

    def __init__(
        self,
        status: int,
        name: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] | None = None,
        members: Mapping[str, str | int] | None = None,
    ) -> None:
        """`members`: further fields of the document."""
        super().__init__(detail)
        self.status, self.name, self.detail = status, name, detail
        self.headers = dict(headers or {})
        self.errors = errors
        self.members = dict(members or {})


def _title(status: int) -> str:
    return "Checksum Mismatch" if status == 460 else HTTPStatus(status).phrase  # 460 is tus', not the IANA's


def problem_body(problem: Problem, instance: str | None) -> bytes:
    """Return the document as JSON; ASCII, so that a lone surrogate cannot break it."""
    body: dict[str, Any] = {
        "type": f"urn:nearkin:problem:{problem.name}",
        "title": _title(problem.status),
        "status": problem.status,
        "detail": problem.detail[:DETAIL_CHARACTERS_MAX],
        **problem.members,
    }
    if instance is not None:
        body["instance"] = instance
    if problem.errors:
        body["errors"] = list(problem.errors)[:ERRORS_MAX]
    return json.dumps(body).encode()


def from_error(err: Exception) -> Problem:  # noqa: PLR0911 - one for each kind
    """Return the problem that stands for an error of ours."""
    match err:
        case Problem():
            return err
        case NotFound():
            return Problem(404, "not-found", str(err))
        case TenantErased():
            return Problem(410, "erased", str(err))
        case GcPaused():
            return Problem(409, "paused", str(err))
        case PreconditionFailed():
            return Problem(412, PRECONDITION, str(err))
        case BaseUnusable():
            return Problem(409, "base-unusable", str(err))
        case RetentionActive():
            return Problem(409, "retained", str(err))
        case ConfigError():
            return Problem(422, "bad-setting", str(err))
        case BadInput():
            return Problem(400, "bad-input", str(err))
        case Corrupt() | FormatTooNew():
            metrics.CORRUPT.labels("restore").inc()
            return Problem(500, "corrupt", str(err))
        case RetryableError():
            return Problem(503, "unavailable", without_addresses(str(err)), headers={"Retry-After": str(RETRY_SECONDS)})
        case _:
            return Problem(500, "internal", "an error in the gateway; see its log")


def without_addresses(text: str) -> str:
    """Return an error's text without folders and server addresses, which only the log has."""
    return _PATH.sub("(a folder)", _ADDRESS.sub("(an address)", text))


def answer(request: Request, problem: Problem) -> Response:
    """Return the response of a problem."""
    path: str = request.scope["path"]
    headers = (
        problem.headers if not path.startswith("/v1/uploads") else {"Tus-Resumable": TUS_VERSION, **problem.headers}
    )
    return Response(problem_body(problem, path), problem.status, headers, media_type=MEDIA_TYPE)


def _allowed_methods(request: Request, routes: Sequence[BaseRoute]) -> str:
    """Return the methods of a resource: the framework knows only those of its first route."""
    found: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found.setdefault(route.path, set()).update(route.methods or ())
    nearest = max(found, key=len, default="")  # /v1/blobs/{key}/versions, before the key that ends so
    return ", ".join(sorted(found.get(nearest, ())))


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer every error with a problem document. `routes` are those of the API."""

    def ours(request: Request, err: Exception) -> Response:
        problem = from_error(err)
        if problem.status >= 500 and problem.status not in (501, 507):
            _log.log(
                logging.WARNING if isinstance(err, RetryableError | Problem) else logging.ERROR,
                "%s %s: %s",
                request.method,
                getattr(request.scope.get("route"), "path", "(no route)"),  # a path holds the caller's key
                err,
                exc_info=err if problem.name == "internal" else None,
            )
        return answer(request, problem)

    def http(request: Request, err: Exception) -> Response:
        assert isinstance(err, HTTPException)
        name = HTTPStatus(err.status_code).phrase.lower().replace(" ", "-")
        detail, headers = str(err.detail), dict(err.headers or {})
        if err.status_code == 404:
            detail = "no such resource; GET /openapi.json lists all"
        if err.status_code == 405:
            detail = f"{request.method} is not for this resource"
            headers["Allow"] = _allowed_methods(request, routes) or headers.get("Allow", "")
        return answer(request, Problem(err.status_code, name, detail, headers=headers))

    def invalid(request: Request, err: Exception) -> Response:
        assert isinstance(err, RequestValidationError)
        errors = [
            {"field": ".".join(str(part) for part in found["loc"]), "message": str(found["msg"])[:200]}
            for found in err.errors()
        ]
        first = errors[0] if errors else {"field": "request", "message": "is not valid"}
        return answer(request, Problem(422, "invalid", f"{first['field']}: {first['message']}", errors=errors))

    def gone(_request: Request, _err: Exception) -> Response:
        return Response(status_code=400)  # the client has disconnected

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    refusals = (
        NotFound,
        TenantErased,
        GcPaused,
        PreconditionFailed,
        RetentionActive,
        BaseUnusable,
        ConfigError,
        BadInput,
    )
    for kind in (Problem, *refusals, Corrupt, FormatTooNew, RetryableError, Exception):
        app.add_exception_handler(kind, ours)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of these problems."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}},
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
        }
        for status in statuses
    }


_RETRY = {"Retry-After": {"description": "Seconds until it is worth trying again.", "schema": {"type": "string"}}}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "`Bearer`, with what is wrong.", "schema": {"type": "string"}}},
    403: {
        "WWW-Authenticate": {"description": "`Bearer` with the scope that is missing.", "schema": {"type": "string"}}
    },
    405: {"Allow": {"description": "The methods there are.", "schema": {"type": "string"}}},
    415: {"Accept-Encoding": {"description": "`identity`, of an encoded body.", "schema": {"type": "string"}}},
    416: {"Content-Range": {"description": "`bytes */SIZE`.", "schema": {"type": "string"}}},
    429: _RETRY,
    503: _RETRY,
}
