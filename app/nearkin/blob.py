"""Read a version as a binary file.

    read, readinto  ->  the piece that holds the position  <-  pieces of a range, read and verified in order

A read at the end of a piece takes the next one. A seek outside the piece reads a short range first, and the rest of
the version only if the reader continues there: the table of contents of an archive costs one short range.

Invariant (I8): only verified bytes are returned. If a version is read from its start to its end, its BLAKE3 is
compared before the last piece is returned.
"""

from __future__ import annotations

import io
import sys
from abc import abstractmethod
from contextlib import closing
from operator import index
from typing import TYPE_CHECKING, BinaryIO

from nearkin_shared.errors import NearkinError
from nearkin_shared.limits import KIB, MIB
from nearkin_shared.results import VersionInfo
from nearkin_shared.validation import Progress, write_pieces

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from nearkin_shared.reading.read_stats import ReadCosts
    from nearkin_shared.reading.restore import VerifiedPieces, VersionReader

SEEK_RANGE_BYTES = 256 * KIB
"""Range that is read first after a seek, if the reader asks for less."""
SKIP_BYTES_MAX = 4 * MIB
"""A seek forward by at most one piece reads and drops the bytes, which is faster than to open another range."""
PEEK_BYTES = 8 * KIB
_NOTHING = memoryview(b"")


class VersionFile(io.RawIOBase):
    """A version, or a range of one, as a seekable file; position 0 is the start of the range.

    `read` and `readinto` return fewer bytes than requested only at the end. At most one piece (a few MiB) is held, and
    another is read ahead. After an error a read raises the same error until `seek` is called. Iteration yields lines,
    as for every file; `pieces` yields the pieces themselves. A file is used by one thread at a time.
    """

    def __init__(self, info: VersionInfo, size_bytes: int) -> None:
        self.info = info
        self.size_bytes = size_bytes
        """Bytes of the range, not of the version."""
        self._position = 0
        self._held, self._held_end = _NOTHING, 0
        self._open_pieces: VerifiedPieces | None = None
        self.failure: NearkinError | None = None
        """Error of the last read that failed."""
        self._is_failed = False

    @abstractmethod
    def _pieces_of(self, start: int, stop: int) -> VerifiedPieces:
        """Return the verified pieces of the bytes [start, stop) of the range, exactly these bytes."""

    def pieces(self) -> VerifiedPieces:
        """Return all bytes of the range in order, a few MiB at a time, whatever the position is.

        A caller that stops early closes the iterator. Raises Corrupt, before wrong bytes are returned, and
        StoreUnavailable.
        """
        self._check_open()
        return self._pieces_of(0, self.size_bytes)

    def write_to(self, file: BinaryIO, progress: Progress | None = None) -> int:
        """Write all bytes of the range, whatever the position is; return how many.

        `progress` is called with the size of each piece. Long runs of zeros become holes of a plain file.
        """
        with closing(self.pieces()) as pieces:
            return write_pieces(pieces, file, progress)

    # --- io.RawIOBase ------------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def tell(self) -> int:
        """Return the position in the range."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position and return it; nothing is read before the next `read`."""
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence {whence!r}: want 0 (start), 1 (position) or 2 (end)")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        position = base + index(offset)
        if position < 0:
            raise ValueError(f"position {position}: want 0 or more")
        self._position = position
        self._is_failed = False
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes from the position, or all that follow.

        Fewer only at the end. Raises Corrupt, StoreUnavailable; the position stays.
        """
        limit = sys.maxsize if size is None or size < 0 else size
        views: list[memoryview] = []
        end = self._position
        while view := self._view(end, limit - (end - self._position)):
            views.append(view)
            end += len(view)
        content = b"".join(views)
        self._position = end
        return content

    def readall(self) -> bytes:
        """Return all bytes from the position."""
        return self.read()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer from the position; return the number of bytes.

        It is smaller than the buffer only at the end. Raises Corrupt, StoreUnavailable; the position stays.
        """
        target = memoryview(buffer).cast("B")
        filled = 0
        while view := self._view(self._position + filled, len(target) - filled):
            target[filled : filled + len(view)] = view
            filled += len(view)
        self._position += filled
        return filled

    def peek(self, size: int = 0, /) -> bytes:
        """Return some bytes from the position, which stays; for `readline`."""
        return bytes(self._view(self._position, max(size, PEEK_BYTES)))

    def close(self) -> None:
        """Close the file and wait for the read in progress."""
        try:
            self._drop_pieces()
        finally:
            super().close()

    def __del__(self) -> None:
        """Drop the file without `close`, which waits for a thread.

        The garbage collector may run this in a thread that holds locks. Iterators of pieces end without waiting.
        """

    # --- the piece at the position -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.info.key!r} version {self.info.version}: the file is closed; get it again")

    def _view(self, position: int, limit: int) -> memoryview:
        """Return 1 to `limit` verified bytes from `position`; none at the end, or if `limit` is 0."""
        self._check_open()
        if not limit:
            return _NOTHING
        while not 0 < self._held_end - position <= len(self._held):
            if self._is_failed and self.failure is not None:
                raise self.failure
            if position >= self.size_bytes > 0:
                return _NOTHING
            if not self._hold_next(position, limit) and position >= self.size_bytes:
                return _NOTHING
        start = len(self._held) - (self._held_end - position)
        return self._held[start : start + limit]

    def _hold_next(self, position: int, limit: int) -> bool:
        """Hold the next piece up to `position`; return False at the end of the open range."""
        ahead_bytes = position - self._held_end
        if self._open_pieces is None or not 0 <= ahead_bytes <= SKIP_BYTES_MAX:
            stop = position + max(limit, SEEK_RANGE_BYTES) if ahead_bytes else self.size_bytes
            self._drop_pieces()
            self._held_end = min(position, self.size_bytes)
            self._open_pieces = self._pieces_of(self._held_end, min(stop, self.size_bytes))
        try:
            piece = next(self._open_pieces, None)
        except BaseException as err:
            self._drop_pieces()
            if isinstance(err, NearkinError):
                self.failure, self._is_failed = err, True
            raise
        if piece is None:
            self._open_pieces = None
            return False
        self._held, self._held_end = piece, self._held_end + len(piece)
        return True

    def _drop_pieces(self) -> None:
        """Close the open range and hold nothing."""
        pieces, self._open_pieces = self._open_pieces, None
        self._held, self._held_end = _NOTHING, 0
        if pieces is not None:
            pieces.close()


class Blob(VersionFile):
    """A version of a local store as a file; each chunk is compared with its fingerprint."""

    def __init__(self, reader: VersionReader) -> None:
        super().__init__(reader.info, reader.size_bytes)
        self.costs: ReadCosts = reader.costs
        """Costs of reads so far."""
        self._reader = reader

    def _pieces_of(self, start: int, stop: int) -> VerifiedPieces:
        return self._reader.part(start, stop).pieces()
