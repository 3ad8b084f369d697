# size: one step of the committer, whose handler has no room
"""Take back a version that became durable so late that its data may be collected.

    manifest of an earlier delivery -> time at which the object store wrote it
    tombstone, noted in the index before -> manifest deleted

Invariant: the number of a version that was taken back is not given again. A GC run that has counted the references of
manifests knows them by these numbers.
"""

from __future__ import annotations

import time
from contextlib import suppress

from nearkin_shared.errors import NotFound
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.tombstone import Mark, MarkKind
from nearkin_shared.index.protocols import Index, MarkedVersion
from nearkin_shared.objectstore.base import AlreadyExists
from nearkin_shared.storage.clock_records import SupportsServerTime
from nearkin_shared.storage.manifests import ManifestStore, object_name

WHO = "committer"


def durable_us(manifests: ManifestStore, manifest: Manifest) -> int:
    """Return when the manifest of an earlier delivery became durable, microseconds since 1970.

    Its own time is from before the put, in which a process may have been paused, and after which it may have died.

    Raises: StoreUnavailable.
    """
    lowest = manifests.objects
    while (below := getattr(lowest, "inner", None)) is not None:
        lowest = below
    if not isinstance(lowest, SupportsServerTime):
        return manifest.created_us
    try:
        written = lowest.modified_seconds(object_name(manifest.tenant, manifest.key, manifest.version))
    except NotFound:  # read from its parity
        return manifest.created_us
    return max(manifest.created_us, int(written * 1e6))


def take_back(manifests: ManifestStore, index: Index, manifest: Manifest) -> None:
    """Delete a manifest, and leave a tombstone. Idempotent. Raises RetryableError."""
    tenant, key, version, now_us = manifest.tenant, manifest.key, manifest.version, time.time_ns() // 1000
    mark = Mark(tenant, key, version, 1, MarkKind.DELETED, now_us, now_us, who=WHO)
    index.mark_many([MarkedVersion(tenant, key, version, mark.sequence, manifests.takes_bytes(mark))])
    with suppress(AlreadyExists):  # of an earlier delivery, or a caller deleted the version
        manifests.put_mark(mark)
    manifests.delete(tenant, key, version)
