"""Process one upload, from its first byte to its outcome.

Invariant: a refused or interrupted upload ends visibly, and nothing of it is committed.

    1 begin  2 hash and pass on the frames  3 compare the announced digest  4 finish: all durable  5 outcome

Before step 4 any error aborts the upload. From step 4 on its end may be durable, so it is not reported as failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from blake3 import blake3
from starlette.requests import ClientDisconnect

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.backends.ingest_backend import FAILED, IncomingUpload, UploadRequest, UploadResult
from nearkin_gateway.blocking_threads import WorkerPool
from nearkin_gateway.http.problems import RETRY_SECONDS, Problem, from_error
from nearkin_gateway.state import Gateway
from nearkin_shared.errors import NearkinError, PermanentError
from nearkin_shared.formats.upload_parts import CopiedRange
from nearkin_shared.limits import FRAME_BYTES_MAX
from nearkin_shared.observability import log_setup, tracing
from nearkin_shared.preconditions import PRECONDITION, Precondition
from nearkin_shared.reading.copy_sources import SourceVersion
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.validation import is_reserved_key

_log = logging.getLogger("nearkin.gateway")

UploadPiece: TypeAlias = bytearray | CopiedRange
"""A frame of new bytes, or a range of the sources."""

HASHED_APART_BYTES = 256 * 1024
"""Frames above this are hashed on a thread: 0.9 ms of SHA-256 a frame would hold up every other request."""
ABORT_SECONDS = 10.0
IDEMPOTENCY_KEY_CHARACTERS_MAX = 255
IDEMPOTENCY_SECONDS = 24 * 3600
"""An embedded gateway recognises an `Idempotency-Key` for at least one day, across restarts too."""
FOREIGN_TENANT = "foreign-tenant"
"""Name of the problem of a tenant that this gateway does not store for."""


def check_writable(gateway: Gateway) -> None:
    """Refuse changes where none are taken. Raises Problem."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    if gateway.stopping:
        raise Problem(503, "stopping", "this gateway is stopping; try another one", headers=retry)
    if gateway.settings.service.read_only:
        raise Problem(503, "read-only", "service.read_only is set: blobs are read, nothing is changed", headers=retry)


async def check_open(gateway: Gateway, tenant: str) -> None:
    """Refuse uploads where none are taken. Raises Problem, TenantErased, StoreUnavailable."""
    check_writable(gateway)
    if not gateway.ingest.accepts(tenant):
        raise Problem(
            403,
            FOREIGN_TENANT,
            f"this gateway runs embedded and stores for tenant {gateway.settings.tenant!r} alone, not for {tenant!r}",
        )
    if gateway.settings.storage.encryption != "none":  # before a byte is taken that no stage could store
        await asyncio.to_thread(gateway.catalogue.check_tenant, tenant)


def check_idempotency_key(gateway: Gateway, tenant: str, key: str, given: str | None) -> bytes | None:
    """Return the origin of all requests with this `Idempotency-Key`. Raises Problem."""
    if given is None:
        return None
    if not 1 <= len(given) <= IDEMPOTENCY_KEY_CHARACTERS_MAX:
        raise Problem(
            400, "bad-idempotency-key", f"Idempotency-Key: want 1 to {IDEMPOTENCY_KEY_CHARACTERS_MAX} characters"
        )
    return gateway.tickets.origin(tenant, key, given)


@contextmanager
def one_at_a_time(gateway: Gateway, origin: bytes) -> Iterator[None]:
    """Refuse a second upload with the same origin while the first one runs. Raises Problem."""
    if origin in gateway.origins:
        raise Problem(
            409,
            "still-running",
            "an upload with this Idempotency-Key is running; wait for its answer",
            headers={"Retry-After": "1"},
        )
    gateway.origins.add(origin)
    try:
        yield
    finally:
        gateway.origins.discard(origin)


def origin_of_key(origin: bytes) -> BlobOrigin:
    """Return the origin of a request with an `Idempotency-Key`."""
    return BlobOrigin(origin, time.time_ns() // 1000 - IDEMPOTENCY_SECONDS * 1_000_000)


async def find_committed(gateway: Gateway, tenant: str, key: str, origin: BlobOrigin) -> dict[str, Any] | None:
    """Return the event of the version that an earlier attempt committed, if any.

    Raises StoreUnavailable.
    """
    found = gateway.outcomes.of_origin(origin.id)
    return found if found is not None else await gateway.ingest.find_committed(tenant, key, origin)


class PartsDigest(Protocol):
    """An upload with ranges of other versions."""

    @property
    def sources(self) -> tuple[SourceVersion, ...] | None:
        """The versions that ranges are copied of; None for a backend that gets their bytes."""

    def result_digest(self, found: bytes) -> bytes:
        """Return the digest of the version, `found` that of all bytes that were passed on."""


@dataclass(frozen=True, slots=True)
class NewBlob:
    """A blob to store, as its request describes it."""

    tenant: str
    key: str
    metadata: Mapping[str, str]
    origin: BlobOrigin | None = None
    sha256: bytes | None = None
    """The digest that the client announced."""
    wants_sha256: bool = False
    trace: str | None = None
    precondition: Precondition | None = None
    size_bytes: int | None = None
    """As announced; None: not known before the end."""
    staged: str | None = None
    """The resumable upload that is handed over: its bytes are reserved already."""
    parts: PartsDigest | None = None
    """Of an upload with ranges."""


async def take(gateway: Gateway, pieces: AsyncIterator[UploadPiece], new: NewBlob) -> tuple[bytes, UploadResult]:
    """Store a body and return the attempt's id with its size and digests.

    `pieces` yields frames of at most FRAME_BYTES_MAX, and ranges of `new.parts`. Raises Problem, NearkinError.
    """
    blob = await gateway.admission.admit(
        new.tenant, new.size_bytes, new.staged, for_checkpoint=is_reserved_key(new.key)
    )
    now_us = time.time_ns() // 1000
    origin = new.origin or BlobOrigin(blob)
    intent = UploadRequest(
        new.tenant,
        new.key,
        blob,
        origin.id,
        now_us,
        new.metadata,
        new.trace,
        new.precondition,
        origin.first_attempt_us,
        None if new.parts is None else new.parts.sources,
    )
    log_setup.bind(blob, new.tenant, new.trace)
    tracing.describe(new.trace, tracing.about(blob, new.tenant))
    try:
        ending, upload = await _send(gateway, pieces, new, intent)
    except BaseException:
        gateway.admission.cancel(blob)
        raise
    try:
        failpoint("upload.sent")
        await upload.finish(ending)
    except BaseException as err:
        if isinstance(err, PermanentError) or (gateway.ingest.commits and isinstance(err, NearkinError)):
            gateway.admission.cancel(blob)
        else:  # it may commit, or be lost without an outcome
            loop = asyncio.get_running_loop()
            loop.call_later(limits.UPLOAD_STATUS_SECONDS, gateway.admission.cancel, blob)
        raise
    failpoint("upload.durable")
    _log.info("blob %s: %d bytes taken", blob.hex(), ending.size_bytes)
    return blob, ending


async def _send(
    gateway: Gateway, pieces: AsyncIterator[UploadPiece], new: NewBlob, intent: UploadRequest
) -> tuple[UploadResult, IncomingUpload]:
    """Pass a body on; return its size and digests, and the upload to finish.

    A failure aborts it.
    """
    if new.size_bytes is None:
        pieces = _reserve(gateway, pieces, intent)
    upload = await gateway.ingest.begin(intent)
    failpoint("upload.begun")
    try:
        ending = await _stream(
            pieces, upload, gateway.pools.hashing, with_sha256=new.wants_sha256 or new.sha256 is not None
        )
        ending = _with_digest(ending, new.parts)
        check_sha256(ending, new.sha256)
    except BaseException as err:
        await _abort(upload, err)
        raise
    return ending, upload


def _with_digest(ending: UploadResult, parts: PartsDigest | None) -> UploadResult:
    """Return the result with the digest of the version."""
    return ending if parts is None else replace(ending, blake3=parts.result_digest(ending.blake3))


async def _reserve(
    gateway: Gateway, pieces: AsyncIterator[UploadPiece], intent: UploadRequest
) -> AsyncIterator[UploadPiece]:
    """Yield the frames and ranges of a body of unknown length, each within the quotas.

    Raises Problem 507, StoreUnavailable.
    """
    for_checkpoint = is_reserved_key(intent.key)
    async for piece in pieces:
        await gateway.admission.grow(intent.tenant, intent.blob, _size_of(piece), for_checkpoint=for_checkpoint)
        yield piece


def _size_of(piece: UploadPiece) -> int:
    return piece.stop - piece.start if isinstance(piece, CopiedRange) else len(piece)


def check_sha256(ending: UploadResult, announced: bytes | None) -> None:
    """Refuse bytes that are not those announced. Raises Problem."""
    if announced is not None and ending.sha256 != announced:
        found = ending.sha256.hex() if ending.sha256 is not None else "unknown"
        raise Problem(
            400,
            "digest-mismatch",
            f"the body's SHA-256 is {found}, announced was {announced.hex()}; nothing was stored",
        )


async def check_replay(
    gateway: Gateway,
    earlier: Mapping[str, Any],
    pieces: AsyncIterator[UploadPiece],
    sha256: bytes | None,
    parts: PartsDigest | None = None,
) -> None:
    """Check that a repeated upload has the content of the first one. Raises Problem 422."""
    ending = await _stream(pieces, None, gateway.pools.hashing, with_sha256=sha256 is not None)
    check_sha256(ending, sha256)
    check_same(earlier, _with_digest(ending, parts))


def check_same(outcome: Mapping[str, Any], ending: UploadResult) -> None:
    """Refuse an idempotency key that was used for another content. Raises Problem 422."""
    if outcome["digest"] != f"blake3:{ending.blake3.hex()}":
        raise Problem(
            422,
            "idempotency-key-reused",
            f"this Idempotency-Key stored {outcome['digest']} as version {outcome['version']}; the body is "
            f"blake3:{ending.blake3.hex()}. Use a new key for new content",
        )


def check_failed(outcome: Mapping[str, Any]) -> None:
    """Raise Problem if an accepted upload has failed."""
    if outcome["state"] == FAILED:
        if is_refused(outcome):
            raise Problem(412, PRECONDITION, str(outcome["failure"]))
        raise Problem(500, "blob-failed", f"the blob was not stored: {outcome['failure']}")


def is_refused(outcome: Mapping[str, Any]) -> bool:
    """Return whether the precondition of an upload refused it at the commit."""
    return bool(outcome["state"] == FAILED and outcome.get("reason") == PRECONDITION)


async def _stream(
    pieces: AsyncIterator[UploadPiece], upload: IncomingUpload | None, hashing: WorkerPool, *, with_sha256: bool
) -> UploadResult:
    """Hash the frames, pass all to `upload` if given, and return size and digests."""
    whole, sha256, size_bytes = blake3(), hashlib.sha256() if with_sha256 else None, 0

    def hash_all(frame: bytearray) -> None:
        whole.update(frame)
        if sha256 is not None:
            sha256.update(frame)

    async for frame in pieces:
        size_bytes += _size_of(frame)
        if isinstance(frame, CopiedRange):
            if upload is not None:
                await upload.copy(frame)
            continue
        assert len(frame) <= FRAME_BYTES_MAX
        if len(frame) > HASHED_APART_BYTES:
            await hashing.run(hash_all, frame)
        else:
            hash_all(frame)
        if upload is not None:
            await upload.write(frame)
    return UploadResult(size_bytes, whole.digest(), sha256.digest() if sha256 is not None else None)


async def _abort(upload: IncomingUpload, err: BaseException) -> None:
    match err:
        case ClientDisconnect():
            why = "the client went away"
        case asyncio.CancelledError():
            why = "the gateway stopped"
        case Exception():
            why = from_error(err).detail
        case _:
            why = type(err).__name__
    task = asyncio.ensure_future(upload.abort(why))
    with suppress(TimeoutError, asyncio.CancelledError):  # the pipeline ends an upload that falls silent by itself
        await asyncio.wait_for(asyncio.shield(task), ABORT_SECONDS)
