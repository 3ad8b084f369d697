"""Files of the index of one local store: open them, check their state, replace them.

missing, older, of another state or incomplete -> not complete: `LocalIndex` rebuilds it

Invariant: an index that is opened for use is complete and has the store's present state, or is reported as neither.
The caller holds the writer lock where it writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.local.index_location import IndexLocation
from nearkin.local.index_recovery import IndexRecovery
from nearkin_shared.config.settings import Settings
from nearkin_shared.config.storage import AUTO, SAMPLED
from nearkin_shared.errors import IndexStale, IndexUnsafe, StoreUnavailable
from nearkin_shared.index.lmdb.page_check import find_page_damage
from nearkin_shared.index.lmdb.session_notes import write_damage_note
from nearkin_shared.objectstore.base import ObjectStore
from nearkin_shared.objectstore.encrypted_store import EncryptedObjectStore
from nearkin_shared.objectstore.local import LocalObjectStore, sync_folder
from nearkin_shared.results import RebuildReport
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.mounts import network_type
from nearkin_shared.utils.private_files import remove_tree, tighten_modes
from nearkin_shared.utils.signals import interrupts_wait

if TYPE_CHECKING:  # a get needs no index
    from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex
    from nearkin_shared.index.lmdb.version_entries import EntryNames

_log = logging.getLogger("nearkin")
REBUILD_MISSING = "is missing or unfinished"
REBUILD_OUTDATED = (
    "was made by an older version of Nearkin, as another index.kind or under other keys (older ones may hold memory of "
    "the process and, of an encrypted store, key names in clear)"
)
REBUILD_STALE = (
    "has an older state of the store (another machine wrote it since, or the store is a copy or was restored from one)"
)
REBUILD_OUTGROWN = "takes more than index.memory, and becomes one of the kind sampled"
EXACT_SHARE = 1.0
"""With `index.kind = "auto"` an exact index may take such a share of `index.memory`."""
EXACT_BYTES_A_CHUNK, CHUNKS_A_CONTAINER = 170, 512
"""To estimate the size of an index that is missing."""
TAGS_NAME = "tags.nkt"
SKIPPED_NAMED = 5
"""So many objects that an index rebuilt lacks are named, where no process asked for it."""
_CHECKED_FOLDERS: set[Path] = set()
"""Folders of indexes whose filesystem this process has looked at."""


class IndexFiles:
    """Open, check and replace the files of one store's index."""

    def __init__(
        self,
        location: IndexLocation,
        raw: LocalObjectStore,
        objects: ObjectStore,
        settings: Settings,
        domain: bytes,
        recovery: IndexRecovery,
        containers: ContainerStore,
    ) -> None:
        self.folder: Path = location.folder
        self._location = location
        self._raw = raw
        self._settings = settings.index
        self._map_bytes = int(settings.index.map_bytes)
        self._names = entry_names_of(objects)
        self._domain = domain
        self._recovery = recovery
        self._all_containers = containers
        self._containers = containers.of(None)
        self._is_auto = self._settings.kind == AUTO
        self._exact_bytes_max = int(int(self._settings.memory) * EXACT_SHARE)
        self._has_outgrown = False

    @property
    def are_missing(self) -> bool:
        """Return whether there is no index."""
        return not (self.folder / "data.mdb").is_file()

    @property
    def bytes_on_disk(self) -> int:
        """Return the bytes that the index takes; LMDB's file is sparse."""
        return sum(entry.stat().st_blocks * 512 for entry in self.folder.rglob("*") if entry.is_file())

    def tidy(self) -> None:
        """Remove files of dead writers, and restrict permissions that older versions gave."""
        self._raw.sweep_scratch()
        tighten_modes(self._location.root, (self.folder, self.folder / "gc"))

    def open(self, *, read_only: bool) -> LmdbIndex:
        """Open the index. Raises IndexStale if a complete one has an older state of the store."""
        self._warn_of_network()
        self._location.check_owner()
        index = self._make(self.folder, read_only=read_only)
        index.removal = partial(self._location.removal, index)
        try:
            self._check_state(index)
        except BaseException:
            index.close()
            raise
        return index

    def _check_state(self, index: LmdbIndex) -> None:
        if index.complete and not self._location.matches(index):
            raise IndexStale(
                f"index {self.folder}: has an older state of store {self._location.root}; run rebuild-index"
            )

    def _make(self, folder: Path, *, read_only: bool = False, durable: bool = True) -> LmdbIndex:
        """Open an index of the kind that is set.

        With `auto` of the kind that is in the folder, `exact` if there is none.
        """
        if not self._is_auto:
            return self._make_kind(self._settings.kind, folder, read_only=read_only, durable=durable)
        index = self._make_exact(folder, read_only=read_only, durable=durable)
        try:
            has_tablets = index.has_tablets
        except BaseException:
            index.close()
            raise
        if not has_tablets:
            return index
        index.close()
        return self._make_kind(SAMPLED, folder, read_only=read_only, durable=durable)

    def _make_kind(self, kind: str, folder: Path, *, read_only: bool = False, durable: bool = True) -> LmdbIndex:
        if kind == "exact":
            return self._make_exact(folder, read_only=read_only, durable=durable)
        with interrupts_wait():
            from nearkin_shared.index.tablets.tablet_index import TabletIndex
            from nearkin_shared.index.tablets.tablet_tables import TabletOptions

        return TabletIndex(
            folder,
            self._domain,
            self._map_bytes,
            self._containers,
            TabletOptions(int(self._settings.memory), is_sampled=kind == SAMPLED),
            read_only=read_only,
            durable=durable,
            names=self._names(),
        )

    def _make_exact(self, folder: Path, *, read_only: bool = False, durable: bool = True) -> LmdbIndex:
        with interrupts_wait():
            from nearkin_shared.index.lmdb.lmdb_index import LmdbIndex

        return LmdbIndex(
            folder, self._domain, self._map_bytes, read_only=read_only, durable=durable, names=self._names()
        )

    def open_listing(self, folder: Path) -> LmdbIndex:
        """Open an index for listings in another folder, durable only once it is complete."""
        return self._make_exact(folder, durable=False)

    def open_complete(self) -> LmdbIndex | str:
        """Return the complete index for writing, or why it must be rebuilt."""
        try:
            index = self.open(read_only=False)
        except IndexUnsafe as err:
            return f"is set aside ({err})"
        except IndexStale:
            return REBUILD_STALE
        if not index.complete:
            if index.is_outdated or not self._recovery.is_store_empty:
                reason = REBUILD_OUTDATED if index.is_outdated else REBUILD_MISSING
                index.close()
                return reason
            token = self._location.give_token(index)
            index.mark_complete()
            self._location.publish_token(token)
        elif self._is_auto and not index.has_tablets and index.used_bytes > self._exact_bytes_max:
            index.close()
            self._has_outgrown = True
            return REBUILD_OUTGROWN
        elif self._location.is_external and index.has_pending_updates and self._recovery.names_lost_objects(index):
            # The store may be a copy from the middle of what the writer did that died: it has the index's token.
            index.close()
            return REBUILD_STALE
        return index

    def build(
        self, progress: Callable[[int, int], None] | None, *, renew_token: bool
    ) -> tuple[RebuildReport, str | None]:
        """Build an index next to the present one; return a report and the token for `install`."""
        fresh = self._location.fresh
        remove_tree(fresh)
        index = self._make_kind(self._kind_to_build(), fresh, durable=False)
        try:
            token = self._location.give_token(index, renew=renew_token)
            report = self._recovery.rebuild(index, progress)
            failpoint("rebuild.complete")
        finally:
            index.close()
        return report, token

    def _kind_to_build(self) -> str:
        """Return the kind that suits what the store has."""
        if not self._is_auto:
            return self._settings.kind
        is_sampled = self._has_outgrown or (self.folder / TAGS_NAME).is_file()
        if not is_sampled:
            chunks = len(self._all_containers.generations()) * CHUNKS_A_CONTAINER
            is_sampled = chunks * EXACT_BYTES_A_CHUNK > self._exact_bytes_max
        return SAMPLED if is_sampled else "exact"

    def install(self, token: str | None) -> None:
        """Replace the index, which no thread has open, by the one that was built."""
        fresh = self._location.fresh
        remove_tree(self.folder)
        failpoint("rebuild.removed")
        try:
            os.rename(fresh, self.folder)  # the index is whole, or it is missing and made again
            sync_folder(fresh.parent)  # or a power cut restores the old index, which claims to be complete
        except OSError as err:
            raise StoreUnavailable(f"index {self.folder}: {err.strerror}; run the same again") from err
        failpoint("rebuild.renamed")
        self._location.publish_token(token)

    def find_damage(self, *, note: bool) -> str | None:
        """Return the damage in the structure of the index's file, or None.

        `note`: note it too, so that the next process that opens the index rebuilds it.
        """
        try:
            damage = find_page_damage(self.folder / "data.mdb")
        except OSError:
            return None
        if damage is None:
            return None
        if note:
            write_damage_note(self.folder)
        return f"{damage}: run `nearkin rebuild-index`"

    def _warn_of_network(self) -> None:
        """Warn once if the index is on a network filesystem, which LMDB does not support."""
        folder = self.folder.parent
        found = None if folder in _CHECKED_FOLDERS else network_type(folder)
        _CHECKED_FOLDERS.add(folder)
        if found is not None:
            _log.warning(
                "index %s is on a network filesystem (%s), where LMDB may read half-written pages if a second machine "
                "uses the store: set index.path to a folder on a local disk, or use the store from one machine at a "
                "time (docs/reference/filesystems.md)",
                self.folder,
                found,
            )


def log_skipped(report: RebuildReport) -> None:
    """Warn of the objects that a rebuilt index lacks, since they cannot be read."""
    for name in report.skipped[:SKIPPED_NAMED]:
        _log.warning(
            "not in the index, and listed only with other versions of its key, since it cannot be read: %s: run "
            "`nearkin verify`",
            name,
        )
    if len(report.skipped) > SKIPPED_NAMED:
        _log.warning("and %d more: `nearkin rebuild-index` names them all", len(report.skipped) - SKIPPED_NAMED)


def entry_names_of(objects: ObjectStore) -> Callable[[], EntryNames]:
    """Return a function that opens the encoder of an index's version keys on first use."""

    @cache
    def names() -> EntryNames:
        from nearkin_shared.index.lmdb.version_entries import PLAIN_NAMES, EncryptedNames

        return (
            EncryptedNames(objects.keyring.index_secret()) if isinstance(objects, EncryptedObjectStore) else PLAIN_NAMES
        )

    return names
