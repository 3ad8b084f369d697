"""Types and contracts of the compiled overlap."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from nearkin_shared.kernels.reference.features_reference import Payload

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
    """Return uint32[r, 4]: target, base, bytes of the target that matches in that base cover, how many matches.

    Group g is targets target_bounds[g] to target_bounds[g + 1] and the bases that base_bounds names the same way; a
    target is compared with the bases of its group alone. Matches have 16 bytes at least and do not overlap, so a
    target's rows sum up to its length at most. Rows come by target, a target's in the order of its first matches; pairs
    that share nothing have none. A target is lengths[i] bytes of `targets` from offsets[i] on, a base those of
    buffers[which[i]]. All buffers are C-contiguous bytes-like objects, offsets uint64[n], lengths uint32[n] bytes,
    which int32[n], bounds uint32[g + 1] ascending from 0 to n. The bases of a group have 8 GiB at most.

    Raises `nearkin_shared.errors.BadInput`, naming the value, for arrays of another type or shape, chunks that reach
    past their buffer, bounds out of order; MemoryError. The GIL is released; the caller must not change the buffers
    meanwhile.
    """
