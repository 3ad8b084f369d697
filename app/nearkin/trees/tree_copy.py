"""Copy a tree from one store into another.

Invariant: the copy has the digest of the source, and each file was compared with its digest before the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from blake3 import blake3

from nearkin.trees.content_stream import ContentStream
from nearkin.trees.tree_sinks import StoreSink
from nearkin.trees.tree_writer import FileBorders
from nearkin_shared.errors import Corrupt
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES
from nearkin_shared.reading.tree_reader import TreeReader

if TYPE_CHECKING:
    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter


class TreeCopy:
    """A tree of another store, as the source of a put."""

    def __init__(
        self,
        reader: TreeReader,
        open_range: Callable[[int, int], Iterable[memoryview]],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._reader = reader
        self._stream = ContentStream(open_range, reader.size_bytes)
        self._progress = progress
        self.digest: str = f"blake3:{reader.digest.hex()}"

    def feed(self, writer: EmbeddedWriter, blob: BlobTransfer) -> bytes:
        """Write the tree; return its digest. Raises Corrupt, StoreUnavailable."""
        sink = StoreSink(writer, blob)
        borders = FileBorders(sink)
        try:
            for placed in self._reader.entries():
                entry = placed.entry
                if not entry.content_bytes:
                    continue
                borders.begin(entry.content_bytes)
                if self._copy(sink, placed.start, placed.stop) != entry.digest:
                    raise Corrupt(f"{entry.path!r}: BLAKE3 of its content differs from its entry; run `nearkin verify`")
                borders.end(entry.content_bytes)
            sink.end_chunk(ends_segment=True)
            bounds = self._reader.group_bounds()
            for start, stop in pairwise(bounds):
                self._copy(sink, start, stop)
                sink.end_chunk()
            self._copy(sink, bounds[-1], self._reader.size_bytes)
        finally:
            self._stream.close()
        return self._reader.digest

    def _copy(self, sink: StoreSink, start: int, stop: int) -> bytes:
        """Copy a range; return its digest."""
        hasher = blake3()
        for piece in self._stream.read(start, stop):
            hasher.update(piece)
            sink.write(piece)
        if self._progress is not None:
            self._progress(stop - start)
        return hasher.digest(length=DIGEST_BYTES)
