# size: shared by puts and tus
"""Check preconditions of uploads before the bytes are sent, and after the outcome.

The commit decides (ADR 52); a check before it only spares a large body.
"""

from __future__ import annotations

import asyncio

from nearkin_gateway.http.problems import Problem
from nearkin_gateway.state import Gateway
from nearkin_gateway.uploads.resumable_store import StagedUpload
from nearkin_gateway.uploads.upload_service import is_refused
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.preconditions import PRECONDITION, Precondition
from nearkin_shared.results import VersionInfo
from nearkin_shared.validation import names_hidden_by, version_name_refusal

OUTCOME_SECONDS = 5.0
"""How long the answer to the last bytes of a conditional resumable upload waits for the committer's decision."""


async def check_newest(gateway: Gateway, tenant: str, key: str, precondition: Precondition | None) -> None:
    """Compare a precondition with a key's newest version.

    Raises PreconditionFailed, NearkinError.
    """
    if precondition is not None:
        precondition.check(key, await _find_newest(gateway, tenant, key))


async def check_new_key(gateway: Gateway, tenant: str, key: str) -> None:
    """Refuse NAME@NUMBER and NAME:/PATH if the tenant has the key NAME and no such key.

    It would hide version NUMBER, or an entry, of NAME from commands. A key that exists is continued. Raises BadInput,
    StoreUnavailable.
    """
    for name in names_hidden_by(key):
        if await _has_key(gateway, tenant, name):
            if await _has_key(gateway, tenant, key):
                return
            raise version_name_refusal(key, name, f"a put of {name!r}")


async def _has_key(gateway: Gateway, tenant: str, key: str) -> bool:
    try:
        return await _find_newest(gateway, tenant, key) is not None
    except Corrupt:
        return True


async def _find_newest(gateway: Gateway, tenant: str, key: str) -> VersionInfo | None:
    try:
        return (await asyncio.to_thread(gateway.catalogue.manifest, tenant, key)).info
    except NotFound:
        return None


async def check_refused(gateway: Gateway, staged: StagedUpload, wait_seconds: float = 0.0) -> None:
    """Raise Problem 412 if the commit refused the precondition of a resumable upload.

    Waits up to `wait_seconds` for the outcome of an upload that the pipeline commits.
    """
    done = staged.done
    if done is None or staged.meta.precondition is None:
        return
    if done.reason == PRECONDITION:
        raise Problem(412, PRECONDITION, str(done.failure))
    if done.blob is not None:
        outcome = await gateway.outcomes.wait(bytes.fromhex(done.blob), wait_seconds)
        if outcome is not None and is_refused(outcome):
            raise Problem(412, PRECONDITION, str(outcome["failure"]))
