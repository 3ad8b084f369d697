"""Provide the index of a local store to puts, GC runs, deletions, listings and repair.

a writer died -> completed      damage found -> broken entries withdrawn

Invariant: no reader keeps another process from writing. Threads of one Store write and list concurrently: a reader
whose index is replaced repeats its query.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nearkin.local.index_holder import IndexHolder
from nearkin.local.index_location import IndexLocation
from nearkin.local.index_recovery import erasures_of
from nearkin.local.index_states import IndexBacklog, IndexEvent, LockState, NotesState
from nearkin.local.process_lock import GC_RUN
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import (
    FormatTooNew,
    IndexClosed,
    IndexDamaged,
    IndexStale,
    IndexUnfinished,
    IndexUnsafe,
    NearkinError,
    NoRoom,
    NotWritable,
    StoreLocked,
    StoreUnavailable,
)
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.deletions import DeletionObserver
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, ContainerId

if TYPE_CHECKING:  # a get needs no index
    from nearkin_maintenance import CorruptChunks
    from nearkin_shared.index.catalog import CatalogEntry
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
    from nearkin_shared.index.lmdb.lmdb_removal import RemovalLookup

Answer = TypeVar("Answer")
_log = logging.getLogger("nearkin")
WRITER_LOCK_TIMEOUT_SECONDS = 10.0
"""Minimum wait for the writer lock in an exclusive section. Puts are checked beforehand; other writers are short."""
WITHDRAWAL = "forgetting what is broken"
"""Purpose of the lock, which other processes show; older ones know this one."""
READ_TRIES_MAX = 8
"""Each try after the first means that the index was replaced within milliseconds."""
YIELD_SECONDS = 0.02
"""Time for which a GC step lets waiting writers run first."""


class LocalIndex(IndexHolder, DeletionObserver):
    """Index of one store for puts, GC runs, deletions, listings, verification and repair."""

    def __init__(
        self,
        location: IndexLocation,
        raw: LocalObjectStore,
        objects: ObjectStore,
        settings: Settings,
        fingerprinter: Callable[[str], Fingerprinter],
        containers: ContainerStore,
        manifests: ManifestStore,
    ) -> None:
        super().__init__(location, raw, objects, settings, fingerprinter, containers, manifests)
        self._tenant = settings.tenant
        self._objects = objects
        self._withdrawals = 0
        """Number of withdrawals in progress."""
        self._restating = threading.Lock()
        """Held while notes of tombstones are corrected, from reading the tombstones on."""
        self._restated = 0
        """Number of these corrections."""
        self.damage: str | None = None
        """Why the index could not be read when `listed_versions` was called last."""
        self._puts = 0
        """Number of puts that have begun."""

    def after_fork(self) -> None:
        """Reset in a forked process: the open index and the lock belong to its parent."""
        super().after_fork()
        self._restating = threading.Lock()
        self._withdrawals = 0

    def on_put_start(self) -> LmdbIndex:
        """Return the complete index for a put, and mark it as behind until all is published.

        Raises TenantCollision too, before any object is stored.
        """
        with self._changing:
            index = self.writable()
            index.check_owner(self._tenant)
            self._puts += 1
            self._states.apply(IndexEvent.PUT_STARTED)
            return index

    def on_put_published(self) -> None:
        """Record that the index has all data of the put in progress."""
        self._states.apply(IndexEvent.PUT_PUBLISHED)

    def on_put_end(self) -> None:
        """Record that no put is in progress; the index is behind if one failed."""
        self._states.apply(IndexEvent.PUT_ENDED)

    @property
    def gc_folder(self) -> Path:
        """Return where a collector may keep counts that are made again with the index."""
        return self.folder / "gc"

    @contextmanager
    def exclusive(self, wait_seconds: float) -> Iterator[LmdbIndex]:
        """Hold the lock for a GC step, and give the index, whole; wait so long for who writes.

        No process else writes meanwhile, here or elsewhere. Raises StoreLocked, StoreUnavailable, FormatTooNew.
        """
        with self.crossing.exclusive(max(wait_seconds, WRITER_LOCK_TIMEOUT_SECONDS)):
            if self._states.is_locked:  # it is this Store's, and stays so
                yield self.writable()
                return
            began = time.monotonic()
            while self._location.is_wanted and time.monotonic() - began < wait_seconds:  # waiting writers go first
                time.sleep(YIELD_SECONDS)
            self._take_lock(IndexEvent.STEP_LOCKED, GC_RUN, wait_seconds)
            try:
                index = self._opened()
                if index.has_pending_updates:  # its writer died: the lock was free
                    self._recovery.correct_marks(index)
                    self._recovery.catch_up(index)
                    index.set_pending_updates(False)
                self._claim(index)
                yield index
                if self._states.is_step:
                    self._location.replace_token(index)  # for copies of the store that were made meanwhile
                    if self._states.lock is LockState.STEP_NOTED and self._states.notes is NotesState.CURRENT:
                        index.set_pending_updates(False)
            finally:
                if self._states.is_step:
                    self._release_lock(IndexEvent.UNLOCKED)

    def state(self) -> object:
        """Return a token that changes after any write: writers update the index first."""
        index = self._index
        try:
            return object() if index is None or not self._is_current(index) else index.last_written
        except IndexClosed:  # by another thread, just now
            return object()

    def look_up(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> RemovalLookup | None:
        """Find the entries to remove in a later exclusive section, concurrently with writers.

        None if they were not looked up.
        """
        index = self._index
        try:
            return index.look_up(chunks, segments) if index is not None and self._is_current(index) else None
        except IndexClosed:
            return None

    def noting(self) -> LmdbIndex:
        """Return the index for a note, concurrently with a put of this process.

        Raises as `writable` does.
        """
        index, states = self._index, self._states
        if index is not None and not index.read_only:
            if states.lock is LockState.CLAIMED:  # not one that is only being recovered
                return index
            if states.is_step and self.crossing.is_exclusive_here:
                index.set_pending_updates(True)
                states.apply(IndexEvent.NOTED)
                return index
        with self.crossing.shared():
            return self.writable()

    def rollback_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Replace the notes of a deletion that failed by the tombstones that exist.

        If that fails too, the next process that opens the index corrects them.
        """
        index, states = self._index, self._states
        has_notes = states.is_writing or (states.is_locked and self.crossing.is_exclusive_here)
        if index is None or index.read_only or not has_notes:
            return
        try:
            with self._restating:
                self._restated += 1
                index.correct_marks(self._recovery.marks_of(tenant, key, versions))
        except NearkinError:
            states.apply(IndexEvent.CORRECTION_FAILED)

    def note_corrections(self) -> int:
        """Return how often notes of tombstones were corrected.

        A tombstone that is not written yet may have been among them.
        """
        with self._restating:
            return self._restated

    def outside_gc_step(self) -> AbstractContextManager[None]:
        """Exclude GC steps of this process; wait for a running one that is not the caller's."""
        return self.crossing.shared()

    def correct_collected_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Correct the notes of versions that a GC run has collected since they were noted.

        Waits for the end of a GC step. Raises as `writable` does.
        """
        with self.crossing.shared():
            index = self.noting()
            with self._restating:
                self._restated += 1
                index.correct_marks(self._recovery.marks_of(tenant, key, versions, collected_alone=True))

    def readable(self) -> LmdbIndex:
        """Return the index for reading, recovered first unless a writer is active.

        A process that may not write the index or take the lock, or has no room for the recovery, gets a temporary
        index.
        """
        try:
            try:
                return self._own_readable()
            except IndexUnsafe:  # marked as damaged by now: it is set aside and rebuilt
                return self._own_readable()
        except (NotWritable, NoRoom) as err:
            return self._temporary.get(err)

    def _own_readable(self) -> LmdbIndex:
        """Return the store's own index for reading. Raises NotWritable."""
        index = self._cached_index()
        if index is not None and self._states.backlog is IndexBacklog.BEHIND:
            # A put failed, and may still have committed: its listing must not lag behind what a get answers.
            with suppress(StoreLocked, StoreUnavailable), self.crossing.shared():
                return self.writable()
        if index is not None:
            return index
        if self._files.are_missing:
            self._recover_or_skip(shared=self._location.is_external)
        try:
            index = self._files.open(read_only=True)
        except (IndexUnfinished, IndexUnsafe, IndexStale) as err:
            self._recover_or_skip(shared=isinstance(err, IndexStale))
            index = self._files.open(read_only=True)
        if not index.complete or index.has_pending_updates:
            index.close()
            try:
                self._recover()
            except NotWritable:
                raise
            except (StoreLocked, StoreUnavailable):  # a writer is active: the index has what it committed
                index = self._files.open(read_only=True)
                if not index.complete:
                    index.close()
                    raise
            else:
                index = self._files.open(read_only=True)
        return self._kept(index)

    def _recover_or_skip(self, *, shared: bool) -> None:
        """Recover the index. Raises NotWritable if a writer has another index (`shared`)."""
        try:
            self._recover()
        except StoreLocked as err:
            if not shared:
                raise
            raise NotWritable(f"index {self.folder} lacks what another machine stores: {err}") from err

    def read(self, ask: Callable[[LmdbIndex], Answer]) -> Answer:
        """Return the result of `ask` for the reading index; repeat it if the index was replaced."""
        for _ in range(READ_TRIES_MAX):
            with suppress(IndexClosed):
                return ask(self.readable())
        raise IndexClosed(f"index {self.folder}: was closed {READ_TRIES_MAX} times while it was read; try again")

    def listed_versions(self) -> list[tuple[str, CatalogEntry]]:
        """Return (tenant, version) of all indexed versions; empty without an intact index.

        `verify` works without an index, and does not make one.
        """
        self.damage = None
        return self._query_if_intact(lambda index: list(index.catalogs()))

    def find_structure_damage(self, *, note: bool) -> str | None:
        """Return the damage in the structure of the index's file, or None.

        `note`: note it too, so that the next process that opens the index rebuilds it.
        """
        return self._files.find_damage(note=note)

    def numbers(self, tenant: str, key: str) -> list[int]:
        """Return the versions of a key, ascending, where there is a sound index; none is made."""
        return self._query_if_intact(lambda index: index.versions_of(tenant, key))

    def _query_if_intact(self, ask: Callable[[LmdbIndex], list[Answer]]) -> list[Answer]:
        """Return what the index answers, nothing where there is no sound one that may be read."""
        try:
            if self._cached_index() is None:
                if self._files.are_missing:
                    return []
                index = self._files.open(read_only=True)
                if not index.complete:
                    index.close()
                    return []
                self._kept(index)
            return self.read(ask)
        except IndexDamaged as err:
            self.damage = str(err)
            return []
        except (StoreUnavailable, StoreLocked, FormatTooNew):
            return []

    def lists(self, version: tuple[str, str, int]) -> bool | None:
        """Return whether the index lists a version; None without an intact open index."""
        if self.to_check() is None:
            return None
        tenant, key, number = version
        try:
            return self.read(lambda index: number in index.versions_of(tenant, key))
        except IndexDamaged as err:
            self.damage = str(err)
            return None

    def to_check(self) -> tuple[LmdbIndex, bool] | None:
        """Return the index of `listed_versions`, and whether it lists every committed version.

        None if it found no index.
        """
        index = self._index
        if index is None or not index.complete:
            return None
        return index, not (self._states.may_lack_data if self._states.is_locked else index.has_pending_updates)

    def holds_erased_tenants(self) -> bool:
        """Return whether free pages may hold what the index knew of tenants whose erasure is due."""
        due = erasures_of(self._objects, due=True)
        return bool(due) and not self.read(lambda index: due <= index.excluded)

    # --- after damage ------------------------------------------------------------------------------------------------

    def republish_containers(self, containers: Collection[int]) -> None:
        """Publish all chunks of containers that were broken or missing. The lock is held."""
        if not containers:
            return
        index, there = self.writable(), {container for container, _ in self._containers.ids()}
        if there.intersection(containers).issubset(index.container_ids().tolist()):
            self._recovery.republish_containers(index, containers)
        else:  # one was missing: the index has no summary of it
            self.rebuild()

    def relist_versions(self) -> None:
        """List versions whose manifests returned after the index was made. The lock is held."""
        self._recovery.catch_up(self.writable())

    def withdraw_missing(self, listed: Collection[ContainerId]) -> None:
        """Withdraw the entries of missing containers; `listed` are all that exist.

        The lock is held.
        """
        self._recovery.withdraw_missing(self.writable(), listed)

    def withdraw(self, unsound: Callable[[], CorruptChunks]) -> bool:
        """Withdraw broken chunks; return whether the index names none of them.

        `unsound` is called once the lock is held. False if a put is active here or elsewhere, or the index cannot be
        written.
        """
        with self.crossing.shared():
            puts, quiet = self._puts, not self._states.is_putting
            try:
                with self._lock_to_withdraw():
                    self._withdraw(unsound)
            except (StoreLocked, StoreUnavailable, FormatTooNew):
                return False
            # A put that was active meanwhile may depend on broken chunks and have published after the withdrawal.
            return quiet and puts == self._puts

    @contextmanager
    def _lock_to_withdraw(self) -> Iterator[None]:
        """Hold the lock; release it at the end if it was not held before and no put has started."""
        with self._changing:
            self._take_lock(IndexEvent.WITHDRAWAL_LOCKED, WITHDRAWAL)
            self._withdrawals += 1
        try:
            yield
        finally:
            with self._changing:
                self._withdrawals -= 1
                if self._states.lock is LockState.WITHDRAWING and not self._withdrawals:
                    self.close()

    def _withdraw(self, unsound: Callable[[], CorruptChunks]) -> None:
        found = unsound()
        if self._files.are_missing:
            return  # rebuilt by the next writer, without what is broken
        index = self._index
        if index is None or index.read_only:
            try:
                index = self._files.open(read_only=False)
            except IndexStale:
                return  # as above
        try:
            if index.complete:
                published = (
                    index.container_ids().tolist()
                )  # before the listing, so that new containers do not count as missing
                there = {container for container, _ in self._containers.ids()}
                missing = [container for container in published if container not in there]
                index.withdraw({**found.chunks, **dict.fromkeys(missing)}, found.segments, missing)
        finally:
            if index is not self._index:
                index.close()

    def _recover(self) -> None:
        """Recover the index, and release the lock: readers must not block writers.

        The lock is kept if this Store held it before: a put may be active.
        """
        with self.crossing.shared(), self._changing:
            before = self._states.lock
            if self._states.is_step:  # of this thread: the section began with a complete index
                return
            try:
                self._lock_complete()
            except StoreUnavailable as err:  # a folder that is read-only, a full disk
                missing = f"index of {self._root} is missing, unfinished or of an older state, and cannot be made"
                message = f"{missing}: {err} (get and verify need none)"
                raise (NoRoom(message, err.folder) if isinstance(err, NoRoom) else type(err)(message)) from err
            if before is LockState.UNLOCKED:
                self.close()
                return
            is_unchanged = before is LockState.WITHDRAWING and self._states.lock is LockState.ANNOUNCED
            if is_unchanged and self._end_announcement():  # else the lock is kept until `close`
                self._states.apply(IndexEvent.RECOVERED)
