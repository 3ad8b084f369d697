"""Routes of /v1/checkpoints: unfinished versions of backups.

    PUT     a checkpoint becomes durable      GET /versions, GET    the next run, or the end of this one, reads it
    DELETE  the backup has been committed

A checkpoint is a version of a reserved key that belongs to the key of the backup: the scope `write` stores and deletes
checkpoints, `read` reads them. No other route reads or lists one.

Invariant (I9): the reserved key is made of the key in the URL; a caller reaches checkpoints of its own tenant alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Reader, Writer
from nearkin_gateway.catalog.pipeline_listing import damaged_json
from nearkin_gateway.catalog.version_catalog import LISTED_MAX, VERSION_MAX
from nearkin_gateway.http import header_bounds, response_models
from nearkin_gateway.http.problems import responses
from nearkin_gateway.http.url_keys import BlobKey, Key, checkpoints_by_key
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.routes.blob_routes import (
    BLOB_BODY,
    PUT_ANSWERS,
    RANGE_ANSWERS,
    READ_PROBLEMS,
    Wait,
    read_version,
    store_body,
)
from nearkin_gateway.state import gateway_of
from nearkin_gateway.uploads.upload_service import check_writable
from nearkin_shared.errors import NotFound
from nearkin_shared.results_json import info_json
from nearkin_shared.validation import checkpoint_key_of

router = APIRouter(tags=["checkpoints"])
COMPLETED = "the backup was completed"
_DELETED: dict[int | str, dict[str, Any]] = {
    204: {
        "description": "There is none any more.",
        "headers": {"X-Nearkin-Versions": {"description": "How many were deleted.", "schema": {"type": "integer"}}},
    },
    **responses(400, 401, 403, 405, 410, 414, 422, 429, 431, 500, 503),
}


@router.put(
    "/v1/checkpoints/{key:path}",
    status_code=201,
    responses=PUT_ANSWERS,
    openapi_extra=BLOB_BODY,
    operation_id="putCheckpoint",
)
async def put_checkpoint(
    request: Request,
    key: BlobKey,
    caller: Writer,
    wait: Wait = 0.0,
    idempotency_key: Annotated[
        str | None,
        Header(description="As of `putBlob`.", json_schema_extra=header_bounds.IDEMPOTENCY_KEY),
    ] = None,
) -> Response:
    """Store the body, a tree, as a checkpoint of the key."""
    annotate(request, key=key)
    with checkpoints_by_key(key):
        return await store_body(request, caller, checkpoint_key_of(key), wait, idempotency_key, named=key)


@router.get(
    "/v1/checkpoints/{key:path}/versions",
    responses=READ_PROBLEMS,
    response_model=response_models.VersionPage,
    operation_id="listCheckpoints",
)
async def list_checkpoints(
    request: Request,
    key: Key,
    caller: Reader,
    after: Annotated[int, Query(ge=0, le=VERSION_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
) -> Response:
    """List the checkpoints of a key, oldest first; none is no error."""
    annotate(request, key=key)
    catalogue = gateway_of(request).catalogue
    try:
        listed, following = await asyncio.to_thread(
            catalogue.versions, caller.tenant, checkpoint_key_of(key), after, limit
        )
    except NotFound:
        return JSONResponse({"versions": [], "next": None, "damaged": []})
    annotate(request, entries=len(listed))
    shown = [info_json(replace(info, key=key)) for info in listed.found]
    damaged = [{**one, "key": key} for one in damaged_json(listed.damaged)]
    return JSONResponse({"versions": shown, "next": following, "damaged": damaged})


@router.get(
    "/v1/checkpoints/{key:path}",
    responses=RANGE_ANSWERS,
    response_class=Response,
    operation_id="getCheckpoint",
)
async def get_checkpoint(
    request: Request,
    key: BlobKey,
    caller: Reader,
    version: Annotated[int, Query(ge=1, le=VERSION_MAX, description="This checkpoint.")],
    range: Annotated[str | None, Header(description="As of `getBlob`.")] = None,
    if_range: Annotated[str | None, Header()] = None,
) -> Response:
    """Return the bytes of a checkpoint, verified before they are sent."""
    annotate(request, key=key)
    with checkpoints_by_key(key):
        return await read_version(request, caller, checkpoint_key_of(key), version)


@router.delete(
    "/v1/checkpoints/{key:path}",
    status_code=204,
    response_class=Response,
    responses=_DELETED,
    operation_id="deleteCheckpoints",
)
async def delete_checkpoints(request: Request, key: BlobKey, caller: Writer) -> Response:
    """Delete all checkpoints of a key. None is no error; they cannot be undeleted."""
    gateway = gateway_of(request)
    annotate(request, key=key)
    check_writable(gateway)
    try:
        count = await asyncio.to_thread(
            gateway.deletions.delete,
            caller.tenant,
            checkpoint_key_of(key),
            undelete_seconds=0,
            who=caller.name,
            reason=COMPLETED,
        )
    except NotFound:
        count = 0
    annotate(request, versions=count)
    gateway.catalogue.forget_stats(caller.tenant)
    gateway.admission.forget_usage(caller.tenant)
    return Response(status_code=204, headers={"X-Nearkin-Versions": str(count)})
