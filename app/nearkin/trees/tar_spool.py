"""Open a tar archive for random access, a stream as a temporary copy.

    FILE.tar         read in place            -, a FIFO, .gz .bz2 .xz .zst     written to a temporary file, unpacked

Invariant: a stream that ends early or fails its checksum is refused, and no temporary file has a name.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from backports.zstd import ZstdDecompressor, ZstdError

from nearkin_shared.errors import BadInput, NoRoom, SourceFailed

READ_BYTES = 1 << 20
XZ_MEMORY_MAX = 512 << 20
"""Memory that a decoder of xz may take; `xz -9` needs 65 MiB."""
FREE_SHARE = 20
"""A temporary copy leaves 1/20 of its device free, so that a small archive that unpacks to a huge one fills no disk."""
FREE_CHECK_BYTES = 64 << 20
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_MAGIC_BYTES = 6
_FAILURES = (OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError, ValueError)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool:
        """Whether the end of the frame was reached."""

    @property
    def needs_input(self) -> bool:
        """Whether more output needs more input."""

    @property
    def unused_data(self) -> bytes:
        """The bytes that follow the frame."""

    def decompress(self, data: bytes, max_length: int = ...) -> bytes:
        """Return the next bytes."""


@contextmanager
def open_archive(source: str | Path | BinaryIO, temporary: Path | None = None) -> Iterator[tuple[BinaryIO, str]]:
    """Open an archive; yield a seekable file without compression, and a name for messages.

    `source` is a path, or a file that is open for reading bytes. `temporary`: folder of the copy, by default that of
    TMPDIR. Raises BadInput (no such file, damaged compression), NoRoom, SourceFailed.
    """
    if not isinstance(source, str | Path):
        name = str(getattr(source, "name", "stream"))
        with _seekable(source, name, temporary) as file:
            yield file, name
        return
    path = Path(source)
    try:
        opened = cast("BinaryIO", path.open("rb"))
    except (OSError, ValueError) as err:
        raise BadInput(f"{path}: {getattr(err, 'strerror', None) or err}") from err
    with opened, _seekable(opened, str(path), temporary) as file:
        yield file, str(path)


@contextmanager
def _seekable(source: BinaryIO, name: str, temporary: Path | None) -> Iterator[BinaryIO]:
    head = _read_exactly(source, _MAGIC_BYTES, name)
    method = next((method for magic, method in _MAGIC.items() if head.startswith(magic)), None)
    if method is None and _is_plain_file(source, len(head)):
        yield source
        return
    rest = _Prepended(head, source)
    with _temporary_file(temporary) as spool:
        _copy(_unpacked(rest, method), spool, name)
        yield cast("BinaryIO", spool)


def _read_exactly(source: BinaryIO, count: int, name: str) -> bytes:
    parts = b""
    try:
        while len(parts) < count and (piece := source.read(count - len(parts))):
            parts += piece
    except OSError as err:
        raise BadInput(f"{name}: {err.strerror or err}") from err
    return parts


def _is_plain_file(source: BinaryIO, position: int) -> bool:
    """Return whether a file can be read at any position, from its start on."""
    try:
        status = os.fstat(source.fileno())
        return stat.S_ISREG(status.st_mode) and source.tell() == position
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _temporary_file(folder: Path | None) -> Iterator[IO[bytes]]:
    with ExitStack() as files:
        try:
            spool = files.enter_context(tempfile.TemporaryFile(dir=folder))
        except OSError as err:
            raise BadInput(f"temporary folder {str(folder or tempfile.gettempdir())!r}: {err.strerror}") from err
        yield spool


def _copy(pieces: Iterator[bytes], spool: IO[bytes], name: str) -> None:
    size, checked = 0, 0
    no_room = NoRoom(
        f"{name}: its unpacked copy does not fit on the device of the temporary folder; name "
        "another one with --temporary or TMPDIR"
    )
    while True:
        try:
            piece = next(pieces, None)
        except _FAILURES as err:
            raise BadInput(f"{name}: its compressed data are damaged or cut short: {err}; nothing was stored") from err
        if piece is None:
            break
        try:
            spool.write(piece)
            size += len(piece)
            if size - checked >= FREE_CHECK_BYTES:
                spool.flush()
                checked = size
                if not has_room(spool.fileno()):
                    raise no_room
        except OSError as err:
            raise no_room from err
    try:
        spool.flush()
    except OSError as err:
        raise no_room from err


def has_room(folder: str | int) -> bool:
    """Return whether a device has FREE_SHARE of its blocks free.

    `folder`: one on the device, or an open file.
    """
    device = os.statvfs(folder)
    return device.f_bavail * FREE_SHARE >= device.f_blocks


def _unpacked(source: _Prepended, method: str | None) -> Iterator[bytes]:
    if method is None:
        yield from iter(lambda: source.read(READ_BYTES), b"")
    elif method == "gzip":
        with gzip.GzipFile(fileobj=cast("BinaryIO", source)) as file:
            yield from iter(lambda: file.read(READ_BYTES), b"")
    elif method == "bzip2":
        yield from _decompress(source, bz2.BZ2Decompressor)
    elif method == "xz":
        yield from _decompress(source, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_MAX))
    else:
        yield from _decompress(source, ZstdDecompressor)


def _decompress(source: _Prepended, create: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Unpack a stream of one or more frames. Raises EOFError if the last one is not complete."""
    decoder, data = create(), source.read(READ_BYTES)
    while True:
        piece = decoder.decompress(data, READ_BYTES)
        data = b""
        if piece:
            yield piece
        if decoder.eof:
            data = decoder.unused_data or source.read(READ_BYTES)
            if not data.strip(b"\0"):
                return
            decoder = create()
        elif decoder.needs_input:
            data = source.read(READ_BYTES)
            if not data:
                raise EOFError("the stream ends within a frame")


class _Prepended:
    """A file of which the first bytes have been read."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._head = head
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. Raises SourceFailed."""
        if self._head:
            head, self._head = self._head, b""
            if size < 0 or len(head) <= size:
                return head
            self._head = head[size:]
            return head[:size]
        try:
            return self._file.read(size)
        except OSError as err:
            raise SourceFailed(f"archive: reading it failed: {err.strerror or err}; nothing was stored") from err
