"""Back up, import and restore trees of an open store.

Invariant: a backup or an import either ends as a committed version or changes nothing that a reader can see.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nearkin.local.source_feed import TreeSource
from nearkin.store_maintenance import MaintainedStore
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.results import PutResult
from nearkin_shared.storage.manifests import object_name
from nearkin_shared.types import Locations
from nearkin_shared.validation import check_user_key

if TYPE_CHECKING:
    from nearkin.trees.backup_walk import BackupCounts, BackupOptions
    from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
    from nearkin.trees.store_backup import BackupResult, TreeStore
    from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult
    from nearkin_shared.reading.tree_reader import TreeReader


class TreeStorage(MaintainedStore):
    """The operations of a store on trees."""

    @abstractmethod
    def delete(self, key: str, version: int | None = None, *, reason: str = "", who: str | None = None) -> int:
        """Delete a version, or all current versions of the key; return how many."""

    @abstractmethod
    def _manifest(self, key: str, version: int | None) -> Manifest:
        """Return the manifest of a version, the newest by default."""

    @abstractmethod
    def _put_tree(self, key: str, source: TreeSource, metadata: Mapping[str, str]) -> PutResult:
        """Store a tree as a version."""

    def backup(
        self,
        key: str,
        paths: Sequence[str | Path],
        *,
        options: BackupOptions | None = None,
        counts: BackupCounts | None = None,
    ) -> BackupResult:
        """Store folders and files as one version of `key`, a tree.

        Files that are unchanged since the newest tree of the key are not read. Entries that cannot be read are listed
        in `counts`, which another thread may read for a progress display; everything else is stored. An interrupted
        backup leaves checkpoints that the next backup of the key continues.

        Raises BadInput (a path does not exist, a pattern does not parse), and what `put` raises.
        """
        from nearkin.trees.backup_walk import BackupCounts, BackupOptions
        from nearkin.trees.store_backup import back_up

        self._check_writable("backup")
        check_user_key(key)
        return back_up(self.tree_access(), key, paths, options or BackupOptions(), counts or BackupCounts())

    def tree_access(self) -> TreeStore:
        """Return the operations that a put of a tree uses."""
        from nearkin.trees.store_backup import CHECKPOINT_REASON, TreeStore

        return TreeStore(
            self._manifest,
            self._range,
            self._put_tree,
            lambda name: self.delete(name, reason=CHECKPOINT_REASON),
            self._check_sound,
            self.own_folders,
        )

    def _check_sound(self, manifest: Manifest) -> None:
        """Raise Corrupt if data that a version needs are damaged, DamageNoted if that is new.

        Raises StoreUnavailable.
        """
        from nearkin.trees.parent_tree import check_sound
        from nearkin.trees.store_backup import DamageNoted

        try:
            check_sound(self._containers, self._quarantine, manifest)
        except Corrupt as err:
            if err.container is not None and not self._is_damaged(manifest):
                return  # only dead data of other versions depend on the container
            self.damage_notes.note(err, Locations.empty(), self._containers)
            if self.damage_notes.read():
                raise DamageNoted(str(err)) from err
            raise

    def _is_damaged(self, manifest: Manifest) -> bool:
        """Return whether a version needs a chunk of a container that cannot be read."""
        from nearkin_maintenance.gc.mark import LiveSet

        try:
            live_set = LiveSet(
                self._containers, self._manifests, [object_name(manifest.tenant, manifest.key, manifest.version)]
            )
            live_set.transitive_closure(live_set.chunks)
        except Corrupt:
            return True
        return False

    def import_tar(
        self,
        key: str,
        source: str | Path | BinaryIO,
        *,
        options: ImportOptions | None = None,
        counts: ImportCounts | None = None,
    ) -> ImportResult:
        """Store a tar archive as one version of `key`, a tree as `backup` makes it.

        `source` is a path, or a file that is open for reading bytes; it may be compressed with gzip, bzip2, xz or zstd.
        Members that no tree can hold are listed in `counts`; everything else is stored. Raises BadInput (no archive,
        damaged, cut short, no member: nothing stored), NoRoom (for the temporary copy of a stream), and what `put`
        raises.
        """
        from nearkin.trees.store_backup import tree_metadata
        from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult, open_import

        self._check_writable("import_tar")
        check_user_key(key)
        chosen, counted = options or ImportOptions(), counts or ImportCounts()
        with open_import(source, chosen, counted) as tree:
            result = self._put_tree(key, tree, tree_metadata(chosen.metadata, chosen.tags))
        return ImportResult(result, counted)

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """Folders that the store writes, which no backup enters and no restore changes."""
        return self.root, self._index.folder

    def tree(self, key: str, version: int | None = None) -> TreeReader:
        """Return a reader of a tree's entries.

        Raises as `get` does, and Corrupt if the version is no tree.
        """
        manifest = self._manifest(key, version)
        return self._range(manifest, 0, manifest.size_bytes).tree()

    def restore(
        self,
        key: str,
        target: str | Path,
        *,
        version: int | None = None,
        path: bytes = b"",
        options: RestoreOptions | None = None,
        counts: RestoreCounts | None = None,
    ) -> RestoreCounts:
        """Restore a tree, or the folder or file `path` in it, into the folder `target`.

        Attributes that cannot be set are counted and listed in the result. Raises NotFound (key, version or path),
        Corrupt (damaged, or no tree), BadInput (the target is no folder), NoRoom, TenantErased, StoreUnavailable.
        """
        from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
        from nearkin.trees.target_deletion import identities
        from nearkin.trees.tree_restore import TreeRestore

        manifest = self._manifest(key, version)
        reader = self._range(manifest, 0, manifest.size_bytes).tree()
        restore = TreeRestore(
            reader,
            lambda start, stop: self._range(manifest, start, stop).pieces(),
            Path(target),
            options or RestoreOptions(),
            counts or RestoreCounts(),
            protected=identities(self.own_folders),
        )
        return restore.run(path)

    def _range(self, manifest: Manifest, start: int, stop: int) -> VersionReader:
        containers = self._containers.counting()
        return VersionReader(manifest.info, manifest, containers, self._fingerprinter, start, stop, is_part=True)
