"""Store objects in S3.

Each put has a token of its own as metadata. If an attempt does not end in a clear success, the object is inspected:

    our token        this put created it: done
    another token    another writer's object: AlreadyExists (if ours arrives later, `If-None-Match: *` refuses it)
    no object        retry, up to `retries` times within `retry_seconds`; then StoreUnavailable

A missing object is accepted only with the code `NoSuchKey`: some servers answer 404 for a wrong bucket or key id.
Threads
of the client do not survive a fork: processes that use this are spawned.

Invariant: `put_new` reports the result of this put, even if replies were lost.
"""

from __future__ import annotations

import html
import os
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from nearkin_shared.config.storage import ObjectStoreSettings
from nearkin_shared.errors import ConfigError, NearkinError, NotFound, StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists, Payload, check_size, join_parts
from nearkin_shared.objectstore.bucket_limits import REQUEST_LIMITS, RequestLimits
from nearkin_shared.objectstore.obstore_adapter import REFUSALS, ObstoreObjectStore
from nearkin_shared.storage import descriptor

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

TOKEN = "nearkin-put"  # noqa: S105 - the name of a metadata field
BACKOFF_SECONDS = 0.1
BACKOFF_SECONDS_MAX = 5.0
BACKOFF_BASE = 4
"""The client waits a random time of up to so many times the last wait: with 2 the waits do not grow on average."""
SPAN_GAP_BYTES = 1024 * 1024
"""Gaps between ranges up to this size are read with them, as the client does."""

_WRONG_KEYS = "check object_store.access_key_id and object_store.secret_access_key, or AWS_ACCESS_KEY_ID and so on"
_NO_KEYS_REMEDY = (
    "set object_store.access_key_id and object_store.secret_access_key, or AWS_ACCESS_KEY_ID and so on, or give this "
    "machine a role"
)
_REMEDIES = {
    "NoSuchBucket": "make the bucket, or correct object_store.url",
    "InvalidAccessKeyId": _WRONG_KEYS,
    "XAdminUserNotFound": _WRONG_KEYS,
    "InvalidToken": "correct object_store.session_token or AWS_SESSION_TOKEN: it belongs to other keys",
    "SignatureDoesNotMatch": _WRONG_KEYS,
    "AccessDenied": "let this key get, put, delete and list in the bucket",
    "ExpiredToken": "get a new object_store.session_token or AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "AuthorizationHeaderMalformed": "correct object_store.region",
    "ConnectionRefused": "nothing listens there: start the server, or correct object_store.endpoint",
    "PermanentRedirect": "correct object_store.region or object_store.endpoint",
}
_TELLING = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect"})
"""Codes whose message names the right region or address."""
_SETTLED = frozenset({*_REMEDIES, "EntityTooLarge", "InvalidRequest", "NotImplemented", "MethodNotAllowed"})
"""Codes of final refusals, without a retry."""
_NO_KEYS = re.compile(r"/latest/(api/token|meta-data)|169\.254\.1")  # where an instance's role would be asked for


class S3ObjectStore(ObstoreObjectStore):
    """The objects of a bucket, or below a prefix in it.

    An acknowledged object is durable, as the server guarantees (I1).
    """

    far = True

    def __init__(self, settings: ObjectStoreSettings, limits: RequestLimits = REQUEST_LIMITS) -> None:
        """Make the client; no request is sent. Raises ConfigError."""
        self._where = Where.parse(settings)
        self._limits = limits
        self._once = _client(self._where, settings, replace(limits, retries=0))
        super().__init__(_client(self._where, settings, limits))

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write an object. Raises AlreadyExists, StoreUnavailable (the result is unknown in time)."""
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_after_attempt,
            stop_after_delay,
            wait_random_exponential,
        )

        token = secrets.token_hex(16)
        tries = Retrying(
            retry=retry_if_exception_type(_OutcomeUnknown),
            stop=stop_after_attempt(1 + self._limits.retries) | stop_after_delay(self._limits.retry_seconds),
            wait=wait_random_exponential(BACKOFF_SECONDS, BACKOFF_SECONDS_MAX),
            reraise=True,
        )
        try:
            tries(self._try_to_put, name, join_parts(parts), token)
        except _OutcomeUnknown as err:
            tried = tries.statistics["attempt_number"]
            raise StoreUnavailable(f"{err}; tried {tried} times; it may or may not be there") from err.__cause__

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end); like a file, an object has no bytes behind its end."""
        spans = _spans(starts, ends)
        try:
            read = super().get_ranges(name, [start for start, _ in spans], [end for _, end in spans])
        except StoreUnavailable as err:
            if "InvalidRange" not in str(err):
                raise
            whole = self.get(name)
            return [whole[start:end] for start, end in zip(starts, ends, strict=True)]
        if len(starts) == len(spans) == 1:
            return read
        froms = [start for start, _ in spans]
        found: list[Payload] = []
        for start, end in zip(starts, ends, strict=True):
            at = bisect_right(froms, start) - 1
            found.append(bytes(read[at][start - froms[at] : end - froms[at]]) if start < end else b"")
        return found

    def get(self, name: str) -> bytes:
        """Return a whole object. Raises NotFound or StoreUnavailable."""
        try:
            found = obstore.get(self._client, name)
            self._check_answer(name, found.meta)
            check_size(name, found.meta["size"])
            return bytes(found.bytes())
        except REFUSALS as err:
            raise self._translated(name, err) from err

    @property
    def has_server_clock(self) -> bool:
        """Return that the server dates objects by its own clock."""
        return True

    def modified_seconds(self, name: str) -> float:
        """Return the time at which the server wrote an object, seconds since 1970.

        Raises NotFound, StoreUnavailable.
        """
        return self._meta(name)["last_modified"].timestamp()

    def _meta(self, name: str) -> ObjectMeta:
        """Return an object's metadata.

        The response to a HEAD has no body with an error code; that of a GET has.
        """
        try:
            found = obstore.head(self._client, name)
        except REFUSALS as err:
            if not isinstance(err, FileNotFoundError) and not re.search(r"status code: 4", str(err)):
                raise self._translated(name, err) from err
            try:
                found = obstore.get(self._client, name).meta
            except REFUSALS as said:
                raise self._translated(name, said) from said
        self._check_answer(name, found)
        return found

    def _check_answer(self, name: str, found: ObjectMeta) -> None:
        """Raise StoreUnavailable for a success that is not S3's: a page of a proxy or console."""
        if found["e_tag"] is None:
            raise StoreUnavailable(f"{name}: {self._where}: answers, but not as S3 does; correct object_store.endpoint")

    def check(self) -> None:
        """Request one page of names. Raises StoreUnavailable with the remedy.

        Reasons: no such bucket, wrong keys, no server.
        """
        next(iter(self.names("")), None)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and sizes.

        The client takes any page for an empty listing, so that an object is requested if there are no names.
        """
        empty = True
        for entry in super().names(prefix):
            empty = False
            yield entry
        if empty:
            with suppress(NotFound):
                self._meta(descriptor.NAME)

    def _try_to_put(self, name: str, data: Payload, token: str) -> None:
        """Put once, then determine the result.

        Raises AlreadyExists, StoreUnavailable (final), or _OutcomeUnknown.
        """
        cause: Exception
        try:
            obstore.put(self._once, name, data, mode="create", use_multipart=False, attributes={TOKEN: token})
        except AlreadyExistsError as err:
            found, cause = f"{name}: a request for the same name was under way", err  # or it was deleted since
        except REFUSALS as err:
            refused = self._translated(name, err)
            if _code(err) in _SETTLED or _NO_KEYS.search(str(err)):
                raise refused from err
            found, cause = str(refused), err
        else:
            return
        holder = self._holder(name)
        if holder == token:
            return
        if holder is not None:
            raise AlreadyExists(f"{name}: already there") from cause
        raise _OutcomeUnknown(found) from cause

    def _holder(self, name: str) -> str | None:
        """Return the token of an existing object, "" without one; None if there is no object."""
        try:
            # HEAD is not enough: a 404 without a body may be a wrong bucket's
            found = obstore.get(self._once, name)
            self._check_answer(name, found.meta)
            return found.attributes.get(TOKEN, "")
        except REFUSALS as err:
            translated = self._translated(name, err)
            if isinstance(translated, NotFound):
                return None
            raise _OutcomeUnknown(str(translated)) from err

    def _translated(self, name: str, err: Exception) -> NearkinError:
        code = _code(err)
        if isinstance(err, FileNotFoundError) and code == "NoSuchKey":
            return NotFound(f"{name}: no such object in {self._where}")
        about = f"{name}: {self._where}" if name else str(self._where)
        return StoreUnavailable(f"{about}: {_reason(err, code)}")


class _OutcomeUnknown(StoreUnavailable):
    """One try ended without an answer to whether it was done."""


@dataclass(frozen=True)
class Where:
    """A bucket and what is below a prefix in it."""

    bucket: str
    prefix: str
    endpoint: str | None

    @classmethod
    def parse(cls, settings: ObjectStoreSettings) -> Where:
        """Take apart `object_store.url`. Raises ConfigError."""
        matched = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^?#]*))?", settings.url or "")
        if matched is None:
            raise ConfigError(
                f'object_store.url "{settings.url}": want s3://bucket/prefix; a bucket is 3 to 63 of a-z, 0-9, . and -'
            )
        return cls(matched[1], (matched[2] or "").strip("/"), settings.endpoint)

    def __str__(self) -> str:
        """Name it as an operator would."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"bucket {self.bucket}{at}"


def _client(where: Where, settings: ObjectStoreSettings, limits: RequestLimits) -> S3Store:
    config: S3Config = {
        "region": settings.region,
        "conditional_put": "etag",
        "virtual_hosted_style_request": settings.virtual_hosted,
        "disable_bulk_delete": True,  # one name at a time anyway; not every server knows the other
    }
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"):
        if re.search(r"[\0-\x1f\x7f]", os.environ.get(variable, "")):
            raise ConfigError(f"environment {variable}: holds a line break or the like: was it made by `echo`?")
    provider = None
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        if settings.session_token is None and os.environ.get("AWS_SESSION_TOKEN", os.environ.get("AWS_TOKEN")):
            provider = _Keys(settings.access_key_id, settings.secret_access_key)  # else other keys' token is sent
        config["access_key_id"] = settings.access_key_id
        config["secret_access_key"] = settings.secret_access_key
    if settings.session_token is not None:
        config["session_token"] = settings.session_token
    if settings.checksum != "none":
        config["checksum_algorithm"] = settings.checksum.upper()
    client_options: ClientConfig = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
        "timeout": timedelta(seconds=limits.request_seconds),
    }
    if settings.ca_file is not None:
        try:
            client_options["root_certificate"] = Path(settings.ca_file).read_bytes()
        except OSError as err:
            raise ConfigError(f'object_store.ca_file "{settings.ca_file}": {err.strerror}') from err
    retry_config: RetryConfig = {
        "max_retries": limits.retries,
        "retry_timeout": timedelta(seconds=limits.retry_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=BACKOFF_SECONDS),
            "max_backoff": timedelta(seconds=BACKOFF_SECONDS_MAX),
            "base": BACKOFF_BASE,
        },
    }
    try:
        return S3Store(
            where.bucket,
            prefix=where.prefix or None,
            config=config,
            client_options=client_options,
            retry_config=retry_config,
            credential_provider=provider,
        )
    except (*REFUSALS, ValueError) as err:
        raise ConfigError(f"object_store: {str(err).splitlines()[0]}") from err


class _Keys:
    """Keys without a session token, whatever the environment has."""

    def __init__(self, access_key_id: str, secret_access_key: str) -> None:
        self._keys: S3Credential = {
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "token": None,
            "expires_at": None,
        }

    def __call__(self) -> S3Credential:
        return self._keys


def _spans(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges that hold all of these, in order, none near another.

    The client joins near ones itself, and then panics where the object ends before one of those that it joined.
    """
    spans: list[tuple[int, int]] = []
    for start, end in sorted((start, end) for start, end in zip(starts, ends, strict=True) if start < end):
        if spans and start <= spans[-1][1] + SPAN_GAP_BYTES:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def _code(err: Exception) -> str:
    """Return the error code that the server sent, "" where it sent none."""
    matched = re.search(r"<Code>(\w+)</Code>", str(err))
    return matched[1] if matched else ""


def _reason(err: Exception, code: str) -> str:
    """Return one line: the server's message or the connection's failure, and the remedy."""
    text = str(err)
    if _NO_KEYS.search(text):
        return f"no keys found: {_NO_KEYS_REMEDY}"
    if code in _REMEDIES and code not in _TELLING:
        return f"{code}: {_REMEDIES[code]}"
    if code:
        said = re.search(r"<Message>([^<]*)</Message>", text)
        reason = f"{code}: {html.unescape(said[1]).rstrip('.')}" if said else code
    else:
        status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
        if status and status[1].startswith("403"):
            return f"{status[1].strip()}: {_WRONG_KEYS}"
        # `HTTP error: error sending request` has no reason: the innermost cause has
        causes = re.findall(r"(?:kind: |Custom|error: )\"?(Timeout|TimedOut|ConnectionRefused|[a-z][^\"{}\n,]+)", text)
        reason = status[1].strip() if status else (causes[-1] if causes else text.splitlines()[0])
    remedy = _REMEDIES.get(code or reason)
    return f"{reason}; {remedy}" if remedy else reason
