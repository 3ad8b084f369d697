"""Write a tree into a put: contents first, then entry groups, index and footer.

Chunks end at the borders of files, so that equal files have equal chunks wherever they are; runs of files below
CHUNK_BYTES_MIN share chunks. Files above SEGMENT_FILE_BYTES_MIN begin and end segments as well. Groups wait compressed
in memory until the contents are written: about 20 bytes an entry.

Invariant: entries are added in the order of their contents.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from backports.zstd import compress, decompress

from nearkin.trees.file_content import FileProgress, PartialFile, new_progress, remaining
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES, EntryKind, TreeEntry, encode_group
from nearkin_shared.formats.tree_layout import GroupInfo, TreeSummary, encode_end, group_digest, tree_digest

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nearkin.trees.tree_sinks import SupportsBorders, TreeSink
    from nearkin_shared.reading.tree_reader import EntryGroup
    from nearkin_shared.results import PutResult
    from nearkin_shared.types import U32, Locations, StoredChunks

CHUNK_BYTES_MIN = 2048
"""Smaller files share a chunk with their neighbours: an entry of the index for each would cost more than it saves."""
SEGMENT_FILE_BYTES_MIN = 256 * 1024
"""Larger files have segments of their own, which later versions take over even if other files change."""
PIECE_BYTES_MAX = 1 << 20
"""Read at once: a quarter of the shortest distance between checkpoints, and little enough to be hashed in the cache."""
GROUP_ROWS_MIN, GROUP_ROWS_MAX = 64, 2048
GROUP_EXTRAS_BYTES_MAX = 8 << 20
"""A group ends after so many bytes of attributes and extents, which an imported archive may have for each entry."""
EXTENT_BYTES = 18
"""Of an encoded extent, at most."""
SIZE_BYTES_MAX = (1 << 64) - 1
"""Of the summary; files with holes may have more together."""
GROUP_ROWS_MASK = 255
"""A group ends after an entry with these bits of its name's CRC-32 zero: an added file moves no later border."""


class OwnerNames(NamedTuple):
    """Where the names of owners come from."""

    user: Callable[[int], str]
    group: Callable[[int], str]


class _RowCounts(NamedTuple):
    """Counts of the summary of a tree."""

    entries: int = 0
    files: int = 0
    folders: int = 0
    size_bytes: int = 0

    def with_rows(self, rows: Sequence[TreeEntry]) -> _RowCounts:
        """Return the counts with those of further entries."""
        kinds = [row.kind for row in rows]
        return _RowCounts(
            self.entries + len(rows),
            self.files + kinds.count(EntryKind.FILE),
            self.folders + kinds.count(EntryKind.FOLDER),
            self.size_bytes + sum([row.size for row in rows if row.kind == EntryKind.FILE]),
        )


class FileBorders:
    """Ends chunks and segments at the borders of files."""

    def __init__(self, sink: SupportsBorders) -> None:
        """Begin at the start of a chunk."""
        self._sink = sink
        self._since_border = 0

    def begin(self, size: int) -> None:
        """End a chunk before a file of `size` bytes, unless it and the files before it are tiny."""
        if size >= SEGMENT_FILE_BYTES_MIN:
            self._sink.end_chunk(ends_segment=True)
            self._since_border = 0
        elif self._since_border and size >= CHUNK_BYTES_MIN:
            self._sink.end_chunk()
            self._since_border = 0

    def end(self, size: int) -> None:
        """End a chunk after a file of which `size` bytes were written, unless it is tiny."""
        self._since_border += size
        if size >= SEGMENT_FILE_BYTES_MIN:
            self._sink.end_chunk(ends_segment=True)
            self._since_border = 0
        elif self._since_border >= CHUNK_BYTES_MIN:
            self._sink.end_chunk()
            self._since_border = 0


class TreeWriter:
    """Writes one tree."""

    def __init__(self, sink: TreeSink, root: bytes, host: str, names: OwnerNames | None = None) -> None:
        """`names`: of owners, by default those of this machine."""
        self._sink = sink
        self._names = names or OwnerNames(_user_name, _group_name)
        self._extras_bytes = 0
        self._rows: list[TreeEntry] = []
        self._stored: tuple[EntryGroup, int] | None = None
        """A group of an earlier version, and how many of its rows begin the group in progress."""
        self._groups: list[GroupInfo] = []
        self._blocks: list[bytes] = []
        self._group_bytes = 0
        self._borders = FileBorders(sink)
        self._summary = TreeSummary(root=root, host=host)
        self.partial: tuple[bytes, ...] | msgspec.UnsetType = msgspec.UNSET
        """Folders of which something is left out, for the summary; known at the end."""
        self.hash_state: bytes | msgspec.UnsetType = msgspec.UNSET
        """Of a checkpoint that ends inside a file, for the summary."""
        self._counts = _RowCounts()
        """Of the groups that ended."""
        self._users: dict[int, str] = {}
        self._owner_groups: dict[int, str] = {}

    @property
    def content_bytes(self) -> int:
        """Bytes of contents so far."""
        return self._sink.size_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of the entry groups so far, which a checkpoint writes."""
        return self._group_bytes

    @property
    def entries(self) -> int:
        """Entries so far."""
        return self._counts.entries + len(self._rows)

    def add(self, entry: TreeEntry) -> None:
        """Add an entry whose content, if any, has been written."""
        rows = self._rows
        rows.append(entry)
        if entry.uid not in self._users or entry.gid not in self._owner_groups:
            self._add_owner(entry.uid, entry.gid)
        if entry.xattrs or entry.extents:
            self._extras_bytes += _extras_bytes(entry)
            if self._extras_bytes >= GROUP_EXTRAS_BYTES_MAX:
                self._end_group()
                return
        count = len(rows)
        if count >= GROUP_ROWS_MIN and (not zlib.crc32(entry.name) & GROUP_ROWS_MASK or count >= GROUP_ROWS_MAX):
            self._end_group()

    def add_stored(self, group: EntryGroup, first: int, stop: int) -> None:
        """Add rows of a group of an earlier version, as `add` does for each.

        A group of which all rows follow one another is copied, not encoded again.
        """
        entries = [placed.entry for placed in group.entries[first:stop]]
        stored, rows = self._stored or (group, 0)
        if stored is not group or not rows == first == len(self._rows):
            for entry in entries:
                self.add(entry)
            return
        self._rows += entries
        self._stored = (group, stop)
        for uid, gid in {(entry.uid, entry.gid) for entry in entries}:
            if uid not in self._users or gid not in self._owner_groups:
                self._add_owner(uid, gid)
        self._extras_bytes += sum([_extras_bytes(entry) for entry in entries if entry.xattrs or entry.extents])
        if stop == len(group.entries):
            self._end_group(group)

    def _add_owner(self, uid: int, gid: int) -> None:
        if uid not in self._users:
            self._users[uid] = self._names.user(uid)
        if gid not in self._owner_groups:
            self._owner_groups[gid] = self._names.group(gid)

    def read_content(
        self, descriptor: int, extents: tuple[tuple[int, int], ...], progress: FileProgress | None = None
    ) -> tuple[int, bytes, OSError | None]:
        """Write extents of a file.

        Returns (bytes that the tree has of it, digest, error that ended it early).

        With `progress` behind the bytes that the tree has already.
        """
        hasher, written, on_piece = progress or new_progress()
        self._borders.begin(sum(length for _, length in extents))
        failure = None
        sink = self._sink
        for position, length in remaining(extents, written):
            left = length
            while left:
                window = sink.window()[: min(left, PIECE_BYTES_MAX)]
                try:
                    count = os.preadv(descriptor, [window], position + length - left)
                except OSError as err:
                    failure = err
                    break
                if not count:
                    break
                hasher.update(window[:count])
                sink.advance(count)
                left -= count
                written += count
                on_piece(count)
            if left:
                break  # cut short, or an error: the next extent would have a wrong offset
        self._borders.end(written)
        return written, hasher.digest(length=DIGEST_BYTES) if written else b"", failure

    def write_content(self, data: bytes) -> None:
        """Write bytes of contents that are read from an earlier version."""
        self._borders.begin(len(data))
        self._sink.write(data)
        self._borders.end(len(data))

    def splice(self, segments: Locations, lengths: U32) -> None:
        """Take over stored segments."""
        self._sink.splice(segments, lengths)
        self._borders = FileBorders(self._sink)

    def take_over(self, chunks: StoredChunks) -> None:
        """Take over stored chunks."""
        self._sink.take_over(chunks)
        self._borders = FileBorders(self._sink)

    def copy_range(self, start: int, stop: int, source: int) -> None:
        """Take over the bytes [start, stop) of a parent on a server, the source of this number."""
        self._sink.copy_range(start, stop, source)
        self._borders = FileBorders(self._sink)

    def checkpoint(
        self, key: str, metadata: dict[str, str], unread: int, partial: PartialFile | None = None
    ) -> Future[PutResult] | None:
        """Commit what there is so far as a version of `key`; the tree goes on.

        The root has been added. `partial`: the file whose content is being written. The result is resolved once the
        version is durable; None: no further checkpoint can be made.
        """
        if partial is not None:
            groups, blocks, summary = self._with_partial(partial, unread)
        else:
            if self._rows:
                self._end_group()
            groups, blocks, summary = self._groups, self._plain_blocks(), self._summary_of(unread)
        end = self._end(groups, summary)
        done = self._sink.checkpoint(key, metadata, chain(blocks, [end]), tree_digest(end))
        self._borders = FileBorders(self._sink)
        return done

    def _with_partial(self, partial: PartialFile, unread: int) -> tuple[list[GroupInfo], Iterator[bytes], TreeSummary]:
        """Return groups, their bytes and the summary with the file in progress as last entry.

        The group in progress goes on behind it.
        """
        self._add_owner(partial.entry.uid, partial.entry.gid)
        block, group = _encode([*self._rows, partial.entry])
        summary = self._summary_of(unread)
        return (
            [*self._groups, group],
            chain(self._plain_blocks(), [block]),
            msgspec.structs.replace(
                summary,
                entries=summary.entries + 1,
                files=summary.files + 1,
                size_bytes=summary.size_bytes + partial.entry.size,
                hash_state=partial.hash_state,
            ),
        )

    def wait_for(self, done: Future[PutResult]) -> None:
        """Wait until a checkpoint is durable. Raises what went wrong."""
        self._sink.wait_for(done)

    def finish(self, unread: int) -> bytes:
        """Write groups, index and footer; return the digest of the tree.

        `unread`: entries that could not be read, or changed meanwhile.
        """
        if self._rows:
            self._end_group()
        end = self._end(self._groups, self._summary_of(unread))
        self._sink.end_chunk(ends_segment=True)
        for block in self._plain_blocks():
            self._sink.write(block)
            self._sink.end_chunk()
        self._sink.write(end)
        return tree_digest(end)

    def _end(self, groups: list[GroupInfo], summary: TreeSummary) -> bytes:
        """Return index and footer.

        All contents are written: a tree whose entries and contents differ in size is never committed.
        """
        content_bytes = sum([group.content_bytes for group in groups])
        if content_bytes != self._sink.size_bytes:
            raise AssertionError(f"entries of {content_bytes} bytes, {self._sink.size_bytes} were written")
        return encode_end(summary, groups)

    def _summary_of(self, unread: int) -> TreeSummary:
        owners = {"users": _sorted(self._users), "groups": _sorted(self._owner_groups)}
        counts = {
            name: min(count, SIZE_BYTES_MAX) for name, count in self._counts.with_rows(self._rows)._asdict().items()
        }
        return msgspec.structs.replace(
            self._summary, unread=unread, partial=self.partial, hash_state=self.hash_state, **owners, **counts
        )

    def _plain_blocks(self) -> Iterator[bytes]:
        return map(decompress, self._blocks)

    def _end_group(self, stored: EntryGroup | None = None) -> None:
        """End the group in progress, which is equal to `stored`."""
        rows, self._rows, self._extras_bytes = self._rows, [], 0
        self._counts = self._counts.with_rows(rows)
        self._stored = None
        block, group = _encode(rows) if stored is None else (stored.block, stored.info)
        self._groups.append(group)
        self._sink.keep_alive()
        self._blocks.append(compress(block, 1))
        self._group_bytes += len(block)


def _extras_bytes(entry: TreeEntry) -> int:
    attributes = sum(len(name) + len(value) for name, value in entry.xattrs)
    return attributes + EXTENT_BYTES * len(entry.extents or ())


def _encode(rows: list[TreeEntry]) -> tuple[bytes, GroupInfo]:
    """Return a group as bytes, and its row of the index."""
    block, first = encode_group(rows), rows[0]
    content_bytes = sum([row.content_bytes for row in rows])
    return block, GroupInfo(first.folder, first.name, len(rows), len(block), content_bytes, group_digest(block))


def _sorted(names: dict[int, str]) -> dict[int, str]:
    """Return the names by number, so that the same tree has the same bytes."""
    return dict(sorted(names.items()))


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return ""
