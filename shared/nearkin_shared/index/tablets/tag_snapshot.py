"""Save a tag table in a file of the index folder, and load it at open.

docs/internals/formats/tag-snapshot.md has the bytes.

Invariant: a snapshot that is damaged, of another state or of another format is no snapshot; nothing is lost with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.tag_table import NUMBER_MAX, PARTITIONS, TagTable
from nearkin_shared.types import U8, U64
from nearkin_shared.utils.frozen import frozen
from nearkin_shared.utils.private_files import open_private

FILE_NAME = "tags.nkt"
MAGIC, VERSION = b"NKI1", 2
HEADER = Struct("<4sHH16sQQ")
assert HEADER.size == 40  # docs/internals/formats/tag-snapshot.md
CHECK_BYTES = 32
PARTITION_BYTES_MAX = 1 << 32
_SIZE = Struct("<Q")
_log = logging.getLogger("nearkin")


@frozen
class TagSnapshot:
    """A tag table, and its container numbers.

    By number: uint64[n] id, 0 for none; uint8[n] level and stability.
    """

    tags: TagTable
    ids: U64
    marks: U8


class _Damaged(Exception):
    """The file is not a whole snapshot."""


def write_snapshot(folder: Path, state: bytes, snapshot: TagSnapshot) -> None:
    """Replace the snapshot of an index's folder.

    `state`: 16 bytes that name the state of the index.

    Raises: OSError.
    """
    path = folder / FILE_NAME
    fresh = path.with_suffix(".new")
    with suppress(FileNotFoundError):
        fresh.unlink()
    with os.fdopen(open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        hasher = blake3()
        for part in _parts(state, snapshot):
            hasher.update(part)
            file.write(part)
        file.write(hasher.digest())
    os.replace(fresh, path)  # without fsync: a file that a power cut left unwritten fails its check


def _parts(state: bytes, snapshot: TagSnapshot) -> Iterator[bytes]:
    yield HEADER.pack(MAGIC, VERSION, 0, state, len(snapshot.ids), len(snapshot.tags))
    yield snapshot.ids.astype("<u8").tobytes()
    yield snapshot.marks.tobytes()
    for partition in range(PARTITIONS):
        data = snapshot.tags.save_partition(partition)
        yield _SIZE.pack(len(data))
        yield data


def read_snapshot(folder: Path, state: bytes, filter_bits: int) -> TagSnapshot | None:
    """Return the snapshot of an index in this state, None if there is none."""
    path = folder / FILE_NAME
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
            return _Reader(file).read(state, filter_bits)
    except FileNotFoundError:
        return None
    except (OSError, BadInput, _Damaged) as err:
        _log.warning("%s: %s: the tags are read from the directories of all containers", path, err)
        return None


class _Reader:
    """Reads one file and its check."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size - CHECK_BYTES
        self._hasher = blake3()

    def read(self, state: bytes, filter_bits: int) -> TagSnapshot | None:
        magic, version, flags, found_state, containers, entries = HEADER.unpack(self._take(HEADER.size))
        if magic != MAGIC:
            raise _Damaged("is no snapshot of tags")
        if (version, flags) != (VERSION, 0) or found_state != state:
            return None  # of another release, or of an index before entries were restored
        if containers > NUMBER_MAX:
            raise _Damaged(f"has {containers} containers")
        ids = np.frombuffer(self._take(containers * 8), "<u8").astype(np.uint64)
        marks = np.frombuffer(self._take(containers), np.uint8)
        tags = TagTable(filter_bits)
        for partition in range(PARTITIONS):
            (size_bytes,) = _SIZE.unpack(self._take(_SIZE.size))
            if size_bytes > PARTITION_BYTES_MAX:
                raise _Damaged(f"has a partition of {size_bytes} bytes")
            tags.load_partition(partition, self._take(size_bytes))
        if self._left or self._file.read() != self._hasher.digest():
            raise _Damaged("its check fails")
        if len(tags) != entries:
            raise _Damaged(f"has {len(tags)} entries, not {entries}")
        return TagSnapshot(tags, ids, marks)

    def _take(self, size_bytes: int) -> bytes:
        """Return the next bytes; no more memory is taken than the file has bytes."""
        if size_bytes > self._left:
            raise _Damaged("is cut short")
        data = self._file.read(size_bytes)
        if len(data) != size_bytes:
            raise _Damaged("is cut short")
        self._left -= size_bytes
        self._hasher.update(data)
        return data
