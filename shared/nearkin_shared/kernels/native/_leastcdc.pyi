"""The chunker `leastcdc`, compiled. Invariant: it answers exactly as its namesake in `_leastcdc_reference`."""

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.chunking_reference import Payload

def leastcdc_cut(
    data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool, *, path: str | None = None
) -> NDArray[np.uint32]:
    """Return the lengths of the certain chunks at the start of `data`, cut where a window's rank is least.

    data: C-contiguous bytes-like, any length, read-only accepted; it starts at a chunk's start.
    min_bytes, target_bytes, max_bytes: 64 <= min <= target <= max <= 921600, bytes.
    final: no byte follows `data`. When false, a chunk is certain only while max_bytes remain from its start.
    path: of cpu_paths(); by default cpu_path(). It changes the speed alone.
    Returns uint32[chunks], bytes, each min_bytes to max_bytes. When final, they add up to len(data) and the last may
    be shorter.
    A chunk ends at the least candidate of lengths in (low, high]: low is the greater of min_bytes and target_bytes / 2,
    high is as far above the target (max_bytes at most); among equals at the first. Without any it ends at the first
    candidate above, at last at max_bytes. On random data the mean chunk is target_bytes and 2 %. From targets
    of 2 KiB up, a run of one byte value has no candidate.
    Errors: BadInput naming the value; ConfigError naming a path that this machine lacks.
    Source: own, docs/adr/0012-leastcdc-simd-chunker.md.
    """

def cpu_path() -> str:
    """Return which path runs: `base`, `avx2` or `avx512`."""

def cpu_paths() -> tuple[str, ...]:
    """Return the paths that this machine has, the narrowest first."""
