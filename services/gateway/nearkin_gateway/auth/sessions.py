"""Sign and verify the session cookies of browsers.

Invariant: a cookie never holds a token; it expires, and is invalid once its token is revoked.

    1.ID.OPENED.NONCE.MAC        the token's id, seconds since 1970, 16 random bytes, a MAC over these and its hash

Sessions are not stored: every gateway of the store verifies cookies of the others, and revoking a token ends its
sessions. The gateway that handled a logout remembers it; the browser deletes the cookie anyway.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from urllib.parse import urlsplit

from blake3 import blake3
from starlette.requests import HTTPConnection

from nearkin_gateway.auth.tokens import AccessToken, TokenFile
from nearkin_gateway.http.problems import Problem
from nearkin_shared.utils.frozen import frozen

COOKIE = "nearkin-session"
SECURE_COOKIE = "__Host-nearkin-session"
"""Name of the cookie over TLS: the prefix keeps neighbouring hosts from setting it."""
CSRF_HEADER = "x-nearkin-csrf"
CLOSED_MAX = 10_000
"""Sessions that were logged out and are not over yet; the one longest ago is forgotten first."""
SKEW_SECONDS = 60
"""A session may have been opened by a gateway whose clock is so far ahead: the next page is of another one."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_COOKIE = re.compile(r"1\.([0-9a-f]{8})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)


@frozen
class LoginSession:
    """An open session.

    `ends`: seconds since 1970. `csrf`: the value that pages send with every change.
    """

    token: AccessToken
    ends: int
    csrf: str


class Sessions:
    """Opens, reads and closes sessions."""

    def __init__(self, secret: bytes, tokens: TokenFile, session_seconds: int) -> None:
        self._key = blake3(secret, derive_key_context="nearkin 2026 sessions of a dashboard").digest()
        self._tokens = tokens
        self.session_seconds = session_seconds
        self._closed: OrderedDict[str, None] = OrderedDict()

    def open(self, token: AccessToken, now: float) -> str:
        """Return a cookie for a token that was just shown."""
        head = f"1.{token.id}.{int(now)}.{secrets.token_hex(16)}"
        return f"{head}.{self._mac('cookie', head, token)}"

    def read(self, cookie: str, now: float) -> LoginSession | None:
        """Return the session of a cookie; None if it is invalid or expired, or has no token."""
        match = _COOKIE.fullmatch(cookie)
        if match is None or cookie in self._closed:
            return None
        number, opened, _, mac = match.groups()
        token = self._tokens.by_id(number)
        if token is None or token.expired(now):
            return None
        if not hmac.compare_digest(mac, self._mac("cookie", cookie.rpartition(".")[0], token)):
            return None
        ends = int(opened) + self.session_seconds
        is_open = int(opened) <= now + SKEW_SECONDS and now < ends
        return LoginSession(token, ends, self._mac("csrf", cookie, token)) if is_open else None

    def close(self, cookie: str) -> None:
        """Take no more of this cookie."""
        self._closed[cookie] = None
        if len(self._closed) > CLOSED_MAX:
            self._closed.popitem(last=False)

    def _mac(self, purpose: str, text: str, token: AccessToken) -> str:
        return blake3(f"{purpose}\0{text}\0{token.sha256}".encode(), key=self._key).hexdigest()


def cookie_of(request: HTTPConnection) -> str | None:
    """Return the session's cookie, as it was sent."""
    return request.cookies.get(SECURE_COOKIE) or request.cookies.get(COOKIE)


def check_same_origin(request: HTTPConnection, *, must_say: bool) -> None:
    """Refuse requests sent by a page of another site. Raises Problem.

    Browsers send the origin with every change. `must_say`: refuse requests without an origin too, because a cookie
    authenticates them. Only hosts are compared, not schemes: TLS may end before the gateway.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        raise _cross_site(f"it comes from another site (Sec-Fetch-Site {site:.20})")
    if origin is None:
        if must_say:
            raise _cross_site("it names no Origin")
        return
    if not host or _host_of(origin) != host.lower():
        raise _cross_site(f"Origin {origin:.80} is not this gateway ({host:.80})")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # [ without ]
        return None


def check_loopback_host(request: HTTPConnection) -> None:
    """Refuse requests for a host that is not loopback (DNS rebinding). Raises Problem.

    A gateway without tokens serves loopback only.
    """
    host = request.headers.get("host")
    if host is None:
        return  # no browser
    name = host.rpartition(":")[0] if re.search(r":[0-9]+\Z", host) else host
    name = name.strip("[]").lower()
    if name not in LOOPBACK_NAMES and re.fullmatch(r"127(\.[0-9]{1,3}){3}", name, re.ASCII) is None:
        raise Problem(403, "foreign-host", f"Host {host:.80}: without tokens this gateway answers as localhost alone")


def is_secure(request: HTTPConnection) -> bool:
    """Return whether the browser sees this gateway over TLS, by its own word."""
    return request.headers.get("origin", "").startswith("https://") or request.url.scheme == "https"


def _cross_site(why: str) -> Problem:
    return Problem(403, "cross-site", f"refused: {why}; changes come from the gateway's own pages, or with a token")
