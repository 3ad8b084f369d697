"""Types and contracts of the compiled search for co-located rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def rows_beside(
    tables: Sequence[NDArray[Any] | None],
    which: NDArray[np.int32],
    ordinals: NDArray[np.uint32],
    moved: NDArray[np.bool_],
    bounds: NDArray[np.uint32],
    depth_below: int,
    bytes_max: int,
    kind_left_out: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.uint32], NDArray[np.intp]]:
    """Return (tables int32[m], ordinals uint32[m], groups intp[m]) of the rows next to the `moved` ones.

    Row i is row `ordinals[i]` of tables[which[i]]; of a table that is None nothing is known. Group g is rows bounds[g]
    to bounds[g + 1]. The rows before and behind a moved one are found for its group, each once, where they are there,
    are not in the group already, are in a block with a row of any group, and are an acceptable base: of 1 to
    `bytes_max` bytes, at a depth below `depth_below`, and of another kind than `kind_left_out`. By group, then by table
    and ordinal, ascending.

    `which` int32[n], `ordinals` uint32[n], `moved` bool[n], `bounds` uint32[g + 1]. Tables are one-dimensional and
    contiguous, of one dtype with fields `lengths` and `blocks` uint32, `depths` and `kinds` uint8. Raises BadInput for
    arrays that do not agree. The GIL is released; the caller must not change the arrays meanwhile.
    """
