"""Options and counts of a backup, and the walk that a backup and its dry run share.

Invariant: an entry that is not stored as it is, is counted; the first PROBLEMS_MAX are kept with path and reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from nearkin.trees.exclusions import ExclusionOptions, Exclusions
from nearkin.trees.source_patterns import translate_patterns
from nearkin.trees.unmatched_patterns import PatternSource
from nearkin.trees.walker import NewestRoot, TreeWalker, tree_paths
from nearkin_shared.formats.tree_entry_group import EntryFlag, EntryKind, TreeEntry

PROBLEMS_MAX = 10_000
"""Problems that are kept with their paths; all are counted."""


class ComparisonOptions(NamedTuple):
    """How an unchanged file is recognised without being read."""

    force_rescan: bool = False
    """Read every file."""
    ignore_ctime: bool = False
    ignore_inode: bool = False

    def is_unchanged(self, status: os.stat_result, entry: TreeEntry) -> bool:
        """Return whether a backup takes over the content of a file from an entry of its parent."""
        return not entry.flags and self._has_status(status, entry)

    def is_continued(self, status: os.stat_result, entry: TreeEntry) -> bool:
        """Return whether a backup may continue the start of a file that a checkpoint has."""
        return entry.flags == EntryFlag.INCOMPLETE and self._has_status(status, entry)

    def _has_status(self, status: os.stat_result, entry: TreeEntry) -> bool:
        return (
            entry.size == status.st_size
            and entry.mtime_ns == status.st_mtime_ns
            and (entry.ctime_ns == status.st_ctime_ns or self.ignore_ctime)
            and (entry.inode == status.st_ino or self.ignore_inode)
            and entry.kind == EntryKind.FILE
            and not self.force_rescan
        )


class FileState(StrEnum):
    """State of a file compared with the newest tree and with checkpoints."""

    NEW = "new"
    CHANGED = "changed"
    """Size, mtime, ctime or inode differ, or all files are read."""
    UNCHANGED = "unchanged"


class FileReport(NamedTuple):
    """A file of a backup."""

    state: FileState
    path: bytes
    """In the file system."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BackupOptions:
    """Options of a backup."""

    tags: Sequence[str] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    exclusions: ExclusionOptions = field(default_factory=ExclusionOptions)
    comparison: ComparisonOptions = field(default_factory=ComparisonOptions)
    one_file_system: bool = False
    skip_if_unchanged: bool = False
    """Store no version if the tree is equal to the newest one."""
    on_file: Callable[[FileReport], None] | None = None
    """Called with each new or changed file; a dry run calls it with unchanged files, too."""


class PathProblem(NamedTuple):
    """An entry that is not stored as it is."""

    path: bytes
    """In the file system."""
    reason: str


@dataclass(slots=True)
class BackupCounts:
    """Progress of a backup; another thread may read it."""

    files: int = 0
    folders: int = 0
    others: int = 0
    """Symlinks, hard links, devices and FIFOs."""
    new_files: int = 0
    """Files that neither the newest tree nor a checkpoint has."""
    changed_files: int = 0
    """Files that are read again: size, mtime, ctime or inode differ, or all files are read."""
    unchanged_files: int = 0
    read_bytes: int = 0
    """Bytes read from files."""
    reused_bytes: int = 0
    """Bytes taken over from the parent."""
    unread: int = 0
    changed: int = 0
    """Files that changed while they were read."""
    skipped: int = 0
    """Sockets, and folders that are left out."""
    checkpoints: int = 0
    """Durable ones that the next run continues, also those of earlier runs."""
    path: bytes = b""
    """The entry in progress."""
    root: bytes = b""
    """The folder that is stored, as an absolute path."""
    newest_root: bytes = b""
    """That of the newest tree of the key; empty if it has none, or of no folder."""
    problems: list[PathProblem] = field(default_factory=list)
    skips: list[PathProblem] = field(default_factory=list)
    unmatched_patterns: list[PatternSource] = field(default_factory=list)
    """Exclude patterns that matched nothing; known at the end."""
    is_unchanged: bool = True
    """Whether the tree is equal to its parent so far."""


class BackupWalk:
    """A walk over the folders of one backup."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        options: BackupOptions,
        counts: BackupCounts,
        left_out: Sequence[Path] = (),
        newest_root: NewestRoot = lambda: None,
    ) -> None:
        """`left_out`: folders that are not entered, such as those of the store.

        `newest_root`: is called if a path is absent.
        Raises BadInput (a path does not exist, a pattern does not parse).
        """
        self.counts = counts
        self._on_file = options.on_file
        self._comparison = options.comparison
        chosen = tree_paths(paths, newest_root)
        self._root = counts.root = chosen.root
        self._exclusions = Exclusions(
            options.exclusions, lambda sources: translate_patterns(sources, chosen.prefixes, self._has_entry)
        )
        self._walker = TreeWalker(
            chosen,
            self._exclusions,
            self.report_problem,
            self.report_skip,
            one_file_system=options.one_file_system,
            left_out=_identities(left_out),
        )

    def count_read_file(self, path: bytes, size_bytes: int, *, is_known: bool) -> None:
        """Count and report a file that is read."""
        self.counts.files += 1
        if is_known:
            self.counts.changed_files += 1
        else:
            self.counts.new_files += 1
        self.report_file(FileState.CHANGED if is_known else FileState.NEW, path, size_bytes)

    def report_file(self, state: FileState, path: bytes, size_bytes: int) -> None:
        """Report a file to the caller that asked for reports."""
        if self._on_file is not None:
            self._on_file(FileReport(state, path, size_bytes))

    def report_problem(self, path: bytes, reason: str) -> None:
        """Count an entry that cannot be read."""
        self.counts.unread += 1
        found = self._in_tree(path)
        self._walker.partial.add(found)
        self._walker.partial.add(found.rpartition(b"/")[0])
        self._keep(self.counts.problems, path, reason)

    def report_change(self, path: bytes, reason: str) -> None:
        """Count a file that changed while it was read."""
        self.counts.changed += 1
        self._keep(self.counts.problems, path, reason)

    def report_skip(self, path: bytes, reason: str) -> None:
        """Count an entry that is left out on purpose."""
        self.counts.skipped += 1
        self._walker.partial.add(self._in_tree(path))
        self._keep(self.counts.skips, path, reason)

    def partial_folders(self) -> tuple[bytes, ...] | msgspec.UnsetType:
        """Return the folders of which something is left out; unset if they are too many."""
        return self._walker.partial.sorted()

    def note_unmatched_patterns(self) -> None:
        """Note the exclude patterns that matched nothing; for the end of the walk."""
        self.counts.unmatched_patterns = self._exclusions.unmatched()

    def _has_entry(self, path: bytes) -> bool:
        """Return whether the root has an entry of this path."""
        return os.path.lexists(os.path.join(self._root, path))

    def _in_tree(self, path: bytes) -> bytes:
        return path[len(self._root) :].lstrip(b"/")

    def _keep(self, problems: list[PathProblem], path: bytes, reason: str) -> None:
        if len(problems) < PROBLEMS_MAX:
            problems.append(PathProblem(path, reason))


def _identities(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return device and inode of the folders that exist."""
    found = []
    for folder in folders:
        with suppress(OSError):
            status = folder.stat()
            found.append((status.st_dev, status.st_ino))
    return found
