"""Count the uploads that a gateway has begun and whose outcome is not known, by tenant.

Invariant: an upload is counted from its first byte to its outcome, at most IN_FLIGHT_MAX of them at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

IN_FLIGHT_MAX = 200_000
"""Uploads counted at a time, some 50 MB; beyond it the oldest one is no longer counted, in its tenant's favour."""


@dataclass(slots=True)
class InFlightUpload:
    """One upload: bytes as announced or received so far; stored bytes are estimated."""

    tenant: str
    logical_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class InFlightSums:
    """The uploads in flight of one tenant."""

    blobs: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class InFlightUploads:
    """All uploads in flight of one gateway; for one event loop."""

    _uploads: OrderedDict[bytes, InFlightUpload] = field(default_factory=OrderedDict)
    _sums: dict[str, InFlightSums] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._uploads)

    def of(self, tenant: str) -> InFlightSums:
        """Return the sums of a tenant."""
        return self._sums.get(tenant) or InFlightSums()

    def begin(self, blob: bytes, tenant: str) -> None:
        """Count an upload."""
        self._uploads[blob] = InFlightUpload(tenant)
        self._sums.setdefault(tenant, InFlightSums()).blobs += 1
        if len(self._uploads) > IN_FLIGHT_MAX:
            self.end(next(iter(self._uploads)))

    def grow(self, blob: bytes, logical_bytes: int, stored_bytes: int) -> None:
        """Count more bytes of an upload."""
        upload = self._uploads.get(blob)
        if upload is not None:
            upload.logical_bytes += logical_bytes
            upload.stored_bytes += stored_bytes
            sums = self._sums[upload.tenant]
            sums.logical_bytes += logical_bytes
            sums.stored_bytes += stored_bytes

    def end(self, blob: bytes) -> None:
        """Stop counting an upload, if it was counted."""
        upload = self._uploads.pop(blob, None)
        if upload is None:
            return
        sums = self._sums[upload.tenant]
        sums.blobs -= 1
        sums.logical_bytes -= upload.logical_bytes
        sums.stored_bytes -= upload.stored_bytes
        if not sums.blobs:
            del self._sums[upload.tenant]
