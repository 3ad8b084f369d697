"""Restore a tree, or a part of it, into a folder.

    entries in order -> folders, files, links -> attributes of folders, the deepest first

Every call names an entry by the descriptor of its folder, which is opened from the target on without following a
symlink, so that no entry is written outside the target. Contents are read as one stream.

Invariant: a file whose content does not have its digest is not left behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from nearkin.trees.attributes import descriptor_path, read_xattrs
from nearkin_shared.errors import BadInput, Corrupt, NoRoom, NotFound, StoreUnavailable
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryFlag, EntryKind, TreeEntry
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader

SKIP_BYTES_MAX = 4 << 20
"""Contents that are not wanted are read over up to here; beyond, the stream is opened again."""
PROBLEMS_MAX = 10_000
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = b".nearkin-restore-%d"
_DEVICE_TYPES = {EntryKind.CHARACTER_DEVICE: stat.S_IFCHR, EntryKind.BLOCK_DEVICE: stat.S_IFBLK}


class Overwrite(StrEnum):
    """Policy of a restore for files that exist."""

    ALWAYS = "always"
    IF_CHANGED = "if-changed"
    """Keep the content of a file of the same size and mtime."""
    NEVER = "never"


class RestoreOptions(NamedTuple):
    """Options of a restore."""

    overwrite: Overwrite = Overwrite.ALWAYS
    delete: bool = False
    """Delete what restored folders contain besides."""
    accepts: Callable[[TreeEntry], bool] | None = None
    """Restores only the entries for which it returns true, and the folders that lead to them, with their attributes."""


class RestoreProblem(NamedTuple):
    """An entry that is not restored as it was."""

    path: bytes
    reason: str
    is_attribute: bool = False
    """Whether the entry is restored, without one of its attributes; `RestoreCounts.unset` counts these."""


@dataclass(slots=True)
class RestoreCounts:
    """Progress of a restore; another thread may read it."""

    files: int = 0
    folders: int = 0
    others: int = 0
    kept_files: int = 0
    """Files that existed and were kept."""
    deleted: int = 0
    written_bytes: int = 0
    problems: list[RestoreProblem] = field(default_factory=list)
    failed: int = 0
    """Entries that are missing or incomplete."""
    damaged: int = 0
    """Those of them whose stored content is damaged."""
    unset: Counter[str] = field(default_factory=Counter)
    """Attributes that this user or file system could not set, by kind: owner, mode, time, and names of attributes."""

    @property
    def is_complete(self) -> bool:
        """Whether every entry was restored with its content and attributes."""
        return not self.failed and not self.unset


class TreeRestore:
    """Restores entries of one tree into a folder."""

    def __init__(
        self,
        reader: TreeReader,
        open_range: Callable[[int, int], Iterable[memoryview]],
        target: Path,
        options: RestoreOptions,
        counts: RestoreCounts,
    ) -> None:
        """`open_range(start, stop)` opens contents of the tree."""
        self._reader = reader
        self._contents = ContentStream(open_range, reader.content_bytes)
        self._target = target
        self._options = options
        self.counts = counts
        self._base = b""
        self._folder: tuple[bytes, int] | None = None
        self._root = -1
        self._linked: dict[bytes, bytes] = {}
        """Paths at which the content of a hard link's target is, where the target itself is not restored."""
        self._restored_folders: list[TreeEntry] = []
        """Folders whose attributes are set at the end, each after those that contain it."""
        self._known_folders: set[bytes] = set()
        """Their paths, if only some entries are restored."""
        self._names: set[bytes] = set()

    def run(self, path: bytes = b"") -> RestoreCounts:
        """Restore the content of a folder, or one other entry, into the target.

        Raises NotFound, BadInput (the target is no folder), Corrupt, NoRoom, StoreUnavailable.
        """
        single = None if not path else self._reader.find(path)
        if single is not None and single.entry.kind != EntryKind.FOLDER:
            self._base = single.entry.folder
            entries: Iterator[PlacedEntry] = iter((single,))
        else:
            self._base = path
            entries = self._reader.below(path)
            if single is not None:
                self._restored_folders.append(single.entry)
        self._open_target()
        try:
            self._run(entries)
        finally:
            self._contents.close()
            self._close_folder()
            os.close(self._root)
        return self.counts

    def _run(self, entries: Iterator[PlacedEntry]) -> None:
        for placed in entries:
            entry = placed.entry
            if not entry.name:
                self._restored_folders.append(entry)
                continue
            accepts = self._options.accepts
            if accepts is not None and not accepts(entry):
                continue
            try:
                descriptor = self._folder_of(entry.folder)
            except OSError as err:
                self._fail(entry, err)
                continue
            if accepts is not None:
                self._add_parents(entry.folder)
            self._names.add(entry.name)
            try:
                self._restore(placed, descriptor)
            except OSError as err:
                if err.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoom(f'"{self._target}": the device is full', self._target) from err
                self._fail(entry, err)
            except Corrupt as err:  # of this file: others may be sound
                self._contents.close()
                self.counts.damaged += 1
                self._fail(entry, err)
        self._close_folder()
        for entry in reversed(self._restored_folders):
            self._finish_folder(entry)

    # --- folders -----------------------------------------------------------------------------------------------------

    def _open_target(self) -> None:
        try:
            self._target.mkdir(parents=True, exist_ok=True)
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
        return self._folder[1]

    def _open_folder(self, path: bytes, *, create: bool = False) -> int:
        descriptor = os.dup(self._root)
        for part in path.split(b"/") if path else ():
            try:
                try:
                    below = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
                except FileNotFoundError:
                    if not create:
                        raise
                    os.mkdir(part, 0o700, dir_fd=descriptor)
                    below = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor

    def _add_parents(self, folder: bytes) -> None:
        """Note the folders that lead to an accepted entry, so that they get their attributes too."""
        missing = list[bytes]()
        while folder and folder != self._base and folder not in self._known_folders:
            missing.append(folder)
            folder = folder.rpartition(b"/")[0]
        for path in reversed(missing):
            self._known_folders.add(path)
            with suppress(NotFound):  # a tree may lack entries of folders above its paths
                self._restored_folders.append(self._reader.find(path).entry)

    def _close_folder(self) -> None:
        """Close the folder in progress; with `delete`, delete what else it contains."""
        if self._folder is None:
            return
        (_, descriptor), self._folder = self._folder, None
        names, self._names = self._names, set()
        try:
            if self._options.delete and self._options.accepts is None:
                self._delete_others(descriptor, names)
        finally:
            os.close(descriptor)

    def _delete_others(self, descriptor: int, names: set[bytes]) -> None:
        for name in map(os.fsencode, os.listdir(descriptor)):
            if name in names:
                continue
            try:
                _remove(name, descriptor)
                self.counts.deleted += 1
            except OSError as err:
                self.counts.failed += 1
                self._note(name, f"cannot be deleted: {_reason(err)}")

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
            if self._options.delete and self._options.accepts is None:
                self._delete_if_empty(entry, descriptor)
            self._set_attributes(entry, descriptor)
        finally:
            os.close(descriptor)

    def _delete_if_empty(self, entry: TreeEntry, descriptor: int) -> None:
        """Delete everything in a folder that is empty in the tree: no entry opened it."""
        if next(self._reader.children(entry.path), None) is None:
            self._delete_others(descriptor, set())

    # --- entries -----------------------------------------------------------------------------------------------------

    def _restore(self, placed: PlacedEntry, folder: int) -> None:
        entry = placed.entry
        if entry.kind == EntryKind.FOLDER:
            self._restore_folder(entry, folder)
            return
        exists = self._existing(entry.name, folder)
        if exists is not None:
            if self._is_kept(entry, exists):
                self.counts.kept_files += 1
                self._keep(entry, folder)
                return
            if stat.S_ISDIR(exists.st_mode) and not self._options.delete:
                self._note(entry.path, "a folder has this name; use --delete to replace it")
                self.counts.failed += 1
                return
            if stat.S_ISDIR(exists.st_mode) or entry.kind != EntryKind.FILE:
                _remove(entry.name, folder)
                exists = None
        if entry.kind == EntryKind.FILE:
            self._restore_file(placed, folder, replaces=exists is not None)
        elif entry.kind == EntryKind.HARD_LINK:
            self._restore_link(placed, folder)
        else:
            self._restore_other(entry, folder)

    def _existing(self, name: bytes, folder: int) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _is_kept(self, entry: TreeEntry, exists: os.stat_result) -> bool:
        overwrite = self._options.overwrite
        if overwrite == Overwrite.NEVER:
            return True
        return (
            overwrite == Overwrite.IF_CHANGED
            and entry.kind == EntryKind.FILE
            and stat.S_ISREG(exists.st_mode)
            and (exists.st_size, exists.st_mtime_ns) == (entry.size, entry.mtime_ns)
        )

    def _keep(self, entry: TreeEntry, folder: int) -> None:
        """Give a file whose content is kept its attributes."""
        if self._options.overwrite == Overwrite.IF_CHANGED:
            descriptor = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                self._set_attributes(entry, descriptor)
            finally:
                os.close(descriptor)

    def _restore_folder(self, entry: TreeEntry, folder: int) -> None:
        exists = self._existing(entry.name, folder)
        if exists is not None and not stat.S_ISDIR(exists.st_mode):
            os.unlink(entry.name, dir_fd=folder)
            exists = None
        if exists is None:
            os.mkdir(entry.name, 0o700, dir_fd=folder)
        elif exists.st_mode & 0o700 != 0o700:
            os.chmod(entry.name, stat.S_IMODE(exists.st_mode) | 0o700, dir_fd=folder)
        self._restored_folders.append(entry)
        if self._options.accepts is not None:
            self._known_folders.add(entry.path)
        self.counts.folders += 1

    def _restore_file(self, placed: PlacedEntry, folder: int, *, replaces: bool) -> None:
        entry = placed.entry
        name = _TEMPORARY % os.getpid() if replaces else entry.name
        with suppress(FileNotFoundError):
            if replaces:
                os.unlink(name, dir_fd=folder)
        descriptor = os.open(name, _NEW_FLAGS, 0o600, dir_fd=folder)
        try:
            self._write_content(placed, descriptor)
            self._set_attributes(entry, descriptor)
            if replaces:
                os.rename(name, entry.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(descriptor)
        self.counts.files += 1
        if entry.flags & EntryFlag.INCOMPLETE:
            self.counts.failed += 1
            self._note(entry.path, "was stored incomplete: reading it failed during the backup")

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

    def _restore_link(self, placed: PlacedEntry, folder: int) -> None:
        """Make a hard link; restore the content where the entry that has it is not restored."""
        entry = placed.entry
        target = self._linked.get(entry.target, entry.target)
        if target == entry.target and not self._is_restored(target):
            content = self._reader.content_of(placed)
            self._linked[entry.target] = entry.path
            copied = content.entry._replace(folder=entry.folder, name=entry.name)
            self._restore(PlacedEntry(copied, content.start), folder)
            return
        parent, _, name = target.rpartition(b"/")
        source = self._open_folder(self._relative(parent))
        try:
            os.link(name, entry.name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(source)
        self.counts.others += 1

    def _is_restored(self, path: bytes) -> bool:
        """Return whether an entry, which comes before its hard links, was among those to restore."""
        if self._base and not path.startswith(self._base + b"/"):
            return False
        accepts = self._options.accepts
        return accepts is None or accepts(self._reader.find(path).entry)

    def _restore_other(self, entry: TreeEntry, folder: int) -> None:
        if entry.kind == EntryKind.SYMLINK:
            os.symlink(entry.target, entry.name, dir_fd=folder)
        elif entry.kind == EntryKind.FIFO:
            os.mkfifo(entry.name, 0o600, dir_fd=folder)
        else:
            try:
                os.mknod(entry.name, 0o600 | _DEVICE_TYPES[EntryKind(entry.kind)], entry.size, dir_fd=folder)
            except PermissionError:
                self.counts.unset["device"] += 1
                self._note(entry.path, "is a device, which only root can make", is_attribute=True)
                return
        self._set_named_attributes(entry, folder)
        self.counts.others += 1

    # --- attributes --------------------------------------------------------------------------------------------------

    def _set_attributes(self, entry: TreeEntry, descriptor: int) -> None:
        """Set attributes of an open entry: first the owner, which clears others; last the times."""
        status = os.fstat(descriptor)
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            self._attempt(entry, "owner", lambda: os.fchown(descriptor, entry.uid, entry.gid))
        self._attempt(entry, "mode", lambda: os.fchmod(descriptor, entry.mode))
        existing = read_xattrs(descriptor) if entry.xattrs or status.st_nlink > 1 or entry.kind == 1 else ()
        for name, _ in existing:
            if name not in dict(entry.xattrs):
                self._attempt(entry, name.decode(errors="replace"), partial(os.removexattr, descriptor, name))
        for name, value in entry.xattrs:
            if (name, value) not in existing:
                self._attempt(entry, name.decode(errors="replace"), partial(os.setxattr, descriptor, name, value))
        self._attempt(entry, "time", lambda: os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns)))

    def _set_named_attributes(self, entry: TreeEntry, folder: int) -> None:
        """Set attributes of an entry that cannot be opened without an effect."""
        name, is_link = entry.name, entry.kind == EntryKind.SYMLINK
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            self._attempt(
                entry, "owner", lambda: os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
            )
        if not is_link:
            self._attempt(entry, "mode", lambda: os.chmod(name, entry.mode, dir_fd=folder))
        through = descriptor_path(folder, name)
        for attribute, value in entry.xattrs:
            put = partial(os.setxattr, through, attribute, value, follow_symlinks=False)
            self._attempt(entry, attribute.decode(errors="replace"), put)
        self._attempt(
            entry,
            "time",
            lambda: os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=folder, follow_symlinks=False),
        )

    def _attempt(self, entry: TreeEntry, what: str, call: Callable[[], None]) -> None:
        """Set an attribute; count it if this user or file system cannot."""
        try:
            call()
        except (OSError, OverflowError) as err:
            self.counts.unset[what] += 1
            self._note(entry.path, f"{what} cannot be set: {_reason(err)}", is_attribute=True)

    def _fail(self, entry: TreeEntry, err: Exception) -> None:
        self.counts.failed += 1
        self._note(entry.path, _reason(err))

    def _note(self, path: bytes, reason: str, *, is_attribute: bool = False) -> None:
        if len(self.counts.problems) < PROBLEMS_MAX:
            self.counts.problems.append(RestoreProblem(path, reason, is_attribute))


@runtime_checkable
class ClosableIterator(Protocol):
    """An iterator that a caller who stops early closes."""

    def close(self) -> None:
        """End the reading."""


class ContentStream:
    """Reads ascending ranges of contents as one stream where they are close together."""

    def __init__(self, open_range: Callable[[int, int], Iterable[memoryview]], stop: int) -> None:
        """`stop`: end of all contents."""
        self._open_range = open_range
        self._stop = stop
        self._pieces: Iterator[memoryview] | None = None
        self._piece = memoryview(b"")
        self._position = 0

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop). Raises Corrupt, StoreUnavailable."""
        if self._pieces is None or not self._position <= start <= self._position + len(self._piece) + SKIP_BYTES_MAX:
            self.close()
            self._pieces, self._position = iter(self._open_range(start, self._stop)), start
        while start < stop:
            if self._position + len(self._piece) <= start:
                self._position += len(self._piece)
                piece = next(self._pieces, None)
                if piece is None:
                    raise StoreUnavailable(f"contents end at byte {self._position}, {stop} are needed; try again")
                self._piece = piece
                continue
            first = start - self._position
            part = self._piece[first : first + stop - start]
            yield part
            start += len(part)

    def close(self) -> None:
        """End the stream."""
        pieces, self._pieces, self._piece = self._pieces, None, memoryview(b"")
        if isinstance(pieces, ClosableIterator):
            pieces.close()


def _remove(name: bytes, folder: int) -> None:
    """Delete a file or a folder with its content. Raises OSError."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _reason(err: BaseException) -> str:
    strerror = getattr(err, "strerror", None)
    return strerror.lower() if strerror else str(err) or type(err).__name__
