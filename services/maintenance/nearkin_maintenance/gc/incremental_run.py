"""Collect data that changes since the last GC run made unreachable.

    index, tables of the last run -> changed keys -> their folders, their new manifests -> counts, nominated containers
    versions whose undelete window is over -> deleted
    unreachable containers (reach_summaries.py) -> every manifest of the keys that ever reached one is read again
    proved -> pending delete; proved again a grace later, and all that is stored is counted -> deleted

Invariant (I6): only whole containers are removed, and only such as a run that marks would remove. The decision and its
effects are one exclusive section: no writer is active, and the index lists every committed version. Any doubt ends the
pass without an effect that a run that marks would not have; that run follows. It also follows once the versions that
ended had added a certain share of the store, since data in containers that stay are for it, and once a week.
docs/adr/0078-collection-by-change.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial

import numpy as np

from nearkin_maintenance.gc.concurrent_writes import ConcurrentWrites
from nearkin_maintenance.gc.gc_context import GcHooks, GcStore
from nearkin_maintenance.gc.gc_plan import REBASED_SHARE, plan_whole, record_removal
from nearkin_maintenance.gc.ledger_rows import LedgerRows, to_bytes
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.reach_summaries import (
    LISTED,
    IndexChanges,
    MarkingNeeded,
    TablesContradicted,
    find_changes,
    find_unreachable,
    forget_containers,
    keep_containers,
    keys_reaching,
    read_trusted,
    record_container,
    record_versions,
    recorded_container,
    with_needed,
)
from nearkin_maintenance.gc.reference_counts import (
    ReferenceCounts,
    digest_references,
    distrust,
    is_mark_overdue,
    nominate_unreferenced,
)
from nearkin_maintenance.gc.roots import Roots, find_roots
from nearkin_maintenance.gc.sweep import GcExecutor, GcTotals, make_report, pending_delete_bytes
from nearkin_maintenance.gc.version_expiry import VersionExpiry
from nearkin_maintenance.gc.writer_gate import NoWriters, WriterGate
from nearkin_maintenance.verify.manifest_validation import ValidatingManifestReader
from nearkin_shared.config.storage import GcSettings
from nearkin_shared.errors import Corrupt, NotFound
from nearkin_shared.formats.directory import Directory
from nearkin_shared.formats.manifest import CREATED_US_MAX, Manifest
from nearkin_shared.formats.pending_delete_record import PendingDelete
from nearkin_shared.index.protocols import IndexSnapshot, SupportsCollection, SupportsSnapshots
from nearkin_shared.results import GcReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.heads import VersionHeads, head_name
from nearkin_shared.storage.manifests import ManifestListing, key_and_version, key_digest, marked_version
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen

_log = logging.getLogger("nearkin")
CONTAINERS_MAX = 256
"""Containers that one pass removes: the exclusive section stays below a second. For more the run marks."""
KEYS_MAX = 1024
"""Changed keys, or keys that reached removed containers, whose folders one pass lists; for more the run marks."""
PROOF_MANIFESTS_MAX = 1024
"""Manifests that are read again as proof, 0.3 ms each; for more the run marks."""
ENDED_SHARE = REBASED_SHARE
"""Share of the bytes that may be dead (1 - `gc.compact_below`) that ended versions had added before a run marks."""


@frozen
class IncrementalResult:
    """Effects of one pass."""

    report: GcReport | None
    """None if the run has to mark."""
    keys: frozenset[bytes]
    """Digests of the keys that have changed since the last run."""
    versions: int
    freed_bytes: int
    seconds: float


@frozen
class _Decision:
    """Removals of one pass; `record` is the pending-delete record before it."""

    record: dict[int, PendingDelete]
    new: set[int]
    due: set[int]
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of the containers to remove and of pending deletes."""
    ended_bytes: int = 0
    """Bytes that ended versions had added, less what is removed."""

    @property
    def removed(self) -> set[int]:
        """Return all containers to remove."""
        return self.new | self.due


@frozen
class _StoredObjects:
    """Manifests and containers, by their names."""

    versions: frozenset[tuple[bytes, int]]
    """Digest of the key, and number."""
    generations: Mapping[int, tuple[int, ...]]
    """Of each container; usually one."""


class IncrementalPass:
    """One execution of the steps over a `GcStore`. The caller holds the GC lock."""

    runs_with_services = False
    """Whether services may write meanwhile. A run of a local store marks for manifests of theirs, which refuses."""

    def __init__(
        self, store: GcStore, settings: GcSettings, gate: WriterGate, hooks: GcHooks, ledger: ReferenceCounts
    ) -> None:
        self._store = store
        self._containers, self._manifests = store.containers, store.manifests
        self._settings = settings
        self._gate = gate
        self._hooks = hooks
        self._ledger = ledger
        self._grace_us = settings.grace_seconds * 1_000_000
        self._totals = GcTotals(store.metered)
        self._keys: set[bytes] = set()

    def run(self) -> IncrementalResult:
        """Do all steps; without a report in the result the run has to mark.

        Raises: StoreLocked, StoreUnavailable.
        """
        started, report = time.perf_counter(), None
        try:
            self._check_trusted()
            self._expire_versions()
            record = self._collect()
            report = make_report(self._totals, record, self._grace_us, self._hooks.now_us(), started)
        except (MarkingNeeded, Corrupt, NotFound) as err:
            _log.info("gc: this run marks: %s", err)
            if isinstance(err, TablesContradicted):  # a later count reads new versions only
                with self._ledger.transaction() as rows:
                    rows.empty(self._ledger.name)
        seconds = time.perf_counter() - started
        return IncrementalResult(
            report, frozenset(self._keys), self._totals.versions, self._totals.freed_bytes, seconds
        )

    def _check_trusted(self) -> None:
        with self._ledger.transaction() as rows:
            if rows.get("meta", b"mode") != self._ledger.name:
                raise MarkingNeeded("the tables are of another mode or format")
            if read_trusted(rows) is None:
                raise MarkingNeeded("the tables were not made by a complete GC run")
            if rows.get("meta", b"services") is not None and not self.runs_with_services:
                raise MarkingNeeded("services wrote to the store")
            now_us = self._hooks.now_us()
            if not 0 <= now_us <= CREATED_US_MAX or is_mark_overdue(rows, now_us):
                raise MarkingNeeded("the last marking is a week ago")
        if not self._store.pending_deletes.is_consistent():
            raise MarkingNeeded("the pending-delete record is of a run that died")

    # --- versions -----------------------------------------------------------------------------------------------------

    def _expire_versions(self) -> None:
        """Count the versions that are new, then delete those whose undelete window is over."""
        with self._gate.exclusive() as index:
            snapshot, changes = self._find_changes(index)
        roots = self._find_roots(changes)
        with self._ledger.transaction() as rows:
            self._count(rows, snapshot, changes, roots)
        self._totals.versions += VersionExpiry(self._manifests, self._hooks.now_us).expire(roots, self._gate).versions

    def _find_changes(self, index: SupportsCollection) -> tuple[IndexSnapshot, IndexChanges]:
        if not isinstance(index, SupportsSnapshots):
            raise MarkingNeeded("the index lists no changes")
        snapshot = index.snapshot()
        with self._ledger.transaction() as rows:
            changes = find_changes(rows, snapshot, partial(_digests, index), self._hooks.now_us())
        if len(changes.versions) > KEYS_MAX:
            raise MarkingNeeded(f"{len(changes.versions)} keys have changed")
        self._keys.update(changes.versions)
        return snapshot, changes

    def _find_roots(self, changes: IndexChanges) -> Roots:
        """Return the versions of the changed keys, from their folders.

        Raises: MarkingNeeded, if the index lists others, or a key has lost its recorded head or a record.
        """
        heads = VersionHeads(self._manifests.objects).read()
        listing = self._listing(changes.versions)
        roots = find_roots(self._manifests, self._hooks.now_us(), heads=heads, listing=listing)
        if roots.refused:
            raise MarkingNeeded(f"{roots.refused[0]}: damaged or not authenticated")
        stored = {parsed for name, _ in listing.manifests if (parsed := key_and_version(name)) is not None}
        listed = {(v.key, v.version) for versions in changes.versions.values() for v in versions.values()}
        if len(stored) != len(listing.manifests) or stored != listed:
            raise MarkingNeeded("the manifests of a changed key are not those that the index lists")
        objects = {version.manifest for version in (*roots.kept, *roots.ended)} | roots.highest
        for key in changes.versions:
            if heads.versions.get(key, 0) and head_name(key, heads.versions[key]) not in objects:
                raise MarkingNeeded(f"{head_name(key, heads.versions[key])}: removed with its tombstones")
        return roots

    def _listing(self, keys: Collection[bytes]) -> ManifestListing:
        """List the objects of some keys."""
        return self._manifests.listing(keys)

    def _examined(self, containers: Collection[int]) -> Collection[int]:
        """Return the containers whose unreferenced data are garbage."""
        return containers

    def _count(self, rows: LedgerRows, snapshot: IndexSnapshot, changes: IndexChanges, roots: Roots) -> None:
        """Count the manifests of the changed keys, of expired versions too, and new containers."""
        stored: dict[bytes, dict[int, str]] = {key: {} for key in changes.versions}
        until_us = {}
        for version in (*roots.kept, *roots.ended):
            parsed = key_and_version(version.manifest)
            if parsed is not None and version.committed:
                stored[parsed[0]][parsed[1]] = version.manifest
                until_us[parsed] = version.until_us
        reader = ValidatingManifestReader(self._manifests, self._containers, list(snapshot.containers))
        self._ledger.update_keys(rows, stored, reader.read, self._hooks.now_us())
        nominate_unreferenced(rows, self._examined(snapshot.containers), self._read_directory)
        self._ledger.end_count(rows)
        for container in changes.containers:
            directory = self._containers.directory(ContainerId(container))
            generation = self._containers.generation(ContainerId(container))
            record_container(rows, container, generation, snapshot.containers[container], directory)
        for container in rows.gained.intersection(self._store.pending_deletes.read()):
            rows.nominate(to_bytes(container))  # until a run marks, so that its grace begins again
        record_versions(rows, changes, until_us)
        failpoint("change.counted")

    def _read_directory(self, container: int) -> Directory | None:
        try:
            return self._containers.directory(ContainerId(container))
        except (Corrupt, NotFound):
            return None

    # --- containers ---------------------------------------------------------------------------------------------------

    def _collect(self) -> Mapping[int, PendingDelete]:
        """Remove unreachable containers; return the rest of the pending deletes.

        The index entries to remove are looked up between two exclusive sections: it takes long in a large index. The
        second section decides and proves again.
        """
        with self._gate.exclusive() as index:
            decision = self._decide_and_prove(index)
            if not decision.removed:
                return self._finish(index, decision, None)
        looked_up = self._gate.prefetch_removals(dict.fromkeys(sorted(decision.removed)), {})
        stored = self._list_stored() if decision.due else None
        failpoint("change.found")
        with self._gate.exclusive() as index:
            now = self._decide_and_prove(index)
            if now.due:
                self._check_all_counted(stored or self._list_stored())
            is_looked_up = now.removed <= decision.removed  # else the index looks them up itself
            return self._finish(index, now, looked_up if is_looked_up else None)

    def _decide_and_prove(self, index: SupportsCollection) -> _Decision:
        """Return the removals at this moment, within an exclusive section."""
        snapshot, changes = self._find_changes(index)
        roots = self._find_roots(changes)
        self._totals.undeletable = len(roots.undeletable)
        return self._prove_decision(snapshot, lambda rows: self._count(rows, snapshot, changes, roots))

    def _prove_decision(
        self, snapshot: IndexSnapshot, count: Callable[[LedgerRows], None] = lambda rows: None
    ) -> _Decision:
        """Decide and prove in one transaction, which begins with `count`."""
        with self._ledger.transaction() as rows:
            count(rows)
            decision = self._check_sizes(rows, self._decide(rows))
            self._prove(rows, snapshot, decision.removed)
        failpoint("change.written")
        return decision

    def _list_stored(self) -> _StoredObjects:
        """List the manifests of all keys, and all containers, without reading any.

        Raises: MarkingNeeded, if a counted version or a recorded head is lost: marking refuses then.
        """
        with self._ledger.transaction() as rows:
            counted = {(key, version) for key, versions in rows.known().items() for version in versions}
        heads = VersionHeads(self._manifests.objects).read()
        generations = {int(c): tuple(found) for c, found in self._containers.generations().items()}
        listing = self._manifests.listing()
        versions = frozenset(parsed for name, _ in listing.manifests if (parsed := key_and_version(name)) is not None)
        if len(versions) != len(listing.manifests) or not counted <= versions:
            raise MarkingNeeded("a counted version has no manifest, or an object is no manifest")
        objects = {name for name, _ in listing.manifests} | {marked_version(name)[0] for name, _ in listing.marks}
        if any(version and head_name(key, version) not in objects for key, version in heads.versions.items()):
            raise MarkingNeeded("a key has lost its recorded head")
        return _StoredObjects(versions, generations)

    def _check_all_counted(self, stored: _StoredObjects) -> None:
        """Check, before containers are deleted, that the index lists all that is stored.

        It lacks versions if it is an older copy, if objects were restored from a backup, and if services wrote.

        Raises: MarkingNeeded, if a version is not counted, or a container is not recorded as it is.
        """
        with self._ledger.transaction() as rows:
            counted = {(key, version) for key, versions in rows.known().items() for version in versions}
            recorded = {container: recorded_container(rows, container) for container in stored.generations}
        if not stored.versions <= counted:
            raise MarkingNeeded("the index does not list every stored version")
        for container, found in recorded.items():
            if found is None or stored.generations[container] != (found[0],):
                raise MarkingNeeded(f"container {container:016x}: not in the index, or its generation is not recorded")

    def _finish(self, index: SupportsCollection, decision: _Decision, looked_up: object) -> Mapping[int, PendingDelete]:
        """Apply the removals within the exclusive section in which they were decided."""
        record = self._apply(index, decision, looked_up)
        with self._ledger.transaction() as rows:
            forget_containers(rows, decision.due)
            rows.set_number(b"ended", decision.ended_bytes)
            rows.txn.drop(rows.tables["nominated"], delete=False)
        failpoint("change.confirmed")
        return record

    def _decide(self, rows: LedgerRows) -> _Decision:
        """Return the containers to mark for deletion, and those to delete."""
        record = self._store.pending_deletes.read()
        due_us = self._due_us()
        whole = {container for container, entry in record.items() if entry.whole}
        due = {container for container, entry in record.items() if entry.at_us + self._grace_us <= due_us}
        names = [name for name, _ in rows.items("nominated")]
        nominated = {int.from_bytes(name[:8]) for name in names}
        unreachable = find_unreachable(rows, self._removable(with_needed(rows, nominated | whole)))
        if not find_unreachable(rows, self._removable(due & whole)) == due:
            raise MarkingNeeded("pending deletes are due in containers that stay")
        self._check_kept(unreachable, whole, {int.from_bytes(name) for name in names if len(name) == len(to_bytes(0))})
        new = unreachable - record.keys()
        if len(new) + len(due) > CONTAINERS_MAX:
            raise MarkingNeeded(f"{len(new) + len(due)} containers to remove")
        return _Decision(record, new, due)

    def _due_us(self) -> int:
        """Return the time at which graces must be over."""
        return self._hooks.now_us()

    def _removable(self, containers: Collection[int]) -> Collection[int]:
        """Return the containers that may be removed if nothing reaches them."""
        return containers

    def _check_kept(self, unreachable: set[int], _whole: Collection[int], nominated: Collection[int]) -> None:
        """Check what stays.

        `nominated`: containers with unreferenced data. Raises: MarkingNeeded.
        """
        if not unreachable.issuperset(nominated):
            raise MarkingNeeded("a container holds data that no version named")

    def _sizes_of(self, containers: Collection[int]) -> Mapping[int, Mapping[int, int]]:
        """Return the bytes of each generation of some containers."""
        return self._containers.generations_of(containers)

    def _check_sizes(self, rows: LedgerRows, decision: _Decision) -> _Decision:
        """Return the decision with sizes, and with the bytes of ended versions.

        Raises: MarkingNeeded, if a container has another generation than recorded, or several; or if ended versions had
        added a certain share of the store.
        """
        containers = decision.new | decision.record.keys()
        sizes = {}
        for container, generations in self._sizes_of(containers).items():
            recorded = recorded_container(rows, container)
            if recorded is None or list(generations) != [recorded[0]]:
                raise MarkingNeeded(f"container {container:016x}: its generation is not the recorded one")
            sizes[container] = generations[recorded[0]]
        if missing := containers - sizes.keys():
            raise MarkingNeeded(f"container {min(missing):016x} is missing")
        removed_bytes, stored_bytes = sum(sizes[container] for container in decision.new), read_trusted(rows) or 0
        scale = max(1, rows.number(b"added")) / max(1, stored_bytes)  # added bytes are not yet compressed
        ended_bytes = max(0, rows.number(b"ended") - int(removed_bytes * scale))
        if ended_bytes > ENDED_SHARE * (1 - self._settings.compact_below) * scale * stored_bytes:
            raise MarkingNeeded(f"versions that had added {ended_bytes} bytes have ended")
        return replace(decision, sizes=sizes, ended_bytes=ended_bytes)

    def _prove(self, rows: LedgerRows, snapshot: IndexSnapshot, containers: Collection[int]) -> None:
        """Read all manifests of keys that ever reached `containers`: none names them.

        Raises: MarkingNeeded, if a manifest is not the one that was counted, or names one.
        """
        keys = keys_reaching(rows, containers)
        if len(keys) > KEYS_MAX:
            raise MarkingNeeded(f"{len(keys)} keys reached the containers to remove")
        names = [name for name, _ in self._listing(keys).manifests]
        if len(names) > PROOF_MANIFESTS_MAX:
            raise MarkingNeeded(f"{len(names)} manifests to read again")
        digests = {(key, version): digest for key in keys for version, digest in rows.digests_of(key).items()}
        reader = ValidatingManifestReader(self._manifests, self._containers, list(snapshot.containers))
        removed = np.array(sorted(containers), np.uint64)
        for name in names:
            manifest = reader.read(name)
            if digests.pop(_identity(manifest), None) != digest_references(manifest):
                raise TablesContradicted(f"{name}: not the manifest that was counted")
            if np.isin(manifest.segments.containers, removed).any():
                _log.error("%s: wrong summary in index/gc; all are made again", name)
                raise MarkingNeeded(f"{name}: names a container that its summary leaves out")
        if digests:
            raise MarkingNeeded("a counted version has no manifest")

    def _apply(self, index: SupportsCollection, decision: _Decision, looked_up: object) -> Mapping[int, PendingDelete]:
        """Delete due containers, and mark others for deletion."""

        def check() -> None:
            self._gate.on_rewrite_start()
            self._hooks.check()

        gate, sizes = _SectionGate(self._gate, index, looked_up), dict(decision.sizes)
        empty = LiveSet(self._containers, self._manifests, (), known_containers=())
        generations = {ContainerId(c): {self._containers.generation(ContainerId(c)): size} for c, size in sizes.items()}
        writes = ConcurrentWrites(gate, None, self._containers, self._manifests, generations, (), empty)
        hooks = GcHooks(self._hooks.clock, check, self._hooks.steps)
        executor = GcExecutor(self._store, hooks, writes, sizes, self._totals)
        record = dict(decision.record)
        due = {container: record[container] for container in sorted(decision.due)}
        for container, removal in executor.sweep(plan_whole(empty, sorted(due), due)).items():
            record_removal(record, container, removal)
        plan = plan_whole(empty, sorted(decision.new))
        if not decision.new and record == decision.record:
            self._totals.pending_delete_bytes = pending_delete_bytes(self._store, record, sizes)
            return record
        return executor.mark_for_deletion(plan, {}, decision.record, record)


class _SectionGate(NoWriters):
    """Gate within an exclusive section that already began."""

    def __init__(self, gate: WriterGate, index: SupportsCollection, looked_up: object) -> None:
        super().__init__(index)
        self._gate = gate
        self._looked_up = looked_up

    def prefetch_removals(self, _chunks: Mapping[int, U32 | None], _segments: Mapping[int, U32]) -> object:
        """Return the entries that were looked up before the section."""
        return self._looked_up

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Record that a container was deleted."""
        self._gate.on_container_rewritten(container)


def _digests(index: SupportsSnapshots, names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the digest of the blob key of keys of the index."""
    return {
        name: bytes.fromhex(key_digest(tenant, key)) for name, (tenant, key, _) in index.version_names(names).items()
    }


def _identity(manifest: Manifest) -> tuple[bytes, int]:
    return bytes.fromhex(key_digest(manifest.tenant, manifest.key)), manifest.version


@contextmanager
def read_or_distrust(rows: LedgerRows) -> Iterator[None]:
    """Distrust the tables if an object cannot be read."""
    try:
        yield
    except (Corrupt, NotFound) as err:
        _log.info("gc: the next run marks: %s", err)
        distrust(rows)


def confirm_tables(ledger: ReferenceCounts, index: SupportsSnapshots, containers: ContainerStore) -> None:
    """Record versions and containers at the end of a run that listed all of them.

    The tables are trusted from then on, unless something is stored that the index does not list.

    Raises: StoreUnavailable.
    """
    snapshot = index.snapshot()
    generations = containers.generations()
    with ledger.transaction() as rows:
        if not rows.number(b"marked") or not _confirm_versions(rows, snapshot, index):
            distrust(rows)
            return
        if not generations.keys() >= snapshot.containers.keys():
            distrust(rows)
            return
        rows.set_number(b"added", rows.sum_added())
        rows.set_number(b"trusted", sum(sizes[max(sizes)] for sizes in generations.values()))
        keep_containers(rows, snapshot.containers.keys())
        with read_or_distrust(rows):
            for container, check in snapshot.containers.items():
                generation = max(generations[ContainerId(container)])
                if recorded_container(rows, container) != (generation, check):
                    directory = containers.directory(ContainerId(container))
                    record_container(rows, container, generation, check, directory)


def _confirm_versions(rows: LedgerRows, snapshot: IndexSnapshot, index: SupportsSnapshots) -> bool:
    """Record the listed versions that are counted; return whether that is all of them."""
    listed = dict(rows.items("listed"))
    known = {(key, version) for key, versions in rows.known().items() for version in versions}
    changed = [name for name, marks in snapshot.versions.items() if listed.get(name, b"")[:12] != marks]
    from_index = {
        name: (bytes.fromhex(key_digest(tenant, key)), version)
        for name, (tenant, key, version) in index.version_names(changed).items()
    }
    for name in listed.keys() - snapshot.versions.keys():
        rows.delete("listed", name)
        del listed[name]
    for name in changed:
        listed.pop(name, None)
        if (identity := from_index.get(name)) is not None and identity in known:
            row = LISTED.pack(snapshot.versions[name], *identity, 0)
            rows.put("listed", name, row)
            listed[name] = row
        else:
            rows.delete("listed", name)
    return known == {LISTED.unpack(row)[1:3] for row in listed.values()}
