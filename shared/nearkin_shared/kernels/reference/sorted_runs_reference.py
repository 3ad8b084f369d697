"""Define lookups in sorted runs in plain Python: a bisection for each key in each run.

The compiled kernel equals it.
"""

from __future__ import annotations

from bisect import bisect_left
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from nearkin_shared.errors import BadInput
from nearkin_shared.kernels.reference.scatter_copy_reference import check_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NAME = Struct(">BQ")
HEAD_BYTES = 8
CHILDREN_BYTES = 8
FAN_BITS = 3
DEPTH_MAX = 20
"""Below it runs are as long as they get: 60 bits that are the same."""


def find_in_runs(
    get: Callable[[bytes], memoryview | None],
    heads: NDArray[np.uint64],
    tails: NDArray[np.uint8],
    values: NDArray[np.uint8],
    found: NDArray[np.bool_],
) -> None:
    """Look keys up in the runs of a tree: see `_runs.pyi`."""
    check_keys(heads, tails, values, found)
    tail_bytes = tails.shape[1]
    row_bytes = tail_bytes + values.shape[1]
    level = {0: list(range(len(heads)))} if len(heads) else {}
    for depth in range(DEPTH_MAX + 1):
        below = dict[int, list[int]]()
        for bits, asked in level.items():
            run = get(NAME.pack(depth, bits))
            if run is None:
                continue
            held = np.frombuffer(run, np.uint8)
            check_run(len(held), row_bytes)
            count = (len(held) - CHILDREN_BYTES) // (HEAD_BYTES + row_bytes)
            rows_at = CHILDREN_BYTES + count * HEAD_BYTES
            sorted_heads: list[int] = held[CHILDREN_BYTES:rows_at].copy().view(np.uint64).tolist()
            rows = held[rows_at:].reshape(count, row_bytes)
            for key in asked:
                at = count if found[key] else bisect_left(sorted_heads, int(heads[key]))
                while at < count and sorted_heads[at] == heads[key]:
                    if np.array_equal(rows[at, :tail_bytes], tails[key]):
                        values[key], found[key] = rows[at, tail_bytes:], True
                        break
                    at += 1
                child = int(heads[key]) >> (64 - FAN_BITS * (depth + 1))
                if int(held[0]) >> (child % (1 << FAN_BITS)) & 1:
                    below.setdefault(child, []).append(key)
        level = below


def check_keys(
    heads: NDArray[np.uint64], tails: NDArray[np.uint8], values: NDArray[np.uint8], found: NDArray[np.bool_]
) -> None:
    """Raise BadInput for arrays that do not agree, and heads that do not ascend."""
    check_array("heads", heads, np.uint64)
    check_array("found", found, np.bool_)
    for name, table in (("tails", tails), ("values", values)):
        if table.dtype != np.uint8 or table.ndim != 2 or not table.flags.c_contiguous:
            raise BadInput(f"{name} {table.dtype}{list(table.shape)}: want contiguous rows of bytes")
    if not len(heads) == len(tails) == len(values) == len(found):
        raise BadInput(
            f"{len(heads)} heads, {len(tails)} tails, {len(values)} values, {len(found)} found: want as many of each"
        )
    if not found.flags.c_contiguous:
        raise BadInput("found: want a contiguous array")
    falls = np.flatnonzero(heads[1:] < heads[:-1])
    if len(falls):
        raise BadInput(f"heads fall after row {int(falls[0])}: want them in ascending order")


def check_run(run_bytes: int, row_bytes: int) -> None:
    """Raise BadInput for a run that is no whole number of entries."""
    if run_bytes < CHILDREN_BYTES or (run_bytes - CHILDREN_BYTES) % (HEAD_BYTES + row_bytes):
        raise BadInput(f"a run of {run_bytes} bytes: want {CHILDREN_BYTES}, and entries of {HEAD_BYTES + row_bytes}")
