"""List the folders of a tree in the order of its entries.

Folders come in pre-order; the names of each are ascending by bytes. A folder is opened by its path and compared by
device and inode with what its parent listed, so that a folder that is replaced by a symlink meanwhile is not followed.

Invariant: each given path is yielded, or reported with the reason.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from nearkin.trees.exclusions import Exclusions
from nearkin.trees.source_patterns import SourcePrefix, source_prefixes
from nearkin.trees.unfinished_files import is_unfinished
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import NAME_BYTES_MAX, PATH_BYTES_MAX
from nearkin_shared.utils.mounts import pseudo_devices, store_mount_devices

ReportProblem = Callable[[bytes, str], None]
"""Called with a path of the file system and why it cannot be read."""
NewestRoot = Callable[[], bytes | None]
"""Returns the root of the newest version of a key; None if there is none."""
ReportSkip = Callable[[bytes, str], None]
"""Called with a path of the file system and why it is left out."""
Ancestors = tuple[int, int, "Ancestors | None"]
"""Device and inode of a folder, and those of the folders that contain it."""
PATH_PIECE_BYTES = 4000
"""Of a longer path the folder is opened in pieces: the kernel takes 4,095 bytes."""
PARTIAL_BYTES_MAX = 1 << 20
"""Paths of folders of which something is left out."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreePaths(NamedTuple):
    """The root of a tree, and what of it is stored."""

    root: bytes
    """Absolute path of the deepest folder that contains all given paths."""
    selected: Mapping[bytes, frozenset[str] | None]
    """For a folder (path in the tree) the names that are stored; None: all. Folders below such a one store all."""
    followed: frozenset[bytes] = frozenset()
    """Symlinks (paths in the tree) that lead to given paths: each is stored as the folder that it leads to."""
    given: frozenset[bytes] = frozenset()
    """The given paths that exist, in the tree; without the root."""
    absent: tuple[tuple[bytes, str], ...] = ()
    """Given paths (absolute) that cannot be found, and why."""
    prefixes: Sequence[SourcePrefix] = ()
    """Texts that a pattern may begin with in place of the path in the tree."""


class ListedFolder(NamedTuple):
    """A folder and its entries."""

    path: bytes
    """In the tree."""
    file_path: bytes
    """Absolute."""
    descriptor: int
    """Open until the next folder is asked for."""
    entries: Iterator[tuple[bytes, os.stat_result]]
    """Names, ascending; statuses are read as they are asked for."""
    names: deque[bytes]
    """Those that `entries` has not yielded; the caller may remove the first ones, of entries that are no folders."""
    is_plain: bool
    """Whether all entries are stored, so that only their statuses matter."""


class _GivenPath(NamedTuple):
    """A path of a caller."""

    path: bytes
    """Absolute; symlinks in it are kept, those before a `..` apart."""
    is_absent: bool
    reason: str
    is_followed: bool
    """It ends with `/`: a symlink stands for its folder."""


def tree_paths(paths: Sequence[str | Path], newest_root: NewestRoot = lambda: None) -> TreePaths:
    """Return the root of the tree that holds `paths`; a single folder is the root itself.

    A path that is absent counts only where the newest version has such a root: then names in the tree stay as they
    are. Raises BadInput (no path, or none that exists).
    """
    if not paths:
        raise BadInput("no path is given: name the folders to store")
    by_text = {os.fsdecode(path): _given_path(os.fsencode(path)) for path in paths}
    given = sorted(set(by_text.values()))
    named = [(text, path.path) for text, path in by_text.items()]
    absent = tuple((path.path, path.reason) for path in given if path.is_absent)
    if len(absent) == len(given):
        more = f"; {len(absent) - 1:,} others cannot be stored either" if len(absent) > 1 else ""
        raise BadInput(f'path "{os.fsdecode(absent[0][0])}": {absent[0][1]}{more}')
    present = [path for path in given if not path.is_absent]
    root = _root_of(present)
    if absent and os.path.realpath(with_absent := _root_of(given)) == newest_root():
        root, present = with_absent, given
    if len(present) == 1 and os.path.isdir(present[0].path):
        real_root = os.path.realpath(present[0].path)
        return TreePaths(
            real_root, {b"": None}, absent=absent, prefixes=source_prefixes(named, present[0].path, real_root)
        )
    selection = _Selection(root)
    for path in given:
        if not path.is_absent:
            selection.add(path)
    names = {key: None if names is None else frozenset(names) for key, names in selection.selected.items()}
    real_root = os.path.realpath(root)
    return TreePaths(
        real_root,
        names,
        frozenset(selection.followed),
        frozenset(selection.given - {b""}),
        absent,
        source_prefixes(named, root, real_root),
    )


def _given_path(path: bytes) -> _GivenPath:
    """Return an absolute path. Raises BadInput for one that no file system can have."""
    parts = path.split(b"/")
    try:
        if b".." in parts:  # behind a symlink it is the folder above the symlink's target
            last = next((part for part in reversed(parts) if part not in (b"", b".")), b"")
            head = path if last == b".." else path[: path.rindex(last)]
            path = os.path.join(os.path.realpath(head), b"" if last == b".." else last) + path[len(path.rstrip(b"/")) :]
        absolute = os.path.abspath(path)
        status = os.lstat(absolute)
    except OSError as err:
        return _GivenPath(os.path.abspath(path), True, (err.strerror or "cannot be read").lower(), False)
    except ValueError as err:
        raise BadInput(f"path {path!r}: {err}") from err
    if stat.S_ISSOCK(status.st_mode):
        return _GivenPath(absolute, True, "is a socket, which has no content to store", False)
    return _GivenPath(absolute, False, "", parts[-1] in (b"", b".") and os.path.isdir(absolute))


def _root_of(given: Sequence[_GivenPath]) -> bytes:
    return os.path.commonpath([path.path if _is_folder(path) else os.path.dirname(path.path) for path in given])


def _is_folder(path: _GivenPath) -> bool:
    return os.path.isdir(path.path) and (path.is_followed or not os.path.islink(path.path))


class _Selection:
    """Collects which names of which folders lead to given paths."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._links: dict[bytes, bool] = {}
        self.selected: dict[bytes, set[str] | None] = {b"": set()}
        self.followed: set[bytes] = set()
        self.given: set[bytes] = set()

    def add(self, path: _GivenPath) -> None:
        """Add a path; the leading ones, which sort before it, have been added."""
        folder, is_covered = b"", False
        relative = os.path.relpath(path.path, self._root)
        parts = [] if relative == b"." else relative.split(b"/")
        for number, part in enumerate(parts, 1):
            names = self.selected.get(folder, set())
            is_covered = is_covered or names is None
            if not is_covered:
                assert names is not None  # else it is covered
                names.add(os.fsdecode(part))
            folder = folder + b"/" + part if folder else part
            if (number < len(parts) or path.is_followed) and self._is_link(folder):
                self.followed.add(folder)
                is_covered = False  # what contains the symlink does not contain what is below its target
            if number < len(parts) and not is_covered:
                self.selected.setdefault(folder, set())
        self.given.add(folder)
        if not is_covered:
            self.selected[folder] = None

    def _is_link(self, folder: bytes) -> bool:
        if folder not in self._links:
            self._links[folder] = os.path.islink(os.path.join(self._root, folder))
        return self._links[folder]


def open_folder(path: bytes, *, follow_symlinks: bool = False) -> int:
    """Return the descriptor of a folder.

    Its path may be longer than a call of the kernel takes. Raises OSError.
    """
    flags = _FOLDER_FLAGS & ~os.O_NOFOLLOW if follow_symlinks else _FOLDER_FLAGS
    if len(path) <= PATH_PIECE_BYTES:
        return os.open(path, flags)
    head = path.rfind(b"/", 1, PATH_PIECE_BYTES)  # a name has 255 bytes at most
    descriptor = os.open(path[:head], flags)
    while head < len(path):
        stop = (
            len(path) if len(path) - head <= PATH_PIECE_BYTES else path.rfind(b"/", head + 1, head + PATH_PIECE_BYTES)
        )
        try:
            below = os.open(path[head + 1 : stop], flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor, head = below, stop
    return descriptor


class PartialFolders:
    """Folders of a tree of which something is left out.

    A restore must not delete other entries in them.
    """

    def __init__(self) -> None:
        self._folders: set[bytes] = set()
        self._size_bytes = 0

    def add(self, folder: bytes) -> None:
        """Add a folder by its path in the tree."""
        if folder not in self._folders and self._size_bytes <= PARTIAL_BYTES_MAX:
            self._folders.add(folder)
            self._size_bytes += len(folder) + 1

    def sorted(self) -> tuple[bytes, ...] | msgspec.UnsetType:
        """Return the folders, ascending; unset if they are more than a summary holds."""
        return msgspec.UNSET if self._size_bytes > PARTIAL_BYTES_MAX else tuple(sorted(self._folders))


class TreeWalker:
    """Lists the folders of a tree."""

    def __init__(
        self,
        paths: TreePaths,
        exclusions: Exclusions,
        problem: ReportProblem,
        notice: ReportSkip,
        *,
        one_file_system: bool = False,
        left_out: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`left_out`: device and inode of folders that are not entered, such as the store itself."""
        self._paths = paths
        self._exclusions = exclusions
        self._problem = problem
        self._notice = notice
        self._one_file_system = one_file_system
        self._left_out = frozenset(left_out)
        self._pseudo = pseudo_devices()
        self._store_mounts = store_mount_devices()
        self._unmet = set(paths.given)
        self.partial = PartialFolders()

    def root_status(self) -> os.stat_result:
        """Return the status of the root. Raises BadInput if it cannot be read."""
        try:
            return os.stat(self._paths.root)
        except OSError as err:
            raise BadInput(f'path "{os.fsdecode(self._paths.root)}": {err.strerror}') from err

    def folders(self) -> Iterator[ListedFolder]:
        """Yield each folder that can be read.

        Raises BadInput if the root itself cannot be listed, or is the store or of the kernel.
        """
        status = self.root_status()
        self._check_root(status)
        device = status.st_dev
        waiting: list[tuple[bytes, int, int, Ancestors | None]] = [(b"", status.st_dev, status.st_ino, None)]
        while waiting:
            folder, found_device, inode, ancestors = waiting.pop()
            file_path = self._file_path(folder)
            descriptor = self._open(folder, file_path, found_device, inode)
            if descriptor is None:
                continue
            below: list[tuple[bytes, int, int, Ancestors | None]] = []
            chain: Ancestors = (found_device, inode, ancestors)
            try:
                names = self._names(folder, file_path, descriptor)
                entries = self._entries(folder, descriptor, names, below, chain, device)
                yield ListedFolder(folder, file_path, descriptor, entries, names, self._is_plain(folder))
            finally:
                os.close(descriptor)
            waiting.extend(reversed(below))
        for path, reason in self._paths.absent:
            self._problem(path, reason)
        for path in sorted(self._unmet):
            self._problem(self._file_path(path), "is given, but was not found or not reached; it is not stored")

    def is_followed(self, folder: bytes, name: bytes) -> bool:
        """Return whether an entry is a symlink that is stored as the folder that it leads to."""
        return bool(self._paths.followed) and (folder + b"/" + name if folder else name) in self._paths.followed

    def _check_root(self, status: os.stat_result) -> None:
        """Refuse a root of the kernel, the store, and what is in it. Raises BadInput."""
        folder = self._paths.root
        if status.st_dev in self._pseudo:
            raise BadInput(
                f'path "{os.fsdecode(folder)}": is in a file system of the kernel; `nearkin put` stores a file of it'
            )
        while (status.st_dev, status.st_ino) not in self._left_out:
            above = os.path.dirname(folder)
            if above == folder:
                return
            folder, status = above, os.stat(above)
        raise BadInput(
            f'path "{os.fsdecode(self._paths.root)}": is the store itself, or in it; to copy a store use `nearkin copy`'
        )

    def _file_path(self, folder: bytes) -> bytes:
        return os.path.join(self._paths.root, folder) if folder else self._paths.root

    def _open(self, folder: bytes, path: bytes, device: int, inode: int) -> int | None:
        try:
            descriptor = open_folder(path, follow_symlinks=bool(self._paths.followed))  # the inode is compared
        except OSError as err:
            if not folder:
                raise BadInput(f'path "{os.fsdecode(path)}": {err.strerror}') from err
            self._problem(path, (err.strerror or "cannot be opened").lower())
            return None
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (device, inode):
            os.close(descriptor)
            self._problem(path, "was replaced while the tree was read")
            return None
        return descriptor

    def _is_plain(self, folder: bytes) -> bool:
        """Return whether no entry of a folder is followed, given or excluded.

        Nor has too long a path.
        """
        return (
            not self._paths.followed
            and not self._unmet
            and self._exclusions.has_no_rules
            and len(folder) + 1 + NAME_BYTES_MAX < PATH_BYTES_MAX
        )

    def _names(self, folder: bytes, path: bytes, descriptor: int) -> deque[bytes]:
        try:
            names: Sequence[str] = os.listdir(descriptor)
        except OSError as err:
            if not folder:
                raise BadInput(f'path "{os.fsdecode(path)}": {err.strerror}') from err
            self._problem(path, (err.strerror or "cannot be listed").lower())
            return deque()
        allowed = self._paths.selected.get(folder)
        kept = names if allowed is None else [name for name in names if name in allowed]
        chosen = len(kept)
        kept = self._exclusions.kept_names(descriptor, kept)
        if len(kept) < chosen:
            self._exclusions.note_pruned(folder, path)
        if len(kept) < len(names):
            self.partial.add(folder)
        return deque(sorted(map(os.fsencode, kept)))

    def _entries(
        self,
        folder: bytes,
        descriptor: int,
        names: deque[bytes],
        below: list[tuple[bytes, int, int, Ancestors | None]],
        chain: Ancestors,
        device: int,
    ) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield the entries that are stored; add folders to enter to `below`."""
        excludes, problem = self._exclusions.excludes, self._problem
        prefix = folder + b"/" if folder else b""
        while names:
            name = names.popleft()
            path = prefix + name
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=path in self._paths.followed)
            except FileNotFoundError:
                self._notice(self._file_path(path), "was deleted while the tree was read")
                continue
            except OSError as err:
                problem(self._file_path(path), (err.strerror or "has no status").lower())
                continue
            if len(path) >= PATH_BYTES_MAX:
                problem(self._file_path(path), f"its path has {len(path):,} bytes, at most {PATH_BYTES_MAX - 1:,} fit")
                continue
            if is_unfinished(name, status) and not self._is_selected(path):
                continue  # not `partial`: restore --delete may remove it
            if excludes(path, status) and not self._is_kept(path, status):
                self.partial.add(folder)
                if stat.S_ISDIR(status.st_mode):
                    is_listed = status.st_dev == chain[0] and status.st_dev not in self._pseudo
                    self._exclusions.note_pruned(path, self._file_path(path) if is_listed else b"")
                continue
            if path in self._unmet:
                self._meet(path, status)
            if stat.S_ISDIR(status.st_mode) and self._is_entered(path, status, chain, device):
                below.append((path, status.st_dev, status.st_ino, chain))
            yield name, status

    def _is_kept(self, path: bytes, status: os.stat_result) -> bool:
        """Return whether an excluded entry is stored, as it leads to a given path.

        One that is given is reported.
        """
        is_kept = path in self._paths.selected
        if path in self._paths.given:
            self._unmet.discard(path)
            what = "it is left out"
            if is_kept:
                what = "its content is left out" if stat.S_ISDIR(status.st_mode) else "it is stored"
            self._notice(self._file_path(path), f"is given, and matches an exclude pattern or size; {what}")
        return is_kept

    def _meet(self, path: bytes, status: os.stat_result) -> None:
        self._unmet.discard(path)
        if stat.S_ISLNK(status.st_mode) and os.path.isdir(self._file_path(path)):
            self._notice(self._file_path(path), "is a symlink and stored as one; end the path with / for its folder")

    def _is_selected(self, path: bytes) -> bool:
        """Return whether a path was given, or leads to one that was."""
        return path in self._paths.selected or path in self._paths.given

    def _is_entered(self, path: bytes, status: os.stat_result, chain: Ancestors, device: int) -> bool:
        """Return whether the content of a folder is stored."""
        identity = (status.st_dev, status.st_ino)
        reason = ""
        if identity in self._left_out:
            reason = "is the store itself"
        elif status.st_dev in self._pseudo:
            reason = "is a file system of the kernel"
        elif status.st_dev in self._store_mounts and status.st_dev != device and not self._is_selected(path):
            reason = "is a store that `nearkin mount` mounted"
        elif self._one_file_system and status.st_dev != device and not self._is_selected(path):
            reason = "is on another file system"
        else:
            # a followed symlink may lead to a folder above it: of that the given paths below the symlink are stored
            ancestor: Ancestors | None = None if path in self._paths.followed else chain
            while ancestor is not None:
                if ancestor[:2] == identity:
                    reason = "is mounted inside itself"
                    break
                ancestor = ancestor[2]
        if reason:
            self._exclusions.note_pruned(path)
            with suppress(ValueError):
                self._notice(self._file_path(path), f"{reason}; its content is left out")
        return not reason
