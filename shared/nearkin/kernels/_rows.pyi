"""Types and contracts of the compiled rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def numbered(values: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Return (int32[n] each value's number, uint64[k] the distinct values): numbered by their first mention.

    `values` uint64[n]. Raises BadInput for another dtype. The GIL is released.
    """

def take_rows(
    tables: Sequence[NDArray[Any] | None], which: NDArray[np.int32], ordinals: NDArray[np.uint32], out: NDArray[Any]
) -> int:
    """Copy row `ordinals[i]` of tables[which[i]] to out[i]; zeros where that table is None.

    `which` int32[n], `ordinals` uint32[n], `out` and every table one-dimensional, contiguous, of one dtype of plain
    bytes; `out` has n rows. Returns the first i of which the table has no such row, n where all do; what comes after it
    in `out` is undefined. Raises BadInput for arrays that do not agree. The GIL is released.
    """
