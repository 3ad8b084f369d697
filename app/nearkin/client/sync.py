"""Access the store behind a gateway from threads, with the methods of `Store`.

A RemoteStore may be used by many threads; it holds at most 32 connections.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import httpx

from nearkin.blob import VersionFile
from nearkin.client import requests
from nearkin.client.http import unreachable
from nearkin.client.streaming import Download, PartsUpload, Upload
from nearkin.client.sync_calls import GatewayCalls
from nearkin_shared.errors import NearkinError
from nearkin_shared.results import PutResult, VersionInfo

if TYPE_CHECKING:
    from nearkin.trees.backup_walk import BackupCounts, BackupOptions
    from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
    from nearkin.trees.store_backup import BackupResult
    from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult
    from nearkin_shared.reading.tree_reader import TreeReader


class RemoteStore(GatewayCalls):
    """A store behind a gateway; `close` gives its connections back."""

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> RemoteBlob:
        """Return a version (the newest by default) or its bytes [start, stop).

        Raises NotFound, BadInput, AccessDenied.
        """
        found = self.info(key, version)
        return RemoteBlob(self, found, start, requests.check_range(found, start, stop))

    def backup(
        self,
        key: str,
        paths: Sequence[str | Path],
        *,
        options: BackupOptions | None = None,
        counts: BackupCounts | None = None,
    ) -> BackupResult:
        """Store folders and files as one version of `key`, a tree; see `Store.backup`.

        Files that are unchanged since the newest tree of the key are neither read nor sent, if the server takes ranges
        of it; else all are. Raises BadInput, and what `put` raises.
        """
        from nearkin.trees.backup_walk import BackupCounts, BackupOptions
        from nearkin.trees.remote_trees import back_up_remote

        return back_up_remote(self, key, paths, options or BackupOptions(), counts or BackupCounts())

    def newest_base(self, key: str) -> VersionInfo | None:
        """Return the newest version; None if the server takes no ranges of it in a put.

        Raises NotFound, AccessDenied, StoreUnavailable.
        """
        return self._hold(requests.newest_base(key))

    def put_parts(self, key: str, upload: PartsUpload, metadata: Mapping[str, str]) -> PutResult:
        """Store a body of parts as a new version of `key`.

        The caller verifies the digest of the result. Raises BaseUnusable, and as `put` does.
        """
        commit_seconds = self._commit_seconds + upload.patience_seconds
        return self._hold(requests.put(key, upload, metadata, None, commit_seconds))

    def checkpoints(self, key: str) -> list[VersionInfo]:
        """Return the checkpoints of backups of `key`, oldest first, at most CHECKPOINTS_MAX.

        Raises NotFound (the server takes none), AccessDenied, StoreUnavailable.
        """
        return self._hold(requests.checkpoints(key))

    def put_checkpoint(self, key: str, upload: Upload, metadata: Mapping[str, str]) -> PutResult:
        """Store a tree as a checkpoint of `key`. Raises as `put` does."""
        return self._hold(requests.put_checkpoint(key, upload, metadata, self._commit_seconds))

    def delete_checkpoints(self, key: str) -> int:
        """Delete the checkpoints of `key`; return how many. Raises AccessDenied, StoreUnavailable."""
        return self._hold(requests.delete_checkpoints(key))

    def open_checkpoint(self, info: VersionInfo, start: int, stop: int) -> RemoteBlob:
        """Return the bytes [start, stop) of a checkpoint that `info` described."""
        return RemoteBlob(self, info, start, requests.check_range(info, start, stop), requests.CHECKPOINTS_PATH)

    def open_range(self, info: VersionInfo, start: int, stop: int) -> RemoteBlob:
        """Return the bytes [start, stop) of a version that `info` described."""
        return RemoteBlob(self, info, start, requests.check_range(info, start, stop))

    def import_tar(
        self,
        key: str,
        source: str | Path | BinaryIO,
        *,
        options: ImportOptions | None = None,
        counts: ImportCounts | None = None,
    ) -> ImportResult:
        """Store a tar archive as one version of `key`, a tree; see `Store.import_tar`.

        Raises as `Store.import_tar` does, and AccessDenied.
        """
        from nearkin.trees.remote_trees import import_tar_remote
        from nearkin.trees.tar_import import ImportCounts, ImportOptions

        return import_tar_remote(self, key, source, options or ImportOptions(), counts or ImportCounts())

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """Folders of this machine that the store writes: none."""
        return ()

    def tree(self, key: str, version: int | None = None) -> TreeReader:
        """Return a reader of a tree's entries, which reads ranges of the version.

        Raises NotFound, Corrupt (damaged, or no tree), AccessDenied, StoreUnavailable.
        """
        from nearkin.trees.remote_trees import open_remote_tree

        return open_remote_tree(self, key, version)

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
        """Restore a tree, or `path` in it, into the folder `target`; see `Store.restore`.

        Raises as `Store.restore` does, and AccessDenied.
        """
        from nearkin.trees.remote_trees import restore_remote
        from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions

        return restore_remote(
            self, key, Path(target), version, path, options or RestoreOptions(), counts or RestoreCounts()
        )


class RemoteBlob(VersionFile):
    """A version behind a gateway as a file; the gateway verifies each chunk."""

    def __init__(
        self, store: RemoteStore, info: VersionInfo, start: int, stop: int, prefix: str = requests.BLOBS_PATH
    ) -> None:
        """`prefix`: of the path that reads the version."""
        super().__init__(info, stop - start)
        self._store = store
        self._prefix = prefix
        self._start = start

    def _pieces_of(self, start: int, stop: int) -> Generator[memoryview, None, None]:
        """Yield bytes in order, over another connection where one breaks.

        The BLAKE3 of a whole version is compared here too, before its last bytes are yielded.
        """
        download = Download(self.info, self._start + start, self._start + stop, self._prefix)
        while not download.is_complete:
            response, pieces, piece = self._store.open_download(download)
            failure: NearkinError | None = None
            try:
                while piece and not download.is_complete:
                    ready = download.take(piece)
                    if download.is_complete:  # before the last bytes: a reader may never ask for more than these
                        response.close()
                    if ready:
                        yield memoryview(ready)
                    piece = b"" if download.is_complete else next(pieces, b"")
            except httpx.TransportError as err:
                failure = unreachable(download.label, err)
            finally:
                response.close()
            if not download.is_complete:
                download.on_disconnect(failure)
