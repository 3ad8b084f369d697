"""Recover an index that a server kept over a restart: check its entries, add missing ones.

    1 versions     names of the store against the catalog: remove what was deleted, add what is missing
    2 entries      those of chunks and segments that the store no longer has are removed: only where a GC run may have
                   freed some since, or a server of a Cluster may hold numbers that another one lost
    3 containers   those without a summary are published; all of them where a part of the index was lost

Only step 3 decodes data, and only of containers published after the last write that the server persisted. Listings are
complete after step 1. Invariant: afterwards the index is as one that was rebuilt from nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.index_rebuild import KnownObjects, Sketches, rebuild_index
from nearkin_shared.errors import PermanentError
from nearkin_shared.formats.directory import SegmentTable
from nearkin_shared.formats.pending_delete_record import Record
from nearkin_shared.index.protocols import CollectedVersion, Index
from nearkin_shared.index.redis.epoch import NumberedContainers
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore, object_name
from nearkin_shared.types import U64, ZERO, Bools, ContainerId, group_by_container

_log = logging.getLogger("nearkin.maintenance")


class RecoverableIndex(Index, Protocol):
    """Abilities of an index that recovery needs beyond adding entries."""

    @property
    def is_incomplete(self) -> bool:
        """Return whether entries may be missing of containers that the index lists."""

    def tenants(self) -> Sequence[str]:
        """Return all tenants that have versions in the catalog."""

    def container_ids(self) -> U64:
        """Return the ids of all containers whose entries were all added."""

    def collect_many(self, versions: Sequence[CollectedVersion]) -> None:
        """Take versions out of the catalog."""

    @property
    def has_unchecked(self) -> bool:
        """Return whether entries may name chunks that the store no longer has."""

    def container_numbers(self) -> NumberedContainers:
        """Return which numbers containers have by now."""

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries of chunks and segments that are not there.

        By container, None for all of them.
        """

    def declare_catalog(self) -> None:
        """Declare that the catalog lists every version."""


def recover_index(
    containers: ContainerStore,
    manifests: ManifestStore,
    index: RecoverableIndex,
    tenants: DomainOwners,
    sketches: Sketches,
    pending_deletes: Record,
) -> RebuildReport:
    """Bring an index to what the store has; an empty one is filled.

    Raises: StoreUnavailable, Corrupt.
    """
    numbered = index.container_numbers()  # before the store is listed: containers published meanwhile are not checked
    listed = containers.of(None).generations()
    marks = _remove_versions(manifests, index)  # 1
    all_containers = [int(container) for container in listed]
    rebuild_index(
        containers,
        manifests,
        index,
        tenants,
        sketches,
        known=KnownObjects(all_containers, marks),
        pending_deletes=pending_deletes,
    )
    index.declare_catalog()
    removed = 0
    if index.has_unchecked:
        removed = index.withdraw_missing(numbered, *_findable(containers.of(None), listed, pending_deletes))  # 2
    published = () if index.is_incomplete else index.container_ids().tolist()
    known = [container for container in published if container in listed]
    marks = dict(_list_versions(index))
    report = rebuild_index(
        containers,
        manifests,
        index,
        tenants,
        sketches,
        known=KnownObjects(known, marks),
        pending_deletes=pending_deletes,
    )  # 3
    _log.warning(
        "index recovered: %d containers kept, %d published, %d entries removed", len(known), report.containers, removed
    )
    return report


def _list_versions(index: RecoverableIndex) -> Iterator[tuple[str, int]]:
    """Yield (manifest name, highest mark) of all versions in the catalog."""
    for tenant in index.tenants():
        for entry in index.catalog(tenant):
            yield object_name(tenant, entry.key, entry.version), entry.sequence


def _remove_versions(manifests: ManifestStore, index: RecoverableIndex) -> dict[str, int]:
    """Take versions out of the catalog that the store no longer has.

    Return the highest mark of each other one.
    """
    entries = [(tenant, entry) for tenant in index.tenants() for entry in index.catalog(tenant)]
    listed, _ = manifests.names_and_marks()  # after the catalog: a version committed meanwhile is in both
    stored_names = {name for name, _ in listed}
    kept: dict[str, int] = {}
    missing: list[CollectedVersion] = []
    for tenant, entry in entries:
        name = object_name(tenant, entry.key, entry.version)
        if name in stored_names:
            kept[name] = entry.sequence
        else:
            missing.append(CollectedVersion(tenant, entry.key, entry.version))
    index.collect_many(missing)
    return kept


Masks = dict[int, Bools | None]


def _findable(
    containers: ContainerStore, listed: Mapping[ContainerId, Mapping[int, int]], pending_deletes: Record
) -> tuple[Masks, Masks]:
    """Return masks of the findable chunks and segments of each container."""
    chunks: Masks = {}
    recipes: dict[int, SegmentTable] = {}
    for container in listed:
        try:
            directory = containers.directory(container)
        except PermanentError:  # damaged: scrub reports it
            chunks[int(container)] = np.zeros(0, np.bool_)
            continue
        is_findable = directory.chunks.there.copy()
        entry = pending_deletes.get(int(container))
        if entry is not None:
            is_findable[entry.chunks[entry.chunks < len(is_findable)]] = False
            is_findable &= not entry.whole
        chunks[int(container)], recipes[int(container)] = is_findable, directory.segments
    return chunks, {
        container: _usable_segments(container, recipes.get(container), chunks, pending_deletes) for container in chunks
    }


def _usable_segments(container: int, recipes: SegmentTable | None, chunks: Masks, pending_deletes: Record) -> Bools:
    """Return which segments of a container name nothing but chunks that may be found."""
    if recipes is None:
        return np.zeros(0, np.bool_)
    sound: Bools = np.diff(recipes.bounds) > 0
    of_row = np.repeat(np.arange(len(sound)), np.diff(recipes.bounds))
    for holder, rows in group_by_container(recipes.chunks.containers):
        if holder == ZERO:
            continue
        mask = chunks.get(holder)
        mask = np.zeros(0, np.bool_) if mask is None else mask
        ordinals = recipes.chunks.ordinals[rows]
        inside = ordinals < len(mask)
        found = inside.copy()
        found[inside] = mask[ordinals[inside]]
        sound[of_row[rows[~found]]] = False
    if container in pending_deletes:
        withdrawn = pending_deletes[container].segments
        sound[withdrawn[withdrawn < len(sound)]] = False
    return sound
