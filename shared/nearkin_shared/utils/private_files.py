"""Open files and make folders that only their owner may read, never through links.

They belong to a store or a cache. Otherwise a user who may write a store's folder could make a privileged process
overwrite any file, for example through `lock.holder`.

    file      0600, opened with O_NOFOLLOW; anything but a regular file is refused
    folder    0700; a link is refused
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nearkin_shared.errors import NoRoom, NotWritable, StoreUnavailable

FILE_MODE = 0o600
FOLDER_MODE = 0o700
REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of a process that may not write a file, whatever else would work."""
TIGHTENED_MAX = 4096
"""Entries of one folder whose modes are checked, so that opening a store takes a bounded time."""


class LinkRefused(StoreUnavailable):
    """A symbolic link has the name of a file or folder that Nearkin owns."""


def refuse_link(path: Path) -> LinkRefused:
    """Return the error for a link with the name of a store's own file or folder."""
    return LinkRefused(
        f"{path}: is a symbolic link; Nearkin does not follow links inside a store, another user may have made it: "
        "remove it and run the same command again"
    )


def write_error(path: Path, err: OSError) -> StoreUnavailable:
    """Return the error for a lock or index file that could not be opened for writing."""
    if err.errno in REFUSED:
        return NotWritable(f"{path}: {err.strerror}: this process cannot write here; it may list, get and verify")
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoom(f"{path}: no room left on the device: make room and run the same again", path.parent)
    return StoreUnavailable(f"{path}: {err.strerror}")


def nearest_folder(path: Path) -> Path:
    """Return a folder, or its nearest existing parent: both are on the same device."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), path)


def open_private(path: Path, flags: int) -> int:
    """Open a regular file of a store and return its descriptor; a new file has mode 0600.

    Raises LinkRefused: the last part of the path is a symbolic link. Raises OSError.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for its other end
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
    except OSError as err:
        if err.errno == errno.ELOOP and path.is_symlink():
            raise refuse_link(path) from err
        raise
    try:
        _check_regular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def write_private(path: Path, data: bytes) -> None:
    """Replace the content of a store's file, but not of a hard link to it.

    Raises LinkRefused, OSError.
    """
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_nlink > 1:  # a hard link to another file, or a store that was copied as links
            os.unlink(path)
            os.close(descriptor)
            descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_private(path: Path, bytes_max: int) -> bytes:
    """Return the first bytes of a file that a store owns. Raises LinkRefused, OSError."""
    descriptor = open_private(path, os.O_RDONLY)
    try:
        return os.read(descriptor, bytes_max)
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Make a folder of mode 0700 unless it exists. Raises LinkRefused, OSError."""
    check_no_link(folder)
    try:
        os.mkdir(folder, FOLDER_MODE)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise


def make_private_folders(folder: Path) -> None:
    """Make a folder of mode 0700, and missing parents with the user's umask.

    Raises LinkRefused, OSError.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
    make_private_folder(folder)


def check_no_link(path: Path) -> None:
    """Raise LinkRefused if a store's own file or folder is a symbolic link."""
    if path.is_symlink():
        raise refuse_link(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder with its contents; of a link remove the link only."""
    if folder.is_symlink() or not folder.is_dir():
        with suppress(FileNotFoundError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def check_linked_folder(folder: str | Path) -> None:
    """Raise LinkRefused if a folder of objects is a link of another user.

    An operator may keep `containers/` on another disk: links of this user or root are accepted. A link that another
    user
    made could lead anywhere.
    """
    try:
        status = os.lstat(folder)
    except OSError:  # missing, or an invalid name: the caller's own access reports it
        return
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise refuse_link(Path(folder))


def tighten_modes(root: Path, folders: Iterable[Path] = ()) -> int:
    """Remove other users' access to files of older versions; return how many entries had it.

    Covers the entries of the root and of `folders`, up to TIGHTENED_MAX of each, as far as this user owns them: entries
    below a folder of mode 0700 are out of reach whatever their own mode. The root keeps its mode.
    """
    count = 0
    for folder in (root, *folders):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(TIGHTENED_MAX), strict=False):
                with suppress(OSError):
                    count += _tighten(entry)
    return count


def _tighten(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    allowed = {stat.S_IFREG: FILE_MODE, stat.S_IFDIR: FOLDER_MODE}.get(stat.S_IFMT(status.st_mode))
    mode = stat.S_IMODE(status.st_mode)
    if allowed is None or not mode & 0o077 or status.st_uid != os.geteuid():
        return False
    # Through a descriptor: a name could be made a link meanwhile, and chmod follows links.
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fchmod(descriptor, mode & allowed)
    finally:
        os.close(descriptor)
    return True
