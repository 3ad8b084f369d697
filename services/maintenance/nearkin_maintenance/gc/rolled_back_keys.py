"""Record the highest version of each key, and refuse GC while keys are rolled back.

Invariant (I6): while a version is known to be lost, a GC run frees nothing. A run never lowers a head, so the removal
of a newest version stays reported until the operator gives the version up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from nearkin_shared.errors import Corrupt, NoRoom, StoreUnavailable
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.observability import metrics
from nearkin_shared.storage.heads import VersionHeads, head_name
from nearkin_shared.storage.manifests import ManifestStore

NAMED_MAX = 20
_log = logging.getLogger("nearkin")


def check_none_rolled_back(objects: ObjectStore, *, record: bool) -> None:
    """Raise Corrupt while the recorded head of a key has neither manifest nor mark.

    The stored chunks may be all that is left of the lost versions. `record`: higher heads are recorded, so that the run
    may remove the last tombstones of those that they replace; without room it leaves these to the next run.

    Raises: Corrupt, StoreUnavailable.
    """
    heads, manifests = VersionHeads(objects), ManifestStore(objects)
    is_suspect = True
    if record:
        with suppress(NoRoom):
            is_suspect = bool(heads.raise_recorded(manifests))
    removed = heads.find_rolled_back(manifests) if is_suspect else {}
    if not removed:
        return
    _report([head_name(digest, version) for digest, version in removed.items()])
    name = min(head_name(digest, version) for digest, version in removed.items())
    raise Corrupt(
        f"{name}: removed with its tombstones, the newest version of its key ({len(removed)} such keys): the data "
        "that it needs are unknown, so nothing is freed; put the manifests back from a copy "
        "(`nearkin repair --from`), or give the versions up with `nearkin rebuild-index` (for services: remove the "
        "folder heads/versions/)"
    )


def record_heads(
    objects: ObjectStore,
    release_reserve: Callable[[], bool] = lambda: False,
    keys: Collection[bytes] | None = None,
) -> int:
    """Record the highest version and sequences of each key; return how many are rolled back.

    `keys`: digests of the only keys that have changed, None for all. On a full disk `release_reserve` may make room for
    one more attempt.

    Raises: Corrupt for a name that no record has, NoRoom if there is no reserve to release.
    """
    try:
        try:
            removed = VersionHeads(objects).update(ManifestStore(objects), keys)
        except NoRoom:
            if not release_reserve():
                raise
            removed = VersionHeads(objects).update(ManifestStore(objects), keys)
    except NoRoom:
        raise
    except StoreUnavailable as err:  # for example a full disk: the run itself has succeeded
        _log.warning("gc: heads of keys were not recorded: %s", err)
        return 0
    _report(removed.names)
    return len(removed.keys)


def _report(removed: Sequence[str]) -> None:
    for name in sorted(removed)[:NAMED_MAX]:
        _log.error("gc: %s: removed, and an earlier GC run has listed it; its version is kept", name)
    metrics.CORRUPT.labels("rollback").inc(len(removed))
