"""Restore a tree, or a part of it, into a folder.

    entries in order -> folders, files, links; entries of folders, last first -> attributes of folders

Every call names an entry by the descriptor of its folder, which is opened from the target on without following a
symlink, so that no entry is written outside the target. Contents are read as one stream.

Invariant: a file whose content does not have its digest is not left behind.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from nearkin.trees.content_stream import ContentStream
from nearkin.trees.entry_attributes import AttributeWriter, make_enterable, xattrs_of
from nearkin.trees.entry_marks import EntryMarks
from nearkin.trees.free_names import give_free_name
from nearkin.trees.refused_folders import FolderRefusal, open_below, refusal_of
from nearkin.trees.restore_counts import (
    HAS_FILE,
    HAS_FOLDER,
    HAS_STORE,
    Overwrite,
    RestoreCounts,
    RestoreOptions,
    kept_folder_reason,
    reason_of,
)
from nearkin.trees.store_folders import is_descriptor, is_store
from nearkin.trees.target_access import open_for_owner
from nearkin.trees.target_deletion import (
    IS_STORE,
    Identity,
    TargetDeletion,
    check_target,
    is_protected,
    partial_folders,
)
from nearkin.trees.unfinished_files import create_locked, remove_unfinished, temporary_name
from nearkin_shared.errors import BadInput, Corrupt, NoRoom, NotFound
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryFlag, EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

KNOWN_FOLDERS_MAX = 10_000
"""Paths in memory that lead to accepted entries, about 1 MB."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DEVICE_TYPES = {EntryKind.CHARACTER_DEVICE: stat.S_IFCHR, EntryKind.BLOCK_DEVICE: stat.S_IFBLK}


class TreeRestore:
    """Restores entries of one tree into a folder."""

    def __init__(
        self,
        reader: TreeReader,
        open_range: Callable[[int, int], Iterable[memoryview]],
        target: Path,
        options: RestoreOptions,
        counts: RestoreCounts,
        *,
        protected: Collection[Identity] = (),
    ) -> None:
        """`open_range(start, stop)` opens contents of the tree. `protected`: folders of the store."""
        self._reader = reader
        self._contents = ContentStream(open_range, reader.content_bytes)
        self._target = target
        self._options = options
        self.counts = counts
        self._temporary = temporary_name()
        self._base = b""
        self._new_stores: set[bytes] = set()
        """Folders, below the target, that this run makes a store by writing its descriptor."""
        self._folder: tuple[bytes, int] | None = None
        self._root = -1
        self._mode: int | None = None
        """Of the target, which gets it again; None: it was not changed, or has that of the tree."""
        self._protected = frozenset(protected)
        self._attributes = AttributeWriter(counts)
        self._link_targets: frozenset[bytes] = frozenset()
        """Paths whose content further names share."""
        self._sources: dict[bytes, tuple[bytes, tuple[int, int]]] = {}
        """For such a path: where this run wrote or compared its content, and device and inode of that file."""
        self._link_sources: dict[bytes, bytes] = {}
        """For a hard link that is restored as a file: the path whose content it has."""
        self._closed: set[bytes] = set()
        """Folders of the tree that are not restored, nor what is below them."""
        self._late = EntryMarks()
        """Folders, whose attributes are set at the end, and descriptors of stores, restored after all else in their
        folders: a killed run can be continued."""
        self._known_folders: set[bytes] = set()
        """Paths of some of these folders, if only some entries are restored."""
        self._names: set[bytes] = set()

    def run(self, path: bytes = b"") -> RestoreCounts:
        """Restore the content of a folder, or one other entry, into the target.

        Raises NotFound, BadInput (the target is no folder or in the store, `delete` is not safe), Corrupt, NoRoom,
        StoreUnavailable.
        """
        single = None if not path else self._reader.find_named(path)
        check_target(self._target, self._protected)
        partial = check_delete(self._reader, single, self._options)
        if single is not None and single.entry.kind != EntryKind.FOLDER:
            self._base = single.entry.folder
            entries: Iterator[PlacedEntry] = iter((single,))
            if single.entry.kind == EntryKind.FILE:
                self._contents.stop = single.stop  # else reading ahead decodes what follows the file
        else:
            self._base = path
            entries = self._reader.below(path)
            if single is not None:
                self._late.add(single.ordinal)
            summary = self._reader.summary
            if summary.entries > summary.files + summary.folders:
                self._link_targets = frozenset(self._reader.hard_link_targets())
        self._open_target()
        self._deletion = TargetDeletion(
            self._root,
            self.counts.deletion,
            self._protected,
            partial=partial,
            with_excluded=self._options.delete_excluded,
        )
        try:
            self._run(entries)
        finally:
            self._contents.close()
            self._drop_folder()
            if self._mode is not None:
                os.fchmod(self._root, self._mode)
            os.close(self._root)
        return self.counts

    def _run(self, entries: Iterator[PlacedEntry]) -> None:
        for placed in entries:
            entry = placed.entry
            if not entry.name:
                self._late.add(placed.ordinal)
                continue
            accepts = self._options.accepts
            if accepts is not None and not accepts(entry):
                continue
            if self._closed and self._is_closed(entry.folder):
                continue
            try:
                descriptor = self._folder_of(entry.folder)
            except OSError as err:
                self._fail(entry, err)
                continue
            if accepts is not None:
                self._add_parents(entry.folder)
            if self._deletes:
                self._names.add(entry.name)
            if is_descriptor(entry) and entry.path not in self._link_targets:
                self._late.add(placed.ordinal)
            else:
                self._try_restore(placed, descriptor)
        self._close_folder()
        self._run_late()

    def _run_late(self) -> None:
        """Restore descriptors and attributes of folders: those in a folder come before its own."""
        for placed in self._reader.entries_backward(self._late.has_any):
            if placed.ordinal not in self._late:
                continue
            if placed.entry.kind == EntryKind.FOLDER:
                self._finish_folder(placed.entry)
                self._new_stores.discard(self._relative(placed.entry.path))
            else:
                self._restore_descriptor(placed)

    def _is_closed(self, folder: bytes) -> bool:
        """Return whether a folder of the tree, or one that contains it, is not restored."""
        while folder and folder not in self._closed:
            folder = folder.rpartition(b"/")[0]
        return bool(folder)

    def _try_restore(self, placed: PlacedEntry, folder: int) -> None:
        """Restore an entry; count a failure of it alone. Raises NoRoom, StoreUnavailable."""
        entry = placed.entry
        try:
            self._restore(placed, folder)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(f'"{self._target}": the device is full', self._target) from err
            self._fail(entry, refusal_of(err, folder, self._relative(entry.folder)))
        except OverflowError as err:  # a size or device number that no call of the kernel takes
            self._fail(entry, err)
        except Corrupt as err:  # of this file: others may be sound
            self._contents.close()
            self.counts.damaged += 1
            self._fail(entry, err)

    def _restore_descriptor(self, placed: PlacedEntry) -> None:
        """Restore the descriptor of a store, after all else of the store."""
        try:
            descriptor = self._open_folder(self._relative(placed.entry.folder))
        except OSError as err:
            self._fail(placed.entry, err)
            return
        try:
            self._try_restore(placed, descriptor)
        finally:
            os.close(descriptor)

    # --- folders -----------------------------------------------------------------------------------------------------

    def _open_target(self) -> None:
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            self._mode = open_for_owner(self._target)
            self._root = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as err:
            raise BadInput(f'target "{self._target}": {err.strerror}; name a new or existing folder') from err

    def _relative(self, folder: bytes) -> bytes:
        """Return the path below the target of a folder of the tree."""
        return folder[len(self._base) :].lstrip(b"/") if self._base else folder

    def _folder_of(self, folder: bytes) -> int:
        """Return the descriptor of a folder; missing ones are made. Raises OSError."""
        if self._folder is not None and self._folder[0] == folder:
            return self._folder[1]
        self._close_folder()
        self._folder = (folder, self._open_folder(self._relative(folder), create=True))
        remove_unfinished(self._folder[1])
        return self._folder[1]

    def _open_folder(self, path: bytes, *, create: bool = False) -> int:
        descriptor, position = os.dup(self._root), 0
        for part in path.split(b"/") if path else ():
            try:
                below = open_below(part, descriptor, path[:position].rstrip(b"/"), create=create)
            finally:
                os.close(descriptor)
            descriptor = below
            position += len(part) + 1
            if self._is_store(descriptor, path[: position - 1]):
                os.close(descriptor)
                raise FolderRefusal(0, IS_STORE, path[: position - 1])
        return descriptor

    def _is_store(self, descriptor: int, path: bytes) -> bool:
        """Return whether an open folder of the target belongs to a store.

        A store that this run itself writes is none.
        """
        if self._protected and is_protected(descriptor, self._protected):
            return True
        return is_store(descriptor) and path not in self._new_stores

    def _add_parents(self, folder: bytes) -> None:
        """Note the folders that lead to an accepted entry, so that they get their attributes too.

        A folder that is no longer known is looked up again.
        """
        if len(self._known_folders) >= KNOWN_FOLDERS_MAX:
            self._known_folders.clear()
        missing = list[bytes]()
        while folder and folder != self._base and folder not in self._known_folders:
            missing.append(folder)
            folder = folder.rpartition(b"/")[0]
        for path in reversed(missing):
            self._known_folders.add(path)
            with suppress(NotFound):  # a tree may lack entries of folders above its paths
                self._late.add(self._reader.find(path).ordinal)

    def _close_folder(self) -> None:
        """Close the folder in progress; with `delete`, delete what else it contains.

        Only after all its entries were read: an entry that was not read yet is not superfluous.
        """
        if self._folder is None:
            return
        (path, descriptor), self._folder = self._folder, None
        names, self._names = self._names, set()
        try:
            if self._deletes:
                self._delete_others(descriptor, path, names)
        finally:
            os.close(descriptor)

    def _drop_folder(self) -> None:
        """Close the folder in progress after an error."""
        if self._folder is not None:
            os.close(self._folder[1])
            self._folder = None

    @property
    def _deletes(self) -> bool:
        return self._options.delete and self._options.accepts is None

    def _delete_others(self, descriptor: int, folder: bytes, names: set[bytes]) -> None:
        before = self._deletion.counts.failed
        try:
            self._deletion.delete_others(descriptor, folder, names)
        except OSError as err:
            self.counts.fail(folder, f"cannot be listed: {reason_of(err)}")
        self.counts.fail_deletions(folder, self._deletion.counts, before)

    def _replace(self, entry: TreeEntry, folder: int) -> bool:
        """Delete a folder that has the name of another entry; return whether it is deleted."""
        failures = self._deletion.counts.failures
        before = len(failures)
        if self._deletion.remove(entry.name, folder, entry.path, is_counted=False):
            return True
        self.counts.fail(entry.path, kept_folder_reason(failures[before:]))
        return False

    def _finish_folder(self, entry: TreeEntry) -> None:
        path = self._relative(entry.path)
        if not entry.path and self._base:
            return
        try:
            descriptor = self._open_folder(path)
        except OSError as err:
            self._fail(entry, err)
            return
        try:
            self._mode = self._mode if path else None
            if self._deletes:
                self._delete_if_empty(entry, descriptor)
            self._attributes.set_open(entry, descriptor)
        finally:
            os.close(descriptor)

    def _delete_if_empty(self, entry: TreeEntry, descriptor: int) -> None:
        """Delete everything in a folder that is empty in the tree: no entry opened it."""
        if next(self._reader.children(entry.path), None) is None:
            self._delete_others(descriptor, entry.path, set())

    # --- entries -----------------------------------------------------------------------------------------------------

    def _restore(self, placed: PlacedEntry, folder: int) -> None:
        entry = placed.entry
        if entry.kind == EntryKind.FOLDER:
            self._restore_folder(placed, folder)
            return
        if is_descriptor(entry):
            self._new_stores.add(self._relative(entry.folder))
        exists = self._existing(entry.name, folder)
        if exists is not None:
            if self._is_kept(entry, exists, folder):
                self.counts.kept_files += 1
                return
            if stat.S_ISDIR(exists.st_mode):
                if not self._options.delete:
                    self.counts.fail(entry.path, HAS_FOLDER)
                    return
                if not self._replace(entry, folder):
                    return
                exists = None
        if entry.kind == EntryKind.FILE:
            self._restore_file(placed, folder, replaces=exists is not None)
        elif entry.kind == EntryKind.HARD_LINK:
            self._restore_link(placed, folder, exists)
        else:
            self._restore_other(entry, folder, replaces=exists is not None)

    def _existing(self, name: bytes, folder: int) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_kept(self, entry: TreeEntry, exists: os.stat_result, folder: int) -> bool:
        """Return whether the policy keeps an existing entry, which then has its attributes."""
        overwrite = self._options.overwrite
        if overwrite == Overwrite.NEVER:
            return True
        return is_same_file(entry, exists, overwrite) and self._keep(entry, folder, exists)

    def _keep(self, entry: TreeEntry, folder: int, exists: os.stat_result) -> bool:
        """Give a file whose content is kept its attributes; return whether it is kept.

        A file with several names and other attributes is not: another name may be outside of the target.
        """
        descriptor = os.open(entry.name, _KEPT_FLAGS, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (exists.st_dev, exists.st_ino):
                raise OSError(0, "was replaced while it was restored")
            if status.st_nlink == 1:
                self._attributes.set_open(entry, descriptor)
            elif (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) != (entry.mode, entry.uid, entry.gid) or (
                xattrs_of(descriptor) != dict(entry.xattrs)
            ):
                return False
            self._note_source(entry, status)
            return True
        finally:
            os.close(descriptor)

    def _restore_folder(self, placed: PlacedEntry, folder: int) -> None:
        entry = placed.entry
        exists = self._existing(entry.name, folder)
        if exists is not None and not stat.S_ISDIR(exists.st_mode):
            if self._options.overwrite == Overwrite.NEVER:
                self.counts.kept_files += 1
                self._closed.add(entry.path)
                self.counts.fail(entry.path, HAS_FILE)
                return
            os.unlink(entry.name, dir_fd=folder)
            exists = None
        if exists is not None and (exists.st_dev, exists.st_ino) in self._protected:
            self._closed.add(entry.path)
            self._deletion.counts.add_kept(entry.path, IS_STORE)
            return
        if exists is not None and self._holds_store(entry, folder):
            self._closed.add(entry.path)
            self.counts.fail(entry.path, HAS_STORE)
            return
        if exists is None:
            os.mkdir(entry.name, 0o700, dir_fd=folder)
        elif exists.st_mode & 0o700 != 0o700:
            make_enterable(entry.name, folder)
        self._late.add(placed.ordinal)
        if self._options.accepts is not None:
            self._known_folders.add(entry.path)
        self.counts.folders += 1

    def _holds_store(self, entry: TreeEntry, folder: int) -> bool:
        """Return whether an existing folder is a store."""
        try:
            descriptor = os.open(entry.name, _FOLDER_FLAGS, dir_fd=folder)
        except PermissionError:  # found once it can be entered
            return False
        try:
            return self._is_store(descriptor, self._relative(entry.path))
        finally:
            os.close(descriptor)

    def _restore_file(self, placed: PlacedEntry, folder: int, *, replaces: bool) -> None:
        """Write a file under another name first.

        A run that is killed leaves no incomplete file that `never` would keep later.
        """
        entry, name = placed.entry, self._temporary
        descriptor = create_locked(name, folder)
        try:
            self._write_content(placed, descriptor)
            self._attributes.set_open(entry, descriptor, is_new=True)
            status = os.fstat(descriptor)
            self._name(entry.name, folder, replaces=replaces)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(descriptor)
        self._note_source(entry, status)
        self.counts.files += 1
        if entry.flags & EntryFlag.INCOMPLETE:
            self.counts.fail(entry.path, "was stored incomplete: reading it failed during the backup")

    def _name(self, name: bytes, folder: int, *, replaces: bool) -> None:
        """Give the complete entry its name.

        Only an entry that was there when the policy was asked is replaced. Raises OSError.
        """
        if replaces:
            os.rename(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            give_free_name(self._temporary, name, folder)

    def _write_content(self, placed: PlacedEntry, descriptor: int) -> None:
        entry, hasher, position = placed.entry, blake3(), placed.start
        extents: Sequence[tuple[int, int]] = entry.extents if entry.extents is not None else ((0, entry.size),)
        if entry.extents is not None:
            os.ftruncate(descriptor, entry.size)
        for offset, length in extents if entry.content_bytes else ():
            left = length
            for piece in self._contents.read(position, position + length):
                hasher.update(piece)
                at = offset + length - left
                done = 0
                while done < len(piece):
                    done += os.pwrite(descriptor, piece[done:], at + done)
                left -= len(piece)
                self.counts.written_bytes += len(piece)
            position += length
        if entry.content_bytes and hasher.digest(length=DIGEST_BYTES) != entry.digest:
            raise Corrupt(f"{entry.path!r}: BLAKE3 of its content differs from its entry; run `nearkin verify`")

    def _restore_link(self, placed: PlacedEntry, folder: int, exists: os.stat_result | None) -> None:
        """Make a hard link to a file of this run; restore the content where there is none.

        A file that this run neither wrote nor compared may have other content than the tree's.
        """
        entry = placed.entry
        found = self._sources.get(entry.target)
        if found is not None and exists is not None and found[1] == (exists.st_dev, exists.st_ino):
            self.counts.others += 1
            return
        if found is not None and self._link(*found, entry.name, folder, replaces=exists is not None):
            self.counts.others += 1
            return
        content = self._reader.content_of(placed)
        copied = content.entry._replace(folder=entry.folder, name=entry.name)
        self._sources.pop(entry.target, None)
        self._link_sources[entry.path] = entry.target
        self._restore(PlacedEntry(copied, content.start, placed.ordinal), folder)

    def _link(self, path: bytes, identity: tuple[int, int], name: bytes, folder: int, *, replaces: bool) -> bool:
        """Make another name of a file of this run; return whether it is that file."""
        parent, _, source_name = path.rpartition(b"/")
        temporary = self._temporary
        try:
            source = self._open_folder(self._relative(parent))
        except OSError:
            return False
        try:
            os.link(source_name, temporary, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
            status = os.stat(temporary, dir_fd=folder, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == identity:
                self._name(name, folder, replaces=replaces)
                return True
            os.unlink(temporary, dir_fd=folder)
        except OSError as err:  # such as too many links: the content is restored again
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EEXIST):
                raise
        finally:
            os.close(source)
        return False

    def _note_source(self, entry: TreeEntry, status: os.stat_result) -> None:
        """Note the file that has the content of later hard links."""
        target = self._link_sources.pop(entry.path, entry.path)
        if target in self._link_targets:
            self._sources[target] = entry.path, (status.st_dev, status.st_ino)

    def _restore_other(self, entry: TreeEntry, folder: int, *, replaces: bool) -> None:
        name = self._temporary if replaces else entry.name
        if entry.kind == EntryKind.SYMLINK:
            os.symlink(entry.target, name, dir_fd=folder)
        elif entry.kind == EntryKind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=folder)
        else:
            try:
                os.mknod(name, 0o600 | _DEVICE_TYPES[EntryKind(entry.kind)], entry.size, dir_fd=folder)
            except PermissionError:
                self.counts.unset["device"] += 1
                self.counts.note(entry.path, "is a device, which only root can make", is_attribute=True)
                return
        try:
            status = self._attributes.set_named(entry, name, folder)
            if replaces:
                os.rename(name, entry.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
        self._note_source(entry, status)
        self.counts.others += 1

    def _fail(self, entry: TreeEntry, err: Exception) -> None:
        if isinstance(err, FolderRefusal):
            folder = b"/".join(filter(None, (self._base, err.folder)))
            self.counts.fail_below(folder, reason_of(err), entry.path)
        elif entry.kind == EntryKind.FOLDER:
            self.counts.fail_folder(entry.path, reason_of(err))
        else:
            self.counts.fail(entry.path, reason_of(err))


def check_delete(reader: TreeReader, single: PlacedEntry | None, options: RestoreOptions) -> Collection[bytes]:
    """Return the folders in which `delete` deletes nothing.

    Raises BadInput if it is not safe at all.
    """
    if not options.delete:
        return ()
    if single is not None and single.entry.kind != EntryKind.FOLDER:
        raise BadInput("--delete: the selected entry is a file; leave out --delete")
    return partial_folders(reader, with_excluded=options.delete_excluded)


def is_same_file(entry: TreeEntry, exists: os.stat_result, overwrite: Overwrite) -> bool:
    """Return whether `if-changed` keeps the content of an existing file."""
    return (
        overwrite == Overwrite.IF_CHANGED
        and entry.kind == EntryKind.FILE
        and stat.S_ISREG(exists.st_mode)
        and (exists.st_size, exists.st_mtime_ns) == (entry.size, entry.mtime_ns)
    )
