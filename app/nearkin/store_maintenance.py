"""Open a store and maintain it: verify, scrub, repair, GC, erasure, index rebuild.

Invariant: maintenance never changes the content of a version; `nearkin.store.Store` adds the operations on versions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from nearkin.local.damage_notes import DamageNotes
from nearkin.local.failed_puts import FailedPutCleaner
from nearkin.local.index_lifecycle import WRITER_LOCK_TIMEOUT_SECONDS, LocalIndex
from nearkin.local.index_location import IndexLocation
from nearkin.local.writer import LocalPuts, WriterParts
from nearkin_shared.config.settings import Settings
from nearkin_shared.crypto.keyring import Keyring
from nearkin_shared.errors import (
    BadInput,
    Corrupt,
    NearkinError,
    NotFound,
    StoreLocked,
)
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.formats.manifest import CREATED_US_MAX, moment_of
from nearkin_shared.limits import ERASE_GRACE_SECONDS
from nearkin_shared.objectstore.base import check_tenant
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.objectstore.parity import ParityObjectStore
from nearkin_shared.results import (
    Damage,
    GcReport,
    GcState,
    RebuildReport,
    Repaired,
    RepairReport,
    Stats,
    VerifyReport,
)
from nearkin_shared.retention import guard_of
from nearkin_shared.storage import chunking_record, descriptor
from nearkin_shared.storage.chunking_record import ChunkingGuard
from nearkin_shared.storage.containers import ContainerStore, id_of
from nearkin_shared.storage.deletions import Deletions
from nearkin_shared.storage.disk_reserve import SpaceReserve
from nearkin_shared.storage.gc_pause import GcPauseFlag
from nearkin_shared.storage.heads import VersionHeads
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.storage.manifests import object_name as manifest_name
from nearkin_shared.storage.pending_deletes import PendingDeleteStore
from nearkin_shared.storage.quarantine import Quarantine
from nearkin_shared.storage.scrub_progress import ScrubStates
from nearkin_shared.types import ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.memory import give_back_free
from nearkin_shared.utils.thread_pool import all_cores
from nearkin_shared.validation import check_key, check_version

if TYPE_CHECKING:
    from nearkin.local.local_gc import LocalGc
    from nearkin.local.local_repair import LocalRepair
    from nearkin_maintenance import CorruptChunks, Scrubber, Verifier, VerifyScope
    from nearkin_maintenance.verify.scrubber import ScrubStep
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

CLOSE_SECONDS = 30.0
"""Longest wait of `close` for a put in another thread."""
_log = logging.getLogger("nearkin")

_STORES: WeakSet[MaintainedStore] = WeakSet()
"""The open stores of this process, reset in a forked one."""


class MaintainedStore:
    """An open store: its parts, its lock, and the operations on all its objects.

    The first write takes the lock, `close` releases it. In a forked process the store is open too, without the lock
    and the running put of its parent.
    """

    def __init__(
        self,
        root: Path,
        objects: LocalObjectStore,
        covered: ParityObjectStore,
        found: descriptor.Descriptor,
        guard: ChunkingGuard,
        clock: Callable[[], float] = time.time,
        *,
        read_only: bool = False,
    ) -> None:
        self.root = root
        self._is_read_only = read_only
        self.store_id: str = found.store_id
        self._clock = clock
        self.settings: Settings = guard.settings
        settings = self.settings
        self._chunking = guard
        self._objects = objects
        self._covered = covered
        self._fingerprinters = partial(
            Fingerprinter, bytes.fromhex(found.secret), fingerprint_bits=found.fingerprint_bits
        )
        self._fingerprinter = self._fingerprinters(settings.tenant)
        domain = self._fingerprinter.domain
        self._containers = ContainerStore(self._covered, domain, int(settings.restore.cache_bytes))
        self._manifests = ManifestStore(self._covered)
        self._index = LocalIndex(
            IndexLocation(root, found.store_id, settings.index.path),
            objects,
            covered,
            settings,
            self._fingerprinters,
            self._containers,
            self._manifests,
        )
        self._condemned = PendingDeleteStore(covered)
        self._heads = VersionHeads(covered)
        self._quarantine = Quarantine(covered, clock)
        self.damage_notes: DamageNotes = DamageNotes(root, self._quarantine)
        self._containers.on_damage = self.damage_notes.note
        self.reserve: SpaceReserve = SpaceReserve(root, self._container_bytes)
        self.pauses: GcPauseFlag = GcPauseFlag(covered, clock, self.reserve)
        self._deletions = Deletions(
            self._manifests,
            lambda marks: self._index.noting().mark_many(marks),
            clock=clock,
            guard=guard_of(settings.retention, clock),
            notes=self._index,
            reserve=self.reserve,
            heads=self._heads,
        )
        parts = WriterParts(
            root,
            lambda: self.settings,
            covered,
            self._fingerprinter,
            self._containers,
            self._manifests,
            self._index,
            clock,
        )
        failed = FailedPutCleaner(root, self._containers, self._index, self.reserve)
        self._puts = LocalPuts(parts, self._verify_noted, self._repair_quarantined, failed)
        _STORES.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, the index, and cached data: some 200 MB.

        Waits for a GC step or a put of another thread; a GC run then continues, and takes the lock for its steps
        only. Ends an unfinished put_many of this thread: without the lock another process could collect the chunks
        that its uncommitted data depend on, so they will never be committed.
        """
        crossing, elsewhere = self._index.crossing, self._puts.is_written_by_other_process
        self._puts.abort_put_of_thread()
        wanted = crossing.exclusive(CLOSE_SECONDS, "the closing of the store") if elsewhere else crossing.shared()
        try:
            with wanted:
                self._index.close()
        except StoreLocked as err:  # a step, or a put, that takes long: the process is to end all the same
            _log.warning("%s; closed", err)
            self._index.close()
        self._puts.release_memory()
        self._containers.evict()
        self._containers.buffers.release_unused()

    def after_fork(self) -> None:
        """Reset in a forked process."""
        self._manifests.locks.after_fork()
        self._manifests.origins.after_fork()
        self._puts.after_fork()
        self._index.after_fork()

    def wait_for_lock(self, seconds: float) -> None:
        """Let writes wait up to `seconds` for another process; by default they do not."""
        self._index.lock_wait_seconds = seconds

    def _check_writable(self, operation: str) -> None:
        if self._is_read_only:
            raise BadInput(f"{operation}: store {self.root} was opened with read_only=True; open it without to write")

    # --- the store as a whole ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return statistics of the store with all tenants, from index and object store listing."""
        from nearkin_shared.stats import OtherObjects, stats

        quarantine_bytes = sum(self._quarantine.list_records().values()) + sum(
            ScrubStates(self._covered).list_records().values()
        )
        pending_delete_bytes = sum(self._condemned.list_records().values())
        covered = self._covered

        def sum_up_index(index: LmdbIndex) -> Stats:
            others = OtherObjects(
                chunking_record.descriptor_bytes(self._objects),
                pending_delete_bytes,
                parity_bytes=sum(size_bytes for _, size_bytes in self._objects.names("parity")),
                quarantine_bytes=quarantine_bytes + sum(self.pauses.list_records().values()),
                encryption_bytes=covered.encryption_bytes() if isinstance(covered, EncryptedObjectStore) else None,
                manifest_bytes=sum(size_bytes for _, size_bytes in covered.names("manifests")),
            )
            return stats(index, self._containers, others, self._index.bytes_on_disk)

        return self._index.read(sum_up_index)

    def tenant_stats(self) -> Stats:
        """Return statistics of the own tenant only, for callers that may not see other tenants.

        If the store has other tenants, a container counts for the tenant in its header; data that no tenant owns
        (index, parity, quarantine, records of GC) are omitted then.
        """
        from nearkin_shared.stats import OtherObjects, sum_up

        tenant = self.settings.tenant
        entries, found = self._index.read(lambda index: (list(index.catalogs()), list(index.containers())))
        if all(owner == tenant for owner, _ in entries):
            return self.stats()
        own = [summary for summary in found if self._owns(summary.container)]
        return sum_up(
            ((owner, entry) for owner, entry in entries if owner == tenant),
            own,
            sum(summary.container_bytes for summary in own),
            OtherObjects(chunking_record.descriptor_bytes(self._objects)),
            index_bytes=0,
        )

    def _owns(self, container: ContainerId) -> bool:
        try:
            return self._containers.of(None).directory(container).domain == self._fingerprinter.domain
        except (Corrupt, NotFound):  # its tenant is not known
            return False

    def verify(
        self,
        sample: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        seed: int = 0,
        since: datetime | None = None,
    ) -> VerifyReport:
        """Read containers and every manifest; report damage, with the versions that it affects.

        All containers are read, or a `sample` (a share between 0 and 1 of them, drawn by `seed`), or those written
        `since`; of the others only directories. If all are read, every entry of the index is compared with them too.
        A read-only store only reports damage.

        Broken chunks are withdrawn from the index, so that a later put of the same data stores them again; stored
        objects are not changed. Raises BadInput, StoreUnavailable.
        """
        from nearkin_maintenance import VerifyScope

        return self._verified(
            VerifyScope(sample, seed, None if since is None else int(since.timestamp() * 1e6)), progress
        )

    def verify_key(
        self, key: str, version: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Read one or all versions of `key` and their containers; report their damage.

        Deleted versions are not read. Broken chunks are withdrawn from the index, as after `verify`. Raises NotFound,
        BadInput, Corrupt, TenantErased, StoreUnavailable.
        """
        check_key(key)
        if version is not None:
            check_version(version)
        tenant = self.settings.tenant
        check_tenant(self._covered, tenant)
        histories = self._manifests.histories(tenant, key)
        hidden = {number for number, history in histories.items() if history.sequence % 2}
        listed = {number for number, history in histories.items() if history.committed}
        numbers = sorted((listed | set(self._index.numbers(tenant, key))) - hidden)
        if version is not None:
            numbers = [number for number in numbers if number == version]
        if not numbers:
            named = f"key {key!r}" if version is None else f"key {key!r} version {version}"
            raise NotFound(f"{named}: the store has none; `nearkin ls --versions` lists them")
        verifier = self._verifier()
        names = [manifest_name(tenant, key, number) for number in numbers]
        with all_cores("nearkin-verify") as helpers:
            report = verifier.run_versions(names, progress, helpers=helpers)
        return self._with_index_purged(verifier, report, everything=False)

    def _verifier(self) -> Verifier:
        from nearkin_maintenance import IndexedVersions, Verifier

        entries = {
            manifest_name(tenant, entry.key, entry.version): (tenant, entry)
            for tenant, entry in self._index.listed_versions()
        }
        indexed = IndexedVersions(
            {name: (tenant, entry.key, entry.version) for name, (tenant, entry) in entries.items()},
            self._index.lists,
            lambda: (self._index.to_check() or (None, False))[1],
        )
        verifier = Verifier(
            self._containers,
            self._manifests,
            self._fingerprinters,
            self.settings.tenant,
            indexed,
            self._condemned,
            self._quarantine,
            self._covered,
        )
        verifier.compare_entries({name: entry.listed for name, (_, entry) in entries.items()})
        return verifier

    def _verified(self, choice: VerifyScope, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        note = not self._is_read_only
        structure_damage = self._index.find_structure_damage(note=note) if choice.is_full else None
        verifier = self._verifier()
        index, whole = self._index.to_check() or (None, False)
        unreadable = self._index.damage or structure_damage
        with all_cores("nearkin-verify") as helpers:
            report = verifier.run(choice, progress, index, index_whole=whole, helpers=helpers)
        if unreadable is not None and choice.is_full:
            report = replace(report, damage=(*report.damage, Damage("index", unreadable, ())))
        return self._with_index_purged(verifier, report, everything=choice.is_full)

    def _with_index_purged(self, verifier: Verifier, report: VerifyReport, *, everything: bool) -> VerifyReport:
        """Quarantine broken chunks, withdraw them from the index, complete the report."""
        if self._is_read_only or (not verifier.broken and not self._quarantine.list_records()):
            return report

        def quarantined() -> CorruptChunks:
            unsound = verifier.corrupt_chunks()
            self._quarantine.note(unsound.chunks, unsound.segments, everything=everything)
            return unsound

        forgotten = self._index.withdraw(quarantined)
        self._containers.evict()  # a damaged block that is still in memory would become a base
        if not forgotten:
            damaged = [id_of(damage.object_name) for damage in report.damage]
            self.damage_notes.add([container for container in damaged if container is not None])
        return replace(report, forgotten=forgotten) if verifier.broken else report

    def _verify_noted(self) -> None:
        """Verify containers with noted damage, so that no put deduplicates into broken chunks."""
        noted = self.damage_notes.read()
        if not noted:
            return
        from nearkin_maintenance import VerifyScope

        _log.warning("containers in which damage was found are verified before the put: %d", len(noted))
        report = self._verified(VerifyScope(only=noted))
        if report.forgotten is not False:
            self.damage_notes.remove(noted)

    def scrubber(self) -> Scrubber:
        """Return what reads all of this store again and again, by its settings `scrub`."""
        from nearkin_maintenance import DomainOwners, Scrubber

        tenants = partial(DomainOwners, self._fingerprinters, [self.settings.tenant])
        return Scrubber(
            self._covered, self._containers, tenants, self._fingerprinter, lambda: self.settings.scrub, self._clock
        )

    def attend(self, step: ScrubStep) -> tuple[tuple[Repaired, ...], tuple[Damage, ...]]:
        """Repair damage that a scrub step found, from parity and later puts; quarantine the rest.

        Returns the repairs, and the remaining damage with the versions that it affects. Raises StoreLocked,
        StoreUnavailable.
        """
        self._check_writable("attend")
        with self._index.crossing.shared():
            return self._repairs().attend(step.damaged, self._verified)

    def repair(
        self, files: Sequence[str | Path] = (), progress: Callable[[int, int], None] | None = None
    ) -> RepairReport:
        """Verify all, and repair damage; the rest remains in quarantine.

        Sources are parity; `files`, which are copies of objects or content that was put once; and chunks with the
        same fingerprint in the store. Puts are excluded: they repair too after their commit, and both would write the
        same next generation. `progress` is called with the state of the verification. Raises BadInput, StoreLocked,
        StoreUnavailable.
        """
        self._check_writable("repair")
        if self._puts.is_put_of_thread:
            raise self._puts.is_put_in_progress()
        with self._index.crossing.exclusive(WRITER_LOCK_TIMEOUT_SECONDS, "a repair"):
            return self._repairs(progress).run([Path(file) for file in files])

    def _container_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._containers.ids())

    def _repair_quarantined(self) -> None:
        """Repair quarantined containers from committed data; failures are logged."""
        self.reserve.restore(self._container_bytes)
        try:
            if self._quarantine.list_records():
                self._repairs().repair_quarantined()
        except NearkinError as err:
            _log.warning("quarantined containers were not repaired, run `nearkin repair`: %s", err)

    def _repairs(self, progress: Callable[[int, int], None] | None = None) -> LocalRepair:
        from nearkin.local.local_repair import LocalRepair

        return LocalRepair(
            self.settings,
            self._covered,
            self._containers,
            self._manifests,
            self._index,
            self._quarantine,
            self._fingerprinters,
            partial(self.verify, None, progress),
        )

    def gc(
        self,
        *,
        dry_run: bool = False,
        deleted_too: bool = False,
        wait_seconds: float = 0.0,
        go_on: Callable[[], None] = lambda: None,
        steps: Callable[[int, int, str], None] | None = None,
    ) -> GcReport:
        """Run GC for all tenants; with `dry_run` report its effects and change nothing.

        `deleted_too`, for a dry run only: as if no deleted version could be undeleted any more.

        Puts, deletions and restores continue meanwhile, in this process and others: each effect of the run is an
        exclusive section of some 0.1 s, for which puts wait. The run waits for a put at its beginning up to
        `wait_seconds`, and for an exclusive section up to 60 s or as long. `go_on` is called before each container is
        written or removed, and stops the run by raising. `steps` is called with the steps done, all steps, and their
        kind.

        Data that the run finds unreachable become pending delete; a later run frees them after `gc.grace_seconds`.
        Versions that can no longer be undeleted are removed at once. Finally versions that `retention.policies` do
        not keep are deleted. Raises Corrupt (a needed object cannot be read: nothing is marked for deletion),
        GcPaused, StoreLocked, StoreUnavailable, RetryableError (a tenant was erased meanwhile).
        """
        collection = self._collection()
        if deleted_too and not dry_run:
            raise BadInput("deleted_too: allowed for a dry run only; add dry_run")
        if dry_run:
            return collection.preview(steps, deleted_too=deleted_too)
        self._check_writable("gc")
        if not wait_seconds:
            self._puts.check_none()
        try:
            report = self.reserve.run(lambda: collection.run(wait_seconds, go_on, steps))
        finally:
            self._puts.limit_memory_for_reading()
            give_back_free()
        self._finish_erasures()
        self.reserve.restore(self._container_bytes, grow=True)
        return report

    def _finish_erasures(self) -> None:
        """Rebuild an index that may hold data of erased tenants, then end the erasures.

        1 the objects are removed  2 the index is rebuilt  3 the erasure is recorded as swept. Each GC run does the
        remaining steps; while a put of this process is active, step 2 waits for the next run.
        """
        if not isinstance(self._covered, EncryptedObjectStore) or not self._covered.keyring.list_due():
            return
        failpoint("erasure.objects-removed")  # 1
        try:
            if self._index.holds_erased_tenants():
                _log.info("gc: the index is made again, without what it held of erased tenants")
                self._rebuild_index()  # 2
            failpoint("erasure.index-renewed")
            self._covered.confirm_swept()  # 3
        except (StoreLocked, BadInput) as err:
            _log.warning("gc: the index still holds names and digests of erased tenants until the next run: %s", err)

    def _collection(self) -> LocalGc:
        from nearkin.local.local_gc import LocalGc

        return LocalGc(
            self.root,
            self.settings,
            self._containers,
            self._manifests,
            self._condemned,
            self._index,
            self._deletions,
            self._fingerprinters,
            self._clock,
            self.pauses,
            self._puts.limit_memory_for_gc,
            self.reserve.release,
        )

    def erase_tenant(
        self, tenant: str, grace_seconds: int = ERASE_GRACE_SECONDS, *, despite_retention: bool = False
    ) -> int:
        """Erase a tenant's data keys, so that its data are unreadable; return how many.

        The tenant is closed at once; its keys are removed by the first `gc` after `grace_seconds` (0: now). Until then
        `keyring.cancel_erasure` opens it again. Other tenants are not affected. `gc` frees the bytes. A repeat
        completes an interrupted erasure; a tenant without keys can never have one in this store afterwards. Raises
        BadInput (the store is not encrypted), RetentionActive (some of its versions are retained; `despite_retention`
        erases them all the same), StoreLocked, StoreUnavailable.
        """
        self._check_writable("erase_tenant")
        if not isinstance(self._covered, EncryptedObjectStore):
            raise BadInput(f"store {self.root}: is not encrypted: delete the tenant's keys, and let `gc` free them")
        self._puts.check_none()
        from nearkin_maintenance.gc.erased_tenants import withdraw_erased
        from nearkin_maintenance.gc.tenant_erasure import find_retained

        with self._index.crossing.shared():
            index = self._index.writable()
            if not despite_retention:
                find_retained(self._covered, tenant, self.settings, self._clock()).check_none(tenant)
            count = self._covered.keyring.erase(tenant, grace_seconds)
            withdraw_erased(self._covered, index, tenant)
            self._containers.evict()
        return count

    @property
    def index_folder(self) -> Path:
        """Return where the index is: in the store's folder, or below `index.path`."""
        return self._index.folder

    @property
    def keyring(self) -> Keyring:
        """Return the data keys of an encrypted store. Raises BadInput for another."""
        if not isinstance(self._covered, EncryptedObjectStore):
            raise BadInput(f"store {self.root}: is not encrypted (storage.encryption)")
        return self._covered.keyring

    def gc_state(self) -> GcState:
        """Return whether GC is paused, and the data pending delete. Raises StoreUnavailable."""
        pause, condemned = self.pauses.read(), self._condemned.read()
        at_us = min((entry.at_us for entry in condemned.values()), default=None)
        due = None if at_us is None else min(at_us / 1e6 + self.settings.gc.grace_seconds, CREATED_US_MAX // 1_000_000)
        return GcState(
            None if pause is None else moment_of(pause.at_us),
            "" if pause is None else pause.who,
            len(condemned),
            None if due is None else datetime.fromtimestamp(due, UTC),
        )

    def rebuild_index(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Replace the index by one made from containers and manifests alone, all tenants' alike.

        Versions that were lost are given up: GC frees their data. Nothing is put or deleted meanwhile. Raises
        StoreLocked, StoreUnavailable.
        """
        return self._rebuild_index(progress, accept_loss=True)

    def _rebuild_index(
        self, progress: Callable[[int, int], None] | None = None, *, accept_loss: bool = False
    ) -> RebuildReport:
        self._check_writable("rebuild_index")
        self._puts.check_none()
        with self._index.crossing.exclusive(WRITER_LOCK_TIMEOUT_SECONDS, "a rebuild of the index"):
            report = self._index.rebuild(progress)
            if accept_loss:
                self._heads.accept(self._manifests)
            return report


def _after_fork() -> None:
    for store in list(_STORES):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
