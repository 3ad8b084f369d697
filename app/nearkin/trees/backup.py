"""Store folders as one version.

    walk -> entry unchanged since the parent? -> take over its content : read it -> entry groups -> commit

Invariant: a file that cannot be read, or changes while it is read, is reported and counted; everything else is stored.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from nearkin.trees.attributes import KINDS, READ_FLAGS, data_extents, descriptor_path, read_xattrs
from nearkin.trees.backup_walk import BackupCounts, BackupOptions, BackupWalk
from nearkin.trees.checkpoint_schedule import CheckpointSchedule
from nearkin.trees.file_content import (
    PARTIAL_BYTES_MIN,
    Extents,
    FileProgress,
    PartialFile,
    partial_file,
    stored_hasher,
    truncated,
)
from nearkin.trees.hard_links import HardLinks
from nearkin.trees.parent_tree import (
    FoundEntry,
    OrderedEntries,
    ParentTree,
    ReusedContent,
    merged_entries,
    parent_entries,
)
from nearkin.trees.tree_sinks import StoreSink, TreeSink
from nearkin.trees.tree_writer import TreeWriter
from nearkin.trees.walker import ListedFolder, NewestRoot
from nearkin_shared.formats.tree_entry_group import EntryFlag, EntryKind, TreeEntry, sort_key
from nearkin_shared.kernels.content_hasher import ContentHasher
from nearkin_shared.reading.tree_reader import EntryGroup
from nearkin_shared.results import PutResult

if TYPE_CHECKING:
    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter

RECENT_NS = 1_000_000_000
"""A file whose ctime is this close to the moment of its status may change again without another ctime."""
READ_BYTES_FIELD, FURTHER_FIELD = "read-bytes", "further"
"""Metadata of a checkpoint: the bytes that were read for it, by all runs; the version of an earlier checkpoint that
reaches further into the tree, if there is one."""
_I64_MAX = (1 << 63) - 1
_NO_ENTRY: tuple[bytes, None] = (b"", None)


class CheckpointOptions(NamedTuple):
    """How a backup makes checkpoints."""

    key: str
    """Of the checkpoints; of no use to a server, which has its own."""
    metadata: dict[str, str]


class TreeUnchanged(Exception):
    """The tree is equal to its parent."""


class TreeBackup(BackupWalk):
    """Reads folders and writes them as a tree: the source of a put."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        options: BackupOptions,
        counts: BackupCounts,
        *,
        left_out: Sequence[Path] = (),
        parents: Callable[[], Sequence[ParentTree]] = tuple,
        checkpoint: CheckpointOptions | None = None,
        newest_root: NewestRoot = lambda: None,
    ) -> None:
        """Create the source of a put.

        `parents` is called when the put has begun, the newest first. `checkpoint`: None: there are none. Others are
        those of `BackupWalk`, which raises the same.
        """
        super().__init__(paths, options, counts, left_out, newest_root)
        self._parents = parents
        self._checkpoint = checkpoint
        self._skip_if_unchanged = options.skip_if_unchanged
        self._links = HardLinks()
        self._has_lost = False
        """Whether attributes of the entry in progress were left out."""

    @property
    def root(self) -> bytes:
        """The folder that is stored, as an absolute path."""
        return self._root

    def feed(self, writer: EmbeddedWriter, blob: BlobTransfer) -> bytes:
        """Write the tree; return its digest.

        Raises BadInput if the root cannot be listed, TreeUnchanged if no version is wanted, and errors of the store.
        """
        return self.write(StoreSink(writer, blob))

    def write(self, sink: TreeSink) -> bytes:
        """Write the tree to a sink; return its digest. Raises as `feed` does."""
        return self.write_to(TreeWriter(sink, self._root, socket.gethostname()), sink)

    def write_to(self, tree: TreeWriter, sink: TreeSink) -> bytes:
        """Write the tree; return its digest. Raises as `feed` does."""
        self._tree = tree
        parents = self._parents()
        if not parents and isinstance(sink, StoreSink):
            sink.seek_no_bases()
        self._previous_entries = parents[-1].reader.summary.entries if parents else -1
        if parents and not parents[-1].is_checkpoint:
            self.counts.newest_root = parents[-1].reader.summary.root
        self.counts.checkpoints = sum(parent.is_checkpoint for parent in parents)
        overlaps = any(parent.remote.checkpoint is not None for parent in parents)
        self._found = OrderedEntries((merged_entries if overlaps else parent_entries)(parents))
        self._schedule = CheckpointSchedule(max([_earlier_bytes(parent) for parent in parents], default=0))
        self._reused = ReusedContent(tree, self._count_reused)
        self._add_root()
        for listed in self._walker.folders():
            self._add_folder(listed)
        self.note_unmatched_patterns()
        self._reused.flush()
        if tree.entries != self._previous_entries or len(parents) != 1:
            self.counts.is_unchanged = False
        if self._skip_if_unchanged and self.counts.is_unchanged and not self.counts.unread:
            raise TreeUnchanged
        tree.partial = self.partial_folders()
        return tree.finish(self._unread)

    @property
    def _unread(self) -> int:
        return self.counts.unread + self.counts.changed

    def _count_reused(self, size_bytes: int) -> None:
        self.counts.reused_bytes += size_bytes

    def _add_root(self) -> None:
        status = self._walker.root_status()
        found = self._found.find(b"", b"")
        self._add_entry(
            b"", b"", status, self._xattrs_of(status, found, lambda: self._read_xattrs(self._root, self._root)), found
        )

    def _add_folder(self, listed: ListedFolder) -> None:
        folder, key = listed.path, sort_key(listed.path)
        find, is_unchanged = self._found.find, self._comparison.is_unchanged
        is_plain = listed.is_plain and not self._comparison.force_rescan
        while True:
            if is_plain:
                self._add_unchanged(listed, key)
            name, status = next(listed.entries, _NO_ENTRY)
            if status is None:
                break
            found = find(key, name)
            if stat.S_ISREG(status.st_mode):
                if status.st_nlink > 1 and self._add_hard_link(folder, name, status, found):
                    continue
                if found is not None and is_unchanged(status, found.placed.entry):
                    self._reuse(listed, name, status, found)
                else:
                    self._read_file(listed, name, found)
                    self._checkpoint_if_due()
            else:
                self._add_other(listed, name, status, found)
        self._checkpoint_if_due()

    def _add_unchanged(self, listed: ListedFolder, key: bytes) -> None:
        """Add the next files of a folder, as long as nothing of them has changed.

        Has the result of `_add_folder` for such files, for all of them at once.
        """
        while listed.names:
            group, first = self._found.next_row()
            if group.stored is None or first == len(group.keys):
                return
            stop = _unchanged_rows(listed, key, group.stored, first)
            if stop > first:
                self._found.skip(stop - first)
                self.counts.files += stop - first
                self.counts.unchanged_files += stop - first
                self._reused.add_all(group.entries[first].parent, group.stored.entries[first:stop])
                self._tree.add_stored(group.stored, first, stop)
            if stop < len(group.keys):
                return

    # --- files -------------------------------------------------------------------------------------------------------

    def _reuse(self, listed: ListedFolder, name: bytes, status: os.stat_result, found: FoundEntry) -> None:
        """Add an unchanged file. Its attributes are those of the parent if the ctime proves it."""
        entry = found.placed.entry
        if entry.ctime_ns != status.st_ctime_ns or entry.inode != status.st_ino:
            path = os.path.join(listed.file_path, name)
            try:
                xattrs = self._read_xattrs(descriptor_path(listed.descriptor, name), path)
            except OSError as err:
                self.report_problem(path, (err.strerror or "cannot be read").lower())
                return
            entry = entry._replace(
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                gid=status.st_gid,
                ctime_ns=_bounded(status.st_ctime_ns),
                inode=status.st_ino,
                flags=self._take_lost(),
                xattrs=xattrs,
            )
            self.counts.is_unchanged = False
        self.counts.files += 1
        self.counts.unchanged_files += 1
        if entry.digest:
            self._reused.add(found)
        self._add_as_found(entry, found)
        if status.st_nlink > 1:
            self._links.add(status, entry.path)

    def _add_hard_link(self, folder: bytes, name: bytes, status: os.stat_result, found: FoundEntry | None) -> bool:
        """Add a further name of a file that the tree has; return whether it is one."""
        target = self._links.find(status)
        if target is None:
            return False
        self._add_entry(folder, name, status, (), found, kind=EntryKind.HARD_LINK, target=target)
        self.counts.others += 1
        return True

    def _read_file(self, listed: ListedFolder, name: bytes, found: FoundEntry | None) -> None:
        self._reused.flush()
        self.counts.is_unchanged = False
        path = os.path.join(listed.file_path, name)
        self.counts.path = path
        try:
            descriptor = os.open(name, READ_FLAGS, dir_fd=listed.descriptor)
        except OSError as err:
            self.report_problem(path, (err.strerror or "cannot be opened").lower())
            return
        try:
            self._read_open_file(listed.path, name, path, descriptor, found)
        except OSError as err:
            self.report_problem(path, (err.strerror or "cannot be read").lower())
        finally:
            os.close(descriptor)

    def _read_open_file(
        self, folder: bytes, name: bytes, path: bytes, descriptor: int, found: FoundEntry | None
    ) -> None:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            self.report_problem(path, "was replaced while the tree was read")
            return
        recent = EntryFlag.RECENT if time.time_ns() - before.st_ctime_ns < RECENT_NS else 0
        extents = data_extents(descriptor, before)
        xattrs, lost = self._read_xattrs(descriptor, path), self._take_lost()
        stretches = extents if extents is not None else ((0, before.st_size),) if before.st_size else ()
        entry = TreeEntry(
            folder,
            name,
            EntryKind.FILE,
            stat.S_IMODE(before.st_mode),
            before.st_uid,
            before.st_gid,
            before.st_mtime_ns,
            _bounded(before.st_ctime_ns),
            before.st_ino,
            before.st_size,
            recent | lost,
            b"",
            b"",
            xattrs,
            extents,
        )
        written, digest, failure = self._read_content(entry, descriptor, before, stretches, found)
        # Bytes are in the tree now: whatever happens, an entry with these bytes must follow.
        after = before
        try:
            after = os.fstat(descriptor)
        except OSError as err:
            failure = failure or err
        is_short = written < sum(length for _, length in stretches)  # cut, or an error
        flags = entry.flags | self._file_flags(path, before, after, failure, is_short=is_short)
        if is_short:
            kept = truncated(stretches, written)
            size = sum(kept[-1]) if kept else 0
            if failure is None:
                self.report_change(path, f"shrank to {size:,} bytes while it was read")
                flags |= EntryFlag.CHANGED
            entry = entry._replace(size=size, extents=None if extents is None else kept)
        self.count_read_file(path, entry.size, is_known=found is not None)
        entry = entry._replace(flags=flags, digest=digest)
        self._tree.add(entry)
        self._links.add(before, entry.path)

    def _read_content(
        self,
        entry: TreeEntry,
        descriptor: int,
        status: os.stat_result,
        stretches: Extents,
        found: FoundEntry | None,
    ) -> tuple[int, bytes, OSError | None]:
        """Write the content of a file, behind the bytes that a checkpoint has of it.

        Returns as `TreeWriter.read_content`.
        """
        if self._checkpoint is None or entry.content_bytes < PARTIAL_BYTES_MIN:
            return self._tree.read_content(descriptor, stretches, FileProgress(blake3(), 0, self._count_read))
        hasher = None
        if found is not None and self._comparison.is_continued(status, found.placed.entry):
            hasher = stored_hasher(found, stretches)
            if hasher is not None:
                self._reused.add(found)
                self._reused.flush()
        return self._read_in_parts(entry, descriptor, stretches, hasher or ContentHasher())

    def _read_in_parts(
        self, entry: TreeEntry, descriptor: int, stretches: Extents, hasher: ContentHasher
    ) -> tuple[int, bytes, OSError | None]:
        def end_piece(size_bytes: int) -> None:
            self._count_read(size_bytes)
            self._checkpoint_if_due(lambda: partial_file(entry, stretches, hasher))

        return self._tree.read_content(descriptor, stretches, FileProgress(hasher, hasher.size_bytes, end_piece))

    def _count_read(self, size_bytes: int) -> None:
        self.counts.read_bytes += size_bytes

    def _file_flags(
        self,
        path: bytes,
        before: os.stat_result,
        after: os.stat_result,
        failure: OSError | None,
        *,
        is_short: bool,
    ) -> int:
        flags = 0
        if failure is not None:
            self.report_problem(
                path, f"reading it failed: {(failure.strerror or 'error').lower()}; its start is stored"
            )
            flags |= EntryFlag.INCOMPLETE
        elif not is_short and (  # a file that was cut short is reported with its new size
            (before.st_size, before.st_mtime_ns, before.st_ctime_ns)
            != (after.st_size, after.st_mtime_ns, after.st_ctime_ns)
        ):
            self.report_change(path, "changed while it was read")
            flags |= EntryFlag.CHANGED
        return flags

    # --- everything else ---------------------------------------------------------------------------------------------

    def _add_other(self, listed: ListedFolder, name: bytes, status: os.stat_result, found: FoundEntry | None) -> None:
        path = os.path.join(listed.file_path, name)
        kind = KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            self.report_skip(path, "is a socket")
            return
        if kind != EntryKind.FOLDER and status.st_nlink > 1 and self._add_hard_link(listed.path, name, status, found):
            return
        target = b""
        try:
            if kind == EntryKind.SYMLINK:
                target = os.readlink(name, dir_fd=listed.descriptor)
            through = descriptor_path(listed.descriptor, name)
            if kind == EntryKind.FOLDER and self._walker.is_followed(listed.path, name):
                through += b"/."
            xattrs = self._xattrs_of(status, found, lambda: self._read_xattrs(through, path))
        except OSError as err:
            self.report_problem(path, (err.strerror or "cannot be read").lower())
            return
        self._add_entry(listed.path, name, status, xattrs, found, kind=kind, target=target)
        if kind == EntryKind.FOLDER:
            self.counts.folders += 1
        else:
            self.counts.others += 1
            self._links.add(status, listed.path + b"/" + name if listed.path else name)

    def _xattrs_of(
        self, status: os.stat_result, found: FoundEntry | None, read: Callable[[], tuple[tuple[bytes, bytes], ...]]
    ) -> tuple[tuple[bytes, bytes], ...]:
        """Return the attributes, from the parent if the ctime proves that they are the same."""
        if found is not None:
            entry = found.placed.entry
            if (entry.ctime_ns, entry.inode, entry.flags) == (status.st_ctime_ns, status.st_ino, 0):
                return entry.xattrs
        return read()

    def _read_xattrs(self, target: int | bytes, path: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the attributes; report those that are left out. Raises OSError."""

        def lose(reason: str) -> None:
            self._has_lost = True
            self.report_problem(path, reason)

        self._has_lost = False
        return read_xattrs(target, lose)

    def _take_lost(self) -> int:
        """Return the flag of an entry some attributes of which were left out.

        It makes the next backup read and report them again.
        """
        has_lost, self._has_lost = self._has_lost, False
        return EntryFlag.RECENT if has_lost else 0

    def _add_entry(
        self,
        folder: bytes,
        name: bytes,
        status: os.stat_result,
        xattrs: tuple[tuple[bytes, bytes], ...],
        found: FoundEntry | None,
        *,
        kind: int = EntryKind.FOLDER,
        target: bytes = b"",
    ) -> None:
        is_device = kind in (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE)
        is_recent = time.time_ns() - status.st_ctime_ns < RECENT_NS
        entry = TreeEntry(
            folder,
            name,
            kind,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            _bounded(status.st_ctime_ns),
            status.st_ino,
            status.st_rdev if is_device else 0,
            self._take_lost() | (EntryFlag.RECENT if is_recent else 0),
            b"",
            target,
            xattrs,
        )
        if found is None or found.placed.entry != entry:
            self.counts.is_unchanged = False
            self._tree.add(entry)
        else:
            self._add_as_found(found.placed.entry, found)

    def _add_as_found(self, entry: TreeEntry, found: FoundEntry) -> None:
        """Add an entry that was found just now, and may be the same."""
        group, row = self._found.last_row()
        if group.stored is not None and found.placed.entry is entry:
            self._tree.add_stored(group.stored, row, row + 1)
        else:
            self._tree.add(entry)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint_if_due(self, partial: Callable[[], PartialFile] | None = None) -> None:
        """Make a checkpoint if it is due.

        `partial` returns the start of the file that is being read.
        """
        if self._checkpoint is None:
            return
        schedule, tree, read_bytes = self._schedule, self._tree, self.counts.read_bytes
        if schedule.is_due(read_bytes, tree.group_bytes):
            self._reused.flush()
            fields = {**self._checkpoint.metadata, **self._checkpoint_fields()}
            done = tree.checkpoint(self._checkpoint.key, fields, self._unread, None if partial is None else partial())
            if done is not None:
                done.add_done_callback(self._count_checkpoint)
            schedule.record(read_bytes, done)
        while (awaited := schedule.checkpoint_to_await(read_bytes, tree.group_bytes)) is not None:
            tree.wait_for(awaited)

    def _count_checkpoint(self, done: Future[PutResult]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.counts.checkpoints += 1

    def _checkpoint_fields(self) -> dict[str, str]:
        fields = {READ_BYTES_FIELD: str(self._schedule.done_bytes(self.counts.read_bytes))}
        ahead = self._found.next_entry  # of a parent that the walk has not passed
        if ahead is not None and ahead.parent.manifest is not None and ahead.parent.is_checkpoint:
            fields[FURTHER_FIELD] = str(ahead.parent.manifest.version)
        return fields


def _unchanged_rows(listed: ListedFolder, key: bytes, group: EntryGroup, first: int) -> int:
    """Remove the names of unchanged files; return the row behind the last of them.

    The first file that changed, or has other names, ends them.
    """
    names, keys, entries, descriptor = listed.names, group.keys, group.entries, listed.descriptor
    row, rows = first, len(group.keys)
    while names and row < rows and keys[row] == (key, names[0]):
        try:
            status = os.stat(names[0], dir_fd=descriptor, follow_symlinks=False)
        except OSError:  # reported when it is read again
            break
        entry = entries[row].entry
        if (
            entry.ctime_ns != status.st_ctime_ns
            or entry.mtime_ns != status.st_mtime_ns
            or entry.size != status.st_size
            or entry.inode != status.st_ino
            or entry.kind != EntryKind.FILE
            or entry.flags
            or status.st_nlink != 1
            or not stat.S_ISREG(status.st_mode)
        ):
            break
        names.popleft()
        row += 1
    return row


def _earlier_bytes(parent: ParentTree) -> int:
    """Return the bytes that were read for a checkpoint; 0 of a complete version.

    A checkpoint on a server names those before it.
    """
    if not parent.is_checkpoint:
        return 0
    own_bytes = parent.reader.content_bytes if parent.manifest is None else 0
    return number_of(parent.metadata.get(READ_BYTES_FIELD)) + own_bytes


def number_of(text: str | None) -> int:
    """Return the number in metadata of a checkpoint, 0 for any other text.

    A writer of the key may store any.
    """
    return int(text) if text is not None and re.fullmatch("[0-9]{1,18}", text, re.ASCII) else 0


def _bounded(nanoseconds: int) -> int:
    """Return a time that the format can hold; 0, which no later status equals, for any other."""
    with suppress(OverflowError):
        if -_I64_MAX <= nanoseconds <= _I64_MAX:
            return nanoseconds
    return 0
