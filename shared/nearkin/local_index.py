"""The index of a local store. Invariant: whoever writes gets it whole: nothing that is stored is missing from it.

missing, older or unfinished -> rebuilt      a writer died -> caught up      damage found -> broken entries forgotten
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.config import Settings
from nearkin.errors import FormatTooNew, IndexUnfinished, StoreLocked, StoreUnavailable
from nearkin.failpoints import failpoint
from nearkin.fingerprints import Fingerprinter
from nearkin.formats.condemned import Record
from nearkin.index.protocols import Marked
from nearkin.records import U8, U32, U64, ContainerId, RebuildReport
from nearkin.store.condemned import CondemnedStore
from nearkin.store.containers import ContainerStore, object_name
from nearkin.store.lock import WriterLock
from nearkin.store.manifests import ManifestStore
from nearkin.store.manifests import object_name as manifest_name
from nearkin.store.objects import LocalObjects, sync_folder
from nearkin.store.quarantine import Quarantine, joined

if TYPE_CHECKING:  # a get needs no index
    from nearkin.index.catalog import CatalogEntry
    from nearkin.index.lmdb import LmdbIndex
    from nearkin_janitor import Tenants, Unsound

_log = logging.getLogger("nearkin")


class LocalIndex:
    """Opens, mends and rebuilds the index of one store; holds the writer's lock while there is something to write."""

    def __init__(
        self,
        root: Path,
        objects: LocalObjects,
        settings: Settings,
        fingerprinter: Callable[[str], Fingerprinter],
        containers: ContainerStore,
        manifests: ManifestStore,
    ) -> None:
        self._folder = root / "index"
        self._fresh = root / "index.new"
        self._objects = objects
        self._tenant = settings.tenant
        self._map_bytes = int(settings.index.map_bytes)
        self._fingerprinter = fingerprinter
        self._domain = fingerprinter(settings.tenant).domain
        self._containers = containers
        self._manifests = manifests
        self._lock = WriterLock(root)
        self._writing = False
        self._index: LmdbIndex | None = None
        self.putting = False
        """Whether a put is at work, and adds to the index itself."""
        self.behind = False
        """Whether the store may hold more than the index: set while a put is at work, left set where one failed."""

    def close(self) -> None:
        """Release the lock and the index."""
        if self._index is not None:
            if self._writing and not self._index.read_only and not self.behind:
                with suppress(StoreUnavailable):  # then the next writer looks for what is missing, and finds nothing
                    self._index.mark_behind(False)
            self._index.close()
            self._index = None
        if self._writing:
            self._lock.release()
            self._writing = False

    @property
    def gc_folder(self) -> Path:
        """Return where a collector may keep counts that are made again with the index."""
        return self._folder / "gc"

    @property
    def bytes_on_disk(self) -> int:
        """Return what the index takes; LMDB's file is sparse."""
        return sum(entry.stat().st_blocks * 512 for entry in self._folder.rglob("*") if entry.is_file())

    def writable(self) -> LmdbIndex:
        """Take the lock and return the index, whole. Raises StoreLocked, StoreUnavailable, FormatTooNew."""
        self._take_lock()
        if self._index is not None and self._index.read_only:
            self._index.close()
            self._index = None
        if self._index is None:
            self._index = self._complete() or self._rebuilt()
            self.behind = self._index.behind
            if self.behind:
                self._restate_marks(self._index)
            else:
                self._index.mark_behind(True)
        if self.behind:
            self._catch_up(self._index)
            self.behind = False
        return self._index

    def noting(self) -> LmdbIndex:
        """Return the index for a note beside whatever put is at work here. Raises as `writable` does."""
        index = self._index
        return index if self._writing and index is not None and not index.read_only else self.writable()

    def readable(self) -> LmdbIndex:
        """Return the index for reading; one that is not whole is mended first, unless a writer is at work."""
        if self._index is not None and not self._index.current:
            self._index.close()
            self._index = None
        if self._index is not None and self.behind and not self.putting:
            # A put failed, and may still have committed: its listing must not lag behind what a get answers.
            with suppress(StoreLocked, StoreUnavailable):
                return self.writable()
        if self._index is None:
            if not (self._folder / "data.mdb").is_file():
                self._mend()
            try:
                index = self._open(read_only=True)
            except IndexUnfinished:
                self._mend()
                index = self._open(read_only=True)
            if not index.complete or index.behind:
                index.close()
                try:
                    self._mend()
                except (StoreLocked, StoreUnavailable):  # a writer is at work: what it has committed is there
                    index = self._open(read_only=True)
                    if not index.complete:
                        index.close()
                        raise
                else:
                    index = self._open(read_only=True)
            self._index = index
        return self._index

    def remembered(self) -> list[tuple[str, CatalogEntry]]:
        """Return (tenant, version) of all where there is a sound index: `verify` can do without, and makes none."""
        if self._index is None and not (self._folder / "data.mdb").is_file():
            return []
        try:
            index = self._index or self._open(read_only=True)
            if not index.complete:
                index.close()
                return []
            self._index = index
            return list(index.catalogs())
        except (StoreUnavailable, StoreLocked, FormatTooNew):
            return []

    def to_check(self) -> tuple[LmdbIndex, bool] | None:
        """Return the index that `remembered` found, and whether it lists all that is committed; None where none is."""
        index = self._index
        if index is None or not index.complete:
            return None
        return index, not (self.behind if self._writing else index.behind)

    def rebuild(self, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Replace the index by one made from containers and manifests alone."""
        from nearkin.index.lmdb import LmdbIndex
        from nearkin_janitor import rebuild_index

        self._take_lock()
        if self._index is not None:
            self._index.close()
            self._index = None
        shutil.rmtree(self._fresh, ignore_errors=True)
        index = LmdbIndex(self._fresh, self._domain, self._map_bytes)
        try:
            report = rebuild_index(
                self._containers,
                self._manifests,
                index,
                self._tenants(),
                super_features_of,
                progress,
                condemned=self._left_out(),
            )
            index.mark_complete()
            failpoint("rebuild.complete")
        finally:
            index.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        failpoint("rebuild.removed")
        try:
            os.rename(self._fresh, self._folder)  # the index is whole, or it is missing and made again
            sync_folder(self._fresh.parent)  # or a power cut brings back the old one, which says that it lacks nothing
        except OSError as err:
            raise StoreUnavailable(f"index {self._folder}: {err.strerror}; run the same again") from err
        failpoint("rebuild.renamed")
        return report

    # --- after damage ------------------------------------------------------------------------------------------------

    def forget_missing(self, listed: Collection[ContainerId]) -> None:
        """Let go of what lay in containers that are no longer there; `listed` are all that are. The lock is held.

        Costs one read of the ids that the index has, 8 bytes each, where none is missing.
        """
        index = self.writable()
        missing = sorted(set(index.container_ids().tolist()).difference(listed))
        if not missing:
            return
        from nearkin_janitor import Soundness

        first = object_name(ContainerId(missing[0]))
        _log.warning(
            "%d of the containers that the index names are missing, the first %s: what lay in them is stored anew when "
            "it is put again; `nearkin verify` names the versions they break",
            len(missing),
            first,
        )
        soundness = Soundness(self._containers, self._tenants(), self._fingerprinter(self._tenant))
        unsound = soundness.unsound([*listed, *map(ContainerId, missing)])
        index.forget(unsound.chunks, unsound.segments, missing)

    def forget(self, unsound: Callable[[], Unsound]) -> bool:
        """Let go of what is broken, `unsound` asked once the lock is held; return whether the index names none of it.

        False where a put is running elsewhere, or nothing can be written here.
        """
        had_lock = self._writing
        try:
            self._take_lock()
            found = unsound()
            if not (self._folder / "data.mdb").is_file():
                return True  # made anew by the next writer, without what is broken
            there = {container for container, _ in self._containers.ids()}
            index = self._index
            if index is None or index.read_only:
                if index is not None:
                    index.close()
                    self._index = None
                index = self._open(read_only=False)
            try:
                if index.complete:
                    missing = [int(container) for container in index.container_ids() if int(container) not in there]
                    index.forget({**found.chunks, **dict.fromkeys(missing)}, found.segments, missing)
            finally:
                if index is not self._index:
                    index.close()
        except (StoreLocked, StoreUnavailable, FormatTooNew):
            return False
        finally:
            if not had_lock:
                self.close()
        return True

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        if not self._writing:
            self._lock.acquire()
            self._writing = True
            self._objects.sweep_scratch()
            self._containers.forget_read()  # containers may have gone meanwhile

    def _left_out(self) -> Record:
        """Return what is not to be found again: condemned, or broken when it was last read."""
        return joined(CondemnedStore(self._objects).read(), Quarantine(self._objects, time.time).read())

    def _tenants(self) -> Tenants:
        from nearkin_janitor import Tenants

        return Tenants(self._fingerprinter, [self._tenant], self._manifests)

    def _catch_up(self, index: LmdbIndex) -> None:
        """Add what a writer had stored, and not yet put into the index, when it died or failed."""
        from nearkin_janitor import rebuild_index

        known = {manifest_name(tenant, entry.key, entry.version): entry.sequence for tenant, entry in index.catalogs()}
        rebuild_index(
            self._containers,
            self._manifests,
            index,
            self._tenants(),
            super_features_of,
            known_containers=set(index.container_ids().tolist()),
            known_manifests=set(known),
            known_marks=known,
            condemned=self._left_out(),
        )

    def _restate_marks(self, index: LmdbIndex) -> None:
        """Let go of marks that a deletion noted and died before it wrote: sums would count them for good."""
        by_key: dict[tuple[str, str], list[CatalogEntry]] = {}
        for tenant, entry in index.catalogs():
            if entry.sequence:
                by_key.setdefault((tenant, entry.key), []).append(entry)
        stated = []
        for (tenant, key), entries in by_key.items():
            histories = self._manifests.histories(tenant, key)
            for entry in entries:
                there = histories.get(entry.version)
                sequence, marks_bytes = (there.sequence, there.marks_bytes) if there else (0, 0)
                if (sequence, marks_bytes) != (entry.sequence, entry.marks_bytes):
                    stated.append(Marked(tenant, key, entry.version, sequence, marks_bytes))
        index.restate_marks(stated)

    def _mend(self) -> None:
        """Make the index whole, as a writer would, and let go of the lock: readers must never keep writers out."""
        self.writable()
        self.close()

    def _complete(self) -> LmdbIndex | None:
        index = self._open(read_only=False)
        if not index.complete:
            if next(self._containers.ids(), None) is not None or next(self._manifests.names(), None) is not None:
                index.close()
                return None
            index.mark_complete()
        return index

    def _rebuilt(self) -> LmdbIndex:
        started = time.perf_counter()
        _log.warning(
            "index of %s is missing or unfinished: rebuilding it from containers and manifests", self._folder.parent
        )
        self.rebuild()
        _log.warning("index rebuilt in %.1f s", time.perf_counter() - started)
        return self._open(read_only=False)

    def _open(self, *, read_only: bool) -> LmdbIndex:
        from nearkin.index.lmdb import LmdbIndex

        return LmdbIndex(self._folder, self._domain, self._map_bytes, read_only=read_only)


def super_features_of(sketch: str, payload: U8, offsets: U64, lengths: U32) -> U64:
    """Return what the sketch of that name gives: what a rebuild needs of the resemblance stage."""
    from nearkin_resemblance import Sketch

    return Sketch.parse(sketch).super_features(payload, offsets, lengths)
