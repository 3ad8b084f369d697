"""Types and contracts of the compiled runs."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

def find_in_runs(
    get: Callable[[bytes], memoryview | None],
    heads: NDArray[np.uint64],
    tails: NDArray[np.uint8],
    values: NDArray[np.uint8],
    found: NDArray[np.bool_],
) -> None:
    """Look keys up in the runs of a tree; write found values to `values` and mark them in `found`.

    Of several runs that have a key the shallowest counts.

    A key is its head and its tail: `heads` uint64[n], ascending, `tails` uint8[n, t], `values` uint8[n, v], both
    contiguous, `found` bool[n]: a row that is marked already is left as it is. `get` returns the run of a name, as
    bytes that stay where they are until this returns, or None; a name is a depth, uint8, and 3 * depth (0 to 60) bits
    as uint64, big-endian. A run has heads that begin with its bits: 8 bytes, whose first states bit by bit which
    children there are, then m heads uint64, ascending, native order, then m rows of t bytes of tail and v of value. Of
    a run in which they do not ascend nothing else is wrong than what is found.

    Raises BadInput for arrays that do not agree, heads that do not ascend and a run of another size. The GIL is
    released while the runs of one depth are read.
    """
