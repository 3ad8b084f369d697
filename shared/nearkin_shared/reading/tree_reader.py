"""Read the entries of a tree by ranges of its blob.

    TreeReader.open -> footer and index, once       children(folder) -> the groups that hold the folder's entries
    entries()       -> all entries in order, a few groups at a time

Invariant (I8): an entry is returned only after the digest of its group agreed with the index, and the index with the
digest of the version.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, count, islice
from operator import lt
from typing import NamedTuple

from blake3 import blake3

from nearkin_shared.errors import BadInput, Corrupt, NotFound
from nearkin_shared.formats.tree_entry_group import (
    DIGEST_BYTES,
    EntryKind,
    TreeEntry,
    decode_group,
    entry_keys,
    hard_link_targets,
    is_name,
    sort_key,
)
from nearkin_shared.formats.tree_layout import (
    FOOTER_BYTES,
    GroupIndex,
    GroupInfo,
    TreeSummary,
    decode_footer,
    decode_index,
    group_digest,
    tree_digest,
)

ReadRange = Callable[[int, int], bytes]
"""Returns the bytes [start, stop) of the blob, verified."""
END_BYTES = 64 * 1024
"""Bytes at the end that are read first: footer and index of a tree of about 250,000 entries."""
AHEAD_BYTES = 256 * 1024
"""Groups that are read together, while folders are listed one after the other."""
READ_BYTES = 2 * 1024 * 1024
"""Groups that are read together, while all entries are read."""


class PlacedEntry(NamedTuple):
    """An entry and where its content starts in the blob, bytes."""

    entry: TreeEntry
    start: int
    ordinal: int
    """Its number among all entries of the tree, from 0 on."""

    @property
    def stop(self) -> int:
        """The end of its content in the blob."""
        return self.start + self.entry.content_bytes


_new_placed: Callable[[tuple[object, ...]], PlacedEntry] = partial(tuple.__new__, PlacedEntry)
"""Without a call of Python for each entry."""


class EntryGroup(NamedTuple):
    """A group of a tree as it is stored, and its entries."""

    keys: list[tuple[bytes, bytes]]
    """`sort_key` of the folder, and the name, of each entry."""
    entries: list[PlacedEntry]
    block: bytes
    info: GroupInfo


class TreeReader:
    """An open tree. Not to be shared between threads."""

    def __init__(self, read_range: ReadRange, index: GroupIndex, size_bytes: int, label: str, digest: bytes) -> None:
        self.read_range = self._read_range = read_range
        """Returns bytes [start, stop) of the blob, contents included."""
        self._index = index
        self._label = label
        self.location = "KEY"
        """KEY@VERSION as a command takes it, for remedies."""
        self._ordinals = [0, *accumulate(group.rows for group in index.groups)]
        """Of the first entry of each group."""
        self._decoded: tuple[int, list[PlacedEntry]] = (-1, [])
        self._ahead = (0, b"")
        """Where bytes of groups start that were read together, and the bytes."""
        self._named: dict[tuple[bytes, bytes], PlacedEntry] = {}
        """Entries of the decoded group by folder and name, once one is looked up."""
        self.size_bytes = size_bytes
        """Of the blob."""
        self.digest = digest
        """Of the tree, whatever the digest of its version is."""

    @classmethod
    def open(cls, read_range: ReadRange, size_bytes: int, label: str, digest: bytes | None = None) -> TreeReader:
        """Read footer and index.

        `digest`: of the tree, from its manifest; None: the caller verifies the whole blob.

        Raises Corrupt (not a tree, or damaged), FormatTooNew, and what `read_range` raises.
        """
        if size_bytes < FOOTER_BYTES:
            raise Corrupt(f"{label}: {size_bytes} bytes are too few for a tree")
        end = read_range(max(0, size_bytes - END_BYTES), size_bytes)
        footer = decode_footer(end[-FOOTER_BYTES:], size_bytes, label)
        end_bytes = footer.index_bytes + FOOTER_BYTES
        if end_bytes > len(end):
            end = read_range(size_bytes - end_bytes, size_bytes - len(end)) + end
        end = end[len(end) - end_bytes :]
        if digest is not None and tree_digest(end) != digest:
            raise Corrupt(f"{label}: the digest of its index differs from its manifest; run `nearkin verify`")
        index = decode_index(end[:-FOOTER_BYTES], footer, label)
        return cls(read_range, index, size_bytes, label, tree_digest(end))

    @property
    def summary(self) -> TreeSummary:
        """Properties of the tree as a whole."""
        return self._index.summary

    @property
    def first_key(self) -> tuple[bytes, bytes]:
        """The key of the first entry, before which there is none."""
        groups = self._index.groups
        return groups[0].first_key if groups else (b"", b"")

    @property
    def content_bytes(self) -> int:
        """Bytes of all contents, which are the start of the blob."""
        return self._index.content_starts[-1]

    def group_bounds(self) -> list[int]:
        """Return where each group starts in the blob, and where the last one ends."""
        return self._index.block_starts

    def entries(self, first: tuple[bytes, bytes] | None = None) -> Iterator[PlacedEntry]:
        """Yield all entries in order.

        With `first`, from the start of the group that may have an entry with this key.
        """
        for number, block in self._read_blocks(0 if first is None else max(0, self._group_of(first))):
            yield from self._decode(number, block)

    def groups(self, first: tuple[bytes, bytes] | None = None) -> Iterator[EntryGroup]:
        """Yield the groups in order, `first` as for `entries`."""
        for number, block in self._read_blocks(0 if first is None else max(0, self._group_of(first))):
            keys, entries = self._decode_keyed(number, block)
            yield EntryGroup(keys, entries, block, self._index.groups[number])

    def entries_backward(self, is_wanted: Callable[[int, int], bool]) -> Iterator[PlacedEntry]:
        """Yield the entries, the last one first, of each group that `is_wanted`.

        It is called with the ordinals [first, stop) of the entries of a group. Raises Corrupt.
        """
        blocks, stop = self._index.block_starts, len(self._index.groups)
        while stop:
            first = min(stop - 1, bisect_left(blocks, blocks[stop] - READ_BYTES))
            wanted = [number for number in range(first, stop) if is_wanted(*self._ordinals[number : number + 2])]
            if wanted:
                start = blocks[wanted[0]]
                data = self._read_range(start, blocks[wanted[-1] + 1])
                for number in reversed(wanted):
                    block = data[blocks[number] - start : blocks[number + 1] - start]
                    yield from reversed(self._decode(number, block))
            stop = first

    def hard_link_targets(self) -> Iterator[bytes]:
        """Yield the path of the content of each hard link, in order. Raises Corrupt."""
        for number, block in self._read_blocks(0):
            yield from hard_link_targets(block, self._check_digest(number, block))

    def children(self, folder: bytes) -> Iterator[PlacedEntry]:
        """Yield the entries of a folder, names ascending. Nothing if it has none, or is no folder."""
        key = sort_key(folder)
        first = max(0, self._group_of((key, b"")))
        for number in range(first, len(self._index.groups)):
            group = self._group(number)
            start = 0
            if number == first:
                start = bisect_left(group, key, key=lambda placed: sort_key(placed.entry.folder))
            for placed in group[start:] if start else group:
                if placed.entry.folder != folder:
                    if sort_key(placed.entry.folder) > key:
                        return
                elif placed.entry.name:
                    yield placed

    def below(self, folder: bytes) -> Iterator[PlacedEntry]:
        """Yield all entries below a folder, at any depth, in order."""
        if not folder:
            yield from self.entries()
            return
        yield from self.children(folder)
        key = sort_key(folder) + b"\0"
        for placed in self.entries((key, b"")):
            found = sort_key(placed.entry.folder)
            if found.startswith(key):
                yield placed
            elif found > key:
                return

    def find(self, path: bytes) -> PlacedEntry:
        """Return the entry with a path. Raises NotFound."""
        placed = self._lookup(path)
        if placed is None:
            raise NotFound(f"{self._label}: has no entry {_shown(path)!r}")
        return placed

    def find_named(self, path: bytes) -> PlacedEntry:
        """Return the entry with a path that a person wrote.

        Raises NotFound with a remedy, which takes more reads.
        """
        placed = self._lookup(path)
        if placed is None:
            raise NotFound(f"{self._label}: has no entry {_shown(path)!r}; {self._remedy(path)}")
        return placed

    def _lookup(self, path: bytes) -> PlacedEntry | None:
        folder, _, name = path.rpartition(b"/")
        number = self._group_of((sort_key(folder), name))
        if number < 0:
            return None
        group = self._group(number)
        if not self._named:
            self._named = {(placed.entry.folder, placed.entry.name): placed for placed in group}
        return self._named.get((folder, name))

    def _remedy(self, path: bytes) -> str:
        """Return the remedy of a path that no entry has.

        The path in the tree of one in the file system, or the nearest folder that exists.
        """
        root = self.summary.root.strip(b"/")
        if root and (path + b"/").startswith(root + b"/"):
            inner = path[len(root) :].strip(b"/")
            if not inner or self._lookup(inner) is not None:
                place = shlex.quote(f"{self.location}:/{_shown(inner)}")
                return f"paths count from the folder that was stored, {_shown(self.summary.root)!r}: it is {place}"
        above = path.rpartition(b"/")[0]
        while above and ((found := self._lookup(above)) is None or found.entry.kind != EntryKind.FOLDER):
            above = above.rpartition(b"/")[0]
        place = shlex.quote(f"{self.location}:/{_shown(above)}")
        return f"`nearkin ls {place}` lists what is there"

    def content_of(self, placed: PlacedEntry) -> PlacedEntry:
        """Return the entry that holds the content: itself, or the target of a hard link.

        Raises Corrupt.
        """
        if placed.entry.kind != EntryKind.HARD_LINK:
            return placed
        try:
            target = self.find(placed.entry.target)
        except NotFound as err:
            raise Corrupt(f"{self._label}: hard link {placed.entry.path!r}: {err}") from err
        if target.entry.kind == EntryKind.HARD_LINK:
            raise Corrupt(f"{self._label}: hard link {placed.entry.path!r} names another hard link")
        return target

    def _group_of(self, key: tuple[bytes, bytes]) -> int:
        """Return the last group that starts at or before the key; -1 if none does."""
        return bisect_right(self._index.groups, key, key=lambda group: group.first_key) - 1

    def _group(self, number: int) -> list[PlacedEntry]:
        """Return the entries of a group; the last one is kept."""
        if self._decoded[0] != number:
            block = self._block(number, is_next=number == self._decoded[0] + 1)
            self._named = {}
            self._decoded = (number, self._decode(number, block))
        return self._decoded[1]

    def _block(self, number: int, *, is_next: bool) -> bytes:
        """Return the bytes of a group; those behind it are read with it if `is_next`."""
        blocks = self._index.block_starts
        start, stop = blocks[number : number + 2]
        first, data = self._ahead
        if not first <= start <= stop <= first + len(data):
            last = stop
            if is_next:
                last = max(stop, blocks[bisect_right(blocks, start + AHEAD_BYTES) - 1])
            first, data = self._ahead = start, self._read_range(start, last)
        return data[start - first : stop - first]

    def _read_blocks(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each group from `number` on; several are read together."""
        blocks = self._index.block_starts
        while number < len(self._index.groups):
            last = max(number + 1, bisect_right(blocks, blocks[number] + READ_BYTES) - 1)
            data = self._read_range(blocks[number], blocks[last])
            for group in range(number, last):
                yield group, data[blocks[group] - blocks[number] : blocks[group + 1] - blocks[number]]
            number = last

    def _check_digest(self, number: int, block: bytes) -> str:
        """Return a name of a group for errors. Raises Corrupt if the bytes do not have its digest."""
        what = f"{self._label}: group {number} of its entries"
        if group_digest(block) != self._index.groups[number].digest:
            raise Corrupt(f"{what}: its digest differs from the index; run `nearkin verify`")
        return what

    def _decode(self, number: int, block: bytes) -> list[PlacedEntry]:
        return self._decode_keyed(number, block)[1]

    def _decode_keyed(self, number: int, block: bytes) -> tuple[list[tuple[bytes, bytes]], list[PlacedEntry]]:
        group, what = self._index.groups[number], self._check_digest(number, block)
        entries = decode_group(block, what)
        start = self._index.content_starts[number]
        sizes = [entry.content_bytes for entry in entries]
        ends = list(accumulate(sizes, initial=start))
        if len(entries) != group.rows or ends[-1] - start != group.content_bytes:
            raise Corrupt(f"{what}: {len(entries)} entries with {ends[-1] - start} bytes; the index states others")
        keys = entry_keys(entries)
        if keys[0] != group.first_key or not all(map(lt, keys, islice(keys, 1, None))):
            raise Corrupt(f"{what}: its entries are not in order")
        return keys, list(map(_new_placed, zip(entries, ends, count(self._ordinals[number]), strict=False)))


class TreeContentCheck:
    """Compares the bytes of a tree, from its start on, with the digests of its files.

    The entries are read ahead of the contents, so that a wrong byte is found before it is passed on.
    """

    def __init__(self, reader: TreeReader) -> None:
        self._entries = (placed for placed in reader.entries() if placed.entry.content_bytes)
        self._placed = next(self._entries, None)
        self._hasher = blake3()
        self._position = 0
        self._content_bytes = reader.content_bytes

    def update(self, piece: memoryview) -> PlacedEntry | None:
        """Compare the next bytes; return the first file that ends within them with another digest."""
        start, stop = self._position, min(self._position + len(piece), self._content_bytes)
        self._position += len(piece)
        while self._placed is not None and start < stop:
            placed = self._placed
            end = min(placed.stop, stop)
            self._hasher.update(piece[start - self._position + len(piece) : end - self._position + len(piece)])
            start = end
            if end == placed.stop:
                if self._hasher.digest(length=DIGEST_BYTES) != placed.entry.digest:
                    return placed
                self._hasher = blake3()
                self._placed = next(self._entries, None)
        return None


def tree_path(text: bytes) -> bytes:
    """Return the path of an entry from user input: `/etc/`, `etc` and `./etc` are the same.

    Raises BadInput.
    """
    parts = [part for part in text.split(b"/") if part not in (b"", b".")]
    if not all(is_name(part) for part in parts):
        raise BadInput(f"path {text.decode(errors='backslashreplace')!r}: has .. or a name above 255 bytes")
    return b"/".join(parts)


def _shown(path: bytes) -> str:
    return path.decode(errors="backslashreplace")
