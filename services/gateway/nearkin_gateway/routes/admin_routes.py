"""Routes for outcomes, statistics, workers, settings and health.

GET routes change no state.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Operator, Reader
from nearkin_gateway.http import response_models
from nearkin_gateway.http.problems import RETRY_SECONDS, Problem, responses, without_addresses
from nearkin_gateway.http.request_bodies import read_body
from nearkin_gateway.http.url_keys import Key
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.monitoring.scrub_status import scrub_json
from nearkin_gateway.routes.blob_routes import VersionQuery, Wait, outcome_json
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_shared.config.loader import displayed_value
from nearkin_shared.config.runtime import changes_schema
from nearkin_shared.config.settings import FIXED_FIELDS, HOT_FIELDS, SECRET_URLS, SECRETS
from nearkin_shared.formats.upload_parts import PARTS_MEDIA_TYPE
from nearkin_shared.results_json import explain_json, info_json, stats_json

PATCH_BYTES_MAX = 64 * 1024
MERGE_PATCH = "application/merge-patch+json"
router = APIRouter()
_PROBLEMS = responses(400, 401, 403, 404, 405, 410, 414, 422, 429, 431, 500, 503)
_PLAIN = responses(400, 401, 403, 405, 422, 429, 431, 500, 503)
_PATCH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media: {
                "schema": {
                    **changes_schema(nullable=True),
                    "description": "RFC 7396: sections with hot fields; null takes a change back.",
                    "example": {"features": {"algorithm": "ntransform"}},
                }
            }
            for media in (MERGE_PATCH, "application/json")
        },
    }
}


@router.get(
    "/v1/status/{id}",
    responses=responses(400, 401, 403, 404, 405, 422, 429, 431, 503),
    response_model=response_models.Outcome,
    operation_id="getStatus",
    tags=["blobs"],
)
async def status(request: Request, id: str, caller: Reader, wait: Wait = 0.0) -> Response:
    """Return what became of an upload; with `wait` as soon as it is known."""
    gateway = gateway_of(request)
    blob = gateway.tickets.read(caller.tenant, id)
    if blob is None:
        raise Problem(404, "not-found", f"status {id:.60}: no such id was given out")
    return JSONResponse(outcome_json(gateway, caller.tenant, blob, await gateway.outcomes.wait(blob, wait)))


_ACCEPTED = {
    "Accept-Post": {
        "description": "Media types that puts of the key take; `application/vnd.nearkin.parts` is not stored as such.",
        "schema": {"type": "string"},
    }
}


@router.get(
    "/v1/info/{key:path}",
    responses={200: {"headers": _ACCEPTED}, **_PROBLEMS},
    response_model=response_models.BlobVersion,
    operation_id="getInfo",
    tags=["blobs"],
)
async def info(request: Request, key: Key, caller: Reader, version: VersionQuery = None) -> Response:
    """Return what is known of a version: size, digests, time, all its metadata."""
    catalogue = gateway_of(request).catalogue
    annotate(request, key=key, version=version)
    found = info_json(await asyncio.to_thread(catalogue.info, caller.tenant, key, version))
    return JSONResponse(found, headers={"Accept-Post": f"*/*, {PARTS_MEDIA_TYPE}"})


@router.get(
    "/v1/explain/{key:path}",
    responses=_PROBLEMS,
    response_model=response_models.BlobExplanation,
    operation_id="explain",
    tags=["insight"],
)
async def explain(
    request: Request,
    key: Key,
    caller: Reader,
    version: VersionQuery = None,
    segments: Annotated[bool, Query(description="Each segment and chunk too.")] = False,
) -> Response:
    """Return how a version is kept: duplicates, deltas and their bases, raw chunks."""
    gateway = gateway_of(request)
    annotate(request, key=key, version=version)

    def explained() -> bytes:
        found = gateway.catalogue.explain(caller.tenant, key, version)
        return json.dumps(explain_json(found, segments=segments)).encode()

    with gateway.explanations.one(caller.holders):
        return Response(await asyncio.to_thread(explained), media_type="application/json")


@router.get(
    "/v1/stats",
    responses={**_PLAIN, **responses(404, 410)},
    response_model=response_models.TenantStats,
    operation_id="getStats",
    tags=["insight"],
)
async def stats(request: Request, caller: Reader) -> Response:
    """Return what the tenant's data take and what each step saved."""
    gateway = gateway_of(request)
    catalogue = gateway.catalogue

    def summed() -> dict[str, object]:
        catalogue.check_tenant(caller.tenant)
        whole = catalogue.is_complete
        return {**stats_json(catalogue.stats(caller.tenant)), "whole": whole}

    sums = await asyncio.to_thread(summed)
    return JSONResponse({**sums, "quotas": await gateway.admission.describe(caller.tenant)})


@router.get(
    "/v1/workers",
    responses=_PLAIN,
    response_model=response_models.WorkerList,
    operation_id="listWorkers",
    tags=["admin"],
)
async def workers(request: Request, _caller: Operator) -> Response:
    """Return the last heartbeat of each worker: service, settings revision, state.

    Empty for an embedded gateway.
    """
    source = gateway_of(request).workers
    return JSONResponse({"workers": [] if source is None else source.workers()})


@router.get(
    "/v1/scrub", responses=_PLAIN, response_model=response_models.Scrub, operation_id="getScrub", tags=["admin"]
)
async def scrub(request: Request, _caller: Operator) -> Response:
    """Return how far scrubbing has come, what the last pass found, and what is quarantined."""
    gateway = gateway_of(request)
    state, quarantined = await asyncio.to_thread(gateway.catalogue.scrub)
    return JSONResponse(scrub_json(state, quarantined, gateway.settings.scrub))


@router.get(
    "/v1/config", responses=_PLAIN, response_model=response_models.Config, operation_id="getConfig", tags=["admin"]
)
async def config(request: Request, _caller: Operator) -> Response:
    """Return the settings as they are now, secrets left out."""
    return JSONResponse(_config_json(gateway_of(request)))


@router.patch(
    "/v1/config",
    responses={**_PLAIN, **responses(408, 409, 413, 415)},
    response_model=response_models.Config,
    openapi_extra=_PATCH,
    operation_id="patchConfig",
    tags=["admin"],
)
async def patch_config(request: Request, caller: Operator) -> Response:
    """Change run-time settings of all services by a JSON merge patch.

    An invalid patch changes nothing.
    Concurrent changes are merged in their order of arrival. 409: together with an earlier concurrent change this one
    is not valid.
    """
    gateway = gateway_of(request)
    media = request.headers.get("content-type", MERGE_PATCH).partition(";")[0].strip().lower()
    if media not in (MERGE_PATCH, "application/json"):
        raise Problem(415, "bad-media-type", f"Content-Type {media:.60}: want {MERGE_PATCH}")
    data = await read_body(request, PATCH_BYTES_MAX)
    try:
        patch = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Problem(400, "bad-json", f"the body is not JSON: {err}") from err
    if not isinstance(patch, dict):
        raise Problem(422, "bad-setting", 'want an object of sections, such as {"features": {"algorithm": "odess"}}')
    await gateway.hot.patch(patch, caller.name)
    # Only once it was found to be of hot settings: none of these is a secret.
    annotate(request, changes=json.dumps(patch, sort_keys=True), revision=gateway.hot.revision)
    return JSONResponse(_config_json(gateway))


@router.get(
    "/livez",
    response_model=response_models.Health,
    responses=responses(405, 431),
    operation_id="livez",
    tags=["health"],
)
async def livez() -> Response:
    """Say that the process serves requests."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/readyz",
    response_model=response_models.Health,
    responses=responses(405, 431, 503),
    operation_id="readyz",
    tags=["health"],
)
async def readyz(request: Request) -> Response:
    """Report whether the object store and the destination of uploads can be reached.

    503 too while Redis may evict entries or is full.
    All callers share one check, which is valid for two seconds and fails after four without a response.
    """
    gateway = gateway_of(request)
    if gateway.stopping:
        raise Problem(503, "stopping", "this gateway is stopping")
    missing = await gateway.readiness.missing_soon()
    if missing:
        detail = "; ".join(f"{name}: {without_addresses(reason)}" for name, reason in missing.items())
        raise Problem(503, "not-ready", detail, headers={"Retry-After": str(RETRY_SECONDS)})
    return JSONResponse({"status": "ok"})


def _config_json(gateway: Gateway) -> dict[str, Any]:
    settings = asdict(gateway.settings)
    for name in FIXED_FIELDS:
        section, _, field = name.partition(".")
        del settings[section][field]
        if not settings[section]:
            del settings[section]
    for name in SECRETS | SECRET_URLS:
        *sections, field = name.split(".")
        below = settings[sections[0]] if sections else settings
        below[field] = displayed_value(name, below[field])
    return {
        "revision": gateway.hot.revision,
        "changes": gateway.hot.changes,
        "hot": sorted(HOT_FIELDS),
        "settings": settings,
    }
