"""Delete checkpoints of backups that no later backup has continued.

    keys of checkpoints -> those whose newest checkpoint is CHECKPOINT_DAYS old -> deleted, freed by a later GC run

Invariant: a key with a recent checkpoint keeps all: the backup that makes them may copy ranges of each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from nearkin_shared.errors import BadInput, NotFound, RetentionActive
from nearkin_shared.formats.tombstone import NO_REQUEST, Mark, MarkKind
from nearkin_shared.index.catalog import CatalogEntry
from nearkin_shared.results import VersionInfo
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.version_listing import infos_of
from nearkin_shared.validation import CHECKPOINT_PREFIX

CHECKPOINT_DAYS = 14
"""A backup that runs weekly continues them before; one that has not run for two weeks reads more files again."""
WHO, REASON = "gc", f"no backup continued it for {CHECKPOINT_DAYS} days"
_log = logging.getLogger("nearkin")


class ListsVersions(Protocol):
    """An index that lists versions by prefix."""

    def catalog(self, tenant: str, prefix: str = "") -> Iterator[CatalogEntry]:
        """Yield the versions of all keys that start with `prefix`, by key and version."""


def checkpoint_keys(index: ListsVersions, tenants: Iterable[str]) -> list[tuple[str, str]]:
    """Return (tenant, key) of all keys with a checkpoint that is not deleted."""
    return [
        (tenant, key)
        for tenant in tenants
        for key in dict.fromkeys(entry.key for entry in index.catalog(tenant, CHECKPOINT_PREFIX) if not entry.deleted)
    ]


def expire_checkpoints(
    keys: Iterable[tuple[str, str]], manifests: ManifestStore, deletions: Deletions | None, now: float
) -> int:
    """Delete the checkpoints of `keys`, (tenant, key), whose newest is CHECKPOINT_DAYS old.

    Without `deletions` nothing is changed. Returns the bytes of their tombstones. Raises Corrupt, StoreUnavailable.
    """
    count = marks_bytes = 0
    for tenant, key in keys:
        for info in _find_stale(tenant, key, manifests, now):
            mark = Mark(tenant, key, info.version, 1, MarkKind.DELETED, 0, 0, NO_REQUEST, WHO, REASON)
            # deleted meanwhile, retained by an earlier release, or with the maximum number of tombstones
            with suppress(NotFound, RetentionActive, BadInput):
                if deletions is not None:
                    deletions.delete(tenant, key, info.version, undelete_seconds=0, who=WHO, reason=REASON)
                count, marks_bytes = count + 1, marks_bytes + manifests.takes_bytes(mark)
    if count and deletions is not None:
        _log.info("gc: %d checkpoints that no backup continued for %d days were deleted", count, CHECKPOINT_DAYS)
    return marks_bytes


def _find_stale(tenant: str, key: str, manifests: ManifestStore, now: float) -> list[VersionInfo]:
    """Return the checkpoints of a key if all of them are old, else none."""
    histories = manifests.histories(tenant, key)
    found = infos_of(manifests, tenant, key, (histories[version] for version in sorted(histories)))
    infos = [info for info in found if isinstance(info, VersionInfo)]
    newest = max((info.created.timestamp() for info in infos), default=now)
    return infos if newest < now - CHECKPOINT_DAYS * 86400 else []
