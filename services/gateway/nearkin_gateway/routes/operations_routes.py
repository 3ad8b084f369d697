"""Routes for operators: shares, growth, lag, garbage collection, changes of settings.

The dashboard shows the same data.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Admin, Operator, Reader
from nearkin_gateway.http import response_models
from nearkin_gateway.http.problems import responses
from nearkin_gateway.http.request_bodies import json_member
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.monitoring.usage import Growth, Reduction
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_shared.errors import BadInput, NotFound

TENANTS_SHOWN_MAX = 50
ACTION_BYTES_MAX = 64 * 1024
GC_EVENTS = {"run": "gc.requested", "pause": "gc.paused", "resume": "gc.resumed"}
GC_ACTIONS = tuple(GC_EVENTS)
_GC: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["action"],
                    "properties": {"action": {"type": "string", "enum": list(GC_ACTIONS)}},
                }
            }
        },
    }
}
router = APIRouter()
_PLAIN = responses(400, 401, 403, 405, 422, 429, 431, 500, 503)


@router.get(
    "/v1/reduction",
    responses={**_PLAIN, **responses(404, 410)},
    response_model=response_models.ReductionReport,
    operation_id="getReduction",
    tags=["insight"],
)
async def reduction(request: Request, caller: Reader) -> Response:
    """Return what the caller's tenant takes by prefix; the shares add up to the stored bytes."""
    gateway = gateway_of(request)
    await asyncio.to_thread(gateway.catalogue.check_tenant, caller.tenant)
    found = await asyncio.to_thread(gateway.insight.reduction, caller.tenant)
    return JSONResponse({"tenants": [tenant_json(caller.tenant, found)]})


@router.get(
    "/v1/tenants",
    responses=_PLAIN,
    response_model=response_models.ReductionReport,
    operation_id="listTenants",
    tags=["admin"],
)
async def tenants(request: Request, caller: Admin) -> Response:
    """Return the usage of up to 50 tenants to an operator, of the caller's tenant to others.

    Tenants are those that tokens name.
    """
    found = await asyncio.to_thread(tenants_json, gateway_of(request), caller.tenant, every=caller.is_operator)
    return JSONResponse({"tenants": found})


@router.get(
    "/v1/growth",
    responses={**_PLAIN, **responses(404, 410)},
    response_model=response_models.GrowthReport,
    operation_id="getGrowth",
    tags=["insight"],
)
async def growth(request: Request, caller: Reader) -> Response:
    """Return the growth of the caller's tenant: logical and stored bytes over time."""
    gateway = gateway_of(request)
    await asyncio.to_thread(gateway.catalogue.check_tenant, caller.tenant)
    return JSONResponse(growth_json(await asyncio.to_thread(gateway.insight.growth, caller.tenant)))


@router.get(
    "/v1/pipeline",
    responses=_PLAIN,
    response_model=response_models.Pipeline,
    operation_id="getPipeline",
    tags=["admin"],
)
async def pipeline(request: Request, _caller: Operator) -> Response:
    """Return lag and rate of each stage, the last hour by the minute, and failures."""
    return JSONResponse(await pipeline_json(gateway_of(request)))


@router.get(
    "/v1/audit", responses=_PLAIN, response_model=response_models.Audit, operation_id="getAudit", tags=["admin"]
)
async def audit(request: Request, _caller: Operator) -> Response:
    """Return who changed hot settings when, newest first."""
    return JSONResponse({"changes": list(reversed(gateway_of(request).hot.audit))})


@router.get("/v1/gc", responses=_PLAIN, response_model=response_models.GcStatus, operation_id="getGc", tags=["admin"])
async def gc(request: Request, _caller: Operator) -> Response:
    """Return the result of the last GC run, and whether GC is paused."""
    return JSONResponse(await asyncio.to_thread(collection_json, gateway_of(request)))


@router.post(
    "/v1/gc",
    status_code=202,
    responses={**_PLAIN, **responses(408, 409, 413)},
    response_model=response_models.GcStatus,
    openapi_extra=_GC,
    operation_id="changeGc",
    tags=["admin"],
)
async def change_gc(request: Request, caller: Operator) -> Response:
    """Request a GC run, pause GC, or resume it; responds as GET does.

    The run starts as soon as a writer or the maintenance service is free: `last.ended` is its time.
    """
    gateway = gateway_of(request)
    want = '{"action": "run"}, "pause" or "resume"'
    action = await json_member(request, ACTION_BYTES_MAX, "action", want)
    if action not in GC_ACTIONS:
        raise BadInput(f"action {str(action)[:60]!r}: choose {', '.join(GC_ACTIONS)}")
    annotate(request, event=GC_EVENTS[action])
    return JSONResponse(await asyncio.to_thread(_gc_changed, gateway, action, caller.name), status_code=202)


def _gc_changed(gateway: Gateway, action: str, who: str) -> dict[str, Any]:
    pauses, state = gateway.pauses, collection_json(gateway)
    if action == "pause":
        pauses.pause(who)
    elif action == "resume":
        pauses.resume()
    else:
        pauses.check()
        gateway.collecting.request_run()
        return state  # the one before the run: the client polls until `last.ended` changes
    return collection_json(gateway)


@router.get("/asyncapi.json", include_in_schema=False)
async def asyncapi(request: Request) -> Response:
    """Return the AsyncAPI document of the topics, by the names that they have here."""
    from nearkin_shared.kafka.asyncapi import document

    return JSONResponse(document(gateway_of(request).settings))


# --- as JSON: the dashboard's pages are made of the same -------------------------------------------------------------


def tenant_json(tenant: str, found: Reduction) -> dict[str, Any]:
    """Return a tenant's shares."""
    return {
        "tenant": tenant,
        "versions": found.total.versions,
        "logical_bytes": found.total.logical_bytes,
        "stored_bytes": round(found.total.stored_bytes),
        "reduction_ratio": found.total.reduction_ratio,
        "whole": found.whole,
        "prefixes": [
            {
                "prefix": share.prefix,
                "versions": share.versions,
                "deleted_versions": share.deleted_versions,
                "logical_bytes": share.logical_bytes,
                "stored_bytes": round(share.stored_bytes),
                "reduction_ratio": share.reduction_ratio,
            }
            for share in found.prefixes
        ],
    }


def tenants_json(gateway: Gateway, own: str, *, every: bool) -> list[dict[str, Any]]:
    """Return the usage of `own` or every tenant, largest first, without prefixes."""
    others = gateway.tokens.tenants() if every and gateway.tokens is not None else []
    names = dict.fromkeys([*([own] if own else []), *others])
    rows = []
    for name in list(names)[:TENANTS_SHOWN_MAX]:
        with suppress(NotFound):  # an embedded gateway sums up its own alone
            found = gateway.insight.reduction(name) if name == own else gateway.insight.total(name)
            rows.append({**tenant_json(name, found), "prefixes": []})
    return sorted(rows, key=lambda row: -int(row["logical_bytes"]))


def growth_json(found: Growth) -> dict[str, Any]:
    """Return a curve."""
    return {
        "points": [
            {
                "time": _moment(point.time_us / 1e6),
                "logical_bytes": point.logical_bytes,
                "stored_bytes": point.stored_bytes,
            }
            for point in found.points
        ],
        "versions": found.versions,
        "read": found.read,
        "too_many": found.too_many,
    }


async def pipeline_json(gateway: Gateway) -> dict[str, Any]:
    """Return lag, speed, the last hour."""
    stages = [] if gateway.pipeline is None else await gateway.pools.control.run(gateway.pipeline.stages)
    return {
        "embedded": gateway.pipeline is None,
        "stages": [asdict(stage) for stage in stages],
        "minutes": gateway.outcomes.minutes.last_hour(),
        "failures": gateway.outcomes.minutes.failures(),
    }


def collection_json(gateway: Gateway) -> dict[str, Any]:
    """Return how garbage is collected here."""
    pause = gateway.pauses.read()
    return {
        "embedded": gateway.pipeline is None,
        "interval_seconds": gateway.settings.gc.interval_seconds,
        "grace_seconds": gateway.settings.gc.grace_seconds,
        "paused": None if pause is None else {"since": _moment(pause.at_us / 1e6), "by": pause.who},
        "last": gateway.collecting.last_run(),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
