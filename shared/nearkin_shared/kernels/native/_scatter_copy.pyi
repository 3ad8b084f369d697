"""Types and contracts of the scatter-copy kernel.

Invariant: every slice is checked against its buffer and its target before one byte is copied.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def gather(
    buffers: Sequence[Buffer],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    out: Buffer,
    out_offsets: NDArray[np.uint64],
) -> None:
    """Copy slice i, `lengths[i]` bytes at `offsets[i]` of `buffers[which[i]]`, to `out_offsets[i]` of `out`.

    All arrays are shaped (n,): which int32 (an index into buffers), offsets and out_offsets uint64 (bytes), lengths
    uint32 (bytes). Buffers are any C-contiguous bytes, `out` a writable one. Slices are copied in order: where targets
    overlap the later slice wins. Bytes of `out` that no slice covers are left alone.

    Raises BadInput, before anything is copied, for a wrong array, a buffer that is not there, or a slice that leaves
    its buffer or `out`.
    """

def gather_new(
    buffers: Sequence[Buffer],
    which: NDArray[np.int32],
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
) -> NDArray[np.uint8]:
    """Return the slices joined, in order, in a new uint8 array of shape (sum of lengths,); else as `gather`."""
