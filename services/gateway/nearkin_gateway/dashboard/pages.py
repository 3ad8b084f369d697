"""Serve the pages of the dashboard.

Invariant: a page shows the visitor's tenant only, declares its scope, and has the strict Content-Security-Policy.
Pages can be read without JavaScript; static/actions.js sends changes to the API.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import RedirectResponse, Response

from nearkin_gateway.auth.access import address_of, open_caller, record_refusal, session_of, shown_token
from nearkin_gateway.auth.sessions import COOKIE, SECURE_COOKIE, check_same_origin, cookie_of, is_secure
from nearkin_gateway.auth.tokens import SCOPES
from nearkin_gateway.dashboard import charts, setting_forms
from nearkin_gateway.dashboard.api_reference import read_document
from nearkin_gateway.dashboard.number_text import page_url
from nearkin_gateway.dashboard.rendering import Visitor, asset, page
from nearkin_gateway.http.problems import Problem, from_error
from nearkin_gateway.http.request_bodies import read_body
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.http.url_keys import blob_url
from nearkin_gateway.middleware.audit_requests import annotate, identify
from nearkin_gateway.monitoring.audit_events import REASONS
from nearkin_gateway.monitoring.audit_log import Actor
from nearkin_gateway.monitoring.scrub_status import scrub_json
from nearkin_gateway.routes.dead_letter_routes import letters_json
from nearkin_gateway.routes.operations_routes import collection_json, pipeline_json, tenant_json, tenants_json
from nearkin_gateway.state import Gateway, gateway_of
from nearkin_shared.errors import BadInput, NearkinError, NotFound
from nearkin_shared.limits import KEY_BYTES_MAX
from nearkin_shared.validation import check_user_key

FORM_BYTES_MAX = 8 * 1024
PAGE_ROWS = 50
VERSION_ROWS = 50
router = APIRouter(include_in_schema=False)

_Show = Callable[[Request, Gateway, Visitor], Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Add the pages."""
    app.include_router(router)


def _page(path: str, scope: str | None = None) -> Callable[[_Show], _Show]:
    """Route a page.

    Without a session it redirects to the login; errors and lack of `scope` are pages.
    """

    def wrap(show: _Show) -> _Show:
        async def answer(request: Request) -> Response:
            gateway = gateway_of(request)
            visitor: Visitor | None = None
            try:
                visitor = _visitor(request, gateway)
                if visitor is None:
                    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                    return RedirectResponse(page_url("/login", next=None if here == "/" else here), 303)
                try:
                    _check_scope(visitor, scope)
                except Problem:
                    _record_missing_scope(request, gateway, visitor)
                    raise
                annotate(request, "page.viewed", page=path)
                return await show(request, gateway, visitor)
            except (Problem, NearkinError) as err:
                problem = from_error(err)
                return page("problem.html", visitor, problem.status, title="Not shown", problem=problem)

        router.add_api_route(path, answer, methods=["GET"])
        return show

    return wrap


def _record_missing_scope(request: Request, gateway: Gateway, visitor: Visitor) -> None:
    gateway.audit.record_failure(Actor(visitor.tenant, visitor.name, address_of(request)), "session", "scope")


def _check_scope(visitor: Visitor, scope: str | None) -> None:
    if scope is not None and scope not in visitor.scopes:
        raise Problem(403, "missing-scope", f"this page needs a token with the scope {scope}")


def _visitor(request: Request, gateway: Gateway) -> Visitor | None:
    """Return who looks; None who must log in first. Raises Problem."""
    if gateway.tokens is None:
        caller = open_caller(request, gateway)
        identify(request, caller.actor)
        return Visitor(caller.tenant, caller.name, frozenset(SCOPES), "", open=True)
    session = session_of(request, gateway)
    if session is None:
        if cookie_of(request) is not None:
            record_refusal(request, gateway, "session", "session")
        return None
    gateway.rates.take(session.token.id)
    actor = Actor(session.token.tenant, session.token.id, address_of(request))
    gateway.audit.record_success(actor, "session")
    identify(request, actor)
    return Visitor(session.token.tenant, session.token.id, frozenset(session.token.scopes), session.csrf)


# --- logging in and out ----------------------------------------------------------------------------------------------


@router.get("/login")
async def login_page(request: Request) -> Response:
    """Ask for a token."""
    if gateway_of(request).tokens is None:
        return RedirectResponse("/", 303)
    return page("login.html", None, title="Log in", next=_inside(request.query_params.get("next")), failure=None)


@router.post("/login")
async def login(request: Request) -> Response:
    """Open a session with a token; it comes in the body alone, and is kept nowhere."""
    gateway = gateway_of(request)
    if gateway.tokens is None or gateway.sessions is None:
        return RedirectResponse("/", 303)
    following = "/"
    try:
        check_same_origin(request, must_say=True)
        given = await _form(request, gateway)
        following = _inside(given.get("next"))
        token = shown_token(request, gateway, given.get("token", "").strip(), "login")
    except (Problem, BadInput) as err:
        problem = from_error(err)
        if problem.name in REASONS:  # a refused token is recorded already
            record_refusal(request, gateway, "login", problem.name)
        failure = f"{problem.detail[:1].upper()}{problem.detail[1:]}."
        return page("login.html", None, problem.status, title="Log in", next=following, failure=failure)
    identify(request, Actor(token.tenant, token.id, address_of(request)))
    annotate(request, "session.login")
    if not token.tenant and following == "/":
        following = "/ui/pipeline"  # the overview is of a tenant
    now = time.time()
    life_seconds = gateway.sessions.session_seconds
    if token.expires is not None:
        life_seconds = min(life_seconds, max(1, token.expires - int(now)))
    answer = RedirectResponse(following, 303)
    secure = is_secure(request)
    answer.set_cookie(
        SECURE_COOKIE if secure else COOKIE,
        gateway.sessions.open(token, now),
        max_age=life_seconds,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    """Close the session."""
    gateway = gateway_of(request)
    session, cookie = session_of(request, gateway), cookie_of(request)
    if session is not None and cookie is not None and gateway.sessions is not None:
        try:
            check_same_origin(request, must_say=True)
            given = await _form(request, gateway)
            _check_csrf(given.get("csrf", ""), session.csrf)
        except (Problem, BadInput) as err:
            problem = from_error(err)
            if problem.name in REASONS:
                record_refusal(request, gateway, "session", problem.name, session.token)
            return page("problem.html", None, problem.status, title="Not logged out", problem=problem)
        gateway.sessions.close(cookie)
        identify(request, Actor(session.token.tenant, session.token.id, address_of(request)))
        annotate(request, "session.logout")
    answer = RedirectResponse("/login", 303)
    for name in (COOKIE, SECURE_COOKIE):
        answer.delete_cookie(name, path="/", secure=name == SECURE_COOKIE, httponly=True, samesite="strict")
    return answer


def _check_csrf(given: str, wanted: str) -> None:
    if not hmac.compare_digest(given.encode(), wanted.encode()):
        raise Problem(403, "bad-csrf", "the page is of another session; load it again")


async def _form(request: Request, gateway: Gateway) -> dict[str, str]:
    """Return the fields of a form. Raises Problem, BadInput."""
    data = await read_body(request, FORM_BYTES_MAX)
    try:
        return dict(parse_qsl(data.decode(), strict_parsing=bool(data), max_num_fields=8, errors="strict"))
    except ValueError as err:
        raise BadInput("unknown form") from err


def _inside(text: str | None) -> str:
    """Return where to go after the login: a page of this gateway, never another host's."""
    if text is None or not text.startswith("/") or text.startswith(("//", "/\\")) or not text.isprintable():
        return "/"
    return text[:4096]


# --- pages -----------------------------------------------------------------------------------------------------------


@_page("/", "read")
async def overview(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show the stored data, their growth, and the bytes that each step saved."""
    tenant = visitor.tenant
    stats = await asyncio.to_thread(gateway.catalogue.stats, tenant)
    reduction = await asyncio.to_thread(gateway.insight.reduction, tenant)
    growth = await asyncio.to_thread(gateway.insight.growth, tenant)
    tenants: list[dict[str, Any]] = []
    if "operator" in visitor.scopes and gateway.tokens is not None:
        tenants = await asyncio.to_thread(tenants_json, gateway, tenant, every=True)
    points = [(point.time_us / 1e6, point.logical_bytes, point.stored_bytes) for point in growth.points]
    if points:
        points.append((max(time.time(), points[-1][0]), stats.ledger.logical_bytes, stats.ledger.stored_bytes))
    return page(
        "overview.html",
        visitor,
        title="Overview",
        stats=stats,
        whole=await asyncio.to_thread(lambda: gateway.catalogue.is_complete),
        steps=charts.waterfall(stats.ledger),
        growth=growth,
        curve=charts.curve(points),
        reduction=tenant_json(tenant, reduction),
        tenants=tenants if len(tenants) > 1 else [],
    )


@_page("/ui/blobs", "read")
async def blobs(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show keys, a page at a time, and take uploads."""
    prefix, after = _requested_page(request, "prefix"), _requested_page(request, "after")
    listed, following = await asyncio.to_thread(
        gateway.catalogue.list_versions, visitor.tenant, prefix, after, PAGE_ROWS, all_versions=False
    )
    return page(
        "blobs.html",
        visitor,
        title="Blobs",
        prefix=prefix,
        after=after,
        listed=listed,
        following=following,
        writable="write" in visitor.scopes and gateway.ingest.accepts(visitor.tenant),
    )


@_page("/ui/deleted", "read")
async def show_deleted(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show what is deleted and can come back."""
    prefix, after = _requested_page(request, "prefix"), _requested_page(request, "after")
    found, damaged, following = await asyncio.to_thread(
        gateway.catalogue.list_deleted, gateway.deletions, visitor.tenant, prefix, after, PAGE_ROWS
    )
    return page(
        "deleted.html", visitor, title="Deleted", prefix=prefix, after=after, found=found, damaged=damaged,
        following=following,
    )  # fmt: skip


@_page("/ui/blob", "read")
async def blob(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show a key: its versions, what became of deleted ones, and how one version is kept."""
    key = _requested_page(request, "key")
    annotate(request, key=key)
    if not 1 <= len(key.encode(errors="replace")) <= KEY_BYTES_MAX:
        raise NotFound("no key is named; start from the list of blobs")
    check_user_key(key)
    after, number = _number(request, "after") or 0, _number(request, "version")
    tenant = visitor.tenant
    gone = [
        entry
        for entry in (
            await asyncio.to_thread(gateway.catalogue.list_deleted, gateway.deletions, tenant, key, "", PAGE_ROWS)
        )[0]
        if entry.key == key
    ]
    try:
        manifest = await asyncio.to_thread(gateway.catalogue.manifest, tenant, key, number)
        listed, following = await asyncio.to_thread(gateway.catalogue.versions, tenant, key, after, VERSION_ROWS)
    except NotFound:
        if not gone:
            raise
        return page("blob.html", visitor, title=key, key=key, gone=gone, listed=None, following=None, info=None)
    explained, failure = None, None
    try:
        with gateway.explanations.one(Holders(tenant, "" if visitor.open else visitor.name, address_of(request))):
            explanation = await asyncio.to_thread(gateway.catalogue.explain, tenant, key, manifest.version)
            explained = await asyncio.to_thread(charts.strip, explanation)
    except (BadInput, Problem) as err:  # too many chunks, or too many who ask
        failure = str(err)
    return page(
        "blob.html",
        visitor,
        title=key,
        key=key,
        gone=gone,
        listed=listed,
        following=following,
        info=manifest.info,
        url=blob_url(key, manifest.version),
        explained=explained,
        found_by=explanation.found_by if explained is not None else {},
        failure=failure,
    )


@_page("/ui/pipeline", "operator")
async def pipeline(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show what goes through, what waits, what failed, and dead letters."""
    activity = await pipeline_json(gateway)
    letters = await letters_json(gateway)
    drawn, grid = charts.bars([(minute["minute"][11:16], minute["logical_bytes"]) for minute in activity["minutes"]])
    workers = [] if gateway.workers is None else gateway.workers.workers()
    return page(
        "pipeline.html", visitor, title="Pipeline", activity=activity, letters=letters["letters"], bars=drawn,
        grid=grid,
        workers=workers,
    )  # fmt: skip


@_page("/ui/upkeep", "operator")
async def upkeep(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show what garbage collection and scrubbing did."""
    stats = await asyncio.to_thread(gateway.catalogue.stats, visitor.tenant)
    state, quarantined = await asyncio.to_thread(gateway.catalogue.scrub)
    return page(
        "upkeep.html",
        visitor,
        title="Upkeep",
        stats=stats,
        collection=await asyncio.to_thread(collection_json, gateway),
        scrub=scrub_json(state, quarantined, gateway.settings.scrub),
        undelete_seconds=gateway.settings.deletion.undelete_seconds,
    )


@_page("/ui/settings", "operator")
async def settings(request: Request, gateway: Gateway, visitor: Visitor) -> Response:
    """Show the hot settings, to be changed, and who changed them."""
    changes = [{**entry, "text": json.dumps(entry["changes"], sort_keys=True)} for entry in reversed(gateway.hot.audit)]
    return page(
        "settings.html",
        visitor,
        title="Settings",
        sections=setting_forms.hot_fields(gateway.settings, gateway.hot.changes),
        revision=gateway.hot.revision,
        audit=changes,
    )


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Render the OpenAPI document. Like the document itself, the page needs no session."""
    gateway = gateway_of(request)
    visitor: Visitor | None = None
    try:
        visitor = _visitor(request, gateway)
    except Problem as err:
        return page("problem.html", None, err.status, title="Not shown", problem=err)
    return page("reference.html", visitor, title="API reference", reference=read_document(request.app.openapi()))


@router.get("/ui/static/{name}")
async def static(request: Request, name: str) -> Response:
    """Return a script or a style sheet of the pages."""
    found = asset(name)
    if found is None:
        raise Problem(404, "not-found", "no such resource; GET /openapi.json lists all")
    headers: Mapping[str, str] = {
        "ETag": found.etag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }  # fmt: skip
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


def _requested_page(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if len(text) > KEY_BYTES_MAX + 32:
        raise BadInput(f"{name} of {len(text)} characters: want at most {KEY_BYTES_MAX}")
    return text


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 19 else None
