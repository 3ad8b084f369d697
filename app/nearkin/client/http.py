"""Send calls and map responses.

Invariant: a response that is no success becomes an error of Nearkin, by its problem document (RFC 9457) or else by
its status; no message contains the token.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from tenacity import RetryCallState, retry_if_exception, wait_random_exponential

from nearkin_shared.config.validators import InvalidValue, ServerUrl, TokenText
from nearkin_shared.errors import (
    AccessDenied,
    BadInput,
    BaseUnusable,
    ConfigError,
    Corrupt,
    GcPaused,
    NearkinError,
    NotFound,
    PermanentError,
    PreconditionFailed,
    QuotaExceeded,
    RetentionActive,
    RetryableError,
    SourceFailed,
    StoreLocked,
    StoreUnavailable,
    TenantErased,
)
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from nearkin.client.streaming import Upload

_log = logging.getLogger("nearkin.client")

ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""An explanation of a 1 GB version chunk by chunk has 30 MB."""
DETAIL_CHARACTERS_MAX = 500
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""How long the gateway may send or take nothing, besides what a call grants it to think."""
CONNECTIONS_MAX = 32
CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""The first that is set holds."""
ATTEMPTS_MAX = 6
BACKOFF_SECONDS_MAX = 5.0
RETRY_AFTER_SECONDS_MAX = 30.0
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""Errors that OpenSSL, old and new, reports for a response without TLS."""

T = TypeVar("T")


@frozen
class Endpoint:
    """Where a gateway is and what it knows us by."""

    url: str
    token: str | None = field(repr=False)
    loopback: bool

    @staticmethod
    def of(url: str, token: str | None) -> Endpoint:
        """Check both. Raises ConfigError."""
        try:
            ServerUrl().check(url)
        except InvalidValue as err:
            raise ConfigError(f'server "{url}": {err}') from err
        try:
            token = None if token is None else TokenText().check(token)
        except InvalidValue as err:
            raise ConfigError(f"token: {err}") from err
        loopback = _is_loopback(urlsplit(url).hostname or "")
        if token is not None and url.startswith("http:") and not loopback:
            _log.warning("server %s: the token is sent unencrypted; use https:// outside a trusted network", url)
        return Endpoint(url.rstrip("/"), token, loopback)

    def client_options(self) -> dict[str, Any]:
        """Return the arguments of httpx's clients."""
        headers = {"Accept": "application/json, application/problem+json", "Accept-Encoding": "identity"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return {
            "headers": headers,
            "follow_redirects": False,  # the token must not be sent to another server
            "trust_env": not self.loopback,  # a proxy is not asked for this machine
            "verify": _trusted_certificates()
            if self.url.startswith("https:")
            else False,  # http needs none of their 20 ms
            "limits": httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=8),
        }


def _trusted_certificates() -> ssl.SSLContext:
    """Return the trusted certificates: SSL_CERT_FILE's or SSL_CERT_DIR's if set.

    Raises ConfigError.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as err:  # ssl.SSLError is one
        used = next((name for name in CERTIFICATE_VARIABLES if os.environ.get(name)), None)
        named = "the package certifi" if used is None else f"{used}={os.environ[used]}"
        raise ConfigError(f"{named}: want PEM certificates to trust: {err}") from err


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@frozen
class Call:
    """One request. `path` is percent-encoded and follows the gateway's URL."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: Upload | None = None
    body: bytes | None = None
    after_seconds: float = 0.0
    """Wait this long before it is sent."""
    patience_seconds: float = 0.0
    """How long the gateway may think before it answers."""
    commit_seconds: float = 0.0
    """How long what an earlier sending of the same began may be at work still."""

    @property
    def is_repeatable(self) -> bool:
        """Return whether the call may be repeated: it only reads, or has an idempotency key."""
        if self.upload is not None:
            return self.upload.repeatable
        return self.method == "GET" or "Idempotency-Key" in self.headers

    def timeout(self) -> httpx.Timeout:
        """Return how long each step may take."""
        write_seconds = SILENCE_SECONDS + (0.0 if self.upload is None else self.upload.patience_seconds)
        read_seconds = SILENCE_SECONDS + self.patience_seconds
        return httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS, read=read_seconds, write=write_seconds)


@frozen
class Answer:
    """A success."""

    status: int
    headers: httpx.Headers
    body: bytes
    named: str

    def json(self) -> Any:
        """Return the body's value. Raises PermanentError: then this is no gateway of ours."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as err:
            raise self.foreign(err) from err

    def foreign(self, why: object) -> PermanentError:
        """Return the error for an answer that no gateway of ours gives."""
        return PermanentError(f"{self.named}: not what a Nearkin gateway answers: {why}; check the server's URL")


Conversation: TypeAlias = Generator[Call, Answer, T]
"""Requests to the gateway: the generator is sent the response to each call; errors are raised past it."""


def blob_path(key: str, prefix: str = "/v1/blobs") -> str:
    """Return the path of a key: one segment, whatever is in the key."""
    encoded = quote(key, safe="")
    if key in (".", ".."):  # dots alone are the only text that a path's normalisation would eat
        encoded = encoded.replace(".", "%2E")
    return f"{prefix}/{encoded}"


# --- errors ----------------------------------------------------------------------------------------------------------


class ReadOnly(StoreUnavailable):
    """The operator takes no puts for now: nothing that a second try soon would change."""


class StillRunning(StoreUnavailable):
    """An earlier sending of the same request is still running; ask again later."""


_BY_NAME: dict[str, type[NearkinError]] = {
    "bad-input": BadInput,
    "bad-setting": ConfigError,
    "base-unusable": BaseUnusable,
    "corrupt": Corrupt,
    "erased": TenantErased,
    "not-found": NotFound,
    "precondition-failed": PreconditionFailed,
    "quota-exceeded": QuotaExceeded,
    "read-only": ReadOnly,
    "retained": RetentionActive,
    "paused": GcPaused,
    "still-running": StillRunning,
    "unavailable": StoreUnavailable,
}
"""By the last part of a problem's type, `urn:nearkin:problem:NAME`; the others are told apart by status."""
_BY_STATUS: dict[int, type[NearkinError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    408: StoreUnavailable,
    409: PermanentError,
    410: NotFound,
    412: PreconditionFailed,
    423: StoreLocked,
    425: StoreUnavailable,
    429: StoreUnavailable,
    501: PermanentError,
    507: QuotaExceeded,
}


def error_of(named: str, status: int, headers: Mapping[str, str], body: bytes) -> NearkinError:
    """Return the error for a response. `named`: the call, for responses without a problem."""
    problem = _problem(headers, body)
    name = str(problem.get("type", "")).rpartition(":")[2]
    kind = _BY_NAME.get(name) or _BY_STATUS.get(status)
    if kind is None:
        kind = StoreUnavailable if status >= 500 else BadInput if status >= 400 else PermanentError
    detail = problem.get("detail") or problem.get("title")
    if isinstance(detail, str) and detail:
        text = "".join(c if c.isprintable() else " " for c in detail)[:DETAIL_CHARACTERS_MAX]
    else:
        text = f"{named}: HTTP {status} {httpx.codes.get_reason_phrase(status)}".rstrip()
        if 300 <= status < 400:
            text += f" to {headers.get('location', 'nowhere')[:200]!r}: name that URL as the server"
    if status == 401:
        text += "; NEARKIN_TOKEN, or `token` of nearkin.connect, names the token"
    err = kind(text)
    if isinstance(err, RetryableError):
        err.retry_after_seconds = _retry_after(headers)
    return err


def _problem(headers: Mapping[str, str], body: bytes) -> Mapping[str, Any]:
    if "json" not in headers.get("content-type", ""):
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the gateway asks for; it gives no dates."""
    text = headers.get("retry-after", "")
    return min(float(text), RETRY_AFTER_SECONDS_MAX) if text.isascii() and text.isdecimal() else None


def unreachable(named: str, err: httpx.TransportError) -> NearkinError:
    """Return the error for a gateway that could not be reached or fell silent."""
    reason = str(err) or type(err).__name__
    if isinstance(err, httpx.PoolTimeout):
        reason = (
            f"not sent: {CONNECTIONS_MAX} calls of this client are at work, which is the most; "
            "a get that is not read to its end is one until its iterator is closed"
        )
    elif isinstance(err, httpx.TimeoutException):
        reason = f"no answer in time ({type(err).__name__})"
    if isinstance(err, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
        return PermanentError(f"{named}: {reason}")
    broken = _broken_tls(err)
    if isinstance(broken, ssl.SSLCertVerificationError):
        names = " or ".join(CERTIFICATE_VARIABLES)
        reason = f"its certificate is not trusted: {broken.verify_message}; {names} name the certificates of its issuer"
        return PermanentError(f"{named}: {reason}")
    if broken is not None and broken.reason in NO_TLS:
        return PermanentError(f"{named}: the server speaks no TLS there: name it http://, or its TLS port")
    if isinstance(err, httpx.ConnectError | httpx.ConnectTimeout):
        reason += "; is the gateway running, and the address right?"
    return StoreUnavailable(f"{named}: {reason}")


def closed_error(url: str) -> PermanentError:
    """Return the error for a call through a client that was closed."""
    return PermanentError(f"{url}: this client was closed; nearkin.connect gives another")


def _broken_tls(err: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error, which httpx wraps twice."""
    while err is not None and not isinstance(err, ssl.SSLError):
        err = err.__cause__ or err.__context__
    return err


# --- trying again ----------------------------------------------------------------------------------------------------

_jitter = wait_random_exponential(multiplier=0.2, max=BACKOFF_SECONDS_MAX)


def retry_options(call: Call) -> dict[str, Any]:
    """Return tenacity's arguments for a call: full jitter, or the requested delay.

    A body of gigabytes takes longer to commit than a connection should be idle: while an earlier sending is reported
    as running, the call is repeated for up to `commit_seconds`, and that is not counted as a failure.
    """
    failed, running_until = 0, 0.0

    def worth_it(err: BaseException) -> bool:
        ours = isinstance(err, ReadOnly | SourceFailed)  # a moment later the gateway would say the same
        return isinstance(err, RetryableError) and not ours and call.is_repeatable

    def wait_seconds(state: RetryCallState) -> float:
        err = state.outcome.exception() if state.outcome is not None else None
        asked = getattr(err, "retry_after_seconds", None)
        if isinstance(err, StillRunning):
            return min(BACKOFF_SECONDS_MAX, (asked or 1.0) * state.attempt_number)
        return _jitter(state) if asked is None else float(asked)

    def enough(state: RetryCallState) -> bool:
        nonlocal failed, running_until
        if state.outcome is not None and isinstance(state.outcome.exception(), StillRunning):
            running_until = running_until or time.monotonic() + call.commit_seconds
            return time.monotonic() >= running_until
        failed += 1
        return failed >= ATTEMPTS_MAX

    return {
        "retry": retry_if_exception(worth_it),
        "wait": wait_seconds,
        "stop": enough,
        "reraise": True,
    }
