"""Collect by change while services write.

    list the store (store_listing.py) -> changed keys, new containers -> counts, nominated containers
    versions whose undelete window is over -> deleted
    unreachable containers -> every manifest of the keys that ever reached one is read again
    proved -> due ones deleted, new ones pending delete

Invariant (I6): no writer is excluded, and the index may not list a version that is durable. So the store's own listing
is compared with the tables, and all that it lists is counted before anything is removed. Objects that become durable
after the listing need none of it:

    a version       found its data in the index less than half a grace before, or is checked again by the committer;
                    deleted data were withdrawn a grace before the listing began
    a container     was opened less than half a grace before, when the pending-delete record kept its bases from being
                    chosen among deleted data
    neither         is in a container that is less than two graces old: those stay, with all that they refer to

A version that disappeared, or whose manifest has another size, was changed by another process: the run marks.
docs/adr/0085-collection-by-change-in-a-fleet.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nearkin_maintenance.gc.gc_context import GcHooks, GcStore
from nearkin_maintenance.gc.incremental_run import IncrementalPass, read_or_distrust
from nearkin_maintenance.gc.ledger_rows import LedgerRows, to_bytes
from nearkin_maintenance.gc.reach_summaries import (
    LISTED,
    IndexChanges,
    MarkingNeeded,
    TablesContradicted,
    find_changes,
    keep_containers,
    record_container,
    recorded_container,
)
from nearkin_maintenance.gc.reference_counts import ReferenceCounts, distrust
from nearkin_maintenance.gc.roots import Roots
from nearkin_maintenance.gc.store_listing import ListedStore, digests_in, list_store
from nearkin_maintenance.gc.version_expiry import VersionExpiry
from nearkin_maintenance.gc.writer_gate import NoWriters
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestListing, ManifestStore, key_and_version
from nearkin_shared.types import ContainerId

RECENT_GRACES = 2
"""Age in graces below which a container stays: its versions may be in flight."""


class OnlinePass(IncrementalPass):
    """One execution of the steps in a fleet.

    The caller holds the GC lease, which `store` and `index` check.
    """

    runs_with_services = True

    def __init__(
        self,
        store: GcStore,
        settings: GcSettings,
        index: SupportsCollection,
        hooks: GcHooks,
        ledger: ReferenceCounts,
    ) -> None:
        super().__init__(store, settings, NoWriters(index), hooks, ledger)
        self._index = index
        self._listed = ListedStore(0, {}, {})

    # --- versions -----------------------------------------------------------------------------------------------------

    def _expire_versions(self) -> None:
        """Count all that is new in the store, then delete versions whose undelete window is over."""
        self._listed = list_store(self._containers, self._manifests, self._hooks.now_us())
        snapshot = self._listed.snapshot()
        with self._ledger.transaction() as rows:
            changes = find_changes(rows, snapshot, digests_in, self._listed.at_us)
            self._check_unchanged(rows, changes)
        self._keys.update(changes.versions)
        roots = self._find_roots(changes)
        with self._ledger.transaction() as rows:
            self._count(rows, snapshot, changes, roots)
        expired = VersionExpiry(self._manifests, self._hooks.now_us).expire(roots, self._gate)
        self._totals.versions += expired.versions
        self._totals.undeletable = expired.count_undeletable(roots)
        kept = {version.manifest for version in expired.kept}
        ended = {version.manifest for version in roots.ended if version.committed} - kept
        if not ended:
            return
        self._listed = self._listed.without(ended)
        with self._ledger.transaction() as rows:
            remaining = Roots(expired.kept, roots.undeletable, (), roots.highest)
            self._count(rows, snapshot, _without(changes, ended), remaining)

    @staticmethod
    def _check_unchanged(rows: LedgerRows, changes: IndexChanges) -> None:
        """Check that what was counted is there as it was.

        Raises: MarkingNeeded.
        """
        if changes.removed:
            raise MarkingNeeded(f"{len(changes.removed)} versions were removed by another process")
        for versions in changes.versions.values():
            for name, listed in versions.items():
                before = rows.get("listed", name)
                if before is not None and before[8:12] != listed.marks[8:12]:
                    raise TablesContradicted(f"version {listed.version} of key {listed.key.hex()} has another manifest")

    def _listing(self, keys: Collection[bytes]) -> ManifestListing:
        return self._listed.of(keys)

    def _examined(self, containers: Collection[int]) -> Collection[int]:
        return without_recent(containers, self._listed.at_us, self._grace_us)

    # --- containers ---------------------------------------------------------------------------------------------------

    def _collect(self) -> Mapping[int, PendingDelete]:
        """Remove unreachable containers; return the rest of the pending deletes."""
        return self._finish(self._index, self._prove_decision(self._listed.snapshot()), None)

    def _due_us(self) -> int:
        return self._listed.at_us

    def _removable(self, containers: Collection[int]) -> Collection[int]:
        return self._examined(containers)

    def _check_kept(self, unreachable: set[int], whole: Collection[int], _nominated: Collection[int]) -> None:
        """Check that no pending delete is needed again.

        Data of failed uploads in containers that stay count as ended (`nominate_unreferenced`).

        Raises: MarkingNeeded.
        """
        if not unreachable.issuperset(whole):
            raise MarkingNeeded("pending deletes are needed again")

    def _sizes_of(self, containers: Collection[int]) -> Mapping[int, Mapping[int, int]]:
        return {c: self._listed.generations[c] for c in containers if c in self._listed.generations}


def without_recent(containers: Collection[int], now_us: int, grace_us: int) -> set[int]:
    """Return the containers whose versions cannot be in flight.

    Container ids begin with the time of their creation.
    """
    since_ms = (now_us - RECENT_GRACES * grace_us) // 1000
    return {container for container in containers if container >> 20 < since_ms}


def confirm_listed(ledger: ReferenceCounts, containers: ContainerStore, manifests: ManifestStore, now_us: int) -> None:
    """Record versions and containers at the end of a run that marked.

    The tables are trusted from then on, unless a counted version is no longer listed. Listed versions that are not
    counted are new to the next run.

    Raises: StoreUnavailable.
    """
    listed = list_store(containers, manifests, now_us)
    with ledger.transaction() as rows, read_or_distrust(rows):
        snapshot = listed.snapshot()
        known = {key + to_bytes(version): key for key, versions in rows.known().items() for version in versions}
        if not rows.number(b"marked") or not known.keys() <= snapshot.versions.keys():
            distrust(rows)
            return
        recorded = dict(rows.items("listed"))
        for name in recorded.keys() - known.keys():
            rows.delete("listed", name)
        for name, key in known.items():
            marks = snapshot.versions[name]
            if recorded.get(name, b"")[:12] != marks:
                rows.put("listed", name, LISTED.pack(marks, key, int.from_bytes(name[-8:]), 0))
        rows.set_number(b"added", rows.sum_added())
        rows.set_number(b"trusted", sum(sum(sizes.values()) for sizes in listed.generations.values()))
        keep_containers(rows, snapshot.containers.keys())
        for container, check in snapshot.containers.items():
            generation = int.from_bytes(check)
            if recorded_container(rows, container) != (generation, check):
                directory = containers.directory(ContainerId(container))
                record_container(rows, container, generation, check, directory)


def _without(changes: IndexChanges, ended: Collection[str]) -> IndexChanges:
    """Return the changes after the manifests `ended` were deleted."""
    removed = {parsed[0] + to_bytes(parsed[1]) for name in ended if (parsed := key_and_version(name)) is not None}
    versions = {
        key: {name: listed for name, listed in of_key.items() if name not in removed}
        for key, of_key in changes.versions.items()
    }
    return IndexChanges(versions, removed)
