"""Recover the index of a local store from containers, manifests and tombstones.

make: all of it      complete: data that a writer stored and did not publish      correct and withdraw: wrong entries

Invariant: these objects alone determine the entries. The caller holds the store's lock, so nothing changes meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from nearkin_shared.errors import PermanentError, TenantErased
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.pending_delete_record import Record
from nearkin_shared.formats.tombstone import MarkKind
from nearkin_shared.index.protocols import MarkedVersion
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.manifests import History, ManifestStore
from nearkin_shared.storage.manifests import object_name as manifest_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine, join_records
from nearkin_shared.types import U8, U32, U64, ContainerId
from nearkin_shared.utils.signals import interrupts_wait

if TYPE_CHECKING:  # most commands recover no index
    from nearkin_maintenance import DomainOwners
    from nearkin_shared.index.catalog import CatalogEntry
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

_log = logging.getLogger("nearkin")


class IndexRecovery:
    """Read one store and correct its index."""

    def __init__(
        self,
        objects: ObjectStore,
        containers: ContainerStore,
        manifests: ManifestStore,
        fingerprinter: Callable[[str], Fingerprinter],
        tenant: str,
    ) -> None:
        self._objects = objects
        self._containers = containers
        self._manifests = manifests
        self._fingerprinter = fingerprinter
        self._tenant = tenant

    def rebuild(self, index: LmdbIndex, progress: Callable[[int, int], None] | None) -> RebuildReport:
        """Fill an empty index with all that is stored, and say that it is complete."""
        with interrupts_wait():
            from nearkin_maintenance import rebuild_index

        closed = erasures_of(self._objects)  # before anything is read: their objects are hidden from then on
        report = rebuild_index(
            self._containers,
            self._manifests,
            index,
            self._tenants(),
            super_features_of,
            progress,
            pending_deletes=self._excluded(),
        )
        index.record_excluded(closed)
        index.mark_complete()
        return report

    def fill_catalog(self, index: LmdbIndex) -> list[str]:
        """Fill an empty index for listings and statistics; return the names of unreadable objects.

        The store's lock is not needed: objects that a writer adds or deletes meanwhile may be listed or not.
        """
        with interrupts_wait():
            from nearkin_maintenance import fill_catalog

        skipped = fill_catalog(self._containers, self._manifests, index)
        index.mark_complete()
        return skipped

    def catch_up(self, index: LmdbIndex) -> None:
        """Add what a writer had stored, and not yet put into the index, when it died or failed."""
        with interrupts_wait():
            from nearkin_maintenance import KnownObjects, rebuild_index

        known = {manifest_name(tenant, entry.key, entry.version): entry.sequence for tenant, entry in index.catalogs()}
        rebuild_index(
            self._containers,
            self._manifests,
            index,
            self._tenants(),
            super_features_of,
            known=KnownObjects(set(index.container_ids().tolist()), known),
            pending_deletes=self._excluded(),
        )

    @property
    def is_store_empty(self) -> bool:
        """Return whether the store has no container and no manifest."""
        return next(self._containers.ids(), None) is None and next(self._manifests.names(), None) is None

    def names_lost_objects(self, index: LmdbIndex) -> bool:
        """Return whether the index names a container or a version that the store lacks."""
        if not {container for container, _ in self._containers.ids()}.issuperset(index.container_ids().tolist()):
            return True
        there = {name for name, _ in self._manifests.names()}
        return any(manifest_name(tenant, entry.key, entry.version) not in there for tenant, entry in index.catalogs())

    def republish_containers(self, index: LmdbIndex, containers: Collection[int]) -> None:
        """Publish the chunks of indexed containers whose entries were withdrawn as broken.

        The summary of a container is kept: its repair updated it before the older generation was deleted.
        """
        from nearkin_maintenance import entries_of_container

        known, left_out, tenants = set(index.container_ids().tolist()), self._excluded(), self._tenants()
        for container in sorted(known.intersection(containers)):
            if container in left_out and left_out[container].whole:
                continue
            try:
                directory = self._containers.of(None).directory(ContainerId(container))
                own, named = self._containers.of(directory.domain), tenants.fingerprinter(directory.domain)
                claims = entries_of_container(directory, own, named, super_features_of, known, left_out)
            except PermanentError:  # broken once more, or its tenant was erased
                continue
            index.publish_many([claims], summaries=False)

    def correct_marks(self, index: LmdbIndex) -> None:
        """Withdraw noted tombstones that a killed deletion did not write."""
        by_key: dict[tuple[str, str], list[CatalogEntry]] = {}
        for tenant, entry in index.catalogs():
            if entry.has_records:
                by_key.setdefault((tenant, entry.key), []).append(entry)
        stated = []
        for (tenant, key), entries in by_key.items():
            try:
                histories = self._manifests.histories(tenant, key)
            except TenantErased:  # its entries go with the next GC run
                continue
            for entry in entries:
                there = histories.get(entry.version)
                sequence, marks_bytes = (self._sequence(tenant, key, there), there.marks_bytes) if there else (0, 0)
                if (sequence, marks_bytes) != (entry.sequence, entry.marks_bytes):
                    stated.append(MarkedVersion(tenant, key, entry.version, sequence, marks_bytes))
        index.correct_marks(stated)

    def _sequence(self, tenant: str, key: str, history: History) -> int:
        """Return the sequence of a version's newest tombstone, or that of its end during a GC run."""
        if history.sequence and history.sequence % 2 == 0 and history.committed:
            with suppress(PermanentError):
                mark = self._manifests.mark(tenant, key, history.version, history.sequence)
                return history.sequence - (mark.kind is MarkKind.COLLECTED)
        return history.sequence

    def marks_of(
        self, tenant: str, key: str, versions: Collection[int], *, collected_alone: bool = False
    ) -> list[MarkedVersion]:
        """Return the tombstones of these versions, or only of those that a GC run has collected."""
        histories = self._manifests.histories(tenant, key)
        found = [histories.get(version, History(version)) for version in versions]
        return [
            MarkedVersion(tenant, key, history.version, self._sequence(tenant, key, history), history.marks_bytes)
            for history in found
            if not (collected_alone and history.committed)
        ]

    def withdraw_missing(self, index: LmdbIndex, listed: Collection[ContainerId]) -> None:
        """Withdraw the entries of missing containers; `listed` are all that exist.

        Costs one read of the indexed ids, 8 bytes each, if none is missing.
        """
        missing = sorted(set(index.container_ids().tolist()).difference(listed))
        if not missing:
            return
        from nearkin_maintenance import IntegrityChecker

        first = object_name(ContainerId(missing[0]))
        _log.warning(
            "%d of the containers that the index names are missing, the first %s: their content is stored again when "
            "it is put again; `nearkin verify` names the versions they break",
            len(missing),
            first,
        )
        for container in missing:  # a directory from the cache would pass for a sound container
            self._containers.evict(ContainerId(container))
        soundness = IntegrityChecker(self._containers, self._tenants(), self._fingerprinter(self._tenant))
        unsound = soundness.corrupt_chunks([*listed, *map(ContainerId, missing)])
        index.withdraw(unsound.chunks, unsound.segments, missing)

    def _excluded(self) -> Record:
        """Return chunks to keep out of the index: pending delete, or broken at their last read."""
        return join_records(PendingDeleteStore(self._objects).read(), Quarantine(self._objects, time.time).read())

    def _tenants(self) -> DomainOwners:
        from nearkin_maintenance import DomainOwners

        return DomainOwners(self._fingerprinter, [self._tenant], self._manifests)


def erasures_of(objects: ObjectStore, *, due: bool = False) -> frozenset[tuple[bytes, int]]:
    """Return (owner, time) of erasures that may have left objects. `due`: their grace is over."""
    if not isinstance(objects, EncryptedObjectStore):
        return frozenset()
    found = objects.keyring.list_due() if due else objects.keyring.erasures()
    return frozenset((erasure.owner, erasure.erased_us) for erasure in found if erasure.problem is None)


def super_features_of(sketch: str, payload: U8, offsets: U64, lengths: U32) -> U64:
    """Return the super-features of a sketch, which a rebuild needs from the resemblance stage."""
    from nearkin_resemblance import Sketch

    return Sketch.parse(sketch).super_features(payload, offsets, lengths)
