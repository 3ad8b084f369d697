"""Recover an index that a server kept over a restart: check what it holds, add what it lacks.

    1 versions     names of the store against the catalog: remove what was deleted, add what is missing
    2 entries      those of chunks and segments that the store no longer has are removed: only where a GC run may have
                   freed some since, or a server of a Cluster may hold numbers that another one lost
    3 containers   those without a summary are published; all of them where a part of the index was lost

Only step 3 decodes data, and only of containers published after the last write that the server persisted. Listings are
complete after step 1. Invariant: afterwards the index is as one that was rebuilt from nothing, segment counts aside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from nearkin_maintenance.domain_owners import DomainOwners
from nearkin_maintenance.index_rebuild import Sketches, rebuild_index
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
    """What recovery needs of an index beyond adding to it."""

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
        """Return whether entries may name what the store no longer has."""

    def container_numbers(self) -> NumberedContainers:
        """Return which numbers containers have by now."""

    def withdraw_missing(
        self,
        numbered: NumberedContainers,
        chunks: Mapping[int, Bools | None],
        segments: Mapping[int, Bools | None],
    ) -> int:
        """Remove entries of chunks and segments that are not there; by container, None for all of them."""

    def declare_catalog(self) -> None:
        """Declare that the catalog lists every version."""


def recover_index(
    containers: ContainerStore,
    manifests: ManifestStore,
    index: RecoverableIndex,
    tenants: DomainOwners,
    sketches: Sketches,
    condemned: Record,
) -> RebuildReport:
    """Bring an index to what the store has; an empty one is filled. Raises StoreUnavailable, Corrupt."""
    numbered = index.container_numbers()  # before the store is listed: what is published meanwhile is not checked
    listed = containers.of(None).generations()
    marks = _remove_versions(manifests, index)  # 1
    everything = [int(container) for container in listed]
    rebuild_index(
        containers,
        manifests,
        index,
        tenants,
        sketches,
        known_containers=everything,
        known_manifests=marks.keys(),
        known_marks=marks,
        condemned=condemned,
    )
    index.declare_catalog()
    removed = 0
    if index.has_unchecked:
        removed = index.withdraw_missing(numbered, *_findable(containers.of(None), listed, condemned))  # 2
    published = () if index.is_incomplete else index.container_ids().tolist()
    known = [container for container in published if container in listed]
    marks = dict(_list_versions(index))
    report = rebuild_index(
        containers,
        manifests,
        index,
        tenants,
        sketches,
        known_containers=known,
        known_manifests=marks.keys(),
        known_marks=marks,
        condemned=condemned,
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
    """Take versions out of the catalog that the store no longer has; return the highest mark of each other one."""
    entries = [(tenant, entry) for tenant in index.tenants() for entry in index.catalog(tenant)]
    listed, _ = manifests.names_and_marks()  # after the catalog: a version committed meanwhile is in both
    there = {name for name, _ in listed}
    kept: dict[str, int] = {}
    gone: list[CollectedVersion] = []
    for tenant, entry in entries:
        name = object_name(tenant, entry.key, entry.version)
        if name in there:
            kept[name] = entry.sequence
        else:
            gone.append(CollectedVersion(tenant, entry.key, entry.version, None))
    index.collect_many(gone)
    return kept


Masks = dict[int, Bools | None]


def _findable(
    containers: ContainerStore, listed: Mapping[ContainerId, Mapping[int, int]], condemned: Record
) -> tuple[Masks, Masks]:
    """Return which chunks and which segments of each container may be found: there, not condemned, of such chunks."""
    chunks: Masks = {}
    recipes: dict[int, SegmentTable] = {}
    for container in listed:
        try:
            directory = containers.directory(container)
        except PermanentError:  # damaged: scrub reports it
            chunks[int(container)] = np.zeros(0, np.bool_)
            continue
        there = directory.chunks.there.copy()
        entry = condemned.get(int(container))
        if entry is not None:
            there[entry.chunks[entry.chunks < len(there)]] = False
            there &= not entry.whole
        chunks[int(container)], recipes[int(container)] = there, directory.segments
    return chunks, {container: _sound(container, recipes.get(container), chunks, condemned) for container in chunks}


def _sound(container: int, recipes: SegmentTable | None, chunks: Masks, condemned: Record) -> Bools:
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
    if container in condemned:
        ended = condemned[container].segments
        sound[ended[ended < len(sound)]] = False
    return sound
