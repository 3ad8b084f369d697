"""Keys that were rolled back. Invariant: a GC run never lowers a head, so a removed newest version stays reported."""

from __future__ import annotations

import logging

from nearkin_shared.errors import StoreUnavailable
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.storage.heads import VersionHeads, head_name
from nearkin_shared.storage.manifests import ManifestStore

NAMED_MAX = 20
_log = logging.getLogger("nearkin")


def record_heads(objects: ObjectStore) -> int:
    """Record the highest version of each key; return how many keys were rolled back.

    Raises Corrupt for a name that no record has.
    """
    try:
        removed = VersionHeads(objects).update(ManifestStore(objects))
    except StoreUnavailable as err:  # a full disk, for one: what the run has freed stays freed
        _log.warning("gc: heads of keys were not recorded: %s", err)
        return 0
    for digest, version in list(removed.items())[:NAMED_MAX]:
        _log.error("gc: %s: removed with its marks, and it was the newest of its key", head_name(digest, version))
    metrics.CORRUPT.labels("rollback").inc(len(removed))
    return len(removed)
