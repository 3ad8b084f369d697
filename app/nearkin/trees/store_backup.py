"""Back up folders into an open store.

Unfinished versions (checkpoints) are versions of a reserved key, which no listing shows; the next backup of the same
key takes over their content, and its commit deletes them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nearkin.trees.backup import FURTHER_FIELD, CheckpointOptions, TreeBackup, TreeUnchanged, number_of
from nearkin.trees.backup_walk import BackupCounts, BackupOptions
from nearkin.trees.parent_tree import ParentTree
from nearkin_shared.errors import BadInput, Corrupt, NotFound, RetentionActive
from nearkin_shared.formats.manifest import Manifest, encode_metadata
from nearkin_shared.reading.chunk_ranges import ChunkRanges, PlacedChunks
from nearkin_shared.reading.restore import VersionReader
from nearkin_shared.reading.tree_reader import TreeReader
from nearkin_shared.results import CONTENT_TYPE_TREE, HOST, PATHS, TAGS, PutResult
from nearkin_shared.utils.terminal import printable
from nearkin_shared.validation import CONTENT_TYPE, checkpoint_key_of

_log = logging.getLogger("nearkin")
CHECKPOINT_REASON = "the backup was completed"
PATHS_CHARACTERS_MAX = 1000
"""Of the paths in a version's metadata, so that listings have them from the index."""
CHECKPOINT_KEY_CHARACTERS = 200
"""Of the key that a checkpoint's metadata name."""
CHECKPOINTS_CONTINUED_MAX = 16
"""Each later one is of a run that was killed before it reached the end of the one before."""


@dataclass(frozen=True, slots=True)
class BackupResult:
    """The result of a backup."""

    put: PutResult | None
    """None: nothing changed, and no version was stored."""
    counts: BackupCounts

    @property
    def is_complete(self) -> bool:
        """Whether every entry could be read, and none changed meanwhile."""
        return not self.counts.unread and not self.counts.changed


class DamageNoted(Corrupt):
    """A version is damaged, as is noted now: the next put verifies its containers."""


class TreeStore(NamedTuple):
    """Operations of an open store that a backup uses."""

    manifest: Callable[[str, int | None], Manifest]
    """Returns a version of a key, by default the newest. Raises NotFound, Corrupt."""
    blob: Callable[[Manifest, int, int], VersionReader]
    """Opens a range of a version."""
    put: Callable[[str, TreeBackup, dict[str, str]], PutResult]
    delete: Callable[[str], int]
    check_sound: Callable[[Manifest], None]
    """Raises Corrupt if a chunk of a version is known to be missing or damaged, DamageNoted if that is new,
    StoreUnavailable."""
    folders: Sequence[Path]
    """Folders that the store writes, which a backup leaves out."""


def back_up(
    store: TreeStore, key: str, paths: Sequence[str | Path], options: BackupOptions, counts: BackupCounts
) -> BackupResult:
    """Store folders and files as one version of `key`. Raises as `Store.backup` does."""
    checkpoint_key = checkpoint_key_of(key)

    def parents() -> list[ParentTree]:
        newest = _parent(store, key)
        since_us = 0 if newest is None or newest.manifest is None else newest.manifest.created_us
        return [*_unfinished(store, checkpoint_key, since_us), *([] if newest is None else [newest])]

    def newest_root() -> bytes | None:
        newest = _parent(store, key)
        return None if newest is None else newest.reader.summary.root

    metadata = metadata_of(options, paths)
    checkpoint = CheckpointOptions(checkpoint_key, {**metadata, "of": key[:CHECKPOINT_KEY_CHARACTERS]})

    def put() -> PutResult:
        backup = TreeBackup(
            paths,
            options,
            counts,
            left_out=store.folders,
            parents=parents,
            checkpoint=checkpoint,
            newest_root=newest_root,
        )
        return store.put(key, backup, metadata)

    result: PutResult | None = None
    with suppress(TreeUnchanged):
        try:
            result = put()
        except DamageNoted as err:  # nothing was stored yet
            _log.warning("%r: its newest version is damaged, which is verified first: %s", key, err)
            result = put()
    with suppress(NotFound, RetentionActive):  # an earlier release retained checkpoints, too
        store.delete(checkpoint_key)
    return BackupResult(result, counts)


def metadata_of(options: BackupOptions, paths: Sequence[str | Path]) -> dict[str, str]:
    """Return the metadata of a backup's version.

    Host and paths are left out where there is no room for them.
    """
    found = tree_metadata(options.metadata, options.tags)
    with_source = {HOST: printable(socket.gethostname()), PATHS: _paths_text(paths), **found}
    try:
        encode_metadata(with_source)
    except BadInput:
        return found
    return with_source


def _paths_text(paths: Sequence[str | Path]) -> str:
    """Return absolute paths as a JSON array of PATHS_CHARACTERS_MAX at most.

    `...` stands for the rest.
    """
    shown, left = list[str](), PATHS_CHARACTERS_MAX
    for path in paths:
        text = printable(os.path.abspath(path))
        left -= len(json.dumps(text, ensure_ascii=False)) + len(", ")
        if left < 0:
            shown.append("...")
            break
        shown.append(text)
    return json.dumps(shown, ensure_ascii=False)


def tree_metadata(metadata: Mapping[str, str], tags: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a tree's version."""
    found = {CONTENT_TYPE: CONTENT_TYPE_TREE, **metadata}
    if tags:
        found[TAGS] = ",".join(sorted(set(tags)))
    return found


def _unfinished(store: TreeStore, key: str, since_us: int) -> Iterator[ParentTree]:
    """Yield the newest checkpoint, then earlier ones that reach further into the tree.

    A run that is killed before it reached the end of the checkpoint that it continues leaves a newer, shorter one.
    """
    version: int | None = None
    for _ in range(CHECKPOINTS_CONTINUED_MAX):
        parent = _parent(store, key, version)
        if parent is None or parent.manifest is None or parent.manifest.created_us <= since_us:
            return
        yield parent
        version = number_of(parent.metadata.get(FURTHER_FIELD))
        if not version:
            return


def _parent(store: TreeStore, key: str, version: int | None = None) -> ParentTree | None:
    """Return a version of a key, by default the newest, if it is a tree that can be read."""

    def read_range(start: int, stop: int) -> bytes:
        return store.blob(manifest, start, stop).read()

    def find_chunks(start: int, stop: int) -> Iterator[PlacedChunks]:
        return store.blob(manifest, start, stop).chunks()

    try:
        manifest = store.manifest(key, version)
        if not manifest.is_tree:
            return None
        store.check_sound(manifest)
        reader = TreeReader.open(
            read_range, manifest.size_bytes, f"{key!r} version {manifest.version}", manifest.blake3
        )
    except NotFound:
        return None
    except DamageNoted:
        raise
    except Corrupt as err:
        _log.warning("%r: its newest version is damaged, all files are read: %s", key, err)
        return None
    return ParentTree(reader, manifest, read_range, ChunkRanges(find_chunks, manifest.size_bytes))
