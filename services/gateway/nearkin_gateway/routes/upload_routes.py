"""Routes of /v1/uploads: tus 1.0.

Invariant: an offset is reported after all bytes before it are durable in the object store.

creation, creation-with-upload, checksum, expiration, termination, concatenation
https://tus.io/protocols/resumable-upload
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request
from starlette.responses import JSONResponse, Response

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.auth.access import Caller, Writer, check_open_to
from nearkin_gateway.http import header_bounds, response_models
from nearkin_gateway.http.problems import TUS_VERSION, Problem, responses
from nearkin_gateway.http.ranges import precondition_of_put
from nearkin_gateway.middleware.audit_requests import annotate
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_gateway.uploads.concatenation import create_final
from nearkin_gateway.uploads.finalize import hand_over
from nearkin_gateway.uploads.resumable_store import Meta, StagedUpload
from nearkin_gateway.uploads.tus_headers import (
    EXTENSIONS,
    check_extensions,
    check_version,
    parse_concat,
    parse_metadata,
)
from nearkin_gateway.uploads.upload_admission import QUOTA_EXCEEDED
from nearkin_gateway.uploads.upload_bodies import CHECKSUMS, UploadMutex, receive
from nearkin_gateway.uploads.upload_preconditions import check_new_key, check_newest, check_refused
from nearkin_shared.errors import NearkinError
from nearkin_shared.limits import RESUMABLE_HOURS

VERSION = TUS_VERSION
OFFSET_MEDIA = "application/offset+octet-stream"

router = APIRouter(tags=["resumable uploads"])
_TUS: dict[str, Any] = {"Tus-Resumable": {"schema": {"type": "string"}, "description": VERSION}}
_OFFSET = {**_TUS, "Upload-Offset": {"schema": {"type": "integer"}, "description": "Bytes that are durable."}}
_EXPIRES = {"Upload-Expires": {"schema": {"type": "string"}, "description": "Taken up to then."}}
_LENGTH = {"Upload-Length": {"schema": {"type": "integer"}, "description": "Bytes of the whole."}}
_DESCRIBED = {
    "Upload-Metadata": {"schema": {"type": "string"}, "description": "As it was sent, where the client sent some."},
    "Upload-Concat": {
        "schema": {"type": "string"},
        "description": "`partial`, or `final;` with the partial uploads; of uploads that are neither, left out.",
    },
}
_ABLE = {
    **_TUS,
    "Tus-Version": {"schema": {"type": "string"}, "description": "Versions of tus, with commas between several."},
    "Tus-Extension": {"schema": {"type": "string"}, "description": "Its extensions."},
    "Tus-Max-Size": {"schema": {"type": "integer"}, "description": "The most bytes that an upload may have."},
    "Tus-Checksum-Algorithm": {"schema": {"type": "string"}, "description": "Algorithms of `Upload-Checksum`."},
}
_CONTENT = {OFFSET_MEDIA: {"schema": {"type": "string", "format": "binary"}}}
_FIRST_BODY = {"requestBody": {"required": False, "content": _CONTENT}}
_BODY = {"requestBody": {"required": True, "content": _CONTENT}}
_PROBLEMS = responses(400, 401, 403, 404, 405, 410, 412, 422, 429, 431, 500, 503)
Tus = Annotated[
    str | None,
    Header(alias="Tus-Resumable", description=f"`{VERSION}`.", json_schema_extra=header_bounds.TUS_RESUMABLE),
]
UploadId = Annotated[str, Path(json_schema_extra=header_bounds.UPLOAD_ID)]


@router.options(
    "/v1/uploads",
    status_code=204,
    response_class=Response,
    responses={
        204: {"headers": _ABLE, "description": "The capabilities of the server, in headers."},
        **responses(405, 431),
    },
    operation_id="tusOptions",
)
async def options(request: Request) -> Response:
    """Say which parts of tus there are."""
    return _answer(
        204,
        **{
            "Tus-Version": VERSION,
            "Tus-Extension": EXTENSIONS,
            "Tus-Max-Size": str(int(gateway_of(request).bounds.body_bytes_max)),
            "Tus-Checksum-Algorithm": ",".join(CHECKSUMS),
        },
    )


@router.post(
    "/v1/uploads",
    status_code=201,
    response_class=Response,
    responses={
        201: {
            "description": "Begun; go on at Location.",
            "headers": {**_OFFSET, **_EXPIRES, "Location": {"schema": {"type": "string"}}},
        },
        **_PROBLEMS,
        **responses(408, 409, 413, 415, 417, 507),
    },
    openapi_extra=_FIRST_BODY,
    operation_id="createUpload",
)
async def create(
    request: Request,
    caller: Writer,
    tus_resumable: Tus = None,
    upload_length: Annotated[
        str | None,
        Header(
            description="Bytes of the whole; of a final upload left out.",
            json_schema_extra=header_bounds.UPLOAD_LENGTH,
        ),
    ] = None,
    upload_metadata: Annotated[
        str | None,
        Header(
            description="`key BASE64` and further pairs; `sha256` (hex) is checked.",
            json_schema_extra=header_bounds.UPLOAD_METADATA,
        ),
    ] = None,
    upload_concat: Annotated[
        str | None,
        Header(
            description="`partial`: only a part of a final upload; `final;URL URL`: these, in order, are one blob.",
            json_schema_extra=header_bounds.UPLOAD_CONCAT,
        ),
    ] = None,
    if_match: header_bounds.PutIfMatch = None,
    if_none_match: header_bounds.PutIfNoneMatch = None,
) -> Response:
    """Begin a resumable upload; a body is its first part.

    `If-Match` and `If-None-Match` are kept with the upload and checked where the version is committed, as for a put.
    An upload that they refuse is 412 here, to the request that brings its last bytes, and to every `HEAD` after it.
    With a partial upload they have no effect.
    """
    gateway = gateway_of(request)
    check_version(tus_resumable)
    check_extensions(request.headers)
    await check_open_to(request, gateway, caller)
    sources = parse_concat(upload_concat, limits.PARTIAL_UPLOADS_MAX)
    meta = _new_meta(gateway, caller, upload_metadata or "", partial=sources == ())
    annotate(request, key=meta.key)
    await check_new_key(gateway, meta.tenant, meta.key)
    precondition = precondition_of_put(request.headers)
    if not meta.partial:  # it stores no blob; clients send the same headers with it as with its final upload
        meta = replace(meta, precondition=precondition)
    if sources:
        if upload_length is not None or "content-type" in request.headers:
            raise Problem(400, "bad-concat", "a final upload has neither Upload-Length nor a body: its parts are there")
        final = await create_final(gateway, meta, sources)
        annotate(request, upload=final.id)
        return _answer(201, Location=f"/v1/uploads/{final.id}", **_progress(final.meta, final.offset))
    meta = replace(meta, length_bytes=_length(upload_length, int(gateway.bounds.body_bytes_max)))
    gateway.resumable.check_room(caller.holders)
    await check_newest(gateway, meta.tenant, meta.key, meta.precondition)
    await gateway.admission.check_room(caller.tenant, meta.length_bytes)
    # No other task runs between the check and this: of several that begin at once, as many begin as fit.
    number = gateway.resumable.reserve(meta)
    with_body = request.headers.get("content-type", "").partition(";")[0].strip().lower() == OFFSET_MEDIA
    await asyncio.to_thread(gateway.resumable.create, meta, number)
    annotate(request, upload=number)
    offset = await _receive_first(request, gateway, caller, StagedUpload(number, meta, (), None)) if with_body else 0
    if offset == meta.length_bytes and not meta.partial:
        await hand_over(gateway, meta, number)
    return _answer(201, Location=f"/v1/uploads/{number}", **_progress(meta, offset))


async def _receive_first(request: Request, gateway: Gateway, caller: Caller, staged: StagedUpload) -> int:
    """Stage the body of a creation; return the offset after it.

    On failure the upload is removed.
    """
    try:
        return await receive(request, gateway, staged, caller.holders)
    except BaseException:  # no client knows its URL: its parts would be kept until it expires
        with suppress(NearkinError):
            await asyncio.shield(asyncio.to_thread(gateway.resumable.remove, staged.id))
        raise


def _new_meta(gateway: Gateway, caller: Caller, upload_metadata: str, *, partial: bool) -> Meta:
    """Return what an upload that begins now is to become, its length not declared yet."""
    described = parse_metadata(upload_metadata, needs_key=not partial)
    now_us = time.time_ns() // 1000
    return Meta(
        tenant=caller.tenant,
        key=described.key,
        length_bytes=0,
        created_us=now_us,
        expires_us=now_us + RESUMABLE_HOURS * 3_600_000_000,
        metadata=described.metadata,
        sha256=described.sha256,
        upload_metadata=upload_metadata,
        partial=partial,
        token=caller.token,
        address=caller.address,
        empty_expires_us=now_us + limits.RESUMABLE_EMPTY_SECONDS * 1_000_000,
    )


def _length(text: str | None, bytes_max: int) -> int:
    if text is None or re.fullmatch("[0-9]{1,19}", text, re.ASCII) is None:
        raise Problem(400, "bad-length", "Upload-Length: want the bytes of the whole; it cannot be declared later")
    if int(text) > bytes_max:
        raise Problem(413, "too-large", f"Upload-Length {text}: want at most {bytes_max}")
    return int(text)


@router.head(
    "/v1/uploads/{id}",
    response_class=Response,
    responses={
        200: {"description": "Where to go on.", "headers": {**_OFFSET, **_EXPIRES, **_LENGTH, **_DESCRIBED}},
        **_PROBLEMS,
        **responses(507),
    },
    operation_id="headUpload",
)
async def head(request: Request, id: UploadId, caller: Writer, tus_resumable: Tus = None) -> Response:
    """Return the durable offset of an upload; commit it if it is complete and was not yet.

    507: it is complete, and a quota does not allow it. It is kept and tried again; `GET` returns the reason.
    """
    gateway = gateway_of(request)
    annotate(request, upload=id)
    check_version(tus_resumable)
    staged = await asyncio.to_thread(gateway.resumable.load, caller.tenant, id)
    if staged.pending:
        try:
            await hand_over(gateway, staged.meta, id)
        except Problem as err:  # of a damaged part, which is to be sent again: say from where
            if err.name == QUOTA_EXCEEDED:  # 200 at the last byte means that the upload is done
                raise
        staged = await asyncio.to_thread(gateway.resumable.load, caller.tenant, id)
    await check_refused(gateway, staged)
    length = {"Upload-Length": str(staged.meta.length_bytes), "Cache-Control": "no-store"}
    return _answer(200, **length, **_describe(staged), **_progress(staged.meta, staged.offset))


def _describe(staged: StagedUpload) -> dict[str, str]:
    meta, found = staged.meta, {}
    if meta.upload_metadata:
        found["Upload-Metadata"] = meta.upload_metadata
    if meta.partial:
        found["Upload-Concat"] = "partial"
    elif meta.final:
        found["Upload-Concat"] = "final;" + " ".join(f"/v1/uploads/{source}" for source in meta.sources)
    return found


@router.get(
    "/v1/uploads/{id}", response_model=response_models.ResumableUpload, responses=_PROBLEMS, operation_id="getUpload"
)
async def get(request: Request, id: UploadId, caller: Writer) -> Response:
    """Return the progress of an upload, and the URL of its outcome (not part of tus)."""
    gateway = gateway_of(request)
    annotate(request, upload=id)
    staged = await asyncio.to_thread(gateway.resumable.load, caller.tenant, id)
    done = staged.done
    state, status = "receiving" if not staged.whole else "staged", None
    failure, reason = await _refusal(gateway, staged) if done is None else (done.failure, done.reason)
    if done is not None:
        state = "failed" if done.blob is None else "handed-over"
        if done.blob is not None:
            status = f"/v1/status/{gateway.tickets.of(caller.tenant, bytes.fromhex(done.blob))}"
    shown = {
        "id": staged.id,
        "key": staged.meta.key,
        "offset_bytes": staged.offset,
        "length_bytes": staged.meta.length_bytes,
        "expires": datetime.fromtimestamp(staged.meta.expires_us / 1e6, UTC).isoformat(timespec="seconds"),
        "state": state,
        "failure": failure,
        "reason": reason,
        "status": status,
    }
    return JSONResponse(shown)


async def _refusal(gateway: Gateway, staged: StagedUpload) -> tuple[str | None, str | None]:
    """Return why a quota does not allow a whole upload, as text and by name."""
    if staged.pending and staged.id not in gateway.background:  # else its own bytes count as in flight
        meta = staged.meta
        with suppress(NearkinError):
            problem = await gateway.admission.find_refusal(meta.tenant, meta.length_bytes, without=(staged.id,))
            if problem is not None:
                return problem.detail, problem.name
    return None, None


@router.patch(
    "/v1/uploads/{id}",
    status_code=204,
    response_class=Response,
    responses={
        204: {"description": "Durable.", "headers": {**_OFFSET, **_EXPIRES}},
        **_PROBLEMS,
        **responses(408, 409, 413, 415, 417, 423, 507),
        460: responses(400)[400] | {"description": "Checksum Mismatch"},
    },
    openapi_extra=_BODY,
    operation_id="patchUpload",
)
async def patch(
    request: Request,
    id: UploadId,
    caller: Writer,
    tus_resumable: Tus = None,
    upload_offset: Annotated[
        str | None,
        Header(
            description="Offset of the first byte of the body, as HEAD returned it.",
            json_schema_extra=header_bounds.UPLOAD_OFFSET,
        ),
    ] = None,
    upload_checksum: Annotated[
        str | None,
        Header(
            description="`sha1 BASE64` or `sha256 BASE64` of the body.",
            json_schema_extra=header_bounds.UPLOAD_CHECKSUM,
        ),
    ] = None,
) -> Response:
    """Append bytes. The last ones complete the upload; `GET` returns the URL of its outcome."""
    gateway = gateway_of(request)
    annotate(request, upload=id)
    check_version(tus_resumable)
    await check_open_to(request, gateway, caller)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != OFFSET_MEDIA:
        raise Problem(415, "bad-media-type", f"Content-Type: want {OFFSET_MEDIA}")
    staged = await asyncio.to_thread(gateway.resumable.load, caller.tenant, id)
    if upload_offset is None or re.fullmatch("[0-9]{1,19}", upload_offset, re.ASCII) is None:
        raise Problem(400, "bad-offset", "Upload-Offset: want where the body begins")
    await check_refused(gateway, staged)
    if staged.done is not None or int(upload_offset) != staged.offset:
        raise Problem(409, "wrong-offset", f"Upload-Offset {upload_offset}: {staged.offset} bytes are there; ask HEAD")
    if staged.meta.final:
        raise Problem(403, "final-upload", "a final upload takes no bytes: send them to its partial uploads")
    offset = await receive(request, gateway, staged, caller.holders)
    if offset == staged.meta.length_bytes and not staged.meta.partial:
        await hand_over(gateway, staged.meta, id)
    return _answer(204, **_progress(staged.meta, offset))


@router.delete(
    "/v1/uploads/{id}",
    status_code=204,
    response_class=Response,
    responses={204: {"description": "Gone.", "headers": _TUS}, **_PROBLEMS, **responses(409, 423)},
    operation_id="deleteUpload",
)
async def terminate(request: Request, id: UploadId, caller: Writer, tus_resumable: Tus = None) -> Response:
    """Remove an upload; a version that it already made is kept."""
    gateway = gateway_of(request)
    annotate(request, upload=id)
    check_version(tus_resumable)
    staged = await asyncio.to_thread(gateway.resumable.load, caller.tenant, id)
    if staged.claim is not None:
        raise Problem(409, "claimed", f"this partial upload belongs to /v1/uploads/{staged.claim}; delete that one")
    with UploadMutex(gateway, staged.id):
        await asyncio.to_thread(gateway.resumable.remove, staged.id)
    return _answer(204)


def _progress(meta: Meta, offset: int) -> dict[str, str]:
    """Return the progress headers of an upload; a final one has an offset once complete."""
    expires_us = meta.expires_us if offset or not meta.empty_expires_us else meta.empty_expires_us
    expires = datetime.fromtimestamp(expires_us / 1e6, UTC).replace(microsecond=0)
    progress = {} if meta.final and offset != meta.length_bytes else {"Upload-Offset": str(offset)}
    return {**progress, "Upload-Expires": format_datetime(expires, usegmt=True)}


def _answer(status: int, **headers: str) -> Response:
    return Response(status_code=status, headers={"Tus-Resumable": VERSION, **headers})
