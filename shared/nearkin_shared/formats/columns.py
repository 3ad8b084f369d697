"""Pack a table as one compressed run of columns.

    | rows u32 | stored u32 | zstd frame of the byte planes |

Each column is split into byte planes (all lowest bytes, then all second bytes, ...): high planes of small numbers are
runs of zeros, so that a chunk's length or a recipe's run takes 1 to 2 bytes (docs/internals/formats/columns.md).

Invariant: `unpack` returns the dtypes and rows that were packed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

import numpy as np
from backports.zstd import CompressionParameter, compress
from blake3 import blake3
from numpy.typing import NDArray

from nearkin_shared.errors import Corrupt
from nearkin_shared.kernels.zstd_frames import decode_frame

LEVEL = 12
"""Level 12 takes under 2 ms for a directory of a few KiB and makes it 4 % smaller than level 3."""
CHECK_BYTES = 8
FEW_BYTES = 64
FEW_ENTRIES = 4096
"""Small tables of which the frame is kept, a megabyte: those of blobs of one segment repeat. A frame takes 50 us."""

_HEAD = Struct("<II")
assert _HEAD.size == 8  # docs/internals/formats/columns.md

Column = NDArray[Any]


def check_bytes(*parts: bytes | memoryview | NDArray[np.uint8]) -> bytes:
    """Return the 8-byte checksum (BLAKE3, truncated) of the parts in order."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(length=CHECK_BYTES)


def pack(columns: Sequence[Column]) -> bytes:
    """Pack columns of equal length and one dimension; the caller fixes the dtypes."""
    rows = len(columns[0])
    if any(len(column) != rows for column in columns):
        raise ValueError(f"columns of {[len(column) for column in columns]} rows: want one length")
    planes = b"".join(
        np.ascontiguousarray(c).view(np.uint8).reshape(rows, c.dtype.itemsize).T.tobytes() for c in columns if rows
    )
    compressed = _compress_few if len(planes) <= FEW_BYTES else _compress
    frame = compressed(planes) if rows else b""
    return _HEAD.pack(rows, len(frame)) + frame


def pack_row(row: bytes) -> bytes:
    """Return what `pack` does for columns of one entry, whose bytes are given in order."""
    frame = _compress_few(row) if len(row) <= FEW_BYTES else _compress(row)
    return _HEAD.pack(1, len(frame)) + frame


def _compress(planes: bytes) -> bytes:
    return compress(planes, options={CompressionParameter.compression_level: LEVEL})


_compress_few = lru_cache(FEW_ENTRIES)(_compress)


def unpack(data: memoryview, dtypes: Sequence[np.dtype[Any]], rows_max: int, what: str) -> tuple[list[Column], int]:
    """Return the columns and the number of bytes of `data` that they used.

    Raises Corrupt, with the name `what`; more than `rows_max` rows are refused before memory is allocated.
    """
    try:
        rows, stored_bytes = _HEAD.unpack_from(data)
    except struct.error as err:
        raise Corrupt(f"{what}: truncated before a table") from err
    end = _HEAD.size + stored_bytes
    if rows > rows_max or end > len(data) or (not rows and stored_bytes):
        raise Corrupt(f"{what}: a table of {rows} rows in {stored_bytes} bytes; at most {rows_max} in {len(data)}")
    raw_bytes = rows * sum(dtype.itemsize for dtype in dtypes)
    planes = inflate(data[_HEAD.size : end], raw_bytes, what) if rows else np.zeros(0, np.uint8)
    columns: list[Column] = []
    position = 0
    for dtype in dtypes:
        width = dtype.itemsize
        plane = planes[position : position + rows * width].reshape(width, rows)
        columns.append(np.ascontiguousarray(plane.T).view(dtype).reshape(rows))
        position += rows * width
    return columns, end


def inflate(frame: bytes | memoryview, raw_bytes: int, what: str) -> NDArray[np.uint8]:
    """Decompress one zstd frame of `raw_bytes`; allocates no more. Raises Corrupt."""
    raw = np.empty(raw_bytes, np.uint8)
    decode_frame(frame, raw, what)
    return raw
