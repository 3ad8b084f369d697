"""Present a store as folders and files, without FUSE.

    /KEY.../7/etc/fstab            an entry of a tree       /KEY.../7    a version of `put`: a file
    /KEY.../latest -> 7            the newest version       /KEY.../2026-11-28T10:15:00Z -> 7

A key's / separate folders. A part of a key that a folder cannot have, or that could be the name of a version, is
escaped with %.

Invariant: memory is bounded by the constants below and the number of versions; no content is returned unverified (I8).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blake3 import blake3

from nearkin.trees.attributes import KINDS
from nearkin_shared.errors import NotFound
from nearkin_shared.formats.tree_entry_group import NAME_BYTES_MAX, EntryKind
from nearkin_shared.reading.tree_reader import PlacedEntry, TreeReader
from nearkin_shared.results import Damage, VersionInfo

if TYPE_CHECKING:
    from nearkin.blob import VersionFile

REFRESH_SECONDS = 10.0
"""Age at which the list of versions is read again; it is older if reading it takes more than a twentieth of that."""
REFRESH_SHARE = 20
TREES_MAX = 16
"""Open trees; each holds the index of its groups, 0.3 MB for 250,000 entries, and the paths of its linked files."""
LINKED_FILES_MAX = 200_000
"""Hard-linked files of a tree whose names are counted, 200 bytes each; others have a link count of 2."""
CACHED_ENTRIES_MAX = 100_000
"""Entries of all cached folders, 500 bytes each."""
FOLDER_ENTRIES_MAX = 20_000
"""A folder with more entries is not cached: each lookup decodes the group of the entry."""
OPEN_FILES_MAX = 16
"""Files that hold a piece and read the next one ahead, 8 MiB each; others open their range again at the next read."""
LATEST = b"latest"
_VERSION_NAME = re.compile(rb"latest|[0-9]+|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z")
_TYPES: dict[int, int] = {kind: type_bits for type_bits, kind in KINDS.items()}
_DEVICES = (EntryKind.CHARACTER_DEVICE, EntryKind.BLOCK_DEVICE)
_FOLDER_MODE, _FILE_MODE, _LINK_MODE = stat.S_IFDIR | 0o555, stat.S_IFREG | 0o444, stat.S_IFLNK | 0o777
_INODE_MASK = (1 << 63) - 1
_log = logging.getLogger("nearkin")


class MountableStore(Protocol):
    """A store whose versions can be read: `Store` or `RemoteStore`."""

    def versions(
        self, prefix: str = "", *, all_versions: bool = False, broken: Callable[[Damage], None] | None = None
    ) -> list[VersionInfo]:
        """Return the versions of keys that start with `prefix`, by key."""

    def tree(self, key: str, version: int | None = None) -> TreeReader:
        """Return a reader of a tree's entries."""

    def get(self, key: str, version: int | None = None, *, start: int = 0, stop: int | None = None) -> VersionFile:
        """Return a version, or a range of its bytes."""


class Status(NamedTuple):
    """The attributes of a path, named as in `os.stat_result`."""

    st_mode: int
    st_ino: int
    st_size: int = 0
    st_mtime: int = 0
    """Nanoseconds since 1970."""
    st_uid: int = 0
    st_gid: int = 0
    st_rdev: int = 0
    st_nlink: int = 1
    st_blocks: int = 0


class Child(NamedTuple):
    """An entry of a folder."""

    name: bytes
    status: Status
    is_complete: bool = True
    """False: the status has type and inode alone, because the others would open a tree."""


@dataclass
class _KeyFolder:
    """A folder of the key namespace: parts of longer keys, and the versions of a key."""

    folders: dict[bytes, _KeyFolder] = field(default_factory=dict)
    versions: dict[bytes, VersionInfo] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)


class _EntryPath(NamedTuple):
    """A version and a path in its tree.

    The path is empty for the root, and for a version of `put`.
    """

    info: VersionInfo
    path: bytes


def escape_key(key: str) -> list[bytes]:
    """Return the names of the folders of a key."""
    return [_escape_part(part, number) for number, part in enumerate(os.fsencode(key).split(b"/"))]


def _escape_part(part: bytes, number: int) -> bytes:
    if not part:
        return b"%2F"
    escaped = part.replace(b"%", b"%25").replace(b"\0", b"%00")
    if part in (b".", b".."):
        return b"%2E" * len(part)
    if number and _VERSION_NAME.fullmatch(part):
        return b"%%%02X" % part[0] + part[1:]
    return escaped


class MountedStore:
    """The paths of a store. Not to be shared between threads."""

    def __init__(self, store: MountableStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._root = _KeyFolder()
        self._valid_until = -1.0
        self._trees: OrderedDict[tuple[str, int], _OpenTree] = OrderedDict()
        self._listed: tuple[bytes, dict[bytes, PlacedEntry]] = (b"", {})
        """The folder of a tree that was listed last; a version's content never changes."""
        self._folders: OrderedDict[tuple[str, int, bytes], dict[bytes, PlacedEntry] | None] = OrderedDict()
        self._cached_entries = 0
        self._open_files: OrderedDict[int, VersionFile] = OrderedDict()
        self._handles: dict[int, MountedFile] = {}
        self._next_handle = 1

    def status(self, path: bytes) -> Status:
        """Return the attributes of a path.

        Raises NotFound, and what reading a tree raises.
        """
        found = self._resolve(path)
        if isinstance(found, _KeyFolder):
            return Status(_FOLDER_MODE, _inode(path))
        if isinstance(found, bytes):
            return Status(_LINK_MODE, _inode(path), len(found))
        if not found.path:
            return self._version_status(found.info)
        return self._tree(found.info).status(self._find(found))

    def children(self, path: bytes) -> Iterator[Child]:
        """Yield the content of a folder.

        Raises NotFound, NotADirectoryError, and what reading a tree raises.
        """
        found = self._resolve(path)
        if isinstance(found, _KeyFolder):
            for name in found.folders:
                yield Child(name, Status(_FOLDER_MODE, _inode(path.rstrip(b"/") + b"/" + name)))
            for name, info in found.versions.items():
                mode = _FOLDER_MODE if info.is_tree else _FILE_MODE
                yield Child(name, Status(mode, _entry_inode(info, b"")), is_complete=False)
            for name, target in found.links.items():
                yield Child(name, Status(_LINK_MODE, _inode(path + b"/" + name), len(target)))
            return
        if isinstance(found, bytes) or not found.info.is_tree:
            raise NotADirectoryError(path)
        entries, tree = self._folder(found.info, found.path), self._tree(found.info)
        if entries is not None:
            self._listed = (path, entries)
        for placed in tree.reader.children(found.path) if entries is None else entries.values():
            yield Child(placed.entry.name, tree.status(placed))

    def link_target(self, path: bytes) -> bytes:
        """Return the target of a symlink.

        Raises NotFound, and what reading a tree raises.
        """
        found = self._resolve(path)
        if isinstance(found, bytes):
            return found
        if isinstance(found, _EntryPath) and found.path:
            return self._tree(found.info).reader.content_of(self._find(found)).entry.target
        raise NotFound(f"{path!r}: is not a symlink")

    def xattr(self, path: bytes, name: bytes) -> bytes | None:
        """Return an extended attribute of a path, or None.

        `ls -l` asks for two of each entry that it lists. Raises NotFound, and what reading a tree raises.
        """
        folder, _, entry_name = path.rpartition(b"/")
        if folder == self._listed[0]:
            placed = self._listed[1].get(entry_name)
            if placed is not None and placed.entry.kind != EntryKind.HARD_LINK and not placed.entry.xattrs:
                return None
        return self.xattrs(path).get(name)

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        """Return the extended attributes of a path.

        Raises NotFound, and what reading a tree raises.
        """
        found = self._resolve(path)
        if not isinstance(found, _EntryPath) or not found.info.is_tree:
            return {}
        try:
            placed = self._find(found) if found.path else self._tree(found.info).reader.find(b"")
        except NotFound:
            if found.path:
                raise
            return {}
        return dict(self._tree(found.info).reader.content_of(placed).entry.xattrs)

    def open(self, path: bytes) -> int:
        """Open a file and return its handle.

        Raises NotFound, IsADirectoryError, and what reading a tree raises.
        """
        found = self._resolve(path)
        if not isinstance(found, _EntryPath):
            raise IsADirectoryError(path)
        info = found.info
        if not info.is_tree:
            file = MountedFile(info, 0, info.size_bytes, None)
        elif not found.path:
            raise IsADirectoryError(path)
        else:
            placed = self._tree(info).reader.content_of(self._find(found))
            file = MountedFile(info, placed.start, placed.entry.size, placed.entry.extents)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = file
        return handle

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Return the bytes of an open file, fewer only at its end.

        Raises as `Store.get` and its reads do.
        """
        file = self._handles[handle]
        return file.read(lambda: self._content(handle, file), offset, size)

    def seek(self, handle: int, offset: int, whence: int) -> int:
        """Return the offset of the next data or hole of an open file, as lseek(2) does.

        Raises OSError (ENXIO: there is none).
        """
        return self._handles[handle].seek(offset, whence)

    def close(self, handle: int) -> None:
        """Close a handle."""
        self._handles.pop(handle, None)
        content = self._open_files.pop(handle, None)
        if content is not None:
            content.close()

    def close_all(self) -> None:
        """Close all handles."""
        for handle in list(self._handles):
            self.close(handle)

    def without_link(self, path: bytes) -> bytes:
        """Return a path with the number of a version in place of `latest` or a time."""
        self._refresh()
        parts = [part for part in path.split(b"/") if part]
        folder = self._root
        for number, part in enumerate(parts):
            below = folder.folders.get(part)
            if below is None:
                parts[number] = folder.links.get(part, part)
                break
            folder = below
        return b"/" + b"/".join(parts)

    def entry_of(self, path: bytes) -> tuple[VersionInfo, bytes] | None:
        """Return the version that has a path, and the path in its tree.

        None for a folder of keys, or a link.

        Raises NotFound.
        """
        found = self._resolve(path)
        return (found.info, found.path) if isinstance(found, _EntryPath) else None

    # --- paths -------------------------------------------------------------------------------------------------------

    def _resolve(self, path: bytes) -> _KeyFolder | bytes | _EntryPath:
        """Return a folder of keys, the target of a link, or a version with a path in it.

        Raises NotFound.
        """
        self._refresh()
        parts = [part for part in path.split(b"/") if part]
        folder = self._root
        for number, part in enumerate(parts):
            below = folder.folders.get(part)
            if below is not None:
                folder = below
                continue
            is_last = number == len(parts) - 1
            info = folder.versions.get(part)
            if info is not None and (is_last or info.is_tree):
                return _EntryPath(info, b"/".join(parts[number + 1 :]))
            if is_last and part in folder.links:
                return folder.links[part]
            raise NotFound(f"{path!r}: not in the store")
        return folder

    def _refresh(self) -> None:
        """Read the list of versions again if it is too old."""
        started = self._clock()
        if started < self._valid_until:
            return
        root = _KeyFolder()
        newest: dict[str, _KeyFolder] = {}
        for info in sorted(self._store.versions(all_versions=True), key=lambda info: (info.key, info.version)):
            folder = newest.get(info.key)
            if folder is None:
                names = escape_key(info.key)
                if any(len(name) > NAME_BYTES_MAX for name in names):
                    _log.warning("mount: key %r is not shown: a part of it has more than 255 bytes", info.key)
                    continue
                folder = root
                for name in names:
                    folder = folder.folders.setdefault(name, _KeyFolder())
                newest[info.key] = folder
            name = b"%d" % info.version
            moment = info.created.astimezone(UTC)
            folder.versions[name] = info
            folder.links[LATEST] = name
            folder.links[f"{moment:%Y-%m-%dT%H:%M:%SZ}".encode()] = name  # the last of a second
        self._root = root
        seconds = self._clock() - started
        self._valid_until = self._clock() + max(REFRESH_SECONDS, seconds * REFRESH_SHARE)

    # --- trees -------------------------------------------------------------------------------------------------------

    def _tree(self, info: VersionInfo) -> _OpenTree:
        key = (info.key, info.version)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = _OpenTree(info, self._store.tree(*key))
            if len(self._trees) > TREES_MAX:
                self._trees.popitem(last=False)
        self._trees.move_to_end(key)
        return tree

    def _find(self, found: _EntryPath) -> PlacedEntry:
        """Return the entry with a path.

        Raises NotFound, and what reading a tree raises.
        """
        folder, _, name = found.path.rpartition(b"/")
        entries = self._folder(found.info, folder)
        if entries is None:
            return self._tree(found.info).reader.find(found.path)
        if name not in entries:
            raise NotFound(f"{found.info.key!r} version {found.info.version}: has no entry {found.path!r}")
        return entries[name]

    def _folder(self, info: VersionInfo, folder: bytes) -> dict[bytes, PlacedEntry] | None:
        """Return the entries of a folder by name; None if it has more than FOLDER_ENTRIES_MAX."""
        key = (info.key, info.version, folder)
        if key in self._folders:
            self._folders.move_to_end(key)
            return self._folders[key]
        entries = self._read_folder(info, folder)
        self._folders[key] = entries
        self._cached_entries += _weight(entries)
        while self._cached_entries > CACHED_ENTRIES_MAX and len(self._folders) > 1:
            self._cached_entries -= _weight(self._folders.popitem(last=False)[1])
        return entries

    def _read_folder(self, info: VersionInfo, folder: bytes) -> dict[bytes, PlacedEntry] | None:
        entries: dict[bytes, PlacedEntry] = {}
        for placed in self._tree(info).reader.children(folder):
            entries[placed.entry.name] = placed
            if len(entries) > FOLDER_ENTRIES_MAX:
                return None
        return entries

    def _version_status(self, info: VersionInfo) -> Status:
        if not info.is_tree:
            return _blob_status(info)
        tree = self._tree(info)
        try:
            return tree.status(tree.reader.find(b""))
        except NotFound:  # a tree of several folders has no root of its own
            return Status(_FOLDER_MODE, _entry_inode(info, b""), 0, _created_ns(info))

    # --- content -----------------------------------------------------------------------------------------------------

    def _content(self, handle: int, file: MountedFile) -> VersionFile:
        """Return the open range of a file; the one that was read least recently is closed."""
        content = self._open_files.get(handle)
        if content is None:
            info = file.info
            content = self._store.get(info.key, info.version, start=file.start, stop=file.start + file.content_bytes)
            self._open_files[handle] = content
            if len(self._open_files) > OPEN_FILES_MAX:
                self._open_files.popitem(last=False)[1].close()
        self._open_files.move_to_end(handle)
        return content


class _OpenTree:
    """A tree, with the inode numbers and link counts of its entries, which are not stored."""

    def __init__(self, info: VersionInfo, reader: TreeReader) -> None:
        self.reader = reader
        self._inode_prefix = _inode_prefix(info)
        self._further_names: dict[bytes, int] | None = None

    def status(self, placed: PlacedEntry) -> Status:
        """Return the attributes of an entry; those of a hard link are those of its content.

        Raises Corrupt, and what reading a tree raises.
        """
        further = self._further_names if self._further_names is not None else self._count_names()
        entry = placed.entry
        kind = entry.kind
        if kind == EntryKind.HARD_LINK:
            entry = self.reader.content_of(placed).entry
            kind = entry.kind
        path = entry.path
        links = 1 + (further.get(path, 0) if further else 0)
        size = entry.size if kind != EntryKind.SYMLINK else len(entry.target)
        is_device = kind in _DEVICES
        return Status(
            _TYPES[kind] | entry.mode,
            _inode(self._inode_prefix + path),
            0 if is_device else size,
            entry.mtime_ns,
            entry.uid,
            entry.gid,
            size if is_device else 0,
            links if entry is placed.entry else max(2, links),
            -(-entry.content_bytes // 512),
        )

    def _count_names(self) -> dict[bytes, int]:
        """Return how many names each hard-linked file has besides its first.

        The kinds of all entries are read once: the entry of the first name does not have the number.
        """
        found: dict[bytes, int] = {}
        for target in self.reader.hard_link_targets():
            if target in found or len(found) < LINKED_FILES_MAX:
                found[target] = found.get(target, 0) + 1
        self._further_names = found
        return found


class MountedFile:
    """An open file: a range of a version, and the holes between its data."""

    def __init__(self, info: VersionInfo, start: int, size: int, extents: tuple[tuple[int, int], ...] | None) -> None:
        self.info = info
        self.start = start
        self._size = size
        self._extents = ((0, size),) if extents is None else extents
        lengths = [length for _, length in self._extents]
        self._content_starts = list(accumulate(lengths, initial=0))
        self.content_bytes: int = self._content_starts[-1]

    def read(self, content: Callable[[], VersionFile], offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer only at the end; holes are zeros."""
        stop = min(offset + size, self._size)
        pieces, position = list[bytes](), offset
        number = max(0, bisect_right(self._extents, offset, key=lambda extent: extent[0]) - 1)
        for at in range(number, len(self._extents)):
            start, length = self._extents[at]
            if start >= stop:
                break
            first, last = max(start, position), min(start + length, stop)
            if first < last:
                file = content()
                file.seek(self._content_starts[at] + first - start)
                pieces += (bytes(first - position), file.read(last - first))
                position = last
        pieces.append(bytes(max(0, stop - position)))
        return b"".join(pieces)

    def seek(self, offset: int, whence: int) -> int:
        """Return the next offset with data (SEEK_DATA) or without (SEEK_HOLE), `offset` included.

        The end of the file is a hole. Raises OSError: ENXIO behind the last one, EINVAL for another `whence`.
        """
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not 0 <= offset < self._size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        number = max(0, bisect_right(self._extents, offset, key=lambda extent: extent[0]) - 1)
        for at in range(number, len(self._extents)):
            start, length = self._extents[at]
            if whence == os.SEEK_DATA and offset < start + length:
                return max(start, offset)
            if whence == os.SEEK_HOLE and start > offset:
                break
            if whence == os.SEEK_HOLE and offset < start + length:
                offset = start + length
        if whence == os.SEEK_DATA:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return offset


def _weight(entries: dict[bytes, PlacedEntry] | None) -> int:
    return 1 + len(entries or ())


def _created_ns(info: VersionInfo) -> int:
    return int(info.created.timestamp() * 1_000_000) * 1000


def _blob_status(info: VersionInfo) -> Status:
    blocks = -(-info.size_bytes // 512)
    return Status(_FILE_MODE, _entry_inode(info, b""), info.size_bytes, _created_ns(info), st_blocks=blocks)


def _entry_inode(info: VersionInfo, path: bytes) -> int:
    return _inode(_inode_prefix(info) + path)


def _inode_prefix(info: VersionInfo) -> bytes:
    """Return what precedes the path in the name whose hash is an inode number."""
    return b"%s\0%d\0" % (os.fsencode(info.key), info.version)


def _inode(name: bytes) -> int:
    """Return an inode number that is the same at every call."""
    return int.from_bytes(blake3(name).digest(length=8), "little") & _INODE_MASK or 1
