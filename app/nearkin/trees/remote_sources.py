"""Find the versions on a server that a backup takes content of.

    source 0           the newest version, if it is a tree
    source 1 to n      checkpoints of runs that did not end, oldest first
    source n + 1 on    checkpoints of this run

Invariant: a checkpoint that is older than the newest version is not used: the backup that made it has ended.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from nearkin.trees.parent_tree import ParentTree, RemoteSource
from nearkin_shared.errors import BaseUnusable, Corrupt, FormatTooNew, NotFound
from nearkin_shared.formats.upload_parts import CHECKPOINTS_MAX
from nearkin_shared.reading.tree_reader import TreeReader

if TYPE_CHECKING:
    from nearkin.client.sync import RemoteStore
    from nearkin.trees.checkpointed_tree import SourceRange
    from nearkin_shared.results import VersionInfo

CONTINUED_MAX = CHECKPOINTS_MAX * 9 // 10
"""Checkpoints of runs that did not end; there is room for others of this one."""
_log = logging.getLogger("nearkin.client")


class UsedSources(NamedTuple):
    """The sources of one upload, end to end: base, then checkpoints by version."""

    base: int | None
    checkpoints: list[int]
    starts: dict[int, int]
    """Where each source starts, by its number."""
    size_bytes: int
    sources: RemoteSources

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes of the sources. Raises what the server answers."""
        ordered = sorted((first, source) for source, first in self.starts.items())
        first, source = ordered[bisect_right(ordered, (start, 1 << 62)) - 1]
        return self.sources.read(source, start - first, stop - first)


class RemoteSources:
    """The sources of a backup."""

    def __init__(self, store: RemoteStore, base: VersionInfo | None) -> None:
        self._store = store
        self._has_base = base is not None
        self.versions: list[VersionInfo] = [] if base is None else [base]
        """By number; without a base, number 0 is a checkpoint."""
        self._parents: list[ParentTree] = []
        self.has_checkpoints = False
        """Whether the server has any, of this run or of others."""

    @classmethod
    def open(cls, store: RemoteStore, key: str) -> RemoteSources:
        """Find the sources of a key.

        Raises NotFound (the server takes no checkpoints), BaseUnusable, AccessDenied, Corrupt, FormatTooNew.
        """
        checkpoints = store.checkpoints(key)
        base = None
        with suppress(NotFound):
            base = store.newest_base(key)
            if base is None or not base.is_tree:
                raise BaseUnusable(f"key {key!r}: its newest version is no tree, or the server takes no ranges of it")
        found = cls(store, base)
        if base is not None:
            found._add_parent(base, is_checkpoint=False)
        found.has_checkpoints = bool(checkpoints)
        for info in checkpoints[:CONTINUED_MAX]:
            if base is None or info.created > base.created:
                with suppress(Corrupt, FormatTooNew):
                    found._add_parent(info, is_checkpoint=True)
        return found

    def _add_parent(self, info: VersionInfo, *, is_checkpoint: bool) -> None:
        """Open a tree and add it. Raises Corrupt, FormatTooNew."""

        def read_range(start: int, stop: int) -> bytes:
            opened = self._store.open_checkpoint if is_checkpoint else self._store.open_range
            return opened(info, start, stop).read()

        label = f"{'checkpoint of ' if is_checkpoint else ''}{info.key!r} version {info.version}"
        try:
            reader = TreeReader.open(
                read_range, info.size_bytes, label, bytes.fromhex(info.digest.removeprefix("blake3:"))
            )
        except Corrupt:  # stored through a server: the digest is that of all bytes
            reader = TreeReader.open(read_range, info.size_bytes, label)
        if is_checkpoint:
            self.versions.append(info)
        remote = RemoteSource(len(self.versions) - 1, dict(info.metadata) if is_checkpoint else None)
        self._parents.append(ParentTree(reader, None, read_range, remote=remote))

    def parents(self) -> list[ParentTree]:
        """Return the trees, the newest checkpoint first and the base last."""
        return self._parents[::-1]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of contents in checkpoints of runs that did not end."""
        return sum(parent.reader.content_bytes for parent in self._parents if parent.is_checkpoint)

    def add(self, info: VersionInfo) -> None:
        """Add a checkpoint of this run."""
        self.versions.append(info)
        self.has_checkpoints = True

    def read(self, source: int, start: int, stop: int) -> bytes:
        """Return bytes of a source. Raises what the server answers."""
        is_base = self._has_base and not source
        opened = self._store.open_range if is_base else self._store.open_checkpoint
        return opened(self.versions[source], start, stop).read()

    def used(self, ranges: Iterable[SourceRange]) -> UsedSources:
        """Return the sources that ranges are of."""
        numbers = {one.source for one in ranges if one.source < len(self.versions)}
        has_base = self._has_base and 0 in numbers
        checkpoints = sorted(numbers - {0} if has_base else numbers, key=lambda number: self.versions[number].version)
        starts, position = dict[int, int](), 0
        for number in ([0] if has_base else []) + checkpoints:
            starts[number] = position
            position += self.versions[number].size_bytes
        return UsedSources(
            self.versions[0].version if has_base else None,
            [self.versions[number].version for number in checkpoints],
            starts,
            position,
            self,
        )
