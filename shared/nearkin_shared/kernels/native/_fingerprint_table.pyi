"""Types and contracts of the compiled map from names to locations.

Invariant: a call applies all its changes or none; arguments are checked first.
"""

import numpy as np
from numpy.typing import NDArray

class NameTable:
    """Open addressing (linear probing), at most three quarters full, doubling as it fills.

    `key_bytes` is 8 to 40; `max_entries` (1 to 2^40) bounds the entries. A slot takes key_bytes + 13 bytes, so 32-byte
    names cost 60 to 120 bytes each; while it grows or discards, old and new slots exist. Raises `BadInput`
    for other bounds.
    """

    def __init__(self, key_bytes: int, max_entries: int) -> None: ...
    @property
    def key_bytes(self) -> int:
        """Return the width of a key."""
    @property
    def max_entries(self) -> int:
        """Return the bound on entries."""
    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for slots."""
    def get_many(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.bool_]]:
        """Return containers (uint64), ordinals (uint32) and which were found (bool), each of shape (n,).

        A key not found has container 0 and ordinal 0. Raises `BadInput`.
        """
    def put_first_many(
        self, keys: NDArray[np.uint8], containers: NDArray[np.uint64], ordinals: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        """Insert the keys that are not there yet, the first of equal rows winning; return which rows were inserted.

        Containers are uint64 (n,), ordinals uint32 (n,), the answer bool (n,). Raises `BadInput`, and `RetryableError`
        when `max_entries` would be exceeded or memory is short: then nothing was inserted.
        """
    def discard_containers(self, ids: NDArray[np.uint64]) -> int:
        """Drop every entry whose container is among `ids` (any number, any order); return how many were dropped.

        Takes time proportional to the whole table. Raises `BadInput`, and `RetryableError` when memory is short: then
        nothing was dropped.
        """
    def clear(self) -> None:
        """Drop every entry and give the memory back."""
    def __len__(self) -> int: ...

def first_occurrence(keys: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return for each row of `keys` (uint8, (n, 1 to 40)) the index of the first row equal to it: int64, shape (n,).

    Raises `BadInput`, and `RetryableError` when memory is short.
    """
