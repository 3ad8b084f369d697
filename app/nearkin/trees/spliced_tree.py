"""Put a tree of new bytes and of ranges of other versions: the source of a put.

    check: entry groups, index and the digests of new files, before the put begins
    feed:  new bytes -> cut, deduplicated
           ranges -> whole segments are spliced, of others whole chunks are taken over, the rest is read and written

Invariant: a tree is committed only if its groups and its index agree with its digest, its entries with its size, and
its new files with their entries. The sources are read once the put has begun: GC deletes nothing of them from then on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from nearkin_shared.errors import BadInput, BaseUnusable, Corrupt, FormatTooNew, NotFound
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES
from nearkin_shared.formats.upload_parts import CopiedRange
from nearkin_shared.limits import MIB
from nearkin_shared.reading.copy_sources import CopySources, SourceVersion
from nearkin_shared.reading.segment_window import SegmentWindow
from nearkin_shared.reading.tree_reader import END_BYTES, PlacedEntry, TreeReader

if TYPE_CHECKING:
    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter
    from nearkin.trees.store_backup import TreeStore
    from nearkin_shared.formats.manifest import Manifest

READ_BYTES = MIB


class CopiedRanges:
    """The ranges of a tree, and where they are between its new bytes; 32 bytes of memory each."""

    def __init__(self) -> None:
        self._fresh_starts, self._starts, self._sources, self._lengths = (array("Q") for _ in range(4))
        self.size_bytes: int = 0
        """Of all ranges."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, fresh_bytes: int, copied: CopiedRange) -> None:
        """Append a range that follows so many new bytes."""
        self._fresh_starts.append(fresh_bytes)
        self._starts.append(fresh_bytes + self.size_bytes)
        self._sources.append(copied.start)
        self._lengths.append(copied.stop - copied.start)
        self.size_bytes += copied.stop - copied.start

    def placed(self) -> Iterator[tuple[int, CopiedRange]]:
        """Yield (new bytes before it, range) in order."""
        for fresh_bytes, start, length in zip(self._fresh_starts, self._sources, self._lengths, strict=True):
            yield fresh_bytes, CopiedRange(start, start + length)

    def find_fresh(self, position: int) -> tuple[int, int]:
        """Return where a byte of the tree is.

        As (offset among the new bytes, bytes up to the next range), or (-1, bytes up to the end of its range).
        """
        number = bisect_right(self._starts, position) - 1
        before = 0
        if number >= 0:
            stop = self._starts[number] + self._lengths[number]
            if position < stop:
                return -1, stop - position
            before = stop - self._fresh_starts[number]
        following = self._starts[number + 1] if number + 1 < len(self._starts) else (1 << 64) - 1
        return position - before, following - position


class SplicedTree:
    """A tree to put, whose new bytes are in a file."""

    def __init__(
        self, store: TreeStore, key: str, sources: Sequence[SourceVersion], file: BinaryIO, ranges: CopiedRanges
    ) -> None:
        """`sources`: the versions that the ranges are of."""
        self._store = store
        self._sources = sources
        self._file = file
        self._ranges = ranges
        self._label = f"tree {key!r}"
        self._digest = b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check(self, size_bytes: int, digest: bytes) -> None:
        """Check the entries, the sizes and the digests of new files. Raises BadInput.

        Bytes of ranges are not read: entries must be new bytes.
        """
        try:
            reader = TreeReader.open(self._read_new, size_bytes, self._label)
            for placed in reader.entries():
                if placed.entry.content_bytes:
                    self._check_content(placed)
        except (Corrupt, FormatTooNew) as err:
            raise BadInput(
                f"{err}; nothing was stored: the entries of a tree must be new bytes; send all bytes of what is no tree"
            ) from err
        if reader.digest != digest:
            raise BadInput(
                f"{self._label}: digest {digest.hex()} at the end of the body, its parts make {reader.digest.hex()}; "
                "nothing was stored"
            )
        self._digest = digest

    def _read_new(self, start: int, stop: int) -> bytes:
        """Return bytes of the tree; zeros for those of ranges. Raises Corrupt for too many.

        Contents are read with the index up to END_BYTES before the end: more zeros are of entries or of an index, whose
        stated size a small body could set to gigabytes.
        """
        found, zeros = bytearray(), 0
        while start < stop:
            offset, length = self._ranges.find_fresh(start)
            length = min(length, stop - start)
            if offset < 0 and (zeros := zeros + length) > END_BYTES:
                raise Corrupt(f"{self._label}: its entries or its index are in ranges")
            found += bytes(length) if offset < 0 else self._read_file(offset, length)
            start += length
        return bytes(found)

    def _read_file(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        data = bytearray()
        while len(data) < length:
            piece = self._file.read(length - len(data))
            if not piece:
                raise BadInput(f"{self._label}: ends after {offset + len(data)} new bytes; send it again")
            data += piece
        return bytes(data)

    def _check_content(self, placed: PlacedEntry) -> None:
        """Compare the digest of a file whose bytes are all new. Raises Corrupt."""
        offset, length = self._ranges.find_fresh(placed.start)
        size_bytes = placed.entry.content_bytes
        if offset < 0 or length < size_bytes:
            return
        hasher = blake3()
        for start in range(0, size_bytes, READ_BYTES):
            hasher.update(self._read_file(offset + start, min(READ_BYTES, size_bytes - start)))
        if hasher.digest(length=DIGEST_BYTES) != placed.entry.digest:
            raise Corrupt(f"{self._label}: BLAKE3 of {placed.entry.path!r} differs from its entry")

    def feed(self, writer: EmbeddedWriter, blob: BlobTransfer) -> bytes:
        """Write the tree; return its digest. Raises BaseUnusable, StoreUnavailable."""
        assert self._digest, "check was not called"
        try:
            sources = CopySources(
                [self._sound(source) for source in self._sources],
                lambda manifest, start, stop: self._store.blob(manifest, start, stop).read(),
                lambda manifest, start, stop: self._store.blob(manifest, start, stop).chunks(),
            )
            fresh_bytes = 0
            self._file.seek(0)
            for position, copied in self._ranges.placed():
                self._write_new(writer, blob, position - fresh_bytes)
                fresh_bytes = position
                source, window, start = sources.locate(copied.start)
                self._copy(writer, blob, source, window, CopiedRange(copied.start - start, copied.stop - start))
        except (NotFound, Corrupt) as err:
            raise BaseUnusable(f"{self._label}: its sources cannot be copied from: {err}") from err
        self._write_new(writer, blob, None)
        return self._digest

    def _sound(self, source: SourceVersion) -> Manifest:
        """Return the manifest of a source. Raises NotFound, Corrupt."""
        manifest = self._store.manifest(source.key, source.version)
        self._store.check_sound(manifest)
        return manifest

    def _write_new(self, writer: EmbeddedWriter, blob: BlobTransfer, count: int | None) -> None:
        """Write the next `count` new bytes, or all that are left."""
        while count is None or count:
            data = self._file.read(READ_BYTES if count is None else min(count, READ_BYTES))
            if not data:
                return
            writer.write(blob, data)
            count = None if count is None else count - len(data)

    def _copy(
        self, writer: EmbeddedWriter, blob: BlobTransfer, base: Manifest, window: SegmentWindow, copied: CopiedRange
    ) -> None:
        """Splice the whole segments of a range; take over the chunks of others."""
        start, stop = copied
        ends = window.ends
        first = bisect_left(ends, start)
        last = bisect_right(ends, stop) - 1
        if last > first:
            assert base.lengths is not None
            self._take_chunks(writer, blob, window, start, ends[first])
            rows = slice(first, last)
            writer.splice(blob, base.segments.take(rows), base.lengths[rows])
            start = ends[last]
        self._take_chunks(writer, blob, window, start, stop)

    def _take_chunks(
        self, writer: EmbeddedWriter, blob: BlobTransfer, window: SegmentWindow, start: int, stop: int
    ) -> None:
        """Take over the whole chunks of a range; read and write the rest."""
        assert window.chunks is not None
        for begin, end, chunks in window.chunks.within(start, stop) if start < stop else ():
            self._write_range(writer, blob, window, start, begin)
            writer.take_over(blob, chunks)
            start = end
        self._write_range(writer, blob, window, start, stop)

    def _write_range(
        self, writer: EmbeddedWriter, blob: BlobTransfer, window: SegmentWindow, start: int, stop: int
    ) -> None:
        for position in range(start, stop, READ_BYTES):
            writer.write(blob, window.read(position, min(stop, position + READ_BYTES)))
