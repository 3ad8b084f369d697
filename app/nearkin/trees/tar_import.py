"""Store a tar archive as a tree, in the format of a backup.

    archive -> members, sorted on disk -> entries and contents in the order of the tree -> commit

The archive is read to its end before the put begins: one that is damaged or cut short stores nothing.

Invariant: a member that no tree can hold is left out, reported and counted; everything else is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nearkin.trees.backup_walk import PROBLEMS_MAX, PathProblem
from nearkin.trees.tar_index import TarIndex
from nearkin.trees.tar_members import TarMember, UnusableMember, read_members
from nearkin.trees.tar_spool import open_archive
from nearkin.trees.tree_sinks import StoreSink, TreeSink
from nearkin.trees.tree_writer import OwnerNames, TreeWriter
from nearkin_shared.errors import BadInput, SourceFailed
from nearkin_shared.formats.tree_entry_group import EntryKind
from nearkin_shared.results import PutResult

if TYPE_CHECKING:
    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter

OWNERS_MAX = 65_536
"""Users, and groups, of one archive: the summary of a tree lists them."""
OWNER_NAME_MAX = 255
OWNER_NAMES_BYTES_MAX = 4 << 20
"""Of all names of owners, whose list has at most 16 MiB with their numbers."""


class ImportOptions(NamedTuple):
    """Options of an import."""

    tags: Sequence[str] = ()
    metadata: Mapping[str, str] = {}
    temporary: Path | None = None
    """Folder of the temporary copy of a stream; None: that of TMPDIR."""


@dataclass(slots=True)
class ImportCounts:
    """Progress of an import; another thread may read it."""

    files: int = 0
    folders: int = 0
    others: int = 0
    """Symlinks, hard links, devices and FIFOs."""
    read_bytes: int = 0
    """Content that was stored."""
    total_bytes: int = 0
    """Content of the archive, once all members are known."""
    left_out: int = 0
    """Members that no tree can hold."""
    altered: int = 0
    """Attributes that are stored with another value, or not at all."""
    problems: list[PathProblem] = field(default_factory=list)

    def leave_out(self, path: bytes, reason: str) -> None:
        """Count a member that is left out."""
        self.left_out += 1
        self._keep(path, f"left out: {reason}")

    def alter(self, path: bytes, reason: str) -> None:
        """Count an attribute."""
        self.altered += 1
        self._keep(path, reason)

    def _keep(self, path: bytes, reason: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(PathProblem(path, reason))


class ImportResult(NamedTuple):
    """The result of an import."""

    put: PutResult
    counts: ImportCounts

    @property
    def is_complete(self) -> bool:
        """Whether every member is stored with its attributes."""
        return not self.counts.left_out and not self.counts.altered


class ArchiveFile(NamedTuple):
    """An open archive without compression."""

    file: BinaryIO
    name: str
    state: tuple[int, int, int]
    """Size and times before its members were read."""


@contextmanager
def open_import(source: str | Path | BinaryIO, options: ImportOptions, counts: ImportCounts) -> Iterator[TarImport]:
    """Read the members of an archive; yield the source of a put.

    Raises BadInput (no archive, damaged, cut short, no members), NoRoom, SourceFailed.
    """
    with open_archive(source, options.temporary) as (file, name), TarIndex(options.temporary) as index:
        before, names = _state(file), _Names()
        for member in read_members(file, name, counts.leave_out, counts.alter):
            try:
                index.add(member)
            except UnusableMember as err:
                counts.leave_out(member.path, str(err))
                continue
            names.add(member)
            counts.total_bytes += member.content_bytes
        index.finish()
        if not index.entries:
            raise BadInput(f"{name}: has no member to store; an empty version would hide a failed command")
        yield TarImport(ArchiveFile(file, name, before), index, names.as_owner_names(), counts)


class TarImport:
    """An archive whose members are known: the source of a put."""

    def __init__(self, archive: ArchiveFile, index: TarIndex, names: OwnerNames, counts: ImportCounts) -> None:
        self._archive = archive
        self._index = index
        self._names = names
        self._counts = counts

    def feed(self, writer: EmbeddedWriter, blob: BlobTransfer) -> bytes:
        """Write the tree; return its digest. Raises SourceFailed, and errors of the store."""
        return self.write(StoreSink(writer, blob))

    def write(self, sink: TreeSink) -> bytes:
        """Write the tree to a sink; return its digest. Raises as `feed` does."""
        tree = TreeWriter(sink, b"", "", self._names)
        descriptor, counts = self._archive.file.fileno(), self._counts
        for found in self._index.entries_in_order():
            entry = found.entry
            if found.content_bytes:
                written, digest, failure = tree.read_content(descriptor, ((found.start, found.content_bytes),))
                if failure is not None or written != found.content_bytes:
                    reason = "is cut short" if failure is None else failure.strerror
                    raise SourceFailed(
                        f"{self._archive.name}: reading {entry.path!r:.200} failed: {reason}; nothing was stored"
                    )
                entry = entry._replace(digest=digest)
                counts.read_bytes += written
            tree.add(entry)
            if entry.kind == EntryKind.FILE:
                counts.files += 1
            elif entry.kind == EntryKind.FOLDER:
                counts.folders += bool(entry.name)
            else:
                counts.others += 1
        if _state(self._archive.file) != self._archive.state:
            raise SourceFailed(f"{self._archive.name}: changed while it was read; nothing was stored: import it again")
        if not counts.left_out:
            tree.partial = ()
        return tree.finish(counts.left_out + counts.altered)


class _Names:
    """The names of owners in an archive; the first of a number counts."""

    def __init__(self) -> None:
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        self._names_bytes = 0

    def add(self, member: TarMember) -> None:
        """Add the owner of a member. Raises BadInput."""
        for names, number, name in ((self._users, member.uid, member.user), (self._groups, member.gid, member.group)):
            if number in names:
                continue
            if len(names) >= OWNERS_MAX:
                raise BadInput(f"archive: more than {OWNERS_MAX:,} owners; nothing was stored")
            is_plain = name.isprintable() and len(name) <= OWNER_NAME_MAX
            names[number] = name if is_plain else ""
            self._names_bytes += len(names[number].encode())
            if self._names_bytes > OWNER_NAMES_BYTES_MAX:
                raise BadInput(
                    f"archive: names of owners of more than {OWNER_NAMES_BYTES_MAX:,} bytes; nothing was stored: "
                    "write it with tar --numeric-owner"
                )

    def as_owner_names(self) -> OwnerNames:
        """Return the lookups for a tree."""
        return OwnerNames(lambda number: self._users.get(number, ""), lambda number: self._groups.get(number, ""))


def _state(file: BinaryIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
