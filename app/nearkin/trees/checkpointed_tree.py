"""Send the new files of a tree to a server as checkpoints, while the tree is read.

    new file   -> checkpoint in progress: its bytes and its entry     both -> the order of the whole tree,
    old file   -> nothing is sent                                              as ranges of sources

A checkpoint is a tree of the new files since the one before; it may end inside a file, where the next one begins. The
whole tree is made of ranges of the parents and of the checkpoints at the end; new bytes that were not sent yet are part
of it.

Invariant: a checkpoint has the entries of all its bytes, so that the next run finds each file that it has.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from queue import Full, Queue
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from nearkin.trees.file_content import remaining
from nearkin.trees.parent_tree import format_continued
from nearkin.trees.tree_sinks import IDLE_SECONDS, STREAM_BUFFER_BYTES, StreamSink, write_by_windows
from nearkin.trees.tree_writer import TreeWriter
from nearkin_shared.errors import BadInput, SourceFailed
from nearkin_shared.formats.tree_entry_group import DIGEST_BYTES
from nearkin_shared.formats.tree_layout import tree_digest
from nearkin_shared.formats.upload_parts import CHECKPOINTS_MAX

if TYPE_CHECKING:
    from nearkin.trees.file_content import FileProgress, PartialFile
    from nearkin_shared.formats.tree_entry_group import TreeEntry
    from nearkin_shared.results import PutResult
    from nearkin_shared.types import U32, Locations, StoredChunks

HELD_BYTES_MAX = 16 << 20
"""New bytes up to it are held, and sent with the tree: few changes need no checkpoint."""
QUEUED_PIECES_MAX = 16
"""Of up to STREAM_BUFFER_BYTES each."""
CHECKPOINTS_SPARE = 64
"""Of CHECKPOINTS_MAX, for checkpoints that no schedule makes."""
FULL_SECONDS = 0.2
"""So often it is looked whether the upload that takes no bytes has failed."""


class SourceRange(NamedTuple):
    """Bytes [start, stop) of a source of the tree."""

    source: int
    start: int
    stop: int


class SourceRanges:
    """The bytes of a tree as ranges, in order; 24 bytes of memory each."""

    def __init__(self) -> None:
        self._fields = array("Q")

    def __iter__(self) -> Iterator[SourceRange]:
        fields = self._fields
        for row in range(0, len(fields), 3):
            yield SourceRange(*fields[row : row + 3])

    def add(self, source: int, start: int, stop: int) -> None:
        """Append a range."""
        fields = self._fields
        if fields and fields[-3] == source and fields[-1] == start:
            fields[-1] = stop
        else:
            fields.extend((source, start, stop))


class OutgoingCheckpoint:
    """The bytes of one checkpoint.

    An upload reads them in a thread of its own once they are many.
    """

    def __init__(self, send: Callable[[BinaryIO], PutResult]) -> None:
        """`send`: uploads the file, which ends with the checkpoint."""
        self.done: Future[PutResult] = Future()
        self.held = bytearray()
        """All bytes, until the upload begins."""
        self._send = send
        self._queue: Queue[bytes] = Queue(QUEUED_PIECES_MAX)
        self._thread: threading.Thread | None = None
        self._is_aborted = False

    @property
    def is_begun(self) -> bool:
        """Whether the upload has begun."""
        return self._thread is not None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises what ended the upload."""
        if not len(data):  # an empty piece is the end
            return
        if self._thread is not None:
            self._pass_on(bytes(data))
            return
        self.held += data
        if len(self.held) > HELD_BYTES_MAX:
            self._begin()

    def end(self) -> None:
        """End the checkpoint, which is durable once `done` is resolved.

        Raises what ended the upload.
        """
        if self._thread is None:
            self._begin()
        self._pass_on(b"")

    def abort(self) -> None:
        """End the upload, of which nothing is stored."""
        self._is_aborted = True
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._queue.put(b"", timeout=FULL_SECONDS)
                except Full:
                    continue
                self._thread.join(FULL_SECONDS)

    def join(self) -> None:
        """Wait until the upload has ended, whatever its result is."""
        if self._thread is not None:
            self._thread.join()

    def read(self, _count: int = -1) -> bytes:
        """Return the next bytes; nothing at the end. Raises SourceFailed after `abort`."""
        piece = self._queue.get()
        if self._is_aborted:
            raise SourceFailed("checkpoint: the backup was ended")
        return piece

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="nearkin-checkpoint", daemon=True)
        self._thread.start()
        held, self.held = memoryview(self.held), bytearray()
        for start in range(0, len(held), STREAM_BUFFER_BYTES):
            self._pass_on(bytes(held[start : start + STREAM_BUFFER_BYTES]))

    def _pass_on(self, piece: bytes) -> None:
        while True:
            try:
                self._queue.put(piece, timeout=FULL_SECONDS)
            except Full:
                if not self.done.done():
                    continue
            if self.done.done():  # before its end: only an error
                self.done.result()
            return

    def _run(self) -> None:
        try:
            self.done.set_result(self._send(cast("BinaryIO", self)))
        except BaseException as err:
            self.done.set_exception(err)


class CheckpointSink:
    """Receives a tree: sends new bytes as checkpoints, and notes where all bytes are."""

    def __init__(self, send: Callable[[BinaryIO, int, str], PutResult], sources: int) -> None:
        """Begin the tree.

        `send`: uploads a checkpoint, behind so many new bytes, and behind the start of a file or not (CONTINUES_FIELD).
        `sources`: how many there are before these checkpoints.
        """
        self._send = send
        self._sources = sources
        self.ranges = SourceRanges()
        self.size_bytes: int = 0
        """Bytes so far, those of parents included."""
        self.ended: list[OutgoingCheckpoint] = []
        self._new_bytes = 0
        self._written_at = time.monotonic()
        self._begin()

    @property
    def is_full(self) -> bool:
        """Whether there are as many checkpoints as a schedule may make.

        The rest is for those that end by themselves: an idle upload, the last one.
        """
        return len(self.ended) + self._sources >= CHECKPOINTS_MAX - CHECKPOINTS_SPARE

    def _begin(self, continues: str = "") -> None:
        before = self._new_bytes
        self.last = OutgoingCheckpoint(lambda file: self._send(file, before, continues))
        self._stream = StreamSink(cast("BinaryIO", self.last))
        self._tree = TreeWriter(self._stream, b"", "")

    def window(self) -> memoryview:
        """Return where the next bytes may be written; never empty."""
        return self._stream.window()

    def advance(self, count: int) -> None:
        """Take `count` new bytes that were written to the window."""
        start = self._stream.size_bytes
        self._stream.advance(count)
        self.ranges.add(self._sources + len(self.ended), start, start + count)
        self.size_bytes += count
        self._new_bytes += count
        self._written_at = time.monotonic()

    def write(self, data: bytes | memoryview) -> None:
        """Append new bytes."""
        write_by_windows(self, data)

    def add(self, entry: TreeEntry) -> None:
        """Add the entry of the file whose content are the last new bytes."""
        self._tree.add(entry)

    def end_inside(self, partial: PartialFile, part: TreeEntry) -> Future[PutResult]:
        """End the checkpoint inside a file; the next one begins there.

        `part`: the entry of the bytes that this checkpoint has of it. Returns as `end_checkpoint`.
        """
        self._tree.add(part)
        self._tree.hash_state = partial.hash_state
        self._end_last(format_continued(partial.entry.content_bytes, partial.entry.digest))
        return self.ended[-1].done

    def begin_inside(self, done_bytes: int, digest: bytes) -> None:
        """Begin a checkpoint inside a file of which earlier ones have `done_bytes`."""
        begin = self._end_last if self._tree.entries else self._begin
        begin(format_continued(done_bytes, digest))

    def end_chunk(self, *, ends_segment: bool = False) -> None:
        """Do nothing: the server chooses the borders of chunks."""

    def splice(self, segments: Locations, lengths: U32) -> None:
        """Refuse: a server takes no segments of earlier versions. Raises BadInput."""
        raise BadInput("segments of an earlier version cannot be taken over through a server")

    def take_over(self, chunks: StoredChunks) -> None:
        """Refuse: a server takes no chunks of earlier versions. Raises BadInput."""
        raise BadInput("chunks of an earlier version cannot be taken over through a server")

    def copy_range(self, start: int, stop: int, source: int = 0) -> None:
        """Append the bytes [start, stop) of a source."""
        self.ranges.add(source, start, stop)
        self.size_bytes += stop - start

    def keep_alive(self) -> None:
        """End the checkpoint if no bytes were sent for IDLE_SECONDS.

        A silent client would be taken for a dead one.
        """
        is_idle = self.last.is_begun and time.monotonic() - self._written_at >= IDLE_SECONDS
        if is_idle and (self._tree.entries or not self.ended):
            self._end_last()

    def checkpoint(self, key: str, metadata: dict[str, str], end: Iterable[bytes], digest: bytes) -> Future[PutResult]:
        """Refuse: a checkpoint has the new files alone. Raises BadInput."""
        raise BadInput("a checkpoint of a whole tree cannot be stored through a server")

    def end_checkpoint(self) -> Future[PutResult] | None:
        """End the checkpoint; the result is resolved once it is durable.

        Without new files, and where there are too many, it is the one before; None if this run made none.
        """
        if (self.ended and not self._tree.entries) or self.is_full:
            return self.ended[-1].done if self.ended else None
        self._end_last()
        return self.ended[-1].done

    def finish(self) -> None:
        """End a checkpoint that is being sent; wait for all. Raises what went wrong."""
        self._stream.flush()
        if self.last.is_begun:
            self._end_last()
        for outgoing in self.ended:
            outgoing.done.result()

    def _end_last(self, continues: str = "") -> None:
        self._tree.finish(0)
        self._stream.flush()
        self.last.end()
        self.ended.append(self.last)
        self._begin(continues)

    def wait_for(self, done: Future[PutResult]) -> None:
        """Wait until a checkpoint is durable. Raises what went wrong."""
        done.result()

    def abort(self) -> None:
        """End the upload of a checkpoint that has not ended, and wait for those that have.

        None of them is stored once this has returned: a late one would follow the deletion of the others.
        """
        self.last.abort()
        for outgoing in self.ended:
            outgoing.join()


class CheckpointedTree(TreeWriter):
    """Writes a tree whose new files are sent as checkpoints."""

    def __init__(self, sink: CheckpointSink, root: bytes, host: str) -> None:
        super().__init__(sink, root, host)
        self._checkpoints = sink
        self._is_new = False
        """Whether bytes of the next entry were read."""
        self._done_bytes = 0
        """Of the file that is being read, in earlier checkpoints."""
        self._ending: Iterable[bytes] = ()
        self.ending_bytes: int = 0
        """Of the parts behind the contents."""

    @property
    def group_bytes(self) -> int:
        """Bytes of entries that each checkpoint writes again: none."""
        return 0

    def read_content(
        self, descriptor: int, extents: tuple[tuple[int, int], ...], progress: FileProgress | None = None
    ) -> tuple[int, bytes, OSError | None]:
        """Write extents of a file. Returns as `TreeWriter.read_content`."""
        self._done_bytes = 0 if progress is None else progress.done_bytes
        if progress is not None and progress.done_bytes:
            self._checkpoints.begin_inside(progress.done_bytes, progress.hasher.digest(length=DIGEST_BYTES))
        result = super().read_content(descriptor, extents, progress)
        self._is_new = result[0] > 0
        return result

    def add(self, entry: TreeEntry) -> None:
        """Add an entry whose content, if any, has been written."""
        if self._is_new:  # before a checkpoint may end
            self._checkpoints.add(self._part_of(entry))
            self._is_new = False
        super().add(entry)

    def checkpoint(
        self, key: str, metadata: dict[str, str], unread: int, partial: PartialFile | None = None
    ) -> Future[PutResult] | None:
        """Make the new files durable. Returns as `TreeWriter.checkpoint`."""
        if partial is None or self._checkpoints.is_full:
            return self._checkpoints.end_checkpoint()
        done = self._checkpoints.end_inside(partial, self._part_of(partial.entry))
        self._done_bytes = partial.entry.content_bytes
        return done

    def _part_of(self, entry: TreeEntry) -> TreeEntry:
        """Return an entry with the content alone that earlier checkpoints do not have."""
        if not self._done_bytes:
            return entry
        stretches = ((0, entry.size),) if entry.extents is None else entry.extents
        return entry._replace(extents=remaining(stretches, self._done_bytes))

    def finish(self, unread: int) -> bytes:
        """Make groups, index and footer, which `ending` returns; return the digest of the tree."""
        if self._rows:
            self._end_group()
        end = self._end(self._groups, self._summary_of(unread))
        self._ending = chain(self._plain_blocks(), [end])
        self.ending_bytes = sum(group.block_bytes for group in self._groups) + len(end)
        return tree_digest(end)

    def ending(self) -> Iterable[bytes]:
        """Return the parts of the tree behind its contents, once."""
        return self._ending
