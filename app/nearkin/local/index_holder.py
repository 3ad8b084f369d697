"""Hold the writer lock and the open index of a local store, and keep the index complete.

missing, older or incomplete -> rebuilt      a writer died -> completed

Invariant: a writer gets a complete index: it names every stored container and version. The lock is held from the
first write to `close`, or, by a GC run, for an exclusive section; index_states.py has the states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.local.index_files import IndexFiles, log_skipped
from nearkin.local.index_location import IndexLocation
from nearkin.local.index_recovery import IndexRecovery
from nearkin.local.index_states import IndexBacklog, IndexEvent, IndexStates, NotesState
from nearkin.local.process_lock import WRITING
from nearkin.local.temporary_index import TemporaryIndex
from nearkin.local.write_gate import WriteLatch
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import IndexClosed, IndexUnsafe, StoreUnavailable
from nearkin_shared.fingerprints import Fingerprinter
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.manifests import ManifestStore

if TYPE_CHECKING:  # a get needs no index
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

_log = logging.getLogger("nearkin")


class IndexHolder:
    """Writer lock and open index of one store."""

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
        self._location = location
        self._root = location.root
        self._containers = containers
        self._recovery = IndexRecovery(objects, containers, manifests, fingerprinter, settings.tenant)
        domain = fingerprinter(settings.tenant).domain
        self._files = IndexFiles(location, raw, objects, settings, domain, self._recovery, containers)
        self._temporary = TemporaryIndex(location.root, self._files.open_listing, self._recovery.fill_catalog)
        self.lock_wait_seconds: float = 0.0
        """Minimum time for which the store's lock is waited for."""
        self._states = IndexStates()
        self._changing = threading.RLock()
        """Held while the index or the lock is acquired or released. A thread that waits for the write latch does not
        hold it.
        """
        self._swapping = threading.Lock()
        """Held while one index replaces another; no thread waits while it holds it."""
        self.crossing: WriteLatch = WriteLatch(str(self._root))
        self._index: LmdbIndex | None = None

    def after_fork(self) -> None:
        """Reset in a forked process: the open index and the lock belong to its parent."""
        self._changing, self._swapping = threading.RLock(), threading.Lock()
        self.crossing = WriteLatch(str(self._root))
        self._index = None
        self._temporary.after_fork()
        self._states = IndexStates()

    def close(self) -> None:
        """Release the lock and the index."""
        self._temporary.close()
        with self._changing:
            if self._states.is_announced:
                self._end_announcement()
            self._replaced(None)
            self._release_lock(IndexEvent.CLOSED)

    def _end_announcement(self) -> bool:
        """Clear the record of pending updates if there are none; return whether it was cleared."""
        index, states = self._index, self._states
        if index is None or states.may_lack_data or states.notes is NotesState.UNCORRECTED:
            return False
        with suppress(StoreUnavailable):  # then the next writer looks for what is missing, and finds nothing
            if states.is_claimed:  # invalidates this index for copies of the store that were made while it was changed
                self._location.replace_token(index)
            index.set_pending_updates(False)
            return True
        return False

    @property
    def folder(self) -> Path:
        """Return the folder of the index."""
        return self._files.folder

    @property
    def bytes_on_disk(self) -> int:
        """Return the bytes that the index takes."""
        return self._files.bytes_on_disk

    def writable(self) -> LmdbIndex:
        """Take the lock and return the index, whole but for what a put at work adds to it itself.

        Raises StoreLocked, StoreUnavailable, FormatTooNew.
        """
        with self._changing:
            try:
                index = self._lock_complete()
            except IndexUnsafe:  # marked as damaged by now: it is set aside and rebuilt
                if self._states.is_putting:
                    raise
                index = self._lock_complete()
            self._claim(index)
            return index

    def _lock_complete(self) -> LmdbIndex:
        """Take the lock and return the index as `writable` does; the store is not to be changed."""
        self._take_lock(IndexEvent.WRITE_LOCKED, WRITING)
        index, states = self._opened(), self._states
        if not states.is_announced:
            if index.has_pending_updates:
                states.apply(IndexEvent.FOUND_PENDING)
                self._recovery.correct_marks(index)
            else:
                states.apply(IndexEvent.FOUND_COMPLETE)
                index.set_pending_updates(True)
            states.apply(IndexEvent.ANNOUNCED)
        if states.backlog is IndexBacklog.BEHIND:
            self._recovery.catch_up(index)
            states.apply(IndexEvent.CAUGHT_UP)
        return index

    def _claim(self, index: LmdbIndex) -> None:
        """Invalidate all other indexes before the first change under this lock."""
        if not self._states.is_claimed:
            self._location.replace_token(index)
            self._check_locked()
            self._states.apply(IndexEvent.CLAIMED)

    def _check_locked(self) -> None:
        """Raise IndexClosed if another thread closed the store during a long call."""
        if not self._states.is_locked:
            raise IndexClosed(f"index {self.folder}: the store was closed during the call; run the same again")

    @property
    def has_exclusive_lock(self) -> bool:
        """Return whether this Store holds the lock from its first put to its close.

        Then no other process writes.
        """
        return self._states.is_writing

    def rebuild(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Rebuild the index from containers and manifests only.

        No put may be active: the new index would lack its data.
        """
        with self._changing:
            if not self._states.is_step:
                self._take_lock(IndexEvent.WRITE_LOCKED, WRITING)
        report, token = self._files.build(progress, renew_token=self._states.is_claimed)
        with self._changing:
            self._check_locked()
            self._replaced(None)
            self._states.apply(IndexEvent.REBUILT)
            self._files.install(token)
        return report

    def _take_lock(self, event: IndexEvent, purpose: str, wait_seconds: float = 0.0) -> None:
        """Take the lock for `purpose`, which other processes read, unless this Store holds it."""
        is_held = self._states.is_locked
        if not is_held:
            self._location.acquire(max(wait_seconds, self.lock_wait_seconds), purpose)
        self._states.apply(event)
        if is_held:
            return
        if not self._states.is_step:
            try:
                self._files.tidy()
            except BaseException:
                self._release_lock(IndexEvent.UNLOCKED)
                raise
        self._containers.evict()  # containers may have been removed meanwhile

    def _release_lock(self, event: IndexEvent) -> None:
        is_held = self._states.is_locked
        self._states.apply(event)
        if is_held:
            self._location.release()

    def _opened(self) -> LmdbIndex:
        """Return the index for writing, whole but for what a put adds itself: the lock is held."""
        index = self._index
        if index is not None and (index.read_only or not (self._states.is_putting or self._is_current(index))):
            self._replaced(None)
            index = None
        if index is None:
            found = self._files.open_complete()
            index = self._rebuilt(found) if isinstance(found, str) else found
            try:
                self._check_locked()
                self._states.apply(IndexEvent.OPENED)
            except BaseException:
                index.close()
                raise
            self._replaced(index)
        return index

    def _rebuilt(self, reason: str) -> LmdbIndex:
        started = time.perf_counter()
        _log.warning("index of %s %s: rebuilding it from containers and manifests", self._root, reason)
        report = self.rebuild()
        _log.warning("index rebuilt in %.1f s", time.perf_counter() - started)
        log_skipped(report)
        return self._files.open(read_only=False)

    def _is_current(self, index: LmdbIndex) -> bool:
        """Return whether an open index is the one in its folder and matches the store's state."""
        return index.current and self._location.matches(index)

    def _cached_index(self) -> LmdbIndex | None:
        """Return the open index unless it was replaced in its folder; a writer's own is current."""
        index = self._index  # without the lock, whose holder may wait for another process
        try:
            return index if index is not None and (self._states.is_locked or self._is_current(index)) else None
        except IndexClosed:  # by another thread, just now
            return None

    def _kept(self, index: LmdbIndex) -> LmdbIndex:
        """Return an index for reading that others may use too, or the one that they have by now."""
        with self._swapping:
            there = self._cached_index()
            unused = self._index if there is None else index
            if there is None:
                self._index = index
        if unused is not None and unused is not there:
            unused.close()
        return there or index

    def _replaced(self, index: LmdbIndex | None) -> None:
        """Use a new index instead of the previous one, whose readers repeat their queries."""
        with self._swapping:
            before, self._index = self._index, index
        if before is not None:
            before.close()
