"""Hand whole resumable uploads over to the store.

Invariant: an upload is stored once, even if its hand-over is repeated after a crash or concurrently.

The parts are streamed like any other body. The origin is the upload's id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.http.request_bodies import frames
from nearkin_gateway.monitoring.audit_log import Actor
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.resumable_store import DamagedPart, Meta, StagedUpload, UploadOutcome
from nearkin_gateway.uploads.upload_admission import QUOTA_EXCEEDED
from nearkin_gateway.uploads.upload_preconditions import OUTCOME_SECONDS, check_refused
from nearkin_gateway.uploads.upload_service import NewBlob, find_committed, one_at_a_time, take
from nearkin_shared.errors import NearkinError, NotFound, PreconditionFailed
from nearkin_shared.observability import tracing
from nearkin_shared.preconditions import PRECONDITION
from nearkin_shared.storage.committed_origins import BlobOrigin

HAND_OVER_SECONDS = 20.0
"""The response to the last part waits so long for the hand-over, which then continues in the background."""
SWEEP_SECONDS = 60.0
_log = logging.getLogger("nearkin.gateway")


async def hand_over(gateway: Gateway, meta: Meta, number: str) -> None:
    """Hand a whole upload over and wait up to HAND_OVER_SECONDS for the result.

    Raises: NotFound, if the upload has been removed. Problem 409, if a part is damaged and must be sent again. Problem
    412, if the precondition failed at the commit. Problem 507, if a quota does not allow it: it is kept until it
    expires, and tried again.
    """
    task = _start_task(gateway, meta.tenant, number)
    with suppress(TimeoutError):
        ended = await asyncio.wait_for(asyncio.shield(task), HAND_OVER_SECONDS)
        if isinstance(ended, Problem):
            raise ended
        if not ended:
            # It expired or was deleted while its last bytes arrived: 204 would report it as stored.
            await asyncio.to_thread(gateway.resumable.load, meta.tenant, number)
        if meta.precondition is not None:
            staged = await asyncio.to_thread(gateway.resumable.load, meta.tenant, number)
            await check_refused(gateway, staged, OUTCOME_SECONDS)


def _start_task(gateway: Gateway, tenant: str, number: str) -> asyncio.Task[bool | Problem]:
    """Return the task that hands an upload over: one per upload."""
    task = gateway.background.get(number)
    if task is None:
        task = gateway.background[number] = asyncio.create_task(_store_upload(gateway, tenant, number))
        task.add_done_callback(lambda _: gateway.background.pop(number, None))
    return task


async def _store_upload(gateway: Gateway, tenant: str, number: str) -> bool | Problem:
    """Store an upload: 1 stream the parts, durably  2 write `done`  3 remove the parts.

    Returns False if the upload was removed meanwhile, and a Problem for the client if bytes of it are missing.
    """
    resumable = gateway.resumable
    try:
        async with gateway.hand_overs:
            staged = await asyncio.to_thread(resumable.load, tenant, number)
            if staged.done is not None:
                return True
            if not staged.whole:
                why = f"{staged.offset} of {staged.meta.length_bytes} bytes are there; ask HEAD where to go on"
                return Problem(409, "wrong-offset", why)
            with one_at_a_time(gateway, bytes.fromhex(number)):
                try:
                    done = await _store(gateway, staged)  # 1
                except Problem as err:
                    if err.name == QUOTA_EXCEEDED:
                        resumable.postpone(number)
                        return err
                    raise
                except DamagedPart as err:
                    await asyncio.to_thread(resumable.drop, err)
                    _log.error("upload %s: %s; waiting for the client to send them again", number, err)
                    why = f"{err}; they were dropped: ask HEAD, and send them again"
                    return Problem(409, "damaged-part", why)
                await asyncio.to_thread(resumable.finish, staged, done)  # 2, 3
    except NotFound:
        _log.info("upload %s: another gateway has handed it over, or it was terminated", number)
        return False
    except (NearkinError, Problem) as err:
        _log.warning("upload %s: not handed over yet: %s", number, err)
    finally:
        gateway.admission.end_hand_over(number)
    return True


async def _store(gateway: Gateway, staged: StagedUpload) -> UploadOutcome:
    """Stream the parts to the store and return the outcome.

    Raises DamagedPart, NotFound, Problem, NearkinError.
    """
    meta = staged.meta
    origin = BlobOrigin(bytes.fromhex(staged.id), meta.created_us)
    with tracing.span("resumable upload", None, begins=True) as trace:
        is_known = gateway.outcomes.of_origin(origin.id) is not None  # by this process, which could not write `done`
        earlier = await find_committed(gateway, meta.tenant, meta.key, origin)
        if earlier is not None:
            done = UploadOutcome(str(earlier["id"]))
            if not is_known:
                _record_stored(gateway, staged, done)
            return done
        try:
            new = NewBlob(
                meta.tenant,
                meta.key,
                meta.metadata,
                origin=origin,
                sha256=None if meta.sha256 is None else bytes.fromhex(meta.sha256),
                trace=None if trace is None else trace.decode(),
                precondition=meta.precondition,
                size_bytes=meta.length_bytes,
                staged=staged.id,
            )
            blob, _ = await take(gateway, frames(_parts(gateway, staged)), new)
        except PreconditionFailed as err:
            return UploadOutcome(None, str(err), PRECONDITION)
        except Problem as err:
            if err.status != 400:
                raise
            return UploadOutcome(None, err.detail)
        done = UploadOutcome(blob.hex())
        _record_stored(gateway, staged, done)
        return done


def _record_stored(gateway: Gateway, staged: StagedUpload, done: UploadOutcome) -> None:
    meta = staged.meta
    fields = {"key": meta.key, "blob": done.blob, "upload": staged.id, "bytes": meta.length_bytes}
    gateway.audit.record("blob.stored", Actor(meta.tenant, meta.token, meta.address), fields)


async def _parts(gateway: Gateway, staged: StagedUpload) -> AsyncIterator[memoryview]:
    parts = gateway.resumable.read(staged)
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


async def sweep_for_ever(gateway: Gateway) -> None:
    """Remove expired uploads, and hand over whole ones that a dead gateway left.

    Sums and metrics of tenants that upload no more are forgotten too.
    """
    loop = asyncio.get_running_loop()

    def hand_over(staged: StagedUpload) -> None:
        loop.call_soon_threadsafe(_start_task, gateway, staged.meta.tenant, staged.id)

    while True:
        try:
            gateway.admission.forget_idle()
            await asyncio.to_thread(gateway.resumable.sweep, hand_over)
        except NearkinError as err:
            _log.warning("resumable uploads were not swept: %s", err)
        except Exception:  # no other task would start the sweeper again
            _log.exception("resumable uploads were not swept")
        # Jitter: several gateways should not find the same upload at the same time.
        await asyncio.sleep(SWEEP_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
