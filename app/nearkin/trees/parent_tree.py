"""Find the entries of the newest tree, and take over its segments.

    entries of the parent, in order  ->  OrderedEntries.find(folder, name)
    unchanged files, in order        ->  ReusedContent.add: whole segments are spliced, of partial ones whole chunks
                                         are taken over, and the bytes of partial chunks are read from the parent
                                         and written again

Invariant: the spliced, taken over and rewritten bytes are the content of the added files, in order.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import groupby, islice, repeat
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from nearkin.trees.file_content import joined_extents
from nearkin.trees.tree_writer import TreeWriter
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.manifest import Manifest
from nearkin_shared.formats.tree_entry_group import EntryFlag
from nearkin_shared.reading.chunk_ranges import ChunkRanges
from nearkin_shared.reading.tree_reader import EntryGroup, PlacedEntry, ReadRange, TreeReader
from nearkin_shared.storage.container_graph import reachable_containers
from nearkin_shared.storage.containers import ContainerStore
from nearkin_shared.storage.quarantine import Quarantine, quarantined_segments
from nearkin_shared.types import ContainerId
from nearkin_shared.validation import RESERVED_PREFIX

EntryKey = tuple[bytes, bytes]
"""`sort_key` of the folder, and the name."""
EntryT = TypeVar("EntryT")
CONTINUES_FIELD = "continues"
"""Metadata of a checkpoint on a server that begins inside a file: `BYTES DIGEST` of the file before it."""
_log = logging.getLogger("nearkin")


class RemoteSource(NamedTuple):
    """A version on a server, of which an upload copies ranges."""

    number: int
    """Among the sources of the upload."""
    checkpoint: Mapping[str, str] | None = None
    """Metadata of a checkpoint; None: a complete version."""


class ParentTree(NamedTuple):
    """An earlier version of a tree."""

    reader: TreeReader
    manifest: Manifest | None
    """None: the version is on a server, which takes ranges of it."""
    read_range: ReadRange
    chunks: ChunkRanges | None = None
    """None: on a server."""
    remote: RemoteSource = RemoteSource(0)

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is an unfinished version."""
        if self.remote.checkpoint is not None:
            return True
        return self.manifest is not None and self.manifest.key.startswith(RESERVED_PREFIX)

    @property
    def continues(self) -> str:
        """Of a checkpoint that begins inside a file: bytes and digest of the file before it."""
        return "" if self.remote.checkpoint is None else self.remote.checkpoint.get(CONTINUES_FIELD, "")

    @property
    def metadata(self) -> Mapping[str, str]:
        """Of the version, in this store; on a server of a checkpoint alone."""
        return (self.remote.checkpoint or {}) if self.manifest is None else self.manifest.metadata


class ContentPart(NamedTuple):
    """Bytes [start, stop) of a parent."""

    parent: ParentTree
    start: int
    stop: int


class FoundEntry(NamedTuple):
    """An entry of an earlier version."""

    parent: ParentTree
    placed: PlacedEntry
    joined: tuple[ContentPart, ...] = ()
    """Of a file in several checkpoints: its content, in order. The entry is of the whole; `parent` has the end."""

    @property
    def parts(self) -> tuple[ContentPart, ...]:
        """The content of the entry."""
        return self.joined or (ContentPart(self.parent, self.placed.start, self.placed.stop),)


def check_sound(containers: ContainerStore, quarantine: Quarantine, manifest: Manifest) -> None:
    """Raise Corrupt if a container of a version is missing, or a segment is quarantined.

    Of a version that is not sound nothing is taken over: the files are read, which repairs their chunks. Raises
    StoreUnavailable.
    """
    damaged = quarantined_segments(quarantine.read(), manifest.segments)
    if damaged:
        raise Corrupt(
            f"{damaged} of its {len(manifest.segments)} segments are quarantined; `nearkin verify` names the damage"
        )

    def bases_of(container: int) -> list[int]:
        return containers.directory(ContainerId(container)).base_containers()

    reachable_containers(manifest.segments, containers.directory, bases_of)  # reads the directory of each


@dataclass(slots=True)
class KeyedGroup(Generic[EntryT]):
    """Consecutive entries of a stream and their keys, ascending."""

    keys: Sequence[EntryKey]
    entries: Sequence[EntryT]
    stored: EntryGroup | None = None
    """The group of the newest tree that has these entries and no others."""


class OrderedEntries(Generic[EntryT]):
    """Looks up entries of a stream by ascending keys."""

    def __init__(self, groups: Iterator[KeyedGroup[EntryT]]) -> None:
        """Begin before the first entry; keys ascend from group to group."""
        self._groups = groups
        self._group = KeyedGroup[EntryT]((), ())
        self._row = 0

    @property
    def next_entry(self) -> EntryT | None:
        """The first entry whose key is above the last one that was looked up; None at the end."""
        group, row = self.next_row()
        return None if row == len(group.keys) else group.entries[row]

    def next_row(self) -> tuple[KeyedGroup[EntryT], int]:
        """Return the group of the next entry and its row.

        The row is behind the last one at the end of the stream.
        """
        while self._row >= len(self._group.keys):
            group = next(self._groups, None)
            if group is None:
                break
            self._group, self._row = group, 0
        return self._group, self._row

    def last_row(self) -> tuple[KeyedGroup[EntryT], int]:
        """Return the group and the row of the entry that `find` returned last."""
        return self._group, self._row - 1

    def skip(self, rows: int) -> None:
        """Pass entries of the group of the next entry."""
        self._row += rows

    def find(self, folder_key: bytes, name: bytes) -> EntryT | None:
        """Return the entry; keys must ascend from call to call."""
        key = (folder_key, name)
        while True:
            group, row = self.next_row()
            if row == len(group.keys) or group.keys[row] > key:
                return None
            if group.keys[row] == key:
                self._row = row + 1
                return group.entries[row]
            self._row = bisect_left(group.keys, key, row)


def entry_groups(
    tree: TreeReader, reached: EntryKey | None = None
) -> Iterator[tuple[Sequence[EntryKey], Sequence[PlacedEntry], EntryGroup | None]]:
    """Yield keys and entries of a tree, from group to group, that are above `reached`.

    And the group, if they are all of it.
    """
    for group in tree.groups(reached):
        first = 0 if reached is None else bisect_right(group.keys, reached)
        if not first:
            yield group.keys, group.entries, group
        elif first < len(group.keys):
            yield group.keys[first:], group.entries[first:], None


def placed_entries(*trees: TreeReader | None) -> Iterator[KeyedGroup[PlacedEntry]]:
    """Yield the entries of several trees, of each those behind the end of the one before."""
    last: EntryKey | None = None
    for tree in trees:
        for keys, entries, _ in entry_groups(tree, last) if tree is not None else ():
            yield KeyedGroup(keys, entries)
            last = keys[-1]


def parent_entries(parents: Sequence[ParentTree]) -> Iterator[KeyedGroup[FoundEntry]]:
    """Yield the entries of several trees, of each those behind the end of the one before.

    A parent whose entries are damaged ends there: files behind the damage are read.
    """
    last: EntryKey | None = None
    for parent in parents:
        try:
            for keys, entries, stored in entry_groups(parent.reader, last):
                yield KeyedGroup(
                    keys, list(map(_new_found, zip(repeat(parent), entries, repeat(()), strict=False))), stored
                )
                last = keys[-1]
        except Corrupt as err:
            _log.warning("%s: files behind the damage are read", err)


_new_found: Callable[[tuple[ParentTree, PlacedEntry, tuple[()]]], FoundEntry] = partial(tuple.__new__, FoundEntry)
"""Without a call of Python for each entry."""


def merged_entries(parents: Sequence[ParentTree]) -> Iterator[KeyedGroup[FoundEntry]]:
    """Yield the entries of trees whose keys overlap, in order.

    Of each key the entry of the first tree that has it; of a file in several checkpoints the parts that fit together.
    """
    merged = _merged(parents)
    while rows := list(islice(merged, MERGED_ROWS)):
        yield KeyedGroup([key for key, _ in rows], [found for _, found in rows])


def _merged(parents: Sequence[ParentTree]) -> Iterator[tuple[EntryKey, FoundEntry]]:
    for key, same in groupby(_ranked(parents), key=itemgetter(0)):
        found: FoundEntry | None = None
        later: dict[str, FoundEntry] = {}  # by what is before: checkpoints may be stored in another order than sent
        for _, one in same:  # the newest first
            if one.parent.continues and not one.placed.ordinal:
                later.setdefault(one.parent.continues, one)
            elif found is None:
                found = one
        if found is not None:
            yield key, joined_entry(found, later) if later else found


def joined_entry(found: FoundEntry, later: dict[str, FoundEntry]) -> FoundEntry:
    """Return the start of a file together with the parts that follow it.

    `later`: parts of the file by `format_continued` of what is before them.
    """
    while found.placed.entry.flags == EntryFlag.INCOMPLETE:
        entry = found.placed.entry
        part = later.get(format_continued(entry.content_bytes, entry.digest))
        if part is None:
            break
        following = part.placed.entry
        if any(getattr(entry, name) != getattr(following, name) for name in ("size", "mtime_ns", "ctime_ns", "inode")):
            break
        extents = joined_extents([*(entry.extents or ()), *(following.extents or ())])
        is_whole = not following.flags and extents == ((0, following.size),)
        joined = following._replace(extents=None if is_whole else extents)
        if joined.flags and joined.content_bytes == entry.content_bytes:
            break  # nothing more
        found = FoundEntry(part.parent, part.placed._replace(entry=joined), found.parts + part.parts)
    return found


def format_continued(done_bytes: int, digest: bytes) -> str:
    """Return the metadata of a checkpoint that begins inside a file."""
    return f"{done_bytes} {digest.hex()}"


def _ranked(parents: Sequence[ParentTree]) -> Iterator[tuple[EntryKey, FoundEntry]]:
    """Yield the entries of trees by key; of one key in the order of the trees."""
    waiting = sorted(((parent.reader.first_key, rank) for rank, parent in enumerate(parents)), reverse=True)
    heap: list[tuple[EntryKey, int, FoundEntry, Iterator[tuple[EntryKey, FoundEntry]]]] = []
    while heap or waiting:
        while waiting and (not heap or waiting[-1][0] <= heap[0][0]):  # few trees are read at a time
            rank = waiting.pop()[1]
            stream = _rows_of(parents[rank])
            for key, found in stream:
                heappush(heap, (key, rank, found, stream))
                break
        if not heap:
            continue
        key, rank, found, stream = heap[0]
        following = next(stream, None)
        if following is None:
            heappop(heap)
        else:
            heapreplace(heap, (following[0], rank, following[1], stream))
        yield key, found


def _rows_of(parent: ParentTree) -> Iterator[tuple[EntryKey, FoundEntry]]:
    for group in parent_entries([parent]):
        yield from zip(group.keys, group.entries, strict=True)


MERGED_ROWS = 64
"""Entries of a group of merged trees: reading ahead of the walk, which may be slow, saves nothing."""


class ReusedContent:
    """The content of consecutive unchanged files, as a range of a parent."""

    def __init__(self, tree: TreeWriter, progress: Callable[[int], None]) -> None:
        """`progress` is called with the bytes that are taken over."""
        self._tree = tree
        self._progress = progress
        self._parent: ParentTree | None = None
        self._start = self._stop = 0
        self._stops = array("Q")
        """Ends of the files, in the parent."""
        self._ends: dict[int, list[int]] = {}

    def add(self, found: FoundEntry) -> None:
        """Append the content of a file."""
        for parent, start, stop in found.parts:
            if self._parent is not parent or start != self._stop:
                self.flush()
                self._parent, self._start = parent, start
            self._stop = stop
            self._stops.append(stop)

    def add_all(self, parent: ParentTree, entries: Sequence[PlacedEntry]) -> None:
        """Append the contents of consecutive entries of a parent."""
        if self._parent is not parent or entries[0].start != self._stop:
            self.flush()
            self._parent, self._start = parent, entries[0].start
        before, self._stop = self._stop, entries[-1].stop
        stops = dict.fromkeys([placed.start for placed in entries[1:]])  # without those of empty files
        stops[self._stop] = None
        self._stops.extend(stop for stop in stops if stop != before)

    def flush(self) -> None:
        """Write what was added."""
        parent, start, stop = self._parent, self._start, self._stop
        stops, self._stops, self._parent = self._stops, array("Q"), None
        if parent is None or start == stop:
            return
        if parent.manifest is None:
            self._tree.copy_range(start, stop, parent.remote.number)
        else:
            self._take_segments(parent, parent.manifest, start, stop, stops)
        self._progress(stop - start)

    def _take_segments(
        self, parent: ParentTree, manifest: Manifest, start: int, stop: int, stops: Sequence[int]
    ) -> None:
        """Splice whole segments of a range of the parent; take over chunks of the rest."""
        ends = self._segment_ends(manifest)
        first = bisect_left(ends, start)  # segments behind it begin inside the range
        last = bisect_right(ends, stop) - 1
        if last > first:
            lengths = manifest.lengths
            assert lengths is not None
            self._take_chunks(parent, start, ends[first], stops)
            rows = slice(first, last)
            self._tree.splice(manifest.segments.take(rows), lengths[rows])
            self._take_chunks(parent, ends[last], stop, stops)
        else:
            self._take_chunks(parent, start, stop, stops)

    def _segment_ends(self, manifest: Manifest) -> list[int]:
        """Return 0 and the end of each segment: segment i is ends[i] to ends[i + 1]."""
        if id(manifest) not in self._ends:
            lengths = manifest.lengths
            if lengths is None:  # one segment at most
                self._ends[id(manifest)] = [0, manifest.size_bytes]
            else:
                self._ends[id(manifest)] = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        return self._ends[id(manifest)]

    def _take_chunks(self, parent: ParentTree, start: int, stop: int, stops: Sequence[int]) -> None:
        """Take over the whole chunks of a range of the parent, and write the rest of it again."""
        assert parent.chunks is not None
        for begin, end, chunks in parent.chunks.within(start, stop) if start < stop else ():
            self._rewrite(parent, start, begin, stops)
            self._tree.take_over(chunks)
            start = end
        self._rewrite(parent, start, stop, stops)

    def _rewrite(self, parent: ParentTree, start: int, stop: int, stops: Sequence[int]) -> None:
        """Write a range of the parent again, file by file, so that chunks end where they did."""
        number = bisect_right(stops, start)
        data, position = b"", start
        while start < stop:
            end = min(stop, stops[number], start + REWRITE_BYTES)
            if end > position + len(data):
                position, data = start, parent.read_range(start, min(stop, start + REWRITE_BYTES))
            self._tree.write_content(data[start - position : end - position])
            start = end
            number += start == stops[number]


REWRITE_BYTES = 1 << 20
"""Bytes of a parent that are read at once; an edge is shorter than two segments, 1.8 MB."""
