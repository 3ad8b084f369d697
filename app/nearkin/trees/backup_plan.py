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

from nearkin.trees.attributes import KINDS, data_bytes
from nearkin.trees.backup_walk import BackupCounts, BackupOptions, BackupWalk, FileState
from nearkin.trees.hard_links import HardLinks
from nearkin.trees.parent_tree import KeyedGroup, OrderedEntries, ParentTree, merged_entries, placed_entries
from nearkin.trees.walker import ListedFolder, NewestRoot
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader


@dataclass(slots=True)
class PlannedCounts(BackupCounts):
    """The counts that a backup would have; `read_bytes` are those of data, without holes."""

    removed: int = 0
    """Entries of the newest tree that the next one would not have."""


class BackupPlan(BackupWalk):
    """Walks folders as a backup does, and compares statuses with the newest tree."""

    counts: PlannedCounts

    def __init__(
        self,
        paths: Sequence[str | Path],
        options: BackupOptions,
        left_out: Sequence[Path],
        counts: PlannedCounts,
        newest_root: NewestRoot = lambda: None,
    ) -> None:
        """`left_out`: folders of the store. Raises as `BackupWalk` does."""
        super().__init__(paths, options, counts, left_out, newest_root)
        self._links = HardLinks()

    def run(
        self, newest: TreeReader | None, unfinished: TreeReader | None = None, merged: Sequence[ParentTree] = ()
    ) -> PlannedCounts:
        """Compare all entries with the newest tree, and before it with a newer checkpoint.

        `merged`: the newest tree of a server and its checkpoints, whose entries are mixed, in place of `unfinished`.
        Raises BadInput if the root cannot be listed.
        """
        if newest is not None:
            self.counts.newest_root = newest.summary.root
        entries = OrderedEntries(_merged_placed(merged) if merged else placed_entries(unfinished, newest))
        present = entries
        if merged or unfinished is not None:
            present = OrderedEntries(placed_entries(newest))
        matched = int(present.find(b"", b"") is not None)
        for listed in self._walker.folders():
            key = sort_key(listed.path)
            for name, status in listed.entries:
                placed = entries.find(key, name)
                is_present = (placed if present is entries else present.find(key, name)) is not None
                matched += is_present
                self._add(listed, name, status, None if placed is None else placed.entry, is_present=is_present)
        self.counts.removed = (0 if newest is None else newest.summary.entries) - matched
        self.counts.is_unchanged = False
        self.note_unmatched_patterns()
        return self.counts

    def count_bytes(self, add: Callable[[int], None], stop: Event) -> None:
        """Call `add` with the bytes of the files of each folder, until `stop` is set."""
        for listed in self._walker.folders():
            if stop.is_set():
                return
            files = ((name, status) for name, status in listed.entries if stat.S_ISREG(status.st_mode))
            add(sum(data_bytes(name, listed.descriptor, status) for name, status in files))

    def _add(
        self, listed: ListedFolder, name: bytes, status: os.stat_result, found: TreeEntry | None, *, is_present: bool
    ) -> None:
        """Count an entry.

        `found`: the entry to take over. `is_present`: whether the newest tree has one.
        """
        path = os.path.join(listed.file_path, name)
        kind = KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            self.report_skip(path, "is a socket")
        elif kind == EntryKind.FOLDER:
            self.counts.folders += 1
        elif kind != EntryKind.FILE or self._is_further_link(status):
            self.counts.others += 1
        elif found is not None and self._comparison.is_unchanged(status, found):
            self.counts.files += 1
            self.counts.unchanged_files += 1
            self.counts.reused_bytes += found.content_bytes
            self.report_file(FileState.UNCHANGED, path, status.st_size)
        elif not os.access(name, os.R_OK, dir_fd=listed.descriptor, effective_ids=True):
            self.report_problem(path, "permission denied")
        else:
            stored_bytes = 0
            if found is not None and self._comparison.is_continued(status, found):
                stored_bytes = found.content_bytes  # of a checkpoint that ends inside the file
            self.counts.reused_bytes += stored_bytes
            self.counts.read_bytes += data_bytes(name, listed.descriptor, status) - stored_bytes
            self.count_read_file(path, status.st_size, is_known=is_present)

    def _is_further_link(self, status: os.stat_result) -> bool:
        if status.st_nlink == 1:
            return False
        if self._links.find(status) is not None:
            return True
        self._links.add(status, b"")
        return False


def _merged_placed(parents: Sequence[ParentTree]) -> Iterator[KeyedGroup[PlacedEntry]]:
    for group in merged_entries(parents):
        yield KeyedGroup(group.keys, [found.placed for found in group.entries])


def count_in_background(plan: BackupPlan, add: Callable[[int], None], stop: Event) -> None:
    """Count bytes as `BackupPlan.count_bytes`; an error ends the count.

    The backup itself reports it.
    """
    with suppress(Exception):
        plan.count_bytes(add, stop)
