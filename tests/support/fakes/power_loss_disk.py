"""Simulate a disk that loses power.

Invariant: synced data stay; of all other data any part may stay, in any order.

    recording(root)   every create, write, fsync, link, unlink, mkdir and folder sync below `root`; or the n-th fails
    Disk(tree)        receives a prefix of these, and yields each tree that a power cut may leave

A file's bytes are durable once the file is synced: before that there are none, a part cut at 512 or 4096 bytes, or
zeros of the full length. A name is created, or deleted, once its folder is synced: before that each change may be
lost, independently of the others.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

from nearkin_shared.objectstore import group_put
from nearkin_shared.objectstore import local as product_module
from nearkin_shared.utils import durable_files
from nearkin_shared.utils.frozen import frozen

SECTOR_BYTES, PAGE_BYTES = 512, 4096
PENDING_NAMES_MAX = 6
"""Bound of exhaustive search over names that are not durable: 64 subsets at 6. Of more: none, all, each alone, all but
each.
"""
SCRATCH = "tmp"


@frozen
class Step:
    """One call.

    `what`: create, write, sync, link, unlink, mkdir, sync-folder, or note (an event of the driver).

    `failed`: a failed sync, after which the kernel considers the lost data written.
    """

    what: str
    path: str = ""
    file: int = 0
    data: bytes = b""
    other: str = ""
    event: Any = None
    failed: bool = False


class RecordingOs:
    """Replacement of `os` in the modules that write objects: does and records each call, or fails the n-th."""

    def __init__(self, root: Path, fail_at: int = 0, error: int = errno.ENOSPC) -> None:
        self._root = root
        self._fail_at, self._error = fail_at, error
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._paths: dict[str, int] = {}
        self._files = 0
        self.calls = 0
        """Mutating calls so far."""
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def has_failed(self) -> bool:
        """Return whether the call that must fail was reached."""
        return 0 < self._fail_at <= self.calls

    def note(self, event: Any) -> None:
        """Add an event of the driver to the list."""
        with self._lock:
            self.steps.append(Step("note", event=event))

    def _relative(self, path: str | Path) -> str:
        return str(Path(path).relative_to(self._root))

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self._fail_at:
            raise OSError(self._error, os.strerror(self._error))

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        """Open; record a new file. A file that is opened again to be synced is the same file."""
        if not flags & os.O_CREAT:
            with self._lock:
                descriptor = os.open(path, flags, mode)
                within = Path(path).is_relative_to(self._root)
                file = self._paths.get(self._relative(path)) if within else None
                if file is not None:
                    self._descriptors[descriptor] = file
                return descriptor
        with self._lock:
            self._count()
            descriptor = os.open(path, flags, mode)
            self._files += 1
            self._descriptors[descriptor] = self._paths[self._relative(path)] = self._files
            self.steps.append(Step("create", self._relative(path), self._files))
            return descriptor

    def close(self, descriptor: int) -> None:
        """Close."""
        with self._lock:
            self._descriptors.pop(descriptor, None)
            os.close(descriptor)

    def writev(self, descriptor: int, buffers: Sequence[Any]) -> int:
        """Write; only half if the disk is to be full, as a full disk accepts a part before it refuses."""
        with self._lock:
            self._count()
            view = memoryview(b"".join(buffers))
            if self.calls + 1 == self._fail_at and len(view) > 1:
                view = view[: len(view) // 2]
            count = os.write(descriptor, view)
            self.steps.append(Step("write", file=self._descriptors[descriptor], data=bytes(view[:count])))
            return count

    def fsync(self, descriptor: int) -> None:
        """Record which file or folder is durable; the sync itself is omitted, as the simulated disk is a list."""
        with self._lock:
            failed = self.calls + 1 == self._fail_at
            file = self._descriptors.get(descriptor)
            if file is not None:
                self.steps.append(Step("sync", file=file, failed=failed))
            else:
                folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                if folder.is_relative_to(self._root):  # not the parent, in which the store itself is created
                    self.steps.append(Step("sync-folder", self._relative(folder), failed=failed))
            self._count()

    def link(self, source: str | Path, target: str | Path) -> None:
        """Link."""
        with self._lock:
            self._count()
            os.link(source, target)
            file = self._paths[self._relative(source)]
            self._paths[self._relative(target)] = file
            self.steps.append(Step("link", self._relative(target), file))

    def replace(self, source: str | Path, target: str | Path) -> None:
        """Rename: the product never renames below `objects`; planted mistakes do."""
        with self._lock:
            self._count()
            os.replace(source, target)
            file = self._paths[self._relative(source)]
            self._paths[self._relative(target)] = file
            self.steps.append(Step("link", self._relative(target), file))
            self.steps.append(Step("unlink", self._relative(source)))

    def unlink(self, path: str | Path) -> None:
        """Remove a name."""
        with self._lock:
            if os.path.lexists(path):
                self._count()
            os.unlink(path)
            self.steps.append(Step("unlink", self._relative(path)))

    def rmdir(self, path: str | Path) -> None:
        """Remove an empty folder."""
        with self._lock:
            os.rmdir(path)
            self.steps.append(Step("unlink", self._relative(path)))

    def mkdir(self, path: str | Path, mode: int = 0o777) -> None:
        """Make a folder."""
        with self._lock:
            if not os.path.lexists(path):
                self._count()
            os.mkdir(path, mode)
            self.steps.append(Step("mkdir", self._relative(path)))


@contextmanager
def recording(root: Path, fail_at: int = 0, error: int = errno.ENOSPC) -> Iterator[RecordingOs]:
    """Put a RecordingOs under every LocalObjectStore, and under key and token files, within the block."""
    layer = RecordingOs(root, fail_at, error)
    before = [(vars(module), vars(module)["os"]) for module in (product_module, group_put, durable_files)]
    for names, _ in before:
        names["os"] = layer
    try:
        yield layer
    finally:
        for names, module in before:
            names["os"] = module


# --- the disk --------------------------------------------------------------------------------------------------------

Tree = Mapping[str, bytes | None]
"""Contents by path; None stands for a folder."""


@dataclass(slots=True)
class Disk:
    """Written data and the durable part of them. Begins with a durable tree."""

    tree: dict[str, bytes | None]
    contents: dict[int, bytearray] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    """Contents at the last sync."""
    pending: list[tuple[str, int | None, bool]] = field(default_factory=list)
    """(path, file, exists): names created or deleted since their folder was synced; file None stands for a folder."""
    unwritable: set[int] = field(default_factory=set)
    """Files whose sync failed: a later sync succeeds and writes nothing."""
    doubtful: list[tuple[str, int | None, bool]] = field(default_factory=list)
    """Names whose folder's sync failed: a later sync does not make them durable, unless they were changed since."""
    durable: dict[str, int] = field(default_factory=dict)
    """Durable names of files created since the beginning."""

    def apply(self, step: Step) -> None:
        """Apply a step."""
        match step.what:
            case "create":
                self.contents[step.file] = bytearray()
                self.pending.append((step.path, step.file, True))
            case "write":
                self.contents[step.file] += step.data
            case "sync" if step.failed:
                self.unwritable.add(step.file)
            case "sync" if step.file in self.unwritable:
                pass  # the kernel has nothing left to write: the call succeeds without effect
            case "sync":
                self.synced[step.file] = bytes(self.contents[step.file])
            case "link":
                self.pending.append((step.path, step.file, True))
            case "unlink":
                self.pending.append((step.path, None, False))
            case "mkdir":
                self.pending.append((step.path, None, True))
            case "sync-folder" if step.failed:
                self.doubtful += [entry for entry in self.pending if _folder(entry[0]) == step.path]
            case "sync-folder":
                in_doubt = {id(entry) for entry in self.doubtful}
                of_folder = [entry for entry in self.pending if _folder(entry[0]) == step.path]
                later = {entry[0] for entry in of_folder if id(entry) not in in_doubt}
                of_folder = [entry for entry in of_folder if id(entry) not in in_doubt or entry[0] in later]
                synced = {id(entry) for entry in of_folder}
                self.pending = [entry for entry in self.pending if id(entry) not in synced]
                for entry in of_folder:
                    _change(self.tree, self.durable, entry)
            case _:
                pass

    def worlds(self) -> Iterator[dict[str, bytes | None]]:
        """Yield every tree that a power cut now may leave, without scratch files."""
        pending = [entry for entry in self.pending if _folder(entry[0]) != SCRATCH]
        for chosen in _subsets(pending):
            tree, names = dict(self.tree), dict(self.durable)
            for entry in chosen:
                _change(tree, names, entry)
            tree = {path: data for path, data in tree.items() if not path.startswith(f"{SCRATCH}/")}
            names = {path: file for path, file in names.items() if path in tree}
            tree = {path: data for path, data in tree.items() if all(f in tree for f in _folders(path))}
            unsynced = sorted({names[path] for path in tree if path in names})
            variants = [self._variants(file) for file in unsynced]
            for contents in product(*variants):
                by_file = dict(zip(unsynced, contents, strict=True))
                yield {path: by_file[names[path]] if path in names else data for path, data in tree.items()}

    def _variants(self, file: int) -> list[bytes]:
        """Return the possible contents of a file: the synced one, or any torn write after it."""
        whole, synced = bytes(self.contents[file]), self.synced.get(file)
        if synced == whole:
            return [whole]
        held = synced or b""
        tears = {len(held), SECTOR_BYTES, PAGE_BYTES, len(whole) // 2 // SECTOR_BYTES * SECTOR_BYTES, len(whole)}
        found = {whole[: max(len(held), cut)] for cut in tears}
        found.add(held + bytes(len(whole) - len(held)))
        return sorted(found, key=lambda data: (len(data), data))


def _folder(path: str) -> str:
    folder = path.rpartition("/")[0]
    return folder or "."


def _folders(path: str) -> Iterable[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def _change(tree: dict[str, bytes | None], names: dict[str, int], entry: tuple[str, int | None, bool]) -> None:
    path, file, there = entry
    if not there:
        tree.pop(path, None)
        names.pop(path, None)
    elif file is None:
        tree[path] = None
    else:
        tree[path], names[path] = b"", file


def _subsets(entries: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    count = len(entries)
    if count <= PENDING_NAMES_MAX:
        yield from chain.from_iterable(combinations(entries, number) for number in range(count + 1))
        return
    yield ()
    yield tuple(entries)
    for at in range(count):
        yield (entries[at],)
        yield (*entries[:at], *entries[at + 1 :])
