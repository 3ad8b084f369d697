"""List the folders of a tree in the order of its entries.

Folders come in pre-order; the names of each are ascending by bytes. A folder is opened by its path and compared by
device and inode with what its parent listed, so that a folder that is replaced by a symlink meanwhile is not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nearkin.trees.exclusions import Exclusions
from nearkin_shared.errors import BadInput
from nearkin_shared.formats.tree_entry_group import PATH_BYTES_MAX
from nearkin_shared.utils.mounts import pseudo_devices

ReportProblem = Callable[[bytes, str], None]
"""Called with a path of the file system and why it cannot be read."""
ReportSkip = Callable[[bytes, str], None]
"""Called with a path of the file system and why it is left out."""
Ancestors = tuple[int, int, "Ancestors | None"]
"""Device and inode of a folder, and those of the folders that contain it."""
PATH_PIECE_BYTES = 4000
"""Of a longer path the folder is opened in pieces: the kernel takes 4,095 bytes."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreePaths(NamedTuple):
    """The root of a tree, and what of it is stored."""

    root: bytes
    """Absolute path of the deepest folder that contains all given paths."""
    selected: Mapping[bytes, frozenset[str] | None]
    """For a folder (path in the tree) the names that are stored; None: all. Folders below such a one store all."""


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


def tree_paths(paths: Sequence[str | Path]) -> TreePaths:
    """Return the root of the tree that holds `paths`; a single folder is the root itself.

    Raises BadInput.
    """
    if not paths:
        raise BadInput("no path is given: name the folders to store")
    absolute = sorted({os.path.abspath(os.fsencode(path)) for path in paths})
    for path in absolute:
        _check_exists(path)
    if len(absolute) == 1 and os.path.isdir(absolute[0]):
        return TreePaths(os.path.realpath(absolute[0]), {b"": None})
    parents = [path if os.path.isdir(path) and not os.path.islink(path) else os.path.dirname(path) for path in absolute]
    root = os.path.commonpath(parents)
    selected: dict[bytes, set[str] | None] = {b"": set()}
    for path in absolute:
        folder = b""
        for part in os.path.relpath(path, root).split(b"/"):
            if part == b".":
                selected[b""] = None
            names = selected.setdefault(folder, set())
            if names is None:
                break
            names.add(os.fsdecode(part))
            folder = folder + b"/" + part if folder else part
        else:
            selected[folder] = None
    return TreePaths(root, {key: None if names is None else frozenset(names) for key, names in selected.items()})


def _check_exists(path: bytes) -> None:
    try:
        os.lstat(path)
    except OSError as err:
        raise BadInput(f'path "{os.fsdecode(path)}": {err.strerror}') from err
    except ValueError as err:
        raise BadInput(f"path {path!r}: {err}") from err


def open_folder(path: bytes) -> int:
    """Return the descriptor of a folder.

    Its path may be longer than a call of the kernel takes. Raises OSError.
    """
    if len(path) <= PATH_PIECE_BYTES:
        return os.open(path, _FOLDER_FLAGS)
    head = path.rfind(b"/", 1, PATH_PIECE_BYTES)  # a name has 255 bytes at most
    descriptor = os.open(path[:head], _FOLDER_FLAGS)
    while head < len(path):
        stop = (
            len(path) if len(path) - head <= PATH_PIECE_BYTES else path.rfind(b"/", head + 1, head + PATH_PIECE_BYTES)
        )
        try:
            below = os.open(path[head + 1 : stop], _FOLDER_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor, head = below, stop
    return descriptor


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

    def root_status(self) -> os.stat_result:
        """Return the status of the root. Raises BadInput if it cannot be read."""
        try:
            return os.stat(self._paths.root)
        except OSError as err:
            raise BadInput(f'path "{os.fsdecode(self._paths.root)}": {err.strerror}') from err

    def folders(self) -> Iterator[ListedFolder]:
        """Yield each folder that can be read. Raises BadInput if the root itself cannot be listed."""
        status = self.root_status()
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
                yield ListedFolder(
                    folder, file_path, descriptor, self._entries(folder, descriptor, names, below, chain, device)
                )
            finally:
                os.close(descriptor)
            waiting.extend(reversed(below))

    def _file_path(self, folder: bytes) -> bytes:
        return os.path.join(self._paths.root, folder) if folder else self._paths.root

    def _open(self, folder: bytes, path: bytes, device: int, inode: int) -> int | None:
        try:
            descriptor = open_folder(path)
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

    def _names(self, folder: bytes, path: bytes, descriptor: int) -> list[bytes]:
        try:
            names: Sequence[str] = os.listdir(descriptor)
        except OSError as err:
            if not folder:
                raise BadInput(f'path "{os.fsdecode(path)}": {err.strerror}') from err
            self._problem(path, (err.strerror or "cannot be listed").lower())
            return []
        allowed = self._paths.selected.get(folder)
        if allowed is not None:
            names = [name for name in names if name in allowed]
        return sorted(map(os.fsencode, self._exclusions.kept_names(descriptor, names)))

    def _entries(
        self,
        folder: bytes,
        descriptor: int,
        names: list[bytes],
        below: list[tuple[bytes, int, int, Ancestors | None]],
        chain: Ancestors,
        device: int,
    ) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield the entries that are stored; add folders to enter to `below`."""
        excludes, problem = self._exclusions.excludes, self._problem
        prefix = folder + b"/" if folder else b""
        for name in names:
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                self._notice(self._file_path(prefix + name), "was deleted while the tree was read")
                continue
            except OSError as err:
                problem(self._file_path(prefix + name), (err.strerror or "has no status").lower())
                continue
            path = prefix + name
            if len(path) >= PATH_BYTES_MAX:
                problem(self._file_path(path), f"its path has {len(path):,} bytes, at most {PATH_BYTES_MAX - 1:,} fit")
                continue
            if excludes(path, status) and not self._is_selected(path):
                continue
            if stat.S_ISDIR(status.st_mode) and self._is_entered(path, status, chain, device):
                below.append((path, status.st_dev, status.st_ino, chain))
            yield name, status

    def _is_selected(self, path: bytes) -> bool:
        """Return whether a path was given, or leads to one that was."""
        return path in self._paths.selected

    def _is_entered(self, path: bytes, status: os.stat_result, chain: Ancestors, device: int) -> bool:
        """Return whether the content of a folder is stored."""
        identity = (status.st_dev, status.st_ino)
        reason = ""
        if identity in self._left_out:
            reason = "is the store itself"
        elif status.st_dev in self._pseudo:
            reason = "is a file system of the kernel"
        elif self._one_file_system and status.st_dev != device and not self._is_selected(path):
            reason = "is on another file system"
        else:
            ancestor: Ancestors | None = chain
            while ancestor is not None:
                if ancestor[:2] == identity:
                    reason = "is mounted inside itself"
                    break
                ancestor = ancestor[2]
        if reason:
            with suppress(ValueError):
                self._notice(self._file_path(path), f"{reason}; its content is left out")
        return not reason
