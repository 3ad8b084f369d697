"""Types and contracts of the compiled rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def numbered(values: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Return (int32[n] each value's number, uint64[k] the distinct values): numbered by their first mention.

    `values` uint64[n]. Raises BadInput for another dtype. The GIL is released.
    """

def rows_to_fill(rows: NDArray[np.intp], sizes: NDArray[np.uint32], room_bytes: int) -> int:
    """Return how many of the rows, the first ones, fill the room: up to and with the one by which it is full, or all.

    `rows` intp[n] index `sizes` uint32[m], bytes. One at least, where there is one. Raises BadInput for other dtypes,
    and for a row that is looked at and is not there.
    """

def take_rows(
    tables: Sequence[NDArray[Any] | None], which: NDArray[np.int32], ordinals: NDArray[np.uint32], out: NDArray[Any]
) -> int:
    """Copy row `ordinals[i]` of tables[which[i]] to out[i]; zeros where that table is None.

    `which` int32[n], `ordinals` uint32[n], `out` and every table one-dimensional, contiguous, of one dtype of plain
    bytes; `out` has n rows. Returns the first i of which the table has no such row, n where all do; later rows
    in `out` is undefined. Raises BadInput for arrays that do not agree. The GIL is released; the caller must not change
    the tables meanwhile.
    """
