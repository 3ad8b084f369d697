"""Types and contracts of the compiled features.

Common to all: `payload` is any C-contiguous bytes-like object, `offsets` uint64[n] and `lengths` uint32[n] are bytes
into it. The answer is uint64[n, super_features]; a row of zeros means "no super-feature", and a real one is never 0.

- `features` 1 to 64, a multiple of `super_features`.
- A chunk shorter than `features * window_bytes` bytes (576 by default) has a row of zeros: below it a Finesse sub-chunk
  would not hold one whole window.
- Only whole windows are fingerprinted; a window never reaches before its chunk or sub-chunk.
- `window_bytes` 4 to 256 for the Rabin fingerprints; for `odess` 32 + sampling_bits to 64.

All raise `nearkin_shared.errors.BadInput`, naming the value, for a parameter out of range, an array of another type or
shape, and a chunk that reaches past the payload. The GIL is released; the caller must not change the buffers meanwhile.
"""

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.features_reference import Payload

def ntransform(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """Return N-transform super-features, uint64[n, super_features] (Finesse, FAST '19, section 3, Algorithm 1).

    Feature i is the maximum over all windows of (m_i * FP + a_i) mod 2^32, FP being the window's 32-bit Rabin
    fingerprint; SF_x hashes features x*k to x*k + k - 1 (equation 2), k = features / super_features.
    """

def ntransform_scalar(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """Return what `ntransform` returns, from scalar code on every machine (to compare as in the paper's Figure 4)."""

def finesse(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """Return Finesse super-features, uint64[n, super_features] (FAST '19, section 4.2, Algorithm 2 and Figure 3).

    Feature i is the largest Rabin fingerprint in the i-th of `features` sub-chunks of floor(length / features) bytes
    (the few bytes left over are not read). Each run of `super_features` neighbouring features is sorted; SF_0 hashes
    the largest of every run, SF_1 the second largest, and so on.
    """

def finesse_scalar(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
) -> NDArray[np.uint64]:
    """Return what `finesse` returns, from scalar code on every machine: for comparisons as in the paper's Figure 4."""

def odess(
    payload: Payload,
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    *,
    features: int = 12,
    super_features: int = 3,
    window_bytes: int = 48,
    sampling_bits: int = 7,
) -> NDArray[np.uint64]:
    """Return Odess super-features, uint64[n, super_features] (Zou et al., ICDE '21, section III).

    A Gear hash runs over the chunk; of the positions with a whole window behind them, those whose `sampling_bits` (0 to
    16) highest of `window_bytes` hash bits are zero are sampled, one in 2^sampling_bits. The 32 bits below are
    transformed and grouped as in `ntransform`. A chunk in which nothing is sampled (constant bytes, say) has a row of
    zeros.
    """

def cpu_path() -> str:
    """Return the path in use: "base", "avx2" or "avx512" (needs F, BW, VL and GFNI), lowered by NEARKIN_CPU at
    import.
    """
