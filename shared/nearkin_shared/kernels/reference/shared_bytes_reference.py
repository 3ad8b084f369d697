"""Define the count of shared bytes in plain Python.

Invariant: bytes counted as shared exist, byte for byte, in the base.

How much a base is worth to a chunk must be known before a block is encoded with it, and for many candidates at a time.

    bases    |8 bytes|8 bytes|...     every eighth position into a table, by hash; the last one with a hash wins
    target   at each position: the diagonal of the last match, else the table -> extend both ways -> 16 bytes or more

Positions that find nothing for long are taken in growing steps: data that share nothing cost little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.features_reference import check_chunks
from nearkin_shared.kernels.reference.scatter_copy_reference import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from nearkin_shared.kernels.reference.features_reference import Payload

STRIDE: Final = 8
MATCH_MIN: Final = 16
STEP_LOG2: Final = 6
MULTIPLIER: Final = 0x9E3779B185EBCA87
TABLE_BITS_MIN: Final = 8
TABLE_BITS_MAX: Final = 20
"""4 MiB of table; more than 8 MiB of bases in one group are found less well."""
GROUP_BYTES_MAX: Final = 1 << 33
"""An entry of the table is 32 bits, one at least of which is not for the position, in units of STRIDE."""

_MASK64 = (1 << 64) - 1


def check_side(
    name: str, payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], bounds: NDArray[np.uint32]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the side's bytes and arrays, after a bounds check."""
    data, offsets, lengths = check_chunks(payload, offsets, lengths)
    return data, offsets, lengths, check_side_bounds(name, bounds, len(lengths))


def check_side_bounds(name: str, bounds: NDArray[np.uint32], chunks: int) -> NDArray[np.uint32]:
    """Return the bounds of a side's groups, once they ascend from 0 to all of its chunks."""
    if not isinstance(bounds, np.ndarray) or bounds.dtype != np.uint32 or bounds.ndim != 1 or not len(bounds):
        found = f"{bounds.dtype}{list(bounds.shape)}" if isinstance(bounds, np.ndarray) else type(bounds).__name__
        raise BadInput(f"{name} bounds are {found}: give a one-dimensional array of uint32, one entry at least")
    bounds = np.ascontiguousarray(bounds)
    if bounds[0] or int(bounds[-1]) != chunks or np.any(bounds[1:] < bounds[:-1]):
        raise BadInput(f"{name} bounds end at {int(bounds[-1])}: want an ascending array from 0 to {chunks}")
    return bounds


def check_groups(
    target_bounds: NDArray[np.uint32], base_bounds: NDArray[np.uint32], base_lengths: NDArray[np.uint32]
) -> None:
    """Refuse sides of different numbers of groups, and what no entry of a table can name."""
    if len(target_bounds) != len(base_bounds):
        raise BadInput(f"{len(target_bounds) - 1} groups of targets, {len(base_bounds) - 1} of bases: want as many")
    reached = np.append(0, np.cumsum(base_lengths, dtype=np.int64))
    most = int(np.diff(reached[base_bounds]).max(initial=0))
    if most > GROUP_BYTES_MAX:
        raise BadInput(f"a group of {most} bytes of bases: want at most {GROUP_BYTES_MAX}")


def table_bits(lengths: NDArray[np.uint32], bounds: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return uint32[g]: log2 of the size of each group's table.

    A table has an entry for each position kept, or a few more.
    """
    reached = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths, dtype=np.uint64)])
    kept = np.diff(reached[bounds]) // STRIDE
    bits = np.frexp(kept.astype(np.float64))[1]
    return np.minimum(np.maximum(bits, TABLE_BITS_MIN), TABLE_BITS_MAX).astype(np.uint32)


def shared_bytes(
    targets: Payload,
    target_offsets: NDArray[np.uint64],
    target_lengths: NDArray[np.uint32],
    target_bounds: NDArray[np.uint32],
    buffers: Sequence[Buffer],
    which: NDArray[np.int32],
    base_offsets: NDArray[np.uint64],
    base_lengths: NDArray[np.uint32],
    base_bounds: NDArray[np.uint32],
) -> NDArray[np.uint32]:
    """Return the shared bytes; shapes, units and errors as in `_overlap.pyi`."""
    data, target_offsets, target_lengths, target_bounds = check_side(
        "target", targets, target_offsets, target_lengths, target_bounds
    )
    pieces = pieces_of(buffers, which, base_offsets, base_lengths)
    base_bounds = check_side_bounds("base", base_bounds, len(pieces))
    check_groups(target_bounds, base_bounds, base_lengths)
    bases = list(map(bytes, pieces))
    rows: list[tuple[int, int, int, int]] = []
    for group, bits in enumerate(table_bits(base_lengths, base_bounds).tolist()):
        numbers = range(int(base_bounds[group]), int(base_bounds[group + 1]))
        chunks = {b: bases[b] for b in numbers}
        table: dict[int, tuple[int, int]] = {}
        for base, chunk in chunks.items():
            for at in range(0, len(chunk) - 7, STRIDE):
                table[_key(chunk, at, bits)] = base, at
        for target in range(int(target_bounds[group]), int(target_bounds[group + 1])) if chunks else ():
            found = _shared(_chunk(data, target_offsets, target_lengths, target), chunks, table, bits)
            rows += [(target, base, *counts) for base, counts in found.items()]
    return np.array(rows, np.uint32).reshape(-1, 4)


def _chunk(data: NDArray[np.uint8], offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], row: int) -> bytes:
    start = int(offsets[row])
    return data[start : start + int(lengths[row])].tobytes()


def _key(chunk: bytes, at: int, bits: int) -> int:
    return (int.from_bytes(chunk[at : at + 8], "little") * MULTIPLIER & _MASK64) >> (64 - bits)


def _shared(
    chunk: bytes, bases: dict[int, bytes], table: dict[int, tuple[int, int]], bits: int
) -> dict[int, tuple[int, int]]:
    """Return base -> (bytes, matches) of one target, in the order of the first matches."""
    found: dict[int, tuple[int, int]] = {}
    at = anchor = 0
    diagonal: tuple[int, int] | None = None
    while len(chunk) - at >= 8:
        here = chunk[at : at + 8]
        source = diagonal if diagonal is not None and bases[diagonal[0]][diagonal[1] :][:8] == here else None
        if source is None:
            source = table.get(_key(chunk, at, bits))
        if source is not None and bases[source[0]][source[1] :][:8] == here:
            base, start = source
            back = 0
            while at - back > anchor and start > back and chunk[at - back - 1] == bases[base][start - back - 1]:
                back += 1
            ahead = 0
            limit = min(len(chunk) - at, len(bases[base]) - start)
            while ahead < limit and chunk[at + ahead] == bases[base][start + ahead]:
                ahead += 1
            if back + ahead >= MATCH_MIN:
                had = found.get(base, (0, 0))
                found[base] = had[0] + back + ahead, had[1] + 1
                at += ahead
                anchor = at
                diagonal = base, start + ahead
                continue
        step = 1 + ((at - anchor) >> STEP_LOG2)
        if len(chunk) - at < step:
            break
        at += step
        if diagonal is not None:
            base, start = diagonal
            diagonal = (base, start + step) if len(bases[base]) - start >= step else None
    return found
