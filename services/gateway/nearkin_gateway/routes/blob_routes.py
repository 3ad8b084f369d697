"""Routes of /v1/blobs.

Invariant (I3): 201 means committed, 202 means that the upload will be committed or visibly fail.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway.auth.access import Caller, Reader, Writer, check_open_to
from nearkin_gateway.catalog.pipeline_listing import damaged_json
from nearkin_gateway.catalog.version_catalog import LISTED_MAX, VERSION_MAX, ListedVersions
from nearkin_gateway.http import header_bounds, response_models
from nearkin_gateway.http.blob_responses import BlobResponse
from nearkin_gateway.http.digests import (
    announced_digests,
    announced_sha256,
    check_digests,
    content_type_of,
    metadata_headers,
    metadata_of,
    repr_digest,
    wants_sha256,
)
from nearkin_gateway.http.multipart_ranges import MultipartRanges
from nearkin_gateway.http.problems import Problem, responses
from nearkin_gateway.http.ranges import (
    RANGES_MAX,
    etag,
    last_modified,
    not_modified,
    precondition_of_put,
    wanted_ranges,
)
from nearkin_gateway.http.request_bodies import asks_first, check_declared, chunks, declared_bytes, frames
from nearkin_gateway.http.url_keys import BlobKey, Key, KeysInQuery, blob_url, checkpoints_by_key
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_gateway.uploads.copied_ranges import PartsReceiver, open_parts
from nearkin_gateway.uploads.upload_preconditions import check_new_key, check_newest
from nearkin_gateway.uploads.upload_service import (
    NewBlob,
    UploadPiece,
    check_failed,
    check_idempotency_key,
    check_replay,
    check_same,
    find_committed,
    one_at_a_time,
    origin_of_key,
    take,
)
from nearkin_shared.errors import PreconditionFailed
from nearkin_shared.formats.upload_parts import PARTS_MEDIA_TYPE
from nearkin_shared.reading.restore import VerifiedPieces
from nearkin_shared.results import CONTENT_TYPE_TREE
from nearkin_shared.results_json import info_json
from nearkin_shared.validation import CONTENT_TYPE, check_metadata, content_type, is_reserved_key

_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
router = APIRouter(tags=["blobs"])
EVENT_SECONDS = 1.0
"""Wait of a repeated conditional put for the event that the conflicting version is its own."""

VersionQuery = Annotated[int | None, Query(ge=1, le=VERSION_MAX, description="This version instead of the newest.")]
Wait = Annotated[
    float, Query(ge=0, le=300, allow_inf_nan=False, description="Seconds to wait for the outcome before 202.")
]
WantReprDigest = Annotated[
    str | None,
    Header(
        description="`blake3=10, sha-256=5`: the digests in `Repr-Digest`, the preferred one first; 0: not that one. "
        "BLAKE3 is always stored, SHA-256 if the put sent or requested it; other algorithms are ignored (RFC 9530)."
    ),
]
_ANY_MEDIA = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
"""A body of any type: a put keeps its `Content-Type`, and reads return it."""
BLOB_BODY: dict[str, Any] = {"requestBody": {"required": False, "content": _ANY_MEDIA}}
_TAG_HEADERS = {
    "ETag": {"description": "The digest, quoted.", "schema": {"type": "string"}},
    "X-Nearkin-Version": {"description": "The version.", "schema": {"type": "integer"}},
}
_READ_HEADERS = {
    **_TAG_HEADERS,
    "Last-Modified": {"description": "When the version was put.", "schema": {"type": "string"}},
    "Accept-Ranges": {"description": "`bytes`.", "schema": {"type": "string"}},
    "Repr-Digest": {
        "description": "RFC 9530: the stored digests that `Want-Repr-Digest` asks for; without it the SHA-256, if the "
        "put sent or requested it.",
        "schema": {"type": "string"},
    },
    "X-Nearkin-Meta-Omitted": {
        "description": "In place of `X-Nearkin-Meta-NAME` headers, percent-encoded, where these are many: how many.",
        "schema": {"type": "integer"},
    },
}
PUT_ANSWERS: dict[int | str, dict[str, Any]] = {
    201: {
        "model": response_models.Outcome,
        "description": "Committed: the version and its savings ledger.",
        "headers": {
            **_TAG_HEADERS,
            "Location": {"description": "The version.", "schema": {"type": "string"}},
            "Idempotent-Replayed": {
                "description": "`true`: stored by an earlier request.",
                "schema": {"type": "string"},
            },
        },
    },
    202: {
        "model": response_models.Outcome,
        "description": "Durable; it will end committed or visibly failed.",
        "headers": {
            "Location": {"description": "Where its outcome will be.", "schema": {"type": "string"}},
            "Retry-After": {
                "description": "Seconds until it is worth asking, from the lag of the pipeline.",
                "schema": {"type": "string"},
            },
        },
    },
    **responses(400, 401, 403, 405, 408, 409, 410, 412, 413, 414, 415, 417, 422, 429, 431, 500, 503, 507),
}
READ_PROBLEMS = responses(400, 401, 403, 404, 405, 410, 412, 414, 422, 429, 431, 500, 503)


@router.put(
    "/v1/blobs/{key:path}", status_code=201, responses=PUT_ANSWERS, openapi_extra=BLOB_BODY, operation_id="putBlob"
)
@router.post(
    "/v1/blobs/{key:path}", status_code=201, responses=PUT_ANSWERS, openapi_extra=BLOB_BODY, operation_id="postBlob"
)
async def put_blob(
    request: Request,
    key: BlobKey,
    caller: Writer,
    wait: Wait = 0.0,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Repeats with the same key and Idempotency-Key store once. An embedded gateway recognises them "
            "for at least one day, across restarts too.",
            json_schema_extra=header_bounds.IDEMPOTENCY_KEY,
        ),
    ] = None,
    content_digest: Annotated[
        str | None,
        Header(
            description="`sha-256=:BASE64:`, also sha-512, md5, sha; checked (RFC 9530).",
            json_schema_extra=header_bounds.CONTENT_DIGEST,
        ),
    ] = None,
    content_md5: Annotated[
        str | None,
        Header(
            alias="Content-MD5",
            description="Base64, checked (RFC 1864).",
            json_schema_extra=header_bounds.CONTENT_MD5,
        ),
    ] = None,
    x_content_sha256: Annotated[
        str | None, Header(description="64 hex digits, checked.", json_schema_extra=header_bounds.CONTENT_SHA256)
    ] = None,
    want_repr_digest: Annotated[str | None, Header(description="`sha-256=10`: keep the SHA-256 too.")] = None,
    if_match: header_bounds.PutIfMatch = None,
    if_none_match: header_bounds.PutIfNoneMatch = None,
    nearkin_base: header_bounds.NearkinBase = None,
    nearkin_checkpoints: header_bounds.NearkinCheckpoints = None,
) -> Response:
    """Store the body as a new version of the key.

    Metadata: `X-Nearkin-Meta-NAME: VALUE`, both percent-encoded.

    A body of `application/vnd.nearkin.parts` has new bytes of a tree, and ranges of the version `Nearkin-Base` and of
    the checkpoints `Nearkin-Checkpoints`.

    The `Content-Type` is kept as metadata `content-type` and returned by GET and HEAD.
    `If-Match` and `If-None-Match` are checked where the version is committed: of several puts that rely on the same
    state one is 201, the others are 412 and store nothing. After 202 the outcome has the reason `precondition-failed`.
    """
    annotate(request, key=key)
    await check_new_key(gateway_of(request), caller.tenant, key)
    with checkpoints_by_key(key):  # ranges are of the key and its checkpoints
        return await store_body(request, caller, key, wait, idempotency_key)


async def store_body(
    request: Request, caller: Caller, key: str, wait: float, idempotency_key: str | None, named: str | None = None
) -> Response:
    """Store the body of a request as a version of `key`, which may be that of checkpoints.

    `named`: the key in the answer, if it is another one.
    """
    named = key if named is None else named
    gateway = gateway_of(request)
    bytes_max = int(gateway.bounds.body_bytes_max)
    await check_open_to(request, gateway, caller)
    check_declared(request, bytes_max)
    gateway.admission.check_rate(caller.tenant)
    gateway.admission.check_slots(caller.tenant)
    if asks_first(request):
        gateway.admission.check_lag(caller.tenant)
    metadata, sha256 = metadata_of(request.headers), announced_sha256(request.headers)
    parts = await open_parts(gateway, caller.tenant, caller.scopes, key, request.headers)
    _keep_media_type(metadata, CONTENT_TYPE_TREE if parts is not None else content_type_of(request.headers))
    if parts is not None and metadata[CONTENT_TYPE] != CONTENT_TYPE_TREE:  # readers would not take it for a tree
        raise Problem(400, "bad-metadata", f"{CONTENT_TYPE}: leave it out with {PARTS_MEDIA_TYPE}: a tree has its own")
    announced = announced_digests(request.headers)
    precondition = precondition_of_put(request.headers)
    repeatable = check_idempotency_key(gateway, caller.tenant, key, idempotency_key)
    origin = None if repeatable is None else origin_of_key(repeatable)
    with ExitStack() as held:
        held.enter_context(gateway.uploads.one(caller.holders))
        body = chunks(request, bytes_max, gateway.uploads, gateway.pace_of(caller.tenant))
        pieces = _pieces_of(gateway, body, parts, announced)
        earlier = None
        if origin is not None:
            held.enter_context(one_at_a_time(gateway, origin.id))
            earlier = await find_committed(gateway, caller.tenant, key, origin)
        if earlier is None and precondition is not None:  # before a large body is sent in vain
            try:
                await check_newest(gateway, caller.tenant, key, precondition)
            except PreconditionFailed:  # what is in its way may be its own version
                earlier = None if origin is None else await _await_committed_event(gateway, origin.id)
                if earlier is None:
                    raise
        if earlier is not None:
            await check_replay(gateway, earlier, pieces, sha256, parts)
            annotate(request, blob=earlier["id"], version=earlier["version"], replay=True)
            return created_response(gateway, caller.tenant, {**earlier, "key": named}, key, replay=True)
        new = NewBlob(
            caller.tenant,
            key,
            metadata,
            origin=origin,
            sha256=sha256,
            wants_sha256=parts is None and wants_sha256(request.headers),
            trace=_trace(request),
            precondition=precondition,
            size_bytes=declared_bytes(request) if parts is None else None,
            parts=parts,
        )
        blob, ending = await take(gateway, pieces, new)
    annotate(request, blob=blob.hex())
    outcome = await gateway.outcomes.wait(blob, wait)
    if outcome is None:
        return accepted_response(gateway, caller.tenant, blob, named)
    check_failed(outcome)
    check_same(outcome, ending)
    annotate(request, version=outcome["version"])
    return created_response(gateway, caller.tenant, {**outcome, "key": named}, key)


def _keep_media_type(metadata: dict[str, str], media_type: str | None) -> None:
    """Keep the type as metadata, unless these name another one."""
    if media_type is not None:
        metadata.setdefault(CONTENT_TYPE, media_type)
        check_metadata(metadata)


def _pieces_of(
    gateway: Gateway, body: AsyncIterator[bytes], parts: PartsReceiver | None, announced: Mapping[str, bytes]
) -> AsyncIterator[UploadPiece]:
    """Return frames of a body, checked against announced digests, or its parts."""
    if parts is not None:
        return parts.pieces(body)
    return check_digests(frames(body), announced, gateway.pools.hashing)


def _trace(request: Request) -> str | None:
    """Return the W3C trace context, or None for an invalid one, which no message should carry."""
    text = request.headers.get("traceparent", "")
    return text if _TRACEPARENT.fullmatch(text) else None


@router.get(
    "/v1/blobs/{key:path}/versions",
    responses=READ_PROBLEMS,
    response_model=response_models.VersionPage,
    operation_id="listVersions",
)
async def list_versions(
    request: Request,
    key: Key,
    caller: Reader,
    after: Annotated[int, Query(ge=0, le=VERSION_MAX)] = 0,
    limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
) -> Response:
    """List the versions of a key, oldest first, with digests and metadata."""
    catalogue = gateway_of(request).catalogue
    annotate(request, key=key)
    listed, following = await asyncio.to_thread(catalogue.versions, caller.tenant, key, after, limit)
    annotate(request, entries=len(listed))
    return JSONResponse({"versions": [info_json(info) for info in listed.found], "next": following, **_damaged(listed)})


_LINK = {"Link": {"description": 'The next page, `rel="next"`, where there is one.', "schema": {"type": "string"}}}


@router.get(
    "/v1/blobs",
    responses={200: {"headers": _LINK}, **READ_PROBLEMS},
    response_model=response_models.Page,
    operation_id="listBlobs",
    dependencies=[KeysInQuery],
)
async def list_blobs(
    request: Request,
    caller: Reader,
    prefix: Annotated[str, Query(max_length=1024)] = "",
    after: Annotated[
        str, Query(max_length=1050, description="Only keys that sort after this one; or the `next` of a page.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=LISTED_MAX)] = 100,
    versions: Annotated[Literal["newest", "all"], Query(description="Which versions of each key.")] = "newest",
) -> Response:
    """List keys in order with their versions.

    A concurrent put never moves other keys between pages.
    """
    catalogue = gateway_of(request).catalogue
    annotate(request, prefix=prefix)
    listed, following = await asyncio.to_thread(
        catalogue.list_versions, caller.tenant, prefix, after, limit, all_versions=versions == "all"
    )
    annotate(request, entries=len(listed))
    headers = {}
    if following is not None:
        query = urlencode({"prefix": prefix, "after": following, "limit": limit, "versions": versions})
        headers["Link"] = f'</v1/blobs?{query}>; rel="next"'
    shown = {"blobs": [info_json(info) for info in listed.found], "next": following, **_damaged(listed)}
    return JSONResponse(shown, headers=headers)


def _damaged(listed: ListedVersions) -> dict[str, object]:
    return {"damaged": damaged_json(listed.damaged)}


_WHOLE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": _ANY_MEDIA, "headers": _READ_HEADERS},
    304: {"description": "Not modified.", "headers": _READ_HEADERS},
    **READ_PROBLEMS,
}
RANGE_ANSWERS: dict[int | str, dict[str, Any]] = {
    **_WHOLE_ANSWERS,
    206: {
        "description": "A range of them; several as `multipart/byteranges`.",
        "content": _ANY_MEDIA,
        "headers": {**_READ_HEADERS, "Content-Range": {"description": "Which.", "schema": {"type": "string"}}},
    },
    **responses(416),
}


@router.get("/v1/blobs/{key:path}", responses=RANGE_ANSWERS, response_class=Response, operation_id="getBlob")
async def get_blob(
    request: Request,
    key: BlobKey,
    caller: Reader,
    version: VersionQuery = None,
    range: Annotated[
        str | None,
        Header(
            description=f"Ranges of bytes: `bytes=A-B`, `bytes=A-`, `bytes=-N`, at most {RANGES_MAX}: `bytes=A-B,C-D`."
        ),
    ] = None,
    if_none_match: Annotated[str | None, Header()] = None,
    if_match: Annotated[str | None, Header()] = None,
    if_range: Annotated[str | None, Header()] = None,
    want_repr_digest: WantReprDigest = None,
) -> Response:
    """Return the bytes of a version, verified before they are sent.

    A body that ends early is damaged: discard it.
    """
    annotate(request, key=key)
    return await read_version(request, caller, key, version)


@router.head("/v1/blobs/{key:path}", responses=_WHOLE_ANSWERS, response_class=Response, operation_id="headBlob")
async def head_blob(
    request: Request,
    key: BlobKey,
    caller: Reader,
    version: VersionQuery = None,
    want_repr_digest: WantReprDigest = None,
) -> Response:
    """Return what GET would, without the bytes."""
    annotate(request, key=key)
    return await read_version(request, caller, key, version)


async def read_version(request: Request, caller: Caller, key: str, version: int | None) -> Response:
    """Return the bytes of a version of `key`, which may be that of checkpoints."""
    gateway, tenant = gateway_of(request), caller.tenant
    annotate(request, version=version)
    manifest = await asyncio.to_thread(gateway.catalogue.manifest, tenant, key, version)
    info = manifest.info
    annotate(request, version=info.version)
    headers = {
        "ETag": etag(info),
        "Last-Modified": last_modified(info),
        "Accept-Ranges": "bytes",
        "X-Nearkin-Version": str(info.version),
        "Cache-Control": "private, no-cache",
        "Content-Type": content_type(info.metadata),
        # Browsers must not run or display stored content as a page, script or picture of this site.
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": "attachment",
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        **metadata_headers(info.metadata),
    }
    digest = repr_digest(request.headers, info.digest.removeprefix("blake3:"), info.sha256)
    if digest is not None:
        headers["Repr-Digest"] = digest
    if not_modified(request.headers, info, named=version is not None):
        del headers["Content-Type"]
        return Response(status_code=304, headers=headers)
    wanted = wanted_ranges(request.headers, info) if request.method == "GET" else None
    ranges = wanted or [(0, info.size_bytes)]
    several = MultipartRanges(ranges, headers["Content-Type"], info.size_bytes) if len(ranges) > 1 else None
    if wanted is not None:
        annotate(request, range=",".join(f"{start}-{stop - 1}" for start, stop in wanted))
    if several is not None:
        headers["Content-Type"] = several.content_type
    elif wanted is not None:
        headers["Content-Range"] = f"bytes {ranges[0][0]}-{ranges[0][1] - 1}/{info.size_bytes}"
    headers["Content-Length"] = str(ranges[0][1] - ranges[0][0] if several is None else several.size_bytes)
    if request.method == "HEAD":
        return Response(headers=headers)

    def read(start: int, stop: int) -> VerifiedPieces:
        return gateway.catalogue.blob(tenant, manifest, start, stop).pieces()

    slot = gateway.downloads.one(caller.holders)
    slot.__enter__()
    try:
        pieces = read(*ranges[0]) if several is None else several.pieces(read)
        # Before the status is sent, so that damage in the first piece is answered with a problem.
        first = await asyncio.to_thread(next, pieces, None)
    except BaseException:
        slot.__exit__(None, None, None)
        raise
    return BlobResponse(pieces, first, 206 if wanted is not None else 200, headers, slot, gateway.downloads)


async def _await_committed_event(gateway: Gateway, origin: bytes) -> dict[str, Any] | None:
    """Return the event that committed an origin, or None after a timeout.

    A version becomes visible before its event arrives.
    """
    until = time.monotonic() + EVENT_SECONDS
    while (found := gateway.outcomes.of_origin(origin)) is None and time.monotonic() < until:
        await asyncio.sleep(EVENT_SECONDS / 20)
    return found


def outcome_json(gateway: Gateway, tenant: str, blob: bytes, outcome: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an outcome as callers see it: ids with their MAC, nothing of the pipeline's own."""
    ticket = gateway.tickets.of(tenant, blob)
    shown: dict[str, Any] = {"id": ticket, "state": "pending", "status": f"/v1/status/{ticket}"}
    if outcome is not None:
        shown |= {name: value for name, value in outcome.items() if name not in ("id", "origin", "tenant")}
    elif gateway.outcomes.may_be_forgotten(blob):
        shown["state"] = "unknown"
    return shown


def accepted_response(gateway: Gateway, tenant: str, blob: bytes, key: str) -> Response:
    """Return 202."""
    shown = {**outcome_json(gateway, tenant, blob, None), "state": "pending", "key": key}
    retry = str(gateway.load.retry_seconds(1))
    return JSONResponse(shown, 202, {"Location": shown["status"], "Retry-After": retry})


def created_response(
    gateway: Gateway, tenant: str, outcome: Mapping[str, Any], key: str, *, replay: bool = False
) -> Response:
    """Return 201.

    `key`: of the version; of a checkpoint the reserved one, which the outcome does not show.
    """
    shown = outcome_json(gateway, tenant, bytes.fromhex(outcome["id"]), outcome)
    headers = {
        # No URL names the key of a checkpoint.
        **({} if is_reserved_key(key) else {"Location": blob_url(key, outcome["version"])}),
        "ETag": f'"{outcome["digest"]}"',
        "X-Nearkin-Version": str(outcome["version"]),
    }
    if replay:
        headers["Idempotent-Replayed"] = "true"
    return JSONResponse(shown, 201, headers)
