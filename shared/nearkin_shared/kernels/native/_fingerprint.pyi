"""Fingerprints, check tags and names, compiled. Invariant: every argument is checked before a byte is read.

In every function `payload` is a C-contiguous buffer of bytes (read-only will do), `offsets` uint64 and `lengths`
uint32, both of shape (n,), in bytes: chunk i is `payload[offsets[i] : offsets[i] + lengths[i]]`. Chunks may overlap,
repeat and be empty; n may be 0. `BadInput` names the argument of wrong type, dtype or shape, or the first chunk that
does not lie within the payload. The arrays are copied before they are checked, and the work runs with the GIL released.
"""

import numpy as np
from numpy.typing import NDArray

from nearkin_shared.kernels.reference.fingerprint_reference import Payload, TagKey

def cpu_path() -> str:
    """Return the code path in use: "base", "avx2" or "avx512".

    The best one the machine has, or the lower one that `NEARKIN_CPU` asked for when this module was imported.
    """

def sha1_engines() -> dict[str, float]:
    """Return the SHA-1 engines here, of "portable", "sha-ni", "avx2" and "avx512", and nanoseconds a 64-byte block.

    Measured when this module was imported, with all lanes of the engine busy; `NEARKIN_CPU` leaves some out.
    """

def sha1_choice() -> tuple[str, str | None, int]:
    """Return which engines that measurement chose: for few chunks, for many, and how many at most are few.

    The second is None where none of several lanes is faster than the first.
    """

def sha1_many(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], *, engine: str | None = None
) -> NDArray[np.uint8]:
    """Return the SHA-1 of every chunk: uint8, shape (n, 20).

    SHA-1: FIPS 180-4, section 6.1. Up to sixteen chunks side by side (Gueron and Krasnov, "Simultaneous hashing of
    multiple messages", 2012): a lane takes the next chunk as soon as its own ends, and the last few chunks go to the
    engine that is quickest for few (docs/adr/0013). `engine` demands one of `sha1_engines` for all of them, to
    test or measure it. Raises `BadInput`.
    """

def check_tags(
    payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32], key: TagKey
) -> NDArray[np.uint64]:
    """Return every chunk's check tag under `key`: uint64, shape (n,).

    Without knowledge of the key, any two contents share a tag with a chance of at most 2^-62.99, whatever their
    SHA-1 (docs/adr/0002-keyed-check-tag.md). NH: Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC", CRYPTO '99,
    section 4; SipHash: Aumasson and Bernstein, INDOCRYPT 2012, section 2. Raises `BadInput`, also when `key` is no
    `TagKey`.
    """

def zero_mask(payload: Payload, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return which chunks hold nothing but zero bytes: bool, shape (n,). An empty chunk does.

    Reading stops at a chunk's first other byte. The built-in zero chunk: MAD2, MSST 2010. Raises `BadInput`.
    """

def names(fingerprints: NDArray[np.uint8], tags: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return every chunk's compound name: uint8, shape (n, 32).

    Bytes 0 to 19 are the fingerprint, 20 to 27 the check tag and 28 to 31 the length, both little-endian. Raises
    `BadInput` when `fingerprints` is not uint8 (n, 20), `tags` not uint64 (n,) or `lengths` not uint32 (n,).
    """
