# size: one step of the committer, whose handler has no room
"""Refuse a conditional put whose condition fails, at each delivery of its messages.

Invariant: a blob that may have been reported as refused is never committed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nearkin_shared.errors import PreconditionFailed
from nearkin_shared.formats.message import End
from nearkin_shared.storage.manifests import History, ManifestStore


class Refusals(Protocol):
    """Record of refused blobs, kept while their messages may be read again.

    All calls raise RetryableError.
    """

    def refusal(self, blob: bytes) -> str | None:
        """Return why a blob was refused, or None."""

    def note_refusal(self, blob: bytes, reason: str) -> None:
        """Record why a blob is refused."""


def check_precondition(
    manifests: ManifestStore, refusals: Refusals | None, end: End, histories: Mapping[int, History]
) -> None:
    """Refuse a conditional put whose condition fails now, or failed at an earlier delivery.

    Raises: PreconditionFailed.
    """
    if end.precondition is None:
        return
    blob, tenant, key = end.envelope.blob, end.envelope.tenant, end.envelope.key
    reason = None if refusals is None else refusals.refusal(blob)
    if reason is not None:
        raise PreconditionFailed(reason)
    try:
        manifests.check_precondition(tenant, key, histories, end.precondition)
    except PreconditionFailed as err:
        if refusals is not None:
            refusals.note_refusal(blob, str(err))
        raise
