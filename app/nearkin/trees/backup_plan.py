"""Predict a backup without reading files: the dry run, and the total of a progress bar.

    walk -> entry unchanged since the newest tree? -> reused : would be read

A file counts as unchanged under the same conditions as in `nearkin.trees.backup`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from nearkin.trees.attributes import KINDS
from nearkin.trees.backup import PROBLEMS_MAX, BackupCounts, ComparisonOptions, PathProblem
from nearkin.trees.exclusions import Exclusions
from nearkin.trees.store_backup import BackupOptions, folder_identities
from nearkin.trees.walker import ListedFolder, TreeWalker, tree_paths
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import TreeReader


@dataclass(slots=True)
class PlannedCounts(BackupCounts):
    """The counts that a backup would have; `read_bytes` are sizes, holes included."""

    new_files: int = 0
    """Files that the newest tree does not have."""
    changed_files: int = 0
    """Files that differ from the newest tree's in size, mtime, ctime or inode."""
    removed: int = 0
    """Entries of the newest tree that the next one would not have."""


class BackupPlan:
    """Walks folders as a backup does, and compares statuses with the newest tree."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        options: BackupOptions,
        store_folders: Sequence[Path],
        counts: PlannedCounts,
    ) -> None:
        """`store_folders`: folders that the store writes, which a backup leaves out.

        Raises BadInput.
        """
        self.counts = counts
        self._comparison = options.comparison
        self._links: set[tuple[int, int]] = set()
        self._walker = TreeWalker(
            tree_paths(paths),
            Exclusions(options.exclusions),
            self._report_problem,
            self._report_skip,
            one_file_system=options.one_file_system,
            left_out=folder_identities(store_folders),
        )

    def run(self, parent: TreeReader | None) -> PlannedCounts:
        """Compare all entries with the newest tree. Raises BadInput if the root cannot be listed."""
        entries = _ParentStatuses(parent)
        entries.find(b"", b"")
        for listed in self._walker.folders():
            key = sort_key(listed.path)
            for name, status in listed.entries:
                self._add(listed, name, status, entries.find(key, name))
        self.counts.removed = entries.total - entries.matched
        self.counts.is_unchanged = False
        return self.counts

    def count_bytes(self, add: Callable[[int], None], stop: Event) -> None:
        """Call `add` with the bytes of the files of each folder, until `stop` is set."""
        for listed in self._walker.folders():
            if stop.is_set():
                return
            add(sum(status.st_size for _, status in listed.entries if stat.S_ISREG(status.st_mode)))

    def _add(self, listed: ListedFolder, name: bytes, status: os.stat_result, found: TreeEntry | None) -> None:
        path = os.path.join(listed.file_path, name)
        kind = KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            self._report_skip(path, "is a socket")
        elif kind == EntryKind.FOLDER:
            self.counts.folders += 1
        elif kind != EntryKind.FILE or self._is_further_link(status):
            self.counts.others += 1
        elif found is not None and is_unchanged(status, found, self._comparison):
            self.counts.files += 1
            self.counts.unchanged_files += 1
            self.counts.reused_bytes += found.content_bytes
        elif not os.access(name, os.R_OK, dir_fd=listed.descriptor, effective_ids=True):
            self._report_problem(path, "permission denied")
        else:
            self.counts.files += 1
            self.counts.read_bytes += status.st_size
            if found is None:
                self.counts.new_files += 1
            else:
                self.counts.changed_files += 1

    def _is_further_link(self, status: os.stat_result) -> bool:
        if status.st_nlink == 1:
            return False
        identity = (status.st_dev, status.st_ino)
        if identity in self._links:
            return True
        self._links.add(identity)
        return False

    def _report_problem(self, path: bytes, reason: str) -> None:
        self.counts.unread += 1
        if len(self.counts.problems) < PROBLEMS_MAX:
            self.counts.problems.append(PathProblem(path, reason))

    def _report_skip(self, path: bytes, reason: str) -> None:
        self.counts.skipped += 1
        if len(self.counts.skips) < PROBLEMS_MAX:
            self.counts.skips.append(PathProblem(path, reason))


def is_unchanged(status: os.stat_result, entry: TreeEntry, options: ComparisonOptions) -> bool:
    """Return whether a backup would take over the content of a file."""
    return (
        not options.force_rescan
        and entry.kind == EntryKind.FILE
        and (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns)
        and not entry.flags
        and (entry.ctime_ns == status.st_ctime_ns or options.ignore_ctime)
        and (entry.inode == status.st_ino or options.ignore_inode)
    )


class _ParentStatuses:
    """Looks up entries of a tree in order; counts those that are found."""

    def __init__(self, tree: TreeReader | None) -> None:
        self.total = 0 if tree is None else tree.summary.entries
        self.matched = 0
        self._entries: Iterator[TreeEntry] = iter(())
        if tree is not None:
            self._entries = (placed.entry for placed in tree.entries())
        self._next = next(self._entries, None)

    def find(self, folder_key: bytes, name: bytes) -> TreeEntry | None:
        """Return the entry; keys must ascend from call to call."""
        key = (folder_key, name)
        while self._next is not None and (sort_key(self._next.folder), self._next.name) < key:
            self._next = next(self._entries, None)
        found = self._next
        if found is None or (sort_key(found.folder), found.name) != key:
            return None
        self.matched += 1
        return found


def count_in_background(plan: BackupPlan, add: Callable[[int], None], stop: Event) -> None:
    """Count bytes as `BackupPlan.count_bytes`; an error ends the count.

    The backup itself reports it.
    """
    with suppress(Exception):
        plan.count_bytes(add, stop)
