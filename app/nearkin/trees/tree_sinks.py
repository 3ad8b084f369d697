"""Receive the bytes of a tree: a put into an open store, or a stream to a server.

Invariant: a sink passes on the bytes in the order in which they are written; borders and splices change no byte.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, BinaryIO, Protocol

from nearkin_shared.errors import BadInput
from nearkin_shared.formats.upload_parts import RECORDS_MAX, PartsEncoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter
    from nearkin_shared.results import PutResult
    from nearkin_shared.types import U32, Locations, StoredChunks

STREAM_BUFFER_BYTES = 1 << 20
COPIED_RECORDS_MAX = RECORDS_MAX // 2
"""Ranges beyond it are read from the parent and sent: half of the records are left for new bytes, 512 GiB of them."""
IDLE_SECONDS = 5.0
"""Time without bytes after which some are sent that stand for nothing."""
IDLE_BYTES = 16 << 10
"""Of them: three times what a server asks for as the least speed of a client, 1 KiB a second."""


class SupportsBorders(Protocol):
    """Receiver of the ends of chunks."""

    def end_chunk(self, *, ends_segment: bool = False) -> None:
        """End a chunk, with `ends_segment` a segment as well."""


class TreeSink(SupportsBorders, Protocol):
    """Receiver of a tree's bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes so far, spliced ones included."""

    def window(self) -> memoryview:
        """Return where the next bytes may be written; never empty."""

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written to the window."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""

    def splice(self, segments: Locations, lengths: U32) -> None:
        """Append stored segments of these lengths."""

    def take_over(self, chunks: StoredChunks) -> None:
        """Append stored chunks."""

    def copy_range(self, start: int, stop: int, source: int = 0) -> None:
        """Append the bytes [start, stop) of a parent on a server, the source of this number."""

    def keep_alive(self) -> None:
        """Note that the tree goes on, though no bytes are written."""

    def checkpoint(self, key: str, metadata: dict[str, str], end: Iterable[bytes], digest: bytes) -> Future[PutResult]:
        """Commit the bytes so far, followed by the parts of `end`, as a version of `key`."""

    def wait_for(self, done: Future[PutResult]) -> None:
        """Wait until a checkpoint is durable. Raises what went wrong."""


def write_by_windows(sink: TreeSink, data: bytes | memoryview) -> None:
    """Append bytes to a sink through its windows."""
    position = 0
    while position < len(data):
        window = sink.window()
        count = min(len(window), len(data) - position)
        window[:count] = data[position : position + count]
        sink.advance(count)
        position += count


class StoreSink:
    """Writes a tree into a put of an open store."""

    def __init__(self, writer: EmbeddedWriter, blob: BlobTransfer) -> None:
        self._blob = blob
        self._writer = writer
        self.window: Callable[[], memoryview] = writer.window
        self.end_chunk: Callable[..., None] = writer.end_chunk

    @property
    def size_bytes(self) -> int:
        """Bytes so far, spliced ones included."""
        return self._blob.size_bytes

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written to the window."""
        self._writer.advance(self._blob, count)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._writer.write(self._blob, data)

    def splice(self, segments: Locations, lengths: U32) -> None:
        """Append stored segments of these lengths."""
        self._writer.splice(self._blob, segments, lengths)

    def take_over(self, chunks: StoredChunks) -> None:
        """Append stored chunks."""
        self._writer.take_over(self._blob, chunks)

    def copy_range(self, start: int, stop: int, source: int = 0) -> None:
        """Refuse: segments are taken over from a parent in this store. Raises BadInput."""
        raise BadInput(f"bytes {start} to {stop} of a parent cannot be copied: it has no segments here")

    def keep_alive(self) -> None:
        """Do nothing: an open store waits as long as it takes."""

    def checkpoint(self, key: str, metadata: dict[str, str], end: Iterable[bytes], digest: bytes) -> Future[PutResult]:
        """Commit the bytes so far, followed by the parts of `end`, as a version of `key`."""
        return self._writer.checkpoint(self._blob, key, metadata, end, digest)

    def seek_no_bases(self) -> None:
        """Store entries of checkpoints without deltas, for a tree that has no predecessor.

        Their neighbours are those of the checkpoint before, and behind these are contents, which would be decoded and
        tried: a quarter of the time of a checkpoint.
        """
        self._blob.seeks_bases = False

    def wait_for(self, done: Future[PutResult]) -> None:
        """Wait until a checkpoint is durable. Raises what went wrong."""
        self._writer.wait_for(done)


class StreamSink:
    """Writes a tree to a file, such as a pipe to an upload. `close` writes what is buffered."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = memoryview(bytearray(STREAM_BUFFER_BYTES))
        self._used = 0
        self.size_bytes: int = 0

    def window(self) -> memoryview:
        """Return where the next bytes may be written; never empty."""
        if self._used == len(self._buffer):
            self.flush()
        return self._buffer[self._used :]

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written to the window."""
        self._used += count
        self.size_bytes += count

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        write_by_windows(self, data)

    def end_chunk(self, *, ends_segment: bool = False) -> None:
        """Do nothing: the server chooses the borders of chunks."""

    def splice(self, segments: Locations, lengths: U32) -> None:
        """Refuse: a server takes no segments of earlier versions. Raises BadInput."""
        raise BadInput("segments of an earlier version cannot be taken over through a server")

    def take_over(self, chunks: StoredChunks) -> None:
        """Refuse: a server takes no chunks of earlier versions. Raises BadInput."""
        raise BadInput("chunks of an earlier version cannot be taken over through a server")

    def copy_range(self, start: int, stop: int, source: int = 0) -> None:
        """Refuse: the stream has bytes alone. Raises BadInput."""
        raise BadInput(f"bytes {start} to {stop} of a parent cannot be copied into a stream of bytes")

    def keep_alive(self) -> None:
        """Do nothing: files are read all the time, since all bytes are sent."""

    def checkpoint(self, key: str, metadata: dict[str, str], end: Iterable[bytes], digest: bytes) -> Future[PutResult]:
        """Refuse: a server takes no checkpoints. Raises BadInput."""
        raise BadInput("a checkpoint cannot be stored through a server")

    def wait_for(self, done: Future[PutResult]) -> None:
        """Return: there are no checkpoints."""

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.write(self._buffer[: self._used])
        self._used = 0


class PartsSink(StreamSink):
    """Writes a tree as a body of parts, for a server that has its parent.

    `end` completes the body.
    """

    def __init__(self, file: BinaryIO, read_parent: Callable[[int, int], bytes]) -> None:
        """Begin the body.

        `read_parent`: returns bytes of the parent, in place of ranges beyond the number that a body may have.
        """
        super().__init__(file)
        self._encoder = PartsEncoder(file.write)
        self._read_parent = read_parent
        self._sent_at = time.monotonic()

    def copy_range(self, start: int, stop: int, source: int = 0) -> None:
        """Append the bytes [start, stop) of the sources, which are end to end."""
        if self._encoder.records >= COPIED_RECORDS_MAX:
            while start < stop:
                data = self._read_parent(start, min(stop, start + STREAM_BUFFER_BYTES))
                self.write(data)
                start += len(data)
            return
        self.flush()
        self._encoder.add_copy(start, stop)
        self.size_bytes += stop - start

    def keep_alive(self) -> None:
        """Send bytes that stand for nothing if none were sent for IDLE_SECONDS.

        A silent client would be taken for a dead one.
        """
        now = time.monotonic()
        if now - self._sent_at >= IDLE_SECONDS and self._encoder.records < COPIED_RECORDS_MAX:
            self.flush()
            self._encoder.add_idle(IDLE_BYTES)
            self._file.flush()
            self._sent_at = now

    def flush(self) -> None:
        """Write what is buffered."""
        if self._used:
            self._encoder.add_data(self._buffer[: self._used])
            self._used = 0
            self._sent_at = time.monotonic()

    def end(self, digest: bytes) -> None:
        """End the body. `digest`: of the tree."""
        self.flush()
        self._encoder.end(self.size_bytes, digest)
