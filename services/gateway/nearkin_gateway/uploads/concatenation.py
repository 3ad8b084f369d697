"""Concatenate partial uploads into a final one (tus).

Invariant: repeating the request stores once.

    partial uploads, complete and unclaimed -> final upload: meta, then a claim in each -> committed like any other

The id of a final upload is derived from its request: a client whose response was lost gets the same upload again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from blake3 import blake3

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.finalize import hand_over
from nearkin_gateway.uploads.resumable_store import ID_BYTES, Meta, StagedUpload
from nearkin_gateway.uploads.upload_preconditions import check_newest, check_refused
from nearkin_shared.errors import NotFound
from nearkin_shared.objectstore.base import AlreadyExists


async def create_final(gateway: Gateway, meta: Meta, sources: Sequence[str]) -> StagedUpload:
    """Create the final upload of `sources` and commit it.

    Raises Problem (507 if it does not fit), NotFound, NearkinError.
    """
    resumable, number = gateway.resumable, final_id(meta, sources)
    try:
        staged = await asyncio.to_thread(resumable.load, meta.tenant, number)
    except NotFound:
        await check_newest(gateway, meta.tenant, meta.key, meta.precondition)
        length_bytes = await asyncio.to_thread(_check_sources, gateway, meta.tenant, sources, number)
        # Without its sources, which it takes over: they are counted already, where this gateway knows them.
        await gateway.admission.check_room(meta.tenant, length_bytes, without=sources)
        final = replace(meta, length_bytes=length_bytes, sources=tuple(sources))
        try:
            staged = await asyncio.to_thread(resumable.create_final, number, final)
        except AlreadyExists as err:
            raise _claimed_problem("one of the partial uploads") from err
    if staged.pending:
        await hand_over(gateway, staged.meta, number)
        staged = await asyncio.to_thread(resumable.load, meta.tenant, number)
    await check_refused(gateway, staged)
    return staged


def final_id(meta: Meta, sources: Sequence[str]) -> str:
    """Return the id of the final upload that a request asks for."""
    request: list[object] = [meta.tenant, list(sources), meta.upload_metadata]
    if meta.precondition is not None:
        request.append(asdict(meta.precondition))
    hasher = blake3(derive_key_context="nearkin 2026 id of a concatenated upload")
    return hasher.update(json.dumps(request).encode()).digest(length=ID_BYTES).hex()


def _check_sources(gateway: Gateway, tenant: str, sources: Sequence[str], number: str) -> int:
    """Return the sum of the lengths of partial, complete, unclaimed uploads.

    Raises NotFound, Problem (a source is not one).
    """
    length_bytes, bytes_max = 0, int(gateway.bounds.body_bytes_max)
    for source in sources:
        staged = gateway.resumable.load(tenant, source)
        if not staged.meta.partial:
            raise Problem(400, "bad-concat", f"upload {source}: was not begun with Upload-Concat: partial")
        if not staged.whole:
            why = f"upload {source}: has {staged.offset} of {staged.meta.length_bytes} bytes; send the rest first"
            raise Problem(409, "unfinished-part", why)
        if staged.claim not in (None, number):
            raise _claimed_problem(f"upload {source}")
        length_bytes += staged.meta.length_bytes
    if length_bytes > bytes_max:
        raise Problem(413, "too-large", f"the partial uploads have {length_bytes} bytes: want at most {bytes_max}")
    return length_bytes


def _claimed_problem(what: str) -> Problem:
    return Problem(409, "claimed", f"{what}: is a part of another final upload; begin new partial uploads")
