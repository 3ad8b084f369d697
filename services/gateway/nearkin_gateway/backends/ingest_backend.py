"""Ingest. Invariant: what `finish` let pass is durable and ends committed or visibly failed (I3).

    begin -> write* -> finish        or   begin -> write* -> abort

Two implementations: `kafka` hands frames to the pipeline, `embedded` commits in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

from nearkin_shared.preconditions import Precondition
from nearkin_shared.results import PutResult
from nearkin_shared.results_json import info_json, ledger_json
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.utils.frozen import frozen

COMMITTED = "committed"
FAILED = "failed"


@frozen
class UploadRequest:
    """What an upload is to become. `blob` and `origin` 16 bytes each: this attempt, and what is stored once."""

    tenant: str
    key: str
    blob: bytes
    origin: bytes
    began_us: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    trace: str | None = None
    """W3C traceparent of the request."""
    precondition: Precondition | None = None
    """Checked where the version is committed."""
    first_attempt_us: int | None = None
    """Earliest time of an attempt with this origin, in microseconds since 1970; None: this is the only one."""


@frozen
class UploadResult:
    """What the bytes of an upload turned out to be. `blake3` 32 bytes; `sha256` 32 bytes where it was asked for."""

    size_bytes: int
    blake3: bytes
    sha256: bytes | None = None


class IncomingUpload(Protocol):
    """One upload on its way."""

    async def write(self, frame: bytes | bytearray) -> None:
        """Take a frame of at most FRAME_BYTES_MAX; waits while too much is unacknowledged. Raises RetryableError."""

    async def finish(self, ending: UploadResult) -> None:
        """Return once all is durable. Raises RetryableError: what became of it is then not known.

        An ingest that commits raises PreconditionFailed; from any other the outcome tells it.
        """

    async def abort(self, why: str) -> None:
        """Give the upload up, visibly where that is possible. Never raises."""


class Ingest(Protocol):
    """Where uploads go."""

    commits: bool
    """Whether `finish` returns with the outcome known, so that the answer is always 201."""

    def accepts(self, tenant: str) -> bool:
        """Return whether it takes uploads of this tenant."""

    async def open(self) -> None:
        """Get ready. Raises NearkinError."""

    async def close(self) -> None:
        """Bring what is on its way to its end, within a bound, and release all."""

    async def begin(self, intent: UploadRequest) -> IncomingUpload:
        """Start an upload. Raises RetryableError."""

    async def find_committed(self, tenant: str, key: str, origin: BlobOrigin) -> dict[str, Any] | None:
        """Return the event of a version that an earlier attempt committed, if the stored versions have to be searched.

        None from an ingest whose outcomes outlive the gateway. Raises StoreUnavailable.
        """

    def check(self) -> None:
        """Raise RetryableError where an upload could not be taken now; may block for some seconds."""


def committed_event(intent: UploadRequest, began: str, result: PutResult) -> dict[str, Any]:
    """Return the event of a commit, as the topic `committed` has it."""
    ledger = ledger_json(result.ledger, result.seconds)
    del ledger["seconds"]
    return {
        "id": intent.blob.hex(),
        "origin": intent.origin.hex(),
        "state": COMMITTED,
        "tenant": intent.tenant,
        "failure": None,
        "began": began,
        **info_json(result.info),
        "seconds": result.seconds,
        "ledger": ledger,
    }
