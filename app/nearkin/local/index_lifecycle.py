"""The index of a local store. Invariant: whoever writes gets it whole: nothing that is stored is missing from it.

missing, older or unfinished -> rebuilt      a writer died -> caught up      damage found -> broken entries forgotten

The store's lock is held from the first write to `close`, or, by a round of garbage collection, for a turn. Threads of
one Store write and list at once: who reads an index that another one takes the place of asks again.
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
"""So long a turn waits at least for what else writes here: it is no put, which is asked for before, and short."""
FORGETTING = "forgetting what is broken"
REBUILD_MISSING = "is missing or unfinished"
REBUILD_OUTDATED = (
    "was made by an older version of Nearkin, or under other keys (older ones may hold memory of the process and, of "
    "an encrypted store, key names in clear)"
)
REBUILD_STALE = (
    "has an older state of the store (another machine wrote it since, or the store is a copy, or came back from one)"
)
SKIPPED_NAMED = 5
"""So many objects that an index made anew lacks are named, where nobody asked for it."""
READ_TRIES_MAX = 8
"""Each but the first means that another index was put in its place in the milliseconds since it was asked for."""
_CHECKED_FOLDERS: set[Path] = set()
"""Folders of indexes whose filesystem this process has looked at."""
YIELD_SECONDS = 0.02
"""So long a step of a round lets those go first who wait."""


class LocalIndex(DeletionObserver):
    """Opens, mends and rebuilds the index of one store; holds the writer's lock while there is something to write."""

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
        """What the lock is held for: WRITING, until `close`; ROUND, for a turn alone; FORGETTING, until that is done.
        One word, read without a lock."""
        self._changing = threading.RLock()
        """Held while the index, or the lock, is taken or let go of. Who waits for the crossing does not hold it."""
        self._swapping = threading.Lock()
        """Held while one index takes another's place; nobody waits with it."""
        self._forgetting = 0
        """How many do."""
        self._claimed = False
        """Whether the store has a new token since this Store took the lock: it may be changed."""
        self._noted = False
        """Whether the index says so because of a note in that turn."""
        self._said = False
        """Whether the index says, because of this Store, that the store may hold more than it."""
        self._restating = threading.Lock()
        """Held while notes of marks are put back, from the look at what is there on."""
        self._restated = 0
        """How often they were."""
        self._in_vain = False
        """Whether notes that were made in vain could not be put back."""
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
        """Begin anew in a process that was forked: the index that is open, and the lock, are its parent's."""
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
        """Return the index for a put, whole, and count as behind until the put says that all it stored is in it.

        Raises TenantCollision too, before anything is stored.
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
        """Invalidate all other indexes before the store is changed, once for each time that the lock is held."""
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
        """Return whether this Store has the lock since it first put, until it is closed: no other process writes."""
        return self._held == WRITING

    @contextmanager
    def exclusive(self, wait_seconds: float) -> Iterator[LmdbIndex]:
        """Hold the lock for a step of a round, and give the index, whole; wait so long for who writes.

        Nobody else writes meanwhile, here or elsewhere. Raises StoreLocked, StoreUnavailable, FormatTooNew.
        """
        with self.crossing.exclusive(max(wait_seconds, WRITER_LOCK_TIMEOUT_SECONDS)):
            if self._held:  # it is this Store's, and stays so
                yield self.writable()
                return
            began = time.monotonic()
            while self._location.is_wanted and time.monotonic() - began < wait_seconds:  # whoever waits goes first
                time.sleep(YIELD_SECONDS)
            self._take_lock(wait_seconds, GC_RUN)
            try:
                index = self._opened()
                if index.has_pending_updates:  # whoever said so is dead: the lock was free
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
        """Return what is another after any write of whoever writes the store: first they tell the index."""
        index = self._index
        try:
            return object() if index is None or not self._is_current(index) else index.last_written
        except IndexClosed:  # by another thread, just now
            return object()

    def look_up(self, chunks: Mapping[int, U32 | None], segments: Mapping[int, U32]) -> RemovalLookup | None:
        """Return what the index is to forget in a later turn, looked up beside whoever writes; None: not looked up."""
        index = self._index
        try:
            return index.look_up(chunks, segments) if index is not None and self._is_current(index) else None
        except IndexClosed:
            return None

    def noting(self) -> LmdbIndex:
        """Return the index for a note beside whatever put is at work here. Raises as `writable` does."""
        index, held = self._index, self._held
        if index is not None and not index.read_only and held:
            if held == WRITING and self._claimed:  # not one that is only being mended
                return index
            if held != WRITING and self.crossing.is_exclusive_here:
                index.set_pending_updates(True)
                self._noted = True
                return index
        with self.crossing.shared():
            return self.writable()

    def rollback_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Put what is there of marks of versions in place of what was noted of them: not all were written.

        Where that fails, too, whoever opens the index next looks.
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
        """Return how often notes of marks were put back: one that is not written yet may have been among them."""
        with self._restating:
            return self._restated

    def outside_gc_step(self) -> AbstractContextManager[None]:
        """Keep GC steps of this process from beginning; wait for the one at work, unless this is part of it."""
        return self.crossing.shared()

    def correct_collected_notes(self, tenant: str, key: str, versions: Collection[int]) -> None:
        """Put what is there of marks of versions that a round has collected in place of what was noted of them since.

        A step of a round ends first. Raises as `writable` does.
        """
        with self.crossing.shared():
            index = self.noting()
            with self._restating:
                self._restated += 1
                index.correct_marks(self._mending.marks_of(tenant, key, versions, collected_alone=True))

    def readable(self) -> LmdbIndex:
        """Return the index for reading; one that is not whole is mended first, unless a writer is at work.

        A process that may not write the index, or the lock that mending needs, gets a temporary one; so does one that
        has no room to mend it.
        """
        try:
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
            except (StoreLocked, StoreUnavailable):  # a writer is at work: what it has committed is there
                index = self._open(read_only=True)
                if not index.complete:
                    index.close()
                    raise
            else:
                index = self._open(read_only=True)
        return self._kept(index)

    def _recover_or_skip(self, *, shared: bool) -> None:
        """Make the index whole. Raises NotWritable where a writer is at work that has another one (`shared`)."""
        try:
            self._recover()
        except StoreLocked as err:
            if not shared:
                raise
            raise NotWritable(f"index {self._folder} lacks what another machine stores: {err}") from err

    def _is_current(self, index: LmdbIndex) -> bool:
        """Return whether an open index is the one in its folder, and has the store's present state."""
        return index.current and self._location.matches(index)

    def _cached_index(self) -> LmdbIndex | None:
        """Return the index that is open, unless another one lies in its place; a writer's own is what it writes."""
        index = self._index  # without the lock: whoever has that may wait for another process
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
        """Take up an index in the place of the one until now, whose readers ask again."""
        with self._swapping:
            before, self._index = self._index, index
        if before is not None:
            before.close()

    def read(self, ask: Callable[[LmdbIndex], Answer]) -> Answer:
        """Return what `ask` makes of the index for reading; asked again where another one took its place meanwhile."""
        for _ in range(READ_TRIES_MAX):
            with suppress(IndexClosed):
                return ask(self.readable())
        raise IndexClosed(f"index {self._folder}: was closed {READ_TRIES_MAX} times while it was read; try again")

    def listed_versions(self) -> list[tuple[str, CatalogEntry]]:
        """Return (tenant, version) of all where there is a sound index: `verify` can do without, and makes none."""
        self.damage = None
        return self._query_if_intact(lambda index: list(index.catalogs()))

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
        """Return whether the index lists (tenant, key, version) by now; None where none is open or it is damaged."""
        if self.to_check() is None:
            return None
        tenant, key, number = version
        try:
            return self.read(lambda index: number in index.versions_of(tenant, key))
        except IndexDamaged as err:
            self.damage = str(err)
            return None

    def to_check(self) -> tuple[LmdbIndex, bool] | None:
        """Return the index that `listed_versions` found, and whether it lists all that is committed; None where none
        is.
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
        """Replace the index by one made from containers and manifests alone. No put is at work: it would miss some."""
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
                sync_folder(fresh.parent)  # or a power cut brings the old one back, which says it lacks nothing
            except OSError as err:
                raise StoreUnavailable(f"index {self._folder}: {err.strerror}; run the same again") from err
            failpoint("rebuild.renamed")
            self._location.publish_token(token)
        return report

    # --- after damage ------------------------------------------------------------------------------------------------

    def republish_containers(self, containers: Collection[int]) -> None:
        """Name all that lies in these again: it was broken or missing, and let go of. The lock is held."""
        if not containers:
            return
        index, there = self.writable(), {container for container, _ in self._containers.ids()}
        if there.intersection(containers).issubset(index.container_ids().tolist()):
            self._mending.republish_containers(index, containers)
        else:  # one was missing: what it holds is not counted any more, nor who holds its segments
            self.rebuild()

    def relist_versions(self) -> None:
        """List versions whose manifests are back since the index was made without them. The lock is held."""
        self._mending.catch_up(self.writable())

    def withdraw_missing(self, listed: Collection[ContainerId]) -> None:
        """Let go of what lay in containers that are no longer there; `listed` are all that are. The lock is held."""
        self._mending.withdraw_missing(self.writable(), listed)

    def withdraw(self, unsound: Callable[[], CorruptChunks]) -> bool:
        """Let go of what is broken, `unsound` asked once the lock is held; return whether the index names none of it.

        False where a put is at work, here or elsewhere, or nothing can be written here.
        """
        with self.crossing.shared():
            puts, quiet = self._puts, not self.putting
            try:
                with self._lock_to_withdraw():
                    self._withdraw(unsound)
            except (StoreLocked, StoreUnavailable, FormatTooNew):
                return False
            # One that was at work meanwhile may have leaned on what is broken, and told the index after this did.
            return quiet and puts == self._puts

    @contextmanager
    def _lock_to_withdraw(self) -> Iterator[None]:
        """Hold the lock; what was not held before is given back, unless somebody writes meanwhile, and keeps it."""
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
            return  # made anew by the next writer, without what is broken
        index = self._index
        if index is None or index.read_only:
            try:
                index = self._open(read_only=False)
            except IndexStale:
                return  # as above
        try:
            if index.complete:
                published = index.container_ids().tolist()  # before the listing: what comes in between is no miss
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
            self._containers.evict()  # containers may have gone meanwhile

    def _prepare_folders(self) -> None:
        """Remove what dead writers left; take access from others that older versions gave: once for each lock."""
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
        """Make the index whole, as a writer would, and let go of the lock: readers must never keep writers out.

        Unless this Store had it before: a put may be at work.
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
                "not in the index, and listed beside other versions of its key alone, since it cannot be read: %s: run "
                "`nearkin verify`",
                name,
            )
        if len(report.skipped) > SKIPPED_NAMED:
            _log.warning("and %d more: `nearkin rebuild-index` names them all", len(report.skipped) - SKIPPED_NAMED)
        return self._open(read_only=False)

    def _warn_of_network(self) -> None:
        """Warn once a process where the index would be on a network filesystem, which LMDB does not support."""
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
    """Return what gives the names under which a store's index keeps versions; asked for only once it is opened."""

    @cache
    def names() -> EntryNames:
        from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EncryptedNames

        return (
            EncryptedNames(objects.keyring.index_secret()) if isinstance(objects, EncryptedObjectStore) else PLAIN_NAMES
        )

    return names
