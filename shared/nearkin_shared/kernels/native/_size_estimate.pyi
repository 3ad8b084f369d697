"""Types and contracts of the compiled estimate."""

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.features_reference import Payload

def compressed_bytes_estimate(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Return uint32[n]: about what zstd at level 3 would make of each chunk alone, in bytes, its frame's 10 included.

    For ranking candidates, not for sizing buffers: over 2 to 32 KiB chunks of text, source, JSON and binaries its mean
    lies within 12 per cent of the truth (5 at 8 KiB); it is never above the chunk's length + 10. `payload` is any
    C-contiguous bytes-like object, `offsets` uint64[n] and `lengths` uint32[n] are bytes into it; n = 0 and empty
    chunks (estimate 10) are fine. Raises `nearkin_shared.errors.BadInput`, naming the value, for arrays of another type
    or shape and for a chunk that reaches past the payload. The GIL is released; the caller must not change the buffers
    meanwhile.
    """
