"""xdelta3 kernel. Invariant: ranges are checked before the loop, and a delta decodes exactly or is Corrupt."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def encode_many(
    targets: Buffer,
    target_offsets: NDArray[np.uint64],
    target_lengths: NDArray[np.uint32],
    bases: Buffer,
    base_offsets: NDArray[np.uint64],
    base_lengths: NDArray[np.uint32],
    *,
    level: int = 1,
    limit_bytes: NDArray[np.uint32] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return the delta of every target against its base, in VCDIFF (RFC 3284, default code table, Adler-32 a window).

    `targets` and `bases` are any C-contiguous bytes; offsets (uint64, bytes) and lengths (uint32, bytes) are shaped
    (n,) and cut one target and one base a pair out of them. A target and a base are at most `PAIR_BYTES_MAX` (16 MiB)
    each; either may be empty. `level` 1 (fastest) to 9 is xdelta3's own. `limit_bytes` is shaped (n,); without it a
    pair's limit is its target's length.

    The answer is (deltas, delta_lengths): uint8 of shape (sum of delta_lengths,), the deltas in pair order without
    gaps, and uint32 of shape (n,). A pair whose delta would be longer than its limit has length 0 and no bytes.

    One call, which holds no GIL, keeps one arena for all its pairs: at most 1 MiB and, for each byte of the largest
    target and base, 14 and 2 bytes at level 1, 22 and 8 above; twice that while it grows. 8 KiB chunks take 128 KiB.
    The deltas take at most twice the sum of their limits until they are returned.

    The bytes are those of the xdelta3 C library 3.1.1 (J. MacDonald, "File System Support for Delta Compression",
    2000) and may change with it: only what they decode to is fixed.

    Raises BadInput for a wrong array, a range outside its payload, a length or level out of bounds; PermanentError
    where the library refuses a pair; MemoryError.
    """

def decode_many(
    deltas: Buffer,
    delta_offsets: NDArray[np.uint64],
    delta_lengths: NDArray[np.uint32],
    bases: Buffer,
    base_offsets: NDArray[np.uint64],
    base_lengths: NDArray[np.uint32],
    target_lengths: NDArray[np.uint32],
) -> NDArray[np.uint8]:
    """Return every target, decoded from its delta and base, as one uint8 array of shape (sum of target_lengths,).

    Arguments are shaped and bounded as in `encode_many`; a delta is at most `DELTA_BYTES_MAX` (32 MiB). Any number of
    windows, with copies from the base (VCD_SOURCE) or from the target so far (VCD_TARGET), with or without checksum,
    and an application header (skipped) are read. Secondary compression and own code tables are refused.

    In addition to the result a call, which holds no GIL, takes 4 KiB for any delta, and time linear in delta and
    target lengths.

    Raises Corrupt, naming the first such pair and what was wrong, unless a delta is well-formed to its last byte,
    decodes to exactly its target's length and agrees with its checksums; BadInput as `encode_many` does. Source:
    RFC 3284, sections 2 to 5.
    """
