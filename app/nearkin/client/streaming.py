"""Stream a source to the gateway, and a version from it.

Invariant (I8): neither side holds a whole blob, and both compute its digest. The last piece of a download is held
until the BLAKE3 of the whole matches, so a damaged version never looks complete.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, TypeAlias

import anyio.to_thread
from blake3 import blake3

from nearkin.client.http import Call, blob_path
from nearkin_shared.errors import BadInput, Corrupt, NearkinError, RetryableError, SourceFailed, StoreUnavailable
from nearkin_shared.formats.upload_parts import BASE_HEADER, CHECKPOINTS_HEADER, PARTS_MEDIA_TYPE, format_versions
from nearkin_shared.results import VersionInfo
from nearkin_shared.validation import Progress, Source, normalize_source

PIECE_BYTES = 1024 * 1024
COPIED_BYTES_A_SECOND = 8 * 1024 * 1024
"""Of ranges, which a gateway reads and passes on: a slow one on a shared machine."""
RESUMES_MAX = 100
"""How often one download goes on after it broke; each time at least a byte has come."""

SyncSource: TypeAlias = Source
AsyncSource: TypeAlias = Source | AsyncIterable[bytes]
SyncItems: TypeAlias = Iterable[tuple[str, Source]]
AsyncItems: TypeAlias = Iterable[tuple[str, AsyncSource]] | AsyncIterable[tuple[str, AsyncSource]]


async def each_async(items: AsyncItems) -> AsyncIterator[tuple[str, AsyncSource]]:
    """Yield the items of either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item


class Upload:
    """A source to upload, read again from its start if it can be, after a disconnect."""

    patience_seconds: float = 0.0
    """How long the gateway may be at work on ranges that it was sent, before it takes or answers more."""

    def __init__(self, source: AsyncSource, progress: Progress | None = None) -> None:
        self.idempotency_key: str = secrets.token_hex(16)
        self.digest: str = ""
        """`blake3:...` of the last complete reading."""
        self._stream: AsyncIterable[bytes] | None = None
        self._source: Path | BinaryIO | bytes = b""
        if isinstance(source, AsyncIterable):
            self._stream = source
        else:
            self._source = normalize_source(source)
        self._progress = progress
        self._told_bytes = 0
        self._touched = False
        self._start = self._position()
        self.size_bytes: int | None = self._known_bytes()

    @property
    def is_rereadable(self) -> bool:
        """Return whether the source can be read again from its start."""
        return self._stream is None and (isinstance(self._source, Path | bytes) or self._start is not None)

    @property
    def repeatable(self) -> bool:
        """Return whether it may be sent once more."""
        return self.is_rereadable or not self._touched

    def headers(self) -> dict[str, str]:
        """Return the request headers: with a size the gateway can refuse before any byte is sent."""
        return {"Idempotency-Key": self.idempotency_key, "Content-Type": "application/octet-stream"} | (
            {"Content-Length": str(self.size_bytes)} if self.size_bytes is not None else {}
        )

    def pieces(self) -> Iterator[bytes]:
        """Yield the source from its start. Raises BadInput for an unreadable or shrinking file."""
        self._touched = True
        hasher, taken = blake3(), 0
        file = self._open()
        try:
            while True:
                left = PIECE_BYTES if self.size_bytes is None else min(PIECE_BYTES, self.size_bytes - taken)
                piece = self._read(file, left) if left else b""
                if not piece:
                    break
                hasher.update(piece)
                taken += len(piece)
                yield piece
                self._report_progress(taken)
        finally:
            if isinstance(self._source, Path | bytes):
                file.close()
        if self.size_bytes is not None and taken != self.size_bytes:
            raise BadInput(f"source: ended after {taken} bytes of {self.size_bytes}: it changed while it was sent")
        self.digest = f"blake3:{hasher.hexdigest()}"

    async def async_pieces(self) -> AsyncIterator[bytes]:
        """Yield the same; files are read in a thread."""
        if self._stream is None:
            pieces = self.pieces()
            while piece := await anyio.to_thread.run_sync(next, pieces, b""):
                yield piece
            return
        self._touched = True
        hasher, taken = blake3(), 0
        async for piece in self._stream:
            hasher.update(piece)
            taken += len(piece)
            yield bytes(piece)
            self._report_progress(taken)
        self.digest = f"blake3:{hasher.hexdigest()}"

    def _position(self) -> int | None:
        """Return the position of a seekable file; None for any other source."""
        if isinstance(self._source, Path | bytes):
            return None
        try:
            return self._source.tell() if self._source.seekable() else None
        except (AttributeError, OSError, ValueError):
            return None

    def _known_bytes(self) -> int | None:
        """Return the size to send, None if unknown: 0 is the size of every file in /proc."""
        if self._stream is not None:
            return None
        if isinstance(self._source, bytes):
            return len(self._source)
        if isinstance(self._source, Path):
            try:
                if not self._source.is_file():
                    reason = "is not a regular file" if self._source.exists() else "no such file"
                    raise BadInput(f"{self._source}: {reason}")
                return self._source.stat().st_size or None
            except OSError as err:
                raise BadInput(f"{self._source}: {err.strerror}") from err
            except ValueError as err:  # a NUL in it
                raise BadInput(f"{str(self._source)!r}: {err}") from err
        return None

    def _open(self) -> BinaryIO | BytesIO:
        if isinstance(self._source, bytes):
            return BytesIO(self._source)
        if isinstance(self._source, Path):
            try:
                return self._source.open("rb", buffering=0)
            except OSError as err:
                raise BadInput(f"{self._source}: {err.strerror}") from err
        if self._start is not None:
            self._source.seek(self._start, os.SEEK_SET)
        return self._source

    def _read(self, file: BinaryIO | BytesIO, most_bytes: int) -> bytes:
        name = str(self._source) if isinstance(self._source, Path) else "source"
        try:
            piece = file.read(most_bytes)
        except OSError as err:
            reason = err.strerror or str(err) or type(err).__name__
            raise SourceFailed(f"{name}: reading it failed: {reason}; nothing was stored: put it again") from err
        except ValueError as err:  # a closed file says so in this way
            raise BadInput(f"{name}: cannot be read: {err}") from err
        if piece is None:  # not the end: taken for it, half a blob would be committed as a whole one
            raise BadInput(f"{name}: has nothing to read yet; open it blocking, not non-blocking")
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise BadInput(f'{name}: gives {type(piece).__name__}; open it for reading bytes, such as with "rb"')
        return piece

    def _report_progress(self, taken: int) -> None:
        if self._progress is not None and taken > self._told_bytes:
            self._progress(taken - self._told_bytes)
            self._told_bytes = taken


class PartsUpload(Upload):
    """A body of parts, with ranges of an earlier version and of checkpoints."""

    def __init__(self, source: Source, base: int | None, source_bytes: int, checkpoints: Sequence[int] = ()) -> None:
        """`base`: a version of the same key. `checkpoints`: of the key, ascending.

        `source_bytes`: of all these.
        """
        super().__init__(source)
        self._base, self._checkpoints = base, checkpoints
        self.patience_seconds = source_bytes / COPIED_BYTES_A_SECOND

    def headers(self) -> dict[str, str]:
        """Return the request headers."""
        headers = super().headers() | {"Content-Type": PARTS_MEDIA_TYPE}
        if self._base is not None:
            headers[BASE_HEADER] = str(self._base)
        if self._checkpoints:
            headers[CHECKPOINTS_HEADER] = format_versions(self._checkpoints)
        return headers

    def pieces(self) -> Iterator[bytes]:
        """Yield the body from its start.

        Its own digest is at its end; that of the version is another, and is not compared with it.
        """
        yield from super().pieces()
        self.digest = ""


class Download:
    """The bytes [start, stop) of a version, over as many connections as needed."""

    def __init__(self, info: VersionInfo, start: int, stop: int, prefix: str = "/v1/blobs") -> None:
        """`prefix`: of the path that reads the version."""
        self._info = info
        self._prefix = prefix
        self._position, self._stop = start, stop
        is_whole = (start, stop) == (0, info.size_bytes) and not info.is_tree
        self._hasher = blake3() if is_whole else None
        """None for a range and for a tree, whose digest is not that of all bytes: the gateway verifies each file."""
        self._held = b""
        self._skip_bytes = 0
        self._resumes = 0

    @property
    def is_complete(self) -> bool:
        """Return whether every byte has come."""
        return self._position == self._stop

    @property
    def label(self) -> str:
        """Return what is being read, for messages."""
        return f"{self._info.key!r} version {self._info.version}"

    def call(self) -> Call:
        """Return the request for what is still missing."""
        headers = {"Accept": "application/octet-stream, application/problem+json"}
        if (self._position, self._stop) != (0, self._info.size_bytes):
            headers |= {"Range": f"bytes={self._position}-{self._stop - 1}", "If-Range": f'"{self._info.digest}"'}
        return Call("GET", blob_path(self._info.key, self._prefix), {"version": str(self._info.version)}, headers)

    def on_headers(self, status: int, headers: Mapping[str, str]) -> None:
        """Check what the answer is about to send. Raises Corrupt."""
        found = headers.get("etag", "").strip('"')
        if found != self._info.digest:
            raise Corrupt(f"{self.label}: the gateway sends {found or 'no ETag'}, not {self._info.digest}")
        if headers.get("content-encoding", "identity") != "identity":
            raise Corrupt(f"{self.label}: response is compressed without request; configure the proxy not to do that")
        self._skip_bytes = self._position if status == 200 else 0
        if status == 206 and not headers.get("content-range", "").startswith(f"bytes {self._position}-"):
            raise Corrupt(f"{self.label}: asked from byte {self._position}, got {headers.get('content-range')!r}")

    def take(self, piece: bytes) -> bytes:
        """Return what may be given out now that `piece` has come; empty where all of it must wait."""
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(piece))
            self._skip_bytes -= skipped
            piece = piece[skipped:]
        piece = piece[: self._stop - self._position]
        if not piece:
            return b""
        self._position += len(piece)
        if self._hasher is None:
            return piece
        self._hasher.update(piece)
        if not self.is_complete:
            before, self._held = self._held, piece
            return before
        found = f"blake3:{self._hasher.hexdigest()}"
        if found != self._info.digest:
            raise Corrupt(f"{self.label}: digest {found}, want {self._info.digest}: get it again, then verify")
        return self._held + piece

    def on_disconnect(self, err: NearkinError | None) -> None:
        """Count a disconnect before the end of the range. Raises `err` when there were too many."""
        self._resumes += 1
        if err is not None and not isinstance(err, RetryableError):
            raise err
        if self._resumes > RESUMES_MAX:
            raise StoreUnavailable(f"{self.label}: broke {RESUMES_MAX} times, at byte {self._position}") from err
