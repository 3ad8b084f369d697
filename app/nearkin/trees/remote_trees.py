"""Back up folders through a server, and read trees from it.

    backup thread -> pipe -> upload

Every file is read and sent, unless `skip_if_unchanged` finds no change: the server deduplicates what it receives. A
tree that is stored through a server has the BLAKE3 of all its bytes as digest; a reader verifies groups and files by
the digests in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from nearkin.trees.backup import TreeBackup
from nearkin.trees.backup_walk import BackupCounts, BackupOptions, ComparisonOptions
from nearkin.trees.byte_pipe import BytePipe
from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
from nearkin.trees.store_backup import BackupResult, metadata_of, tree_metadata
from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult, open_import
from nearkin.trees.tree_comparison import TreeComparison
from nearkin.trees.tree_restore import TreeRestore
from nearkin.trees.tree_sinks import StreamSink, TreeSink
from nearkin_shared.errors import Corrupt, FormatTooNew, NotFound
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.validation import check_user_key

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore


class WritableTree(Protocol):
    """A tree that is made while it is sent."""

    def write(self, sink: TreeSink) -> bytes:
        """Write the tree; return its digest."""


def open_tree_stream(source: WritableTree) -> BytePipe:
    """Return the bytes of a tree, which a thread of its own writes while they are read."""

    def write(file: BinaryIO) -> None:
        sink = StreamSink(file)
        source.write(sink)
        sink.flush()

    return BytePipe(write, "tree")


def back_up_remote(
    store: RemoteStore, key: str, paths: Sequence[str | Path], options: BackupOptions, counts: BackupCounts
) -> BackupResult:
    """Store folders and files as one version of `key` on a server.

    Raises BadInput, and what `RemoteStore.put` raises.
    """
    check_user_key(key)
    if options.skip_if_unchanged and not options.comparison.force_rescan:
        compared = BackupCounts()
        if _is_unchanged(store, key, paths, options, compared):
            for field in fields(BackupCounts):
                setattr(counts, field.name, getattr(compared, field.name))
            return BackupResult(None, counts)
    reading_all = replace(options, comparison=ComparisonOptions(force_rescan=True))
    stream = open_tree_stream(TreeBackup(paths, reading_all, counts))
    try:
        result = store.put(key, cast("BinaryIO", stream), metadata=metadata_of(options))
    finally:
        stream.close()
    return BackupResult(result, counts)


def _is_unchanged(
    store: RemoteStore, key: str, paths: Sequence[str | Path], options: BackupOptions, counts: BackupCounts
) -> bool:
    """Return whether the newest version of a key has the entries of these folders.

    Only entries are read from the server, and statuses from the folders. A version that another program stores, or
    deletes, during the walk leaves the compared one without meaning.
    """
    try:
        number = store.info(key).version
        is_unchanged = TreeComparison(paths, options, counts).is_unchanged(open_remote_tree(store, key, number))
        return is_unchanged and store.info(key).version == number
    except (NotFound, Corrupt, FormatTooNew):  # whatever it is, a new version is stored
        return False


def import_tar_remote(
    store: RemoteStore, key: str, source: str | Path | BinaryIO, options: ImportOptions, counts: ImportCounts
) -> ImportResult:
    """Store a tar archive as one version of `key` on a server.

    Raises as `Store.import_tar` does.
    """
    check_user_key(key)
    with open_import(source, options, counts) as tree:
        stream = open_tree_stream(tree)
        try:
            result = store.put(key, cast("BinaryIO", stream), metadata=tree_metadata(options.metadata, options.tags))
        finally:
            stream.close()
    return ImportResult(result, counts)


def open_remote_tree(store: RemoteStore, key: str, version: int | None = None) -> TreeReader:
    """Return a reader of a tree on a server.

    Raises NotFound, Corrupt (damaged, or no tree), StoreUnavailable.
    """
    info = store.info(key, version)

    def read_range(start: int, stop: int) -> bytes:
        return store.get(key, info.version, start=start, stop=stop).read()

    label = f"{key!r} version {info.version}"
    digest = bytes.fromhex(info.digest.removeprefix("blake3:"))
    try:
        return TreeReader.open(read_range, info.size_bytes, label, digest)
    except Corrupt:  # stored through a server: the digest is that of all bytes
        return TreeReader.open(read_range, info.size_bytes, label)


def restore_remote(
    store: RemoteStore,
    key: str,
    target: Path,
    version: int | None,
    path: bytes,
    options: RestoreOptions,
    counts: RestoreCounts,
) -> RestoreCounts:
    """Restore a tree from a server. Raises as `Store.restore` does."""
    number = store.info(key, version).version  # one version for entries and contents: another may become the newest
    reader = open_remote_tree(store, key, number)
    restore = TreeRestore(
        reader, lambda start, stop: store.get(key, number, start=start, stop=stop).pieces(), target, options, counts
    )
    return restore.run(path)
