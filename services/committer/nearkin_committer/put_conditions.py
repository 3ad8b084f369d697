"""Preconditions in the committer.

Invariant: a blob whose caller may have been told that it was refused is never committed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nearkin_shared.errors import PreconditionFailed
from nearkin_shared.formats.message import End
from nearkin_shared.storage.manifests import History, ManifestStore


class Refusals(Protocol):
    """Keep which blobs were refused, for as long as their records may be read again. All calls raise RetryableError."""

    def refusal(self, blob: bytes) -> str | None:
        """Return why a blob was refused before; None where it was not."""

    def note_refusal(self, blob: bytes, reason: str) -> None:
        """Keep why a blob was refused."""


def check_precondition(
    manifests: ManifestStore, refusals: Refusals | None, end: End, histories: Mapping[int, History]
) -> None:
    """Refuse a conditional put whose condition does not hold, or did not when it was read before.

    Raises PreconditionFailed.
    """
    if end.precondition is None:
        return
    blob, tenant, key = end.envelope.blob, end.envelope.tenant, end.envelope.key
    refused = None if refusals is None else refusals.refusal(blob)
    if refused is not None:
        raise PreconditionFailed(refused)
    try:
        manifests.check_precondition(tenant, key, histories, end.precondition)
    except PreconditionFailed as err:
        if refusals is not None:
            refusals.note_refusal(blob, str(err))
        raise
