"""Receive bodies of resumable uploads.

Invariant: an offset is reported after all bytes before it are durable in the object store.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import tempfile
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from nearkin_gateway import gateway_limits as limits
from nearkin_gateway.http.problems import RETRY_SECONDS, Problem
from nearkin_gateway.http.request_bodies import asks_first, check_declared, chunks
from nearkin_gateway.http.request_limits import Holders
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.resumable_store import PART_BYTES, StagedUpload
from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import AlreadyExists

CHECKSUMS: dict[str, Callable[[], Any]] = {
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),  # the one that the protocol demands; against accidents
    "sha256": hashlib.sha256,
}
PARTS_MAX = 400_000
"""1 TiB and more in parts of their usual size; a PATCH makes at least one, however small it is."""
SPOOL_MEMORY_BYTES = 1024 * 1024


class UploadMutex:
    """Serialise requests for an upload in this process; others conflict by part names."""

    def __init__(self, gateway: Gateway, number: str) -> None:
        self._busy, self._number = gateway.resuming, number

    def __enter__(self) -> None:
        if self._number in self._busy:
            raise Problem(
                423,
                "locked",
                "another request is adding to this upload",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._busy.add(self._number)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._number)


async def receive(request: Request, gateway: Gateway, staged: StagedUpload, holders: Holders) -> int:
    """Stage the body; return the new offset. Bytes of an interrupted body are staged too."""
    room_bytes = staged.meta.length_bytes - staged.offset
    check_declared(request, room_bytes)
    gateway.admission.check_rate(holders.tenant)
    gateway.admission.check_slots(holders.tenant)
    if asks_first(request):
        gateway.admission.check_lag(holders.tenant)
    if len(staged.parts) >= PARTS_MAX:
        raise Problem(413, "too-many-parts", f"{PARTS_MAX} parts are staged, which is the most; send larger ones")
    with gateway.uploads.one(holders), UploadMutex(gateway, staged.id):
        checksum = request.headers.get("upload-checksum")
        if checksum is not None:
            return await _check_and_stage(request, gateway, staged, room_bytes, checksum)
        part, offset = bytearray(), staged.offset
        try:
            async for piece in chunks(request, room_bytes, gateway.uploads, gateway.pace_of(holders.tenant)):
                part += piece
                # Not the last one while more may come: too long, the whole would be stored though it is refused.
                if len(part) >= PART_BYTES and offset + len(part) < staged.meta.length_bytes:
                    offset, part = await _stage(gateway, staged, offset, part), bytearray()
        except (ClientDisconnect, Problem) as err:
            if part and not (isinstance(err, Problem) and err.status == 413):
                await _stage(gateway, staged, offset, part)
            raise
        return await _stage(gateway, staged, offset, part) if part else offset


async def _check_and_stage(
    request: Request, gateway: Gateway, staged: StagedUpload, room_bytes: int, checksum: str
) -> int:
    """Stage the body once its checksum matches; until then it is on the local disk."""
    name, _, text = checksum.partition(" ")
    if name not in CHECKSUMS:
        raise Problem(400, "bad-checksum", f"Upload-Checksum {name:.20}: choose {' or '.join(CHECKSUMS)}")
    try:
        wanted = base64.b64decode(text, validate=True)
    except ValueError as err:  # binascii.Error, and what is not ASCII
        raise Problem(400, "bad-checksum", "Upload-Checksum: is not base64") from err
    hasher, offset = CHECKSUMS[name](), staged.offset
    bytes_max = min(room_bytes, limits.CHECKED_PATCH_BYTES)
    with tempfile.SpooledTemporaryFile(SPOOL_MEMORY_BYTES) as spool:
        async for piece in chunks(request, bytes_max, gateway.uploads, gateway.pace_of(staged.meta.tenant)):
            hasher.update(piece)
            try:
                await gateway.pools.disk.run(spool.write, piece)
            except OSError as err:
                why = f"the body cannot be kept until its checksum is known: {err.strerror}; make room and try again"
                raise StoreUnavailable(why) from err
        if hasher.digest() != wanted:
            raise Problem(460, "checksum-mismatch", f"Upload-Checksum: the body's {name} is another; send it again")
        spool.seek(0)
        while part := await gateway.pools.disk.run(spool.read, PART_BYTES):
            offset = await _stage(gateway, staged, offset, part)
    return offset


async def _stage(gateway: Gateway, staged: StagedUpload, offset: int, part: bytes | bytearray) -> int:
    try:
        # Shielded: a part that is being written is finished, or the client's next offset could be wrong.
        writing = asyncio.to_thread(gateway.resumable.stage, staged.id, offset, part, tenant=staged.meta.tenant)
        await asyncio.shield(writing)
    except AlreadyExists as err:
        raise Problem(409, "wrong-offset", "another request has added bytes here; ask HEAD where to go on") from err
    return offset + len(part)
