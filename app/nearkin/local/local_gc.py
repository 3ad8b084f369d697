"""Run garbage collection in a local store.

a GC run (nearkin_maintenance.gc.gc_run) -> versions outside retention.policies are deleted, and freed by later runs

Invariant: one GC run at a time; each of its effects is applied while no put is active. The GC lock is held
throughout,
the store's lock for one exclusive section at a time, so puts and GC runs are concurrent, in this process and others.
docs/adr/0028-gc-concurrent-with-puts.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from nearkin.block_recoder import BlockRecoder
from nearkin.local.index_lifecycle import LocalIndex
from nearkin.local.process_lock import GC_LOCK_NAME, WriterLock
from nearkin_maintenance import DomainOwners, GcRun, Purge, ReferenceCounts, Rewriter, Steps
from nearkin_maintenance.gc.clock_check import check_clock
from nearkin_maintenance.gc.erased_tenants import ErasureSweep, count_erasures, remaining_after, sweep_erased
from nearkin_maintenance.gc.gc_context import GcHooks, meter_writes
from nearkin_maintenance.gc.gc_run import BLOCKS_BYTES
from nearkin_maintenance.gc.incremental_run import confirm_tables
from nearkin_maintenance.gc.mark import LiveSet
from nearkin_maintenance.gc.rolled_back_keys import check_none_rolled_back, record_heads
from nearkin_maintenance.gc.roots import find_roots
from nearkin_maintenance.gc.tombstone_signing import sign_old_marks
from nearkin_maintenance.gc.version_expiry import VersionExpiry
from nearkin_maintenance.gc.writer_gate import NoWriters
from nearkin_shared.checkpoint_expiry import checkpoint_keys, expire_checkpoints
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import HYBRID, MARK_SWEEP
from nearkin_shared.errors import BadInput, Corrupt, RetryableError, StoreUnavailable, TenantErased
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.tombstone import Mark
from nearkin_shared.index.catalog import summarise_directory
from nearkin_shared.index.protocols import SupportsCollection
from nearkin_shared.objectstore.base import check_tenant
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.results import GcReport
from nearkin_shared.retention import apply_policies
from nearkin_shared.storage.containers import ContainerStore, object_name
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.manifests import object_name as manifest_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import remove_tree

EXCLUSIVE_SECONDS_MAX = 60.0
"""Longest wait of an exclusive section for a put; then the GC run ends, and its effects are kept."""
PREVIEW_TRIES_MAX = 4
"""Each but the first means that a GC run has removed, since it began, what a preview was to read."""
KEYS_AT_ONCE = 64
"""Keys whose versions are deleted by policy in one exclusive section."""


@frozen
class LocalGc:
    """The parts of an open store that a GC run works on."""

    root: Path
    settings: Settings
    containers: ContainerStore
    manifests: ManifestStore
    condemned: PendingDeleteStore
    index: LocalIndex
    deletions: Deletions
    fingerprinter: Callable[[str], Fingerprinter]
    clock: Callable[[], float]
    pauses: GcPauseFlag
    writing: Callable[[], None] = lambda: None
    """Called before a GC run rewrites or removes a container."""
    release_reserve: Callable[[], bool] = lambda: False
    """Removes the disk reserve; returns whether there was one."""

    def run(self, wait_seconds: float, go_on: Callable[[], None], steps: Steps | None) -> GcReport:
        """Run GC, waiting up to `wait_seconds` for a put first.

        `go_on` raises to stop between steps.

        Raises Corrupt, GcPaused, StoreLocked, StoreUnavailable.
        """
        self.pauses.check()
        rounds = WriterLock(self.root, "lock.round")
        rounds.acquire(self.index.lock_wait_seconds, GC_LOCK_NAME)
        alone, ended = self.index.has_exclusive_lock, False
        try:
            self.check_clock(self._indexed_containers())
            swept = self._begin(wait_seconds)
            with self._ledger() as ledger:  # an index that was just rebuilt has none
                gate = LocalWriterGate(
                    self.index, self.containers, max(wait_seconds, EXCLUSIVE_SECONDS_MAX), self.writing
                )
                # Directories and blocks of its own: those of puts and of a GC run are forgotten at other moments.
                apart = self.containers.with_own_caches(self.condemned.objects, BLOCKS_BYTES)
                try:
                    report, changed_keys = self._collect(
                        self._collector(apart, steps, ledger, go_on), gate, ledger, apart
                    )
                finally:
                    apart.evict()  # else 100 MB wait for the garbage collector
            waiting, refused = count_erasures(self.condemned.objects)
            rolled_back = record_heads(self.condemned.objects, self.release_reserve, changed_keys)
            report = replace(
                report,
                freed_bytes=report.freed_bytes + swept.freed_bytes,
                rolled_back_keys=rolled_back,
                pending_erasures=waiting,
                finished_erasures=len(swept.finished),
                remaining=remaining_after(self.settings, swept.finished),
                refused_records=report.refused_records + refused,
            )
            report, ended = self._with_retention(report, dry_run=False), True
            return report
        finally:
            rounds.release()
            self._forget(alone=ended and alone and self.index.has_exclusive_lock)

    def _begin(self, wait_seconds: float) -> ErasureSweep:
        """Wait for a put, recover the index, and delete the objects of erased tenants."""
        with self.index.exclusive(wait_seconds) as index:
            failpoint("gc.begun")
            if self.settings.gc.sign_old_records:
                sign_old_marks(self.condemned.objects, index)
            return sweep_erased(self.condemned.objects, index)

    def _indexed_containers(self) -> list[int] | None:
        """Return the ids of all containers from the index if this run may not list them."""
        if self.settings.gc.mode != HYBRID or not self.index.gc_folder.exists():
            return None
        found: list[int] = self.index.read(lambda index: index.container_ids()).tolist()
        return found

    def _collect(
        self, collector: GcRun, gate: LocalWriterGate, ledger: ReferenceCounts | None, containers: ContainerStore
    ) -> tuple[GcReport, frozenset[bytes] | None]:
        """Collect by the changes since the last run if that is enough, else mark.

        Returns the report and the digests of the changed keys, None for all.
        """
        objects, before = self.condemned.objects, None
        has_erasures = isinstance(objects, EncryptedObjectStore) and bool(objects.keyring.erasures())
        if ledger is not None and ledger.is_trusted and not has_erasures and not self.settings.gc.sign_old_records:
            before = collector.run_incremental(gate)
            if before.report is not None:
                return before.report, before.keys
        self._check_no_manifest_is_lost(record=True)
        report = collector.run_online(gate)
        if ledger is not None and self.settings.gc.mode == HYBRID:
            self.index.read(lambda index: confirm_tables(ledger, index, containers))
        if before is not None:
            report = replace(
                report,
                versions=report.versions + before.versions,
                freed_bytes=report.freed_bytes + before.freed_bytes,
                seconds=report.seconds + before.seconds,
            )
        return report, None

    def purge(self, wait_seconds: float, ends: Callable[[Mark], bool], steps: Steps | None) -> GcReport:
        """End the deleted versions that `ends` selects, and remove their unshared data at once.

        Grace and undelete windows do not apply: other writers are excluded from beginning to end instead (I6). Data
        in free
        pages of the index remain until it is rebuilt. Raises Corrupt, GcPaused, StoreLocked, StoreUnavailable.
        """
        started = time.perf_counter()
        self.pauses.check()
        rounds = WriterLock(self.root, "lock.round")
        rounds.acquire(what=GC_LOCK_NAME)
        try:
            self.check_clock()
            self._forget_ledger()
            with self.index.exclusive(wait_seconds) as index:
                swept = sweep_erased(self.condemned.objects, index)
                self._check_no_manifest_is_lost(record=True)
                self.containers.evict()
                counted, objects = meter_writes(self.condemned.objects)
                containers, manifests = self.containers.with_objects(objects), ManifestStore(objects)
                now_us = int(self.clock() * 1e6)
                roots = find_roots(manifests, now_us, ends, VersionHeads(objects).read())
                generations = containers.generations()
                if not roots.highest and generations:
                    raise StoreUnavailable(
                        "manifests: containers exist, but no manifest and no tombstone: if they are on another disk "
                        "mount it; nothing was removed"
                    )
                LiveSet(
                    containers, manifests, [version.manifest for version in roots.kept], known_containers=generations
                )
                ended = VersionExpiry(manifests, lambda: now_us).expire(roots, NoWriters(index))
                for container, there in generations.items():  # what a run that died has replaced
                    for older in sorted(there)[:-1]:
                        index.renew(summarise_directory(containers.of(None).directory(container)))
                        containers.delete(container, older)
                reach = LiveSet(
                    containers, manifests, [version.manifest for version in ended.kept], known_containers=generations
                )
                if reach.by_services is not None and not self.settings.gc.assume_services_stopped:
                    raise BadInput(
                        f"{reach.by_services} were written by services: purge is not possible while they run; stop "
                        "them, and set gc.assume_services_stopped if none will ever write this store again"
                    )
                purge = self._purge(containers, steps)
                purge.run(reach, index)
                PendingDeleteStore(objects).replace({})
        finally:
            rounds.release()
            self._forget(alone=False)
        return GcReport(
            dry_run=False,
            versions=ended.versions,
            containers_deleted=purge.deleted,
            containers_rewritten=purge.rewritten,
            freed_bytes=counted.freed_bytes + swept.freed_bytes,
            finished_erasures=len(swept.finished),
            remaining=remaining_after(self.settings, swept.finished),
            pending_delete_containers=0,
            pending_delete_bytes=0,
            due=None,
            held={},
            undeletable_versions=ended.count_undeletable(roots),
            seconds=time.perf_counter() - started,
        )

    def check_clock(self, containers: Sequence[int] | None = None) -> None:
        """Raise ClockSkew if the clock is ahead.

        `containers` are the ids of all; they are listed by default. Graces, retentions and erasures would end too soon.
        """
        if containers is None:
            containers = list(map(int, self.containers.generations()))
        check_clock(self.condemned.objects, containers, self.clock(), self.settings.gc)

    def _purge(self, containers: ContainerStore, steps: Steps | None) -> Purge:
        tenants = DomainOwners(self.fingerprinter, [self.settings.tenant], self.manifests)
        any_fingerprinter = self.fingerprinter(self.settings.tenant)
        return Purge(containers, tenants, any_fingerprinter, BlockRecoder(self.settings), steps)

    def _forget(self, *, alone: bool) -> None:
        """Evict deleted containers from caches, so that no later put depends on them.

        `alone`: only this GC run can have removed any.
        """
        try:
            if alone:
                self.containers.evict_deleted()
        except (Corrupt, StoreUnavailable):  # the GC run is done all the same
            alone = False
        if not alone:
            self.containers.evict()
        self.containers.buffers.release_unused()

    def preview(self, steps: Steps | None, *, deleted_too: bool) -> GcReport:
        """Return what `run` would do, and why other data are kept, without a lock.

        Raises Corrupt, RetryableError.
        """
        self._check_no_manifest_is_lost(record=False)
        report, objects = self._previewed(steps, deleted_too), self.condemned.objects
        if isinstance(objects, EncryptedObjectStore):
            report = replace(
                report, freed_bytes=report.freed_bytes + sum(size for _, size in objects.erased_objects(due=True))
            )
        return self._with_retention(report, dry_run=True)

    def _previewed(self, steps: Steps | None, deleted_too: bool) -> GcReport:
        for _ in range(PREVIEW_TRIES_MAX):
            before = self._listed()
            try:
                return self._collector(self.containers, steps).preview(deleted_too=deleted_too)
            except Corrupt as err:
                if before <= self._listed():
                    raise
                self.containers.evict()
                last = err
        raise RetryableError(
            f"store {self.root}: a GC run is at work, and removes what this one reads; try again when it is done"
        ) from last

    def _check_no_manifest_is_lost(self, *, record: bool) -> None:
        """Raise Corrupt if an indexed version has no manifest: its containers are not known.

        A version is withdrawn from the index before its manifest is removed, and added after its manifest is written.
        """
        lost = self._lost_manifests()
        still = self._lost_manifests() if lost else {}  # a GC run, or an erasure, may have come in between
        name = min(lost.keys() & still.keys(), default=None)
        if name is not None:
            key, version = lost[name]
            raise Corrupt(
                f"{name}: missing, but the index lists {key!r} version {version}: its chunks are not known, so "
                "nothing is freed; put it back from a copy (`nearkin repair --from`), or give that version up with "
                "`nearkin rebuild-index`"
            )
        check_none_rolled_back(self.condemned.objects, record=record)

    def _lost_manifests(self) -> dict[str, tuple[str, int]]:
        remembered = self.index.listed_versions()
        # An erasure updates the index after it removed the keys: if it was killed in between, a GC run does it.
        gone = {tenant for tenant in {tenant for tenant, _ in remembered} if self._is_erased(tenant)}
        known = {
            manifest_name(tenant, entry.key, entry.version): (entry.key, entry.version)
            for tenant, entry in remembered
            if tenant not in gone
        }
        there = {name for name, _ in self.manifests.names()}
        return {name: version for name, version in known.items() if name not in there}

    def _is_erased(self, tenant: str) -> bool:
        try:
            check_tenant(self.condemned.objects, tenant)
        except (TenantErased, Corrupt):  # or its erasure record does not verify: its objects are hidden
            return True
        return False

    def _listed(self) -> set[str]:
        """Return the names of all manifests, and of all containers with their generations."""
        names = {name for name, _ in self.manifests.names_and_marks()[0]}
        for container, generations in self.containers.generations().items():
            names.update(object_name(container, generation) for generation in generations)
        return names

    @contextmanager
    def _ledger(self) -> Iterator[ReferenceCounts | None]:
        if self.settings.gc.mode == MARK_SWEEP:
            self._forget_ledger()  # this run changes containers without it
            yield None
            return
        ledger = ReferenceCounts(self.index.gc_folder, int(self.settings.index.map_bytes), self.settings.gc.mode)
        try:
            yield ledger
        finally:
            ledger.close()

    def _forget_ledger(self) -> None:
        """Delete the ledger, so that the next run that has one marks."""
        if self.index.gc_folder.exists():
            remove_tree(self.index.gc_folder)

    def _collector(
        self,
        containers: ContainerStore,
        steps: Steps | None,
        ledger: ReferenceCounts | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> GcRun:
        def check() -> None:
            go_on()
            self.pauses.check()

        tenant = self.settings.tenant
        tenants = DomainOwners(self.fingerprinter, [tenant], self.manifests)
        recoder = BlockRecoder(self.settings)
        rewriter = Rewriter(containers, tenants, self.fingerprinter(tenant), recoder)
        hooks = GcHooks(clock=self.clock, check=check, steps=steps)
        return GcRun(self.condemned.objects, containers, self.settings.gc, rewriter, hooks=hooks, ledger=ledger)

    def _with_retention(self, report: GcReport, *, dry_run: bool) -> GcReport:
        """Delete versions of all tenants that the policies do not keep; count the tombstones.

        Checkpoints of the own tenant that no backup continued are deleted as well, and not counted as versions.
        """
        report = self._without_stale_checkpoints(report, dry_run=dry_run)
        if not self.settings.retention.policies:
            return report
        catalogs = self.index.read(lambda index: index.catalogs())
        keys = list(dict.fromkeys((tenant, entry.key) for tenant, entry in catalogs))
        forgotten = marks_bytes = 0
        for start in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[start : start + KEYS_AT_ONCE]
            with nullcontext() if dry_run else self.index.exclusive(EXCLUSIVE_SECONDS_MAX):
                versions, size_bytes = apply_policies(
                    self.settings.retention,
                    some,
                    self.manifests,
                    None if dry_run else self.deletions,
                    self.settings.deletion.undelete_seconds,
                    self.clock(),
                )
            forgotten, marks_bytes = forgotten + versions, marks_bytes + size_bytes
        return replace(report, forgotten=forgotten, freed_bytes=report.freed_bytes - marks_bytes)

    def _without_stale_checkpoints(self, report: GcReport, *, dry_run: bool) -> GcReport:
        keys = self.index.read(lambda index: checkpoint_keys(index, [self.settings.tenant]))
        marks_bytes = 0
        for start in range(0, len(keys), KEYS_AT_ONCE):
            with nullcontext() if dry_run else self.index.exclusive(EXCLUSIVE_SECONDS_MAX):
                some = keys[start : start + KEYS_AT_ONCE]
                marks_bytes += expire_checkpoints(
                    some, self.manifests, None if dry_run else self.deletions, self.clock()
                )
        return replace(report, freed_bytes=report.freed_bytes - marks_bytes)


@frozen
class LocalWriterGate:
    """Exclusive sections of a GC run in a store of one folder."""

    index: LocalIndex
    containers: ContainerStore
    """The containers through which puts and restores of this process read."""
    wait_seconds: float
    on_rewrite_start: Callable[[], None]
    """Called before each container."""

    def exclusive(self) -> AbstractContextManager[SupportsCollection]:
        """Hold the store's lock. Raises StoreLocked, StoreUnavailable."""
        return self.index.exclusive(self.wait_seconds)

    def change_token(self) -> object:
        """Return a token that changes after any write, because writers update the index."""
        return self.index.state()

    def prefetch_removals(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> object:
        """Find the entries that an exclusive section will remove, by a scan concurrent with puts."""
        return self.index.look_up(chunks, segments)

    def on_container_rewritten(self, container: ContainerId) -> None:
        """Evict a container from caches, so that no later put depends on removed chunks."""
        self.containers.evict(container)
