"""Compare folders with a stored tree by status alone, and store nothing.

    walk -> the tree has this entry, with the same status? -> next : changed

A backup through a server asks this before it sends everything. It is the comparison of a backup into an open store:
size, mtime, ctime and inode prove that content and attributes are the same.

Invariant: a tree counts as unchanged only if each entry was found in it, and it has no other.
"""

from __future__ import annotations

import os
import stat

from nearkin.trees.attributes import KINDS
from nearkin.trees.backup_walk import BackupWalk
from nearkin.trees.hard_links import HardLinks
from nearkin.trees.parent_tree import OrderedEntries, placed_entries
from nearkin.trees.walker import ListedFolder
from nearkin_shared.formats.tree_entry_group import EntryKind, TreeEntry, sort_key
from nearkin_shared.reading.tree_reader import TreeReader

_DEVICES = (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE)


class TreeComparison(BackupWalk):
    """Compares the folders of a backup with its newest version.

    `counts` are then those of the backup.
    """

    def is_unchanged(self, newest: TreeReader) -> bool:
        """Return whether a backup would store the same entries again.

        The first difference ends the walk. Raises BadInput if the root cannot be listed, Corrupt, StoreUnavailable.
        """
        found = OrderedEntries(placed_entries(newest))
        root, links, matched = found.find(b"", b""), HardLinks(), 1
        if root is None or not _has_status(root.entry, self._walker.root_status(), EntryKind.FOLDER):
            return False
        for listed in self._walker.folders():
            key = sort_key(listed.path)
            for name, status in listed.entries:
                if stat.S_ISSOCK(status.st_mode):
                    self.report_skip(os.path.join(listed.file_path, name), "is a socket")
                    continue
                placed = found.find(key, name)
                if placed is None or not self._is_same(listed, placed.entry, status, links):
                    return False
                matched += 1
        self.note_unmatched_patterns()
        return matched == newest.summary.entries and not self.counts.unread

    def _is_same(self, listed: ListedFolder, entry: TreeEntry, status: os.stat_result, links: HardLinks) -> bool:
        """Return whether an entry is as it was stored; count it if it is."""
        kind, counts = KINDS.get(stat.S_IFMT(status.st_mode)), self.counts
        if kind is None:
            return False
        if kind == EntryKind.FOLDER:
            counts.folders += 1
            return _has_status(entry, status, kind)
        target = links.find(status) if status.st_nlink > 1 else None
        if target is not None:
            counts.others += 1
            return entry.target == target and _has_status(entry, status, EntryKind.HARD_LINK)
        links.add(status, entry.path)
        if kind == EntryKind.FILE:
            counts.files += 1
            counts.unchanged_files += 1
            counts.reused_bytes += entry.content_bytes
            return self._comparison.is_unchanged(status, entry) and _has_status(entry, status, kind)
        counts.others += 1
        if kind == EntryKind.SYMLINK and not _has_target(entry, listed.descriptor):
            return False
        return _has_status(entry, status, kind)


def _has_target(entry: TreeEntry, folder: int) -> bool:
    """Return whether a symlink leads where it was stored to lead."""
    try:
        return os.readlink(entry.name, dir_fd=folder) == entry.target
    except OSError:  # it was deleted or replaced since its status was read
        return False


def _has_status(entry: TreeEntry, status: os.stat_result, kind: int) -> bool:
    """Return whether an entry has the kind, ctime, inode, mtime, mode and owner of a status.

    An entry that changed shortly before it was stored may have changed again without another ctime: it has flags.
    """
    device = status.st_rdev if kind in _DEVICES else 0
    return (
        entry.kind == kind
        and not entry.flags
        and (entry.ctime_ns, entry.inode, entry.mtime_ns) == (status.st_ctime_ns, status.st_ino, status.st_mtime_ns)
        and (entry.mode, entry.uid, entry.gid) == (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
        and (kind not in _DEVICES or entry.size == device)
    )
