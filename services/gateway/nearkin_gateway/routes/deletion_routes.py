"""Routes for deletion, undeletion and retention.

Invariant: a response is sent after the change is visible to readers of every gateway. Readers check the tombstones in
the object store (nearkin_shared.storage.deletions), so no cache has to be invalidated.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Caller, Deleter, Reader
from nearkin_gateway.catalog.pipeline_listing import damaged_json
from nearkin_gateway.catalog.version_catalog import LISTED_MAX, VERSION_MAX
from nearkin_gateway.http import header_bounds, response_models
from nearkin_gateway.http.problems import responses
from nearkin_gateway.http.ranges import check_match, list_header
from nearkin_gateway.http.url_keys import BlobKey, Key, KeysInQuery
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_gateway.uploads.upload_service import check_idempotency_key, check_writable
from nearkin_shared.formats.manifest import us_of
from nearkin_shared.results_json import deletion_json, info_json

router = APIRouter(tags=["deletion"])

OneVersion = Annotated[int | None, Query(ge=1, le=VERSION_MAX, description="This version alone.")]
Reason = Annotated[str, Query(max_length=1024, description="Kept with the deletion: at most 1024 bytes.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="A repeat with the same one is answered as the first call was.",
        json_schema_extra=header_bounds.IDEMPOTENCY_KEY,
    ),
]
_COUNT = {"X-Nearkin-Versions": {"description": "How many versions.", "schema": {"type": "integer"}}}
_PROBLEMS = responses(400, 401, 403, 404, 405, 410, 414, 422, 429, 431, 500, 503)
_DONE: dict[int | str, dict[str, Any]] = {204: {"description": "Done, durably.", "headers": _COUNT}, **_PROBLEMS}


@router.delete(
    "/v1/blobs/{key:path}",
    status_code=204,
    response_class=Response,
    responses={**_DONE, **responses(409, 412)},
    operation_id="deleteBlob",
)
async def delete_blob(
    request: Request,
    key: BlobKey,
    caller: Deleter,
    version: OneVersion = None,
    reason: Reason = "",
    if_match: Annotated[
        str | None, Header(description="Only if this is the entity tag of the version, or of the key's newest.")
    ] = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Delete a key with all its current versions, or one version. `undelete` restores them.

    A version that is put concurrently is kept: none is deleted that the `If-Match` did not see. Version numbers are not
    reused. The bytes are freed after the time to undelete. 409 if the age of a version is below
    retention.min_age_seconds:
    then none is deleted.
    """
    gateway = gateway_of(request)
    annotate(request, key=key, version=version, reason=reason)
    check_writable(gateway)
    origin = check_idempotency_key(gateway, caller.tenant, key, idempotency_key)
    tags = None if if_match is None else list_header(request.headers, "if-match")
    count = await asyncio.to_thread(
        gateway.deletions.delete,
        caller.tenant,
        key,
        version,
        undelete_seconds=gateway.settings.deletion.undelete_seconds,
        who=caller.name,
        reason=reason,
        request=origin,
        condition=None if tags is None else lambda info: check_match(tags, info),
    )
    return _record_and_respond(request, gateway, caller, count)


@router.post(
    "/v1/undelete/{key:path}",
    status_code=204,
    response_class=Response,
    responses=_DONE,
    operation_id="undeleteBlob",
)
async def undelete_blob(
    request: Request,
    key: Key,
    caller: Deleter,
    version: OneVersion = None,
    reason: Reason = "",
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Undelete a version, or all versions of the latest deletion of the key.

    404 after the time to undelete.
    """
    gateway = gateway_of(request)
    annotate(request, key=key, version=version, reason=reason)
    check_writable(gateway)
    origin = check_idempotency_key(gateway, caller.tenant, key, idempotency_key)
    count = await asyncio.to_thread(
        gateway.deletions.undelete, caller.tenant, key, version, who=caller.name, reason=reason, request=origin
    )
    return _record_and_respond(request, gateway, caller, count)


@router.post(
    "/v1/retention/{key:path}",
    responses=_PROBLEMS,
    response_model=response_models.BlobVersion,
    operation_id="extendRetention",
)
async def extend_retention(
    request: Request,
    key: Key,
    caller: Deleter,
    until: Annotated[datetime, Query(description="It cannot be deleted before; ISO 8601, UTC unless it says so.")],
    version: OneVersion = None,
    reason: Reason = "",
) -> Response:
    """Retain a version, the newest by default, until a time.

    A retention is extended, never shortened.
    Durable before the response. 400 if the version is already retained for longer. A repeat changes nothing.
    """
    gateway = gateway_of(request)
    annotate(request, key=key, version=version, until=until.isoformat(), reason=reason)
    check_writable(gateway)
    info = await asyncio.to_thread(
        gateway.deletions.extend_retention,
        caller.tenant,
        key,
        version,
        us_of(until),
        who=caller.name,
        reason=reason,
    )
    annotate(request, version=info.version)
    return JSONResponse(info_json(info))


@router.get(
    "/v1/deleted",
    responses=_PROBLEMS,
    response_model=response_models.DeletedPage,
    operation_id="listDeleted",
    dependencies=[KeysInQuery],
)
async def list_deleted(
    request: Request,
    caller: Reader,
    prefix: Annotated[str, Query(max_length=1024)] = "",
    after: Annotated[str, Query(max_length=1050, description="The `next` of a page.")] = "",
    limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
) -> Response:
    """List the versions that are deleted and whose bytes are still there, by key."""
    gateway = gateway_of(request)
    annotate(request, prefix=prefix)
    found, damaged, following = await asyncio.to_thread(
        gateway.catalogue.list_deleted, gateway.deletions, caller.tenant, prefix, after, limit
    )
    annotate(request, entries=len(found))
    return JSONResponse(
        {"deleted": [deletion_json(entry) for entry in found], "next": following, "damaged": damaged_json(damaged)}
    )


def _record_and_respond(request: Request, gateway: Gateway, caller: Caller, count: int) -> Response:
    annotate(request, versions=count)
    gateway.catalogue.forget_stats(caller.tenant)
    return Response(status_code=204, headers={"X-Nearkin-Versions": str(count)})
