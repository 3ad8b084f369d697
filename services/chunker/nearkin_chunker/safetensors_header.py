"""Read where the tensors of a safetensors file start and end.

| size of the header u64 | header, JSON: {name: {dtype, shape, data_offsets: [start, stop]}, ...} | tensors ... |

Invariant: a header that is too large, damaged or inconsistent gives no borders, and the file is cut like any other.
"""

from __future__ import annotations

import json

from nearkin_shared.limits import KIB
from nearkin_shared.types import U8

HEADER_BYTES_MAX = 512 * KIB
"""Some 4,000 tensors. The carry between two batches holds an undecided item of so many bytes."""
WANTED_BYTES_MAX = 8 + HEADER_BYTES_MAX
TENSOR_BYTES_MIN = 64 * KIB
"""Smaller tensors share a stretch with their neighbours."""
TENSORS_MAX = 16384
_SIZE_MAX = 1 << 62


def header_bytes(data: U8) -> int:
    """Return the bytes up to the first tensor if an item may be a safetensors file, else 0."""
    if data[8] != ord("{"):
        return 0
    size = int.from_bytes(data[:8].tobytes(), "little")
    return 8 + size if 2 <= size <= HEADER_BYTES_MAX else 0


def tensor_borders(data: U8) -> tuple[int, ...]:
    """Return the sizes of header and tensors; empty if this is no safetensors file."""
    start = header_bytes(data)
    if not start or len(data) < start:
        return ()
    try:
        header = json.loads(data[8:start].tobytes())
        spans = sorted(tuple(value["data_offsets"]) for name, value in header.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
    return _stretches(start, spans) if 0 < len(spans) <= TENSORS_MAX else ()


def _stretches(start: int, spans: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of stretches; empty if the spans leave gaps or overlap."""
    sizes, open_bytes, reached = [start], 0, 0
    for span in spans:
        if len(span) != 2 or type(span[0]) is not int or type(span[1]) is not int or span[0] != reached:
            return ()
        if not reached <= span[1] <= _SIZE_MAX:
            return ()
        size, reached = span[1] - span[0], span[1]
        if size >= TENSOR_BYTES_MIN and open_bytes:
            sizes.append(open_bytes)
            open_bytes = 0
        open_bytes += size
        if open_bytes >= TENSOR_BYTES_MIN:
            sizes.append(open_bytes)
            open_bytes = 0
    return tuple([*sizes, open_bytes] if open_bytes else sizes)
