"""Store objects as files of a folder.

Invariant: an object is written whole and durable, or not at all; its name is given once.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin_shared.errors import Corrupt, NotFound, StoreUnavailable
from nearkin_shared.limits import DESCRIPTOR, KIB, MIB
from nearkin_shared.objectstore.base import AlreadyExists, Payload, check_size, unavailable
from nearkin_shared.objectstore.file_publishing import NO_FOLDER_SYNC, NO_LINKS, is_same_file, rename_new
from nearkin_shared.utils.buffers import SMALLEST_BYTES, BufferPool
from nearkin_shared.utils.failpoints import failpoint
from nearkin_shared.utils.mounts import network_type
from nearkin_shared.utils.private_files import FILE_MODE, FOLDER_MODE, check_linked_folder, check_no_link

if TYPE_CHECKING:
    from nearkin_shared.objectstore.obstore_adapter import ObstoreObjectStore

_log = logging.getLogger("nearkin")
PARTS_WRITTEN_MAX = 1024
"""Of parts in one call: Linux takes no more."""
DROPPED_BYTES_MIN = 256 * KIB
"""Smaller objects stay in the page cache: they are read again and again, and take no room to speak of."""


STORE_ENTRIES = (DESCRIPTOR, "manifests", "containers")
"""Without its descriptor the folder is missing: a disk that is not mounted, for example."""
FOLDER_LOCKS = 64
TOGETHER_BYTES_MAX = 256 * KIB
"""Of ranges that are read together: all of them stay in memory for as long as one does."""
SPARE_BYTES_MAX = 8 * MIB
"""Memory that ranges were read into, kept for the next ones."""
SWEPT_TRIES_MAX = 8
"""Each but the first means that another process has begun to write since: some 60 ms."""


class LocalObjectStore:
    """The objects of a folder, written, read and listed without obstore.

    obstore's LocalStore does not fsync, which I1 needs. A range takes 10 us; through obstore it takes 400, and the
    import
    adds 6 ms to every command.
    """

    far = False

    def __init__(self, root: Path, *, dropped: tuple[str, ...] = ()) -> None:
        """Evict large objects with a prefix in `dropped` from the page cache (ADR 31).

        They are evicted once they are durable.
        """
        self._root = root
        self._dropped = dropped
        self._scratch = root / "tmp"
        self._settled: set[str] = set()
        self._unsynced: set[Path] = set()
        """Folders from which a name was removed whose sync failed."""
        self._buffers = BufferPool(SPARE_BYTES_MAX)
        # A thread must not take a folder for durable that another has only just made; striped, since a sync takes 1 ms.
        self._folders = tuple(threading.Lock() for _ in range(FOLDER_LOCKS))
        self._client: ObstoreObjectStore | None = None
        self._has_descriptor = False
        """Whether the descriptor was read once: no other object is missing alone if it is missing now."""

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) below the folder `prefix`, in no order.

        Entries that are no file, or were deleted meanwhile, are skipped. Names that are not UTF-8 are escaped. A file
        in place
        of the folder, and a dangling link, are errors: an unmounted disk would otherwise look like an empty store, and
        data
        that its manifests name would be freed. Raises StoreUnavailable.
        """
        folders = [prefix.rstrip("/")]
        self._check_folders(f"{self._root}/{folders[0]}")
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(f"{self._root}/{folder}") as entries:
                    for entry in entries:
                        name = f"{folder}/{entry.name}".lstrip("/")
                        if entry.is_dir():
                            if entry.is_symlink():
                                check_linked_folder(self._root / name)
                            folders.append(name)
                        elif (size_bytes := _file_bytes(entry)) is not None:
                            yield os.fsencode(name).decode(errors="backslashreplace"), size_bytes
                        elif (
                            entry.is_symlink() and "." not in entry.name
                        ):  # a link of a folder; one of an object is reported as damage
                            self._check_link(name)
            except FileNotFoundError:
                self._check_mounted()
                self._check_link(folder)
            except OSError as err:
                raise unavailable(folder, err) from err

    def file_sizes(self, folders: Iterable[str]) -> Iterator[dict[str, int] | None]:
        """Yield {file name: bytes} of each folder; None if it is missing or has other entries.

        It takes a fifteenth of the time of `names`, which also reports errors and other users' links.
        """
        for folder in folders:
            path = f"{self._root}/{folder}"
            found: dict[str, int] = {}
            try:
                names = os.listdir(path)
                for name in names:
                    status = os.lstat(f"{path}/{name}")
                    if stat.S_ISREG(status.st_mode):
                        found[name] = status.st_size
            except OSError:
                yield None
            else:
                yield found if len(found) == len(names) else None

    def are_missing(self, folders: Sequence[str]) -> list[bool]:
        """Return which folders do not exist, in a sixth of the system calls of `names`.

        False also for errors, which `names` reports. Raises StoreUnavailable, LinkRefused.
        """
        checked: set[str] = set()
        found = [self._is_missing(folder.rstrip("/"), checked) for folder in folders]
        if any(found):
            self._check_mounted()
        return found

    def _is_missing(self, folder: str, checked: set[str]) -> bool:
        path = f"{self._root}/{folder}"
        self._check_folders(path.rpartition("/")[0], checked)
        try:
            os.lstat(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _check_link(self, name: str) -> None:
        """Raise StoreUnavailable for a dangling link."""
        path = f"{self._root}/{name}"
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(status.st_mode) and not os.path.exists(path):
            raise StoreUnavailable(
                f"{os.fsencode(name).decode(errors='backslashreplace')}: a link to {os.readlink(path)!r}, which is not "
                "there; mount it, move the folder that it linked to here, or remove the link"
            )

    def stamp(self, name: str) -> tuple[int, str | None]:
        """Return an object's size and a value that changes with its bytes.

        Raises NotFound or StoreUnavailable.
        """
        if self._client is None:
            from nearkin_shared.objectstore.obstore_adapter import (
                local_client,  # 6 ms of each command, and asked for by services alone
            )

            self._client = local_client(self._root)
        return self._client.stamp(name)

    def put_new(self, name: str, *parts: Payload) -> None:
        """Write, fsync, link to the final name (fails if it exists), fsync the folder.

        No crash leaves half an object.
        """
        final = self._root / name
        failpoint("object.begun")
        try:
            self._check_folders(str(final.parent))
            self._make_folder(str(final.parent))
            check_no_link(self._scratch)
            _make(self._scratch)
            self._write_and_rename(name, parts, lambda temporary: _link(temporary, final, self._root / "lock.rename"))
            failpoint("object.scratch-removed")
            try:
                sync_folder(final.parent)  # 3 the name itself is durable
            except OSError:
                # A later sync may succeed without writing what this one could not: a new name is written by it.
                with suppress(OSError):
                    _remove(final)
                raise
            failpoint("object.durable")
        except FileExistsError as err:
            self._sync_existing(final)
            raise AlreadyExists(f"{name}: already there") from err
        except OSError as err:
            raise unavailable(name, err) from err

    def _sync_existing(self, final: Path) -> None:
        """Make a name durable that another writer made: it may not have synced the folder yet."""
        try:
            sync_folder(final.parent)
        except OSError as err:
            raise unavailable(str(final.relative_to(self._root)), err) from err

    def replace(self, name: str, data: Payload) -> None:
        """Write, fsync, rename over the name, fsync the folder."""
        final = self._root / name
        try:
            self._check_folders(str(final.parent))
            self._make_folder(str(final.parent))
            check_no_link(self._scratch)
            _make(self._scratch)
            self._write_and_rename(name, [data], lambda temporary: os.replace(temporary, final))
            failpoint("object.replaced")
            sync_folder(final.parent)
        except OSError as err:
            raise unavailable(name, err) from err

    def _write_and_rename(self, name: str, parts: Sequence[Payload], give: Callable[[Path], None]) -> None:
        """Make an object's bytes durable under a temporary name, and let `give` rename it.

        A process that takes the store's lock sweeps the scratch folder. A pause, for example, is written without that
        lock, and then written again.
        """
        for tries_left in reversed(range(SWEPT_TRIES_MAX)):
            temporary = self._scratch / f"{secrets.token_hex(8)}.part"
            try:
                # 1 bytes durable under a temporary name
                write_durably(temporary, parts, drop=name.startswith(self._dropped))
                failpoint("object.synced")
                give(temporary)  # 2 visible, atomically
            except FileNotFoundError:
                if temporary.exists() or not tries_left:
                    raise
            else:
                return
            finally:
                with suppress(OSError):  # the next process that takes the lock sweeps it; the object may have its name
                    _remove(temporary)

    def get(self, name: str) -> bytes:
        """Return a whole object.

        Raises NotFound, StoreUnavailable, Corrupt (the device cannot read it, or it exceeds the bound of objects).
        """
        with self._reading(name) as (descriptor, size_bytes):
            check_size(name, size_bytes)
            return _read_bytes(descriptor, 0, size_bytes)

    def get_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> Sequence[Payload]:
        """Return the byte ranges [start, end); adjacent ones are read together and share memory."""
        found = list[Payload]()
        with self._reading(name) as (descriptor, _):
            for run in _runs(list(zip(starts, ends, strict=True))):
                first = run[0][0]
                read = self._read_range(descriptor, first, run[-1][1])
                if len(run) > 1:
                    view = memoryview(read)
                    found += [view[start - first : end - first] for start, end in run]
                else:
                    found.append(read)
        return found

    def _read_range(self, descriptor: int, start: int, end: int) -> Payload:
        """Return what there is of a range: a large one in memory that is used again."""
        if end - start < SMALLEST_BYTES:
            return _read_bytes(descriptor, start, end)
        view = memoryview(self._buffers.take(end - start))
        done = 0
        while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
            done += count  # less than all: a signal, or 2 GiB at once; nothing: the end of the file
        return view[:done]

    def size_bytes(self, name: str) -> int:
        """Return an object's size. Raises NotFound, StoreUnavailable, or Corrupt as `get` does."""
        with self._reading(name) as (_, size_bytes):
            return size_bytes

    @property
    def has_server_clock(self) -> bool:
        """Return whether the folder is on a network filesystem, whose server dates files."""
        return network_type(self._root) is not None

    def modified_seconds(self, name: str) -> float:
        """Return the time at which an object was written, seconds since 1970.

        Raises NotFound, StoreUnavailable.
        """
        with self._reading(name) as (descriptor, _):
            return os.fstat(descriptor).st_mtime

    @contextmanager
    def _reading(self, name: str) -> Iterator[tuple[int, int]]:
        """Open an object for as long as the block runs: (descriptor, bytes)."""
        try:
            # O_NONBLOCK: opening a pipe would wait forever for a writer
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(errno.ENOENT, "is no file")
                self._has_descriptor |= name == DESCRIPTOR
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)
        except FileNotFoundError as err:
            if self._has_descriptor and name != DESCRIPTOR and not os.path.lexists(self._root / DESCRIPTOR):
                raise self._unmounted() from err
            raise NotFound(f"{name}: no such object") from err
        except OSError as err:
            if err.errno == errno.ELOOP and (self._root / name).is_symlink():
                raise Corrupt(
                    f"{name}: is a symbolic link, and Nearkin follows none: put the file that it names in its place"
                ) from err
            if err.errno == errno.EIO:  # a bad sector is damage of this object, not of the store: it stays
                raise Corrupt(f"{name}: the device cannot read it ({err.strerror}): run `nearkin verify`") from err
            raise unavailable(name, err) from err

    def _check_mounted(self) -> None:
        """Refuse a folder that was a store before and is empty now: its disk is unmounted.

        Invariant: I1, I10. Raises StoreUnavailable.
        """
        if self._has_descriptor and not any(os.path.lexists(self._root / name) for name in STORE_ENTRIES):
            raise self._unmounted()

    def _unmounted(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"store {self._root}: its {DESCRIPTOR}, read before, is missing now; mount its disk again"
        )

    def delete(self, name: str) -> None:
        """Delete an object, durably: it must not return without objects deleted after it."""
        path = self._root / name
        try:
            self._check_folders(str(path.parent))
            os.unlink(path)
            failpoint("object.unlinked")
            self._sync_removal(path.parent)
            failpoint("object.removed")
        except FileNotFoundError:
            if path.parent in self._unsynced:  # this process removed a name there, and could not make that durable
                self._sync_removal(path.parent)
        except OSError as err:
            raise unavailable(name, err) from err

    def _sync_removal(self, folder: Path) -> None:
        """Sync the removals from a folder; remember the folder if that fails.

        Raises StoreUnavailable.
        """
        try:
            sync_folder(folder)
        except OSError as err:
            self._unsynced.add(folder)
            raise unavailable(str(folder.relative_to(self._root)), err) from err
        self._unsynced.discard(folder)

    def sweep_scratch(self) -> None:
        """Remove half-written files of a dead writer.

        Only the holder of the store's lock may call this. Raises LinkRefused.
        """
        check_no_link(self._scratch)
        for left in self._scratch.glob("*.part"):
            try:
                _remove(left)
            except OSError as err:
                _log.warning("%s: a half-written file cannot be removed: %s", left, err.strerror)

    def prepare_group(self, name: str, ready: set[str]) -> tuple[str, tuple[str, ...]]:
        """Make the folder of a new object; return the object's path, and the folders to sync.

        `ready`: folders that this has checked for the same group. Raises StoreUnavailable, OSError.
        """
        folder, _, last = name.rpartition("/")
        made = f"{self._root}/{folder}"
        above = made.rpartition("/")[0]
        if above not in ready:
            self._check_folders(above, ready)
            ready.discard(above)
            self._make_folder(above)
            ready.add(above)
        try:
            os.mkdir(made, FOLDER_MODE)
        except FileExistsError:
            check_linked_folder(made)
        return f"{made}/{last}", (made, above)

    def scratch_paths(self, count: int) -> list[str]:
        """Return new paths for files that `link` gives their names. Raises LinkRefused, OSError."""
        check_no_link(self._scratch)
        _make(self._scratch)
        common = secrets.token_hex(8)
        return [f"{self._scratch}/{common}{number:04x}.part" for number in range(count)]

    def link(self, temporary: str, final: str) -> None:
        """Give a synced file its name. Raises FileExistsError if that is taken, OSError."""
        _link(temporary, final, self._root / "lock.rename")

    def _make_folder(self, folder: str) -> None:
        """Make a folder durable, and all above it up to the root.

        One that is there may be of a writer that died before it synced it: each parent is synced once in a process.
        """
        if len(folder) <= len(str(self._root)):
            return
        above = folder.rpartition("/")[0]
        with self._folders[hash(folder) % FOLDER_LOCKS]:
            if above in self._settled and os.path.isdir(folder):
                return
        self._check_mounted()
        self._make_folder(above)
        with self._folders[hash(folder) % FOLDER_LOCKS]:
            _make(folder)
            failpoint("object.folder-made")
            try:
                sync_folder(above)
            except OSError:
                with suppress(OSError):  # as in `put_new`; a folder that another writer uses stays
                    os.rmdir(folder)
                raise
        self._settled.add(above)

    def _check_folders(self, folder: str, checked: set[str] | None = None) -> None:
        """Raise LinkRefused if a folder of objects or a parent is a link of another user.

        `checked`: those that were checked for the same group; this adds to it. Paths as text: a group of small records
        checks some for each of them.
        """
        root_characters = len(str(self._root))
        folder = folder.rstrip("/")
        while len(folder) > root_characters and (checked is None or folder not in checked):
            check_linked_folder(folder)
            if checked is not None:
                checked.add(folder)
            folder = folder.rpartition("/")[0]


def write_durably(path: Path, parts: Sequence[Payload], *, drop: bool) -> None:
    """Write and sync a new file of mode 0600.

    `drop`: a large file is evicted from the page cache.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        write_all(descriptor, parts)
        failpoint("object.written")
        os.fsync(descriptor)
        if drop and hasattr(os, "posix_fadvise") and os.fstat(descriptor).st_size >= DROPPED_BYTES_MIN:
            with suppress(OSError):  # advice: a file system may have no use for it
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, parts: Sequence[Payload]) -> None:
    """Write the parts without joining them: joining was the most expensive copy of a put."""
    left = deque(memoryview(part).cast("B") for part in parts if len(part))
    while left:
        count = os.writev(descriptor, list(islice(left, PARTS_WRITTEN_MAX)))
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:  # a signal, a full device, or 2 GiB at once
            left[0] = left[0][count:]


def _link(temporary: str | Path, final: str | Path, lock: Path) -> None:
    """Give a file its final name if that is free.

    `lock` is taken on filesystems without an atomic way.
    """
    try:
        os.link(temporary, final)
    except FileExistsError:
        if not is_same_file(Path(temporary), Path(final)):
            raise
    except OSError as err:
        if err.errno not in NO_LINKS:
            raise
        rename_new(Path(temporary), Path(final), lock)
    failpoint("object.linked")


def _file_bytes(entry: os.DirEntry[str]) -> int | None:
    """Return a file's size; None for what is no file, or is not there any more."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _make(folder: str | Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(folder, FOLDER_MODE)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _runs(ranges: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield runs of adjacent ranges, at most TOGETHER_BYTES_MAX long."""
    first = 0
    while first < len(ranges):
        after, end_max = first + 1, ranges[first][0] + TOGETHER_BYTES_MAX
        while after < len(ranges) and ranges[after][0] == ranges[after - 1][1] and ranges[after][1] <= end_max:
            after += 1
        yield ranges[first:after]
        first = after


def _read_bytes(descriptor: int, start: int, end: int) -> bytes:
    data = os.pread(descriptor, end - start, start)
    if len(data) < end - start:  # a signal, or 2 GiB at once: read on; the end of the file stays the end
        parts = [data]
        while parts[-1] and (start := start + len(parts[-1])) < end:
            parts.append(os.pread(descriptor, end - start, start))
        data = b"".join(parts)
    return data


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as err:
        if err.errno not in NO_FOLDER_SYNC:  # then the filesystem has no call for it
            raise
    finally:
        os.close(descriptor)
