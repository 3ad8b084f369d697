"""Columns: arrays as one compressed run. Invariant: what `unpack` returns has the dtypes and counts that were packed.

    | count u32 ... (one per column) | raw u32 | stored u32 | zstd frame of the byte planes |

Each column is split into byte planes (all lowest bytes, then all second bytes, ...): high planes of small numbers are
runs of zeros, which is what brings a chunk's length or a recipe's run down to 1 to 2 bytes (docs/formats/columns.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error as StructError
from typing import Any

import numpy as np
from backports.zstd import CompressionParameter, ZstdDecompressor, ZstdError, compress, get_frame_info
from blake3 import blake3
from numpy.typing import NDArray

from nearkin.errors import Corrupt

LEVEL = 12
"""Directories are a few KiB: level 12 costs under 2 ms a container and takes 4 % more off them than level 3."""
COLUMN_BYTES_MAX = 256 * 1024 * 1024
CHECK_BYTES = 8

_COUNT = Struct("<I")
_SIZES = Struct("<II")

Column = NDArray[Any]


def check_bytes(*parts: bytes | memoryview | NDArray[np.uint8]) -> bytes:
    """Return the 8-byte checksum (BLAKE3, truncated) of the parts in order."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest(length=CHECK_BYTES)


def pack(columns: Sequence[Column]) -> bytes:
    """Return the packed columns; each is one-dimensional, its dtype fixed by the format that calls this."""
    planes = b"".join(
        np.ascontiguousarray(c).view(np.uint8).reshape(len(c), c.dtype.itemsize).T.tobytes() for c in columns if len(c)
    )
    frame = compress(planes, options={CompressionParameter.compression_level: LEVEL}) if planes else b""
    counts = b"".join(_COUNT.pack(len(c)) for c in columns)
    return counts + _SIZES.pack(len(planes), len(frame)) + frame


def unpack(data: memoryview, dtypes: Sequence[np.dtype[Any]], what: str) -> tuple[list[Column], int]:
    """Return the columns and how many bytes of `data` they took. Raises Corrupt, naming `what`."""
    try:
        counts = [_COUNT.unpack_from(data, 4 * i)[0] for i in range(len(dtypes))]
        raw_bytes, stored_bytes = _SIZES.unpack_from(data, 4 * len(dtypes))
    except StructError as err:
        raise Corrupt(f"{what}: cut short in its column counts") from err
    start = 4 * len(dtypes) + _SIZES.size
    expected = sum(count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True))
    if raw_bytes != expected or raw_bytes > COLUMN_BYTES_MAX or start + stored_bytes > len(data):
        raise Corrupt(f"{what}: column sizes {raw_bytes} and {stored_bytes} do not fit")
    planes = inflate(data[start : start + stored_bytes], raw_bytes, what) if raw_bytes else b""
    columns: list[Column] = []
    position = 0
    for count, dtype in zip(counts, dtypes, strict=True):
        width = dtype.itemsize
        plane = np.frombuffer(planes, np.uint8, count * width, position).reshape(width, count)
        columns.append(np.ascontiguousarray(plane.T).view(dtype).reshape(count))
        position += count * width
    return columns, start + stored_bytes


def inflate(frame: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """Return the `raw_bytes` that one zstd frame holds; never allocates more. Raises Corrupt."""
    decompressor = ZstdDecompressor()
    try:
        # The announced size bounds what libzstd writes, and lets it write into one buffer: a third faster than growing.
        announced = get_frame_info(frame).decompressed_size
        raw = decompressor.decompress(frame) if announced == raw_bytes else b""
    except ZstdError as err:
        raise Corrupt(f"{what}: {err}") from err
    if len(raw) != raw_bytes or not decompressor.eof or decompressor.unused_data:
        raise Corrupt(f"{what}: its frame does not hold the {raw_bytes} bytes that were announced")
    return raw
