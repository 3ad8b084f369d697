"""Interface of the backends that store uploads.

Invariant: an upload whose `finish` returned is durable and ends committed or visibly failed (I3).

    begin -> write* -> finish        or   begin -> write* -> abort

Two implementations: `kafka` hands frames to the pipeline, `embedded` commits in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

from nearkin_shared.formats.upload_parts import CopiedRange
from nearkin_shared.preconditions import Precondition
from nearkin_shared.reading.copy_sources import SourceVersion
from nearkin_shared.results import PutResult
from nearkin_shared.results_json import info_json, ledger_json
from nearkin_shared.storage.committed_origins import BlobOrigin
from nearkin_shared.utils.frozen import frozen

COMMITTED = "committed"
FAILED = "failed"


@frozen
class UploadRequest:
    """Request to store an upload.

    `blob` (16 bytes) identifies this attempt, `origin` (16 bytes) is shared by all attempts to store the same thing.
    """

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
    sources: tuple[SourceVersion, ...] | None = None
    """The versions that ranges are copied of; None: the upload has no ranges."""


@frozen
class UploadResult:
    """Size and digests of an upload: `blake3` 32 bytes, `sha256` 32 bytes if it was requested.

    With ranges `blake3` is the digest of the tree, as the client states it.
    """

    size_bytes: int
    blake3: bytes
    sha256: bytes | None = None


class IncomingUpload(Protocol):
    """Upload in flight."""

    async def write(self, frame: bytes | bytearray) -> None:
        """Send a frame of at most FRAME_BYTES_MAX; wait while too much is unacknowledged.

        Raises RetryableError.
        """

    async def copy(self, copied: CopiedRange) -> None:
        """Append a range of the sources. Only where the backend `takes_ranges`."""

    async def finish(self, ending: UploadResult) -> None:
        """Return once all is durable.

        Raises: RetryableError: the outcome is then unknown. PreconditionFailed, from a backend that commits; other
        backends report a failed precondition in the outcome.
        """

    async def abort(self, why: str) -> None:
        """Abort the upload, visibly if possible. Never raises."""


class Ingest(Protocol):
    """Backend that stores uploads."""

    commits: bool
    """Whether `finish` returns with the outcome known, so that the answer is always 201."""
    takes_ranges: bool
    """Whether uploads take ranges of other versions; else the gateway reads them and passes bytes on."""

    def accepts(self, tenant: str) -> bool:
        """Return whether it takes uploads of this tenant."""

    async def open(self) -> None:
        """Get ready. Raises NearkinError."""

    async def close(self) -> None:
        """Finish uploads in flight, within a bound, and release all resources."""

    async def begin(self, intent: UploadRequest) -> IncomingUpload:
        """Start an upload. Raises RetryableError."""

    async def find_committed(self, tenant: str, key: str, origin: BlobOrigin) -> dict[str, Any] | None:
        """Return the event of the version that an earlier attempt committed, or None.

        None too from a backend whose outcomes outlive the gateway. Raises StoreUnavailable.
        """

    def check(self) -> None:
        """Raise RetryableError if an upload could not be accepted; may block some seconds."""


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
