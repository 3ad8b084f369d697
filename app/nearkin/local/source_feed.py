"""Read a source into a writer.

Invariant: a source that fails never ends a blob as complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

from nearkin_shared.errors import BadInput, SourceFailed
from nearkin_shared.preconditions import Precondition
from nearkin_shared.storage.committed_origins import BlobOrigin, local_origin
from nearkin_shared.validation import Progress, Source, normalize_source

if TYPE_CHECKING:
    from concurrent.futures import Future

    from nearkin.embedded.blob_transfer import BlobTransfer
    from nearkin.embedded.runner import EmbeddedWriter
    from nearkin_shared.results import PutResult


READ_BYTES = 2 * 1024 * 1024
"""The interpreter's lock is taken twice for each read, and another thread may have it: on two cores half as many reads
make a put 1 to 2 % faster, on one they cost nothing. Of 4 MiB what is hashed has left the core's cache."""


@runtime_checkable
class TreeSource(Protocol):
    """Source that writes a tree itself: it sets chunk borders and splices segments."""

    def feed(self, writer: EmbeddedWriter, blob: BlobTransfer) -> bytes:
        """Write the tree; return its digest."""


class PutItem(NamedTuple):
    """A blob to put, as `LocalPuts.put` takes it."""

    key: str
    source: Source | TreeSource
    metadata: Mapping[str, str]
    sha256: bytes | None = None
    """Digest that the caller announced."""
    created_us: int | None = None
    """Creation time of a copied version, in microseconds since 1970; None: the moment of the commit."""
    precondition: Precondition | None = None
    """Checked at the commit."""
    origin: BlobOrigin | None = None
    is_checkpoint: bool = False
    """Whether the key may be that of checkpoints."""


def feed(writer: EmbeddedWriter, item: PutItem, progress: Progress | None) -> Future[PutResult]:
    """Stream one source into the writer; return the future of its result.

    Raises BadInput, SourceFailed.
    """
    key, sha256 = item.key, item.sha256
    if sha256 is not None and (not isinstance(sha256, bytes) or len(sha256) != hashlib.sha256().digest_size):
        raise BadInput(f"key {key!r}: SHA-256 {sha256!r:.100}: want its 32 bytes")
    blob = writer.begin(key, item.metadata, sha256, item.precondition)
    blob.created_us = item.created_us
    blob.origin = None if item.origin is None else local_origin(item.origin)
    if isinstance(item.source, TreeSource):
        blob.is_tree = True
        blob.tree_digest = item.source.feed(writer, blob)
        writer.end(blob)
        return blob.done
    source = normalize_source(item.source)
    check = hashlib.sha256() if sha256 is not None else None
    with ExitStack() as files:
        if isinstance(source, Path):
            file = files.enter_context(_opened(source))
        else:
            file = BytesIO(source) if isinstance(source, bytes) else source
        name = str(source) if isinstance(source, Path) else "source"
        before = os.fstat(file.fileno()) if isinstance(source, Path) else None
        while True:
            window = writer.window()
            count = _read_into(file, window, name)
            if not count:
                break
            if check is not None:
                check.update(window[:count])
            writer.advance(blob, count)
            if progress is not None:
                progress(count)
        if before is not None:
            blob.source_changed = _has_changed(name, before, os.fstat(file.fileno()), blob.size_bytes)
    if check is not None and check.digest() != sha256:
        raise BadInput(f"key {key!r}: its SHA-256 is {check.hexdigest()}, not the one announced; nothing was stored")
    writer.end(blob)
    return blob.done


def _has_changed(name: str, before: os.stat_result, after: os.stat_result, read_bytes: int) -> bool:
    """Return whether a file changed while it was read.

    Raises SourceFailed if it was cut short.
    """
    # st_size of a file in /proc is not the size of its content, but it does not change
    if read_bytes < before.st_size != after.st_size:
        raise SourceFailed(
            f"{name}: ended after {read_bytes} bytes of {before.st_size}: it changed while it was read; nothing "
            "was stored of it: put it again"
        )
    return any(getattr(before, field) != getattr(after, field) for field in ("st_size", "st_mtime_ns", "st_ctime_ns"))


def _opened(path: Path) -> BinaryIO:
    try:
        if not path.is_file():
            raise BadInput(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        return cast("BinaryIO", path.open("rb", buffering=0))
    except OSError as err:
        raise BadInput(f"{path}: {err.strerror}") from err
    except ValueError as err:  # a NUL in it
        raise BadInput(f"{str(path)!r}: {err}") from err


def _read_into(file: Any, window: memoryview, name: str) -> int:
    """Fill the window's start from a file; 0 at its end. Uses `readinto` if the file has it."""
    window = window[:READ_BYTES]  # a `readinto` that claims more would expose bytes of earlier blobs
    try:
        if hasattr(file, "readinto"):
            count = file.readinto(window)
        else:
            data = file.read(len(window))
            if not isinstance(data, bytes | bytearray | memoryview | None):
                raise BadInput(f'{name}: gives {type(data).__name__}; open it for reading bytes, such as with "rb"')
            count = None if data is None else len(data)
            if data is not None and len(data) <= len(window):
                window[: len(data)] = data
    except OSError as err:
        reason = err.strerror or str(err) or type(err).__name__
        raise SourceFailed(f"{name}: reading it failed: {reason}; nothing was stored: put it again") from err
    except ValueError as err:  # a closed file says so in this way
        raise BadInput(f"{name}: cannot be read: {err}") from err
    if count is None:  # not the end: taken for it, half a blob would be committed as a whole one
        raise BadInput(f"{name}: has nothing to read yet; open it blocking, not non-blocking")
    if not 0 <= count <= len(window):
        raise BadInput(
            f"{name}: readinto returned {count} for a buffer of {len(window)} bytes; correct the file object"
        )
    return int(count)
