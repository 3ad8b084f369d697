"""Write files with holes for zeros.

    data | zeros, 64 KiB or more | data      ->      data | hole | data     a hole takes no write and no space:
                                                                            half of a disk image

Invariant: the file reads back as the bytes that were written, and has their length.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from io import SEEK_CUR, BufferedRandom, BufferedWriter, FileIO, RawIOBase
from types import TracebackType
from typing import BinaryIO, Self

from nearkin_shared.errors import BadInput
from nearkin_shared.limits import KIB

HOLE_BYTES = 64 * KIB
"""Zeros are looked for in pieces of the file of this size, which begin at multiples of it."""
_ZEROS = bytes(HOLE_BYTES)


class Output:
    """A file that takes bytes; zeros become holes where it ends, if it can have them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._may_have_holes = grows(file)
        self._position = file.tell() if self._may_have_holes else 0
        self._behind_hole = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the file as long as what was written; more may follow."""
        if self._behind_hole:
            self._file.truncate(self._position)

    def write(self, piece: memoryview) -> None:
        """Write all of uint8 `piece`.

        Raises BadInput for a file that accepts no bytes without an error, OSError.
        """
        if not self._may_have_holes:
            _write(self._file, piece)
            return
        for zeros, run in _runs(piece, self._position):
            if zeros:
                self._file.seek(len(run), SEEK_CUR)
            else:
                _write(self._file, run)
            self._position += len(run)
            self._behind_hole = zeros


def grows(file: BinaryIO) -> bool:
    """Return whether this is a plain file of the system whose position is its end.

    Skipped bytes read as zeros there. A file opened for appending is excluded: it writes at its current end.
    """
    raw = getattr(file, "raw", file)
    if type(file) not in (FileIO, BufferedWriter, BufferedRandom) or type(raw) is not FileIO:
        return False
    try:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_APPEND:
            return False
        file.flush()
        return file.tell() == os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # closed, or not to be written: writing says so
        return False


def _runs(piece: memoryview, position: int) -> Iterator[tuple[bool, memoryview]]:
    """Yield (whether it is a hole, its bytes): runs of `piece` at `position` of the file."""
    start, at = 0, -position % HOLE_BYTES
    hole = False
    while at + HOLE_BYTES <= len(piece):
        if _all_zero(piece, at) is not hole:
            if at > start:
                yield hole, piece[start:at]
            start, hole = at, not hole
        at += HOLE_BYTES
    if hole and at > start:
        yield True, piece[start:at]
        start = at
    if start < len(piece):
        yield False, piece[start:]


def _all_zero(piece: memoryview, at: int) -> bool:
    """Return whether HOLE_BYTES from `at` on are zeros; three bytes rule out most data."""
    end = at + HOLE_BYTES
    if piece[at] or piece[end - 1] or piece[at + HOLE_BYTES // 2]:
        return False
    return bytes(piece[at:end]) == _ZEROS


def _write(file: BinaryIO, piece: memoryview) -> None:
    left = piece
    while left:  # a raw file may take less than it is given
        taken = file.write(left)
        if taken is None and not isinstance(file, RawIOBase):
            return  # who does not count took all; of a raw file None means that it would have to wait
        if not taken:
            raise BadInput("output: takes no more bytes; open it blocking, not non-blocking")
        left = left[taken:]
