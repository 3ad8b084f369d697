"""Back up folders through a server, and read trees from it.

    backup thread -> pipe -> upload: new bytes, and ranges of the newest version (a body of parts)

Files that are unchanged since the newest tree are neither read nor sent, if the server takes ranges of it; else all
are, and the server deduplicates what it receives. A tree of which all bytes were sent has their BLAKE3 as digest; a
reader verifies groups and files by the digests in the tree.

Invariant: a tree whose parts the server did not join to what the client made is reported as Corrupt.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, cast

from nearkin.client.streaming import PartsUpload, Upload
from nearkin.trees.backup import READ_BYTES_FIELD, CheckpointOptions, TreeBackup
from nearkin.trees.backup_walk import BackupCounts, BackupOptions, ComparisonOptions
from nearkin.trees.byte_pipe import BytePipe
from nearkin.trees.checkpointed_tree import CheckpointedTree, CheckpointSink
from nearkin.trees.parent_tree import CONTINUES_FIELD
from nearkin.trees.remote_sources import RemoteSources
from nearkin.trees.restore_counts import RestoreCounts, RestoreOptions
from nearkin.trees.store_backup import BackupResult, metadata_of, tree_metadata
from nearkin.trees.tar_import import ImportCounts, ImportOptions, ImportResult, open_import
from nearkin.trees.tree_comparison import TreeComparison
from nearkin.trees.tree_restore import TreeRestore
from nearkin.trees.tree_sinks import PartsSink, StreamSink, TreeSink
from nearkin_shared.errors import (
    AccessDenied,
    BadInput,
    BaseUnusable,
    Corrupt,
    FormatTooNew,
    NotFound,
    QuotaExceeded,
)
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.results import CONTENT_TYPE_TREE
from nearkin_shared.validation import CONTENT_TYPE, check_user_key

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore
    from nearkin_shared.results import Ledger, PutResult, VersionInfo

_log = logging.getLogger("nearkin.client")
AHEAD_BYTES_MAX = 16 << 20
"""A body up to it is made before it is sent, and sent again after a break: few changes need no upload while the walk
goes on."""


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
            _set_counts(counts, compared)
            _delete_checkpoints(store, key)
            return BackupResult(None, counts)
    if not options.comparison.force_rescan:
        try:
            return BackupResult(_send_changes(store, key, paths, options, counts), counts)
        except (BaseUnusable, NotFound) as err:
            _log.info("backup of %r: all files are read and sent: %s", key, err)
            _set_counts(counts, BackupCounts())
        except QuotaExceeded as err:  # checkpoints count until the version is stored, which has their bytes again
            _log.warning("backup of %r: all files are read and sent, without checkpoints: %s", key, err)
            _set_counts(counts, BackupCounts())
            _delete_checkpoints(store, key)
    reading_all = replace(options, comparison=ComparisonOptions(force_rescan=True))
    stream = open_tree_stream(TreeBackup(paths, reading_all, counts, newest_root=lambda: _newest_root(store, key)))
    try:
        result = store.put(key, cast("BinaryIO", stream), metadata=metadata_of(options, paths))
    finally:
        stream.close()
    _delete_checkpoints(store, key)
    return BackupResult(result, counts)


def _newest_root(store: RemoteStore, key: str) -> bytes | None:
    """Return the root of the newest tree of a key; None if this token can read none."""
    try:
        return store.tree(key).summary.root
    except (AccessDenied, Corrupt, FormatTooNew, NotFound):
        return None


def _delete_checkpoints(store: RemoteStore, key: str) -> None:
    """Delete the checkpoints of a key, where the server has any."""
    with suppress(NotFound, AccessDenied, BadInput):
        store.delete_checkpoints(key)


def _set_counts(counts: BackupCounts, found: BackupCounts) -> None:
    """Replace the counts, which another thread may read."""
    for field in fields(BackupCounts):
        setattr(counts, field.name, getattr(found, field.name))


def _send_changes(
    store: RemoteStore, key: str, paths: Sequence[str | Path], options: BackupOptions, counts: BackupCounts
) -> PutResult:
    """Store a tree as changes of the newest one and of checkpoints.

    Raises BaseUnusable or NotFound where the server takes no ranges, for a version that is deleted, damaged, or not
    open to the token.
    """
    try:
        sources = RemoteSources.open(store, key)
    except (AccessDenied, Corrupt, FormatTooNew) as err:  # a token that may only write, or a damaged version
        raise BaseUnusable(str(err)) from err
    changing = replace(options, skip_if_unchanged=False)
    metadata = metadata_of(options, paths)
    checkpoint = CheckpointOptions("", {})
    backup = TreeBackup(
        paths,
        changing,
        counts,
        parents=sources.parents,
        checkpoint=checkpoint,
        newest_root=lambda: _newest_root(store, key),
    )
    earlier_bytes = sources.checkpoint_bytes

    def send(file: BinaryIO, new_bytes: int, continues: str) -> PutResult:
        fields = {CONTENT_TYPE: CONTENT_TYPE_TREE, READ_BYTES_FIELD: str(earlier_bytes + new_bytes)}
        if continues:
            fields[CONTINUES_FIELD] = continues
        return store.put_checkpoint(key, Upload(file), fields)

    sink = CheckpointSink(send, len(sources.versions))
    tree = CheckpointedTree(sink, backup.root, socket.gethostname())
    try:
        digest = backup.write_to(tree, sink)
        sink.finish()
    finally:
        sink.abort()
    checkpoints = [outgoing.done.result() for outgoing in sink.ended]
    for checkpoint_result in checkpoints:
        sources.add(replace(checkpoint_result.info, key=key))
    result = _send_ranges(store, key, metadata, sources, sink, tree, digest)
    if sources.has_checkpoints:
        store.delete_checkpoints(key)
    return replace(result, ledger=_joined_ledger(result.ledger, [one.ledger for one in checkpoints]))


def _joined_ledger(whole: Ledger, checkpoints: Sequence[Ledger]) -> Ledger:
    """Return the ledger of a version whose new bytes were stored as checkpoints.

    The put of the version found them there again.
    """
    added = {
        name: getattr(whole, name) + sum(getattr(one, name) for one in checkpoints)
        for name in ("delta_chunks", "raw_chunks", "delta_chunk_bytes", "delta_bytes", "block_bytes", "raw_block_bytes")
    }
    unique_bytes = whole.unique_bytes + sum(one.unique_bytes for one in checkpoints)
    return replace(
        whole,
        **added,
        duplicate_chunks=max(whole.zero_chunks, whole.chunks - added["delta_chunks"] - added["raw_chunks"]),
        unique_bytes=min(unique_bytes, whole.logical_bytes),  # checkpoints have entries of their own
        stored_bytes=whole.stored_bytes + sum(one.stored_bytes for one in checkpoints),
    )


def _send_ranges(
    store: RemoteStore,
    key: str,
    metadata: dict[str, str],
    sources: RemoteSources,
    sink: CheckpointSink,
    tree: CheckpointedTree,
    digest: bytes,
) -> PutResult:
    """Store a tree whose new bytes are in checkpoints, or held.

    Raises BaseUnusable, Corrupt, and what a put raises.
    """
    used = sources.used(sink.ranges)
    held, held_source = memoryview(sink.last.held), len(sources.versions)

    def write(file: BinaryIO) -> None:
        parts = PartsSink(file, used.read_range)
        for source, start, stop in sink.ranges:
            if source == held_source:
                parts.write(held[start:stop])
            else:
                parts.copy_range(used.starts[source] + start, used.starts[source] + stop)
        for part in tree.ending():
            parts.write(part)
        parts.end(digest)

    stream = BytePipe(write, "tree")
    try:
        body = stream.read_ahead(AHEAD_BYTES_MAX)  # sent again where the connection breaks
        source = cast("BinaryIO", stream) if body is None else body
        upload = PartsUpload(source, used.base, used.size_bytes, used.checkpoints)
        result = store.put_parts(key, upload, metadata)
    finally:
        stream.close()
    size_bytes = sink.size_bytes + tree.ending_bytes
    _check_result(store, result.info, TreeEnd(size_bytes, digest))
    return result


class TreeEnd(NamedTuple):
    """Size and digest of a tree as it was made."""

    size_bytes: int
    digest: bytes


def _check_result(store: RemoteStore, info: VersionInfo, made: TreeEnd) -> None:
    """Compare a version with the tree that was sent. Raises Corrupt."""
    if info.size_bytes == made.size_bytes:
        if info.digest == f"blake3:{made.digest.hex()}":
            return
        if _open_tree(store, info).digest == made.digest:  # the digest of the version is that of all bytes
            return
    raise Corrupt(
        f"key {info.key!r} version {info.version}: {info.size_bytes} bytes are stored, and not the tree of "
        f"{made.size_bytes} bytes that was sent: delete the version, and back up with --force-rescan"
    )


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
    return _open_tree(store, store.info(key, version))


def _open_tree(store: RemoteStore, info: VersionInfo) -> TreeReader:
    """Return a reader of a tree. Raises as `open_remote_tree`."""

    def read_range(start: int, stop: int) -> bytes:
        return store.open_range(info, start, stop).read()

    label = f"{info.key!r} version {info.version}"
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
