"""Build the ASGI application of the gateway.

Invariant: every route declares its scope, its bounds and all its responses, and OpenAPI documents the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Lifespan

from nearkin_gateway.http.header_bounds import document_parameters
from nearkin_gateway.http.problems import MEDIA_TYPE, ProblemBody, install
from nearkin_gateway.http.url_keys import PathAsSent
from nearkin_gateway.middleware.access_log import AccessLog
from nearkin_gateway.middleware.audit_requests import AuditRequests
from nearkin_gateway.middleware.cors import allow_origins
from nearkin_gateway.middleware.request_metrics import RequestMetrics
from nearkin_gateway.middleware.request_tracing import RequestTracing
from nearkin_gateway.middleware.shutdown import AnswerCutRequests
from nearkin_gateway.routes import (
    admin_routes,
    blob_routes,
    checkpoint_routes,
    dead_letter_routes,
    deletion_routes,
    operations_routes,
    upload_routes,
)
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.finalize import sweep_for_ever
from nearkin_shared.errors import NearkinError
from nearkin_shared.observability.tracing import current

THREADS_MAX = 64
"""Blocking calls of the object store: restores, listings. More wait in a queue bounded by the connections."""
ROUTERS = tuple(
    module.router
    for module in (
        blob_routes,
        checkpoint_routes,
        deletion_routes,
        admin_routes,
        operations_routes,
        dead_letter_routes,
        upload_routes,
    )
)
_log = logging.getLogger("nearkin.gateway")


def create_app(gateway: Gateway) -> FastAPI:
    """Return the ASGI application of a gateway."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_MAX, "nearkin-gateway"))
        try:
            await gateway.ingest.open()
        except NearkinError as err:
            gateway.failure = err
            raise
        sweeper = asyncio.create_task(sweep_for_ever(gateway))
        summaries = asyncio.create_task(gateway.audit.summarize_for_ever())
        try:
            yield
        finally:
            gateway.stopping = True
            sweeper.cancel()
            summaries.cancel()
            if hand_overs := list(gateway.background.values()):
                await asyncio.wait(hand_overs, timeout=gateway.bounds.shutdown_seconds)
            for task in hand_overs:  # another gateway takes up the rest
                task.cancel()
            await asyncio.gather(sweeper, summaries, *hand_overs, return_exceptions=True)
            gateway.audit.summarize()
            await gateway.load.close()
            await gateway.ingest.close()
            gateway.readiness.close()
            await gateway.pools.close()
            await asyncio.to_thread(gateway.catalogue.close)

    app = _make_app(lifespan)
    app.state.gateway = gateway
    if gateway.settings.dashboard.enabled:
        from nearkin_gateway import dashboard

        dashboard.install(app)
    install(app, [route for router in ROUTERS for route in router.routes])
    return app


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document that every gateway of this version serves."""
    return _make_app().openapi()


def _make_app(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Return an application with all routes of the API."""
    try:
        number = version("nearkin")
    except PackageNotFoundError:  # run from a source tree
        number = "0"
    app = FastAPI(
        title="Nearkin",
        version=number,
        summary="Keeps a chunk as its nearest kin plus the difference.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    for router in ROUTERS:
        app.include_router(router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def with_middleware(app: FastAPI) -> ASGIApp:
    """Return the application as a server should call it."""
    tracing = current()
    counted = RequestMetrics(allow_origins(app, app.state.gateway.bounds.cors_origins))
    gateway: Gateway = app.state.gateway
    answered = AnswerCutRequests(
        counted if tracing is None else RequestTracing(counted, tracing), lambda: gateway.stopping
    )
    audited = AuditRequests(answered, gateway.audit)
    return PathAsSent(AccessLog(audited, enabled=gateway.bounds.access_log))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the problem documents that the routes refer to."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components["ProblemBody"] = ProblemBody.model_json_schema(ref_template="#/components/schemas/{model}")
        for name in ("HTTPValidationError", "ValidationError"):
            components.pop(name, None)
        for operations in schema["paths"].values():
            for operation in operations.values():
                document_parameters(operation)
                # The scopes of one entry are all needed, entries are alternatives: our routes need one of their scopes.
                if "security" in operation:
                    operation["security"] = [
                        {name: [scope]}
                        for entry in operation["security"]
                        for name, scopes in entry.items()
                        for scope in scopes
                    ]
                for status, response in operation["responses"].items():
                    if int(status) >= 400:  # all our errors are problems, the framework's own included
                        response["content"] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
        app.openapi_schema = schema
    return app.openapi_schema
