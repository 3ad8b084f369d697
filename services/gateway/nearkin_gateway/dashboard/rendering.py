"""Render pages and serve their assets.

Invariant: every page is escaped, never cached, and has the same Content-Security-Policy; assets are a fixed list.
The policy forbids inline scripts and styles: browsers ignore those of a template.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse

from nearkin_gateway.dashboard import display_names, number_text
from nearkin_gateway.http.url_keys import blob_url
from nearkin_shared.utils.frozen import frozen

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",  # no-referrer would make the Origin of a form "null"
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@frozen
class Visitor:
    """The visitor of a page. `open`: no tokens are configured, so there is no logout."""

    tenant: str
    name: str
    scopes: frozenset[str]
    csrf: str
    open: bool = False


@frozen
class Asset:
    """A file that pages refer to."""

    content: bytes
    media_type: str
    etag: str


def page(template: str, visitor: Visitor | None, status: int = 200, *, title: str, **shown: Any) -> HTMLResponse:
    """Return a page."""
    body = _templates().get_template(template).render(visitor=visitor, title=title, **shown)
    return HTMLResponse(body, status, HEADERS)


def asset(name: str) -> Asset | None:
    """Return a script, style sheet or image by its name, None where there is none."""
    return _assets().get(name)


@cache
def _assets() -> dict[str, Asset]:
    found = {}
    for entry in files("nearkin_gateway.dashboard").joinpath("static").iterdir():
        content = entry.read_bytes()
        suffix = entry.name[entry.name.rindex(".") :]
        etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
        found[entry.name] = Asset(content, MEDIA_TYPES[suffix], etag)
    return found


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("nearkin_gateway.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "bytes": number_text.human_bytes, "count": number_text.count, "ratio": number_text.ratio,
        "moment": number_text.time_tag,
        "key": display_names.short, "visible": display_names.visible,
        "span": number_text.seconds, "rate": number_text.per_second,
    }  # fmt: skip
    made.globals |= {"page_url": number_text.page_url, "blob_url": blob_url, "version": _version()}
    return made


def _version() -> str:
    try:
        return version("nearkin")
    except PackageNotFoundError:  # run from a source tree
        return "0"
