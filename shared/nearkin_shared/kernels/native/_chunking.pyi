"""Chunking, compiled. Invariant: every function answers exactly as its namesake in `_chunking_reference`."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Payload: TypeAlias = Buffer | NDArray[Any]

def fastcdc_cut(data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool) -> NDArray[np.uint32]:
    """Return the lengths of the certain FastCDC chunks at the start of `data`.

    data: C-contiguous bytes-like, any length, read-only accepted; it starts at a chunk's start.
    min_bytes, target_bytes, max_bytes: 64 <= min <= target <= max <= 921600, bytes. n is log2(target_bytes), rounded.
    final: no byte follows `data`. When false, a chunk is certain only while max_bytes remain from its start.
    Returns uint32[chunks], bytes, each min_bytes to max_bytes. When final, they add up to len(data) and the last may
    be shorter.
    A chunk ends after the first byte, past min_bytes, where hash & mask == 0: a mask of n + 2 bits up to target_bytes,
    one of n - 2 bits after it (normalised chunking, level 2). The hash is Gear's, over exactly the last 64 bytes.
    Errors: BadInput naming the value. Source: FastCDC (USENIX ATC '16): padded masks, cut-point skipping, normalised
    chunking; and its successor (IEEE TPDS 2020): two bytes a step.
    """

def rabin_cut(
    data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool, window_bytes: int = 48
) -> NDArray[np.uint32]:
    """Return the lengths of the certain chunks that Rabin fingerprints cut at the start of `data`.

    data, min_bytes, max_bytes, final, returned: as for `fastcdc_cut`.
    target_bytes: a power of two 2^n, 64 to max_bytes: the mean distance from min_bytes to a match, so it may be below
    min_bytes.
    window_bytes: 16 to min(256, min_bytes), bytes.
    A chunk ends after the first byte, past min_bytes, where the low n bits of the window's remainder modulo an
    irreducible polynomial of degree 53 over GF(2) equal the low n bits of TARGET_PATTERN. `expected_chunk_bytes` gives
    the mean on random data.
    Errors: BadInput naming the value. Source: LBFS (SOSP '01), section 3.1; PRUNE sections 2.2 and 4.1.
    """

def inck_cut(
    data: Payload, min_bytes: int, target_bytes: int, max_bytes: int, final: bool, window_bytes: int = 48
) -> NDArray[np.uint32]:
    """Return the lengths of the certain chunks that Incremental Modulo-K cuts at the start of `data`.

    Arguments, returned, errors: as for `rabin_cut`. The hash is the window, read as a big-endian number, modulo
    M = 2^31 - 1. It rolls as ((h - out * 256^(window - 1)) * 256 + in) mod M (PRUNE section 4.2, equation 3); the
    remainder is the sum of the low 31 bits and the rest (equation 4): a shift and an add, no division.
    """
