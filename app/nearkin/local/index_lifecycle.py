# size: the flags of one lock and one index stay together until they are an explicit state machine
"""Manage the index of a local store: open, recover, rebuild, lock.

missing, older or incomplete -> rebuilt      a writer died -> completed      damage found -> broken entries withdrawn

Invariant: a writer gets a complete index: it names every stored container and version.
The store's lock is held from the first write to `close`, or, by a GC run, for an exclusive section. Threads of one
Store
write and list concurrently: a reader whose index is replaced repeats its query.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nearkin.local.index_location import IndexLocation
from nearkin.local.index_recovery import IndexRecovery, erasures_of
from nearkin.local.process_lock import GC_RUN, WRITING
from nearkin.local.temporary_index import TemporaryIndex
from nearkin.local.write_gate import WriteLatch
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
from nearkin_shared.index.lmdb.page_check import find_page_damage
from nearkin_shared.index.lmdb.session_notes import write_damage_note
from nearkin_shared.objectstore.base import LocalObjectStore, ObjectStore, sync_folder
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.deletions import DeletionObserver
from nearkin_shared.storage.manifests import ManifestStore
from nearkin_shared.types import U32, ContainerId
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.mounts import network_type
from nearkin_shared.utils.private_files import remove_tree, tighten_modes
from nearkin_shared.utils.signals import interrupts_wait

if TYPE_CHECKING:  # a get needs no index
    from nearkin_maintenance import CorruptChunks
    from nearkin_shared.index.catalog import CatalogEntry
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
    from nearkin_shared.index.lmdb.lmdb_removal import RemovalLookup
    from nearkin_shared.index.lmdb.version_entries import EntryNames

Answer = TypeVar("Answer")
_log = logging.getLogger("nearkin")
WRITER_LOCK_TIMEOUT_SECONDS = 10.0
"""Minimum wait for the writer lock in an exclusive section. Puts are checked beforehand; other writers are short."""
FORGETTING = "forgetting what is broken"
REBUILD_MISSING = "is missing or unfinished"
REBUILD_OUTDATED = (
    "was made by an older version of Nearkin, or under other keys (older ones may hold memory of the process and, of "
    "an encrypted store, key names in clear)"
)
REBUILD_STALE = (
    "has an older state of the store (another machine wrote it since, or the store is a copy or was restored from one)"
)
SKIPPED_NAMED = 5
"""So many objects that an index rebuilt lacks are named, where no process asked for it."""
READ_TRIES_MAX = 8
"""Each try after the first means that the index was replaced within milliseconds."""
_CHECKED_FOLDERS: set[Path] = set()
"""Folders of indexes whose filesystem this process has looked at."""
YIELD_SECONDS = 0.02
"""Time for which a GC step lets waiting writers run first."""


class LocalIndex(DeletionObserver):
    """Open, recover and rebuild the index of one store; hold the writer lock while needed."""

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
        root = self._root = location.root
        self._folder = location.folder
        self._raw = raw
        self._map_bytes = int(settings.index.map_bytes)
        self._names = entry_names_of(objects)
        self._tenant, self._domain = settings.tenant, fingerprinter(settings.tenant).domain
        self._containers = containers
        self._manifests = manifests
        self._objects = objects
        self._mending = IndexRecovery(objects, containers, manifests, fingerprinter, settings.tenant)
        self._temporary = TemporaryIndex(root, self._open_temporary, self._mending.fill_catalog)
        self.lock_wait_seconds = 0.0
        """At least this long the store's lock is waited for."""
        self._held = ""
        """Purpose of the lock: WRITING (until `close`), ROUND (one exclusive section) or FORGETTING (until withdrawal
        ends).
        One word, so that it can be read without a lock.
        """
        self._changing = threading.RLock()
        """Held while the index or the lock is acquired or released. A thread that waits for the write latch does not
        hold it.
        """
        self._swapping = threading.Lock()
        """Held while one index replaces another; no thread waits while it holds it."""
        self._forgetting = 0
        """How many do."""
        self._claimed = False
        """Whether the store has a new token since this Store took the lock: it may be changed."""
        self._noted = False
        """Whether the index records pending updates because of a note in that section."""
        self._said = False
        """Whether the index records, because of this Store, that the store may hold more than it."""
        self._restating = threading.Lock()
        """Held while notes of tombstones are corrected, from reading the tombstones on."""
        self._restated = 0
        """How often they were."""
        self._in_vain = False
        """Whether notes of failed deletions could not be corrected."""
        self.damage: str | None = None
        """Why the index could not be read when `listed_versions` was asked last."""
        self.crossing = WriteLatch(str(root))
        self._index: LmdbIndex | None = None
        self._rebuild_reason = REBUILD_MISSING
        """Why the index is to be rebuilt."""
        self.putting = False
        """Whether a put is at work, and adds to the index itself."""
        self._puts = 0
        """How many have begun."""
        self.behind = False
        """Whether the store may hold more than the index: set while a put is at work, left set where one failed."""

    def after_fork(self) -> None:
        """Reset in a forked process: the open index and the lock belong to its parent."""
        self._changing, self._swapping, self._restating = threading.RLock(), threading.Lock(), threading.Lock()
        self.crossing = WriteLatch(str(self._root))
        self._index = None
        self._temporary.after_fork()
        self._held, self._forgetting = "", 0
        self._said = self._claimed = self._noted = self._in_vain = self.putting = self.behind = False

    def close(self) -> None:
        """Release the lock and the index."""
        self._temporary.close()
        with self._changing:
            index = self._index
            if index is not None and self._held and self._said and not (self.behind or self._in_vain):
                with suppress(StoreUnavailable):  # then the next writer looks for what is missing, and finds nothing
                    self._end_claim(index)
                    index.set_pending_updates(False)
            self._replaced(None)
            self._said = self._in_vain = False
            self._release_lock()

    def on_put_start(self) -> LmdbIndex:
        """Return the complete index for a put, and mark it as behind until all is published.

        Raises TenantCollision too, before any object is stored.
        """
        with self._changing:
            index = self.writable()
            index.check_owner(self._tenant)
            self._puts += 1
            self.putting = self.behind = True
            return index

    def on_put_end(self) -> None:
        """Say that no put is at work any more; the index is behind where one failed."""
        self.putting = False

    @property
    def folder(self) -> Path:
        """Return the folder of the index."""
        return self._folder

    @property
    def gc_folder(self) -> Path:
        """Return where a collector may keep counts that are made again with the index."""
        return self._folder / "gc"

    @property
    def bytes_on_disk(self) -> int:
        """Return what the index takes; LMDB's file is sparse."""
        return sum(entry.stat().st_blocks * 512 for entry in self._folder.rglob("*") if entry.is_file())

    def writable(self) -> LmdbIndex:
        """Take the lock and return the index, whole but for what a put at work adds to it itself.

        Raises StoreLocked, StoreUnavailable, FormatTooNew.
        """
        with self._changing:
            try:
                index = self._lock_complete()
            except IndexUnsafe:  # marked as damaged by now: it is set aside and rebuilt
                if self.putting:
                    raise
                index = self._lock_complete()
            self._claim(index)
            return index

    def _lock_complete(self) -> LmdbIndex:
        """Take the lock and return the index as `writable` does; the store is not to be changed."""
        self._take_lock()
        self._held = WRITING
        index = self._opened()
        if not self._said:
            self.behind = index.has_pending_updates
            if self.behind:
                self._mending.correct_marks(index)
            else:
                index.set_pending_updates(True)
            self._said = True
        if self.behind and not self.putting:
            self._mending.catch_up(index)
            self.behind = False
        return index

    def _claim(self, index: LmdbIndex) -> None:
        """Invalidate all other indexes before the first change under this lock."""
        if not self._claimed:
            self._location.replace_token(index)
            self._claimed = True

    def _end_claim(self, index: LmdbIndex) -> None:
        """Invalidate this index for copies of the store that were made while it was changed."""
        if self._claimed:
            self._location.replace_token(index)
            self._claimed = False

    @property
    def has_exclusive_lock(self) -> bool:
        """Return whether this Store holds the lock from its first put to its close.

        Then no other process writes.
        """
        return self._held == WRITING

    @contextmanager
    def exclusive(self, wait_seconds: float) -> Iterator[LmdbIndex]:
        """Hold the lock for a GC step, and give the index, whole; wait so long for who writes.

        No process else writes meanwhile, here or elsewhere. Raises StoreLocked, StoreUnavailable, FormatTooNew.
        """
        with self.crossing.exclusive(max(wait_seconds, WRITER_LOCK_TIMEOUT_SECONDS)):
            if self._held:  # it is this Store's, and stays so
                yield self.writable()
                return
            began = time.monotonic()
            while self._location.is_wanted and time.monotonic() - began < wait_seconds:  # waiting writers go first
                time.sleep(YIELD_SECONDS)
            self._take_lock(wait_seconds, GC_RUN)
            try:
                index = self._opened()
                if index.has_pending_updates:  # its writer died: the lock was free
                    self._mending.correct_marks(index)
                    self._mending.catch_up(index)
                    index.set_pending_updates(False)
                self._claim(index)
                yield index
                self._end_claim(index)
                if self._noted and not self._in_vain:
                    index.set_pending_updates(False)
            finally:
                self._noted = False
                if self._held == GC_RUN:
                    self._release_lock()

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
        index, held = self._index, self._held
        if index is not None and not index.read_only and held:
            if held == WRITING and self._claimed:  # not one that is only being recovered
                return index
            if held != WRITING and self.crossing.is_exclusive_here:
                index.set_pending_updates(True)
                self._noted = True
                return index
        with self.crossing.shared():
            return self.writable()

    def rollback_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Replace the notes of a deletion that failed by the tombstones that exist.

        If that fails too, the next process that opens the index corrects them.
        """
        index, held = self._index, self._held
        if index is None or index.read_only or not (held == WRITING or (held and self.crossing.is_exclusive_here)):
            return  # then nothing was noted
        try:
            with self._restating:
                self._restated += 1
                index.correct_marks(self._mending.marks_of(tenant, key, versions))
        except NearkinError:
            self._in_vain = True

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
                index.correct_marks(self._mending.marks_of(tenant, key, versions, collected_alone=True))

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
        if index is not None and self.behind and not self.putting:
            # A put failed, and may still have committed: its listing must not lag behind what a get answers.
            with suppress(StoreLocked, StoreUnavailable), self.crossing.shared():
                return self.writable()
        if index is not None:
            return index
        if not (self._folder / "data.mdb").is_file():
            self._recover_or_skip(shared=self._location.is_external)
        try:
            index = self._open(read_only=True)
        except (IndexUnfinished, IndexUnsafe, IndexStale) as err:
            self._recover_or_skip(shared=isinstance(err, IndexStale))
            index = self._open(read_only=True)
        if not index.complete or index.has_pending_updates:
            index.close()
            try:
                self._recover()
            except NotWritable:
                raise
            except (StoreLocked, StoreUnavailable):  # a writer is active: the index has what it committed
                index = self._open(read_only=True)
                if not index.complete:
                    index.close()
                    raise
            else:
                index = self._open(read_only=True)
        return self._kept(index)

    def _recover_or_skip(self, *, shared: bool) -> None:
        """Recover the index. Raises NotWritable if a writer has another index (`shared`)."""
        try:
            self._recover()
        except StoreLocked as err:
            if not shared:
                raise
            raise NotWritable(f"index {self._folder} lacks what another machine stores: {err}") from err

    def _is_current(self, index: LmdbIndex) -> bool:
        """Return whether an open index is the one in its folder and matches the store's state."""
        return index.current and self._location.matches(index)

    def _cached_index(self) -> LmdbIndex | None:
        """Return the open index unless it was replaced in its folder; a writer's own is current."""
        index = self._index  # without the lock, whose holder may wait for another process
        try:
            return index if index is not None and (self._held or self._is_current(index)) else None
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

    def read(self, ask: Callable[[LmdbIndex], Answer]) -> Answer:
        """Return the result of `ask` for the reading index; repeat it if the index was replaced."""
        for _ in range(READ_TRIES_MAX):
            with suppress(IndexClosed):
                return ask(self.readable())
        raise IndexClosed(f"index {self._folder}: was closed {READ_TRIES_MAX} times while it was read; try again")

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
        try:
            damage = find_page_damage(self._folder / "data.mdb")
        except OSError:
            return None
        if damage is None:
            return None
        if note:
            write_damage_note(self._folder)
        return f"{damage}: run `nearkin rebuild-index`"

    def numbers(self, tenant: str, key: str) -> list[int]:
        """Return the versions of a key, ascending, where there is a sound index; none is made."""
        return self._query_if_intact(lambda index: index.versions_of(tenant, key))

    def _query_if_intact(self, ask: Callable[[LmdbIndex], list[Answer]]) -> list[Answer]:
        """Return what the index answers, nothing where there is no sound one that may be read."""
        try:
            if self._cached_index() is None:
                if not (self._folder / "data.mdb").is_file():
                    return []
                index = self._open(read_only=True)
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
        return index, not (self.behind if self._held else index.has_pending_updates)

    def holds_erased_tenants(self) -> bool:
        """Return whether free pages may hold what the index knew of tenants whose erasure is due."""
        due = erasures_of(self._objects, due=True)
        return bool(due) and not self.read(lambda index: due <= index.excluded)

    def rebuild(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Rebuild the index from containers and manifests only.

        No put may be active: the new index would lack its data.
        """
        with interrupts_wait():
            from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

        with self._changing:
            self._take_lock()
        fresh = self._location.fresh
        remove_tree(fresh)
        index = LmdbIndex(fresh, self._domain, self._map_bytes, durable=False, names=self._names())
        try:
            token = self._location.give_token(index, renew=self._claimed)
            report = self._mending.rebuild(index, progress)
            failpoint("rebuild.complete")
        finally:
            index.close()
        with self._changing:
            self._replaced(None)
            self._said = self._claimed = False
            remove_tree(self._folder)
            failpoint("rebuild.removed")
            try:
                os.rename(fresh, self._folder)  # the index is whole, or it is missing and made again
                sync_folder(fresh.parent)  # or a power cut restores the old index, which claims to be complete
            except OSError as err:
                raise StoreUnavailable(f"index {self._folder}: {err.strerror}; run the same again") from err
            failpoint("rebuild.renamed")
            self._location.publish_token(token)
        return report

    # --- after damage ------------------------------------------------------------------------------------------------

    def republish_containers(self, containers: Collection[int]) -> None:
        """Publish all chunks of containers that were broken or missing. The lock is held."""
        if not containers:
            return
        index, there = self.writable(), {container for container, _ in self._containers.ids()}
        if there.intersection(containers).issubset(index.container_ids().tolist()):
            self._mending.republish_containers(index, containers)
        else:  # one was missing: the index has no summary of it
            self.rebuild()

    def relist_versions(self) -> None:
        """List versions whose manifests returned after the index was made. The lock is held."""
        self._mending.catch_up(self.writable())

    def withdraw_missing(self, listed: Collection[ContainerId]) -> None:
        """Withdraw the entries of missing containers; `listed` are all that exist.

        The lock is held.
        """
        self._mending.withdraw_missing(self.writable(), listed)

    def withdraw(self, unsound: Callable[[], CorruptChunks]) -> bool:
        """Withdraw broken chunks; return whether the index names none of them.

        `unsound` is called once the lock is held. False if a put is active here or elsewhere, or the index cannot be
        written.
        """
        with self.crossing.shared():
            puts, quiet = self._puts, not self.putting
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
            self._take_lock(what=FORGETTING)
            self._forgetting += 1
        try:
            yield
        finally:
            with self._changing:
                self._forgetting -= 1
                if self._held == FORGETTING and not self._forgetting:
                    self.close()

    def _withdraw(self, unsound: Callable[[], CorruptChunks]) -> None:
        found = unsound()
        if not (self._folder / "data.mdb").is_file():
            return  # rebuilt by the next writer, without what is broken
        index = self._index
        if index is None or index.read_only:
            try:
                index = self._open(read_only=False)
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

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _take_lock(self, wait_seconds: float = 0.0, what: str = WRITING) -> None:
        if not self._held:
            self._location.acquire(max(wait_seconds, self.lock_wait_seconds), what)
            self._held = what
            self._claimed = False
            if what != GC_RUN:
                self._prepare_folders()
            self._containers.evict()  # containers may have been removed meanwhile

    def _prepare_folders(self) -> None:
        """Remove files of dead writers, and restrict permissions that older versions gave.

        Once for each time that the lock is taken.
        """
        try:
            self._raw.sweep_scratch()
            tighten_modes(self._root, (self._folder, self._folder / "gc"))
        except BaseException:
            self._release_lock()
            raise

    def _release_lock(self) -> None:
        if self._held:
            self._held = ""
            self._claimed = False
            self._location.release()

    def _opened(self) -> LmdbIndex:
        """Return the index for writing: the lock is held."""
        index = self._index
        if index is not None and (index.read_only or not (self.putting or self._is_current(index))):
            self._replaced(None)
            index = None
        if index is None:
            self._said = False
            index = self._complete() or self._rebuilt()
            self._replaced(index)
        return index

    def _recover(self) -> None:
        """Recover the index, and release the lock: readers must not block writers.

        The lock is kept if this Store held it before: a put may be active.
        """
        with self.crossing.shared(), self._changing:
            held = self._held
            try:
                self._lock_complete()
            except StoreUnavailable as err:  # a folder that is read-only, a full disk
                missing = f"index of {self._root} is missing, unfinished or of an older state, and cannot be made"
                message = f"{missing}: {err} (get and verify need none)"
                raise (NoRoom(message, err.folder) if isinstance(err, NoRoom) else type(err)(message)) from err
            if held:
                self._held = held
            else:
                self.close()

    def _complete(self) -> LmdbIndex | None:
        try:
            index = self._open(read_only=False)
        except IndexUnsafe as err:
            self._rebuild_reason = f"is set aside ({err})"
            return None
        except IndexStale:
            self._rebuild_reason = REBUILD_STALE
            return None
        if not index.complete:
            self._rebuild_reason = REBUILD_OUTDATED if index.is_outdated else REBUILD_MISSING
            if (
                index.is_outdated
                or next(self._containers.ids(), None) is not None
                or next(self._manifests.names(), None) is not None
            ):
                index.close()
                return None
            token = self._location.give_token(index)
            index.mark_complete()
            self._location.publish_token(token)
        elif self._location.is_external and index.has_pending_updates and self._mending.names_lost_objects(index):
            # The store may be a copy from the middle of what the writer did that died: it has the index's token.
            self._rebuild_reason = REBUILD_STALE
            index.close()
            return None
        return index

    def _rebuilt(self) -> LmdbIndex:
        started = time.perf_counter()
        _log.warning("index of %s %s: rebuilding it from containers and manifests", self._root, self._rebuild_reason)
        report = self.rebuild()
        _log.warning("index rebuilt in %.1f s", time.perf_counter() - started)
        for name in report.skipped[:SKIPPED_NAMED]:
            _log.warning(
                "not in the index, and listed only with other versions of its key, since it cannot be read: %s: run "
                "`nearkin verify`",
                name,
            )
        if len(report.skipped) > SKIPPED_NAMED:
            _log.warning("and %d more: `nearkin rebuild-index` names them all", len(report.skipped) - SKIPPED_NAMED)
        return self._open(read_only=False)

    def _warn_of_network(self) -> None:
        """Warn once if the index is on a network filesystem, which LMDB does not support."""
        folder = self._folder.parent
        found = None if folder in _CHECKED_FOLDERS else network_type(folder)
        _CHECKED_FOLDERS.add(folder)
        if found is not None:
            _log.warning(
                "index %s is on a network filesystem (%s), where LMDB may read half-written pages if a second machine "
                "uses the store: set index.path to a folder on a local disk, or use the store from one machine at a "
                "time (docs/reference/filesystems.md)",
                self._folder,
                found,
            )

    def _open_temporary(self, folder: Path) -> LmdbIndex:
        with interrupts_wait():
            from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

        return LmdbIndex(folder, self._domain, self._map_bytes, durable=False, names=self._names())

    def _open(self, *, read_only: bool) -> LmdbIndex:
        with interrupts_wait():
            from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

        self._warn_of_network()
        self._location.check_owner()
        index = LmdbIndex(self._folder, self._domain, self._map_bytes, read_only=read_only, names=self._names())
        index.removal = partial(self._location.removal, index)
        try:
            self._check_state(index)
        except BaseException:
            index.close()
            raise
        return index

    def _check_state(self, index: LmdbIndex) -> None:
        """Raise IndexStale where a complete index has an older state of the store."""
        if index.complete and not self._location.matches(index):
            raise IndexStale(f"index {self._folder}: has an older state of store {self._root}; run rebuild-index")


def entry_names_of(objects: ObjectStore) -> Callable[[], EntryNames]:
    """Return a function that opens the encoder of an index's version keys on first use."""

    @cache
    def names() -> EntryNames:
        from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EncryptedNames

        return (
            EncryptedNames(objects.keyring.index_secret()) if isinstance(objects, EncryptedObjectStore) else PLAIN_NAMES
        )

    return names
